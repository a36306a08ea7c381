"""CUDA graphs of a sparsified network, its receptive field, and its break-even share."""

import copy
import math
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...errors import ShapeError
from . import cuda
from . import tensor as T
from .table import BlockTable, PictureTable


def graphed(sparse, x, mask):
    """Return ``run(x, mask)``, which replays a CUDA graph of one call.

    The graph holds the whole call, from the image and the mask to the result, which is copied out
    of it; ``run.graph`` is the graph. Without ``capacity`` there is room for every block, so that
    every mask is right and none is faster than a full one. On a CPU there is no graph, and ``run``
    calls the network.
    """
    if sparse.training:
        raise RuntimeError(
            "graphed needs a network in evaluation, got one in training; call .eval() first"
        )
    given = (x.shape, x.dtype, x.device, mask.shape, mask.dtype)
    replay = _captured(sparse, x, mask) if x.is_cuda else torch.no_grad()(sparse.__call__)

    def run(x, mask):
        got = (x.shape, x.dtype, x.device, mask.shape, mask.dtype)
        if got != given:
            raise ShapeError(
                "x and mask must be like those that the graph was made of, "
                f"{tuple(given[0])} {given[1]} on {given[2]} and {tuple(given[3])} {given[4]}, got "
                f"{tuple(got[0])} {got[1]} on {got[2]} and {tuple(got[3])} {got[4]}"
            )
        return replay(x, mask)

    run.graph = getattr(replay, "graph", None)
    return run


def _captured(sparse, x, mask, outside=None):
    """Capture a call in a CUDA graph; return a function that replays it."""
    own_x, own_mask = x.detach().clone(memory_format=torch.preserve_format), mask.clone()
    capacity = sparse.capacity
    sparse.capacity = 1.0 if capacity is None else capacity
    try:
        with torch.no_grad():
            graph, result = _capture(lambda: sparse._call(own_x, own_mask, outside=outside), own_x)
        noted = sparse._last
    finally:
        sparse.capacity = capacity
    leaves, tree = tree_flatten(result)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor | str | bool | int | float | None):
            raise TypeError(
                "the network's result must be made of tensors in tuples, lists and dicts to be "
                f"copied out of a CUDA graph, got a {type(leaf).__name__}"
            )
    weights = list(sparse._weights.kept.values())

    def replay(x, mask):
        with torch.cuda.device(own_x.device):
            own_x.copy_(x)
            own_mask.copy_(mask)
            graph.replay()
            sparse._last = noted
            copies = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return tree_unflatten(copies, tree)

    replay.graph, replay.weights = graph, weights  # the graph reads their memory
    return replay


def _capture(run, x):
    """Capture ``run()`` on the device of x; return (graph, what ``run`` returned)."""
    with torch.cuda.device(x.device):
        before, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(before)
        try:
            with torch.cuda.stream(stream):
                run()
                with _NoSynchronization():
                    run()
                run()
        finally:
            before.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may go on meanwhile.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                result = run()
        finally:
            torch.cuda.set_stream(before)  # a capture that fails leaves its own
    return graph, result


_SYNCHRONIZING = {
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero",
    "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
}  # fmt: skip


class _NoSynchronization(TorchDispatchMode):
    """Raises where the host would wait for the device, ahead of a capture that would break."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run a function of PyTorch that does not wait."""
        name, result = func._schema.name, None
        waits = name in _SYNCHRONIZING and args[0].is_cuda
        if not waits:
            result = func(*args, **kwargs or {})
            if name in ("aten::_to_copy", "aten::copy_"):
                source = args[1] if name == "aten::copy_" else args[0]
                waits = source.is_cuda and not result.is_cuda
        if waits:
            raise WaitsForDevice(f"the network waits for the device, in {name}")
        return result


class WaitsForDevice(RuntimeError):
    """The host would wait for the device."""


