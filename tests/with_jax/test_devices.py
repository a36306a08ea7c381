"""The JAX adapter on several devices, and what only a GPU has: streams and command buffers.

Each test is a program of its own, because XLA reads its flags once.
"""

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
import sbnet_cupy as sb, sbnet_cupy.jax as sbj

devices = jax.devices()[:2]
mesh = Mesh(np.array(devices), ("batch",))
rng = np.random.default_rng(0)
x = rng.standard_normal((4, 8, 8, 3)).astype(np.float32)
mask = rng.random((4, 8, 8)) < 0.05
w = rng.standard_normal((3, 3, 3, 5)).astype(np.float32)
params = sb.calc_block_params(x.shape, 6, w.shape)
grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}

def convolve(x, mask, w):
    active = sbj.reduce_mask(mask, params.bcount, capacity=16, **grid)
    overlapping = sbj.sparse_gather(x, *active, **grid, activation="relu")
    x = sbj.sparse_scatter(overlapping, *active, x, add=True, atomic=True, **grid)
    return sbj.sparse_conv2d(x, w, active, params, activation="silu")

def loss(w, x, mask):
    y = convolve(x, mask, w)
    return (y * y).sum()

def shard_loss(w, x, mask):
    return jax.lax.psum(loss(w, x, mask), "batch")

whole = P("batch"), P("batch"), P()
sharded = jax.jit(jax.shard_map(convolve, mesh=mesh, in_specs=whole, out_specs=P("batch")))
expected = jax.jit(convolve)(x, mask, w)
y = sharded(x, mask, w)
assert len(y.sharding.device_set) == len(devices) == DEVICES, y.sharding
np.testing.assert_array_equal(np.asarray(y), np.asarray(expected))
assert float(jnp.abs(expected).sum()) > 0

specs = {"in_specs": (P(), P("batch"), P("batch")), "out_specs": P()}
total = jax.shard_map(shard_loss, mesh=mesh, **specs)
gradient = jax.jit(jax.grad(total))(w, x, mask)
whole = jax.jit(jax.grad(loss))(w, x, mask)
# Two partial sums are added where one sum was made: 4 * 64 products.
bound = 257 * np.finfo(np.float32).eps * np.abs(whole).max() * 8
np.testing.assert_allclose(np.asarray(gradient), np.asarray(whole), rtol=0, atol=bound)

# The fused layers, with whole numbers: their sums are exact, and so are sums of partial sums.
x, unit_x = (rng.integers(-2, 3, (4, 8, 8, c)).astype(np.float32) for c in (3, 16))
w, base = (rng.integers(-2, 3, s).astype(np.float32) for s in (w.shape, (4, 8, 8, 5)))
unit_params = sb.calc_block_params_res_block(unit_x.shape, 6, [1, 3, 1])
unit_grid = {name: getattr(unit_params, name) for name in grid}
shapes = (1, 1, 16, 4), (3, 3, 4, 4), (1, 1, 4, 16), (16,), (16,), (4,), (4,), (4,), (4,)
weights = [np.clip(rng.integers(-1, 2, s), -1, 1).astype(np.float32) for s in shapes]
weights = sb.BottleneckWeights(*weights)
fused = {"precision": "tf32", "method": "fused"}

def both(images, learned):
    x, unit_x, mask, base = images
    w, weights = learned
    active = sbj.reduce_mask(mask, params.bcount, capacity=16, **grid)
    y = sbj.sparse_conv2d(x, w, active, params, base=base, **fused)
    active = sbj.reduce_mask(mask, unit_params.bcount, capacity=16, **unit_grid)
    return y, sbj.sparse_res_block_bottleneck(unit_x, weights, active, unit_params, **fused)

def total_of_both(learned, images):
    return sum(y.sum() for y in both(images, learned))

