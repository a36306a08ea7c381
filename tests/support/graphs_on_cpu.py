"""Calls as on a GPU, on the CPU: lists of blocks, and graphs in training.

Where a graph is replayed the call runs again, and writes to memory as a graph does.
"""

import contextlib
import types
import weakref


def list_blocks(mask, block, capacity):
    """List the blocks of a mask as the kernel does."""
    from sbnet_cupy.torch.network.table import BlockTable, active_blocks

    on = active_blocks(mask, block)
    count = int(on.sum())
    rows = count if capacity is None else capacity
    table = BlockTable.of_blocks(on, rows, None, block, tuple(mask.shape[1:]))
    return table.counts, table.indices[:rows], table.places


def capture(graphs, leaves):
    """Do what ``Graphs._capture`` does; a call writes over the activations of the one before it."""
    import torch

    from sbnet_cupy.torch.network.together import Together

    wanted = [t for t in (*graphs.own, *leaves) if t.requires_grad]
    memory, kept = graphs.memory, types.SimpleNamespace(number=0)
    number, graphs = id(graphs), weakref.proxy(graphs)  # which holds what follows

    def call():
        alone = graphs.again or contextlib.nullcontext  # a graph calls no function of Python's
        with torch.enable_grad(), graphs._autocast(), alone():
            return graphs._call(graphs.own, leaves)

    def replay():
        kept.number += 1
        memory.activations = (number, kept.number), call()
        for (own, _), result in zip(graphs.results, memory.activations[1], strict=True):
            own.copy_(result.detach())

    def replay_gradients():
        owner, results = memory.activations
        assert owner == (number, kept.number)
        memory.activations = None  # the gradients have written over them
        results = [r for r in results if r.requires_grad]
        found = torch.autograd.grad(results, wanted, graphs.own_grads, allow_unused=True)
        for own, grad in zip(graphs.found.tensors, found, strict=True):
            assert (own is None) == (grad is None)
            if own is not None:
                own.copy_(grad)
        for own, new in zip(graphs.found.joined, graphs.found.join(), strict=True):
            own.copy_(new)

    results = call()
    graphs.own_grads = [torch.zeros_like(r) for r in results if r.requires_grad]
    some = [r for r in results if r.requires_grad]
    if some:
        found = torch.autograd.grad(some, wanted, graphs.own_grads, allow_unused=True)
        graphs.found = Together(found)
    graphs.results = [(r.detach().clone(), r.requires_grad) for r in results]
    graphs.graph = types.SimpleNamespace(replay=replay)
    graphs.graph_of_gradients = types.SimpleNamespace(replay=replay_gradients)


def patch(monkeypatch):
    """Let graphs in training be these."""
    import torch

    from sbnet_cupy.torch.network import training_graphs

    monkeypatch.setattr(training_graphs.Graphs, "_capture", capture)
    monkeypatch.setattr(training_graphs, "new_memory", lambda device: (None, None))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


class _Graph:
    """A call that runs again where a graph would be replayed."""

    def __init__(self, run):
        self.run, self.result = run, run()

    def replay(self):
        for old, new in zip(self.result, self.run(), strict=True):
            old.copy_(new)


def _captured(run, like):
    graph = _Graph(run)
    return graph, graph.result


def patch_calls(monkeypatch):
    """Let the graphs of calls of a network at sites be these; rehearsals compile nothing."""
    import torch

    from sbnet_cupy.torch.network import rehearsal
    from sbnet_cupy.torch.submanifold import replay

    patch(monkeypatch)
    note = types.SimpleNamespace(is_there=lambda: False, write=lambda: None)
    event, zeros = types.SimpleNamespace(record=lambda: None, query=lambda: True), torch.zeros
    for where, name, new in (
        (replay, "capture", _captured), (torch.cuda, "Event", lambda: event),
        (rehearsal, "Note", lambda work: note), (rehearsal, "compile_kernels", len),
        (torch, "zeros", lambda *sizes, pin_memory=False, **how: zeros(*sizes, **how)),
    ):  # fmt: skip
        monkeypatch.setattr(where, name, new)
