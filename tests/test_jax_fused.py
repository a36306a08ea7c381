"""The layers of the JAX adapter by one kernel: the package's bits, fresh weights, own memory."""

import contextlib
import functools
import importlib
import re

import numpy as np
import pytest
from adapter_cases import BFLOAT16, COUNT, MASK, X, grid_of, layer, normal, same
from assertions import assert_close, to_numpy

import sbnet_cupy as sb

CHANNELS = 16  # whole 16-byte vectors, which the CUDA kernel of the unit needs
IMAGE = normal(2, 8, 9, CHANNELS, seed=1)
HALVES = [np.float16, BFLOAT16]


@pytest.fixture(params=["jit", "eager"])
def wrap(request, jax):
    return jax.jit if request.param == "jit" else lambda function: function


def convolution(module, x, w, active, params, bias=None, base=None, **options):
    """Call the layer with its optional arrays by position, as jit and grad want them."""
    return module.sparse_conv2d(x, w, active, params, bias=bias, base=base, **options)


def unit_weights(dtype, tables=np.float32, seed=0):
    """Return the weights of a unit with kernels and tables in these dtypes."""
    arrays = sb.BottleneckWeights.random(CHANNELS, 8, dtype="float64", seed=seed)._arrays()
    dtypes = [dtype] * 3 + [tables] * 6
    return sb.BottleneckWeights(*(a.astype(t) for a, t in zip(arrays, dtypes, strict=True)))


def unit_layer():
    """Return block parameters, and the active blocks of the mask, for a unit on IMAGE."""
    params = sb.calc_block_params_res_block(IMAGE.shape, 5, [1, 3, 1])
    return params, sb.reduce_mask(MASK, params.bcount, capacity=30, **grid_of(params))


def precise(dtype):
    """A GPU has no kernel for the unit in IEEE float32."""
    return {"precision": "tf32"} if dtype is np.float32 else {}


@pytest.mark.parametrize("dtype", [np.float32, *HALVES], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strides": 2, "activation": "gelu", "bias": np.float32},
        {"data_format": "NCHW", "w_format": "OIHW", "activation": "relu", "bias": np.float16},
        {"base": True, "precision": "tf32"},
    ],
    ids=str,
)
def test_conv(sbj, place, wrap, options, dtype):
    params, active = layer(options.get("strides", 1))
    x, w = X.astype(dtype), normal(3, 3, 3, 4, dtype=dtype)
    if "w_format" in options:
        x = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
        w = np.ascontiguousarray(w.transpose(3, 2, 0, 1))
    bias = normal(4, dtype=options["bias"]) if "bias" in options else None
    base = normal(*X.shape[:3], 4, dtype=dtype) if "base" in options else None
    options = {k: v for k, v in options.items() if k not in ("bias", "base")}
    given = x, w, tuple(active), params, bias, base

    def run(module, make):
        function = functools.partial(convolution, module, method="fused", **options)
        function = wrap(function) if module is sbj else function
        return function(*hand_over(given, make))

    same(run(sbj, place.make), run(sb, place.native))


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


@pytest.mark.parametrize("dtype", [np.float32, *HALVES], ids=str)
@pytest.mark.parametrize("tables", ["wide", "tight", "doubles"])
@pytest.mark.parametrize("with_base", [False, True])
def test_unit(sbj, place, wrap, jax, dtype, tables, with_base):
    params, active = unit_layer()
    tables = {"wide": np.float32, "tight": dtype, "doubles": np.float64}[tables]
    base = 2 * IMAGE.astype(dtype) if with_base else None
    given = IMAGE.astype(dtype), unit_weights(dtype, tables), tuple(active), params, base

    def run(module, make):
        def unit(x, weights, active, params, base):
            layer = module.sparse_res_block_bottleneck
            return layer(x, weights, active, params, base=base, method="fused", **precise(dtype))

        return (wrap(unit) if module is sbj else unit)(*hand_over(given, make))

    with jax.enable_x64(True):
        same(run(sbj, place.make), run(sb, place.native))


