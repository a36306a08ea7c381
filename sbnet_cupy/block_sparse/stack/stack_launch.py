"""Launches of the CUDA kernels on a stack of blocks: convolutions, and blocks with their rims.

All take CuPy arrays of one device, C-contiguous, that the caller has checked:

    x, out, residual          stacks [M, b_h, b_w, C], the memory of channels_last [M, C, b_h, b_w]
    bin_counts                int32 [1], the count, which is read on the device
    active_block_indices      int32 [M, 3], rows (n, hi, wi); M is at least 1
    grid                      int32 [N, hb, wb], the row of the stack of each block, or -1

A convolution may read some channels of another stack, as x or as its residual, and write some of
another: ``part_of``, ``added_part_of`` and ``out_part_of`` of StackConv. Their first channel and
their pixels are whole vectors of 16 bytes. Rows past the count of a part do not become 0.

The channels of y may become pixels, ``unfolded`` down and across: y is
``[M, b_h * down, b_w * across, C]``, its channels in the packed weights ordered by pixel. Such y
has no residual, and rows past the count do not become 0.

With ``scales_last`` a convolution takes one more array behind out: float32 [2, K'], by what each
channel is multiplied behind the activation, and what is added to it then. K' is
``last_channels`` of the channels of out; what is beyond them is not used.

Rows of x and of the residual past the count are not used, nor pixels outside their image. Pixels of
out outside its image become 0. Rows of out past the count become 0 with ``clear_rows``; without it
they are not written, which costs no time.

    conv = StackConv(...)                             sizes, see stack_conv_plan.py
    missing_kernel(conv, current_device())            None, or why there is no kernel
    pack = prepare_stack_pack(conv, "HWIO")           packed = pack(w, scale, bias): bytes
    run = prepare_stack_conv(conv)                    keep it: it costs more than a call
    run(x, packed, residual, bin_counts, active_block_indices, grid, out)

    run = prepare_stack_depthwise(conv, "HWIO")       conv.channels_out == conv.channels
    run(x, w, scale, bias, residual, bin_counts, active_block_indices, grid, out)

    run = prepare_stack_halo(halo, x.itemsize * C)    StackHalo: sizes and fill
    run(x, bin_counts, active_block_indices, grid, out)

scale, bias and residual may be None. ``packed`` depends on w, scale, bias and the dtype alone: the
same bytes serve all plans, strides, dilations and block sizes.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from ...core import launch as kernels
from ...core.arrays import empty, vector_bytes
from ...core.device import current_device
from ...core.graph_memory import keep_if_capturing
from ...core.packed import Pack
from ...core.tensor_map import TensorMap
from ...dense.packed_weights import steps_of_weights
from .stack_conv_plan import Shortcut, box_of_lines, plan_stack_conv
from .stack_depthwise_plan import plan_stack_depthwise
from .stack_patch_plan import ROW

FILLS = ("zero", "lowest", "nearest", "mirror", "repeat")  # as in stack_halo.cu
_LINE = 8  # threads that take a pixel in stack_halo: for 128 bytes, or more
_VECTORS_EACH = 4  # that a thread moves then, at most


def prepare_stack_pack(conv, w_format):
    """Return what packs w (HWIO or OIHW), scale and bias (float32 or None) into bytes."""
    steps = steps_of_weights(w_format, *conv.kernel, conv.group_sizes[0], conv.channels_out)
    launch = prepare_stack_pack_strided(conv, steps)
    return Pack(launch, conv.packed_bytes, 1, 2)


def prepare_stack_pack_strided(conv, steps, source=None):
    """Return the launch that packs weights as they lie: (w, scale, bias, packed).

    ``steps`` are those from tap to tap down and across, and from channel to channel of x and of y,
    in elements. They may be negative: ``w`` begins with the first tap that is used. ``source`` is
    the C++ type of the weights, that of x or "float"; scale and bias are float32 or None.
    """
    template = (conv.element, conv.element == "float")
    if source not in (None, conv.element):
        template += (source,)
    return kernels.prepare(
        "block_sparse/stack/stack_conv2d",
        "pack_stack_weights",
        template,
        min(-(-conv.panels * conv.chunks * 512 // 256), 2**16),
        256,
        4,
        (conv.channels, conv.channels_out, *conv.kernel, *steps, conv.span, *conv.group_sizes),
        dependent=True,
    )


def prepare_stack_conv(conv, settled=False, clear_rows=True, plan=None):
    """Return the launch of a convolution on a stack.

    ``settled`` promises that a kernel that waited for what wrote the table and the packed weights
    has been launched since: then they are read while the kernels ahead still run.

    Pixels that are no whole vectors of 16 bytes are copied first, with channels of 0 added.

    With a shortcut, the launch takes its stack and packed weights in place of a residual, and the
    packed weights have no scale.
    """
    if clear_rows and (conv.out_part_of is not None or conv.unfolded is not None):
        raise ValueError("clear_rows must be False where out is a part, or of unfolded channels")
    if not conv.vectors_in and plan is None:
        return _with_padded_channels(conv, clear_rows)
    if plan is None and conv.shortcut is not None:
        plan = plan_stack_conv(conv, current_device())
    if plan is None:
        plan, other = (
            plan_stack_conv(conv._replace(residual=added), current_device())
            for added in (False, True)
        )
        if other != plan:
            without, added = (
                prepare_stack_conv(conv, settled, clear_rows, p) for p in (plan, other)
            )
            return _ByResidual(without, added)
    shortcut = conv.shortcut or Shortcut(0, (1, 1))
    pipelined = plan.kernel == "stack_conv_pipelined"
    blocks = (conv.rows, conv.images, *conv.grid)
    sizes = (
        *blocks, conv.channels, conv.channels_out, *conv.block, *conv.block_out, *conv.image,
        *conv.image_out, *conv.kernel, *conv.strides, *conv.dilation, *conv.pads,
        *conv.pitches, *(conv.unfolded or (1, 1)), conv.span, *conv.group_sizes,
    )  # fmt: skip
    maps = pixel_maps(conv) if pipelined and plan.bulk else ()
    run = kernels.prepare(
        "block_sparse/stack/stack_conv2d",
        plan.kernel,
        plan.template(conv),
        plan.thread_blocks(conv),
        plan.threads,
        11 if pipelined else 9,
        (
            *sizes, int(settled), int(clear_rows),
            *(_of_shortcut(shortcut, maps) if pipelined else ()),
        ),
        shared=plan.launched_bytes(conv, current_device()),
        persistent=True,
        dependent=True,
        cluster=1 if plan.partials else plan.split,
        maps=maps,
    )  # fmt: skip
    if conv.shortcut is not None:
        return kernels.Series((run, (2, 3, 0, 1, None, 4, 5, 6, None, 7, None)))
    if plan.partials:
        run = functools.partial(run, None, None) if pipelined else run
        return _with_partials(conv, plan, run, clear_rows)
    shortcut, last = (None, None) if pipelined else (), 7 if conv.scales_last else None
    return kernels.Series((run, (*shortcut, 0, 1, 2, 3, 4, 5, None, 6, last)))


def _of_shortcut(shortcut, maps):
    return shortcut.channels, *shortcut.strides, shortcut.pitch, *[0] * (2 - len(maps))


class _ByResidual:
    """A convolution with one launch for calls without a residual, and one for those with it."""

    def __init__(self, without, added):
        self._without, self._added = without, added

    def __call__(self, x, packed, residual, *arrays):
        (self._without if residual is None else self._added)(x, packed, residual, *arrays)

    def on(self, stream, addresses):
        """Launch as a kernel's launch does; the third address is 0 without a residual."""
        (self._added if addresses[2] else self._without).on(stream, addresses)


