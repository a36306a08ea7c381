"""sbnet_cupy.torch in CUDA graphs and on side streams: PyTorch's stream, PyTorch's memory."""

import pytest

from support.assertions import assert_close, assert_same
from support.torch_cases import on_device
from support.torch_chain import GRID, PARAMS, TERMS, assert_chain, chain, inputs


@pytest.fixture(autouse=True)
def _fresh(torch):
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor's own imports
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # the first one that PyTorch makes
def test_reduce_overhead_replays_on_new_data(st, torch, require):
    """CUDA graphs behind torch.compile: no Python runs in a replay, and results are fresh."""
    on_device(require, torch, "cuda")
    run = torch.compile(
        lambda *arrays: chain(st, *arrays)[1:], fullgraph=True, mode="reduce-overhead"
    )
    for seed in range(8):
        arrays = inputs(torch, "cuda", seed)
        torch.compiler.cudagraph_mark_step_begin()
        results = [t.clone() for t in run(*arrays)]
        for actual, expected in zip(results, chain(st, *arrays)[1:], strict=True):
            assert_close(actual, expected, terms=TERMS, dtype="float32")


@pytest.mark.gpu
def test_a_graph_replays_on_new_data(st, torch, require):
    on_device(require, torch, "cuda")
    static = inputs(torch, "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compile the kernels
        for _ in range(2):
            chain(st, *static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = chain(st, *static)
    junk = [torch.full((1 << 16,), float("nan"), device="cuda") for _ in range(50)]
    for seed in range(5):
        arrays = inputs(torch, "cuda", seed)
        for kept, new in zip(static, arrays, strict=True):
            kept.copy_(new)
        graph.replay()
        assert_chain(results, chain(st, *arrays))
    assert all(t.isnan().all() for t in junk)


@pytest.mark.gpu
def test_a_training_step_is_captured(st, torch, require):
    on_device(require, torch, "cuda")
    x, mask, w = inputs(torch, "cuda")
    x.requires_grad_()
    w.requires_grad_()

    def step():
        *_, added, y = chain(st, x, mask, w)
        return torch.autograd.grad(added.square().sum() + y.square().sum(), (x, w))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2):
        with torch.no_grad():
            for kept, new in zip((x, mask, w), inputs(torch, "cuda", seed), strict=True):
                kept.copy_(new)
        graph.replay()
        for actual, expected in zip(captured, step(), strict=True):
            size = expected.abs().max().item()
            assert_close(actual, expected, terms=9 * 64, dtype="float32", magnitude=size)


@pytest.mark.gpu
def test_work_follows_torchs_current_stream(st, torch, require):
    """The input is late on a side stream: read on any other, it would still be zeros."""
    on_device(require, torch, "cuda")
    stream = torch.cuda.Stream()
    x = torch.zeros(2, 512, 512, 64, device="cuda")
    rows = torch.tensor([[0, 1, 1], [1, 0, 0]], dtype=torch.int32, device="cuda")
    count = torch.tensor([2], dtype=torch.int32, device="cuda")
    slow = torch.rand(4096, 4096, device="cuda")
    for value in range(1, 11):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(3):
                slow = torch.tanh(slow @ slow)
            x.fill_(value)
            blocks = st.sparse_gather(x, count, rows, bsize=32)
            y = st.sparse_scatter(blocks, count, rows, x, bsize=32, add=True)
            found = [t.sum(dtype=torch.float64).item() for t in (blocks, y)]
            pixels = 2 * 32 * 32
            assert found == [value * n * 64 for n in (pixels, 2 * 512 * 512 + pixels)]


@pytest.mark.gpu
def test_the_backward_pass_runs_on_the_stream_of_the_forward_pass(st, torch, require):
    on_device(require, torch, "cuda")
    stream = torch.cuda.Stream()
    x, mask, w = inputs(torch, "cuda")
    active = st.reduce_mask(mask, PARAMS.bcount, **GRID)
    expected = torch.autograd.grad(
        st.sparse_conv2d(x, w.requires_grad_(), active, PARAMS).sum(), w
    )[0]
    torch.cuda.synchronize()
    slow = torch.rand(4096, 4096, device="cuda")
    for _ in range(5):
        with torch.cuda.stream(stream):
            for _ in range(3):
                slow = torch.tanh(slow @ slow)
            late = x + 0 * slow[0, 0]
            y = st.sparse_conv2d(late, w, active, PARAMS)
            y.sum().backward()
        torch.cuda.current_stream().wait_stream(stream)
        assert_same(w.grad, expected)
        w.grad = None


@pytest.mark.gpu
def test_what_the_operators_allocate_is_torchs_memory(st, torch, require):
    """Freed memory returns to PyTorch's allocator, which counts it."""
    on_device(require, torch, "cuda")
    arrays = inputs(torch, "cuda")
    chain(st, *arrays)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    results = chain(st, *arrays)
    held = sum(t.nbytes for t in (*results[0], *results[1:]))
    assert torch.cuda.memory_allocated() - before >= held
    del results
    assert torch.cuda.memory_allocated() == before
