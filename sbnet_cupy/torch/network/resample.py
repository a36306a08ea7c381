"""Interpolation of a stack: nearest and bilinear, by any factor that has a stage."""

import numbers

import torch
from torch.nn import functional as F

from . import casts, cuda, cuda_pool, cuda_resize, ops
from . import tensor as T
from .ends import rest_of, with_rest
from .handlers import handles
from .layout import channels_last
from .neighbours import pixels_at
from .plans import TimedPlan, wider
from .windows import is_image, two


@handles("interpolate")
def interpolate(
    func, input, size=None, scale_factor=None, mode="nearest", align_corners=None,
    recompute_scale_factor=None, antialias=False,
):  # fmt: skip
    """Interpolate as the dense function does, from the pixels of neighbouring blocks."""
    if not is_image(input) or mode not in ("nearest", "bilinear", "nearest-exact") or antialias:
        return NotImplemented
    table, block, old, _, reach = T.facts(input)
    new, scales = _sizes(old, size, scale_factor, recompute_scale_factor)
    if new is None or min(new) < 1:
        return NotImplemented
    to = block if new == old else table.stage(block, old, new)
    if to is None:
        return NotImplemented
    table.block_of.setdefault(new, to)
    options = (mode, align_corners)
    reach += max(map(_looks, table.block, block, to, old, new, scales, (options,) * 2))
    if table.whole:
        call = T.picture(input), size, scale_factor, *options, recompute_scale_factor
        value = table.compute(F.interpolate, *call)
        out = T.StackTensor(value, table, to, new, (2, 3), reach)
        return with_rest(out, rest_of(input))
    value = T.value_of(input)
    dtype = casts.dtype_in(value, F.interpolate, None, 2.0, mode)
    sizes, rest = (block, old, to, new, scales), rest_of(input)

    def make(dtype):
        return _resized(value.to(dtype), table, *sizes, *options)

    if table.weights is not None and cuda.serves(value):
        if dtype != value.dtype:
            shape, places = T.shape(input), {"block": to, "size": new, "reach": reach}
            return wider(input, make, shape, value.dtype, (), rest, **places)
        factors = None if mode == "bilinear" else _whole_factors(*sizes)
        if factors is not None:
            row = table.trace and table.trace.row
            plan = EnlargedPlan(value, T.facts(input), factors, rest, row)
            return T.postpone(table, plan, to, new, reach)
    return with_rest(T.StackTensor(make(dtype), table, to, new, (2, 3), reach), rest)


def _resized(value, table, block, old, to, new, scales, mode, align_corners):
    """Interpolate a stack of images of the size ``old``, in blocks ``block``."""
    how = "bilinear corners" if align_corners else mode
    steps = tuple(map(cuda_pool.step, old, new, scales, (how == "bilinear corners",) * 2))
    taken = cuda_pool.interpolate(value, table, block, old, to, how, steps)
    if taken is not None:
        return taken
    factors = _whole_factors(block, old, to, new, scales)
    if factors is not None and mode != "bilinear":
        return table.compute(_larger, value, factors)
    if factors is not None and not align_corners:
        return table.compute(_between, value, table, block, old, factors)
    call = value, table, block, old, to, new, scales, mode, align_corners
    return table.compute(_anywhere, *call)


