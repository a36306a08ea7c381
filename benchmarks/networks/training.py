"""A training step: forward, gradients, and stochastic gradient descent with momentum.

Under autocast to bfloat16, weights in float32, in one CUDA graph with the mask in it. The loss is
that of a classifier. Batch norms take the statistics of active pixels.
"""

import copy
import itertools

import torch
from torch.nn import functional as F

from benchmarks.networks.timing import captured, clock, graph_times, peak_of
from sbnet_cupy.torch import sparsify


def step_of(model, call, n):
    """Return a training step of a model that is run by ``call()``."""
    rate = 1e-4
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, foreach=True)
    target = torch.arange(n, device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = F.cross_entropy(call().float(), target)
        loss.backward()
        optimizer.step()

    return step


def times(model, x, masks, block, compiles=True):
    """Yield (what, microseconds of replays, of an eager step by the clock, Peak, more).

    The dense steps first, then one for each of ``masks``: (mask, number of active blocks). ``more``
    are microseconds, by the clock, of eager steps by ``sparse.graphed`` and by ``replay=True``, the
    latter with the mask flipped at every other call and no capacity; None of dense steps.
    """
    model = copy.deepcopy(model).float().train()
    x = x.float()
    ways = {"eager": model}
    if compiles:
        ways["compiled"] = torch.compile(model, dynamic=False)
    for way, run in ways.items():
        step = step_of(model, lambda run=run: run(x), len(x))
        yield way, *_measured(step), None
    for mask, count in masks:
        sparse = sparsify(model, block, capacity=count).train()
        step = step_of(model, lambda s=sparse, m=mask: s(x, m), len(x))
        measured = _measured(step)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            graphed = sparse.graphed(x, mask)
        step = step_of(model, lambda g=graphed, m=mask: g(x, m), len(x))
        for _ in range(3):
            step()
        graphed = clock(step, 10)
        yield count, *measured, (graphed, _replayed(model, x, mask, block))


def _replayed(model, x, mask, block):
    """Return the time of an eager step by ``replay=True``, with masks of one size by turns."""
    sparse = sparsify(model, block, replay=True).train()
    turns = itertools.cycle((mask, mask.flip(2)))
    step = step_of(model, lambda: sparse(x, next(turns)), len(x))
    for _ in range(6):
        step()
    return clock(step, 10)


def _measured(step):
    for _ in range(3):
        step()
    memory, wall = peak_of(step), clock(step, 10)
    graph = captured(step)
    return graph_times(graph), wall, memory
