"""Convolution of images of few channels at their active blocks: no stack of the images is made.

The first convolution of a network reads the image itself, through the list of blocks; what lies in
no active block counts 0. It computes what stack_conv2d computes of stack_from_image. Kernel:
cuda_src/block_sparse/stack/stack_image_conv2d.cu

    conv = ImageConv(...)                                 sizes
    missing_image_kernel(conv, steps, current_device())   None, or why there is no kernel
    pack = prepare_image_pack(conv, "HWIO")               packed = pack(w, scale, bias): bytes
    run = prepare_image_conv(conv, steps)                 keep it: it costs more than a call
    run(x, packed, bin_counts, active_block_indices, grid, out)

x holds images in any memory layout: ``steps`` are the distances, in elements, of neighbours along
N, H, W and C. All else is as in stack_launch.py.
"""

import functools
import math
from typing import NamedTuple

from ...core import launch as kernels
from ...core.device import current_device
from ...core.packed import Pack
from ...dense.activation import scales_last
from ...dense.packed_weights import steps_of_weights
from .stack_conv_plan import tables_of

_STEM = "block_sparse/stack/stack_image_conv2d"
_THREADS = 128
_MOST_CHANNELS = 8
_UNIT, _STEP, _COLUMNS = 8, 4, 64  # bytes; units; columns that are packed together
_MOST_PATCH = 1 << 16  # pixels of a patch, for exact divisions


