"""How calls of sbnet_cupy.torch reach the core: past the dispatcher, and by launches kept."""

import ctypes
import importlib
import types

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy import ShapeError
from support.assertions import assert_same
from support.torch_cases import bottleneck_weights, draw, internal, on_device, table

GRID = {"bsize": (4, 4), "boffset": (-1, 0), "bstride": (4, 4)}
PARAMS = sb.calc_block_params((8, 8), 6, 3)
UNIT = sb.calc_block_params_res_block((8, 8), 6, [1, 3, 1])

registry, launches = internal("_registry"), internal("_launches")
calling, packing, copies = internal("_calls"), internal("_packed"), internal("_copies")


# ----------------------------------------------------------- what the dispatcher must be shown


def test_ordinary_tensors_need_no_dispatcher(registry, torch):
    plain = registry.records_if_plain
    x, w = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    assert plain((x, None, 1, 2.0, True, "NHWC", (1, 1), [1, 1])) is False
    assert plain((x, w)) is True
    with torch.no_grad():
        assert plain((x, w)) is False
    with torch.inference_mode():
        assert plain((x, w, torch.ones(2))) is False
    with torch.autocast("cpu"):
        assert plain((x, w)) is True
    found = []
    w.register_hook(lambda grad: found.append(plain((x, grad))))
    w.sum().backward()  # in a thread of autograd's own, or not
    assert found == [False]


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, functorch's prototypes warn
def test_what_is_unusual_is_left_to_the_dispatcher(registry, torch):
    plain, x = registry.records_if_plain, torch.ones(2)

    def asked(value):
        assert plain((value,)) is None
        return value * 1

    z = torch.ones(2, dtype=torch.complex64)
    sparse, meta = x.to_sparse(), x.to("meta")
    for odd in (z.conj(), z.conj().imag, sparse, meta, torch._efficientzerotensor(2)):
        assert plain((odd,)) is None
    assert plain((x, object())) is None
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
    assert plain((x,)) is False


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


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_call_like_an_earlier_one_is_the_core_s(st, torch, device, dtype):
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


def test_weights_that_learn_are_seen_at_every_call(st, torch, device):
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


@pytest.fixture
def fake(torch, launches, calling, packing, registry, monkeypatch):
    """Return a function that makes tensors on a GPU that is not there."""

    class OnGpu(torch.Tensor):
        is_cuda = True

        def get_device(self):
            return 0

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for module in (launches, calling, packing):
        monkeypatch.setattr(module, "raw_stream", lambda device: 7)
    for module in (calling, registry):
        monkeypatch.setattr(module, "thread_is_plain", lambda: True)
        monkeypatch.setattr(module, "is_plain", lambda value: isinstance(value, torch.Tensor))

    def tensor(*shape, dtype=torch.float32, skip=0):
        memory = torch.zeros(skip + torch.Size(shape).numel(), dtype=dtype)[skip:].view(shape)
        return memory.as_subclass(OnGpu)

    return tensor


def test_launches_are_found_by_all_that_they_depend_on(launches, torch, monkeypatch, fake):
    monkeypatch.setattr(launches, "view", lambda tensor: tensor)
    tensor, left = fake, []

    def launch_of(*views, options):
        left.append(options)
        return len(left) if options != ("none",) else None

    known, x, w = launches.Launches(launch_of), tensor(2, 3), tensor(4)
    assert known.find((x,), (1,), (w,)) is None
    known.keep((x,), (1,), (w,))
    assert known.find((tensor(2, 3),), (1,), (tensor(4),)) == 1
    for other, options, weight in (
        (tensor(3, 2), (1,), w),
        (tensor(2, 3, dtype=torch.int32), (1,), w),
        (tensor(2, 3, skip=1), (1,), w),
        (tensor(3, 2).T, (1,), w),
        (x, (1.0,), w),
        (x, (True,), w),
        (x, (1,), tensor(5)),
        (x, (1,), None),
    ):
        assert known.find((other,), options, (weight,)) is None, (other, options, weight)
    known.keep((x,), ("none",))
    known.keep((x,), ("none",))
    assert known.find((x,), ("none",)) is False and len(left) == 2  # asked once
    known.keep((tensor(3, 2).T,), (1,))
    assert known.find((tensor(3, 2).T,), (1,)) is False and len(left) == 2  # memory with gaps
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert known.find((x,), (1,), (w,)) is None


class Kernel:
    """A launch, and the kernels it launches, that counts what they are called with."""

    slots, rows, how = 0, 3, (1,)

    def __init__(self):
        self.run, self.done = self, []

    def on(self, stream, addresses):
        self.done.append((stream, *addresses))


