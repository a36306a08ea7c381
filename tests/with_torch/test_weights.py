"""Weights in sbnet_cupy.torch: packed for a kernel once, and again when they change."""

import copy
import gc
import pickle
import types

import pytest

import sbnet_cupy as sb
from support.assertions import assert_same
from support.torch_cases import bottleneck_weights, draw, internal, on_device, table

PARAMS = sb.calc_block_params((8, 8), 6, 3)
UNIT = sb.calc_block_params_res_block((8, 8), 6, [1, 3, 1])

packing = internal("_packed")


# ------------------------------------------------------------------------------- packed weights


@pytest.fixture
def packs(packing, torch, monkeypatch):
    """Count what is packed, as if on a GPU, for calls whose plan packs in the way ``how``."""
    made, capturing = [], []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    monkeypatch.setattr(packing, "_KEPT", {})

    def pack(plan, weights, kept=False):
        made.append(kept)
        return [w.clone() for w in weights if w is not None]

    def packed(*weights, how=1, stream=7):
        return packing.packed(types.SimpleNamespace(how=how), weights, stream)

    monkeypatch.setattr(packing, "_pack", pack)
    monkeypatch.setattr(packing, "_packed_now", lambda plan, weights, stream: pack(plan, weights))
    return types.SimpleNamespace(made=made, capturing=capturing, packed=packed)


def held(packing):
    """Return for how many weights, and ways to pack them, something is kept."""
    return sum(map(len, packing._KEPT.values()))


def test_weights_are_packed_again_after_a_change_only(packing, packs, torch):
    w, given = torch.ones(3), [torch.zeros(3)]
    changes = [
        lambda: None,
        lambda: w.mul_(2),
        lambda: w.view(-1)[:1].zero_(),
        lambda: w.detach().copy_(torch.arange(3.0)),
        lambda: setattr(w, "data", w.data * 3),
        lambda: torch.autograd.graph.increment_version(w),
        lambda: given[0].add_(1),
        lambda: setattr(given[0], "data", given[0].data[:2]),
    ]
    for number, change in enumerate(changes, 1):
        change()
        for _ in range(3):
            found = packs.packed(w, None, given[0])
            assert_same(found[0], w)
            assert_same(found[1], given[0])
        assert packs.made == [True] * number
    packs.packed(w, given[0])
    packs.packed(w, None, given[0], how=2)
    packs.packed(w, None, given[0], stream=8)
    assert len(packs.made) == len(changes) + 3 and held(packing) == 4
    kept = packing.kept_of(types.SimpleNamespace(how=1), (w, None, given[0]), 7)
    assert kept.is_of((w, None, given[0]))
    given.clear()
    gc.collect()
    assert held(packing) == 0
    assert kept.packed is None and not kept.is_of((w, None, torch.zeros(3)))


def test_weights_in_training_and_in_graphs_are_packed_at_each_call(packing, packs, torch):
    w = torch.ones(3, requires_grad=True)
    for _ in range(2):
        w.data.mul_(2)  # as optimizers of other libraries write: autograd sees nothing
        assert_same(packs.packed(w)[0], w.detach())
    with torch.inference_mode():
        made = torch.ones(3)
        for _ in range(2):
            packs.packed(made)
    packs.capturing.append(True)
    w = w.detach()
    for _ in range(2):
        packs.packed(w)
    assert packs.made == [False] * 6 and held(packing) == 0


@pytest.mark.parametrize("learning", [0, 1])
def test_weights_that_learned_for_a_while_are_packed_anew(packing, packs, torch, learning):
    """Frozen, trained by what leaves no version, and frozen again."""
    weights = torch.ones(3), None, torch.zeros(3)
    for number in range(1, 4):
        for _ in range(2):
            assert_same(packs.packed(*weights)[0], weights[0])
        kept = packing.kept_of(types.SimpleNamespace(how=1), weights, 7)
        chosen = weights[2 * learning].requires_grad_()
        packs.packed(*weights)
        weights[0].data.mul_(2)
        chosen.requires_grad_(False)
        assert packs.made == [True, False] * number
        assert kept.packed is None and held(packing) == 0


# -------------------------------------------------------------------------- weights of modules


def modules(st, torch, device):
    conv = st.nn.SparseConv2d(8, 8, 3, padding=1, block_size=6, precision="tf32", device=device)
    unit = st.nn.SparseBottleneck(8, 4, block_size=6, precision="tf32", device=device)
    return conv, unit


def forget(module):
    """Make a module compute as if for the first time."""
    return pickle.loads(pickle.dumps(module))


