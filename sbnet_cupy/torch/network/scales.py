"""Sums and products with values of channels: part of what waits ahead of them, or a kernel."""

import torch

from . import cuda, cuda_affine, image_values, shortcuts, sums
from . import tensor as T
from .handlers import handles
from .image_values import plainly
from .plans import AffinePlan, MatrixPlan, Plan
from .pointwise import pointwise, step
from .units import Ahead


@handles("add", "add_", "__add__", "__radd__", "__iadd__")
def add(func, *args, **kwargs):
    """Add to a convolution that waits, or run."""
    if len(args) != 2:
        return pointwise(func, *args, **kwargs)
    a, b = args
    inplace = func.__name__ in ("add_", "__iadd__")
    if kwargs.get("alpha", 1) == 1 and "out" not in kwargs:
        pairs = [(a, b)] if inplace else [(a, b), (b, a)]
        for x, other in pairs:
            plan = T.plan_of(x)
            if plan is None or not plan.takes(residual=other):
                continue
            if other is x or not isinstance(other, T.StackTensor):
                continue
            if T.facts(other)[:4] != T.facts(x)[:4] or T.shape(other) != T.shape(x):
                continue
            residual = shortcuts.waiting(plan, other)
            residual = T.value_of(other) if residual is None else residual
            if T.plan_of(x) is None or residual.dtype != plan.dtype:
                break
            return _with_residual(x, plan, residual, inplace, other)
        result = sums.summed(a, b, inplace)
        if result is not None:
            return result
        for x, other in pairs:
            result = _affine_sum(x, other, inplace)
            if result is not None:
                return result
    return pointwise(func, a, b, **kwargs)


def _affine_sum(x, other, inplace):
    """Return a sum with a shift of channels, or of two stacks, that waits; None if it does not."""
    plan = T.plan_of(x)
    if isinstance(plan, AffinePlan):
        may_shift = isinstance(other, torch.nn.Parameter) and other.dtype == plan.dtype
        shift = _of_channels(other, x) if may_shift else None
        fits = shift is not None and plan.takes_shift(shift)
        if not fits or not cuda_affine.fits(plan.source, T.facts(x)[0], shift):
            return None
        return step(x, plan.then(shift=shift), inplace, (torch.add, other))
    if isinstance(plan, Plan) and plan.last is not None and not inplace:
        scale, shift = plan.last[:2]
        is_free = len(plan.last) == 2 and shift is None
        if is_free and _may_be_last(x, plan, other):
            return step(x, plan.then(last=(scale, other)), False, (torch.add, other))
    if inplace or not (isinstance(x, T.StackTensor) and isinstance(other, T.StackTensor)):
        return None
    if T.facts(x)[3] != (2, 3) or T.facts(x)[:4] != T.facts(other)[:4] or x is other:
        return None
    if T.is_kept(x) or T.is_kept(other) or T.shape(x) != T.shape(other):
        return None
    value, residual = T.value_of(x), T.value_of(other)
    fits = value.dim() == 4 and value.dtype == residual.dtype and not cuda.records(residual)
    if not fits or not cuda_affine.fits(value, T.facts(x)[0]):
        return None
    reach = max(T.facts(x)[4], T.facts(other)[4])
    return postponed(x, value, reach=reach, residual=residual)


def _with_residual(x, plan, residual, inplace, other):
    table, block, size, hw, reach = T.facts(x)
    reach = max(reach, T.facts(other)[4])
    func = _add_waiting if isinstance(residual, Ahead) else torch.add
    done = step(x, plan.plus(residual), inplace, (func, residual))
    object.__getattribute__(done, "__dict__")["_facts"] = table, block, size, hw, reach
    return done


def _add_waiting(value, ahead):
    """Add what a convolution that waits gives."""
    return value + ahead.value()


