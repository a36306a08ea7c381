"""CUDA graphs of a network in training: a call, and its gradients, without host time.

By PyTorch's ``make_graphed_callables``, made safe to use: every call is held against what the
graphs were made of, and what comes out is copied from their memory, which the next call writes.
"""

import math

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from .ends import check_call
from .graphs import check_alike, likeness, no_collection
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
    given, settings = likeness(x, mask), settings_of(sparse, x)
    if x.is_cuda:
        capacity = sparse.capacity
        sparse.capacity = 1.0 if capacity is None else capacity
        try:
            graphs = Graphs(sparse, (x, mask), sparse.model)
        finally:
            sparse.capacity = capacity
        noted = sparse._last

    def run(x, mask):
        check_alike(given, likeness(x, mask))
        check_settings(settings, settings_of(sparse, x), "x")
        if not x.is_cuda:
            return sparse(x, mask)
        result = graphs.replay(x, mask)
        sparse._is_trained = True  # running statistics change, of which no version tells
        sparse._last = noted
        return result

    return run


def settings_of(module, x):
    """Return what a graph in training depends on besides the module's state and its inputs."""
    cast = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if cast else None
    return module.training, dtype, x.requires_grad


def check_settings(given, got, name):
    """Raise unless the settings of a call are those that its graph was made with."""
    if got != given:
        raise RuntimeError(
            f"training, autocast, and whether {name} requires a gradient must be as they were when "
            "the call was graphed; set them so, or call the network itself"
        )


def refuse_hooks(module):
    """Raise if a module or one below it has forward hooks."""
    if State(module).hooked:
        raise RuntimeError(
            "a network with forward hooks has no such CUDA graph, as replays would not call them; "
            "remove them, or call the network itself"
        )


class Graphs:
    """The graphs of a call of a module with tensors, and of its gradients.

    Parameters
    ----------
    module : Module
        Called with the tensors; its result is made of tensors in tuples, lists and dicts.
    inputs : sequence of tensor
        What each call is like.
    watched : Module
        The module, or the part of it of which an attribute may be set by somebody.
    """

    def __init__(self, module, inputs, watched):
        self.module, self.calls, self.count = module, 0, len(inputs)
        refuse_hooks(watched)
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.parameters = list(named.values())
        # Leaves of their own: a result of an earlier call may still hold the nodes that add up the
        # gradients of the parameters, and these belong to another stream.
        self._leaves = {name: p.detach().requires_grad_() for name, p in named.items()}
        own = [x.detach().clone(memory_format=torch.preserve_format) for x in inputs]
        for mine, x in zip(own, inputs, strict=True):
            mine.requires_grad_(x.requires_grad)
        device, buffers = own[0].device, [(b, b.clone()) for b in module.buffers()]
        try:
            with (
                torch.cuda.device(device), torch.random.fork_rng([device]), torch.enable_grad(),
                no_collection(),
            ):  # fmt: skip
                self._replay = torch.cuda.make_graphed_callables(
                    self._call, (*own, *self._leaves.values()), allow_unused_input=True
                )
        finally:
            with torch.no_grad():
                for buffer, before in buffers:  # running statistics have followed the warm-up
                    buffer.copy_(before)
        self.state = State(watched, most=math.inf)
        self.held = self._held()

    def _call(self, *given):
        """Call the module with these parameters; keep how its result is made of tensors."""
        parameters = dict(zip(self._leaves, given[self.count :], strict=True))
        result = functional_call(self.module, parameters, given[: self.count])
        leaves, self.tree = tree_flatten(result)
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise TypeError(
                "the network's result must be made of tensors in tuples, lists and dicts to come "
                "out of a CUDA graph in training"
            )
        return tuple(leaves)

    def _held(self):
        """Return what graphs take for granted of parameters and buffers; numbers may change."""
        return [(t.data_ptr(), t.requires_grad) for t in self.state.tensors]

    def replay(self, *inputs):
        """Replay the call."""
        if not self.state.looks_alike() or self._held() != self.held:
            raise RuntimeError(
                "the network has changed since its call was graphed: an attribute of a module was "
                "set, or a parameter or buffer was moved, replaced, converted or frozen; call "
                "graphed() again"
            )
        with torch.cuda.device(inputs[0].device):
            self.calls += 1
            given = _Into.apply(*inputs, *self.parameters)
            leaves = _OutOf.apply(self, *self._replay(*given))
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
