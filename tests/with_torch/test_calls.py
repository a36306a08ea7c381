"""Which calls of sbnet_cupy.torch pass by the dispatcher, and that all give what the core gives."""

import importlib

import pytest

import sbnet_cupy as sb
from sbnet_cupy import ShapeError
from sbnet_cupy.core import operator
from support.assertions import assert_same
from support.torch_cases import bottleneck_weights, draw, internal, on_device, table

GRID = {"bsize": (4, 4), "boffset": (-1, 0), "bstride": (4, 4)}
PARAMS = sb.calc_block_params((8, 8), 6, 3)
UNIT = sb.calc_block_params_res_block((8, 8), 6, [1, 3, 1])

state = internal("_dispatch_state")


# ----------------------------------------------------------- what the dispatcher must be shown


def are_plain(state, *values):
    """Whether a call on these values goes past the dispatcher."""
    return state.thread_is_plain() and all(map(state.is_plain, values))


def test_ordinary_tensors_need_no_dispatcher(state, torch):
    x, w = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    assert are_plain(state, x, w)
    with torch.no_grad():
        assert are_plain(state, x, w)
    with torch.inference_mode():
        assert are_plain(state, x, w, torch.ones(2))
    with torch.autocast("cpu"):
        assert are_plain(state, x, w)
    found = []
    w.register_hook(lambda grad: found.append(are_plain(state, x, grad)))
    w.sum().backward()  # in a thread of autograd's own, or not
    assert found == [True]


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, functorch's prototypes warn
def test_what_is_unusual_is_left_to_the_dispatcher(state, torch):
    x = torch.ones(2)

    def asked(value):
        assert not are_plain(state, value)
        return value * 1

    z = torch.ones(2, dtype=torch.complex64)
    sparse, meta = x.to_sparse(), x.to("meta")
    for odd in (z.conj(), z.conj().imag, sparse, meta, torch._efficientzerotensor(2)):
        assert not are_plain(state, odd)
    assert not are_plain(state, x, object())
    torch.vmap(asked)(x)
    torch.func.functionalize(asked)(x)
    torch.fx.experimental.proxy_tensor.make_fx(asked)(x)
    torch.func.grad(lambda value: asked(value).sum())(x)
    torch.func.jvp(asked, (x,), (x,))
    torch.jit.trace(asked, x, check_trace=False)
    with torch.autograd.forward_ad.dual_level():
        asked(x)
    flops = importlib.import_module("torch.utils.flop_counter").FlopCounterMode(display=False)
    for mode in (torch.device("cpu"), flops):
        with mode:
            asked(x)
    with torch._subclasses.FakeTensorMode() as mode:
        asked(mode.from_tensor(x))
    assert are_plain(state, x)


def test_modes_and_profilers_see_the_operators(st, torch, device):
    x, listed = draw(torch, 2, 8, 8, 3, device=device), table(torch, device)
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function.name())
            return function(*args, **(kwargs or {}))

    with Mode():
        st.sparse_gather(x, *listed, **GRID)
    assert seen == ["sbnet_cupy::sparse_gather"]
    with torch.profiler.profile(acc_events=True) as profile:
        st.sparse_gather(x.requires_grad_(), *listed, **GRID)
    assert "sbnet_cupy::sparse_gather" in {event.name for event in profile.events()}


def test_a_lazy_conjugate_is_resolved(st, torch, device):
    parts = (draw(torch, 2, 8, 8, 3, seed=seed, device=device) for seed in (0, 1))
    z, listed = torch.complex(*parts), table(torch, device)
    for _ in range(2):
        y = st.sparse_gather(z.conj(), *listed, **GRID)
        assert_same(y, st.sparse_gather(z.conj().resolve_conj(), *listed, **GRID))


def test_inference_mode(st, torch, device):
    x, listed = draw(torch, 2, 8, 8, 3, device=device), table(torch, device)
    expected = st.sparse_gather(x, *listed, **GRID)
    with torch.inference_mode():
        for _ in range(2):
            y = st.sparse_gather(x, *listed, **GRID)
            assert y.is_inference()
            assert_same(y, expected)
            written = st.sparse_scatter_var(y, *listed, y.new_zeros(x.shape), **GRID)
            assert_same(written, sb.sparse_scatter(expected, *listed, torch.zeros_like(x), **GRID))


