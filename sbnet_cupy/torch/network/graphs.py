"""CUDA graphs of a sparsified network, and its receptive field."""

import contextlib
import copy
import gc
import itertools
import math
import threading
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import ShapeError
from . import norms
from . import tensor as T
from .ends import check_call, check_tensor, tensors_in
from .generators import forked, replayable
from .table import BlockTable
from .trees import tree_flatten, tree_leaves, tree_unflatten


def graphed(sparse, x, mask):
    """Return ``run(x, mask)``, which replays a CUDA graph of one call.

    The graph holds the whole call, from the image and the mask to the result, which is copied out
    of it; ``run.graph`` is the graph. Without ``capacity`` there is room for every block, so that
    every mask is right and none is faster than a full one. On a CPU there is no graph, and ``run``
    calls the network.
    """
    check_call(x, mask)
    given = likeness(x, mask)
    if x.is_cuda:
        room = (None, sparse._blocks_of(x)) if sparse.capacity is None else None
        replay = _captured(sparse, x, mask, room=room)
    else:
        replay = torch.no_grad()(sparse.__call__)

    def run(x, mask):
        check_alike(given, likeness(x, mask))
        return replay(x, mask)

    run.graph = getattr(replay, "graph", None)
    run.network = sparse  # whose memory the graph reads
    return run


def likeness(x, mask):
    """Return what the calls of a graph have in common, or raise if these are no tensors."""
    check_tensor("x", x)
    check_tensor("mask", mask)
    return x.shape, x.dtype, x.device, mask.shape, mask.dtype


def check_alike(given, got):
    """Raise unless shapes, dtypes and device of a call are those that a graph was made of."""
    if got != given:
        raise ShapeError(
            "x and mask must be like those that the graph was made of, "
            f"{tuple(given[0])} {given[1]} on {given[2]} and {tuple(given[3])} {given[4]}, got "
            f"{tuple(got[0])} {got[1]} on {got[2]} and {tuple(got[3])} {got[4]}"
        )


def _captured(sparse, x, mask, outside=None, room=None, memory=None):
    """Capture a call in a CUDA graph; return a function that replays it.

    Graphs with the same ``memory`` must be replayed one after the other. What is returned does not
    hold the network, which holds it: the graph is freed with the network's last reference, and not
    by the cycle collector, which may run while another graph is captured, and spoil that.
    """
    own_x, own_mask = x.detach().clone(memory_format=torch.preserve_format), mask.clone()

    def call():
        return sparse._call(own_x, own_mask, outside=outside, room=room)

    with torch.no_grad():
        graph, result = capture(call, own_x, memory)
    noted, network = sparse._last, weakref.ref(sparse)
    leaves, tree = tree_flatten(result)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor | torch.Size | str | bool | int | float | None):
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
            network()._last = noted
            copies = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return tree_unflatten(copies, tree)

    replay.graph, replay.weights = graph, weights  # the graph reads their memory
    return replay


def new_memory(device):
    """Return memory that graphs can share, and the stream on which all are captured.

    PyTorch gives memory that one stream has freed to that stream alone.
    """
    with torch.cuda.device(device):
        return torch.cuda.graph_pool_handle(), torch.cuda.Stream()


def capture(run, x, memory=None):
    """Capture ``run()`` on the device of x; return (graph, what ``run`` returned)."""
    pool, stream = memory or new_memory(x.device)
    with torch.cuda.device(x.device), forked(x.device):
        with on(stream):
            run()
            with NoSynchronization(), replayable(x.device):
                run()
            run()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, pool, stream):
            result = run()
    return graph, result


@contextlib.contextmanager
def on(stream):
    """Put work on a stream, behind that of the current one, and ahead of what follows there."""
    before = torch.cuda.current_stream()
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        before.wait_stream(stream)


@contextlib.contextmanager
def capturing(graph, pool, stream):
    """Capture what runs meanwhile; other threads, such as those that load data, may go on.

    Weights that autocast keeps converted live until the outermost autocast ends. A graph may live
    longer: it converts them itself, and what it converts is kept for nobody else.
    """
    before = torch.cuda.current_stream()
    torch.clear_autocast_cache()
    try:
        with (
            no_collection(),
            torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"),
        ):
            yield
    finally:
        torch.clear_autocast_cache()
        torch.cuda.set_stream(before)  # a capture that fails leaves its own


_CAPTURES = threading.Lock()


@contextlib.contextmanager
def no_collection():
    """Keep Python from collecting cycles: the end of another graph among them breaks a capture.

    One capture at a time: the collector is that of the process.
    """
    with _CAPTURES:
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()


_SYNCHRONIZING = {
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero",
    "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::bincount",
}  # fmt: skip
_BY_INDEX = {"aten::index", "aten::index_put", "aten::index_put_"}


def _counts_index(name, args):
    """Whether a function takes values by a mask, whose number of True the host must know."""
    if name not in _BY_INDEX or (name != "aten::index" and args[2].numel() == 1):
        return False
    masks = (x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8))
    return any(mask.is_cuda for mask in masks)


class NoSynchronization(TorchDispatchMode):
    """Raises where the host would wait for the device, ahead of a capture that would break.

    So it does where processes wait for each other: they do not capture at the same time.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run a function of PyTorch that does not wait."""
        name, result = func._schema.name, None
        if func.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError(f"the network communicates with other processes, in {name}")
        waits = (name in _SYNCHRONIZING and args[0].is_cuda) or _counts_index(name, args)
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
def receptive_field(sparse, x, args=(), kwargs=None):
    """Return how many pixels around a block of the input its results depend on.

    A copy of the network runs once on an empty mask, and every layer adds what it looks at. One in
    training runs in evaluation, too, which leaves out no layer by chance.
    """
    twin, reach = copy.deepcopy(sparse), 0
    if any(module.training for module in twin.modules()):
        with torch.random.fork_rng([x.device] if x.is_cuda else []):
            reach = _measured(twin, x, args, kwargs or {})
    return max(reach, _measured(twin.eval(), x, args, kwargs or {}))


@torch.no_grad()
def _measured(twin, x, args, kwargs):
    """Return the receptive field of a network as it is, or raise if it has no edge."""
    on = torch.zeros(
        x.shape[0], *(-(-s // b) for s, b in zip(x.shape[2:], twin.block_size, strict=True)),
        dtype=torch.bool, device=x.device,
    )  # fmt: skip
    table = BlockTable.of_blocks(on, 0, 0, twin.block_size, tuple(x.shape[2:]))
    value = table.gather(x, table.block, (2, 3)).contiguous(memory_format=torch.channels_last)
    table.weights, table.made = twin._weights, []
    out = twin.model(T.StackTensor(value, table, table.block, table.size), *args, **kwargs)
    reach = 0.0
    for leaf in itertools.chain.from_iterable(map(tensors_in, tree_leaves(out))):
        reach = max(reach, T.facts(leaf)[4] if isinstance(leaf, T.StackTensor) else math.inf)
    why = table.reduced
    if why == norms.OF_A_BATCH:
        raise ValueError(
            f"halo='exact' needs batch norms with running statistics in evaluation, got {why}, "
            "which every active pixel is in; call eval(), give norms without them running "
            "statistics, or use halo='zero'"
        )
    if reach == math.inf or why:
        raise ValueError(
            "halo='exact' needs a network whose results depend on pixels near them, got one with "
            f"{why or 'a function of the whole image'}; use halo='zero', or sparsify the part of "
            "the network before that function"
        )
    return math.ceil(reach)
