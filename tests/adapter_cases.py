"""What the tests of sbnet_cupy.jax and of sbnet_cupy.tensorflow share: images, blocks, options."""

import ml_dtypes
import numpy as np
from assertions import assert_same, to_numpy

import sbnet_cupy as sb

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_RNG = np.random.default_rng(0)
X = _RNG.standard_normal((2, 8, 9, 3)).astype(np.float32)
MASK = (_RNG.random((2, 8, 9)) < 0.1).astype(np.float32)
COUNT = np.array([5], np.int32)
ROWS = np.array(  # in no order; one row names no image, one lies past the count
    [[1, 0, 1], [0, 0, 0], [7, 0, 0], [0, 1, 1], [1, 2, 2], [0, 1, 0]], np.int32
)
TWICE = np.array([[0, 1, 1], [1, 0, 0], [0, 1, 1], [0, 0, 0], [-1, -1, -1], [1, 1, 1]], np.int32)
PLAIN = {"bsize": (4, 3)}
OVERLAP = {"bsize": (4, 5), "boffset": (-1, -1), "bstride": (2, 3)}
OPTIONS = [
    PLAIN,
    OVERLAP,
    PLAIN | {"transpose": True},
    PLAIN | {"data_format": "NCHW"},
    OVERLAP | {"data_format": "NCHW", "transpose": True},
]


def normal(*shape, seed=0, dtype=np.float32):
    """Return normal numbers, the same at every call."""
    return np.random.default_rng([3, seed]).standard_normal(shape).astype(dtype)


def image(options, dtype=np.float32):
    """Return the image, in the layout of the options."""
    x = X if options.get("data_format") != "NCHW" else X.transpose(0, 3, 1, 2)
    x = 8 * x if np.dtype(dtype).kind in "iu" else x
    return np.ascontiguousarray(x).astype(dtype)


def stack(options, dtype=np.float32):
    """Return a stack of new values, in the layout of the options."""
    shape = sb.sparse_gather(image(options), COUNT, ROWS, **options).shape
    values = np.random.default_rng(1).standard_normal(shape)
    return (8 * values if np.dtype(dtype).kind in "iu" else values).astype(dtype)


def layer(strides=1, bottleneck=False):
    """Return block parameters and the active blocks of the mask, for an image like X."""
    if bottleneck:
        params = sb.calc_block_params_res_block(X.shape, 3 + 2 * strides, [1, 3, 1], strides)
    else:
        params = sb.calc_block_params(X.shape, 3 + 2 * strides, 3, strides)
    return params, sb.reduce_mask(MASK, params.bcount, capacity=30, **grid_of(params))


def grid_of(params):
    """Return the arguments of reduce_mask for a BlockParams."""
    return {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}


def same(actual, expected):
    """Compare arrays of whatever library, bit for bit."""
    assert_same(to_numpy(actual), to_numpy(expected))
