"""A convolution that oneDNN gets wrong on a CPU, and an equal one that it gets right.

The convolutions of PyTorch and TensorFlow come from oneDNN. Its implementation
``brg_conv_fwd:avx512_core`` returns wrong float32 values, and no error, where all of this holds:

- the image is NHWC (channels_last) with one channel;
- the result is one column wide and more than one row high;
- the step along the width is larger than 1, and that along the height is 1;
- the kernel is wider than 1.

Seen with oneDNN 3.7.3 (TensorFlow 2.21) and 3.12.0 (PyTorch 2.13), for any number of images and
output channels, in about two thirds of such calls; in none of 35,000 others, in none with AVX2, and
in no gradient. But in bfloat16, and with any step along the height, the gradient of a kernel of one
column reads past the end of the images, and is NaN where that is. A result of one column needs no
step: cut to the columns that the kernel sees, the same convolution has a step of 1.
"""


def step_to_one_column(channels, width, kernel_width, strides):
    """Return the strides to convolve an NHWC image of ``kernel_width`` columns by; None: as asked.

    Those are for the first ``kernel_width`` columns of the image, which give the whole result.
    """
    one_column = 0 <= width - kernel_width < strides[1]
    return (strides[0], 1) if channels == 1 and strides[1] > 1 and one_column else None
