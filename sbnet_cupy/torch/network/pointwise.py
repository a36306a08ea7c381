"""Functions that look at one pixel: they run on the stack as on any batch."""

import functools

import torch
from torch.nn import functional as F

from . import aliases, casts, epilogue, joins, left, unread
from . import tensor as T
from .ends import rest_of, with_rest
from .handlers import ACTIVATIONS, BINARY, HANDLERS, handles, keeps_rest
from .image_values import at_blocks, expanded, plainly
from .plans import AffinePlan, Plan
from .trees import tree_map

_UNARY = """
    elu selu selu_ celu celu_ rrelu rrelu_ mish softplus
    softsign tanhshrink softshrink hardshrink logsigmoid threshold threshold_ elu_
    clamp_min clamp_min_ clamp_max clamp_max_
    exp exp_ expm1 log log_ log1p log2 log10 sqrt sqrt_ rsqrt rsqrt_ square square_ abs abs_
    neg neg_ negative sign sin cos tan atan asin acos sinh cosh erf erfc reciprocal reciprocal_
    floor floor_ ceil round trunc frac logit nan_to_num isnan isinf isfinite positive
    logical_not logical_not_ bitwise_not __neg__ __pos__ __abs__ __invert__ absolute exp2 sgn
    type float double half bfloat16 int long bool clone detach contiguous zeros_like ones_like
    full_like empty_like rand_like randn_like requires_grad_ pow_
    feature_alpha_dropout_pointwise float_power
"""
_CONVERSIONS = {"to", "type", "float", "double", "half", "bfloat16", "int", "long", "bool"}


@handles(*_UNARY.split(), *BINARY.split())
def pointwise(func, *args, **kwargs):
    """Run an elementwise function on the stacks of its arguments."""
    found = align(args, kwargs) if args else None
    if found is None:
        return NotImplemented
    like, inner, inner_kwargs = found
    table = T.facts(like)[0]
    name = func.__name__
    writes = T._writes(name, kwargs)
    if writes and not isinstance(args[0], T.StackTensor):
        return NotImplemented
    rest = _rest_after(func, *args, **kwargs)
    if writes:
        T.flush(table)
        aliases.about_to_write(args[0], table, args[1:], kwargs)
        inner[0] = T.value_of(args[0])
    if name == "contiguous":
        return formatted(args[0], torch.Tensor.contiguous, kwargs.get("memory_format"))
    if name == "detach":
        return with_rest(T.viewed(func, args[0]), rest)
    if kwargs.get("memory_format") is torch.contiguous_format:
        inner_kwargs.pop("memory_format", None)
    given = unread.harmless(
        func, [*inner, *inner_kwargs.values()], *T.facts(like)[:4], writes=writes
    )
    inner, inner_kwargs = (
        given[: len(inner)], dict(zip(inner_kwargs, given[len(inner) :], strict=True)),
    )  # fmt: skip
    result = table.compute(func, *inner, **inner_kwargs)
    if not isinstance(result, torch.Tensor):
        return NotImplemented
    if writes:
        aliases.widen(args[0], table, _reach(args, kwargs))
        return with_rest(args[0], rest)
    if name in _CONVERSIONS and kwargs.get("memory_format") is not None:
        as_before = result.dtype == inner[0].dtype and result.device == inner[0].device
        if as_before:
            return formatted(args[0], torch.Tensor.to, kwargs["memory_format"], result)
        aliases.note_format(table, kwargs["memory_format"])
    if result is inner[0]:
        return args[0]
    if result.device != table.device:
        left.note(table, name)
        return T.dense(args[0]).to(result.device)
    return with_rest(T.wrap(result, like, reach=_reach(args, kwargs)), rest)


def _rest_after(func, x, *args, **kwargs):
    """Return a function that returns what an activation makes of what x holds outside, or None."""
    rest = rest_of(x) if isinstance(x, T.StackTensor) and "out" not in kwargs else None
    if rest is None or not keeps_rest(func.__name__, (*args, *kwargs.values())):
        return None
    return lambda: func(rest().clone(), *args, **kwargs)


