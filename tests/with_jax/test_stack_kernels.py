"""Layers of a stack that XLA calls back: on a CPU into NumPy, on a GPU into kernels.

They are compared with those of XLA's own operations, and all their derivatives with theirs.
"""

import functools

import numpy as np
import pytest

from sbnet_cupy.core.arrays import whole_pieces
from sbnet_cupy.core.spec import ArraySpec
from sbnet_cupy.operators import OPERATORS
from support.adapter_cases import normal
from support.assertions import to_numpy
from support.exhaustive import thinned_pairs
from support.jax_callbacks import (
    AMPERE,
    HOPPER,
    call_back_on_cpu,
    check_close,
    check_members,
    derivatives_of,
)

SIZE = (2, 14, 21)  # no multiple of the blocks: some stick out of the image
BLOCK, ROWS = (4, 8), 16
CONVS = {
    "same": {},
    "even": {"kernel": (2, 3), "padding": ((0, 1), (1, 1))},
    "one": {"kernel": (1, 1)},
    "strided": {"strides": 2, "padding": 1},
    "dilated": {"dilation": (2, 1)},
    "far": {"kernel": (1, 5), "dilation": (1, 5), "padding": "SAME"},  # over two blocks
    "cropped": {"padding": 0},
    "transposed": {"transposed": True, "dilation": 2, "padding": 2},
    "upsampled": {"kernel": (2, 2), "transposed": True, "strides": 2, "padding": 0},
}


@pytest.fixture
def routes(sbj, place, jax, monkeypatch):
    """Return a function that says whether layers are called back from now on."""
    from sbnet_cupy.jax import _kernel_calls

    def take(called_back):
        monkeypatch.undo()
        if jax.default_backend() != "cpu":  # what was traced for a GPU
            jax.clear_caches()
        if not called_back:
            monkeypatch.setattr(_kernel_calls, "has_gpu", lambda: False)
        elif place.name == "cpu":
            call_back_on_cpu(monkeypatch.setattr)

    return take


def whole(*shape, seed=0):
    """Return small whole numbers."""
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)


def table_of(sbj, place):
    """Return a table of some blocks, with rows to spare."""
    mask = np.random.default_rng(8).random(SIZE) < 0.03
    return sbj.block_table(place.make(mask.astype(np.float32)), BLOCK, capacity=ROWS)


def after_conv(table, kernel, options):
    """Return the table of the result of a convolution."""
    after = table.after_transposed if options.get("transposed") else table.after_conv
    given = {k: v for k, v in options.items() if k in ("strides", "padding", "dilation")}
    return after(kernel, **given)


def cleared(sbj, jax, call, before, after):
    """Return a call with zeros outside the image, in its stack and in its result."""
    own = [sbj.stack_pixel_mask(table)[..., None] for table in (before, after)]

    def clean(x, *args, **kwargs):
        y = call(jax.numpy.where(own[0], x, 0), *args, **kwargs)
        return jax.numpy.where(own[1], y, 0)

    return clean