def pixel_maps(conv):
    """Return the maps of a convolution's pixels: those of its shortcut, if it has one, and of x.

    A stack x is one line of pixels; images x are the lines of all images. The shortcut's pixels at
    its strides are lines of a block's width.
    """
    itemsize = conv.element_bytes
    inner, pixel = ROW // itemsize, conv.pitches[0] * itemsize
    if conv.of_images:
        height, width = conv.image
        sizes, line = (conv.channels, width, conv.images * height), width * pixel
    else:
        sizes, line = (conv.channels, conv.rows * math.prod(conv.block), 1), pixel
    x = TensorMap(2, itemsize, sizes, (pixel, line), (inner, *conv.box))
    if conv.shortcut is None:
        return (x,)
    channels, (down, across), _ = conv.shortcut
    height, width = conv.block_out
    step = across * conv.shortcut.pitch * itemsize
    sizes, strides = (channels, width, conv.rows * height), (step, down * width * step)
    return TensorMap(0, itemsize, sizes, strides, (inner, *box_of_lines(width))), x


def _with_padded_channels(conv, clear_rows):
    """Return the launch of a copy with more channels, and of the convolution of that.

    The packed weights are the same: they hold zeros for these channels.
    """
    lanes = 16 // conv.element_bytes
    channels, pixels = -(-conv.channels // lanes) * lanes, math.prod(conv.block)
    pad = kernels.prepare(
        "block_sparse/stack/stack_conv2d",
        "pad_stack_channels",
        (conv.element,),
        -(-conv.rows * pixels * channels // (256 * lanes)),
        256,
        3,
        (conv.rows, pixels, conv.channels),
        persistent=True,
        dependent=True,
    )
    # The copy just ahead writes neither table nor weights.
    run = prepare_stack_conv(conv._replace(channels=channels, vectors_in=True), True, clear_rows)

    def launch(x, packed, residual, bin_counts, indices, grid, out, *last):
        padded = empty((conv.rows * pixels * channels,), x.dtype, x)
        keep_if_capturing(padded)
        pad(x, bin_counts, padded)
        run(padded, packed, residual, bin_counts, indices, grid, out, *last)

    return launch


def _with_partials(conv, plan, run, clear_rows):
    """Return the launch of thread blocks that leave sums in memory, and of what adds them up."""
    width = plan.partial_floats(conv) // (conv.rows * math.prod(conv.block_out) * plan.split)
    items = conv.rows * math.prod(conv.block_out) * conv.channels_out * conv.element_bytes // 16
    add_up = kernels.prepare(
        "block_sparse/stack/stack_conv2d",
        "stack_conv_sum",
        (conv.element, plan.split, conv.vectors_out, conv.activation),
        -(-items // 256) + 1,
        256,
        8,
        (
            conv.rows, conv.images, *conv.grid, conv.channels_out, *conv.block_out,
            *conv.image_out, width, *conv.pitches[1:], int(clear_rows),
        ),
        persistent=True,
        dependent=True,
    )  # fmt: skip

    def launch(x, packed, residual, bin_counts, indices, grid, out, last=None):
        partials = empty((plan.partial_floats(conv),), np.float32, x)
        keep_if_capturing(partials)
        run(x, packed, None, bin_counts, indices, grid, partials, out, last)
        add_up(partials, packed, residual, bin_counts, indices, grid, out, last)

    return launch


def prepare_stack_depthwise(
    conv, w_format, alignment=16, clear_rows=True, settled=False, plan=None
):
    """Return the launch of a depthwise convolution on a stack; w, scale and bias are as they are.

    w is (R, S, 1, C) or (C, 1, R, S), of the dtype of x; scale and bias are float32 or None. Floats
    are multiplied as IEEE. The addresses of x, out and the residual are multiples of ``alignment``
    bytes. ``settled`` as for :func:`prepare_stack_conv`, of the weights as they are. Return None
    where the window does not fit this GPU's shared memory.
    """
    plan = plan or plan_stack_depthwise(conv, alignment, current_device())
    if plan is None:
        return None
    steps = (conv.channels, 1) if w_format == "HWIO" else (1, math.prod(conv.kernel))
    run = kernels.prepare(
        "block_sparse/stack/stack_depthwise",
        "stack_depthwise",
        plan.template(conv),
        plan.grid(conv),
        plan.threads,
        10,
        (
            conv.rows, conv.images, *conv.grid, conv.channels, *conv.block, *conv.block_out,
            *conv.image, *conv.image_out, *conv.kernel, *conv.strides, *conv.dilation, *conv.pads,
            *steps, plan.tile_h, plan.runs, plan.tiles, int(settled), int(clear_rows),
        ),
        shared=plan.shared_bytes(conv),
        persistent=True,
        dependent=True,
    )  # fmt: skip
    return kernels.Series((run, (*range(9), 9 if conv.scales_last else None)))


class StackHalo(NamedTuple):
    """Blocks with a rim: sizes in pixels, as for StackConv."""

    rows: int
    images: int
    grid: tuple[int, int]
    block: tuple[int, int]
    image: tuple[int, int]
    before: tuple[int, int]  # pixels of the rim above and to the left
    after: tuple[int, int]  # below and to the right
    fill: str = "zero"  # what lies outside the image: one of FILLS
    lowest: int = 0  # the bits of the lowest value, repeated up to 8 bytes


def lowest_bits(dtype):
    """Return the bits of the lowest value of a dtype, repeated up to 8 bytes, as an int64."""
    name = np.dtype(dtype).name
    if name == "bfloat16":
        pattern = np.uint16(0xFF80).tobytes()
    elif np.dtype(dtype).kind == "f":
        pattern = np.array(-np.inf, dtype).tobytes()
    elif np.dtype(dtype).kind == "b":
        pattern = b"\0"
    else:
        pattern = np.array(np.iinfo(dtype).min, dtype).tobytes()
    return int(np.frombuffer(pattern * (8 // len(pattern)), np.int64)[0])


def prepare_stack_halo(halo, pixel_bytes, alignment=16, clear_rows=True):
    """Return the launch that copies blocks with their rim.

    ``pixel_bytes`` are those of a pixel's channels. The addresses of x and out are multiples of
    ``alignment`` bytes.
    """
    width = vector_bytes(pixel_bytes, alignment)
    vectors = pixel_bytes // width
    lanes = min(max(-(-vectors // _VECTORS_EACH), min(vectors, _LINE)), 32)
    lanes = 1 << (lanes - 1).bit_length()
    size = tuple(a + b + c for a, b, c in zip(halo.before, halo.block, halo.after, strict=True))
    vector = {16: "uint4", 8: "uint2", 4: "u32", 2: "u16", 1: "u8"}[width]
    return kernels.prepare(
        "block_sparse/stack/stack_halo",
        "stack_halo",
        (vector, lanes, FILLS.index(halo.fill)),
        -(-halo.rows * math.prod(size) // (256 // lanes * 4)),
        256,
        5,
        (
            halo.rows, halo.images, *halo.grid, vectors, *halo.block, *halo.image, *size,
            *halo.before, halo.lowest, int(clear_rows),
        ),
        persistent=True,
        dependent=True,
    )  # fmt: skip
