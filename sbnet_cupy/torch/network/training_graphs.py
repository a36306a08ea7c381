"""CUDA graphs of a sparsified network in training: a call, and its gradients, without host time.

By PyTorch's ``make_graphed_callables``, made safe to use: every call is held against what the
graphs were made of, and what comes out is copied from their memory, which the next call writes.
"""

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from .ends import check_call
from .graphs import check_alike, no_collection
from .state import State


def graphed(sparse, x, mask):
    """Return ``run(x, mask)``, which replays CUDA graphs of a call and of its gradients.

    It is called as the network is, in training, and gives the network's results and gradients. To
    make it changes neither the network nor the state of the random generators. Without
    ``capacity`` there is room for every block. On a CPU there is no graph, and ``run`` calls the
    network.

    There is memory for one call: its gradients must be computed before the next call, and once.
    They have no gradients of their own.
    """
    check_call(x, mask)
    given, settings = _likeness(x, mask), _settings(sparse, x)
    call = _Graphs(sparse, x, mask).replay if x.is_cuda else sparse

    def run(x, mask):
        check_alike(given, _likeness(x, mask))
        if _settings(sparse, x) != settings:
            raise RuntimeError(
                "training, autocast, and whether x requires a gradient must be as they were when "
                "the call was graphed; set them so, or call the network itself"
            )
        return call(x, mask)

    return run


def _likeness(x, mask):
    return x.shape, x.dtype, x.device, mask.shape, mask.dtype


def _settings(sparse, x):
    cast = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if cast else None
    return sparse.training, dtype, x.requires_grad


class _Graphs:
    """The graphs of a call and of its gradients."""

    def __init__(self, sparse, x, mask):
        self.sparse, self.calls = sparse, 0
        if State(sparse.model).hooked:
            raise RuntimeError(
                "a network with forward hooks has no CUDA graph in training, as replays would not "
                "call them; remove them, or call the network itself"
            )
        named = {name: p for name, p in sparse.named_parameters() if p.requires_grad}
        self.parameters = list(named.values())
        # Leaves of their own: a result of an earlier call may still hold the nodes that add up the
        # gradients of the parameters, and these belong to another stream.
        self._leaves = {name: p.detach().requires_grad_() for name, p in named.items()}
        own = x.detach().clone(memory_format=torch.preserve_format), mask.clone()
        own[0].requires_grad_(x.requires_grad)
        capacity, buffers = sparse.capacity, [(b, b.clone()) for b in sparse.buffers()]
        sparse.capacity = 1.0 if capacity is None else capacity
        try:
            with (
                torch.cuda.device(x.device), torch.random.fork_rng([x.device]), torch.enable_grad(),
                no_collection(),
            ):  # fmt: skip
                self._replay = torch.cuda.make_graphed_callables(
                    self._call, (*own, *self._leaves.values()), allow_unused_input=True
                )
        finally:
            sparse.capacity = capacity
            with torch.no_grad():
                for buffer, before in buffers:  # running statistics have followed the warm-up
                    buffer.copy_(before)
        self.noted, self.state = sparse._last, State(sparse.model)
        self.held = self._held()

    def _call(self, x, mask, *parameters):
        """Call the network with these parameters; keep how its result is made of tensors."""
        given = dict(zip(self._leaves, parameters, strict=True))
        leaves, self.tree = tree_flatten(functional_call(self.sparse, given, (x, mask)))
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise TypeError(
                "the network's result must be made of tensors in tuples, lists and dicts to come "
                "out of a CUDA graph in training"
            )
        return tuple(leaves)

    def _held(self):
        """Return what graphs take for granted of parameters and buffers; numbers may change."""
        return [(t.data_ptr(), t.requires_grad) for t in self.state.tensors]

    def replay(self, x, mask):
        """Replay the call."""
        if not self.state.is_bound_alike() or self._held() != self.held:
            raise RuntimeError(
                "the network has changed since its call was graphed: an attribute of a module was "
                "set, or a parameter or buffer was moved, replaced, converted or frozen; call "
                "graphed() again"
            )
        with torch.cuda.device(x.device):
            self.calls += 1
            x, *parameters = _Into.apply(x, *self.parameters)
            leaves = _OutOf.apply(self, *self._replay(x, mask, *parameters))
        self.sparse._is_trained = True  # running statistics change, of which no version tells
        self.sparse._last = self.noted
        return tree_unflatten(leaves, self.tree)


class _Into(Function):
    """What enters a graph, whose gradients are copied out of its memory."""

    @staticmethod
    def forward(ctx, *tensors):
        return tuple(t.detach() for t in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return tuple(g if g is None else g.clone() for g in grads)


class _OutOf(Function):
    """What a graph has computed, copied out of its memory."""

    @staticmethod
    def forward(ctx, graphs, *leaves):
        ctx.graphs, ctx.number = graphs, graphs.calls
        return tuple(leaf.clone() for leaf in leaves)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        if ctx.number != ctx.graphs.calls:
            raise RuntimeError(
                "the gradients of a graphed call must be computed before the next call, which has "
                "written over what they need; for several calls at once call the network itself"
            )
        return None, *grads