def _whole_factors(block, old, to, new, scales):
    """Return how many times larger images and blocks become, whole numbers, or None."""
    factors = tuple(t // b for t, b in zip(to, block, strict=True))
    sizes = zip((*old, *block), factors * 2, (*new, *to), strict=True)
    exact = min(factors) >= 1 and all(o * f == n for o, f, n in sizes)
    return factors if exact and scales_are(scales, factors) else None


def _looks(whole, block, to, old, new, scale, options):
    """Return how many pixels of the input pixels look along an axis, at most.

    Pixel ``i`` of the result reads pixels at ``first + i * step``, rounded down, and where it is
    bilinear the next ones. Where the new size is no multiple of the old one these drift away from
    the places that the blocks have, so that the ends of the image are furthest from them.
    """
    mode, corners = options
    step = cuda_pool.step(old, new, scale, bool(corners))
    if step == 1 and old == new:
        return 0
    before, after = whole / block, whole / to  # pixels of the input that one covers
    first = (step - 1) / 2 if mode == "bilinear" and not corners else 0
    first += step / 2 if mode == "nearest-exact" else 0
    at = [((first + i * step) * before, i * after) for i in (0, new - 1)]
    back = max(ours + after - source for source, ours in at)
    return max(back, *(source - ours + before * (mode == "bilinear") for source, ours in at))


def _larger(value, factors):
    value = F.interpolate(value, scale_factor=tuple(map(float, factors)))
    return channels_last(value)


class EnlargedPlan(TimedPlan):
    """Pixels that are repeated, ``factors`` times down and across, where kernels run.

    A kernel that joins the channels of stacks reads them as they were.
    """

    rest = kernel = options = None
    norm, activation = "none", "none"  # nothing can be added behind it

    def __init__(self, source, facts, factors, rest=None, row=None):
        self.source, self.facts, self.factors, self.rest = source, facts, factors, rest
        self.dtype, self.shape, self.row = source.dtype, (0, source.shape[1], 0, 0), row
        self.residual = self.done = None

    def _run(self):
        table = self.facts[0]
        y = cuda_resize.enlarge(self.source, table, self.factors)
        return table.compute(_larger, self.source, self.factors) if y is None else y


def _between(value, table, block, size, factors):
    """Interpolate bilinearly by whole factors."""
    wide = ops.halo(value, table, block, size, (1, 1, 1, 1), mode="replicate")
    scale = tuple(map(float, factors))
    wide = F.interpolate(wide, scale_factor=scale, mode="bilinear", align_corners=False)
    down, across = factors
    wide = wide[:, :, down:-down, across:-across]
    return channels_last(wide)


def scales_are(scales, factors):
    """Whether the factors that were given, if any, are those of the blocks."""
    return all(s is None or s == f for s, f in zip(scales, factors, strict=True))


def _sizes(old, size, scale, recompute):
    """Return the new size, and the factors that PyTorch computes positions with, or None."""
    if size is not None:
        return two(size), (None, None)
    scale = (scale, scale) if isinstance(scale, numbers.Real) else tuple(scale)
    if not all(isinstance(s, numbers.Real) for s in scale):
        return None, None
    scale = tuple(map(float, scale))  # of NumPy, too
    new = tuple(int(o * s) for o, s in zip(old, scale, strict=True))
    return new, (None, None) if recompute else scale


def _anywhere(x, table, block, old, to, new, scales, mode, corners):
    """Interpolate by gathering the pixels around each place."""
    precise = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = _places(table.down, to[0], old[0], new[0], scales[0], mode, corners, precise)
    across = _places(table.across, to[1], old[1], new[1], scales[1], mode, corners, precise)
    if mode != "bilinear":
        value = _at(x, table, block, y[0], across[0]).permute(0, 3, 1, 2)
        return channels_last(value)
    top = _mix(x, table, block, y[0], across)
    bottom = _mix(x, table, block, y[1], across)
    weight = y[2][:, :, None, None].to(x.dtype)
    value = (top * (1 - weight) + bottom * weight).permute(0, 3, 1, 2)
    return channels_last(value)


def _mix(x, table, block, y, across):
    weight = across[2][:, None, :, None].to(x.dtype)
    left, right = _at(x, table, block, y, across[0]), _at(x, table, block, y, across[1])
    return left * (1 - weight) + right * weight


def _at(x, table, block, y, across):
    """Return pixels of the stack, 0 in inactive blocks: ``[M, h, w, C]``."""
    yes = torch.ones_like(y, dtype=torch.bool), torch.ones_like(across, dtype=torch.bool)
    index, held, _ = pixels_at(table, block, y, across, *yes)
    pixels = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
    taken = pixels.index_select(0, index.reshape(-1)).view(*index.shape, x.shape[1])
    return torch.where(held[..., None], taken, 0)


def _places(cell, length, old, new, scale, mode, corners, dtype):
    """Return for each output pixel of a block the two pixels that it lies between, and how far."""
    at = cell[:, None] * length + torch.arange(length, device=cell.device)
    at = at.clamp(max=new - 1).to(dtype)
    step = cuda_pool.step(old, new, scale, mode == "bilinear" and corners)
    step = torch.tensor(step, dtype=dtype).item()
    if mode == "bilinear" and corners:
        source = at * step
    else:
        if mode == "nearest":
            source = at * step
        elif mode == "nearest-exact":
            source = (at + 0.5) * step
        else:
            source = ((at + 0.5) * step - 0.5).clamp(min=0)
    low = source.floor().long().clamp(max=old - 1)
    high = (low + 1).clamp(max=old - 1)
    return low, high, (source - low).clamp(0, 1)


@handles("max_unpool2d")
def max_unpool2d(func, input, indices, kernel_size, stride=None, padding=0, output_size=None):
    """Unpool whole images; zeros of inactive blocks go to pixels of those blocks.

    The stack of indices has none for them: 0 would be a pixel of the first block.
    """
    if func is not F.max_unpool2d or not (is_image(indices) and is_image(input)):
        return NotImplemented
    table, block, size, hw, _ = T.facts(indices)
    active = table.compute(table.scatter, torch.ones_like(T.value_of(indices)), block, size, hw)
    steps = two(kernel_size if stride is None else stride)
    windows = zip(size, two(kernel_size), steps, two(padding), strict=True)
    new = [(n - 1) * s - 2 * p + k for n, k, s, p in windows]
    if output_size is not None:
        new = list(output_size)[-2:]
    down, across = (
        torch.arange(n, device=active.device).mul(s).clamp(max=m - 1)
        for n, s, m in zip(size, steps, new, strict=True)
    )
    own = (down[:, None] * new[1] + across).to(active.dtype)
    indices = torch.where(active > 0, T.dense(indices), own)
    call = input, indices, kernel_size, stride, padding, output_size
    return T.on_image(func, "max_unpool2d", call, {})
