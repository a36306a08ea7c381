"""CUDA graphs of a network in training: a call, and its gradients, without host time.

What goes in and what comes out is copied, and every call is held against what the graphs were made
of. Activations are in memory that the next call writes.
"""

import math
import weakref

import torch
from torch.autograd import Function
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from .._dispatch_state import BACKWARD_HOOKS, HOOKS
from . import casts
from .ends import check_call
from .generators import forked, generator, replayable, set_generator
from .graphs import NoSynchronization, capturing, check_alike, likeness, new_memory, on
from .state import State
from .together import Together
from .trees import tree_flatten, tree_unflatten

_WARM_UP = 3  # calls before a capture, in which libraries choose how they compute
_CHANGED = (
    "the network has changed since its call was graphed: an attribute of a module was set, or a "
    "parameter or buffer was moved, replaced, converted or frozen; {}"
)
_TENSOR_HOOKS = "register_hook", "register_post_accumulate_grad_hook", "retain_grad"


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
        with sparse._fixed(1.0 if sparse.capacity is None else sparse.capacity):
            replay = replay_of(sparse, Graphs(sparse, (x, mask), sparse.model))  # which it holds
    else:
        replay = sparse.__call__

    def run(x, mask):
        check_alike(given, likeness(x, mask))
        check_settings(settings, settings_of(sparse, x), "x")
        return replay(x, mask)

    return run


def replay_of(sparse, graphs):
    """Return ``run(x, mask)``, which replays what was just captured of a network; it needs that."""
    noted, network = sparse._last, weakref.ref(sparse)

    def run(x, mask):
        result = graphs.replay(x, mask)
        network()._is_trained = True  # running statistics change, of which no version tells
        network()._last = noted
        return result

    return run


def settings_of(module, x):
    """Return what a graph in training depends on besides the module's state and its inputs."""
    return module.training, casts.dtype_for(x), x.requires_grad


def check_settings(given, got, name):
    """Raise unless the settings of a call are those that its graph was made with."""
    if got != given:
        raise RuntimeError(
            f"training, autocast, and whether {name} requires a gradient must be as they were when "
            "the call was graphed; set them so, or call the network itself"
        )


def check_module(net):
    """Raise unless a network is a module."""
    if not isinstance(net, torch.nn.Module):
        raise TypeError(
            f"net must be a torch.nn.Module, got {type(net).__name__}; put the function into the "
            "forward of one, with its weights as parameters"
        )


def refuse_hooks(module, kind=State):
    """Raise if a module or one below it has hooks."""
    if kind(module).hooked:
        raise RuntimeError(
            "a network with forward hooks, or in training backward hooks, has no such CUDA graph, "
            "as replays would not call them; remove them, or call the network itself"
        )


def check_replayable(module, device, call):
    """Call a module by ``call()``; raise if the replay of a graph could not do what that does.

    Returns whether it draws random numbers on the device.
    """
    for _ in range(2):  # a first call may make what later ones keep
        buffers = [(m, *each) for m in module.modules() for each in m._buffers.items()]
        with NoSynchronization(), replayable(device) as drawn:
            call()
        others = [(m, name, b) for m, name, b in buffers if m._buffers.get(name) is not b]
        if not others:
            return drawn.draws
    for m, name, b in others:
        m._buffers[name] = b
    raise RuntimeError(
        f"each call of the network makes another tensor its buffer {others[0][1]!r}, where "
        "replays would read the same one again and again; write into it, as by copy_, or call the "
        "network itself"
    )


class Memory:
    """Memory that one call at a time has for its activations.

    Graphs that share it must be replayed one after the other, with the gradients of a call before
    the next call.
    """

    def __init__(self, device):
        self.pool, self.stream = new_memory(device)
        self._last = None

    def begin(self, turn):
        """Give the memory to a call."""
        self._last = weakref.ref(turn)

    def is_of(self, turn):
        """Whether the memory holds what the gradients of a call are computed of."""
        return self._last is not None and self._last() is turn and not turn.done

    def is_awaited(self):
        """Whether somebody may still ask for the gradients of the last call."""
        turn = self._last and self._last()
        return turn is not None and not turn.done