def test_sixty_four_bits(sbj, jax):
    """On a CPU, in which float64 is no worse than others."""
    params, active = layer()
    x, w, bias = (normal(*s, dtype=np.float64) for s in (X.shape, (3, 3, 3, 4), (4,)))
    given = x, w, tuple(active), params, bias
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        convolve = functools.partial(convolution, sbj, method="fused")
        same(jax.jit(convolve)(*hand_over(given, jax.numpy.asarray)),
             convolution(sb, *given, method="fused"))  # fmt: skip
        params, active = unit_layer()
        given = IMAGE.astype(np.float64), unit_weights(np.float64), tuple(active), params
        unit = functools.partial(sbj.sparse_res_block_bottleneck, method="fused")
        same(jax.jit(unit)(*hand_over(given, jax.numpy.asarray)),
             sb.sparse_res_block_bottleneck(*given, method="fused"))  # fmt: skip


def test_weights_are_those_of_the_moment(sbj, place, jax):
    """The same compiled function, other weights each time: in other memory, and in the same."""
    params, active = layer()
    pair = tuple(map(place.make, active))
    compiled = jax.jit(functools.partial(convolution, sbj, method="fused"))
    stepped = jax.jit(lambda w: w + 1, donate_argnums=0)
    w = place.make(normal(3, 3, 3, 4).round())
    for _ in range(4):
        known = place.native(np.asarray(w))
        expected = convolution(sb, place.native(X), known, tuple(map(place.native, active)), params,
                               method="fused")  # fmt: skip
        same(compiled(place.make(X), w, pair, params), expected)
        w = stepped(w)


def test_the_base_is_written_in_place_and_nothing_else(sbj, place, jax):
    params, active = unit_layer()
    given = place.make(IMAGE), unit_weights(np.float32)._map_arrays(place.make)
    pair = tuple(map(place.make, active))

    def unit(base, x, weights):
        options = {"precision": "tf32", "method": "fused"}
        return sbj.sparse_res_block_bottleneck(x, weights, pair, params, base=base, **options)

    expected = unit(*hand_over((2 * IMAGE,), place.make), *given)
    base = jax.jit(lambda x: 2 * x)(given[0])  # XLA's own memory
    donated = place.address(base)
    y = jax.jit(unit, donate_argnums=0)(base, *given).block_until_ready()
    assert place.address(y) == donated and base.is_deleted()
    same(y, expected)
    same(given[0], IMAGE)

    # The image is both read and under the result: XLA must copy it, donated or its own.
    plain = unit(None, *given)
    same(given[0], IMAGE)
    same(jax.jit(lambda x, weights: unit(None, x / 2, weights))(2 * given[0], given[1]), plain)
    image = jax.jit(lambda x: x / 2)(2 * given[0])
    same(jax.jit(functools.partial(unit, None), donate_argnums=0)(image, given[1]), plain)
    same(jax.jit(lambda x, weights: unit(x, x, weights))(*given), plain)


def test_nothing_to_do(sbj, place, wrap):
    """No row, no image, and images of no channel, of which activation(bias) is left."""
    params, active = layer()
    none = place.make(COUNT), place.make(np.zeros((0, 3), np.int32))
    w, base = place.make(normal(3, 3, 3, 4)), place.make(normal(*X.shape[:3], 4))
    convolve = wrap(functools.partial(convolution, sbj, method="fused"))
    same(convolve(place.make(X), w, none, params), np.zeros((*X.shape[:3], 4), np.float32))
    same(convolve(place.make(X), w, none, params, None, base), base)
    pair = tuple(map(place.make, active))
    assert convolve(place.make(X[:0]), w, pair, params).shape == (0, *X.shape[1:3], 4)
    unit = wrap(functools.partial(sbj.sparse_res_block_bottleneck, method="fused",
                                  precision="tf32"))  # fmt: skip
    params, active = unit_layer()
    weights, pair = unit_weights(np.float32)._map_arrays(place.make), tuple(map(place.make, active))
    same(unit(place.make(IMAGE), weights, none, params), IMAGE)
    assert unit(place.make(IMAGE[:0]), weights, pair, params).shape == (0, *IMAGE.shape[1:])


