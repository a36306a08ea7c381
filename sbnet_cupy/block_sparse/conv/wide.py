"""fused_conv of many channels: the kernel of stacks of blocks, from images to images.

It draws a tile's pixels from several blocks, keeps K in a pipeline, and may share K among thread
blocks. It is there on compute capability 9.0 and newer, for pixels that are whole vectors.
"""

from ...core import launch as kernels
from ...core.arrays import dtype_name
from ...core.compile import cpp_name
from ...core.packed import Pack, PackedPlan, dtype_of_tables
from ...dense.packed_weights import PackedWeights, steps_of_weights
from ..background import with_background
from ..stack.stack_conv_plan import StackConv, missing_kernel, plan_cost, plan_stack_conv
from ..stack.stack_launch import pixel_maps
from .config import estimate_cycles

_STEM = "block_sparse/stack/stack_conv2d"
# What fused_conv takes on an H200, in cycles: its estimate leaves out the launch.
_SLOWER, _LAUNCH = 1.2, 1755
# How much longer it takes than estimated where floats are rounded for each tap that reads them.
_ROUNDED = 1.3
_FEWEST_BYTES = 64  # of a pixel's channels: from these on both were compared


def as_stack_conv(case, shape, problem, rows, bsize, expected):
    """Return the convolution of NHWC images at blocks of ``bsize`` pixels of the result."""
    (images, *size, channels), (top, _), (left, _) = shape, *problem.pads
    return StackConv(
        element=case.element,
        rows=rows,
        images=images,
        grid=tuple(-(-n // b) for n, b in zip(problem.out_size, bsize, strict=True)),
        block=tuple(b * s for b, s in zip(bsize, problem.strides, strict=True)),
        block_out=tuple(bsize),
        image=tuple(size),
        image_out=tuple(problem.out_size),
        channels=channels,
        channels_out=problem.channels_out,
        kernel=problem.kernel,
        strides=problem.strides,
        dilation=(1, 1),
        pads=(top, left),
        activation=case.activation,
        vectors_in=case.vectors_in,
        vectors_out=case.vectors_out,
        expected=max(1, round(expected)),
        of_images=True,
    )


def is_for_wide(case, config, conv, device):
    """Whether the kernel for many channels takes fewer cycles than ``fused_conv`` with ``config``.

    It does where there are many channels, or blocks that are smaller than a tile of that.
    """
    few = conv.channels * case.element_bytes < _FEWEST_BYTES
    if few or case.ieee or missing_kernel(conv, device) is not None:
        return False
    own = estimate_cycles(config, case, conv.expected, conv.block_out, device)
    found = plan_cost(plan_stack_conv(conv, device), conv, device)
    found *= _ROUNDED if case.element == "float" and max(conv.kernel) > 1 else 1
    return found < _SLOWER * own + _LAUNCH


def plan_wide(conv, weights, w_format, result, background, device):
    """Return the plan of a call; ``background`` as for :func:`plan_fused_conv`."""
    plan = plan_stack_conv(conv, device)
    maps = pixel_maps(conv) if plan.bulk else ()
    sizes = (
        conv.rows, conv.images, *conv.grid, conv.channels, conv.channels_out, *conv.block,
        *conv.block_out, *conv.image, *conv.image_out, *conv.kernel, *conv.strides,
        *conv.dilation, *conv.pads, *conv.pitches, 1, 1, conv.span, *conv.group_sizes,
    )  # fmt: skip
    launch = kernels.prepare(
        _STEM,
        plan.kernel,
        plan.template(conv),
        (plan.thread_blocks(conv), 1, 1),
        plan.threads,
        11,
        # Not settled, no rows cleared, no shortcut, nor its map.
        (*sizes, 0, 0, 0, 1, 1, 0, *[0] * (2 - len(maps))),
        shared=plan.launched_bytes(conv, device),
        persistent=True,
        dependent=True,
        cluster=plan.split,
        maps=maps,
    )
    pack = _prepare_pack(conv, w_format, weights, result.nbytes if background else 0)
    how = ("stack_conv2d", dtype_name(weights[0].dtype), w_format)

    def run(x, w, bin_counts, active_block_indices, scale, bias, residual, out, below=None):
        if isinstance(w, PackedWeights):
            packed = w.packed(how, pack)
        else:
            packed = pack(w, scale, bias, background=below)
        lists = bin_counts, active_block_indices, None
        launch(None, None, x, packed, residual, *lists, None, out, None)

    return PackedPlan(
        (result,),
        run,
        launch,
        operands=(None, None, 0, 8, 6, 2, 3, None, None, 7, None),
        scratch=pack.scratch(*weights),
        base=(),
        pack=pack,
        how=how,
        weights=(1, 4, 5),
        background=background,
    )


def _prepare_pack(conv, w_format, weights, image_bytes):
    """Return what packs w, scale and bias, which are specs, and can write a result's background."""
    w, *tables = weights
    dtype = dtype_of_tables(w.dtype, tables)
    sizes = *conv.kernel, conv.channels, conv.channels_out
    columns = min(-(-conv.panels * conv.chunks * 512 // 256), 2**16)
    launch = kernels.prepare(
        _STEM,
        "pack_image_conv_weights",
        (conv.element, conv.element == "float", cpp_name(dtype, "bias")),
        with_background((columns, 1), image_bytes),
        256,
        6,
        (*sizes[2:], *sizes[:2], *steps_of_weights(w_format, *sizes), image_bytes),
    )
    return Pack(launch, conv.packed_bytes, 1, 2, dtype, background=True)
