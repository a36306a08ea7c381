"""What a call costs the calling thread on a GPU, eager and as part of a CUDA graph.

The image is small, so that the GPU keeps up; the device is idle when a batch of calls begins.
"""

from functools import partial

import numpy as np

import sbnet_cupy as sb
from benchmarks.block_sparse import bench_fused_bottleneck, bench_fused_conv
from benchmarks.harness.cases import ORIGINAL, Case
from benchmarks.harness.check import (
    WrongResult,
    check_gather,
    check_indices,
    check_scatter,
    compare,
)
from benchmarks.harness.fused import Problem
from benchmarks.harness.fused_cases import STAGES, stage_case
from benchmarks.harness.inputs import filled_sets, find_blocks, to_host
from benchmarks.harness.rows import OURS
from benchmarks.harness.session import Work
from benchmarks.harness.timing import Contender

OP = "host_cost"
FUSED = {
    "fused_conv": bench_fused_conv.Conv,
    "fused_bottleneck": bench_fused_bottleneck.Bottleneck,
}


def cases(session):
    """Return what is measured: on a CPU, where a call is its work, nothing."""
    if session.cpu:
        return []
    shape, block, mask, _ = ORIGINAL[5]
    return [
        Case(op, "host", shape, "float32", (block, block), mask, 0.1)
        for op in ("reduce_mask", "sparse_gather", "sparse_scatter", "chain")
    ] + [stage_case(op, STAGES[-1], "float16", "host", mask, 0.1) for op in FUSED]


def works(case, session):
    """Yield (density, active blocks, workload) for each way to call the op of a case."""
    blocks = find_blocks(case, session)
    if case.op in FUSED:
        for variant, contenders, check in _fused(session, blocks, case):
            yield blocks.density, blocks.count, Work(variant, None, contenders, check)
        return
    x = filled_sets(session, 1, case.shape, np.dtype(case.dtype))[0]
    make = {
        "reduce_mask": _reduce_mask,
        "sparse_gather": _gather,
        "sparse_scatter": _scatter,
        "chain": _chain,
    }[case.op]
    for variant, contenders, check in make(session, blocks, x):
        yield blocks.density, blocks.count, Work(variant, None, contenders, check)


def _host(name, call, **options):
    return Contender(name, [call], "host", **options)


def _reduce_mask(session, blocks, x):
    call = partial(sb.reduce_mask, blocks.mask, blocks.params.bcount, **blocks.gather_grid)

    def check(contender):
        active = contender.calls[0]()
        found = active.active_block_indices[: active.count()]
        check_indices(blocks.mask, to_host(found), blocks.params.bcount, blocks.gather_grid)

    yield "capacity", [_host(OURS, partial(call, capacity=blocks.count))], check
    yield "waits for the count", [_host(OURS, call)], check


def _gather(session, blocks, x):
    ours = partial(sb.sparse_gather, x, *blocks.active, **blocks.gather_grid)
    out = ours()
    channel = session.xp.ones(x.shape[3], np.float32)
    fused = {"scale": channel, "shift": channel, "activation": "relu"}

    def check(contender, **options):
        check_gather(x, session.native(contender.calls[0]()), blocks, options)

    yield "new result", [_host(OURS, ours)], check
    yield "out=", [_host(OURS, partial(ours, out=out))], check
    yield "fused, out=", [_host(OURS, partial(ours, out=out, **fused))], partial(check, **fused)
    yield "eight columns", _others(session, x), partial(_check_columns, session, x)


def _others(session, x):
    """Return one indexing call of each other library, for comparison."""
    eight = session.xp.arange(8)
    found = [_host("cupy take", partial(session.xp.take, x, eight, axis=2))]
    if session.torch:
        image, columns = map(session.torch.from_dlpack, (x, eight))
        found.append(_host("torch index_select", partial(image.index_select, 2, columns)))
    return found


def _check_columns(session, x, contender):
    compare(to_host(session.native(contender.calls[0]())), to_host(x[:, :, :8]))


def _scatter(session, blocks, x):
    stack = filled_sets(
        session, blocks.count, (*blocks.params.bsize_out, x.shape[3]), x.dtype, seed=50
    )
    grid = blocks.scatter_grid
    ours = partial(sb.sparse_scatter, stack, *blocks.active, x, **grid, out=x)

    def check(contender, **options):
        def call():
            contender.calls[0]()
            session.synchronize()

        check_scatter(x, stack, blocks, options, call)

    yield "in place", [_host(OURS, ours)], check
    add = partial(ours, add=True)
    yield "add, in place", [_host(OURS, add)], partial(check, add=True)


def _fused(session, blocks, case):
    problem = Problem(session, case, FUSED[case.op], sets=1)
    x, y = problem.sets()[0]
    ours = partial(problem.layer.call, x, blocks=blocks, active=blocks.active)
    check = partial(problem.check, blocks)
    yield "out=", [_host(OURS, partial(ours, out=y))], check

    def check_new(contender):
        y[...] = contender.calls[0]()
        problem.compare(blocks)

    yield "new result", [_host(OURS, ours)], check_new


def _chain(session, blocks, x):
    """Three ops: list the blocks, gather output tiles, add them to the image they came from."""
    grid, bcount = blocks.scatter_grid, blocks.params.bcount
    capacity = bcount[0] * bcount[1]
    y = session.xp.empty_like(x)

    def chain(x=x, mask=blocks.mask, y=y):
        active = sb.reduce_mask(mask, bcount, capacity=capacity, **grid)
        stack = sb.sparse_gather(x, *active, **grid)
        return active, stack, sb.sparse_scatter(stack, *active, x, add=True, out=y, **grid)

    def check(contender):
        *_, found = contender.calls[0]()
        session.synchronize()
        arrays = (to_host(x), to_host(blocks.mask), np.empty(x.shape, x.dtype))
        *_, expected = chain(*arrays)
        compare(to_host(found), expected)
        if (expected == arrays[0]).all():
            raise WrongResult("the chain changed nothing")

    yield "eager, host time", [_host(OURS, chain)], check
    note = "the copy of the image under the blocks included"
    yield "graph, device time", [Contender(OURS, [chain] * 8, note=note)], check
