"""Pixels that nothing reads: those in no active block, or in no image, are in no gradient.

What a function makes of them is masked, and so is its gradient, which is 0. But a derivative that
is infinite, as that of a square root at 0, times 0 is NaN, and convolutions sum it into their
weights. So where gradients are recorded, functions with such derivatives are given, in these
pixels, a number at which they and their derivatives are finite.
"""

import torch

# Functions that may be infinite at a finite number, or have an infinite derivative there.
SINGULAR = """
    sqrt sqrt_ rsqrt rsqrt_ log log_ log1p log2 log10 reciprocal reciprocal_ asin acos logit
    exp exp_ exp2 expm1 sinh cosh tan pow pow_ float_power __pow__ __rpow__ __ipow__
    div divide true_divide div_ divide_ __truediv__ __rtruediv__ __itruediv__ __div__ __rdiv__
    __idiv__ addcdiv addcdiv_ fmod remainder __mod__ atan2 hypot xlogy logaddexp
    softmax log_softmax softmin logsumexp normalize
"""
SINGULAR = frozenset(SINGULAR.split())
QUOTIENTS = {
    "div", "divide", "true_divide", "div_", "divide_", "__truediv__", "__itruediv__", "__div__",
    "__idiv__",
}  # fmt: skip
POWERS = {"pow", "pow_", "float_power", "__pow__", "__ipow__"}
HARMLESS = 0.5  # all of them are finite at it, and their derivatives


def harmless(func, tensors, table, block, size, hw, writes=False):
    """Return what a function is given, stacks with a harmless number where nothing reads them.

    Parameters
    ----------
    func : callable
        A function of pixels, or along channels.
    tensors : list
        Its arguments, stacks or values of each of their rows among them.
    table, block, size, hw
        Where the stacks lie, and their dimensions of height and width.
    writes : bool
        Whether the function writes to the first one, which is then changed.
    """
    name = func.__name__.removeprefix("special_")
    if name not in SINGULAR or not torch.is_grad_enabled() or table.filled(block, size):
        return tensors
    given = [t for t in tensors if isinstance(t, torch.Tensor)]
    if not any(t.requires_grad for t in given):
        return tensors
    read = table.inside(block, size)
    dims, rows = max(t.dim() for t in given), len(read)
    found = [isinstance(t, torch.Tensor) and t.dim() == dims and len(t) == rows for t in tensors]
    if _is_smooth(name, tensors, found):
        return tensors
    shape = [1] * dims
    shape[0], shape[hw[0]], shape[hw[1]] = read.shape
    read, out = read.view(shape), list(tensors)
    for i, t in enumerate(tensors):
        if not found[i] or not (t.is_floating_point() or t.is_complex()):
            continue
        if writes and i == 0:
            out[i] = t.masked_fill_(~read, HARMLESS)
        else:
            out[i] = torch.where(read, t, HARMLESS)
    return out


def _is_smooth(name, tensors, found):
    """Whether a function is finite after all: x / 2, x / parameter, x ** 2.

    ``found`` tells which of its arguments have numbers of their own for each row.
    """
    if len(tensors) < 2 or found[1]:
        return False
    if name in POWERS:
        power = tensors[1]
        return isinstance(power, int | float) and power >= 1 and float(power).is_integer()
    return name in QUOTIENTS
