"""Operation: an operation of the core as an operator of PyTorch, made from its declaration.

The core's :class:`~sbnet_cupy.core.operator.Operator` names the arrays and options of an operation,
and has its checks, shape rules, plans and, where it is linear, its gradient. From these come here
the schema, the bodies, the kernels for fake tensors and the registration with autograd.

``torch.library.Library`` and not ``custom_op``: the same operator, at two thirds of the host time.
"""

import contextlib
from numbers import Integral
from typing import NamedTuple

import torch

from ..block_sparse.active_blocks import ActiveBlocks
from ..block_sparse.block_params import BlockParams
from ..block_sparse.bottleneck.weights import BottleneckWeights
from ..block_sparse.grid import resolve_grid
from ..core.sizes import padding_pairs, pair
from ..dense.conv2d import check_choice
from ..errors import ShapeError
from . import _dispatch_state as state
from ._call import run
from ._native import check_not_traced, check_tensors, spec_of

_LIBRARY = torch.library.Library("sbnet_cupy", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

for _container in (ActiveBlocks, BottleneckWeights):  # so that torch.export takes them as inputs
    torch.export.register_dataclass(_container)
state.register_constant(BlockParams)
Integral.register(torch.SymInt)  # for the checks of sizes, which are symbolic in a trace

_OPTIONAL = {"scale", "shift", "bias", "base", "w_project", "residual", "valid"}
_TYPES = {
    "block_count": "SymInt[]", "bsize": "int[]", "boffset": "int[]", "bstride": "int[]",
    "tol": "float", "avgpool": "bool", "capacity": "SymInt?",
    "add": "bool", "atomic": "bool", "transpose": "bool", "data_format": "str",
    "block_params": "SymInt[]", "strides": "int[]", "padding": "SymInt[]", "activation": "str?",
    "w_format": "str", "precision": "str?", "method": "str",
    "kernel_size": "SymInt[]", "sites": "SymInt", "groups": "int", "count": "str", "ties": "str",
    "reverse": "bool", "floor": "float?", "mode": "str", "batch": "SymInt", "reduce": "str",
}  # fmt: skip
_SIZES = ("strides", "padding", "data_format", "w_format")
_SPELLED = {"bsize", "boffset", "bstride", "block_count", "block_params", *_SIZES[:2]}


class Like(NamedTuple):
    """What a gradient needs to know of a tensor whose values it does not need."""

    shape: tuple
    dtype: torch.dtype


class Operation:
    """An operator of PyTorch made from one of the core.

    Parameters
    ----------
    operator : Operator
        The declaration.
    ops : module, optional
        The namespace that the gradient is made of.
    gradient : function, optional
        Of this namespace, arrays, options, the gradient of the result, the wanted names and the
        result: returns ``{name: gradient}``. Arrays whose values were not saved are a
        :class:`Like`. That of the declaration by default.
    saves : function, optional
        Of arrays by name and options by name: the names of those whose values the gradient needs,
        with "result" for the result.
    prefixes : dict
        Words before the names of some arrays in errors.
    unused : tuple of str
        Arrays that no call here gives.
    weights : slice, optional
        Places of the arrays that the specs of packed weights stand for, in keys of plans.
    on_cpu : function, optional
        Of the dtype and the options: returns what computes a call on a CPU from NumPy views of all
        arrays in place of the core, or None.
    around : function, optional
        Returns the context in which a call is computed on a CPU.
    derived : function, optional
        Of a plan with a launch, and the tensors: what is computed of them and kept with one, and
        its addresses, which are operands after the packed weights.
    keep : function, optional
        Of a plan with a launch, the tensors, the options, weights that are packed once and what was
        ``derived``: told of each call that was made by these, of tensors that require no gradient.
    """

    def __init__(
        self, operator, ops=None, *, gradient=None, saves=None, prefixes=None, unused=(),
        weights=None, on_cpu=None, around=contextlib.nullcontext, derived=None, keep=None,
    ):  # fmt: skip
        self.operator, self._ops, self._gradient, self._saves = operator, ops, gradient, saves
        self.weights, self._arrays, self.on_cpu = weights, operator.arrays, on_cpu
        self.around, self.derived, self.keep = around, derived, keep
        self.names = [(prefixes or {}).get(name, "") + name for name in operator.arrays]
        self.tells_in_place = "in_place" in operator.options
        self._options = [name for name in operator.options if name != "in_place"]
        self._respelled = any(name in _SPELLED or _TYPES[name] == "bool" for name in self._options)
        self.place = operator.arrays.index("out") if operator.results else None
        self._inputs = [i for i, n in enumerate(operator.arrays) if n not in ("out", *unused)]
        needed = [i for i in self._inputs if operator.arrays[i] not in _OPTIONAL]
        self._optional = {name for i, name in enumerate(self.names) if i not in needed}
        self.recorded, self._differentiable = None, (gradient or operator.gradient) is not None
        if not self._differentiable:
            body = self._body_apart if self.place is None else self._body
            self._operator = define(self._schema(), body, self._fake)
            return
        backward = self._backward(0, self._inputs, len(self._options))
        self._operator = define(self._schema(), self._body, self._fake, backward, self._setup)

        def forward(ctx, options, described, *tensors):
            """Make a plain call with a gradient, as the dispatcher would make it."""
            result = run(self, tensors, options, described)
            self._save(ctx, tensors, options, result)
            return result

        every = range(len(self._arrays))
        parts = {"forward": forward, "backward": self._backward(2, every, 0)}
        parts = {name: staticmethod(function) for name, function in parts.items()}
        self.recorded = state.direct_apply(type(operator.name, (torch.autograd.Function,), parts))

    # ------------------------------------------------------------------------------ registration

    def _schema(self):
        arrays = [self._arrays[i] for i in self._inputs]
        tensors = [f"Tensor{'?' * (name in _OPTIONAL)} {name}" for name in arrays]
        options = [f"{_TYPES[name]} {name}" for name in self._options]
        results = "(Tensor, Tensor)" if self.place is None else "Tensor"
        return f"{self.operator.name}({', '.join((*tensors, *options))}) -> {results}"

    def _body(self, *arguments):
        return run(self, *self._taken_apart(arguments))

    # One whose shapes are data breaks graphs, and Dynamo would follow its body.
    _body_apart = torch.compiler.disable(_body)

    def _fake(self, *arguments):
        tensors, options = self._taken_apart(arguments)
        specs = [None if t is None else spec_of(t) for t in tensors]
        in_place = (False,) if self.tells_in_place else ()
        (first, *_) = self.operator.infer(specs, (*options, *in_place))
        if self.place is not None:
            return tensors[0].new_empty(first.shape)
        rows = torch.library.get_ctx().new_dynamic_size() if options[-1] is None else options[-1]
        return tuple(tensors[0].new_empty(s, dtype=torch.int32) for s in ((1,), (rows, 3)))

    def _setup(self, ctx, inputs, output):
        self._save(ctx, *self._taken_apart(inputs), output)

    def _backward(self, before, places, after):
        """Return the backward of a call of arrays at these places, between other arguments."""

        def backward(ctx, grad):
            names = [self._arrays[i] for i in places]
            needs = zip(names, ctx.needs_input_grad[before:], strict=False)
            found = self._gradients(ctx, grad, {name for name, need in needs if need})
            return (*[None] * before, *map(found.get, names), *[None] * after)

        return backward

    # ---------------------------------------------------------------------------------- arguments

    def described(self, tensors, packed):
        """Return what a plan is kept for: the tensors, or the specs of weights that are packed."""
        if packed is None or self.weights is None:
            return tensors
        return *tensors[: self.weights.start], packed.specs, *tensors[self.weights.stop :]

    def check(self, tensors):
        """Check what the core does not know of: what makes arrays of tensors."""
        check_tensors(self._optional, **dict(zip(self.names, tensors, strict=True)))

    def dispatch(self, tensors, options):
        """Call the operator by way of PyTorch's dispatcher."""
        if not self._differentiable:
            tensors = [None if t is None else t.detach() for t in tensors]
        arguments = [tensors[i] for i in self._inputs]
        return self._operator(*arguments, *self._spelled(tensors, options))

    def _spelled(self, tensors, options):
        """Return the options as the schema has them."""
        named = dict(zip(self._options, options, strict=True))
        if "bsize" in named:
            grid = resolve_grid(named["bsize"], named["boffset"], named["bstride"])
            named["bsize"], named["boffset"], named["bstride"] = grid
        if "block_count" in named:
            named["block_count"] = pair(named["block_count"], "block_count", minimum=0)
        if "strides" in named:
            named["strides"] = pair(named["strides"], "strides")
        if "padding" in named:
            named["padding"] = _flat(resolve_sizes(*tensors[:2], *map(named.get, _SIZES))[-1])
        if "block_params" in named:
            named["block_params"] = _flat(named["block_params"])
        return [bool(v) if _TYPES[name] == "bool" else v for name, v in named.items()]

    def _taken_apart(self, arguments):
        """Return the tensors and options of the core from arguments of the schema."""
        given = dict(zip(self._inputs, arguments, strict=False))
        tensors = tuple(map(given.get, range(len(self._arrays))))
        named = zip(self._options, arguments[len(self._inputs) :], strict=True)
        return tensors, tuple(_of_core(name, value) for name, value in named)

    # ---------------------------------------------------------------------------------- gradients

    def _save(self, ctx, tensors, options, result):
        """Keep what the gradient needs: values of some tensors, shape and dtype of the others."""
        given = dict(zip(self._arrays, tensors, strict=True))
        if self._saves is None:
            names = set(self._arrays) - set(self.operator.linear)
        else:
            names = self._saves(given, dict(zip(self._options, options, strict=True)))
        ctx.sb_options = options
        ctx.sb_others = [
            None if t is None or name in names else Like(t.shape, t.dtype)
            for name, t in given.items()
        ]
        saved = [t if name in names else None for name, t in given.items()]
        ctx.save_for_backward(*saved, result if "result" in names else None)

    def _gradients(self, ctx, grad, wanted):
        """Return the gradients of the wanted arrays by name."""
        *saved, result = ctx.saved_tensors
        pairs = zip(saved, ctx.sb_others, strict=True)
        arrays = [other if value is None else value for value, other in pairs]
        options = ctx.sb_options
        if self._respelled:
            spelled = zip(self._options, self._spelled(arrays, options), strict=True)
            options = tuple(_of_core(name, value) for name, value in spelled)
        if self._gradient is None:
            return self.operator.gradient(self._ops, arrays, options, grad, wanted)
        return self._gradient(self._ops, arrays, options, grad, wanted, result)


def define(schema, body, fake, backward=None, setup_context=None):
    """Define an operator of the dispatcher; return what calls it.

    ``body`` computes on CPU and CUDA tensors, ``fake`` gives results of the right shape and dtype
    with no data, ``backward`` and ``setup_context`` are those of ``torch.library``.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=_TAGS)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, body, key)
    torch.library.register_fake(f"sbnet_cupy::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(
            f"sbnet_cupy::{name}", backward, setup_context=setup_context, lib=_LIBRARY
        )
    operator = getattr(torch.ops.sbnet_cupy, name).default
    return operator if backward is None else _differentiable(operator, backward, setup_context)


def _differentiable(operator, backward, setup_context):
    """Return what calls an operator, also where ``torch.func`` takes gradients.

    The function that PyTorch makes of a registered gradient is none that ``torch.func`` takes.
    """
    parts = {"forward": operator, "setup_context": setup_context, "backward": backward}
    parts["jvp"] = _refuse_forward_mode
    parts = {name: staticmethod(function) for name, function in parts.items()}
    parts["generate_vmap_rule"] = True
    function = type(operator.name(), (torch.autograd.Function,), parts)

    def called(*arguments):
        if torch.compiler.is_compiling() or not state.has_function_transforms():
            return operator(*arguments)
        tensors = (a for a in arguments if isinstance(a, torch.Tensor))
        return (function.apply if state.are_in_gradient(*tensors) else operator)(*arguments)

    return called


def _refuse_forward_mode(ctx, *tangents):
    raise NotImplementedError(
        "the operators of sbnet_cupy have no forward-mode derivatives, which torch.func.hessian "
        "takes of gradients; use torch.func.jacrev(torch.func.jacrev(function))"
    )


def resolve_sizes(x, w, strides, padding, data_format, w_format):
    """Return ((N, H, W), kernel, strides, padding) of a convolution of tensors, in pairs.

    Dynamo follows this, and knows no spec of a tensor. Sizes may be symbolic.
    """
    check_choice("data_format", data_format, ("NHWC", "NCHW"))
    check_choice("w_format", w_format, ("HWIO", "OIHW"))
    for name, tensor in (("x", x), ("w", w)):
        if tensor.dim() != 4:
            raise ShapeError(f"{name} must have 4 dimensions, got shape {tuple(tensor.shape)}")
    image = tuple(x.shape[data_format.index(letter)] for letter in "NHW")
    kernel = tuple(w.shape[w_format.index(letter)] for letter in "HW")
    strides = pair(strides, "strides")
    if isinstance(padding, str):
        check_not_traced()
    return image, kernel, strides, padding_pairs(image[1:], kernel, strides, padding)


def _flat(pairs):
    return [number for two in pairs for number in two]


def _of_core(name, value):
    """Return an option as the core takes it."""
    if name in ("block_params", "padding"):
        return tuple((value[i], value[i + 1]) for i in range(0, len(value), 2))
    return tuple(value) if isinstance(value, list) else value