def formatted(x, func, memory_format, value=None):
    """Return what a function makes of a StackTensor that returns it, or a copy in some format.

    ``value`` is the stack of the copy, if there is one already. None are made if nothing is written
    in place later.
    """
    table = T.facts(x)[0]
    wanted = torch.contiguous_format if memory_format is None else memory_format
    is_copied = aliases.is_copied(x, func, wanted)
    aliases.note_format(table, wanted)
    if is_copied is False:
        return x
    if is_copied:
        return copied(x) if value is None or value is T.value_of(x) else T.wrap(value, x)
    aliases.settle(x, table)
    twin = T.wrap(T.value_of(x) if value is None else value, x)
    return aliases.note_twin(with_rest(twin, rest_of(x)), x, f"{func.__name__}()")


def copied(x):
    """Return a copy of a StackTensor, made once something is written; it waits if x does.

    Where gradients are recorded it is made at once.
    """
    plan, (table, block, size, hw, reach) = T.plan_of(x), T.facts(x)
    if isinstance(plan, Plan) and plan.records is None:
        return T.postpone(table, plan.then(), block, size, reach, x, (torch.clone,), hw)
    value = T.value_of(x)
    if torch.is_grad_enabled() and value.requires_grad:  # what reads it may keep it for backward
        return with_rest(T.wrap(table.compute(torch.clone, value), x), rest_of(x))
    return aliases.lend(with_rest(T.wrap(value, x), rest_of(x)), table)


def _reach(args, kwargs):
    stacks = [a for a in (*args, *kwargs.values()) if isinstance(a, T.StackTensor)]
    return max(T.facts(x)[4] for x in stacks)


def align(args, kwargs):
    """Return (a StackTensor, args, kwargs), all tensors as stacks of its kind; None if it can't."""
    everything = (*args, *kwargs.values())
    stacks = [a for a in everything if isinstance(a, T.StackTensor) and not T.is_kept(a)]
    if not stacks:
        return None
    like = max(stacks, key=T.dims)
    if T.dims(like) != max(T.dims(a) for a in everything if isinstance(a, torch.Tensor)):
        return None
    converted = []
    for a in everything:
        if isinstance(a, torch.Tensor):
            a = conform(a, like)
            if a is None:
                return None
        converted.append(a)
    inner = converted[: len(args)]
    return like, inner, dict(zip(kwargs, converted[len(args) :], strict=True))


def conform(a, like, broadcasts=True):
    """Return a tensor as a stack that lies as that of ``like``; None if it cannot be one.

    Where it ``broadcasts``, one pixel of a block may stand for all of them.
    """
    table, block, size, hw, _ = T.facts(like)
    dims = T.dims(like)
    a = T.dense(a) if T.is_kept(a) else a
    if isinstance(a, T.StackTensor):
        _, b, s, d, _ = T.facts(a)
        if T.dims(a) != dims or d != hw or s != size:
            return None
        value = T.value_of(a)
        return value if b == block else table.compute(table.gather, T.dense(a), block, hw)
    spread = at_blocks(a, table, block, size) if hw == (2, 3) else None
    if spread is not None:
        return spread
    a = expanded(a)
    aliases.note_order(a, table)
    if a.dim() == 0 or a.dim() <= dims - hw[0]:
        ahead = dims - a.dim()
        spatial = [a.shape[i - ahead] for i in hw if i >= ahead]
        if all(n == 1 for n in spatial):
            return a
    shape = [1] * (dims - a.dim()) + list(a.shape)
    got = (shape[hw[0]], shape[hw[1]])
    if shape[0] not in (1, table.batch) or any(
        g not in (1, s) for g, s in zip(got, size, strict=True)
    ):
        return None
    a = table.compute(torch.Tensor.view, a, shape)
    if broadcasts or not table.whole:
        one, left = _before_expanded(a, table, hw)
        if left == (1, 1) and (broadcasts or got == size):
            one = one if shape[0] == 1 else table.compute(table.spread, one)
            return one if broadcasts else table.compute(_in_each_pixel, one, table, block, hw)
        a, got = (one, left) if broadcasts else (a, got)
    shape[0], shape[hw[0]], shape[hw[1]] = table.batch, *size
    return table.compute(table.cut, table.compute(torch.Tensor.expand, a, shape), block, hw)


def _in_each_pixel(one, table, block, hw):
    """Return a stack all of whose pixels of a row are one: a view."""
    shape = list(one.shape)
    shape[0], shape[hw[0]], shape[hw[1]] = table.rows, *block
    return one.expand(shape)


def _before_expanded(image, table, hw):
    """Return an image without pixels that all lie at one place in memory, and how many are left."""
    for i in hw:
        if image.shape[i] > 1 and image.stride(i) == 0:
            image = table.compute(torch.Tensor.narrow, image, i, 0, 1)
    return image, tuple(image.shape[i] for i in hw)


