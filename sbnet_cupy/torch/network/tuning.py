"""The share of active blocks from which whole images are faster than a stack, measured."""

import time

import torch

from . import cuda
from .compiled import Compiled, warn_uncompiled
from .ends import check_device, check_image
from .graphs import WaitsForDevice, capture
from .table import BlockTable, PictureTable

SHARES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0)


@torch.no_grad()
def tune(sparse, x, compile):
    """Measure whole images against stacks of some shares; set and return what was found.

    On a GPU these are times of CUDA graphs, which hold no time of the host.
    """
    if sparse.training:
        raise RuntimeError("tune needs a network in evaluation, got one in training")
    if not (isinstance(compile, (bool, dict)) or (isinstance(compile, str) and compile == "auto")):
        raise ValueError(f'compile must be "auto", a bool or a dict, got {compile!r}')
    check_image(x)
    check_device(sparse.model, x)
    n, _, h, w = x.shape
    grid = tuple(-(-s // b) for s, b in zip((h, w), sparse.block_size, strict=True))
    total, block = n * grid[0] * grid[1], sparse.block_size
    order = torch.arange(total, device=x.device).view(n, *grid)
    partly = _mask_of((order < total - 1) | (total < 2), block, (h, w))
    runs = {"dense": lambda: sparse._run(PictureTable(partly, block, (h, w)), x)}
    sparse._compiled = _compiled(sparse, x, partly, compile)
    if sparse._compiled is not None:
        runs["compiled"] = lambda: sparse._compiled(
            sparse, x, PictureTable(partly, block, (h, w)), 0.0
        )
    for share in SHARES:
        rows = max(round(share * total), 1)  # whole rows of blocks, as blobs have neighbours
        table = _stack_of(order < rows, rows, block, (h, w))
        runs[share] = lambda table=table: sparse._run(table(), x)
    best = _times_on_gpu(runs, x) if x.is_cuda else _times_on_cpu(runs)
    if best["dense"] <= best.get("compiled", best["dense"]):
        sparse._compiled = None
    sparse.break_even = _crossing(best)
    return best


def _compiled(sparse, x, mask, compile):
    """Return the network compiled for such images, or None."""
    if compile is False or (compile == "auto" and not x.is_cuda):
        return None
    try:
        compiled = Compiled(sparse, x, mask, compile if isinstance(compile, dict) else {})
        compiled(sparse, x, PictureTable(mask, sparse.block_size, tuple(x.shape[2:])), 0.0)
    except Exception as error:
        warn_uncompiled(error)
        return None
    return compiled


def _mask_of(chosen, block, size):
    """Return a mask ``[N, H, W]`` that is set in the chosen blocks."""
    mask = chosen.repeat_interleave(block[0], 1).repeat_interleave(block[1], 2)
    return mask[:, : size[0], : size[1]].contiguous()


def _stack_of(chosen, rows, block, size):
    """Return a function that makes the table of chosen blocks; on a GPU nothing in it waits."""
    if not chosen.is_cuda:
        return lambda: BlockTable.of_blocks(chosen, rows, rows, block, size)
    mask = _mask_of(chosen, block, size)
    return lambda: BlockTable(*cuda.list_blocks(mask, block, rows), block, size)


def _crossing(times):
    """Return the share at which a stack takes as long as whole images; over 1 if at none."""
    dense = min(times["dense"], times.get("compiled", times["dense"]))
    last = 0.0, 0.0
    for share, time_ in ((s, t) for s, t in times.items() if not isinstance(s, str)):
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
            graph, result = capture(run, x)
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
