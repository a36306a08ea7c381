"""Active blocks of another grid are refused, by every layer of every library, with both grids."""

import re

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy import ShapeError
from support.adapter_cases import normal

X = normal(2, 24, 32, 4)
W = normal(3, 3, 4, 4)
WEIGHTS = sb.BottleneckWeights.random(4, 4)
PARAMS = sb.calc_block_params(X.shape, 10, 3)


def listed(shape, params):
    """Return all blocks of a mask of this shape."""
    grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}
    return sb.reduce_mask(np.ones(shape, bool), params.bcount, **grid)


OTHERS = {  # lists of a smaller image, a larger batch, and blocks of another size
    "image": listed((2, 16, 16), sb.calc_block_params((16, 16), 10, 3)),
    "batch": listed((3, 24, 32), PARAMS),
    "blocks": listed((2, 24, 32), sb.calc_block_params(X.shape, 6, 3)),
}
CALLS = {
    "sparse_conv2d": lambda m, x, w, weights, active: m.sparse_conv2d(x, w, active, PARAMS),
    "sparse_res_block_bottleneck": lambda m, x, w, weights, active: (
        m.sparse_res_block_bottleneck(x, weights, active, PARAMS)
    ),
}


def refused(call, foreign, images=2):
    """Assert that a call names both grids, and takes the pair alone, whose grid it cannot see."""
    both = re.escape(f"{(images, *PARAMS.bcount)}") + ".*" + re.escape(f"{foreign.grid}")
    with pytest.raises(ShapeError, match=rf"^indices must .*{both}"):
        call(foreign)
    call(tuple(foreign))


@pytest.fixture(params=OTHERS)
def foreign(request):
    return OTHERS[request.param]


@pytest.mark.parametrize("name", CALLS)
def test_arrays(xp, foreign, name):
    own = listed((2, 24, 32), PARAMS)._map_arrays(xp.asarray)
    arrays = *map(xp.asarray, (X, W)), WEIGHTS._map_arrays(xp.asarray)

    def call(active):
        return CALLS[name](sb, *arrays, active)

    call(own)  # a call that was checked is not taken for one like it
    refused(call, foreign._map_arrays(xp.asarray))


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_arrays(xp, foreign, name):
    x, w, weights = xp.asarray(X), xp.asarray(W), WEIGHTS._map_arrays(xp.asarray)
    given = w if name == "sparse_conv2d" else weights
    gradient = getattr(sb, f"{name}_grad")
    refused(lambda a: gradient(x, x, given, a, PARAMS), foreign._map_arrays(xp.asarray))


@pytest.mark.parametrize("name", CALLS)
def test_torch(torch, st, device, foreign, name):
    def tensor(array):
        return torch.from_numpy(np.array(array)).to(device)

    arrays = *map(tensor, (X, W)), WEIGHTS._map_arrays(tensor)

    def call(active):
        return CALLS[name](st, *arrays, active)

    call(listed((2, 24, 32), PARAMS)._map_arrays(tensor))
    refused(call, foreign._map_arrays(tensor))


def test_torch_modules(torch, st, foreign):
    x = torch.from_numpy(X.transpose(0, 3, 1, 2).copy())
    active = foreign._map_arrays(torch.from_numpy)
    conv = st.nn.SparseConv2d(4, 4, 3, padding=1, block_size=10)
    unit = st.nn.SparseBottleneck(4, 4, block_size=10)
    for module in (conv, unit, unit.eval()):
        refused(lambda a, module=module: module(x, a, PARAMS), active)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_jax(jax, sbj, foreign, name, jitted):
    arrays = *map(jax.numpy.asarray, (X, W)), WEIGHTS._map_arrays(jax.numpy.asarray)

    def call(active):
        return CALLS[name](sbj, *arrays, active)

    refused(jax.jit(call) if jitted else call, foreign._map_arrays(jax.numpy.asarray))


@pytest.mark.parametrize("name", CALLS)
def test_tensorflow(tf, sbt, foreign, name):
    arrays = *map(tf.constant, (X, W)), WEIGHTS._map_arrays(tf.constant)

    def call(active):
        return CALLS[name](sbt, *arrays, active)

    refused(call, foreign._map_arrays(tf.constant))


def test_tensorflow_graph_of_an_unknown_batch(tf, sbt):
    """What is known is compared: not the number of images."""
    arrays = [tf.TensorSpec([None, *X.shape[1:]]), tf.TensorSpec([None, 24, 32])]
    grid = {"bsize": PARAMS.bsize, "boffset": PARAMS.boffset, "bstride": PARAMS.bstride}

    def convolve(x, mask, bcount):
        active = sbt.reduce_mask(mask, bcount, **grid)
        return sbt.sparse_conv2d(x, tf.constant(W), active, PARAMS)

    right = tf.function(lambda x, mask: convolve(x, mask, PARAMS.bcount), input_signature=arrays)
    assert right(tf.constant(X), tf.ones(X.shape[:3])).shape == X.shape
    wrong = tf.function(lambda x, mask: convolve(x, mask, (2, 2)), input_signature=arrays)
    with pytest.raises(ShapeError, match=r"\(None, 3, 4\).*\(None, 2, 2\)"):
        wrong(tf.constant(X), tf.ones(X.shape[:3]))