class LayerKernel(Kernel):
    """A launch with a kernel that packs a kernel, and tables."""

    def __init__(self):
        super().__init__()
        self.pack = types.SimpleNamespace(launch=Kernel(), nbytes=40, kernels=1)


def address(tensor):
    return 0 if tensor is None else tensor.data_ptr()


@pytest.fixture
def layer(calling, packing, torch, monkeypatch, fake):
    """A layer's calls on a GPU that is not there; ``call`` and ``keep`` have arguments alike."""
    x, counts, table, w, bias = fake(1, 4, 4, 2), fake(1), fake(3, 3), fake(3), fake(2)
    at_once, launch, laid = calling.LayerCalls(), LayerKernel(), []
    packed = types.SimpleNamespace(data=types.SimpleNamespace(ptr=1024))
    monkeypatch.setattr(packing, "_pack", lambda *a, **k: packed)
    monkeypatch.setattr(calling, "lay", lambda out, base, new: laid.append((out, base)) or True)

    def call(image=x, weights=(w, None, bias), options=("same",), base=None, out=None):
        key, known = at_once.find((image, counts, table, base, out), options, weights)
        before, y = len(launch.done), None
        if known is not None:
            y = at_once.again(key, known, image, weights, counts, table, base, out, 0)
        assert len(launch.done) == before + (y is not None)
        return key, y

    def keep(weights=(w, None, bias), launch=launch, **options):
        key, y = call(weights=weights, **options)
        assert key is not None and y is None
        at_once.keep(key, launch, x, fake(1, 4, 4, 5), weights, ())

    def pack():
        packing.packed(launch, w, None, bias)

    return types.SimpleNamespace(**locals())


def test_a_layer_is_done_at_once_if_nothing_is_new(
    layer, calling, packing, torch, monkeypatch, fake
):
    """With tensors alike, the same weights unchanged, and nobody to be told."""
    stream = [7]
    for module in (calling, packing):
        monkeypatch.setattr(module, "raw_stream", lambda device: stream[0])
    w, bias, call, keep = layer.w, layer.bias, layer.call, layer.keep
    keep()
    assert call()[1] is None  # the weights have not been packed yet
    layer.pack()
    other = fake(1, 4, 4, 2)
    _, y = call(image=other)
    assert y.shape == (1, 4, 4, 5) and layer.laid[-1][0] is y and layer.laid[-1][1] is None
    active = map(address, (layer.counts, layer.table))
    assert layer.launch.done[-1] == (7, address(other), 1024, 0, *active, address(y))

    for change in (
        {"image": fake(1, 4, 2, 4)},
        {"image": fake(1, 4, 4, 2, skip=1)},
        {"weights": (w.clone(), None, bias)},
        {"options": ("other",)},
        {"base": fake(1, 4, 4, 5)},
        {"out": fake(1, 4, 4, 5)},
    ):
        assert call(**change)[1] is None, change
    stream[0] = 8
    assert call()[1] is None
    stream[0] = 7
    for module, name, value in (
        (torch, "is_autocast_enabled", True),
        (torch.cuda, "is_current_stream_capturing", True),
        (torch._C, "_cuda_getDevice", 1),
        (calling, "thread_is_plain", False),
        (calling, "is_plain", False),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda *_, value=value: value)
            assert call() == (None, None), name
    learns = fake(1, 4, 4, 2).requires_grad_()
    assert call(image=learns)[1] is None  # records, which no call like it did
    with torch.no_grad():
        assert call(image=learns)[1] is not None
    keep(image=learns)
    assert call(image=learns)[1] is not None and call()[1] is not None

    out = fake(1, 4, 4, 5)
    keep(out=out)
    version = out._version
    assert call(out=out)[1] is out and out._version == version + 1
    assert call(image=learns, out=out)[1] is None
    whole = fake(200)
    apart, shared = whole[80:160].view(1, 4, 4, 5), whole[:80].view(1, 4, 4, 5)
    image = whole[:32].view(1, 4, 4, 2)
    assert call(image=image, out=apart)[1] is apart
    assert call(image=image, out=shared)[1] is None

    for change in (
        lambda: bias.add_(1),
        lambda: setattr(w, "data", w.data[:2]),
        lambda: setattr(w, "data", w.data.clone()),
    ):
        change()
        assert call()[1] is None
        layer.pack()
        assert call()[1] is not None
    assert not layer.launch.pack.launch.done
    bias.requires_grad_()  # alone
    assert call()[1] is None
    keep(options=("bias learns",))
    assert call(options=("bias learns",)) == (None, None)


