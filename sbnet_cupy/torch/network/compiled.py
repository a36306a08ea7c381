"""Whole images by torch.compile: what runs where so many blocks are active that they are faster.

The network is traced once on whole images, 0 outside active blocks, down to PyTorch's operators.
Batch norms are folded by then, and the zeros cost no pass of their own: they are written with the
activations before them. All weights are arguments of what is traced, so one compilation serves
while the layers stay what they are, whatever the weights become.
"""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from .._dispatch_state import in_dispatch_mode
from . import tensor as T
from .ends import check_filled, end_of, holds_activations, shown, warn
from .left import is_zero
from .state import State
from .table import PictureTable
from .trace import Trace
from .trees import tree_flatten, tree_unflatten


class Compiled:
    """A network compiled for images of one shape, and for every mask.

    ``options`` are keywords of ``torch.compile``.
    """

    def __init__(self, sparse, x, mask, options):
        self.like, self.options = _key(x), options
        self.made_of = self.state = self.block_size = None
        self.unread = None  # the state of a network that could not be read
        self._read(sparse, x, mask)

    def serves(self, x, args, kwargs):
        """Whether this is a call of the kind that was compiled."""
        other = torch.is_autocast_enabled(x.device.type) or torch.compiler.is_compiling()
        return not (args or kwargs or other) and _key(x) == self.like

    def forget(self):
        """Read the weights again at the next call."""
        self.state = self.unread = None

    def follows(self, sparse, x, table):
        """Whether this is of the network as it is now; it is read again where that has changed.

        A network that cannot be compiled any more, as with a hook, is not until it changes again.
        """
        if self._is_of(sparse):
            return True
        if self.unread is not None and self.unread.holds(sparse.model):
            return False
        try:
            self._read(sparse, x, table.mask)
        except Exception as error:
            self.state, self.unread = None, State(sparse.model)
            warn_uncompiled(error)
            return False
        return True

    def _is_of(self, sparse):
        alike = self.state is not None and self.block_size == sparse.block_size
        return alike and self.state.holds(sparse.model)

    def __call__(self, sparse, x, table, outside):
        """Return what the network returns, images finished as ``outside`` says."""
        # called once in a mode that looks on, Dynamo would leave the graph alone for good
        run = self.graph if in_dispatch_mode() else self.run
        if not is_zero(outside):
            check_filled(*self.off, sparse.model, outside)
        images = iter(run(x, table.mask.contiguous(), *self.weights))
        leaves = [
            shown(next(images), table, end, outside) if is_tensor else end
            for is_tensor, end in self.ends
        ]
        return tree_unflatten(leaves, self.tree)

    def _read(self, sparse, x, mask):
        """Trace the network; compile it unless only its weights have changed."""
        state = State(sparse.model)
        if not state.fit:
            raise RuntimeError(
                "a network with hooks, with inference tensors, or whose modules keep what may "
                "change unseen is not compiled"
            )
        table, key = _table(sparse, x, mask), sparse._kind(x, whole=True)
        if sparse._traces.lacks(sparse.model, key):
            table.trace = Trace(sparse.model)
        sparse._result(table, x)  # folds batch norms, so that the trace finds them folded
        if table.trace is not None:
            sparse._traces.keep(key, table.trace)
        graph, self.ends, self.tree, self.off = _traced(sparse, x, mask)
        if not state.holds():
            raise RuntimeError("a network whose call changes its attributes or buffers is not")
        self.weights = _lift(graph)
        made_of = graph.code, [(t.shape, t.stride(), t.dtype, t.device) for t in self.weights]
        if made_of != self.made_of:
            self.graph = graph
            self.run = torch.compile(graph, dynamic=False, **self.options)
        self.made_of, self.state, self.block_size = made_of, state, sparse.block_size


def warn_uncompiled(error):
    """Warn that a network cannot be compiled, and of what becomes of its whole images."""
    warn(
        f"the network cannot be compiled, {type(error).__name__}: {error}; its whole images run "
        "uncompiled"
    )


def _key(x):
    return tuple(x.shape), x.stride(), x.dtype, x.device


def _table(sparse, x, mask):
    table = PictureTable(mask, sparse.block_size, tuple(x.shape[2:]))
    table.static = True
    return table


def _traced(sparse, x, mask):
    """Return a graph from (x, mask) to the images of the result, what each leaf is, and its tree.

    A leaf is (True, what :func:`end_of` it is) for tensors and (False, itself) for others. Last
    comes what :func:`check_filled` takes: which results have left the stack, and by what.
    """
    found = {}

    def run(x, mask):
        table = _table(sparse, x, mask)
        table.left = {}
        leaves, found["tree"] = tree_flatten(sparse._result(table, x))
        tensors = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) and holds_activations(leaf):
                raise RuntimeError(f"a network that returns a {type(leaf).__name__} is not")
        found["ends"] = [
            (is_tensor, end_of(leaf) if is_tensor else leaf)
            for leaf, is_tensor in zip(leaves, tensors, strict=True)
        ]
        images = [leaf for leaf, is_tensor in zip(leaves, tensors, strict=True) if is_tensor]
        off = [leaf.shape for leaf in images if not isinstance(leaf, T.StackTensor)]
        found["off"] = off, len(off) < len(images), table.left
        return [T.dense(image) for image in images]

    graph = make_fx(run)(x, mask)
    return graph, found["ends"], found["tree"], found["off"]


def _lift(graph):
    """Make all tensors that a graph holds arguments after its own; return them."""
    held, names = [], {}
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        if node.target not in names:
            value = getattr(graph, node.target)
            with graph.graph.inserting_after(last):
                last = names[node.target] = graph.graph.placeholder(f"weight_{len(held)}")
            held.append(value.detach())
        node.replace_all_uses_with(names[node.target])
        graph.graph.erase_node(node)
    for name in names:
        delattr(graph, name)
    graph.recompile()
    return held
