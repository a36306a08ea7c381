"""Sizes of the stages of a network on a stack: integers only, no arrays.

Every stage has the same blocks. A layer with stride ``s`` makes them ``s`` times smaller: pixel
``(p, q)`` of its result belongs to block ``(p // b, q // b)`` with ``b`` the new block size, and
reads the pixels ``p * s - before + r * dilation`` of its input, wherever they lie.
"""

from fractions import Fraction
from numbers import Rational, Real
from typing import NamedTuple

from ...core.sizes import output_size, padding_pairs, pair
from ...errors import ShapeError


class Stage(NamedTuple):
    """What a stage of a network has of its own: the sizes of a block and of the image."""

    block_size: tuple[int, int]
    image_size: tuple[int, int]


class Window(NamedTuple):
    """A sliding window between a stage and a coarser one; each field is a pair ``(h, w)``.

    Pixel ``p`` of the coarse stage meets the pixels ``p * stride - before + r * dilation``, with
    ``0 <= r < kernel``, of the fine stage.
    """

    kernel: tuple[int, int]
    strides: tuple[int, int]
    dilation: tuple[int, int]
    pads: tuple[tuple[int, int], tuple[int, int]]
    fine: Stage
    coarse: Stage

    @property
    def before(self):
        """Pixels of padding above and on the left."""
        return self.pads[0][0], self.pads[1][0]


def resolve_window(table, kernel, strides, padding, dilation, *, ceil_mode=False):
    """Check a window that slides over the stage of ``table``; return it with the next stage."""
    kernel, strides = pair(kernel, "kernel"), pair(strides, "strides")
    dilation = pair(dilation, "dilation")
    block, image, blocks = table.block_size, table.image_size, table.grid.shape[1:]
    if any(b % s for b, s in zip(block, strides, strict=True)):
        raise ShapeError(
            f"strides must divide the block size of the stage, got strides {strides} for blocks of "
            f"{block} pixels; make the table with a larger block_size"
        )
    extent = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True))
    pads = padding_pairs(image, extent, strides, padding)
    if ceil_mode:
        out = tuple(map(_ceil_size, image, extent, strides, pads))
    else:
        out = output_size(image, extent, strides, pads)
    coarse = Stage(tuple(b // s for b, s in zip(block, strides, strict=True)), out)
    check_covered(coarse, blocks, "padding")
    return Window(kernel, strides, dilation, pads, Stage(block, image), coarse)


def resolve_transposed(table, kernel, strides, padding, dilation, output_padding):
    """The same for a transposed convolution, whose result is the fine stage."""
    kernel, strides = pair(kernel, "kernel"), pair(strides, "strides")
    dilation = pair(dilation, "dilation")
    more = pair(output_padding, "output_padding", minimum=0)
    block, image, blocks = table.block_size, table.image_size, table.grid.shape[1:]
    extent = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True))
    if is_same(padding):
        totals = [max(e - s, 0) for e, s in zip(extent, strides, strict=True)]
        pads = tuple((total // 2, total - total // 2) for total in totals)
        out = tuple(n * s + m for n, s, m in zip(image, strides, more, strict=True))
    else:
        pads = padding_pairs(image, extent, strides, padding)
        out = tuple(
            max((n - 1) * s - sum(p) + e + m, 0) if n else 0
            for n, s, p, e, m in zip(image, strides, pads, extent, more, strict=True)
        )
    fine = Stage(tuple(b * s for b, s in zip(block, strides, strict=True)), out)
    check_covered(fine, blocks, "padding")
    return Window(kernel, strides, dilation, pads, fine, Stage(block, image))


def new_stage(table, scale_factor, size):
    """Return the stage after an interpolation, whose blocks are ``scale_factor`` times as large."""
    factors = _pair_of(scale_factor)
    blocks = tuple(map(_whole_block, table.block_size, factors))
    # A float is multiplied in float64, as PyTorch does: 49 pixels times 1 / 49 are none.
    image = tuple(int(n * f) for n, f in zip(table.image_size, factors, strict=True))
    stage = Stage(blocks, image if size is None else pair(size, "size", minimum=0))
    check_covered(stage, table.grid.shape[1:], "size")
    return stage


def _pair_of(scale_factor):
    """Read a positive number or a pair of them, each as a Fraction or a float."""
    both = scale_factor if isinstance(scale_factor, tuple | list) else (scale_factor,) * 2
    real = all(isinstance(f, Real) and not isinstance(f, bool) for f in both)
    read = tuple(Fraction(f) if isinstance(f, Rational) else float(f) for f in both if real)
    if len(read) != 2 or not all(0 < f < 2**31 for f in read):
        raise ShapeError(
            f"scale_factor must be a positive number below 2**31 or two, got {scale_factor!r}; "
            "with a size, it says how much larger the blocks become"
        )
    return read


def _whole_block(block, factor):
    """Return a block's new size. A float is the fraction of the block that rounds to it, if any."""
    near = Fraction(factor).limit_denominator(block)
    new = block * (near if type(factor)(near) == factor else Fraction(factor))
    if new.denominator > 1:
        raise ShapeError(
            f"scale_factor must make whole blocks, got {factor} for blocks of {block} pixels; pass "
            f"a whole number over {block}, also as a fractions.Fraction"
        )
    return int(new)


def check_covered(stage, blocks, argument):
    """Raise unless each pixel of the stage's image belongs to a block of the grid."""
    covered = tuple(n * b for n, b in zip(blocks, stage.block_size, strict=True))
    if any(n > c for n, c in zip(stage.image_size, covered, strict=True)):
        raise ShapeError(
            f"{argument} must give a result whose pixels all lie in blocks of the table: "
            f"{tuple(blocks)} blocks of {stage.block_size} pixels cover {covered}, got a result of "
            f"{stage.image_size}; a padding of half the kernel keeps the sizes"
        )


def is_same(padding):
    """Whether padding is "SAME", in capitals or not."""
    return isinstance(padding, str) and padding in ("SAME", "same")


def _ceil_size(n, extent, stride, pads):
    """Outputs with ``ceil_mode``: a last window may stick out, if it starts before the end pad."""
    size = max(-(-(n + sum(pads) - extent) // stride) + 1, 0)
    return size - 1 if size and (size - 1) * stride >= n + pads[0] else size


def default_image_size(table, strides):
    """Size of the image after layers that keep ``ceil(n / stride)`` pixels."""
    return tuple(-(-n // s) for n, s in zip(table.image_size, strides, strict=True))