@torch.no_grad()
def receptive_field(sparse, x):
    """Return how many pixels around a block of the input its results depend on.

    A copy of the network runs once on an empty mask, and every layer adds what it looks at.
    """
    twin = copy.deepcopy(sparse).eval()
    on = torch.zeros(
        x.shape[0], *(-(-s // b) for s, b in zip(x.shape[2:], twin.block_size, strict=True)),
        dtype=torch.bool, device=x.device,
    )  # fmt: skip
    table = BlockTable.of_blocks(on, 0, 0, twin.block_size, tuple(x.shape[2:]))
    value = table.gather(x, table.block, (2, 3)).contiguous(memory_format=torch.channels_last)
    table.weights = twin._weights
    out = twin.model(T.StackTensor(value, table, table.block, table.size))
    reach = 0.0
    for leaf in tree_flatten(out)[0]:
        if isinstance(leaf, T.StackTensor):
            reach = max(reach, T.facts(leaf)[4])
        elif isinstance(leaf, torch.Tensor):
            reach = math.inf
    why = table.reduced
    if reach == math.inf or why:
        raise ValueError(
            "halo='exact' needs a network whose results depend on pixels near them, got one with "
            f"{why or 'a function of the whole image'}"
        )
    return math.ceil(reach)


@torch.no_grad()
def tune(sparse, x):
    """Measure whole images against stacks of some shares; set and return what was found.

    On a GPU these are times of CUDA graphs, which hold no time of the host.
    """
    if sparse.training:
        raise RuntimeError("tune needs a network in evaluation, got one in training")
    n, _, h, w = x.shape
    grid = tuple(-(-s // b) for s, b in zip((h, w), sparse.block_size, strict=True))
    total = n * grid[0] * grid[1]
    partly = torch.ones(n, *grid, dtype=torch.bool, device=x.device)
    partly.view(-1)[-1] = total < 2
    make = {"dense": lambda: PictureTable(partly, sparse.block_size, (h, w), False)}
    order = torch.arange(total, device=x.device).view(n, *grid)
    for share in (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0):
        rows = max(round(share * total), 1)
        chosen = order < rows  # whole rows of blocks, as blobs have neighbours
        make[share] = _stack_of(sparse, chosen, rows, (h, w))
    runs = {name: lambda t=table: sparse._run(t(), x) for name, table in make.items()}
    best = _times_on_gpu(runs, x) if x.is_cuda else _times_on_cpu(runs)
    sparse.break_even = _crossing(best)
    return best


def _stack_of(sparse, chosen, rows, size):
    """Return a function that makes the table of chosen blocks; on a GPU nothing in it waits."""
    block = sparse.block_size
    if not chosen.is_cuda:
        return lambda: BlockTable.of_blocks(chosen, rows, rows, block, size)
    mask = chosen.repeat_interleave(block[0], 1).repeat_interleave(block[1], 2)
    mask = mask[:, : size[0], : size[1]].contiguous()
    return lambda: BlockTable(*cuda.list_blocks(mask, block, rows), block, size)


def _crossing(times):
    """Return the share at which a stack takes as long as whole images; over 1 if at none."""
    dense, last = times["dense"], (0.0, 0.0)
    for share, time_ in ((s, t) for s, t in times.items() if s != "dense"):
        if time_ >= dense:
            (a, t), span = last, time_ - last[1]
            return a + (share - a) * (dense - t) / span if span > 0 else share
        last = share, time_
    return 2.0


def _times_on_cpu(runs):
    """Return milliseconds of each of some functions, in turns."""
    times = {name: [] for name in runs}
    for _ in range(5):
        for name, run in runs.items():
            times[name].append(_milliseconds(run))
    return {name: min(values[1:]) for name, values in times.items()}


def _times_on_gpu(runs, x):
    """Return milliseconds of a CUDA graph of each of some functions; one graph is there at a time.

    A network that waits for the device has no graph, and is measured with the host's time.
    """
    times = {}
    for name, run in runs.items():
        try:
            graph, result = _capture(run, x)
        except WaitsForDevice:
            again, result = run, None
        else:
            again = graph.replay
        with torch.cuda.device(x.device):
            times[name] = min(_device_milliseconds(again) for _ in range(5))
        graph = again = result = None  # noqa: F841 (their memory is the next one's)
    return times


def _device_milliseconds(run, calls=10):
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def _milliseconds(run):
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3