def test_weights_that_learn_are_packed_in_each_call(layer, torch, fake):
    weights = layer.w.requires_grad_(), None, layer.bias
    layer.keep(weights)
    for number in range(1, 4):
        with torch.no_grad():
            weights[0].data = fake(3)  # as optimizers of other libraries write
        key, y = layer.call(weights=weights)
        assert key[1] and y is not None
        (stream, *read, memory), (_, _, packed, *_) = (
            kernel.done[-1] for kernel in (layer.launch.pack.launch, layer.launch)
        )
        assert (stream, read, memory) == (7, [*map(address, weights)], packed)
        assert len(layer.launch.pack.launch.done) == number
    weights[0].requires_grad_(False)
    layer.keep(weights, options=("frozen",))
    layer.pack()
    assert layer.call(weights=weights, options=("frozen",))[1] is not None
    weights[0].requires_grad_()
    assert layer.call(weights=weights)[1] is not None
    weights[0].requires_grad_(False)  # after a step that left no version, for all one knows
    assert layer.call(weights=weights, options=("frozen",))[1] is None
    weights[0].requires_grad_()
    with torch.no_grad():
        assert layer.call(weights=weights)[1] is None
        layer.keep(weights)
        assert layer.call(weights=weights)[1] is not None
    for other in ((fake(4), None, layer.bias), (fake(3, dtype=torch.float16), None, layer.bias)):
        assert layer.call(weights=(other[0].requires_grad_(), *other[1:]))[1] is None
    for odd in ((weights[0], None, fake(2, dtype=torch.float16)), (weights[0], None, fake(4)[::2])):
        layer.keep(odd)  # the kernel that packs would read a copy
        assert layer.call(weights=odd) == (None, None)


def test_what_is_no_tensor_goes_the_whole_way(layer, torch):
    """To where it is refused by name."""
    w, bias, numbers = layer.w, layer.bias, np.ones(3)
    for learns in (False, True):
        w.requires_grad_(learns)
        for weights in ((numbers, None, bias), ([1], None, None), (w, None, numbers), (None, w, 1)):
            assert layer.call(weights=weights)[1] is None
    for change in ({"image": numbers}, {"image": None}, {"base": numbers}, {"out": [1]}):
        assert layer.call(**change) == (None, None)


def test_a_layer_that_has_no_kernel_is_not_looked_up_again(layer):
    layer.keep(launch=False, options=("gather",))
    assert layer.call(options=("gather",)) == (None, None)
    assert layer.call(options=(object(),)) == (None, None)  # an option that is not spelled


@pytest.fixture
def kernel(copies, launches, calling, torch, fake, monkeypatch):
    """Let the core leave this one launch for all calls of the three operations."""
    kernel = Kernel()

    def compute(function, *arguments, **options):
        kernel.done.append("the whole way")
        if function is copies.core_reduce_mask:
            return fake(1, dtype=torch.int32), fake(kernel.rows, 3, dtype=torch.int32)
        return None

    monkeypatch.setattr(copies, "compute", compute)
    monkeypatch.setattr(copies, "run", lambda *arguments: kernel.done.append("the whole way"))
    monkeypatch.setattr(launches, "view", lambda tensor: tensor)
    for name in ("_MASKS", "_GATHERS", "_SCATTERS"):
        kept = launches.Launches(lambda *views, options: kernel)
        monkeypatch.setattr(copies, name, kept)
    for name in ("MASK_CALLS", "GATHER_CALLS", "SCATTER_CALLS"):
        monkeypatch.setattr(getattr(copies, name), "_kept", calling.Plans())
    return kernel


def test_a_mask_is_reduced_at_once(st, torch, fake, kernel, monkeypatch):
    mask = fake(2, 8, 8, dtype=torch.bool)
    first = st.reduce_mask(mask, (2, 2), bsize=4, capacity=3)
    assert kernel.done == ["the whole way"]
    other = fake(2, 8, 8, dtype=torch.bool)
    found = st.reduce_mask(other, (2, 2), bsize=4, capacity=3)
    shapes = [(part.shape, part.dtype) for part in found]
    assert shapes == [((1,), torch.int32), ((3, 3), torch.int32)]
    assert found.grid == first.grid == (2, 2, 2)
    counts, table = map(address, found)
    assert kernel.done[1:] == [(7, address(other), counts, table, counts)]
    for change in ({"capacity": 4}, {"avgpool": True}, {"capacity": None}):
        st.reduce_mask(mask, (2, 2), **{"bsize": 4, "capacity": 3, **change})
    assert kernel.done[2:] == ["the whole way"] * 3

    def count(stream, addresses):  # of the active blocks
        ctypes.cast(addresses[1], ctypes.POINTER(ctypes.c_int32))[0] = 2

    monkeypatch.setattr(kernel, "on", count)
    found = st.reduce_mask(mask, (2, 2), bsize=4)
    assert found.active_block_indices.shape == (2, 3) and found.grid == (2, 2, 2)