images, learned = (x, unit_x, mask, base), (w, weights)
expected_both = jax.jit(both)(images, learned)
options = {"mesh": mesh, "in_specs": (P("batch"), P()), "out_specs": P("batch")}
found = jax.jit(jax.shard_map(both, **options))(images, learned)
jax.tree_util.tree_map(np.testing.assert_array_equal, found, expected_both)
assert all(len(y.sharding.device_set) == DEVICES for y in found)
assert all((y != under).any() for y, under in zip(found, (base, unit_x)))
options = {"mesh": mesh, "in_specs": (P(), P("batch")), "out_specs": P()}
parts = jax.shard_map(lambda *a: jax.lax.psum(total_of_both(*a), "batch"), **options)
jax.tree_util.tree_map(
    np.testing.assert_array_equal,
    jax.jit(jax.grad(parts))(learned, images), jax.jit(jax.grad(total_of_both))(learned, images),
)

apart = [jax.device_put(array, devices[-1]) for array in (np.ones(1, "i4"), np.zeros((1, 3), "i4"))]
try:
    sbj.sparse_gather(jax.device_put(x, devices[0]), *apart, bsize=4)
except ValueError as error:
    assert "incompatible devices" in str(error), error
else:
    assert len(devices) == 1

images = jax.device_put(images, jax.NamedSharding(mesh, P("batch")))
jax.tree_util.tree_map(np.testing.assert_array_equal, jax.jit(both)(images, learned), expected_both)
print("passed")
"""

AT_SITES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
import sbnet_cupy.jax as sbj
from sbnet_cupy.jax import _site_kernels, submanifold
from support.jax_callbacks import call_back_on_cpu

if CALLED_BACK:
    call_back_on_cpu()
    submanifold.by_kernels = lambda features, made: True
    _site_kernels.has_gpu = lambda: True
rng, count = np.random.default_rng(0), len(jax.devices()[:2])
mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))
rows = [rng.permutation(np.argwhere(rng.random((1, 6, 6, 6)) < 0.3))[:30] for _ in range(count)]
rows = jnp.asarray(np.stack(rows), jnp.int32)
features = rng.standard_normal((count, 30, 4)).astype(np.float32)
w, b = (rng.standard_normal(s).astype(np.float32) for s in ((3, 3, 3, 4, 4), (4,)))

def loss(features, w, b, rows):
    x = sbj.sparse_tensor(features[0], rows[0], spatial_shape=(6, 6, 6), batch_size=1)
    x = sbj.submanifold_conv(x, w, bias=b, activation="silu", residual=x)
    y = sbj.strided_conv(x, w, stride=2, padding=1, activation="relu", capacity=27)
    z = sbj.inverse_conv(y, w, onto=x)
    pooled = sbj.sparse_max_pool(z, 2).features.sum() + sbj.sparse_avg_pool(z, 2).features.sum()
    return (z.features**2).sum() + pooled + (sbj.global_pool(z, "mean") ** 3).sum()

def total(features, w, b):
    specs = P("batch"), P(), P(), P("batch")
    summed = lambda *a: jax.lax.psum(loss(*a), "batch")
    return jax.shard_map(summed, mesh=mesh, in_specs=specs, out_specs=P())(features, w, b, rows)

def one_by_one(features, w, b):
    members = (slice(n, n + 1) for n in range(count))
    return sum(loss(features[n], w, b, rows[n]) for n in members)

def derivatives(function):
    gradient = jax.grad(function, argnums=(0, 1, 2))
    return jax.jit(lambda *a: (function(*a), gradient(*a), jax.jvp(gradient, a, a)[1]))

found, expected = (derivatives(f)(features, w, b) for f in (total, one_by_one))
for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-4 * abs(other).max())
print("passed")
"""

ON_STACKS = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
import sbnet_cupy.jax as sbj
from support.jax_callbacks import call_back_on_cpu

if CALLED_BACK:
    call_back_on_cpu()
rng, count = np.random.default_rng(0), len(jax.devices()[:2])
mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))
frames = jnp.asarray(rng.standard_normal((2 * count, 16, 16, 8)), jnp.float32)
masks = jnp.asarray(rng.random((2 * count, 16, 16)) < 0.05)
shapes = (3, 3, 8, 8), (8,), (2, 2, 8, 8)
w, b, up = (jnp.asarray(rng.standard_normal(s) / 8, jnp.float32) for s in shapes)
how = {"precision": "tf32"}  # which has kernels on a GPU