def test_images_of_no_channel(sbj, jax):
    params, active = layer()
    x, w, bias = X[..., :0], np.zeros((3, 3, 0, 4), np.float32), normal(4)
    given = np.ascontiguousarray(x), w, tuple(active), params, bias
    with jax.default_device(jax.devices("cpu")[0]):
        y = convolution(sbj, *hand_over(given, jax.numpy.asarray), method="fused")
    same(y, convolution(sb, *given, method="fused"))


# ------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"data_format": "NCHW", "activation": "silu"}], ids=str)
@pytest.mark.parametrize("with_base", [False, True])
def test_gradient_of_conv_is_that_of_the_gathered_one(sbj, place, jax, dtype, options, with_base):
    params, active = layer()
    pair = tuple(map(place.make, active))
    axes = (0, 3, 1, 2) if "data_format" in options else (0, 1, 2, 3)
    arrays = X, normal(3, 3, 3, 4), normal(4), normal(*X.shape[:3], 4)
    x, w, bias, v = (place.make(a.astype(dtype)) for a in arrays)
    x, v = x.transpose(axes), v.transpose(axes)
    given = [x, w, bias, *([2 * v] if with_base else [])]

    def gradient(method):
        def linear(x, w, bias, base=None):
            y = convolution(sbj, x, w, pair, params, bias, base, method=method, **options)
            return (v * y).astype("float32").sum()

        return jax.jit(jax.grad(linear, argnums=range(len(given))))(*given)

    for fused, gathered in zip(gradient("fused"), gradient("gather"), strict=True):
        alike(place, fused, gathered, dtype)


@pytest.mark.parametrize("with_base", [False, True])
def test_gradient_of_the_unit_is_that_of_the_gathered_one(sbj, place, jax, with_base):
    params, active = unit_layer()
    pair, v = tuple(map(place.make, active)), place.make(normal(*IMAGE.shape, seed=2))
    weights = unit_weights(np.float32, np.float16)._map_arrays(place.make)
    given = (place.make(IMAGE), weights, *([2 * v] if with_base else []))

    def gradient(method):
        def linear(x, weights, base=None):
            layer = sbj.sparse_res_block_bottleneck
            options = {"precision": "tf32", "method": method}
            return (v * layer(x, weights, pair, params, base=base, **options)).sum()

        return jax.jit(jax.grad(linear, argnums=range(len(given))))(*given)

    fused, gathered = gradient("fused"), gradient("gather")
    assert type(fused[1]) is sb.BottleneckWeights
    jax.tree_util.tree_map(functools.partial(alike, place, dtype=np.float16), fused, gathered)


def alike(place, actual, expected, dtype):
    """The same bits where XLA convolves the same in two programs; on a GPU it may choose anew."""
    if place.name == "cpu":
        return same(actual, expected)
    actual, expected = map(to_numpy, (actual, expected))
    assert actual.dtype == expected.dtype
    wide = expected.astype(np.float64)
    size = np.full(wide.shape, np.abs(wide).max())
    terms = 8 if np.dtype(dtype).itemsize == 2 else 27 * X.size  # rounded each; or sums of products
    return assert_close(actual, wide, terms=terms, dtype=dtype, magnitude=size)