class _Turn:
    """A call: what it was given, and whether its gradients were computed."""

    def __init__(self, inputs, drawn):
        self.inputs, self.versions, self.drawn = inputs, [x._version for x in inputs], drawn
        self.done = False


class TrainingState(State):
    """The same of a network in training, where numbers in parameters and buffers change."""

    hooks_of = (*HOOKS, *BACKWARD_HOOKS)

    def _versions(self):
        return [(t.data_ptr(), t.requires_grad) for t in self.tensors]


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
    options : dict, optional
        Keyword arguments of all calls.
    memory : Memory, optional
        That of other graphs on the same stream.
    again : callable, optional
        ``again()`` is the context in which a call runs once more where its gradients are asked for
        twice or too late, or are to have gradients, or where some of its results have none. Without
        it such gradients are refused, but for the last.

    Attributes
    ----------
    is_partial : bool
        Whether some results of a call had no gradient: it is better run without graphs.
    """

    def __init__(self, module, inputs, watched, options=None, memory=None, again=None):
        self.module, self.count, self.options = module, len(inputs), options or {}
        self.again, self.is_partial = again, False
        refuse_hooks(watched, TrainingState)
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.names, self.parameters = list(named), list(named.values())
        # Leaves of their own: a result of an earlier call may still hold the nodes that add up the
        # gradients of the parameters, and these belong to another stream.
        leaves = [p.detach().requires_grad_() for p in self.parameters]
        self.own = [x.detach().clone(memory_format=torch.preserve_format) for x in inputs]
        for mine, x in zip(self.own, inputs, strict=True):
            mine.requires_grad_(x.requires_grad)
        device, buffers = self.own[0].device, [(b, b.clone()) for b in module.buffers()]
        self._cast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        self.memory = memory or Memory(device)
        try:
            with (
                torch.cuda.device(device), forked(device), torch.enable_grad(), self._autocast(),
            ):  # fmt: skip
                self._check(leaves)
                self._capture(leaves)
        finally:
            with torch.no_grad():
                for buffer, before in buffers:  # running statistics have followed the warm-up
                    buffer.copy_(before)
        self.state = TrainingState(watched, most=math.inf)

    def _autocast(self):
        """Return autocast as it was; weights that it has converted are not kept for other calls."""
        enabled, dtype = self._cast
        kind = self.own[0].device.type
        return torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False)

    def _call(self, inputs, parameters, buffers=None):
        """Call the module with these parameters; keep how its result is made of tensors."""
        state = dict(zip(self.names, parameters, strict=True)) | (buffers or {})
        result = functional_call(self.module, state, tuple(inputs), self.options)
        leaves, self.tree = tree_flatten(result)
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise TypeError(
                "the network's result must be made of tensors in tuples, lists and dicts to come "
                "out of a CUDA graph in training"
            )
        return leaves

    def _check(self, leaves):
        """Call the module; raise if a replay could not do what the call does."""
        device = self.own[0].device
        with NoTensorHooks():
            self.draws = check_replayable(
                self.module, device, lambda: self._call(self.own, leaves)
            )

    def _capture(self, leaves):
        """Capture a call and its gradients."""
        wanted = [t for t in (*self.own, *leaves) if t.requires_grad]

        def gradients(results, grads):
            results = [r for r in results if r.requires_grad]
            return torch.autograd.grad(results, wanted, grads, allow_unused=True)

        def gradients_like(results):
            return [torch.zeros_like(r) for r in results if r.requires_grad]

        place = self.memory.pool, self.memory.stream
        with on(self.memory.stream):
            for _ in range(_WARM_UP):
                results = self._call(self.own, leaves)
                if any(r.requires_grad for r in results):
                    gradients(results, gradients_like(results))
                del results
        self.graph, self.graph_of_gradients = torch.cuda.CUDAGraph(), None
        with capturing(self.graph, *place):
            results = self._call(self.own, leaves)
        self.own_grads = gradients_like(results)
        if self.own_grads:
            self.graph_of_gradients = torch.cuda.CUDAGraph()
            with capturing(self.graph_of_gradients, *place):
                self.found = Together(gradients(results, self.own_grads))
        self.results = [(r.detach(), r.requires_grad) for r in results]

    def replay(self, *inputs):
        """Replay the call."""
        if not self.state.holds():
            raise RuntimeError(_CHANGED.format("call graphed() again"))
        device = inputs[0].device
        with torch.cuda.device(device):
            drawn = generator(device) if self.draws and self.again else None
            leaves = _Replay.apply(self, _Turn(inputs, drawn), *inputs, *self.parameters)
        return tree_unflatten(leaves, self.tree)

    def gradients(self, turn, grads):
        """Return the gradients of a call: of its inputs, None of others, and of the parameters.

        A result has None where nothing was made of it; then what it alone depends on has no
        gradient, where a graph gives 0, which an optimizer may take for one.
        """
        if any(grad is None for grad in grads) and self.again is not None:
            self.is_partial, found = True, self._gradients_again(turn, grads)
        elif torch.is_grad_enabled() or not self.memory.is_of(turn):
            found = self._gradients_again(turn, grads)
        else:
            turn.done = True
            for own, grad in zip(self.own_grads, grads, strict=True):
                own.zero_() if grad is None else own.copy_(grad)
            self.graph_of_gradients.replay()
            found = self.found.copies()
        found = iter(found)
        return [*(next(found) if own.requires_grad else None for own in self.own), *found]

    def _gradients_again(self, turn, grads):
        """Return the gradients of a call whose memory is gone, by calling the module once more."""
        if self.again is None:
            raise RuntimeError(
                "the gradients of a graphed call must be computed before the next call, which has "
                "written over what they need, once, and without gradients of their own; for more "
                "call the network itself"
            )
        if not self.state.holds():
            raise RuntimeError(_CHANGED.format("its gradients cannot be computed once more"))
        if [x._version for x in turn.inputs] != turn.versions:
            raise RuntimeError(
                "gradients are asked for twice, after the next call, or to have gradients: for "
                "these the call runs again, but its image or mask was changed in place; pass it a "
                "copy"
            )
        buffers = {name: b.clone() for name, b in self.module.named_buffers()}
        device = turn.inputs[0].device
        with forked(device), torch.enable_grad(), self._autocast(), self.again():
            if turn.drawn is not None:
                set_generator(device, turn.drawn)
            results = self._call(turn.inputs, self.parameters, buffers)
        results = (r for r in results if r.requires_grad)
        pairs = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None]
        results, grads = zip(*pairs, strict=True)
        inputs = (x for x, own in zip(turn.inputs, self.own, strict=True) if own.requires_grad)
        wanted = (*inputs, *self.parameters)
        return torch.autograd.grad(
            results, wanted, grads, allow_unused=True, create_graph=torch.is_grad_enabled()
        )


class _Replay(Function):
    """A call by its graph."""

    @staticmethod
    def forward(ctx, graphs, turn, *tensors):
        for own, x in zip(graphs.own, turn.inputs, strict=True):
            if own is not x:  # which the caller has written
                own.copy_(x)
        graphs.memory.begin(turn)
        graphs.graph.replay()
        ctx.graphs, ctx.turn = graphs, turn
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[graphs.count :])
        leaves = [(result.clone(), has_gradient) for result, has_gradient in graphs.results]
        ctx.with_gradient = [has_gradient for _, has_gradient in leaves]
        ctx.mark_non_differentiable(*(leaf for leaf, has_gradient in leaves if not has_gradient))
        return tuple(leaf for leaf, _ in leaves)

    @staticmethod
    def backward(ctx, *grads):
        _ = ctx.saved_tensors  # raises where parameters were written to since the call
        grads = [g for g, wanted in zip(grads, ctx.with_gradient, strict=True) if wanted]
        return None, None, *ctx.graphs.gradients(ctx.turn, grads)


class NoTensorHooks(TorchFunctionMode):
    """Raises where a network hangs a hook on a tensor, which a replay would not call."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call a function of PyTorch that is none of these."""
        if getattr(func, "__name__", "") in _TENSOR_HOOKS:
            raise RuntimeError(
                f"the network calls {func.__name__} of a tensor, which a replay would not; call "
                "the network itself"
            )
        return func(*args, **kwargs or {})
