"""sbnet_cupy.torch under torch.compile and torch.export."""

import copy
import pickle

import pytest

import sbnet_cupy as sb
from support.assertions import assert_close, assert_same
from support.torch_cases import bottleneck_weights, grid
from support.torch_chain import GRID, PARAMS, TERMS, assert_chain, chain, inputs


@pytest.fixture(autouse=True)
def _fresh(torch):
    torch._dynamo.reset()


def test_active_blocks_unpack_in_compiled_code(st, torch):
    """From PyTorch 2.13 on; before, its two arrays are named, as ``chain`` does."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        pytest.skip("this PyTorch cannot compile it")

    def unpack(x, mask):
        active = st.reduce_mask(mask, PARAMS.bcount, **GRID, capacity=9)
        counts, indices = active
        return st.sparse_gather(x, counts, indices, **GRID) - st.sparse_gather(x, *active, **GRID)

    x, mask, _ = inputs(torch, "cpu", 0)
    assert not compiled(torch, unpack)(x, mask).any()


def compiled(torch, function, backend="aot_eager", **options):
    return torch.compile(function, fullgraph=True, backend=backend, **options)


@pytest.mark.parametrize("capacity", [9, 2])
def test_a_static_capacity_compiles_whole(st, torch, device, capacity):
    run = compiled(torch, lambda *arrays: chain(st, *arrays, capacity=capacity))
    for seed in range(3):
        arrays = inputs(torch, device, seed)
        results = run(*arrays)
        assert type(results[0]) is sb.ActiveBlocks
        assert_chain(results, chain(st, *arrays, capacity=capacity))


def test_a_number_of_blocks_that_is_data_compiles_whole(st, torch, device):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = compiled(torch, lambda *arrays: chain(st, *arrays, capacity=None))
        for seed in range(3):
            arrays = inputs(torch, device, seed)
            assert_chain(run(*arrays), chain(st, *arrays, capacity=None))


def test_sizes_that_change_compile_once(st, torch, device):
    from torch._dynamo.testing import CompileCounterWithBackend

    def convolve(x, mask, w):
        params = sb.calc_block_params(tuple(x.shape), 8, 3)
        active = st.reduce_mask(mask, params.bcount, **grid(params), capacity=9)
        return st.sparse_conv2d(x, w, active, params)

    frames = CompileCounterWithBackend("aot_eager")
    run = compiled(torch, convolve, frames, dynamic=True)
    run(*inputs(torch, device, 2))
    once = frames.frame_count
    for size in (20, 23, 31):
        arrays = inputs(torch, device, 2, size)
        assert_same(run(*arrays), convolve(*arrays))
    assert frames.frame_count == once


def test_gradients_compile(st, torch, device):
    def loss(x, mask, w):
        _, blocks, added, y = chain(st, x, mask, w)
        return blocks.sum() + added.square().sum() + y.square().sum()

    x, mask, w = inputs(torch, device)
    leaves = [[t.clone().requires_grad_() for t in (x, w)] for _ in range(2)]
    for function, (x, w) in zip((loss, compiled(torch, loss)), leaves, strict=True):
        function(x, mask, w).backward()
    for expected, actual in zip(*leaves, strict=True):
        size = expected.grad.abs().max().item()
        assert_close(actual.grad, expected.grad, terms=9 * 64, dtype="float32", magnitude=size)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor's own imports
def test_inductor_compiles(st, torch, device, require):
    require("g++")

    def network(x, mask, w):
        *_, added, y = chain(st, torch.sin(x), mask, w)
        return added + torch.cos(y)

    arrays = inputs(torch, device)
    expected = network(*arrays)
    actual = compiled(torch, network, "inductor")(*arrays)
    assert_close(actual, expected, terms=TERMS, dtype="float32")


def modules(st, torch, device):
    conv = st.nn.SparseConv2d(4, 6, 3, padding=1, block_size=8, capacity=9)
    unit = st.nn.SparseBottleneck(4, 2, block_size=8, capacity=1.0)
    dense = torch.nn.Sequential(
        torch.nn.Conv2d(4, 4, 3, 2, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU(),
        torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.Conv2d(4, 4, 3, padding=1),
    )  # fmt: skip
    whole = st.sparsify(dense, block_size=8, capacity=1.0)
    return [module.to(device).eval() for module in (conv, unit, whole)]


def test_modules_compile_whole(st, torch, device):
    x, mask, _ = inputs(torch, device)
    x = x.permute(0, 3, 1, 2)
    for module in modules(st, torch, device)[:2]:
        run = compiled(torch, module)
        for layout in (x, x.contiguous()):
            y = run(layout, mask)
            expected = module(layout, mask)
            assert y.is_contiguous() == expected.is_contiguous()
            assert_close(y.detach(), expected.detach(), terms=TERMS, dtype="float32")


def test_frozen_modules_compile_whole(st, torch, device):
    x, mask, _ = inputs(torch, device)
    x = x.permute(0, 3, 1, 2)
    for module in modules(st, torch, device)[:2]:
        module.freeze()
        expected = module(x, mask)
        assert_close(compiled(torch, module)(x, mask), expected, terms=TERMS, dtype="float32")


def test_a_sparsified_network_runs_as_it_is_in_what_is_compiled(st, torch, device):
    """Without a capacity: the number of blocks is data."""
    x, mask, _ = inputs(torch, device)
    x, whole = x.permute(0, 3, 1, 2), modules(st, torch, device)[2]
    whole.capacity = None
    with torch.no_grad():
        run = torch.compile(lambda x, mask: whole(x * 2, mask) + 1, backend="eager")
        assert_same(run(x, mask), whole(x * 2, mask) + 1)


@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.parametrize("in_place", [False, True])
def test_hooks_of_a_compiled_network_run_once(st, torch, capacity, in_place):
    """Without a capacity the call is made apart; ``compile`` of the module itself runs, too."""
    x, mask, _ = inputs(torch)
    x, network = x.permute(0, 3, 1, 2), modules(st, torch, "cpu")[2]
    network.capacity = capacity
    with torch.no_grad():
        expected = network(x + 1, mask) * 2
        network.register_forward_pre_hook(lambda module, args: (args[0] + 1, *args[1:]))
        network.register_forward_hook(lambda module, args, out: out * 2)
        if in_place:
            network.compile(backend="eager")
        run = network if in_place else torch.compile(network, backend="eager")
        assert_close(run(x, mask), expected, terms=3 * TERMS, dtype="float32")


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("pickled", [False, True])
def test_copies_of_compiled_modules_have_their_own_weights(st, torch, kind, pickled):
    """As those of PyTorch's modules; what ``compile`` makes calls the module that was compiled."""
    x, mask, _ = inputs(torch)
    x, module = x.permute(0, 3, 1, 2), modules(st, torch, "cpu")[kind]
    module.compile(backend="eager")
    twin = pickle.loads(pickle.dumps(module)) if pickled else copy.deepcopy(module)
    with torch.no_grad():
        before = module(x, mask)
        for parameter in twin.parameters():
            parameter.zero_()
        assert not torch.equal(twin(x, mask), before)
        assert_same(module(x, mask), before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor's own imports
@pytest.mark.parametrize("break_even", [0.0, 2.0])  # whole images, and a stack
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("eager", marks=pytest.mark.exhaustive),
        "aot_eager",
        pytest.param("inductor", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("trains", [False, True])
def test_a_sparsified_network_compiles_whole(st, torch, require, backend, break_even, trains):
    """With a capacity, on a CPU; gradients and the running statistics of batch norms too."""
    if backend == "inductor":
        require("g++")
    torch.manual_seed(0)
    network = modules(st, torch, "cpu")[2].train(trains)
    network.break_even = break_even
    twin = copy.deepcopy(network)
    run = compiled(torch, lambda x, mask: network(x * 2, mask, outside=0.5) + 1, backend)
    for seed in (0, 1):
        x, mask, _ = inputs(torch, seed=seed)
        x = x.permute(0, 3, 1, 2)
        with torch.set_grad_enabled(trains):
            actual, expected = run(x, mask), twin(x * 2, mask, outside=0.5) + 1
        size = max(expected.abs().max().item(), 1.0)
        terms = 3 * TERMS + 256  # three convolutions, and statistics of all pixels
        assert_close(actual, expected, terms=terms, dtype="float32", magnitude=size)
        if trains:
            actual.square().sum().backward()
            expected.square().sum().backward()
            for a, e in zip(network.parameters(), twin.parameters(), strict=True):
                size = max(p.grad.abs().max().item() for p in twin.parameters())
                assert_close(a.grad, e.grad, terms=9 * 256, dtype="float32", magnitude=size)
            for a, e in zip(network.buffers(), twin.buffers(), strict=True):
                assert_close(a.float(), e.float(), terms=terms, dtype="float32")


def test_a_compiled_network_takes_other_sizes_and_says_what_is_wrong(st, torch):
    network = modules(st, torch, "cpu")[2]
    run = compiled(torch, network, dynamic=True)
    with torch.no_grad():
        for size in (16, 24):
            x, mask, _ = inputs(torch, seed=1, size=size)
            x = x.permute(0, 3, 1, 2)
            assert_close(run(x, mask), network(x, mask), terms=3 * TERMS, dtype="float32")
        with pytest.raises(torch._dynamo.exc.Unsupported, match="mask must have shape"):
            run(x, mask[:, 1:])
        network.capacity = None
        with pytest.raises(torch._dynamo.exc.Unsupported):  # its shapes are data
            run(x, mask)


def test_a_compiled_step_is_seen_by_the_next_call(st, torch):
    """A fused optimizer leaves no trace; what was kept of weights is dropped in the graph too."""
    network = modules(st, torch, "cpu")[2]
    x, mask, _ = inputs(torch)
    x = x.permute(0, 3, 1, 2)
    run = compiled(torch, network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        with torch.no_grad():
            for _ in range(3):  # what is kept of weights and calls is used by now
                before = network(x, mask)
        run(x, mask).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            after = network(x, mask)
            assert not torch.equal(after, before)
            assert_same(after, copy.deepcopy(network)(x, mask))


def shares(module):
    """What a network says that its last call computed."""
    return module.computed() if hasattr(module, "computed") else {}


@pytest.mark.filterwarnings("ignore")  # export warns about what it traces, in words that change
def test_modules_export(st, torch, device):
    x, mask, _ = inputs(torch, device)
    x = x.permute(0, 3, 1, 2)
    for module in modules(st, torch, device):
        if hasattr(module, "break_even"):
            module.break_even = 0.0  # a trace has whole images where there is room for all blocks
        exported = torch.export.export(module, (x, mask)).module()
        assert shares(module) == {}  # a trace computes nothing
        for seed in (0, 1):
            x, mask, _ = inputs(torch, device, seed)
            x = x.permute(0, 3, 1, 2)
            assert_same(exported(x, mask).detach(), module(x, mask).detach())


@pytest.mark.filterwarnings("ignore")  # export warns about what it traces, in words that change
@pytest.mark.parametrize("break_even", [0.0, 2.0])
def test_networks_export_without_gradients(st, torch, device, break_even, monkeypatch):
    """Whole images, and a stack; batch norms are folded in the trace.

    A trace has PyTorch's operations, which may sum in another order than a call: by kernels of ours
    on a GPU, and with weights that oneDNN laid out on a CPU.
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    x, mask, _ = inputs(torch, device)
    x, network = x.permute(0, 3, 1, 2), modules(st, torch, device)[2]
    network.break_even = break_even
    with torch.no_grad():
        exported = torch.export.export(network, (x, mask)).module()
        for seed in (0, 1):
            x, mask, _ = inputs(torch, device, seed)
            x = x.permute(0, 3, 1, 2)
            actual, expected = exported(x, mask), network(x, mask)
            assert_close(actual, expected, terms=3 * TERMS, dtype="float32")


def test_a_module_whose_number_of_blocks_is_data_exports(st, torch):
    conv = st.nn.SparseConv2d(4, 6, 3, padding=1, block_size=8)
    x, mask, _ = inputs(torch)
    x = x.permute(0, 3, 1, 2)
    exported = torch.export.export(conv, (x, mask)).module()
    for seed in (0, 1):
        x, mask, _ = inputs(torch, seed=seed)
        x = x.permute(0, 3, 1, 2)
        assert_same(exported(x, mask).detach(), conv(x, mask).detach())


@pytest.mark.parametrize("kind", ["conv", "unit"])
def test_a_module_whose_number_of_blocks_is_data_breaks_the_graph(st, torch, kind):
    if kind == "conv":
        module = st.nn.SparseConv2d(4, 6, 3, padding=1, block_size=8)
    else:
        module = st.nn.SparseBottleneck(4, 2, 4, block_size=8).eval()
    run = torch.compile(module, backend="aot_eager")
    for seed, size in enumerate((20, 20, 23, 31)):
        x, mask, _ = inputs(torch, "cpu", seed, size)
        x = x.permute(0, 3, 1, 2).contiguous()
        assert_same(run(x, mask).detach(), module(x, mask).detach())


@pytest.mark.filterwarnings("ignore")  # export warns about what it traces, in words that change
@pytest.mark.parametrize("capacity", [None, 7, 0.75])
@pytest.mark.parametrize("kind", ["conv", "unit"])
def test_modules_export_for_batches_of_any_size(st, torch, kind, capacity):
    if kind == "conv":
        module = st.nn.SparseConv2d(4, 6, 3, padding=1, block_size=8, capacity=capacity)
    else:
        module = st.nn.SparseBottleneck(4, 2, 4, block_size=8, capacity=capacity).eval()
    x, mask, _ = inputs(torch)
    x, batch = x.permute(0, 3, 1, 2).contiguous(), torch.export.Dim("batch", min=1, max=64)

    def given(images):
        return x[:1].repeat(images, 1, 1, 1), mask[:1].repeat(images, 1, 1)

    shapes = {"x": {0: batch}, "mask": {0: batch}}
    exported = torch.export.export(module, given(2), dynamic_shapes=shapes).module()
    for images in (1, 2, 5):
        actual = exported(*given(images)).detach()
        assert_same(actual, module(*given(images)).detach())


@pytest.mark.filterwarnings("ignore")  # export warns about what it traces, in words that change
def test_lists_of_blocks_and_weights_are_inputs_like_others(st, torch, device):
    x, mask, _ = inputs(torch, device)
    tensors = bottleneck_weights(torch, 4, 2, 4, device=device)
    params = sb.calc_block_params_res_block((16, 16), 8, [1, 3, 1])
    active = st.reduce_mask(mask, params.bcount, **grid(params))

    class Unit(torch.nn.Module):
        def forward(self, x, weights, active):
            return st.sparse_res_block_bottleneck(x, weights, active, params)

    arguments = (x, sb.BottleneckWeights(*tensors), active)
    expected = Unit()(*arguments)
    assert_same(compiled(torch, Unit())(*arguments), expected)
    assert_same(torch.export.export(Unit(), arguments).module()(*arguments), expected)
    conv = st.nn.SparseConv2d(4, 6, 3, padding=1, block_size=8, device=device)
    x = x.permute(0, 3, 1, 2)
    listed = conv.active_blocks(x, mask)
    expected = conv(x, mask).detach()
    assert_same(compiled(torch, conv)(x, *listed).detach(), expected)


def test_checkpoints_compute_again(st, torch, device):
    x, mask, w = inputs(torch, device)
    active = st.reduce_mask(mask, PARAMS.bcount, **GRID)

    def network(x):
        return st.sparse_conv2d(x, w, active, PARAMS, activation="silu")

    leaves = [x.clone().requires_grad_() for _ in range(2)]
    network(leaves[0]).sum().backward()
    checkpoint = torch.utils.checkpoint.checkpoint
    checkpoint(network, leaves[1], use_reentrant=False).sum().backward()
    assert_same(leaves[1].grad, leaves[0].grad)


def core_calls(torch):
    """Return functions that call those of ``sbnet_cupy`` itself, and their arguments."""
    w, kernel = torch.randn(3, 3, 2, 4), torch.randn(3, 3, 2, 5)
    x, mask = torch.randn(2, 16, 16, 2), torch.zeros(2, 16, 16)
    mask[:, 3:9] = 1
    around = {"bsize": (6, 6), "boffset": (-1, -1), "bstride": (4, 4)}

    def three(x, mask):
        active = sb.reduce_mask(mask, (4, 4), **around)
        blocks = sb.sparse_gather(x, *active, **around)[:, 1:-1, 1:-1]
        return sb.sparse_scatter(2 * blocks, *active, torch.zeros_like(x), bsize=(4, 4))

    def of_numpy(x, mask):
        x, mask = x.numpy(), mask.numpy()
        return torch.from_numpy(sb.sparse_conv2d(x, w.numpy(), mask, bsize=4)) + 1

    def of_points(points, features):
        x, _ = sb.voxelize(points, features, voxel_size=1, ranges=[(0, 8)] * 2)
        return sb.submanifold_conv(x, kernel).features.sum(0)

    return {
        "sparse_conv2d": (lambda x, mask: 2 * sb.sparse_conv2d(x, w, mask, bsize=4), x, mask),
        "three": (three, x, mask),
        "numpy": (of_numpy, x, mask),
        "sites": (of_points, 8 * torch.rand(50, 2), torch.randn(50, 2)),
    }


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", ["sparse_conv2d", "three", "numpy", "sites"])
@pytest.mark.filterwarnings("ignore:Dynamo")
def test_functions_of_arrays_stay_out_of_graphs(torch, kind, backend):
    """Dynamo would run their NumPy code by PyTorch's version of it, which computes other things."""
    function, *arguments = core_calls(torch)[kind]
    run = torch.compile(function, backend=backend)
    for change in (0, 0.25):
        x, other = arguments[0] + change, arguments[1]
        assert_same(run(x, other).numpy(), function(x, other).numpy())


@pytest.mark.filterwarnings("ignore:Dynamo")
def test_functions_of_arrays_stay_out_of_graphs_without_a_private_name(torch, monkeypatch):
    function, *arguments = core_calls(torch)["three"]
    monkeypatch.delattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback")
    run = torch.compile(function, backend="aot_eager")
    assert_same(run(*arguments).numpy(), function(*arguments).numpy())


@pytest.mark.parametrize("kind", ["sparse_conv2d", "three", "numpy", "sites"])
def test_functions_of_arrays_in_one_graph_are_refused(torch, kind):
    function, *arguments = core_calls(torch)[kind]
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"call that of sbnet_cupy\.torch"):
        compiled(torch, function)(*arguments)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_network_may_call_compiled_functions(st, torch):
    """Dynamo follows these, and not what the package does of activations."""
    graphs, F = [], torch.nn.functional

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    @torch.compile(backend=backend)
    def gate(y):
        return y * F.silu(y).mean((2, 3), keepdim=True)

    @torch.compile(backend=backend)
    def mixed(tokens):
        return tokens.softmax(1).sin()

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x):
            return mixed(gate(self.conv(x)).flatten(2))

    net, x = Net().double().eval(), torch.randn(2, 3, 24, 40).double()
    mask, expected = torch.ones(2, 24, 40), net(x).detach()
    for break_even in (2.0, 0.0):
        sparse = st.sparsify(net, 8)
        sparse.break_even = break_even
        for records in (False, True):
            with torch.set_grad_enabled(records):
                for _ in range(3):
                    torch.testing.assert_close(sparse(x, mask).detach(), expected)
    functions = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert not [f for f in functions if "conv2d" in f or "permute" in f or "index_select" in f]