# --------------------------------------------------------------- calls that look like earlier ones


def calls(st, torch, device, dtype):
    """Yield (function of fresh tensors, the core's), each with a call on earlier ones' shapes."""
    listed = table(torch, device)
    weights = bottleneck_weights(torch, 8, 4, 8, device=device)
    weights[:3] = [w.to(dtype) for w in weights[:3]]
    weights = sb.BottleneckWeights(*weights)
    w = draw(torch, 3, 3, 8, 5, dtype=dtype, device=device)
    bias = draw(torch, 5, device=device)

    def each(library):
        yield lambda x: library.reduce_mask(x[..., 0].contiguous() > 1, (2, 2), bsize=4, capacity=3)
        yield lambda x: library.reduce_mask(x[..., 0].contiguous() > 1, (2, 2), bsize=4)
        yield lambda x: library.sparse_gather(x, *listed, **GRID)
        yield lambda x: library.sparse_gather(x, *listed, **GRID, activation="relu")
        yield lambda x: library.sparse_scatter(x[:1, :4, :4].expand(4, 4, 4, 8).contiguous(),
                                               *listed, x, **GRID, add=True)  # fmt: skip
        for method in ("auto", "gather"):
            yield lambda x, method=method: library.sparse_conv2d(
                x, w, listed, PARAMS, bias=bias, method=method
            )
            yield lambda x, method=method: library.sparse_res_block_bottleneck(
                x, weights, listed, UNIT, precision="tf32", method=method
            )

    return zip(each(st), each(sb), strict=True)


@pytest.fixture
def numpy_convolves(monkeypatch):
    """Let the core convolve float32 on a CPU, too, so that the bits are its own."""
    from sbnet_cupy.torch import _conv_on_cpu

    monkeypatch.setattr(_conv_on_cpu, "_is_exact", lambda: False)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_call_like_an_earlier_one_is_the_core_s(st, torch, device, dtype, numpy_convolves):
    dtype = getattr(torch, dtype)
    for ours, core in calls(st, torch, device, dtype):
        for seed in range(3):
            x = draw(torch, 2, 8, 8, 8, seed=seed, dtype=dtype, device=device)
            odd = torch.empty(x.numel() + 1, dtype=dtype, device=device)[1:].view(x.shape).copy_(x)
            for image in (x, odd):  # another alignment
                result, expected = ours(image), core(image)
                if isinstance(expected, sb.ActiveBlocks):
                    for a, e in zip(result, expected, strict=True):
                        assert_same(a, e)
                else:
                    assert_same(result, expected)


def test_memory_that_is_shared_is_refused_at_every_call(st, torch, device):
    x, listed = draw(torch, 2, 8, 8, 8, device=device), table(torch, device)
    shared = x.view(-1)[: 4 * 4 * 4 * 8].view(4, 4, 4, 8)
    apart = shared.clone()
    w = draw(torch, 3, 3, 8, 8, device=device)
    for _ in range(3):
        st.sparse_gather(x, *listed, **GRID, out=apart)
        with pytest.raises(ShapeError, match="out must not share memory with x"):
            st.sparse_gather(x, *listed, **GRID, out=shared)
        with pytest.raises(ShapeError, match="out must not share memory with blocks"):
            st.sparse_scatter(shared, *listed, x, **GRID, out=x)
        st.sparse_conv2d(x, w, listed, PARAMS, out=torch.empty_like(x))
        with pytest.raises(ShapeError, match="out must not share memory with x"):
            st.sparse_conv2d(x, w, listed, PARAMS, out=x)


def test_in_place_of_x_a_unit_reads_its_neighbours_first(st, torch, device):
    x, listed = draw(torch, 2, 8, 8, 32, device=device).half(), table(torch, device)
    tensors = bottleneck_weights(torch, 32, 8, 32, device=device)
    weights = sb.BottleneckWeights(*(t.half() for t in tensors[:3]), *tensors[3:])
    for _ in range(3):
        apart = st.sparse_res_block_bottleneck(x, weights, listed, UNIT, method="gather")
        st.sparse_res_block_bottleneck(x, weights, listed, UNIT)
        place = x.clone()
        st.sparse_res_block_bottleneck(place, weights, listed, UNIT, out=place)
        assert_same(place, apart)