def test_a_module_sees_every_change_of_its_weights(st, torch, device):
    torch.manual_seed(0)  # of the weights: some would leave nothing of a unit but its input
    x = draw(torch, 1, 8, 16, 16, device=device)
    mask = torch.ones(1, 16, 16, dtype=torch.bool, device=device)
    for module in modules(st, torch, device):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        state = copy.deepcopy(module.state_dict())

        def step(module=module, optimizer=optimizer):
            module.train()
            module(x, mask).square().mean().backward()
            optimizer.step()
            module.eval()

        def fused(module=module):  # fine-tuning in evaluation; this step leaves no version
            optimizer = torch.optim.SGD(module.parameters(), lr=0.5, fused=True)
            module(x, mask).square().mean().backward()
            optimizer.step()

        def raw(module=module):  # as optimizers of other libraries write: autograd sees nothing
            module.train()
            next(module.parameters()).data.mul_(3)
            module.eval()

        def replaced(module=module):
            for inner in (module, *module.children()):
                if isinstance(inner, torch.nn.Conv2d):
                    inner.weight = torch.nn.Parameter(inner.weight.detach() * 2)

        def loaded(module=module, state=state):
            module.load_state_dict(state)

        def in_place(module=module):
            for parameter in module.parameters():
                parameter.mul_(0.5)

        results = []
        module.eval()
        for change in (step, fused, in_place, raw, replaced, loaded):
            with torch.set_grad_enabled(change in (step, fused)):
                change()
            with torch.no_grad():
                results += [module(x, mask), module(x, mask)]
                assert_same(results[-1], results[-2])
                assert_same(results[-1], forget(module)(x, mask))
            if len(results) > 2:
                assert not torch.equal(results[-1], results[-3])


def test_a_module_records_gradients_in_evaluation_too(st, torch, device):
    x = draw(torch, 1, 8, 16, 16, device=device)
    mask = torch.ones(1, 16, 16, dtype=torch.bool, device=device)
    for module in modules(st, torch, device):
        module.eval()
        with torch.no_grad():
            expected = module(x, mask)
        y = module(x, mask)
        assert_same(y.detach(), expected)
        y.sum().backward()
        assert all(p.grad is not None and p.grad.any() for p in module.parameters())


def test_what_a_module_keeps_is_not_part_of_it(st, torch, device):
    x = draw(torch, 1, 8, 16, 16, device=device)
    mask = torch.ones(1, 16, 16, dtype=torch.bool, device=device)
    for module in modules(st, torch, device):
        names = set(module.state_dict())
        module.eval()
        with torch.no_grad():
            y = module(x, mask)
            assert module._kept is not None
            for twin in (copy.deepcopy(module), forget(module)):
                assert twin._kept is None and set(twin.state_dict()) == names
                assert_same(twin(x, mask), y)
                for parameter in twin.parameters():
                    parameter.zero_()
                assert_same(module(x, mask), y)
            module.train()
            assert module._kept is None
            module.eval()(x, mask)
            module.double()
            assert module._kept is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_fused_kernels_see_weights_change(st, torch, require, dtype):
    """Each by an optimizer's step, between two calls alike, on two streams."""
    on_device(require, torch, "cuda")
    dtype = getattr(torch, dtype)
    x = draw(torch, 2, 8, 8, 32, dtype=dtype, device="cuda")
    w = draw(torch, 3, 3, 32, 16, dtype=dtype, device="cuda")
    tensors = bottleneck_weights(torch, 32, 8, 32, device="cuda")
    tensors[:3] = [t.to(dtype) for t in tensors[:3]]
    weights, listed = sb.BottleneckWeights(*tensors), table(torch, "cuda")
    options = {"precision": "tf32", "method": "fused"}
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    optimizer = torch.optim.SGD([w, *tensors], lr=0.1)
    for _ in range(4):
        for t in (w, *tensors):
            t.grad = torch.ones_like(t)
        optimizer.step()
        torch.cuda.synchronize()
        for stream in streams:
            with torch.cuda.stream(stream):
                for _ in range(2):
                    y = st.sparse_conv2d(x, w, listed, PARAMS, **options)
                    assert_same(y, sb.sparse_conv2d(x, w, listed, PARAMS, **options))
                    unit = (x, weights, listed, UNIT)
                    z = st.sparse_res_block_bottleneck(*unit, **options)
                    assert_same(z, sb.sparse_res_block_bottleneck(*unit, **options))


@pytest.mark.gpu
def test_a_graph_packs_the_weights_of_each_replay(st, torch, require):
    on_device(require, torch, "cuda")
    x, listed = draw(torch, 2, 8, 8, 32, device="cuda"), table(torch, "cuda")
    w = draw(torch, 3, 3, 32, 16, device="cuda")

    def run():
        return st.sparse_conv2d(x, w, listed, PARAMS, method="fused")

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(), run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for factor in (2, 3):
        w.mul_(factor)
        graph.replay()
        assert_same(y, run())
