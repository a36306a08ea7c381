"""Private names of PyTorch that are missing make calls slower, and change no result."""

import importlib
import pkgutil

import pytest

import sbnet_cupy as sb
from support.assertions import assert_same
from support.torch_cases import bottleneck_weights, draw, grid, internal, table

PARAMS = sb.calc_block_params((8, 8), 6, 3)
UNIT = sb.calc_block_params_res_block((8, 8), 6, [1, 3, 1])
NAMES = [
    "torch._C._dispatch_keys",
    "torch._C._dispatch_tls_local_include_set",
    "torch._C._len_torch_function_stack",
    "torch._C.DispatchKeySet",
    "torch._C.DispatchKey",
    "torch._C._cuda_getDevice",
    "torch._C._cuda_getCurrentRawStream",
    "torch.autograd.forward_ad._current_level",
    "torch.autograd.profiler._is_profiler_enabled",
    "torch.utils._pytree.register_constant",
    "torch._C._len_torch_dispatch_stack",
    "torch.nn.modules.module._global_forward_hooks",
    "torch.nn.modules.module._global_forward_pre_hooks",
    "torch._C._nn",
    "torch._C.DisableTorchFunctionSubclass",
    "torch.Tensor._make_wrapper_subclass",
    "torch._dynamo.nonstrict_trace",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._dynamo.guards.TensorGuards",
    "torch._C._is_any_autocast_enabled",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._C._functorch.get_unwrapped",
    "torch._C._functorch.is_batchedtensor",
    "torch._C._dynamo.eval_frame.get_eval_frame_callback",
    "torch._ops.OpOverload",
    "torch._ops.OpOverloadPacket",
]
DISPATCHING = {*NAMES[:5], *NAMES[7:9]}  # without these, no call is known to be plain
WATCHING = {*DISPATCHING, *NAMES[11:13]}  # without these, every call may be watched

state = internal("_dispatch_state")


@pytest.fixture(params=NAMES)
def missing(request, state, torch, monkeypatch):
    """Import the file of private names in a PyTorch that lacks one; return its name."""
    owner, _, name = request.param.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    with monkeypatch.context() as patch:
        if owner is torch.Tensor:  # whose base class has the name
            patch.setattr(owner, name, None)
        else:
            patch.delattr(owner, name, raising=False)  # some only a PyTorch with CUDA has
        importlib.reload(state)
    yield request.param
    importlib.reload(state)


def results(st, torch):
    """Yield results, and gradients, of every function."""
    x, listed = draw(torch, 2, 8, 8, 8).requires_grad_(), table(torch)
    w = draw(torch, 3, 3, 8, 5).requires_grad_()
    unit = bottleneck_weights(torch, 8, 4, 8)
    yield from st.reduce_mask(x.detach()[..., 0].contiguous() > 1, (2, 2), bsize=4)
    out = torch.empty(4, 4, 4, 8)
    for learns in (True, False):
        x, w = x.detach().requires_grad_(learns), w.detach().requires_grad_(learns)
        made = [
            st.sparse_gather(x, *listed, **grid(PARAMS), activation="relu"),
            st.sparse_gather(x, *listed, bsize=4, out=out),
            st.sparse_scatter(x[:1, :4, :4].expand(4, 4, 4, 8), *listed, x, bsize=4),
            st.sparse_conv2d(x, w, listed, PARAMS, activation="relu"),
            st.sparse_res_block_bottleneck(x, sb.BottleneckWeights(*unit), listed, UNIT),
        ]
        yield from (y.detach().clone() for y in made)
        if learns:
            loss = sum((y * y).sum() for y in made)
            yield from torch.autograd.grad(loss, (x, w))
            out = out.detach()


def test_results_are_the_same(st, torch, state, missing):
    actual = list(results(st, torch))
    assert state.thread_is_plain() != (missing in DISPATCHING)
    importlib.reload(state)
    assert state.thread_is_plain()
    for a, e in zip(actual, results(st, torch), strict=True):
        assert_same(a, e)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own
def test_forward_mode_is_refused(st, torch, missing):
    x, listed = torch.ones(2, 8, 8, 3), table(torch)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            st.sparse_gather(dual, *listed, bsize=4)


def test_compiled_code_has_the_operators(st, torch, missing):
    torch._dynamo.reset()
    x, listed = draw(torch, 2, 8, 8, 3), table(torch)

    def gather(x):
        return st.sparse_gather(x, *listed, bsize=4) * 2

    compiled = torch.compile(gather, fullgraph=True, backend="aot_eager")
    assert_same(compiled(x), gather(x))


def test_functions_are_part_of_a_graph_or_apart(state, torch, missing):
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()

    def opaque(x):
        return x + len(type(x).__mro__[:0])

    graphs = CompileCounter()
    piece = state.in_one_piece(opaque)
    compiled = torch.compile(lambda x: piece(x * 2) * 3, backend=graphs)
    assert compiled(torch.ones(2)).tolist() == [6, 6]
    assert graphs.frame_count == (2 if missing == "torch._dynamo.nonstrict_trace" else 1)


def test_devices_and_streams_are_asked_for_in_public(state, torch, missing, monkeypatch):
    stream = type("Stream", (), {"cuda_stream": 7})()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    if missing.endswith("_cuda_getDevice"):
        assert state.current_device() == 3
    if missing.endswith("_cuda_getCurrentRawStream"):
        assert state.current_stream(0) == 7


