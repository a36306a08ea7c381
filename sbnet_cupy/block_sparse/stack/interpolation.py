"""Where interpolated pixels lie between those of the stage they are made of."""

import functools
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from ...core.arrays import namespace
from ...core.checks import check_flag
from ...dense.conv2d import check_choice
from .checks import check_stack
from .neighbours import Axis
from .stages import Stage, new_stage

MODES = ("nearest", "bilinear")


class Resize(NamedTuple):
    """An interpolation without its arrays; pairs are ``(h, w)``."""

    mode: str
    align_corners: bool
    old: Stage
    new: Stage
    ratios: tuple[Fraction, Fraction]  # old pixels for each new one

    @property
    def factors(self):
        """Whole factors of a resize that treats all blocks alike, or None."""
        sizes = zip(self.new.block_size, self.old.block_size, strict=True)
        whole = [Fraction(new, old) for new, old in sizes]
        if self.align_corners or any(f.denominator > 1 for f in whole):
            return None
        same = all(r * f == 1 for r, f in zip(self.ratios, whole, strict=True))
        return tuple(int(f) for f in whole) if same else None

    def lattice(self, axis):
        """Return the old pixels around a block that some block of the axis needs."""
        b = self.old.block_size[axis]
        before, after = _reach(
            self.mode, self.align_corners, self.ratios[axis], self.new.image_size[axis],
            self.old.image_size[axis], self.new.block_size[axis], b,
        )  # fmt: skip
        return Axis(-before, 1, b + before + after)

    def positions(self, places, axis, lattice, dtype):
        """Return (first, second, share of the second) [m, P]: lines of the lattice to mix."""
        xp, size = namespace(places.n), self.new.block_size[axis]
        start = (places.hi, places.wi)[axis]
        pixel = (start * size)[:, None] + xp.arange(size)
        options = (self.mode, self.align_corners, self.ratios[axis], self.old.image_size[axis])
        low, high, share = source_pixels(xp, pixel, *options)
        corner = (start * self.old.block_size[axis])[:, None] + lattice.first
        low, high = (xp.clip(p - corner, 0, lattice.count - 1) for p in (low, high))
        return low, high, share.astype(dtype)


def resolve_resize(x, table, scale_factor, size, mode, align_corners):
    """Check the arguments of an interpolation; return a Resize."""
    check_choice("mode", mode, MODES)
    check_flag("align_corners", align_corners)
    if align_corners and mode == "nearest":
        raise ValueError("align_corners must be False for mode 'nearest', got True")
    check_stack("x", x, table)
    old, new = Stage(table.block_size, table.image_size), new_stage(table, scale_factor, size)
    ratios = tuple(Fraction(a, b) for a, b in zip(old.block_size, new.block_size, strict=True))
    if size is not None:
        sizes = zip(old.image_size, new.image_size, strict=True)
        ratios = tuple(Fraction(a, max(b, 1)) for a, b in sizes)
    if align_corners:
        ratios = tuple(
            Fraction(max(a - 1, 0), b - 1) if b > 1 else Fraction(0)
            for a, b in zip(old.image_size, new.image_size, strict=True)
        )
    return Resize(mode, bool(align_corners), old, new, ratios)


def source_pixels(xp, pixel, mode, align_corners, ratio, size):
    """Return (first, second, share of the second) of old pixels, for new ones; all in the image."""
    last = max(size - 1, 0)
    if mode == "nearest":
        low = xp.minimum(pixel * ratio.numerator // ratio.denominator, last)
        return low, low, xp.zeros(pixel.shape)
    if align_corners:
        source = pixel * ratio.numerator / ratio.denominator
    else:
        source = (pixel + 0.5) * ratio.numerator / ratio.denominator - 0.5
    source = xp.clip(source, 0, last)
    low = xp.floor(source).astype(np.int64)
    return low, xp.minimum(low + 1, last), source - low


@functools.lru_cache(256)
def _reach(mode, align_corners, ratio, new_size, old_size, new_block, old_block):
    """Return how many pixels before and after its own a block needs, at most."""
    pixel = np.arange(new_size)
    low, high, _ = source_pixels(np, pixel, mode, align_corners, ratio, old_size)
    corner = pixel // new_block * old_block
    before = (corner - low).max(initial=0)
    return max(int(before), 0), max(int((high - corner).max(initial=0)) - old_block + 1, 0)


def phases(factor):
    """Yield (which of the new pixels of an old one, line of a rim of 1, share of the next line)."""
    for phase in range(factor):
        source = Fraction(2 * phase + 1, 2 * factor) - Fraction(1, 2)
        line = source.numerator // source.denominator
        yield phase, 1 + line, float(source - line)