def _activation(func, *args, **kwargs):
    """Put an activation at the end of a convolution that waits, or run it."""
    if not args:
        return NotImplemented
    x, *args = args
    inplace = kwargs.get("inplace", bool(args and args[0] is True)) or func.__name__.endswith("_")
    plain = not args or args == [inplace]
    plain = plain and kwargs.get("approximate", "none") == "none"
    done = _appended(x, ACTIVATIONS[func.__name__], inplace) if plain else None
    return pointwise(func, x, *args, **kwargs) if done is None else done


def _appended(x, name, inplace):
    """Put an activation at the end of a convolution that waits, or return None."""
    plan = T.plan_of(x)
    if plan is None or not plan.takes(activation=name):
        return None
    return step(x, plan.then(activation=name), inplace, (ACT[name],))


ACT = {
    "relu": F.relu, "relu6": F.relu6, "silu": F.silu, "gelu": F.gelu, "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
}  # fmt: skip

handles(*ACTIVATIONS)(_activation)


_BOUNDS = {(0, 6): "relu6", (0, None): "relu"}  # least, largest


@handles("hardtanh", "hardtanh_")
def hardtanh(func, input, min_val=-1.0, max_val=1.0, inplace=False):
    """Put a relu6, which nn.ReLU6 calls by this name, behind a convolution, or run it."""
    writes = inplace or func.__name__ == "hardtanh_"
    done = _between(input, min_val, max_val, writes)
    given = {"inplace": inplace} if func.__name__ == "hardtanh" else {}
    return pointwise(func, input, min_val, max_val, **given) if done is None else done


@handles("clamp", "clamp_", "clip", "clip_")
def clamp(func, input, min=None, max=None, **rest):
    """Put bounds that are those of an activation behind a convolution, or run it."""
    done = None if rest else _between(input, min, max, func.__name__.endswith("_"))
    return pointwise(func, input, min, max, **rest) if done is None else done


def _between(x, least, largest, inplace):
    """Put an activation with such bounds behind a convolution that waits, or return None."""
    are_numbers = all(b is None or type(b) in (int, float) for b in (least, largest))
    name = _BOUNDS.get((least, largest)) if are_numbers else None
    return None if name is None else _appended(x, name, inplace)


@handles("leaky_relu", "leaky_relu_")
def leaky_relu(func, input, negative_slope=0.01, inplace=False):
    """Put a leaky relu at the end of a convolution that waits, or run it."""
    plan = T.plan_of(input)
    known = isinstance(negative_slope, (int, float))
    name = epilogue.leaky_relu(negative_slope) if known else None
    if plan is None or not known or not plan.takes(activation=name):
        given = {"inplace": inplace} if func.__name__ == "leaky_relu" else {}
        return pointwise(func, input, negative_slope=negative_slope, **given)
    inplace = inplace or func.__name__ == "leaky_relu_"
    return step(input, plan.then(activation=name), inplace, (_leaky_relu(negative_slope),))


@functools.cache
def _leaky_relu(slope):
    return functools.partial(F.leaky_relu, negative_slope=slope)


def step(x, plan, inplace, after):
    """Return the StackTensor of a plan with one more step: x itself, where it is in place.

    ``after`` is the step by itself: a function, and its arguments after the first.
    """
    table, block, size, hw, reach = T.facts(x)
    if inplace:
        T.flush_readers(table, x)
        if T.plan_of(x) is None:  # one of them has computed it
            func, *more = after
            value = table.compute(func, T.value_of(x), *more)
            table.compute(torch.Tensor.copy_, T.value_of(x), value)
            joins.unpad(T.value_of(x), table)
            rest = None if more else rest_of(x)
            with_rest(x, None if rest is None else lambda: func(rest()))
        else:
            T.replace_plan(x, plan, after)
        return x
    return T.postpone(table, plan, block, size, reach, x, after, hw)


@handles("to", "type_as")
def convert(func, input, *args, **kwargs):
    """Convert to another dtype or device, or to those of another tensor."""
    other = args[0] if args else kwargs.get("other")
    if not isinstance(other, torch.Tensor):
        return pointwise(func, input, *args, **kwargs)
    like, call = T.first_stack((input, other)), (other.device, other.dtype, *args[1:])
    kwargs.pop("other", None)
    if isinstance(input, T.StackTensor):
        return pointwise(torch.Tensor.to, input, *call, **kwargs)
    return T.facts(like)[0].compute(torch.Tensor.to, plainly(input), *call, **kwargs)