@pytest.mark.parametrize(
    ("name", "epilogue"),
    thinned_pairs(5, list(CONVS), ["plain", "relu", "silu", "groups", "depthwise", "tf32"]),
)
def test_all_derivatives_are_those_of_xla(sbj, place, jax, routes, name, epilogue):
    """Of the result, forwards, backwards, and of the gradient again."""
    table, options, rest = table_of(sbj, place), dict(CONVS[name]), {}
    kernel = options.pop("kernel", (3, 3))
    groups = options["groups"] = {"groups": 2, "depthwise": 4}.get(epilogue, 1)
    channels = 4 if epilogue == "depthwise" else 6
    options["precision"] = "tf32" if epilogue in ("plain", "relu", "tf32") else None
    # Sums of whole numbers are exact: where they are below 0 a rounding does not decide.
    numbers = whole if epilogue == "relu" else normal
    if epilogue in ("relu", "silu"):
        options["activation"] = epilogue
        rest = {"bias": place.make(numbers(6, seed=2)), "scale": place.make(numbers(6, seed=3))}
    w = place.make(numbers(*kernel, 4 // groups, channels, seed=1))
    arrays = {"x": place.make(numbers(ROWS, *BLOCK, 4)), "w": w, "rest": rest}
    call = functools.partial(sbj.stack_conv2d, table=table, **options)
    if epilogue in ("relu", "plain"):
        y = jax.eval_shape(lambda a: call(a["x"], a["w"]), arrays)
        arrays["rest"] = rest | {"residual": place.make(numbers(*y.shape, seed=4))}
    tangents = jax.tree.map(lambda a: place.make(numbers(*a.shape, seed=a.size)), arrays)
    if place.name == "cpu":  # NumPy's results hold anything outside the image
        call = cleared(sbj, jax, call, table, after_conv(table, kernel, options))
    found = {}
    for called_back in (False, True):
        routes(called_back)
        run = lambda a: call(a["x"], a["w"], **a["rest"])  # noqa: E731
        found[called_back] = derivatives_of(jax, run, arrays, tangents)
    rounded = options["precision"] == "tf32" and place.name != "cpu"
    for one, other in zip(*map(jax.tree.leaves, found.values()), strict=True):
        check_close(other, one, 4e-3 if rounded else 2e-5)


def test_a_step_of_several_blocks_and_weights_is_mapped(sbj, place, jax, routes):
    """Stacks, weights or both: members are convolved one after another, gradients too."""
    table = table_of(sbj, place)
    w = place.make(normal(2, 3, 3, 4, 6, seed=1))
    x = place.make(normal(2, ROWS, *BLOCK, 4))
    routes(True)

    def loss(x, w):
        options = {"strides": 2, "padding": 1, "activation": "silu", "precision": "tf32"}
        return (sbj.stack_conv2d(x, w, table, **options) ** 2).sum()

    check_members(jax, loss, x, w)


POOLS = {
    "halo": ("stack_halo", {"pads": ((1, 2), (0, 9))}),
    "edge": ("stack_halo", {"pads": (2, 1), "fill": "edge"}),
    "lowest": ("stack_halo", {"pads": 1, "fill": "-inf"}),
    "max": ("stack_max_pool", {"kernel": 3, "strides": 2, "padding": 1}),
    "max, listed": ("stack_max_pool", {"kernel": [2, 3], "strides": [1, 1], "padding": "SAME"}),
    "max, dilated": ("stack_max_pool", {"kernel": 2, "strides": 1, "padding": 1, "dilation": 2}),
    "average": ("stack_avg_pool", {"kernel": 3, "strides": 2, "padding": 1}),
    "divided": ("stack_avg_pool", {"kernel": 2, "divisor": np.float32(2.5)}),
    "mean": ("stack_global_pool", {"mode": "mean"}),
    "largest": ("stack_global_pool", {"mode": "max"}),
    "resized": ("stack_interpolate", {"scale_factor": 2, "mode": "bilinear"}),
}


@pytest.mark.parametrize("name", POOLS)
def test_derivatives_of_pools_and_rims_are_those_of_xla(sbj, place, jax, routes, name):
    function, options = POOLS[name]
    table, finite = table_of(sbj, place), jax.numpy.nan_to_num
    own = sbj.stack_pixel_mask(table)[..., None]

    def run(x):
        y = getattr(sbj, function)(jax.numpy.where(own, x, 0), table, **options)
        y = jax.numpy.where(jax.numpy.isinf(y), -9, y)  # around the image
        if place.name == "cpu" and "kernel" in options:
            sizes = {k: v for k, v in options.items() if k != "divisor"}
            after = sbj.stack_pixel_mask(table.after_conv(**({"strides": 2, "padding": 0} | sizes)))
            y = jax.numpy.where(after[..., None], y, 0)  # NumPy's hold anything elsewhere
        return y

    x, dx = (place.make(normal(ROWS, *BLOCK, 8, seed=seed)) for seed in (1, 2))
    found = {}
    for called_back in (False, True):
        routes(called_back)
        found[called_back] = derivatives_of(jax, run, x, dx)
    for one, other in zip(*map(jax.tree.leaves, found.values()), strict=True):
        check_close(other, finite(one))


def network(sbj, table, x, weights):
    """A stem, a residual unit and a way back."""
    options = {"padding": 1, "precision": "tf32"}
    x = sbj.stack_conv2d(x, weights[0], table, strides=2, activation="relu", **options)
    half = table.after_conv(3, 2, 1)
    y = sbj.stack_max_pool(x, half, kernel=3, strides=1, padding=1)
    x = sbj.stack_conv2d(y, weights[1], half, residual=x, activation="silu", **options)
    up = {"transposed": True, "strides": 2, "padding": 0, "precision": "tf32"}
    x = sbj.stack_conv2d(x, weights[2], half, **up)
    return sbj.stack_global_pool(x, table)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_training_step_is_that_of_xla(sbj, place, jax, routes, dtype):
    """In a loop, in which weights change; and forwards outside of jit."""
    table = table_of(sbj, place)
    shapes = (3, 3, 8, 16), (3, 3, 16, 16), (2, 2, 16, 8)
    weights = [
        place.make((normal(*s, seed=i) / np.sqrt(np.prod(s[:-1]))).astype(dtype))
        for i, s in enumerate(shapes)
    ]
    x = place.make(normal(ROWS, *BLOCK, 8).astype(dtype))

    def loss(weights, x):
        return (network(sbj, table, x, weights).astype("float32") ** 2).mean()

    def train(weights, _):
        value, grads = jax.value_and_grad(loss)(weights, x)
        return [(w - 0.1 * g).astype(w.dtype) for w, g in zip(weights, grads, strict=True)], value

    found = {}
    for called_back in (False, True):
        routes(called_back)
        _, values = jax.jit(lambda w: jax.lax.scan(train, w, length=3))(weights)
        found[called_back] = [values, loss(weights, x)]
    rounding = {"float16": 2e-2, "bfloat16": 8e-2, "float32": 2e-2}[dtype]  # tf32 on a GPU
    for one, other in zip(*found.values(), strict=True):
        check_close(other, one, 1e-4 if place.name == "cpu" and dtype == "float32" else rounding)
    assert float(values[2]) < float(values[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("kernel", [1, 3])
def test_bits_on_a_gpu_are_those_of_cupy(sbj, jax, require, dtype, kernel):
    """Of each call of a compiled function, on other stacks and lists, too."""
    import sbnet_cupy as sb

    cupy, convert = require("cupy"), jax.numpy.asarray
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU")
    w = (normal(kernel, kernel, 64, 64, seed=1) / (8 * kernel)).astype(dtype)
    bias, options = normal(64, seed=2), {"padding": kernel // 2, "precision": "tf32"}

    def layers(of, frame, mask, w, bias):
        table = of.block_table(mask, 16, capacity=24)
        x = of.stack_from_image(frame, table)
        y = of.stack_conv2d(x, w, table, bias=bias, activation="relu", **options)
        z = of.stack_conv2d(y, w, table, residual=x, strides=1, **options)
        small = of.stack_conv2d(z, w, table, strides=2, **options)
        pooled = of.stack_max_pool(z, table, kernel=3, strides=2, padding=1)
        rim = of.stack_halo(pooled, table.after_conv(3, 2, 1), 1)
        return y, z, small, pooled, rim, of.stack_global_pool(z, table)

    run = jax.jit(functools.partial(layers, sbj))
    for seed in range(4):
        rng = np.random.default_rng(seed)
        given = normal(1, 96, 80, 64, seed=seed, dtype=dtype), rng.random((1, 96, 80)) < 4e-3
        found = run(*map(convert, (*given, w, bias)))
        expected = layers(sb, *map(cupy.asarray, (*given, w, bias)))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(to_numpy(one), cupy.asnumpy(other))


CALLS = {
    "weights": ("stack_conv2d", (64, 64), {}),
    "packed": ("stack_conv2d", (64, 64), {"packed": True}),
    "packed, parts of sums": (
        "stack_conv2d", (512, 512), {"capacity": 4, "block": 2, "gpu": AMPERE, "packed": True},
    ),
    "parts of sums": ("stack_conv2d", (512, 512), {"capacity": 4, "block": 2, "gpu": AMPERE}),
    "channels added": ("stack_conv2d", (3, 64), {}),
    "groups": ("stack_conv2d", (64, 64), {"groups": 2}),
    "depthwise": ("stack_conv2d", (64, 64), {"groups": 64}),
    "maximum": ("stack_max_pool", (64, 64), {}),
    "mean": ("stack_global_pool", (64, 64), {}),
    "mean of parts": ("stack_global_pool", (64, 64), {"gpu": AMPERE}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_allocates_what_was_counted_while_jax_traced(planned, name):
    """All of it from scratch, also where a graph is recorded; of arrays at odd addresses not."""
    import cupy

    from sbnet_cupy.jax import _kernel_calls, _kernel_memory

    function, (channels, out), sizes = CALLS[name]
    planned(sizes.get("gpu", HOPPER))
    block, rows, groups = (sizes.get(key, default) for key, default in
                           (("block", 16), ("capacity", 40), ("groups", 1)))  # fmt: skip
    half, ints = np.dtype(np.float16), np.dtype(np.int32)
    shapes = {"x": (rows, block, block, channels), "w": (3, 3, channels // groups, out)}
    x, w = (ArraySpec(shape, half) for shape in shapes.values())
    table = [ArraySpec(shape, ints) for shape in ((1,), (rows, 3), (1, 8, 8))]
    stage = (block, block), (8 * block, 8 * block)
    if function == "stack_conv2d":
        bias = ArraySpec((out,), np.dtype(np.float32))
        specs = (x, w, *table, None, bias, None)
        options = (*stage, (1, 1), 1, (1, 1), groups, False, (0, 0), "relu", "HWIO", None)
    else:
        specs = (x, *table)
        options = (*stage, *((3, 2, 1, 1, False) if function == "stack_max_pool" else ("mean",)))
    is_packed, key = sizes.get("packed", False), (OPERATORS[function], options, None, None)
    (result,) = OPERATORS[function].infer((*specs, None), options)
    if is_packed:
        unpacked = _kernel_calls._scratch(key, specs)
        plan = _kernel_calls.kernel_plan(OPERATORS[function], [*specs, None], options)
        specs = (*specs, ArraySpec((plan.pack.nbytes,), np.dtype(np.uint8)))
        key = (*key[:3], plan.how)
    counted, elsewhere = _kernel_calls._scratch(key, specs), []
    assert bool(counted) == (name not in ("packed", "depthwise", "maximum", "mean"))
    if is_packed:
        assert counted == unpacked - whole_pieces(plan.pack.nbytes)

    def allocate(nbytes):
        elsewhere.append(nbytes)
        return _kernel_memory.nowhere(ArraySpec((nbytes,), np.dtype(np.uint8))).data

    taken = _kernel_memory.nowhere(ArraySpec((counted,), np.dtype(np.uint8)))
    for is_odd in (False, True):
        *given, y = map(_kernel_memory.nowhere, (*specs, result))
        if is_odd:
            given[0] = cupy.ndarray(given[0].shape, half, given[0].data + 2)
        with cupy.cuda.using_allocator(allocate):
            _kernel_calls._run(key, [y], taken if counted else None, *given)
        assert bool(elsewhere) == (is_odd and (is_packed or counted > 0))
    if is_packed:  # bytes of another form are not read
        elsewhere.clear()
        *given, y = map(_kernel_memory.nowhere, (*specs, result))
        with cupy.cuda.using_allocator(allocate):
            _kernel_calls._run((*key[:3], ("another form",)), [y], None, *given)
        assert elsewhere
