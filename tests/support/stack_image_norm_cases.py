"""Group norms of images of a stack by kernels, compared with the formula in float64."""

import math

import numpy as np

from sbnet_cupy.block_sparse.stack.stack_norm_launch import StackNorm, prepare_stack_image_norm
from sbnet_cupy.core import launch as kernels

from .exhaustive import pairs
from .stack_on_host import Blocks, loaded, stored

UNIT = 2.0**-24
EPS = 1e-3
BLOCKS = [
    Blocks(block=(4, 2)),
    Blocks(1, (16, 16), (8, 8), share=1.0, spare=0),
    Blocks(3, (9, 7), (1, 1), share=0.2),
    Blocks(2, (70, 50), (16, 16), share=0.1, seed=1),
]
ELEMENTS = ["Half", "BFloat16", "float"]
GROUPS = [(16, 16), (16, 4), (12, 1), (5, 5), (520, 1), (36, 3)]  # channels, groups

# blocks, element, channels and groups, what weight and bias are in, which block's image is empty
CASES = pairs(BLOCKS, ELEMENTS, GROUPS, ["float", "same", None], [False, True])


def check(case, xp=np):
    """Run a case on arrays of NumPy or CuPy; pixels that must not be read are NaN."""
    blocks, element, (channels, groups), parameters, without_first = case
    rng = np.random.default_rng(channels)
    bin_counts, indices, _ = blocks.table()
    if without_first:  # the first image has no active block, as may others
        indices = indices[indices[:, 0] != 0]
        bin_counts = np.array([(indices[:, 0] > 0).sum()], np.int32)
    count, (bh, bw), (h, w) = int(bin_counts[0]), blocks.block, blocks.image
    if not len(indices):
        return
    offset = np.resize([0.0, 50.0, -3.0], channels)
    x = stored(rng.normal(0, 1, (len(indices), bh, bw, channels)) + offset, element)
    lines = indices[:, 1, None] * bh + np.arange(bh)
    columns = indices[:, 2, None] * bw + np.arange(bw)
    inside = (lines < h)[:, :, None] & (columns < w)[:, None]
    inside[count:] = False
    x[~inside] = stored(np.array(np.nan), element)
    kind = element if parameters == "same" else "float"
    given = [stored(rng.uniform(0.5, 1.5, channels), kind) for _ in range(2)]
    weight, bias = (loaded(t, kind) for t in given) if parameters else (1.0, 0.0)
    norm = StackNorm(
        element, x.itemsize, len(indices), blocks.images, blocks.grid_size, channels, blocks.block,
        blocks.image, alignment=math.gcd(16, channels * x.itemsize),
    )  # fmt: skip
    in_group = channels // groups
    partials, moments, scale, shift = (
        np.full(n, np.nan, np.float32)
        for n in (norm.image_partials, norm.moments, *[(blocks.images, channels)] * 2)
    )
    arrays = x, bin_counts, indices, *(given if parameters else (None, None))
    arrays = (*arrays, partials, moments, scale, shift)
    arrays = [a if a is None else xp.asarray(a) for a in arrays]
    run = prepare_stack_image_norm(norm, kind, in_group, EPS, settled=without_first)
    run(*arrays)
    scale, shift = arrays[-2:] if xp is np else map(xp.asnumpy, arrays[-2:])

    rows = kernels.THREADS // norm.lanes
    of_thread = -(-len(indices) * bh * bw // (norm.image_groups * rows))  # pixels, at most
    for n in range(blocks.images):
        mine = inside & (indices[:, 0] == n)[:, None, None]
        pixels = np.zeros((h * w, channels))
        pixels[: mine.sum()] = loaded(x[mine], element)
        each = pixels.reshape(h * w, groups, in_group)
        mean, variance = each.mean((0, 2)).repeat(in_group), each.var((0, 2)).repeat(in_group)
        largest = abs(each).max((0, 2)).repeat(in_group)
        # a thread adds up its pixels, a tree of 8 steps those of 256 threads, and few steps follow
        sums = (of_thread + 16) * UNIT
        expected = weight / np.sqrt(variance + EPS)
        of_scale = expected * (4 * sums * largest**2 / (2 * (variance + EPS)) + UNIT)
        assert (abs(scale[n] - expected) <= 1.01 * of_scale).all()
        wanted = bias - mean * expected
        of_mean = 2 * sums * largest
        of_shift = of_mean * expected + abs(mean) * of_scale + UNIT * abs(wanted)
        assert (abs(shift[n] - wanted) <= 1.01 * of_shift + of_mean * of_scale).all()