def loss(frames, w, b, up, masks):
    table = sbj.block_table(masks, 8, capacity=6)
    x = sbj.stack_from_image(frames, table)
    x = sbj.stack_conv2d(x, w, table, bias=b, activation="silu", residual=x, **how)
    y = sbj.stack_conv2d(x, w, table, strides=2, padding=1, activation="relu", **how)
    half = table.after_conv(3, 2, 1)
    y = sbj.stack_max_pool(y, half, kernel=3, strides=1, padding=1)
    y = sbj.stack_avg_pool(y, half, kernel=3, strides=1, padding=1)
    z = sbj.stack_conv2d(y, up, half, transposed=True, strides=2, padding=0, **how)
    z = sbj.stack_conv2d(z, w, table, transposed=True, padding=1, **how)
    rims = sbj.stack_halo(z, table, 1, fill="edge")
    return (rims**2).sum() + (sbj.stack_global_pool(z, table, mode="max") ** 3).sum()

def total(*given):
    specs = P("batch"), P(), P(), P(), P("batch")
    summed = lambda *a: jax.lax.psum(loss(*a), "batch")
    return jax.shard_map(summed, mesh=mesh, in_specs=specs, out_specs=P())(*given, masks)

def one_by_one(frames, *weights):
    members = (slice(2 * n, 2 * n + 2) for n in range(count))
    return sum(loss(frames[n], *weights, masks[n]) for n in members)

def derivatives(function):  # those of a gather are backwards only
    gradient = jax.grad(function, argnums=(0, 1, 2, 3))
    own = lambda *weights: jax.grad(function, argnums=(1, 2, 3))(frames, *weights)
    return jax.jit(lambda *a: (function(*a), gradient(*a), jax.jvp(own, a[1:], a[1:])[1]))

found, expected = (derivatives(f)(frames, w, b, up) for f in (total, one_by_one))
rounding = 1e-4 if CALLED_BACK or jax.default_backend() == "cpu" else 2e-2
for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    np.testing.assert_allclose(one, other, rtol=0, atol=rounding * abs(other).max())
    assert np.isfinite(other).all() and abs(other).max() > 0
print("passed")
"""

SITES_REPLAYED = """
import jax, numpy as np
import sbnet_cupy as sb, sbnet_cupy.jax as sbj
import cupy

rng = np.random.default_rng(0)
w = (rng.standard_normal((3, 3, 3, 32, 32)) / 17).astype(np.float16)
grid = {"spatial_shape": (40, 40, 20), "batch_size": 1}

def chain(module, features, rows, w):
    x = module.sparse_tensor(features, rows, **grid)
    x = module.submanifold_conv(x, w, activation="relu")
    return module.submanifold_conv(x, w, residual=x).features

compiled = jax.jit(lambda features, rows, w: chain(sbj, features * 2, rows, w) + 1)
for data in range(4):
    rows = rng.permutation(np.argwhere(rng.random((1, 40, 40, 20)) < 0.2))[:5000].astype(np.int32)
    features = rng.standard_normal((5000, 32)).astype(np.float16)
    expected = chain(sb, *map(cupy.asarray, (features * 2, rows, w))) + 1
    given = tuple(map(jax.numpy.asarray, (features, rows, w)))
    for repeat in range(6):  # in the same memory, so that XLA need not record again
        y = compiled(*given)
        np.testing.assert_array_equal(np.asarray(y), expected.get())
        del y
print("passed")
"""

REPLAYED = """
import jax, jax.numpy as jnp, numpy as np
import sbnet_cupy as sb, sbnet_cupy.jax as sbj
from sbnet_cupy.jax import _callbacks

calls = []
for name in ("_current", "_entered"):  # a call enters one of both
    enter = getattr(_callbacks, name)
    setattr(_callbacks, name, lambda *a, enter=enter: calls.append(1) or enter(*a))
grid = {"bsize": 6, "boffset": (-1, -1), "bstride": 4}

def chain(module, x, mask):
    active = module.reduce_mask(mask, (8, 8), capacity=40, **grid)
    blocks = module.sparse_gather(x, *active, activation="relu", **grid)
    y = module.sparse_scatter(blocks, *active, x, **grid)
    return module.sparse_scatter(blocks, *active, y, add=True, atomic=True, **grid)