@handles("_assert_tensor_metadata")
def assert_metadata(func, x, size=None, stride=None, dtype=None, **rest):
    """Check the dtype and the device, as exported graphs do where they convert."""
    if not isinstance(x, T.StackTensor) or size is not None or stride is not None:
        return NotImplemented
    return func(torch.empty(0, dtype=x.dtype, device=x.device), None, None, dtype, **rest)


@handles("prelu")
def prelu(func, input, weight):
    """Multiply negative numbers by one number, or by one for each channel."""
    if not isinstance(input, T.StackTensor) or isinstance(weight, T.StackTensor):
        return NotImplemented
    if weight.numel() > 1 and 1 in T.facts(input)[3]:
        return NotImplemented
    plan, table = T.plan_of(input), T.facts(input)[0]
    if isinstance(plan, AffinePlan) and plan.takes_slopes(weight):
        slopes = table.weights.slopes(weight, T.shape(input)[1], casts.for_waiting(table))
        return step(input, plan.then(slopes=slopes), False, (func, weight))
    out, rest = T.wrap(table.compute(func, T.value_of(input), weight), input), rest_of(input)
    if rest is None:
        return out
    if table.tape is not None:
        table.tape.note_weights((weight,))
    return with_rest(out, lambda: func(rest()[None], weight)[0])


@handles("dropout", "dropout_", "alpha_dropout", "alpha_dropout_")
def dropout(func, input, p=0.5, *args, **kwargs):
    """Drop single numbers; where none is, return the input, which may still wait."""
    training = args[0] if args else kwargs.get("train", kwargs.get("training", func is F.dropout))
    if isinstance(input, T.StackTensor) and (p == 0 or (not training and 0 <= p <= 1)):
        return input
    return pointwise(func, input, p, *args, **kwargs)


@handles(
    "dropout2d",
    "dropout3d",
    "feature_dropout",
    "feature_dropout_",
    "feature_alpha_dropout",
    "dropout1d",
)
def channel_dropout(func, x, p=0.5, training=True, inplace=False):
    """Drop whole channels of images: the same in all blocks of an image."""
    if not training or p == 0 or not isinstance(x, T.StackTensor):
        return x
    if "alpha" in func.__name__ or x.dim() != 4:
        return NotImplemented
    table, value = T.facts(x)[0], T.value_of(x)
    kept = func(value.new_ones(table.batch, x.shape[1], 1, 1), p, training)
    writes = inplace or func.__name__ == "feature_dropout_"
    return pointwise(torch.Tensor.mul_ if writes else torch.mul, x, kept)


@handles("register_hook")
def register_hook(func, x, hook):
    """Call a hook with the gradient of an activation, as an image: 0 outside active blocks."""
    if not isinstance(x, T.StackTensor):
        return NotImplemented
    aliases.settle(x, T.facts(x)[0])  # a copy has a gradient of its own
    value, (table, block, size, hw, _) = T.value_of(x), T.facts(x)

    @functools.wraps(hook)
    def called(grad):
        other = hook(table.compute(table.scatter, grad, block, size, hw))
        return None if other is None else table.compute(table.gather, other, block, hw)

    return func(value, called)


def gradients(func, outputs, inputs, *args, **kwargs):
    """Take the gradients of activations as images, which are 0 outside active blocks."""
    single = isinstance(inputs, (torch.Tensor, torch.autograd.graph.GradientEdge))
    inputs = (inputs,) if single else tuple(inputs)
    stacks = {i: x for i, x in enumerate(inputs) if isinstance(x, T.StackTensor)}
    if any(map(T.border_of, stacks.values())) or kwargs.get("is_grads_batched"):
        return NotImplemented
    for x in stacks.values():
        aliases.settle(x, T.facts(x)[0])
    outputs, args, kwargs = tree_map(T.dense, (outputs, args, kwargs))
    values = [T.value_of(x) if i in stacks else x for i, x in enumerate(inputs)]
    grads = list(func(outputs, values, *args, **kwargs))
    for i, x in stacks.items():
        grads[i] = None if grads[i] is None else T.dense(T.wrap(grads[i], x))
    return tuple(grads)


HANDLERS[torch.autograd.grad] = gradients


def alias(handler, *funcs):
    """Register more functions for a handler."""
    for func in funcs:
        HANDLERS[func] = handler