def test_gradients_of_any_order(sbj, jax):
    """Against central differences in float64, twice, and through a checkpointed loop."""
    from jax.test_util import check_grads

    params, active = layer()
    shapes = (X.shape, (3, 3, 3, 2), (2,), (*X.shape[:3], 2))
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        pair = tuple(map(jax.numpy.asarray, active))

        def convolve(x, w, bias, base):
            options = {"activation": "silu", "method": "fused"}
            return convolution(sbj, x, w, pair, params, bias, base, **options)

        arrays = [normal(*s, seed=i, dtype=np.float64) for i, s in enumerate(shapes)]
        check_grads(jax.jit(convolve), arrays, 2, modes=["rev"])

        def loop(x, w, bias, base):
            def step(x, _):
                y = jax.checkpoint(convolve)(x, w, bias, base)
                return jax.numpy.concatenate([y, x[..., :1]], -1), None

            return jax.lax.scan(step, x, length=2)[0]

        check_grads(jax.jit(loop), arrays, 1, modes=["rev"])


# --------------------------------------------------------------- which way, and on a GPU's memory


def test_what_is_not_covered_says_so(sbj, jax):
    params, active = layer(2, bottleneck=True)
    pair = tuple(map(jax.numpy.asarray, active))
    weights = sb.BottleneckWeights.random(3, 4, xp=jax.numpy)
    project = jax.numpy.zeros((1, 1, 3, 3))
    unit = functools.partial(sbj.sparse_res_block_bottleneck, jax.numpy.asarray(X), weights, pair)
    with pytest.raises(NotImplementedError, match=r"method='fused' has no strides"):
        unit(params, strides=2, w_project=project, method="fused")
    params, active = layer(bottleneck=True)
    with pytest.raises(NotImplementedError, match=r"method='fused' has no projection"):
        unit(params, w_project=project, method="fused")
    same(unit(params, w_project=project), unit(params, w_project=project, method="gather"))


@pytest.fixture
def gpu_plans(monkeypatch):
    """Plans of a GPU that is not there; XLA computes on the CPU all the same."""
    from fused_on_host import AMPERE

    for name in ("fused_conv", "fused_bottleneck"):
        module = importlib.import_module(f"sbnet_cupy.ops.{name}")
        monkeypatch.setattr(module, "current_device", lambda: AMPERE)
    layers = importlib.import_module("sbnet_cupy.jax.layers")
    monkeypatch.setattr(layers, "computes_on_gpu", lambda x: True)
    monkeypatch.setattr(importlib.import_module("sbnet_cupy.jax._fused"), "has_gpu", lambda: True)
    return AMPERE


def test_without_a_kernel_it_says_why_while_tracing(sbj, jax, gpu_plans):
    params, active = unit_layer()
    pair, weights = tuple(map(jax.numpy.asarray, active)), unit_weights(np.float32)
    weights = weights._map_arrays(jax.numpy.asarray)
    unit = functools.partial(sbj.sparse_res_block_bottleneck, method="fused")
    with pytest.raises(NotImplementedError, match="IEEE float32; pass precision='tf32'"):
        jax.jit(unit)(jax.numpy.asarray(IMAGE), weights, pair, params)
    narrow = sb.BottleneckWeights.random(3, 4, xp=jax.numpy)
    params, active = layer(bottleneck=True)
    with pytest.raises(NotImplementedError, match="3 channels of float32"):
        jax.jit(functools.partial(unit, precision="tf32"))(
            jax.numpy.asarray(X), narrow, tuple(map(jax.numpy.asarray, active)), params
        )


