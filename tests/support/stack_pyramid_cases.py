"""Windows of images that are pooled from their active blocks, and images interpolated at blocks."""

import math
from typing import NamedTuple

import numpy as np

import sbnet_cupy as sb
from sbnet_cupy.block_sparse.stack.stack_interpolate import prepare_stack_interpolate
from sbnet_cupy.block_sparse.stack.stack_pool_launch import StackPool, prepare_stack_global_pool
from sbnet_cupy.core.compile import cpp_name
from support import stack_cases
from support.assertions import assert_close, assert_same
from support.exhaustive import thinned_pairs
from support.stack_cases import drawn
from support.strategies import BFLOAT16

DTYPES = [np.dtype("f2"), BFLOAT16, np.dtype("f4")]


class Sizes(NamedTuple):
    """Of two images, 0.6 of whose blocks are active."""

    channels: int
    block: tuple
    image: tuple


SIZES = [
    Sizes(8, (8, 8), (13, 9)), Sizes(3, (4, 2), (13, 9)), Sizes(72, (1, 1), (7, 5)),
    Sizes(16, (4, 4), (90, 70)), Sizes(520, (2, 2), (5, 4)),
]  # fmt: skip
POOLS = thinned_pairs(8, ["mean", "max"], DTYPES, SIZES, [(2, 2), (3, 6), (1, 4), (7, 2)])
# In one window of several parts of an image, which clusters put together, or another kernel.
POOLS += [
    ("mean", DTYPES[0], Sizes(64, (4, 4), (128, 128)), (2, 2)),
    ("max", DTYPES[1], Sizes(64, (4, 4), (128, 120)), (2, 3)),
    ("mean", DTYPES[2], Sizes(8, (4, 4), (400, 300)), (2, 1)),
    # Windows of few pixels, for which more threads take one.
    ("mean", DTYPES[0], Sizes(2048, (1, 1), (12, 13)), (6, 6)),
    ("max", DTYPES[1], Sizes(520, (2, 2), (12, 13)), (3, 3)),
]
MODES = ["nearest", "bilinear", "bilinear corners"]
IMAGES = thinned_pairs(6, MODES, DTYPES, SIZES, [(2, 2), (3, 6), (1, 4)])


def describe(table, dtype, channels, block, image, **more):
    """Return the StackPool of what is pooled or interpolated."""
    return StackPool(
        cpp_name(dtype, "x"), dtype.itemsize, table.capacity, table.batch, table.grid.shape[1:],
        channels, block, image, alignment=math.gcd(16, channels * dtype.itemsize), **more,
    )  # fmt: skip


def launched(xp, run, x, table, y):
    """Return what a launch makes of a stack or images in a result like ``y``."""
    out = xp.full(y.shape, 7, y.dtype)
    lists = table.bin_counts, table.active_block_indices, table.grid
    run(*map(xp.asarray, (x, *lists)), out)
    return out if xp is np else out.get()


def check_windows(mode, dtype, sizes, windows, xp=np):
    """Pool windows; compare with the means or maxima of the images' windows."""
    size, (_, table, x, _) = sizes.image, drawn(dtype, *sizes)
    image = sb.stack_to_image(x.astype(np.float64), table)
    reduce = np.mean if mode == "mean" else np.max
    each = [[slice(i * n // p, -(-(i + 1) * n // p)) for i in range(p)]
            for n, p in zip(size, windows, strict=True)]  # fmt: skip

    def reduced(a):
        lines = [[reduce(a[:, h, w], (1, 2)) for w in each[1]] for h in each[0]]
        return np.array(lines).transpose(2, 0, 1, 3)

    pool = describe(table, dtype, *sizes, windows=windows)
    expected = reduced(image)
    y = launched(xp, prepare_stack_global_pool(pool, mode), x, table, expected.astype(dtype))
    if mode == "max":
        assert_same(y.astype(np.float64), expected, signed_zero=False)
        return
    pixels = math.prod(-(-n // p) + 1 for n, p in zip(size, windows, strict=True))
    assert_close(y, expected, terms=pixels + 1, magnitude=reduced(abs(image)),
                 dtype=stack_cases.sum_dtype(dtype))  # fmt: skip


def check_images(mode, dtype, sizes, small, xp=np):
    """Interpolate small images at active blocks; compare with them interpolated and then cut."""
    channels, block, size = sizes
    factor = [-(-n // s) for n, s in zip(size, small, strict=True)]
    new = tuple(f * s for f, s in zip(factor, small, strict=True))  # which may be larger than that
    shape = tuple(-(-n // b) for n, b in zip(new, block, strict=True))
    blocks = stack_cases.Blocks(np.random.default_rng(1).random((2, *shape)) < 0.6, block, new, 2)
    table = blocks.table()
    x = np.random.default_rng(2).standard_normal((2, *small, channels)).astype(dtype)
    corners = mode.endswith("corners")
    wide = sb.stack_interpolate(
        x.astype(np.float64), sb.block_table(np.ones((2, *small)), small), scale_factor=factor,
        mode=mode.split()[0], align_corners=corners,
    )  # fmt: skip
    inside = sb.stack_pixel_mask(table)[..., None]
    expected = np.where(inside, sb.stack_from_image(wide, table), 0)
    steps = tuple((a - 1) / max(b - 1, 1) if corners else a / b
                  for a, b in zip(small, new, strict=True))  # fmt: skip
    pool = describe(table, dtype, channels, small, small, block_out=block)
    run = prepare_stack_interpolate(pool, mode, steps, of_images=True)
    y = launched(xp, run, x, table, expected.astype(dtype))
    assert not y[table.count() :].any()
    # A share is a position of at most 6 pixels, rounded twice; numbers are below 6.
    assert_close(np.where(inside, y, 0), expected, terms=4 * 6, magnitude=6.0,
                 dtype=stack_cases.sum_dtype(dtype))  # fmt: skip
