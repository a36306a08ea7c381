"""Cases of conv2d_grad: gradients to start from, what loops make of them, and calls."""

import numpy as np
from hypothesis import example

from sbnet_cupy import conv2d_grad
from support import conv_oracles as oracles
from support.assertions import assert_same
from support.conv_cases import ORDER, Case


def output_shape(case):
    """NHWC shape of the convolution's result."""
    return oracles.conv2d(np.zeros(case.image), case.numbers()[1], case.strides, case.padding).shape


def gradient_of(case, *, whole):
    """NHWC gradient of the result: whole numbers, or normally distributed ones."""
    rng, shape = np.random.default_rng(case.seed + 2), output_shape(case)
    grad = rng.integers(-2, 3, shape) if whole else rng.standard_normal(shape)
    return grad.astype(case.dtype)


def gradients_by_loops(case, grad, x, w):
    """dx and dw, laid out as the options say."""
    options = (case.strides, case.padding)
    dx = oracles.data_gradient(grad, w, x.shape[1:3], *options)
    dw = oracles.weight_gradient(grad, x, w.shape[:2], *options)
    return dx.transpose(ORDER[case.data_format]), dw.transpose(ORDER[case.w_format])


def run(case, xp, grad, x, w, **options):
    """Call with arrays of the library, and see that nothing was modified."""
    originals = [
        np.ascontiguousarray(a.transpose(ORDER[order]))
        for a, order in ((grad, case.data_format), (x, case.data_format), (w, case.w_format))
    ]
    inputs = [xp.asarray(a) for a in originals]
    tables = {k: xp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    gradients = conv2d_grad(*inputs, **case.options, **tables)
    for array, original in zip(inputs, originals, strict=True):
        assert_same(array, xp.writable(original), allow_nan=True)
    return gradients


def check_exact(case, xp):
    """The gradients of whole numbers equal the loops to the bit, where they fit the dtype."""
    x, w = case.integers()
    grad = gradient_of(case, whole=True)
    bias = np.zeros(case.channels, np.float32)
    gradients = run(case, xp, grad, x, w, bias=bias)
    dx, dw = gradients_by_loops(case, grad, x, w)
    db = grad.astype(np.float64).sum(axis=(0, 1, 2))
    for actual, expected, dtype in (
        (gradients.x, dx, case.dtype), (gradients.w, dw, case.dtype), (gradients.bias, db, "f4")
    ):  # fmt: skip
        assert_same(actual, xp.writable(expected.astype(dtype)), signed_zero=False)
    assert gradients.scale is None


EXAMPLES = (
    Case(image=(1, 0, 0, 2), padding=((2, 2), (2, 2))),  # made of padding only
    Case(image=(1, 5, 5, 0)),  # no channels
    Case(image=(2, 7, 8, 3), kernel=(2, 2), strides=(3, 3), padding="VALID"),  # pixels not read
    Case(image=(17, 4, 4, 8), channels=8, dtype=np.dtype("f2")),  # batches 16 + 1
    Case(image=(2, 4, 4, 3), kernel=(1, 1), data_format="NCHW", w_format="OIHW"),
    Case(image=(1, 5, 5, 2), padding=((4, 0), (0, 3))),  # more padding than kernel
)


def with_examples(test):
    for case in EXAMPLES:
        test = example(case=case)(test)
    return test
