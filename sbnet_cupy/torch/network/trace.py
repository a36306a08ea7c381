"""Trace: what the layers of one call were, where they ran, how much they computed, how long."""

import time
import weakref

import torch
from torch.overrides import TorchFunctionMode

from . import tensor as T
from .left import running_module
from .state import State
from .trees import tree_leaves


class Row:
    """One layer of a call.

    Attributes
    ----------
    name, kind : str
        The module's name in the network, and the function.
    where : str
        "stack" or "image".
    block : (int, int) or None
        Pixels of a block at this stage.
    flops : int
        Of the dense layer: two for each multiplication and addition of a product.
    seconds : float
        In a profile, the time of the layer alone.
    """

    def __init__(self, name, kind, where, block):
        self.name, self.kind, self.where, self.block = name, kind, where, block
        self.flops, self.seconds = 0, 0.0


class Trace:
    """Collects the layers of a call, and their times where ``timing`` is asked for."""

    def __init__(self, model, timing=False):
        self.names = {id(module): name for name, module in model.named_modules()}
        self.timing = timing
        self.rows = []
        self.running, self.inner = [], []
        self.whole = weakref.WeakValueDictionary()  # by id: tensors made of whole images

    @property
    def row(self):
        """The row of the function under way."""
        return self.running[-1] if self.running else None

    def _module(self):
        """Return the name of the innermost module that is running."""
        return self.names.get(id(running_module(self.names)), "")

    def around(self, kind, handler, func, args, kwargs):
        """Run a handler, as a row of the table."""
        like = T.first_stack(args, kwargs)
        row = Row(self._module(), kind, "stack", T.facts(like)[1])
        at = len(self.rows)
        result = self.timed(row, handler, func, *args, **kwargs)
        if result is not NotImplemented and (row.flops or kind not in _SMALL):
            self.rows.insert(at, row)
        return result

    def timed(self, row, run, /, *args, **kwargs):
        """Run a function for a row, and give it the time that no other row takes."""
        self.running.append(row)
        self.inner.append(0.0)
        start = self._now()
        try:
            return run(*args, **kwargs)
        finally:
            spent = self._now() - start
            self.running.pop()
            row.seconds += spent - self.inner.pop()
            if self.inner:
                self.inner[-1] += spent

    def _now(self):
        if not self.timing:
            return 0.0
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()

    @torch.compiler.disable  # also in functions that are compiled in the network
    def on_image(self, kind, func, args, kwargs, always=True):
        """Run a function on whole images: a row of the table, if it is a product or ``always``."""
        row = Row(self._module(), kind, "image", None)
        result = self.timed(row, func, *args, **kwargs)
        row.flops = _work(kind, args, kwargs, result)
        if row.flops or kind in _LISTED or always:
            self.rows.append(row)
        made = [t for t in tree_leaves(result) if type(t) is torch.Tensor]
        self.whole.update((id(t), t) for t in made if t.dim() != 4 or t.shape[2:] != (1, 1))
        return result

    def is_whole(self, given):
        """Whether one of some arguments was made of a whole image, and is not on the stack."""
        tensors = [t for t in tree_leaves(given) if isinstance(t, torch.Tensor)]
        return any(self.whole.get(id(t)) is t for t in tensors)

    def watching(self):
        """Return a context in which what the network computes beside the stack is seen."""
        return _Beside(self)

    def convolution(self, kind, weight, window, groups):
        """Note the work of a convolution."""
        out = window.out_size[0] * window.out_size[1] * window.table.batch
        self.running[-1].flops += 2 * out * weight.numel()

    def transposed(self, kind, weight, size, out, block, groups):
        """Note the work of a transposed convolution."""
        self.running[-1].flops += 2 * size[0] * size[1] * weight.numel()

    def linear(self, kind, weight, x):
        """Note the work of a matrix product."""
        shape = T.shape(x)
        self.running[-1].flops += 2 * weight.numel() * (torch.Size(shape).numel() // shape[-1])


class Traces:
    """The layers of a network's calls, by what calls of the same layers have in common.

    All are dropped where the network has changed. One whose calls change it themselves, as by
    counting, keeps the first of each kind, as it would have to be traced at each call.
    """

    def __init__(self):
        self.of, self.state, self.is_moving = {}, None, False

    def __reduce__(self):
        return type(self), ()

    def lacks(self, model, key):
        """Whether the layers of a call are not known: it has to be traced."""
        if self.state is None or not self._holds(model):
            self.of, self.state, self.is_moving = {}, State(model, tensors=False), False
        return key not in self.of

    def _holds(self, model):
        return self.state.model is model and (self.is_moving or self.state.looks_alike(model))

    def keep(self, key, trace):
        """Keep the rows of a call."""
        self.of[key] = trace.rows
        self.is_moving = not self.state.looks_alike(self.state.model)

    def rows(self, key):
        """Return the rows of such a call; none if its layers are not known any more."""
        return self.of.get(key, [])


class _Beside(TorchFunctionMode):
    """Finds the products of what a function made of a whole image, and left off the stack."""

    def __init__(self, trace):
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call a function; a product is a row of the table."""
        kwargs, trace = kwargs or {}, self.trace
        if any(issubclass(kind, T.StackTensor) for kind in types):
            return func(*args, **kwargs)
        if not trace.is_whole((args, kwargs)):
            return func(*args, **kwargs)
        kind = func.__name__.split(".")[0]  # of an operator, an overload follows
        return trace.on_image(kind, func, args, kwargs, always=False)


_CONVOLUTIONS = {"conv1d", "conv2d", "conv3d"}
_TRANSPOSED = {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
_PRODUCTS = {"linear", "matmul", "__matmul__", "bmm", "mm"}
_PRODUCTS_AND_SUMS = {"addmm", "baddbmm"}
_COMPOSED = {"einsum", "multi_head_attention_forward"}  # of products that no mode sees
_LISTED = {*_CONVOLUTIONS, *_TRANSPOSED, *_COMPOSED}  # also where their work is not known


def _work(kind, args, kwargs, result):
    """Return how much a function of plain tensors multiplied and added, 0 for one of others."""
    given = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    if kind in {*_CONVOLUTIONS, *_TRANSPOSED} and len(given) < 2:  # quantized weights, packed
        return 0
    if kind in _CONVOLUTIONS:
        return 2 * result.numel() * given[1][0].numel()
    if kind in _TRANSPOSED:
        return 2 * given[0].numel() * given[1][0].numel()
    if kind in _PRODUCTS:
        return 2 * result.numel() * given[0].shape[-1]
    if kind in _PRODUCTS_AND_SUMS:
        return 2 * result.numel() * given[1].shape[-1]
    if kind == "scaled_dot_product_attention":
        query, key = given[:2]
        return 2 * (query.numel() + result.numel()) * key.shape[-2]
    return 0


_SMALL = {
    "size", "dim", "permute", "transpose", "view", "reshape", "flatten", "contiguous", "chunk",
    "split", "__getitem__", "select", "unsqueeze", "squeeze", "detach", "to", "new_zeros",
    "dropout", "dropout_", "new_ones", "new", "_assert_tensor_metadata",
}  # fmt: skip


def lines(rows, share, modules, profile=False):
    """Return a table as text: each layer, where it runs, its work, and the share computed."""
    head = ["layer", "function", "runs", "GFLOP", "computed"] + (["ms"] if profile else [])
    body = [head]
    for row in rows:
        stack = row.where == "stack"
        how = "stack, blocks of {}x{}".format(*row.block) if stack else "dense: on the whole image"
        work = f"{row.flops / 1e9:.3f}" if row.flops else ""
        line = [row.name, row.kind, how, work, f"{share if stack else 1:.1%}"]
        body.append(line + ([f"{row.seconds * 1e3:.3f}"] if profile else []))
    widths = [max(len(line[i]) for line in body) for i in range(len(head))]
    return "\n".join(
        "  ".join(f"{c:{w}}" for c, w in zip(line, widths, strict=True)).rstrip() for line in body
    )