def test_weights_that_learn_are_seen_at_every_call(st, torch, device, numpy_convolves):
    """In training: the result is that of the weights as they are, and so are the gradients."""
    x, listed = draw(torch, 2, 8, 8, 8, device=device), table(torch, device)
    w, bias = draw(torch, 3, 3, 8, 8, device=device), draw(torch, 8, device=device)
    unit = bottleneck_weights(torch, 8, 4, 8, device=device)

    def conv(library, w, bias, **options):
        return library.sparse_conv2d(x, w, listed, PARAMS, bias=bias, precision="tf32", **options)

    def residual(library, *weights, **options):
        weights = sb.BottleneckWeights(*weights)
        return library.sparse_res_block_bottleneck(
            x, weights, listed, UNIT, precision="tf32", **options
        )

    for layer, weights in ((conv, (w, bias)), (residual, unit)):
        for weight in weights:
            weight.requires_grad_()
        for _ in range(4):
            y = layer(st, *weights)
            assert_same(y.detach(), layer(sb, *(weight.detach() for weight in weights)))
            found = torch.autograd.grad(y.sum(), weights)
            expected = torch.autograd.grad(layer(st, *weights, method="gather").sum(), weights)
            for a, e in zip(found, expected, strict=True):
                assert_same(a, e)
            with torch.no_grad():
                weights[0].data.mul_(1.5)  # leaves no version, as fused optimizers do not


@pytest.mark.gpu
def test_a_tensor_of_a_device_that_is_not_current(st, torch, require):
    on_device(require, torch, "cuda")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for device in ("cuda:0", "cuda:1", "cuda:0", "cuda:1"):
        x, listed = draw(torch, 2, 8, 8, 8, device=device), table(torch, device)
        mask, options = x[..., 0].contiguous(), {"bsize": 4, "capacity": 4}
        found = st.reduce_mask(mask, (2, 2), **options)
        for a, e in zip(found, sb.reduce_mask(mask, (2, 2), **options), strict=True):
            assert_same(a, e)
        assert_same(st.sparse_gather(x, *listed, **GRID), sb.sparse_gather(x, *listed, **GRID))


# ------------------------------------------------------------------- calls like one before


calling = internal("_call")


@pytest.fixture
def described(calling, monkeypatch):
    """A list that grows by each call whose tensors are described, as no call before was like it."""
    describe, seen = calling.describe, []

    def count(tensors, *plain):
        if plain:  # else it is for a new plan
            seen.append(tensors)
        return describe(tensors, *plain)

    monkeypatch.setattr(calling, "describe", count)
    monkeypatch.setattr(operator, "_PLANS", operator._Plans())
    return seen


def test_a_call_like_one_before_is_known(st, torch, device, described):
    listed = table(torch, device)
    for number in range(4):
        x, w = (draw(torch, *s, seed=number, device=device) for s in ((2, 8, 8, 3), (3, 3, 3, 5)))
        found = st.sparse_conv2d(x, w, listed, PARAMS)
        assert_same(
            found, st.sparse_conv2d(x.clone(), w, listed, PARAMS, out=torch.zeros_like(found))
        )
    assert len([1 for given in described if given[-1] is None]) == 2  # one plans, one remembers