rng = np.random.default_rng(0)
compiled = jax.jit(lambda x, mask: chain(sbj, x * 2, mask) + 1)
for data in range(4):
    x = rng.standard_normal((2, 32, 32, 8)).astype(np.float32)
    mask = rng.random((2, 32, 32)) < 0.01
    given = jnp.asarray(x), jnp.asarray(mask)
    for repeat in range(6):  # in the same memory, so that XLA need not record again
        y = compiled(*given)
        np.testing.assert_array_equal(np.asarray(y), chain(sb, x * 2, mask) + 1)
        del y
print(len(calls), "calls back of", 4 * 24)
assert len(calls) < 4 * 24, "every call went through Python: nothing was replayed"
print("passed")
"""

REPLAYED_FUSED = """
import jax, jax.numpy as jnp, numpy as np
import sbnet_cupy as sb, sbnet_cupy.jax as sbj
from sbnet_cupy.jax import _callbacks

calls = []
for name in ("_current", "_entered"):  # a call enters one of both
    enter = getattr(_callbacks, name)
    setattr(_callbacks, name, lambda *a, enter=enter: calls.append(1) or enter(*a))
rng = np.random.default_rng(0)
shape = (2, 32, 32, 32)
params = sb.calc_block_params(shape, 10, 3)
unit_params = sb.calc_block_params_res_block(shape, 10, [1, 3, 1])
grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}
unit_grid = {name: getattr(unit_params, name) for name in grid}

def small(*shape):
    return jnp.asarray(rng.integers(-1, 2, shape) * (rng.random(shape) < 0.1), jnp.float16)

@jax.jit
def compute(x, mask, w, weights):
    active = sbj.reduce_mask(mask, params.bcount, capacity=32, **grid)
    y = sbj.sparse_conv2d(x, w, active, params, activation="relu", method=METHOD)
    active = sbj.reduce_mask(mask, unit_params.bcount, capacity=32, **unit_grid)
    return sbj.sparse_res_block_bottleneck(y, weights, active, unit_params, method=METHOD)

for data in range(4):
    x, mask = small(*shape), jnp.asarray(rng.random(shape[:3]) < 0.01)
    w = small(3, 3, 32, 32)
    shapes = (1, 1, 32, 8), (3, 3, 8, 8), (1, 1, 8, 32), (32,), (32,), (8,), (8,), (8,), (8,)
    weights = sb.BottleneckWeights(*(small(*s) for s in shapes))
    arrays = [np.asarray(a) for a in (x, mask, w)]
    native = weights._map_arrays(np.asarray)
    active = sb.reduce_mask(arrays[1], params.bcount, **grid)
    expected = sb.sparse_conv2d(arrays[0], arrays[2], active, params, activation="relu")
    active = sb.reduce_mask(arrays[1], unit_params.bcount, **unit_grid)
    expected = sb.sparse_res_block_bottleneck(expected, native, active, unit_params)
    for repeat in range(6):  # in the same memory, so that XLA need not record again
        y = compute(x, mask, w, weights)
        np.testing.assert_array_equal(np.asarray(y), expected)  # whole numbers: exact
        del y
print(len(calls), "calls back of", 4 * 24)
assert len(calls) < 4 * 24, "every call went through Python: nothing was replayed"
print("passed")
"""

ORDERED = """
import jax, jax.numpy as jnp, numpy as np
import sbnet_cupy.jax as sbj

counts, rows = jnp.array([3], jnp.int32), jnp.array([[0, 0, 0], [0, 1, 1], [1, 2, 3]], jnp.int32)

@jax.jit
def late(value, slow):
    # What gather reads is late: on any stream but XLA's it would read something older.
    for _ in range(5):
        slow = jnp.tanh(slow @ slow)
    x = jnp.full((2, 512, 512, 64), value) + 0 * slow[0, 0]
    blocks = sbj.sparse_gather(x, counts, rows, bsize=32)
    y = sbj.sparse_scatter(blocks, counts, rows, x, bsize=32, add=True)
    return blocks.sum(), (y == 2 * value).sum()