class ImageConv(NamedTuple):
    """A convolution from images to a stack of blocks.

    Blocks of the images are ``block`` pixels of ``image``; those of y are ``block_out`` pixels,
    ``block / strides``, of images of ``image_out`` pixels.
    """

    element: str  # C++ type: Half, BFloat16, or float, which is multiplied as tf32
    rows: int  # of the stack: its capacity
    images: int
    grid: tuple[int, int]  # blocks of an image
    block: tuple[int, int]
    block_out: tuple[int, int]
    image: tuple[int, int]
    image_out: tuple[int, int]
    channels: int
    channels_out: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    dilation: tuple[int, int]
    pads: tuple[int, int]  # pixels above and to the left
    activation: int
    vectors_out: bool  # pixels of y are whole vectors of 16 bytes, aligned

    @property
    def scales_last(self):
        """As of a StackConv: ``run`` then takes one more array, behind out."""
        return scales_last(self.activation)

    @property
    def units(self):
        """Units of a pixel of x: 8 bytes of channels."""
        return -(-self.channels * (4 if self.element == "float" else 2) // _UNIT)

    @property
    def steps(self):
        """Steps of K: four units each."""
        return -(-self.units * math.prod(self.kernel) // _STEP)

    @property
    def columns(self):
        """Output channels that are packed."""
        return -(-self.channels_out // _COLUMNS) * _COLUMNS

    @property
    def packed_bytes(self):
        """Bytes of the packed weights; the same for every plan."""
        return self.columns * (2 * 4 + self.steps * 32)


class ImagePlan(NamedTuple):
    """Which instance of the kernel."""

    pixels: int  # 64 * MT
    columns: int  # 8 * NT, output channels of a thread block
    tile: tuple[int, int]  # pixels of y
    blocks: int  # thread blocks for which a multiprocessor must have registers
    wgmma: bool  # products by four warps together, of compute capability 9.0

    def template(self, conv, by_words):
        """Return the template arguments; ``by_words``: as :func:`reads_words` says."""
        return (
            self.wgmma, conv.element, conv.channels, by_words, self.pixels // 64,
            self.columns // 8, conv.vectors_out, conv.activation, self.blocks,
        )  # fmt: skip

    def tiles(self, conv):
        """Number of tiles of a block of y."""
        pairs = zip(conv.block_out, self.tile, strict=True)
        return math.prod(-(-b // t) for b, t in pairs)

    def waste(self, conv):
        """Pixels that are computed for each pixel of a block."""
        return self.tiles(conv) * self.pixels / math.prod(conv.block_out)

    def shared_bytes(self, conv):
        """Dynamic shared memory of a thread block; the sums of stack_image_conv2d.cu."""
        patch = math.prod(
            (t - 1) * s + (k - 1) * d + 1
            for t, s, k, d in zip(self.tile, conv.strides, conv.kernel, conv.dilation, strict=True)
        )
        weights = self.columns * conv.steps * 32
        tables = 4 * tables_of(conv.activation) * self.columns
        return weights + tables + 4 * _STEP * conv.steps + 16 + patch * conv.units * _UNIT


def missing_image_kernel(conv, steps, device):
    """Return for what there is no CUDA kernel; None where there is one."""
    if not 1 <= conv.channels <= _MOST_CHANNELS:
        return f"images of {conv.channels} channels: it takes 1 to {_MOST_CHANNELS}"
    sizes = (*conv.image, *conv.image_out, *conv.pads)
    covered = [g * b for g, b in zip(conv.grid, conv.block, strict=True)]
    if max(*sizes, *covered) >= 2**30 or conv.channels_out > 2**24:
        return f"images as large as {conv.image}, or {conv.channels_out} channels"
    if max(map(abs, steps[1:])) >= 2**31:
        return f"images whose neighbours are {steps} elements apart"
    if max(n * b for n, b in zip(conv.image, conv.block, strict=True)) >= 2**32:
        return f"blocks of {conv.block} pixels of images of {conv.image}"
    if conv.element != "Half" and not device.tensor_floats:
        return f"{conv.element} on this GPU"
    plan = plan_image_conv(conv, device)
    if plan is None:
        return f"a window of {conv.kernel} pixels: it does not fit this GPU's shared memory"
    if conv.rows * plan.tiles(conv) >= 2**31:
        return f"stacks of {conv.rows} blocks of {conv.block_out} pixels"
    return None


@functools.lru_cache(maxsize=256)
def plan_image_conv(conv, device):
    """Return the plan of a convolution, or None where none fits this GPU.

    Of the plans that fit it is the one that computes the fewest pixels and channels for nothing,
    with 32 channels only where there are no more: each panel of channels reads the patch again.
    """
    wanted = 64 if conv.channels_out > 32 else 32
    return min(
        candidates(conv, device),
        key=lambda plan: (plan.columns != wanted, plan.waste(conv), -plan.pixels),
        default=None,
    )


def candidates(conv, device):
    """Yield the plans that fit."""
    for pixels, columns in _BLOCKS:
        blocks = blocks_of(pixels, columns, conv.channels, device, conv.scales_last)
        plan = ImagePlan(pixels, columns, _tile(conv.block_out, pixels), blocks, device.hopper)
        fits = plan.shared_bytes(conv) <= device.shared_bytes
        if fits and _patch_pixels(conv, plan) < _MOST_PATCH:
            yield plan


# Pixels and channels of a tile, and for how many thread blocks a multiprocessor has registers: by
# wgmma, and otherwise. With 64 channels, 256 pixels were slower on an H200 but for a window of
# 3 x 3, where they took as long.
_BLOCKS = {
    (128, 64): (3, 3), (64, 64): (5, 4), (256, 32): (3, 2), (128, 32): (5, 4), (64, 32): (6, 5),
}  # fmt: skip


def blocks_of(pixels, columns, channels, device, scales_last=False):
    """Return for how many thread blocks an instance leaves registers, with none spilled.

    Pixels of many channels take more registers, and so do channels that are scaled last.
    """
    blocks = _BLOCKS[pixels, columns][not device.hopper] - (channels > 4)
    return blocks - (scales_last and blocks > 3)


def _patch_pixels(conv, plan):
    return math.prod(
        (t - 1) * s + (k - 1) * d + 1
        for t, s, k, d in zip(plan.tile, conv.strides, conv.kernel, conv.dilation, strict=True)
    )


def _tile(block, pixels):
    """Return a tile of at most so many pixels: equal parts of a row of at most 32."""
    width = -(-block[1] // -(-block[1] // 32))
    return min(pixels // width, block[0]), width


def reads_words(conv, steps, alignment):
    """Whether pixels can be read as words of 4 bytes: their channels lie side by side.

    The first and last word of a pixel may be half its neighbour's, but none may leave its row.
    """
    size = 4 if conv.element == "float" else 2
    rows = (steps[0], steps[1], conv.channels * conv.image[1])
    beside = tuple(steps[2:]) == (conv.channels, 1)
    return beside and alignment % 4 == 0 and all(n * size % 4 == 0 for n in rows)


def prepare_image_pack(conv, w_format):
    """Return what packs w (HWIO or OIHW), scale and bias (float32 or None) into bytes."""
    steps = steps_of_weights(w_format, *conv.kernel, conv.channels, conv.channels_out)
    launch = kernels.prepare(
        _STEM,
        "pack_image_weights",
        (conv.element,),
        min(-(-conv.columns * conv.steps * 2 // 256), 2**16),
        256,
        4,
        (conv.channels, conv.channels_out, *conv.kernel, *steps),
    )
    return Pack(launch, conv.packed_bytes, 1, 2)


def prepare_image_conv(conv, steps, settled=False, clear_rows=True, plan=None, alignment=1):
    """Return the launch of a convolution of images.

    ``steps`` are the distances of neighbours along N, H, W and C, in elements, and the address of
    the images is a multiple of ``alignment`` bytes. ``settled`` promises that the kernel just ahead
    on the stream does not write the packed weights: then they are read while that kernel still
    runs.
    """
    plan = plan or plan_image_conv(conv, current_device())
    by_words = reads_words(conv, steps, alignment)
    sizes = (
        conv.rows, conv.images, *conv.grid, conv.channels_out, *conv.block, *conv.block_out,
        *conv.image, *conv.image_out, *conv.kernel, *conv.strides, *conv.dilation, *conv.pads,
    )  # fmt: skip
    run = kernels.prepare(
        _STEM,
        "stack_image_conv2d",
        plan.template(conv, by_words),
        (conv.rows * plan.tiles(conv), -(-conv.channels_out // plan.columns)),
        _THREADS,
        7,
        (*sizes, *steps, *plan.tile, int(settled), int(clear_rows)),
        shared=plan.shared_bytes(conv),
        persistent=True,
        dependent=True,
    )
    return kernels.Series((run, (*range(6), 6 if conv.scales_last else None)))