@pytest.mark.parametrize(
    "change", ["dtype", "shape", "strides", "address", "gradient", "argument", "option", "kind"]
)
def test_what_changes_is_seen(st, torch, device, described, change):
    """Also of the same tensor, whose ``data`` is another."""
    x, listed = draw(torch, 2, 8, 8, 4, device=device), table(torch, device)
    options = {"bsize": 4}
    for _ in range(3):
        st.sparse_gather(x, *listed, **options)
    assert len(described) == 2
    if change == "dtype":
        x.data = x.half()
    elif change == "shape":
        x.data = draw(torch, 2, 9, 9, 4, device=device)
    elif change == "strides":
        x.data = x.transpose(1, 2)
    elif change == "address":
        x.data = torch.cat((x.ravel()[:1], x.ravel()))[1:].view(x.shape)
    elif change == "gradient":
        x.requires_grad_()
    elif change == "argument":
        options["scale"] = torch.full((4,), 2.0, device=device)
    elif change == "option":
        options["bsize"] = 4, 3
    else:
        x = torch.nn.Parameter(x, requires_grad=False)
    found = st.sparse_gather(x, *listed, **options)
    assert len(described) == 3
    native = {k: v.cpu().numpy() if torch.is_tensor(v) else v for k, v in options.items()}
    arrays = (t.detach().cpu().contiguous().numpy() for t in (x, *listed))
    assert_same(found.detach().cpu().numpy(), sb.sparse_gather(*arrays, **native))
    assert found.requires_grad == (change == "gradient")


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_known_calls_are_left_to_the_dispatcher_too(st, torch, described):
    x, listed, seen = draw(torch, 2, 8, 8, 4), table(torch), []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function.name())
            return function(*args, **(kwargs or {}))

    def gather(x):
        return st.sparse_gather(x, *listed, bsize=4)

    for _ in range(3):
        expected = gather(x)
    with Mode():
        assert_same(gather(x), expected)
    assert "sbnet_cupy::sparse_gather" in seen
    traced = torch.jit.trace(gather, x, check_trace=False)
    assert "sbnet_cupy::sparse_gather" in str(traced.graph)
    graph = torch.fx.experimental.proxy_tensor.make_fx(gather)(x).graph
    assert "sbnet_cupy.sparse_gather" in str(graph)
    assert_same(torch.func.functionalize(gather)(x), expected)
    with torch.inference_mode():
        assert gather(x).is_inference()
    known = len(described)
    gather(x)
    assert len(described) == known


def test_calls_of_each_shape_are_known(st, torch, device, described):
    listed = table(torch, device)
    for size in range(8, 20):
        for _ in range(3):
            st.sparse_gather(torch.zeros(2, size, size, 4, device=device), *listed, bsize=4)
    assert len(described) == 12 * 2


def test_few_calls_of_the_same_options_and_shapes_are_known(st, torch, device, described):
    listed = table(torch, device)
    wide = ("int32", "int64", "float16", "float32", "float64", "complex64")
    for name in ("bool", "uint8", "int8", "int16", *wide):
        x = torch.zeros(2, 8, 8, 4, dtype=getattr(torch, name), device=device)
        for _ in range(3):
            st.sparse_gather(x, *listed, bsize=4)
    assert len(described) == 8 * 2 + 2 * 3


def test_no_tensor_that_comes_twice_is_known(st, torch, device, described):
    x, listed = draw(torch, 2, 8, 8, 3, device=device), table(torch, device)
    w = draw(torch, 3, 3, 3, 3, device=device)
    for number in range(1, 5):
        y = st.sparse_conv2d(x, w, listed, PARAMS, base=x)
        assert_same(y, st.sparse_conv2d(x, w, listed, PARAMS, base=x.clone()))
        assert len(described) == number + 1  # the other call only once


@pytest.mark.filterwarnings("ignore::UserWarning")  # a nested tensor is a prototype
def test_a_nested_tensor_is_refused_after_calls_that_are_known(st, torch):
    """PyTorch's comparison of tensors would end the process: a nested one has no strides."""
    x, listed = draw(torch, 2, 8, 8, 4), table(torch, "cpu")
    for _ in range(3):
        st.sparse_gather(x, *listed, bsize=4)
    nested = torch.nested.nested_tensor([torch.zeros(3, 4), torch.zeros(2, 4)])
    with pytest.raises((NotImplementedError, RuntimeError, TypeError, ValueError)):
        st.sparse_gather(nested, *listed, bsize=4)


def test_modes_below_the_compiler_see_calls_that_are_known(st, torch):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        @classmethod
        def ignore_compile_internals(cls):
            """As selective checkpointing does."""
            return True

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            """Note the call."""
            seen.append(str(func))
            return func(*args, **kwargs or {})

    seen, (x, listed) = [], (draw(torch, 2, 8, 8, 4), table(torch, "cpu"))
    for _ in range(3):
        st.sparse_gather(x, *listed, bsize=4)
    with Mode():
        st.sparse_gather(x, *listed, bsize=4)
    assert any("sparse_gather" in name for name in seen)