def test_functions_have_an_apply_of_their_own(st, torch, state, monkeypatch):
    """The one that ``torch.autograd.Function`` ends in is not public either."""
    from support.torch_autograd import Double  # which needs PyTorch

    x = torch.ones(2, requires_grad=True)
    for missing in (False, True):
        if missing:
            monkeypatch.setattr(state, "super", lambda *_: object(), raising=False)
        y = state.direct_apply(Double)(x)
        assert torch.autograd.grad(y.sum(), x)[0].tolist() == [2, 2]
        assert y.tolist() == [2, 2]


def test_a_call_is_watched_where_there_is_no_telling(state, torch, missing):
    assert state.is_watched() == (missing in WATCHING)
    importlib.reload(state)
    assert not state.is_watched()
    with torch.device("cpu"):  # a mode
        assert state.is_watched()
    with torch.profiler.profile(acc_events=True):
        assert state.is_watched()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert state.is_watched()
    handle.remove()
    assert not state.is_watched()


def test_a_dispatch_mode_is_seen_or_there_is_no_telling(state, torch, missing):
    assert state.in_dispatch_mode() == missing.endswith("_len_torch_dispatch_stack")
    importlib.reload(state)
    assert not state.in_dispatch_mode()
    with torch.utils._python_dispatch.TorchDispatchMode():
        assert state.in_dispatch_mode()
    assert not state.in_dispatch_mode()


def test_functions_of_a_subclass_are_called_plainly(state, torch, missing):
    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    x = torch.ones(2, 3).as_subclass(Refusing)
    with pytest.raises(AssertionError):
        x.dim()
    assert state.plainly(torch.Tensor.dim, x) == 2
    assert state.plainly(torch.Tensor.size, x, dim=1) == 3
    assert state.plainly(torch.Tensor.grad_fn.__get__, x) is None


def test_networks_know_the_functions_of_both_namespaces(state, torch, missing):
    assert state.builtin_functions in (torch._C._nn, torch.nn.functional)
    assert hasattr(state.builtin_functions, "avg_pool2d")


def test_a_tensor_without_memory_has_a_shape(state, torch, missing):
    class Hollow(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError(func)

    for requires_grad in (False, True):
        x = state.without_memory(
            Hollow, (2, 3, 5), torch.float16, torch.device("cpu"), requires_grad
        )
        assert type(x) is Hollow and (x.shape, x.dtype) == ((2, 3, 5), torch.float16)
        assert (x.stride(), x.is_leaf, x.requires_grad) == ((15, 5, 1), True, requires_grad)
        assert x.device.type == "cpu" and x.grad_fn is None
        with pytest.raises(NotImplementedError):
            x + 1


@pytest.mark.filterwarnings("ignore")  # export warns about what it traces, in words that change
def test_networks_run_and_export_alike(st, torch, state, missing):
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, 2, 1), torch.nn.BatchNorm2d(4), torch.nn.ReLU(),
        torch.nn.MaxPool2d(2), torch.nn.Conv2d(4, 2, 1),
    ).eval()  # fmt: skip
    x, mask = draw(torch, 1, 3, 32, 32), torch.zeros(1, 32, 32, dtype=torch.bool)
    mask[:, :9, :20] = True
    sparse = st.sparsify(net, block_size=8, capacity=16)
    sparse.break_even = 2.0

    def results():
        """Return results, also of a trace, and the gradients of a training step."""
        with torch.no_grad():
            made = [sparse(x, mask)]
            if missing in ("torch.Tensor._make_wrapper_subclass", "torch._C._nn"):
                made.append(torch.export.export(sparse, (x, mask)).module()(x, mask))
        sparse(x, mask).square().sum().backward()
        made += [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        return made

    actual = results()
    importlib.reload(state)
    for a, e in zip(actual, results(), strict=True):
        assert_same(a, e)


def test_hooks_of_saved_tensors_are_told_apart(state, torch, monkeypatch):
    """Without the name, none is known to be that of before."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    before = state.saved_tensor_hooks()
    with hooks(lambda t: t, lambda t: t):
        inside = state.saved_tensor_hooks()
        assert inside != before and inside == state.saved_tensor_hooks()
    assert state.saved_tensor_hooks() == before
    monkeypatch.setattr(state, "_top_hooks", None)
    assert state.saved_tensor_hooks() != state.saved_tensor_hooks()


def test_parameters_are_found_without_the_dict_of_them(state, torch):
    """Also those that a parametrization computes, which are in no dict."""

    class Other:
        weight, bias = 1.0, None

    assert state.parameters_of(Other(), "weight", "bias") == [1.0, None]
    conv = torch.nn.Conv2d(2, 3, 1)
    assert [*map(id, state.parameters_of(conv, "weight", "bias"))] == [*map(id, conv.parameters())]
    torch.nn.utils.parametrizations.weight_norm(conv)
    weight, bias = state.parameters_of(conv, "weight", "bias")
    assert torch.equal(weight, conv.weight) and bias is conv.bias


def test_autocast_is_seen(state, torch, missing):
    assert not state.has_autocast()
    for kind in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        with torch.autocast(kind, torch.bfloat16):
            assert state.has_autocast()
        with torch.autocast(kind, torch.bfloat16, enabled=False):
            assert not state.has_autocast()