def test_a_gather_is_done_at_once(st, torch, fake, kernel):
    x, counts, table = fake(2, 8, 8, 3), fake(1, dtype=torch.int32), fake(4, 3, dtype=torch.int32)
    scale = fake(3)
    whole, given = 0, (counts, table)
    for options in ({}, {"scale": scale, "activation": "relu"}, {"out": fake(4, 4, 4, 3)}):
        for again in range(3):
            y = st.sparse_gather(x, *given, **GRID, **options)
            assert y.shape == (4, 4, 4, 3)
            if not again:
                assert kernel.done[whole] == "the whole way"
                continue
            scaled = (address(options.get("scale")), 0)
            expected = (7, address(x), *map(address, given), address(y), *scaled)
            assert kernel.done[-1] == expected
        whole = len(kernel.done)
    out = options["out"]
    version = out._version
    assert st.sparse_gather(x, *given, **GRID, out=out) is out and out._version == version + 1
    shared = x.view(-1)[: out.numel()].view(out.shape)
    st.sparse_gather(x, *given, **GRID, out=shared)
    assert kernel.done[-1] == "the whole way"  # to the core, which refuses it


def test_a_scatter_is_done_at_once(st, torch, fake, kernel, copies, monkeypatch):
    laid = []
    monkeypatch.setattr(copies, "lay", lambda out, base, new: laid.append((out, base)) or True)
    x, counts, table = fake(2, 8, 8, 3), fake(1, dtype=torch.int32), fake(4, 3, dtype=torch.int32)
    blocks, given = fake(4, 4, 4, 3), (counts, table)
    for out in (None, x, fake(2, 8, 8, 3)):
        for again in range(3):
            y = st.sparse_scatter(blocks, *given, x, **GRID, out=out)
            if again:
                assert kernel.done[-1] == (7, address(y), *map(address, given), address(blocks))
                assert laid.pop() == (y, x) or y is x
            else:
                assert kernel.done[-1] == "the whole way"
        assert out is None or y is out
        assert y.shape == x.shape
    for change in ({"add": True}, {"atomic": True}, {"bstride": (5, 5)}):
        st.sparse_scatter(blocks, *given, x, **{**GRID, **change}, out=x)
        assert kernel.done[-1] == "the whole way"


def test_what_is_done_at_once_is_recorded(st, torch, fake, kernel, copies, monkeypatch):
    """Results of calls done at once hang in autograd's graph as all others do."""
    monkeypatch.setattr(copies, "lay", lambda out, base, new: True)
    counts, table = fake(1, dtype=torch.int32), fake(4, 3, dtype=torch.int32)
    for again in range(3):
        x, blocks = fake(2, 8, 8, 3).requires_grad_(), fake(4, 4, 4, 3).requires_grad_()
        y = st.sparse_gather(x, counts, table, **GRID)
        z = st.sparse_scatter(blocks, counts, table, x, **GRID)
        for result, name in ((y, "sparse_gather"), (z, "sparse_scatter")):
            assert result.requires_grad and not result.is_leaf
            assert not again or result.grad_fn.name() == f"{name}Backward"
        with torch.no_grad():
            assert not st.sparse_gather(x, counts, table, **GRID).requires_grad
    assert kernel.done.count("the whole way") == 3 and len(kernel.done) == 9


def test_a_result_that_is_there_already_is_recorded(torch, copies):
    x = draw(torch, 2, 8, 8, 3).requires_grad_()
    scale = draw(torch, 3, seed=1).requires_grad_()
    given = (x, *table(torch, "cpu"), *GRID.values(), False, "NHWC", scale, None, "relu")
    y = copies.GATHER(*given)
    made = y.detach().clone()
    z = copies.GATHER.recorded(*given, [made])
    assert z is made and z.requires_grad
    weight = draw(torch, *y.shape, seed=2)
    first, second = (torch.autograd.grad((r * weight).sum(), (x, scale)) for r in (y, z))
    for a, b in zip(first, second, strict=True):
        assert b.any()
        assert_same(a, b)


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
