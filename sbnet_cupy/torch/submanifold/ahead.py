"""Kernels of a network at sites compiled at once, before a call that would compile each alone."""

import copy
import math
import weakref

import torch

from ...submanifold.map_kernels import LISTS
from ..network.recordings import settings
from ..network.rehearsal import differentiate, is_first_of, rehearse_once
from ..network.state import State
from ..network.training_graphs import check_module, settings_of
from ..network.trees import tree_leaves, tree_map

_OWN = ("torch.nn.", __name__.partition(".")[0] + ".")  # modules of which a copy is on its own
_SEEN = weakref.WeakKeyDictionary()  # network -> kinds of calls that it has made


def compile_ahead(net, *inputs):
    """Compile at once the kernels that ``net(*inputs)`` needs, and its gradients.

    A kernel takes some 0.4 seconds to compile, once on a machine. A first call compiles dozens of
    them one by one; this compiles them with all processors. Call it where the network will be
    called: in the same mode, under the same autocast, and under ``torch.no_grad()`` if no gradients
    are to be computed. A copy of the network is called, without launching its kernels. Neither the
    network nor the state of the random generators changes.

    Kernels depend on the number of sites: choose inputs as large as those to come. :func:`graphed`
    compiles its kernels in this way by itself. So does a call of a ``scn.Sequential`` with points,
    if it is made of layers of ``scn`` and of PyTorch.

    Parameters
    ----------
    net : Module
        A network that calls functions of this package with tensors on a GPU. With tensors on a
        CPU, there is nothing to compile.
    *inputs
        What it is called with: tensors, also in lists, tuples and dicts.

    Returns
    -------
    net : Module
        The same one.

    Raises
    ------
    TypeError
        If ``net`` is no module.
    RuntimeError
        If modules have hooks, which a call of a copy would run.

    Source: none; NVRTC compiles the kernels.

    Examples
    --------
    >>> class Net(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = torch.nn.Parameter(torch.ones(3, 3, 1, 4))
    ...     def forward(self, rows, values):
    ...         x = sparse_tensor(values, rows, spatial_shape=(8, 8))
    ...         return submanifold_conv(x, self.w)
    >>> rows = torch.tensor([[0, 1, 1], [0, 1, 2]], dtype=torch.int32)
    >>> net = compile_ahead(Net(), rows, torch.ones(2, 1))
    >>> net(rows, torch.ones(2, 1)).features.shape
    torch.Size([2, 4])
    """
    check_module(net)
    if State(net, most=math.inf).hooked:
        raise RuntimeError(
            "net must have no hooks, which a call of a copy would run, got some; register them "
            "after compile_ahead"
        )
    tensors = _tensors_in(inputs)
    like = _on_gpu(net, tensors)
    if like is not None:
        sizes = [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]
        _rehearse(net, inputs, _kind(net, like, sizes), like, lambda: True)
    return net


def compile_before(net, *inputs):
    """Compile the kernels of an eager call that is about to be made, if it is the first of a kind.

    Calls are of a kind if their tensors have sizes between the same powers of two. Nothing is done
    for a network with hooks or modules of others, since to call a copy could have effects, and in
    one of several processes, which may wait for each other in a call.
    """
    tensors = _tensors_in(inputs)
    like = _on_gpu(net, tensors)
    if like is None or not tensors:
        return
    sizes = [(*t.shape[-1:], t.numel().bit_length(), t.dtype, t.requires_grad) for t in tensors]
    kind = _kind(net, like, sizes)
    if not is_first_of(kind, _SEEN.setdefault(net, set())):
        return
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        _rehearse(net, inputs, kind, like, lambda: _has_no_effects(net))


def _has_no_effects(net):
    """Whether to call a copy of a network changes nothing but that."""
    own = all(type(m).__module__.startswith(_OWN) for m in net.modules())
    return own and not State(net, most=math.inf).hooked


def _tensors_in(inputs):
    return [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)]


def _on_gpu(net, tensors):
    """Return a tensor on a GPU, of a call or of the network, or None."""
    return next((t for t in (*tensors, *net.parameters()) if t.is_cuda), None)


def _kind(net, like, sizes):
    """Return what the kernels of an eager call depend on, but for values and for the network."""
    return "eager", *sizes, torch.is_grad_enabled(), *settings_of(net, like), *settings()


def _rehearse(net, inputs, kind, like, may_copy):
    """Rehearse a call of a copy of the network, and its gradients if they are recorded."""

    def call():
        taken, twin = tree_map(_taken, inputs), copy.deepcopy(net)
        found = [getattr(leaf, "features", leaf) for leaf in tree_leaves(twin(*taken))]
        differentiate(found, (*_tensors_in(taken), *twin.parameters()))

    rehearse_once(net, kind, call, like, may_copy, (LISTS,))


def _taken(value):
    """Return an input of a rehearsal: a tensor that nobody else knows of."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)
