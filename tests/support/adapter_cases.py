"""What the tests of sbnet_cupy.jax and of sbnet_cupy.tensorflow share: images, blocks, options."""

import doctest
import importlib
import inspect

import ml_dtypes
import numpy as np

import sbnet_cupy as sb
from support.assertions import assert_close, assert_same, to_numpy
from support.doctests import doctests_of

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
CHANNELS = 16  # of units: whole 16-byte vectors, which their CUDA kernel needs


def normal(*shape, seed=0, dtype=np.float32):
    """Return normal numbers, the same at every call."""
    return np.random.default_rng([3, seed]).standard_normal(shape).astype(dtype)


IMAGE = normal(2, 8, 9, CHANNELS, seed=1)


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


def convolution(module, x, w, active, params, bias=None, base=None, **options):
    """Call the layer with its optional arrays by position, as jit and grad want them."""
    return module.sparse_conv2d(x, w, active, params, bias=bias, base=base, **options)


MASKED = [
    {},
    {"strides": 2},
    {"strides": (1, 2), "padding": ((3, 0), (1, 3))},
    {"padding": "VALID"},
    {"precision": "tf32"},
]


def check_mask_conv2d(call, make, options, dtype=np.float32):
    """Assert that ``call(x, w, mask)`` of an adapter gives what the package does."""
    x, w = image({}, dtype), normal(3, 2, 3, 4, dtype=dtype)
    for mask in (MASK > 0, MASK * normal(*MASK.shape), MASK[..., None], MASK[:, None]):
        expected = sb.mask_conv2d(x.astype("f8"), w.astype("f8"), mask, **options)
        size = sb.mask_conv2d(*(np.abs(a).astype("f8") for a in (x, w)), np.abs(mask), **options)
        actual = to_numpy(call(make(x), make(w), make(mask)))
        assert actual.dtype == dtype
        # A sum of 18 products is rounded, and its product with the mask.
        assert_close(actual, expected, terms=20, dtype=dtype, magnitude=size + np.abs(expected))


def unit_weights(dtype, tables=np.float32, seed=0):
    """Return the weights of a unit with kernels and tables in these dtypes."""
    arrays = sb.BottleneckWeights.random(CHANNELS, 8, dtype="float64", seed=seed)._arrays()
    dtypes = [dtype] * 3 + [tables] * 6
    return sb.BottleneckWeights(*(a.astype(t) for a, t in zip(arrays, dtypes, strict=True)))


def unit_layer():
    """Return block parameters, and the active blocks of the mask, for a unit on IMAGE."""
    params = sb.calc_block_params_res_block(IMAGE.shape, 5, [1, 3, 1])
    return params, sb.reduce_mask(MASK, params.bcount, capacity=30, **grid_of(params))


def hand_over(values, make):
    """Return the values with each array, also those in pairs and containers, handed over."""
    found = []
    for value in values:
        if isinstance(value, np.ndarray):
            value = make(value)
        elif isinstance(value, tuple):
            value = tuple(map(make, value))
        elif isinstance(value, sb.BottleneckWeights):
            value = value._map_arrays(make)
        found.append(value)
    return found


def check_examples(module):
    """Assert that the examples of an adapter's module run, and that there are some."""
    runner = doctest.DocTestRunner()
    tests = list(doctests_of(importlib.import_module(module)))
    for test in tests:
        runner.run(test)
    assert not runner.summarize().failed and sum(len(test.examples) for test in tests) >= 5


NOT_OF_THE_PACKAGE = {  # functions that adapters alone have: what they take
    "masked_batch_norm": ["x", "running_mean", "running_var", "weight", "bias", "training",
                          "momentum", "eps", "activation"],
    "pack_weights": ["weights", "function", "arguments"],
}  # fmt: skip


def check_parameters(adapter):
    """Assert that an adapter's functions take what the package's take, but ``out``."""
    for name in NOT_OF_THE_PACKAGE.keys() & set(adapter.__all__):
        parameters = NOT_OF_THE_PACKAGE[name]
        assert [*inspect.signature(getattr(adapter, name)).parameters] == parameters
    for name in set(adapter.__all__) - set(NOT_OF_THE_PACKAGE):
        known = inspect.signature(getattr(sb, name)).parameters
        taken = inspect.signature(getattr(adapter, name)).parameters
        assert [*taken] == [parameter for parameter in known if parameter != "out"]
        assert all(taken[parameter].default == known[parameter].default for parameter in taken)