@handles("mul", "multiply", "__mul__", "__rmul__")
def multiply(func, *args, **kwargs):
    """Multiply channels by one kernel, with the sum and activation after it, or run."""
    if len(args) != 2:
        return pointwise(func, *args, **kwargs)
    x, given = args if isinstance(args[0], T.StackTensor) else args[::-1]
    scale, plan = plainly(given), T.plan_of(x)
    if isinstance(plan, MatrixPlan) and not kwargs and plan.takes_scale(scale):
        return step(x, plan.then(scale=scale), False, (torch.mul, scale))
    done = None if kwargs else _scaled_last(x, plan, scale)
    if done is not None:
        return done
    of_channels, table = None if kwargs else _of_channels(scale, x), T.facts(x)[0]
    if of_channels is None or not cuda_affine.fits(T.value_of(x), table, of_channels):
        return pointwise(func, *map(plainly, args), **kwargs)
    value = T.value_of(x)
    dtype = torch.promote_types(value.dtype, scale.dtype) if scale.dim() else value.dtype
    is_parameter = isinstance(scale, torch.nn.Parameter)  # others the call may change later
    kept = of_channels if is_parameter else image_values.held(given)
    if kept is None:
        factors = of_channels, None, None, None, dtype
        return T.wrap(table.compute(cuda_affine.affine, value, table, *factors), x)
    return postponed(x, value, kept, dtype=dtype)


def _scaled_last(x, plan, scale):
    """Scale channels behind a convolution's activation, or return None."""
    if not isinstance(plan, Plan) or not _may_be_last(x, plan, scale):
        return None
    if not plan.takes_last(scale):
        return None
    return step(x, plan.then(last=(scale, None)), False, (torch.mul, scale))


def _may_be_last(x, plan, values):
    """Whether values are a parameter for all channels, or for each, that leaves the dtype."""
    if type(values) is not torch.nn.Parameter or T.facts(x)[3] != (2, 3):
        return False
    dtype = torch.promote_types(plan.dtype, values.dtype) if values.dim() else plan.dtype
    for_all = values.numel() == 1 and values.dim() <= 4
    for_each = tuple(values.shape[-3:]) == (T.shape(x)[1], 1, 1) and values.numel() == T.shape(x)[1]
    known = values.device == plan.device and values.dtype in (plan.dtype, torch.float32)
    fits = known and dtype == plan.dtype and (for_all or for_each)
    return fits and not cuda.records(values)


def postponed(x, value, scale=None, reach=None, dtype=None, **changes):
    """Return the stack of x, ``value``, with a scale or none; it waits for what follows.

    ``changes`` are what follows already; the reach is that of x, and the dtype that of the value,
    where none is given.
    """
    facts = table, block, size, _, own_reach = T.facts(x)
    row = None if table.trace is None else table.trace.row
    plan = AffinePlan(value, facts, scale, row, dtype).then(**changes)
    return T.postpone(table, plan, block, size, own_reach if reach is None else reach)


def _of_channels(values, x):
    """Return values for each channel of an image, or of each image: ``[N, C, 1, 1]``; or None.

    A parameter may also have one value for all channels. They may be float32 where x is not.
    """
    if not isinstance(values, torch.Tensor) or isinstance(values, T.StackTensor):
        return None
    table, _, _, hw, _ = T.facts(x)
    if hw != (2, 3) or values.dtype not in (x.dtype, torch.float32):
        return None
    n, c = T.shape(x)[:2]
    if type(values) is torch.nn.Parameter and values.numel() == 1 and values.dim() <= 4:
        return _one_for_all(values, c, table)
    whole = values.dim() in (3, 4) and tuple(values.shape[-3:]) == (c, 1, 1)
    first = values.shape[0] if values.dim() == 4 else 1
    return values if whole and first in (1, n) else None


def _one_for_all(parameter, count, table):
    if table.weights is None:
        return None
    made = table.weights.of_channels(parameter, count)
    if table.tape is not None and table.tape.holds((parameter,)):
        table.tape.keep((made,))
    return made
