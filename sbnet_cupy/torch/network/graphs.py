"""CUDA graphs of a sparsified network, its receptive field, and its break-even share."""

import copy
import math
import time

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...errors import ShapeError
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


def _captured(sparse, x, mask):
    """Capture a call in a CUDA graph; return a function that replays it."""
    own_x, own_mask = x.detach().clone(memory_format=torch.preserve_format), mask.clone()
    capacity = sparse.capacity
    sparse.capacity = 1.0 if capacity is None else capacity
    try:
        with torch.no_grad(), torch.cuda.device(x.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    sparse(own_x, own_mask)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                result = sparse(own_x, own_mask)
            noted = sparse._last
    finally:
        sparse.capacity = capacity
    leaves, tree = tree_flatten(result)

    def replay(x, mask):
        own_x.copy_(x)
        own_mask.copy_(mask)
        graph.replay()
        sparse._last = noted
        copies = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return tree_unflatten(copies, tree)

    replay.graph = graph
    return replay


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
    """Measure whole images against stacks of some shares; set and return what was found."""
    if sparse.training:
        raise RuntimeError("tune needs a network in evaluation, got one in training")
    n, _, h, w = x.shape
    grid = tuple(-(-s // b) for s, b in zip((h, w), sparse.block_size, strict=True))
    total = n * grid[0] * grid[1]
    on = torch.ones(n, *grid, dtype=torch.bool, device=x.device)
    partly = on.clone()
    partly.view(-1)[-1] = total < 2
    make = [("dense", lambda: PictureTable(partly, sparse.block_size, (h, w), False))]
    order = torch.arange(total, device=x.device).view(n, *grid)
    for share in (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0):
        rows = max(round(share * total), 1)
        chosen = order < rows  # whole rows of blocks, as blobs have neighbours
        make.append(
            (
                share,
                lambda c=chosen, r=rows: BlockTable.of_blocks(c, r, r, sparse.block_size, (h, w)),
            )
        )
    times = {name: [] for name, _ in make}
    for _ in range(5):
        for name, table in make:
            times[name].append(_milliseconds(lambda t=table: sparse._run(t(), x), x))
    best = {name: min(values[1:]) for name, values in times.items()}
    sparse.break_even = _crossing(best)
    return best


def _crossing(times):
    """Return the share at which a stack takes as long as whole images."""
    dense, last = times["dense"], (0.0, 0.0)
    for share, time_ in ((s, t) for s, t in times.items() if s != "dense"):
        if time_ >= dense:
            (a, t), span = last, time_ - last[1]
            return a + (share - a) * (dense - t) / span if span > 0 else share
        last = share, time_
    return 1.0


def _milliseconds(run, x):
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    start = time.perf_counter()
    run()
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return (time.perf_counter() - start) * 1e3
