"""tf.nn.conv2d for any number of images and of channels, also none."""

import tensorflow as tf


def convolve_any_number(x, w, strides, padding):
    """Convolve NHWC images; of none come none, and gradients of 0.

    With oneDNN, ``tf.nn.conv2d`` gives no images the shape of its input rather than of its result
    (TensorFlow 2.21), and its gradients raise. So one image of zeros is convolved instead, and
    dropped. It is appended by concat: TensorFlow makes tf.pad a part of the convolution, which then
    pads no images. A kernel of no channels, which TensorFlow refuses, is given one of zeros.
    """
    if w.shape[2] == 0:
        x = tf.pad(x, [[0, 0], [0, 0], [0, 0], [0, 1]])
        w = tf.pad(w, [[0, 0], [0, 0], [0, 1], [0, 0]])

    def convolve():
        return tf.nn.conv2d(x, w, strides, padding)

    def convolve_none():
        zeros = tf.zeros([1, *x.shape[1:]], x.dtype)
        return tf.nn.conv2d(tf.concat([x, zeros], 0), w, strides, padding)[:0]

    count = tf.shape(x)[0] if x.shape[0] is None else x.shape[0]
    if tf.is_tensor(count):
        return tf.cond(tf.equal(count, 0), convolve_none, convolve)
    return convolve() if count else convolve_none()