slow = jax.random.uniform(jax.random.key(0), (4096, 4096))
for value in range(1, 11):
    total, doubled = late(float(value), slow)
    assert total == value * 3 * 32 * 32 * 64 and doubled == 3 * 32 * 32 * 64
print("passed")
"""


def run(code, flags):
    environment = os.environ | {"XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # where support is
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout + done.stderr


def test_shard_map_over_the_batch(jax):
    flags = "--xla_force_host_platform_device_count=2"
    run("import jax; jax.config.update('jax_platforms', 'cpu')"
        + SHARDED.replace("DEVICES", "2"), flags)  # fmt: skip


@pytest.mark.parametrize("layers", [AT_SITES, ON_STACKS], ids=["sites", "stacks"])
@pytest.mark.parametrize("called_back", [False, True])
def test_layers_of_each_device(jax, called_back, layers):
    """Convolutions and pooling inside shard_map, and their derivatives, to the second."""
    code = "import jax; jax.config.update('jax_platforms', 'cpu')" + layers
    flags = "--xla_force_host_platform_device_count=2"
    run(code.replace("CALLED_BACK", str(called_back)), flags)


def test_views_on_a_gpu_and_pieces_of_scratch(jax, require):
    """Addresses, shapes and dtypes are right without a GPU too, as nothing is read or launched."""
    cupy = require("cupy")
    from sbnet_cupy.jax import _callbacks

    memory = np.zeros((4, 512), np.uint16)
    place = memory.ctypes.data
    assert _callbacks.address(memory) == place
    for dtype in map(np.dtype, (np.uint16, np.float16, ml_dtypes.bfloat16)):
        view = _callbacks._cupy_view(place, ((4, 512), dtype), 0)
        assert view.data.ptr == place and view.data.device_id == 0
        assert (view.shape, view.dtype, view.nbytes) == ((4, 512), dtype, 4096)
        assert view.flags.c_contiguous
    assert _callbacks._cupy_view(None, None, 0) is None
    scratch = _callbacks._cupy_view(place, ((4096,), np.dtype(np.uint8)), 0)
    assert scratch.view("uint64").shape == (512,)
    with _callbacks.allocating_from(scratch):
        found = [cupy.empty(n, np.int32) for n in (1, 65, 1, 200)]
        with pytest.raises(AssertionError, match="scratch"):
            cupy.empty(10000, np.int32)
    starts = [array.data.ptr - memory.ctypes.data for array in found]
    assert starts == [0, 256, 768, 1024]
    assert sum(_callbacks.whole_pieces(array.nbytes) for array in found) == 1024 + 1024
    assert _callbacks._Stream(1234).__cuda_stream__() == (0, 1234)


@pytest.mark.gpu
def test_shard_map_over_the_gpus(jax, require):
    count = min(require("gpu").cuda.runtime.getDeviceCount(), 2)
    run(SHARDED.replace("DEVICES", str(count)), "")


@pytest.mark.gpu
@pytest.mark.parametrize("layers", [AT_SITES, ON_STACKS], ids=["sites", "stacks"])
def test_layers_of_each_gpu(jax, require, layers):
    require("gpu")
    run(layers.replace("CALLED_BACK", "False"), "")


@pytest.mark.gpu
def test_command_buffers_of_convolutions_at_sites_are_replayed(jax, require):
    """With other sites each time: their maps and tiles are part of the graph."""
    require("gpu")
    run(SITES_REPLAYED, "--xla_gpu_graph_min_graph_size=1")


@pytest.mark.gpu
def test_command_buffers_are_replayed(jax, require):
    require("gpu")
    run(REPLAYED, "--xla_gpu_graph_min_graph_size=1")


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["auto", "fused"])
def test_command_buffers_with_fused_layers_are_replayed(jax, require, method):
    """With other weights each time: what is packed is part of the graph."""
    require("gpu")
    run(REPLAYED_FUSED.replace("METHOD", repr(method)), "--xla_gpu_graph_min_graph_size=1")


@pytest.mark.gpu
def test_work_follows_the_stream_of_xla(jax, require):
    require("gpu")
    run(ORDERED, "")
