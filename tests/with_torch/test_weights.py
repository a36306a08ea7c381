"""Weights in sbnet_cupy.torch: each call computes with those of the moment."""

import copy
import pickle

import pytest

import sbnet_cupy as sb
from support.assertions import assert_same
from support.torch_cases import bottleneck_weights, draw, on_device, table

PARAMS = sb.calc_block_params((8, 8), 6, 3)
UNIT = sb.calc_block_params_res_block((8, 8), 6, [1, 3, 1])

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


def test_what_a_unit_keeps_is_not_part_of_it(st, torch, device):
    x = draw(torch, 1, 8, 16, 16, device=device)
    mask = torch.ones(1, 16, 16, dtype=torch.bool, device=device)
    _, unit = modules(st, torch, device)
    names = set(unit.state_dict())
    unit.eval()
    with torch.no_grad():
        y = unit(x, mask)
        assert unit._kept is not None
        for twin in (copy.deepcopy(unit), forget(unit)):
            assert twin._kept is None and set(twin.state_dict()) == names
            assert_same(twin(x, mask), y)
            for parameter in twin.parameters():
                parameter.zero_()
            assert_same(unit(x, mask), y)
        unit.train()
        assert unit._kept is None
        unit.eval()(x, mask)
        unit.double()
        assert unit._kept is None


def test_what_trains_by_another_module_is_seen(st, torch, device):
    """A convolution keeps nothing; a unit sees its shared batch norms count their batches."""
    x = draw(torch, 1, 8, 16, 16, device=device)
    mask = torch.ones(1, 16, 16, dtype=torch.bool, device=device)
    conv, unit = modules(st, torch, device)
    dense = torch.nn.Conv2d(8, 8, 3, padding=1, device=device)
    conv.weight, conv.bias = dense.weight, dense.bias
    for module in (conv, unit):
        module.eval()
        with torch.no_grad():
            before = module(x, mask)
        if module is conv:
            optimizer = torch.optim.SGD(dense.parameters(), lr=0.5, fused=True)
            dense(x).square().mean().backward()
            optimizer.step()
        else:
            module.bn1.train()
            module.bn1(3 * x)
            module.bn1.eval()
        with torch.no_grad():
            after = module(x, mask)
            assert_same(after, forget(module)(x, mask))
        assert not torch.equal(after, before)


def test_frozen_weights_are_constants_until_they_are_not(st, torch, device):
    torch.manual_seed(0)
    x = draw(torch, 1, 8, 16, 16, device=device)
    mask = torch.ones(1, 16, 16, dtype=torch.bool, device=device)
    strided = st.nn.SparseBottleneck(8, 4, 16, 2, block_size=6, device=device)
    for module in (*modules(st, torch, device), strided):
        module.train()
        module(x, mask)  # statistics that are not the usual ones
        with pytest.raises(RuntimeError, match="can be frozen in evaluation alone"):
            module.freeze()
        module.eval()
        state = copy.deepcopy(module.state_dict())

        def changed(module=module, state=state):
            for tensor in module.parameters():
                tensor.data.mul_(-2)

        ways = {
            "train": lambda m=module: m.train().eval(),
            "eval": lambda m=module: m.eval(),
            "load_state_dict": lambda m=module: m.load_state_dict(m.state_dict()),
            "to": lambda m=module: m.to(torch.float64).to(torch.float32),
        }
        for way, thaw in ways.items():
            module.load_state_dict(state)
            expected = module(x, mask)
            assert module.freeze() is module
            y = module(x, mask)
            assert_same(y, expected.detach())
            assert not y.requires_grad and set(module.state_dict()) == set(state)
            changed()
            assert_same(module(x, mask), expected.detach())
            twin = copy.deepcopy(module)
            assert_same(twin(x, mask), forget(module)(x, mask).detach())
            if way == "train":  # gradients of the image are those of the frozen weights
                leaves = [x.clone().requires_grad_() for _ in range(2)]
                module(leaves[0], mask).square().sum().backward()
                module.load_state_dict(state)
                module(leaves[1], mask).square().sum().backward()
                assert_same(leaves[0].grad, leaves[1].grad)
                changed()
            thaw()
            assert not torch.equal(module(x, mask), expected)
            assert_same(module(x, mask).detach(), forget(module)(x, mask).detach())


def test_statistics_of_a_batch_cannot_be_frozen(st, torch):
    unit = st.nn.SparseBottleneck(8, 4, block_size=6).eval()
    unit.bn2.running_mean = unit.bn2.running_var = None
    with pytest.raises(RuntimeError, match="takes those of the batch"):
        unit.freeze()


def test_packed_weights_are_taken_in_place_of_tensors(st, torch, device):
    x, listed = draw(torch, 2, 8, 8, 8, device=device), table(torch, device)
    w, bias = draw(torch, 8, 8, 3, 3, device=device), draw(torch, 8, device=device)
    unit = sb.BottleneckWeights(*bottleneck_weights(torch, 8, 4, 8, device=device))
    packed = sb.PackedWeights(w, bias=bias, w_format="OIHW", precision="tf32")
    packed_unit = sb.PackedBottleneck(unit, precision="tf32")
    options = {"bias": bias, "w_format": "OIHW", "precision": "tf32"}
    mask = torch.ones(2, 8, 8, device=device)
    for autocast in (False, True):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            for _ in range(2):
                for blocks in ((listed, PARAMS), (mask, None)):
                    given = {} if blocks[1] else {"bsize": 4}
                    y = st.sparse_conv2d(x, packed, *blocks, **given)
                    assert_same(y, st.sparse_conv2d(x, w, *blocks, **given, **options))
                y = st.sparse_res_block_bottleneck(x, packed_unit, listed, UNIT)
                args = (x, unit, listed, UNIT)
                assert_same(y, st.sparse_res_block_bottleneck(*args, precision="tf32"))


@pytest.mark.parametrize("method", ["auto", "gather"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_packed_weights_serve_every_dtype_and_method(st, torch, device, dtype, method):
    kind = getattr(torch, dtype)
    x, mask = draw(torch, 2, 8, 8, 8, dtype=kind, device=device), torch.ones(2, 8, 8, device=device)
    w, bias = (draw(torch, *size, dtype=kind, device=device) for size in ((3, 3, 8, 8), (8,)))
    how, packed = {"bsize": 4, "method": method}, sb.PackedWeights(w, bias=bias)
    expected = st.sparse_conv2d(x, w, mask, bias=bias, **how)
    assert_same(st.sparse_conv2d(x, packed, mask, **how), expected)
    w.mul_(2)
    assert_same(st.sparse_conv2d(x, packed, mask, **how), expected)
    packed.refresh()
    assert_same(
        st.sparse_conv2d(x, packed, mask, **how), st.sparse_conv2d(x, w, mask, bias=bias, **how)
    )
    conv = st.nn.SparseConv2d(8, 8, 3, padding=1, block_size=6, method=method, device=device)
    conv, image = conv.to(kind).eval(), x.permute(0, 3, 1, 2)
    y = conv(image, mask)
    assert_same(conv.freeze()(image, mask), y)


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