def test_auto_asks_where_it_runs(sbj, jax, gpu_plans):
    """In a process with a GPU one program goes both ways: fused on it, gathered on a CPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        params, active = layer()
        pair, x = tuple(map(jax.numpy.asarray, active)), jax.numpy.asarray(X)
        w = jax.numpy.asarray(normal(3, 3, 3, 4))

        def value_and_grad(method):
            def loss(w):
                return (convolution(sbj, x, w, pair, params, method=method) ** 2).sum()

            return jax.jit(jax.vmap(jax.value_and_grad(loss)))(jax.numpy.stack([w, 2 * w]))

        traced = jax.jit(functools.partial(convolution, sbj)).trace(x, w, pair, params)
        for platform, calls, convolutions in (("cuda", 1, 0), ("cpu", 2, 1)):
            program = traced.lower(lowering_platforms=(platform,)).as_text()
            assert len(re.findall(r"custom_call @xla_buffer_python", program)) == calls
            assert len(re.findall(r"stablehlo\.convolution", program)) == convolutions
        jax.tree_util.tree_map(same, value_and_grad("auto"), value_and_grad("gather"))


PACKS = ("_packed", "_packed_weights")


@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=str)
@pytest.mark.parametrize("name", ["conv", "unit"])
def test_the_cuda_kernels_inside_jit(sbj, jax, require, gpu_plans, monkeypatch, name, dtype):
    """What a GPU would run, with weights packed in our scratch: exact for whole numbers."""
    require("g++")
    import host_cuda
    from host_memory import Memory

    tests = "test_fused_conv_on_host" if name == "conv" else "test_fused_bottleneck_on_host"
    hosted = importlib.import_module(tests).OP
    fused, pieces = importlib.import_module("sbnet_cupy.jax._fused"), []

    @contextlib.contextmanager
    def allocating_from(scratch):
        """CuPy's allocator takes pieces of the scratch: so does NumPy's here."""
        left = [scratch]

        def empty(shape, dtype, like=None):
            size = np.prod(shape, dtype=int) * np.dtype(dtype).itemsize
            assert size <= left[0].nbytes
            pieces.append(left[0][:size])
            left[0] = left[0][-(-size // 256) * 256 :]
            return pieces[-1].view(dtype).reshape(shape)

        with pytest.MonkeyPatch.context() as patch:
            packs = (importlib.import_module(f"sbnet_cupy.ops.{name}") for name in PACKS)
            for module in (hosted.module, *packs):
                patch.setattr(module, "empty", empty)
            yield
        assert not left[0].nbytes  # what was asked for is what is needed

    monkeypatch.setattr(fused, "allocating_from", allocating_from)
    rng = np.random.default_rng(4)
    x = rng.integers(-3, 4, IMAGE.shape).astype(dtype)
    if name == "conv":
        params = sb.calc_block_params(x.shape, 5, 3)
        w = rng.integers(-1, 2, (3, 3, CHANNELS, 8)).astype(dtype)
        call = functools.partial(convolution, method="fused", precision="tf32")
    else:
        params, w = unit_layer()[0], whole_weights(rng, dtype)

        def call(module, *arrays):
            options = {"precision": "tf32", "method": "fused"}
            return module.sparse_res_block_bottleneck(*arrays, **options)

    active = sb.reduce_mask(MASK, params.bcount, capacity=30, **grid_of(params))
    given = x, w, tuple(active), params
    expected = call(sb, *given)
    with jax.default_device(jax.devices("cpu")[0]):
        arrays = hand_over(given, jax.numpy.asarray)
        with hosted.device(host_cuda.launch, gpu_plans, 4, Memory()) as launched:
            compiled = jax.jit(functools.partial(call, sbj))
            for _ in range(2):
                same(compiled(*arrays).block_until_ready(), expected)
    assert len(launched) == 4 and len({*launched}) == 2  # each time packed, each time computed
    assert len(pieces) == (6 if (name, dtype) == ("unit", np.float16) else 2)  # with two tables


def whole_weights(rng, dtype):
    """Weights of which all sums are whole and small."""
    shapes = (1, 1, CHANNELS, 8), (3, 3, 8, 8), (1, 1, 8, CHANNELS)
    kernels = [rng.integers(-1, 2, s) * (rng.random(s) < 0.1) for s in shapes]
    tables = [rng.choice(values, c) for c in (CHANNELS, 8, 8) for values in ((-1, 1), (-1, 0, 1))]
    return sb.BottleneckWeights(*(a.astype(dtype) for a in (*kernels, *tables)))
