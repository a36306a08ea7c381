"""Which CUDA kernel convolves a stack, if one does, and its launch."""

import math

from ...core.arrays import dtype_name, vector_bytes
from ...core.compile import cpp_name
from ...core.device import current_device
from ...core.packed import PackedPlan
from ...dense.activation import ACTIVATIONS
from ...dense.packed_weights import PackedWeights
from .stack_conv_plan import StackConv, missing_kernel
from .stack_depthwise import is_depthwise, plan_depthwise
from .stack_launch import prepare_stack_conv, prepare_stack_pack


def plan_kernel(x, w, table, problem, residual, out, result):
    """Return the plan of a call of stack_conv2d by its kernels; None where there is none.

    There is none for float64, for float32 that must be multiplied as IEEE and is not depthwise, and
    for transposed convolutions. All arrays are specs.
    """
    name, channels = dtype_name(x.dtype), x.shape[3]
    depthwise = is_depthwise(problem, channels)
    if name == "float64" or problem.transposed:
        return None
    if not (w.contiguous and x.size and out.size and table.grid.size):
        return None
    conv, device = describe(x, table, problem, residual, out), current_device()
    if depthwise:
        return plan_depthwise(conv, problem.w_format, (x, residual, out), result)
    if (name == "float32" and not problem.tf32) or missing_kernel(conv, device) is not None:
        return None
    pack, launch = prepare_stack_pack(conv, problem.w_format), prepare_stack_conv(conv)
    how = ("stack_conv2d", name, problem.w_format, *(conv.group or ()))

    def run(x, w, bin_counts, active_block_indices, grid, scale, bias, residual, out):
        packed = w.packed(how, pack) if isinstance(w, PackedWeights) else pack(w, scale, bias)
        launch(x, packed, residual, bin_counts, active_block_indices, grid, out)

    return PackedPlan((result,), run, pack=pack, how=how, weights=(1, 5, 6), by_kernels=True)


def describe(x, table, problem, residual, out):
    """Return the convolution of these specs as its planner sees it."""
    window, itemsize, groups = problem.window, x.dtype.itemsize, problem.groups
    grouped = groups > 1 and not is_depthwise(problem, x.shape[3])

    def whole_vectors(channels, *specs):
        multiples = (channels * itemsize, *(s.alignment for s in specs if s is not None))
        return vector_bytes(*multiples) == 16

    return StackConv(
        element=cpp_name(x.dtype, "x"),
        rows=table.capacity,
        images=table.batch,
        grid=tuple(map(int, table.grid.shape[1:])),
        block=window.fine.block_size,
        block_out=window.coarse.block_size,
        image=window.fine.image_size,
        image_out=window.coarse.image_size,
        channels=x.shape[3],
        channels_out=problem.channels_out,
        kernel=window.kernel,
        strides=window.strides,
        dilation=window.dilation,
        pads=window.before,
        activation=ACTIVATIONS.index(problem.activation),
        vectors_in=whole_vectors(x.shape[3], x),
        vectors_out=whole_vectors(problem.channels_out, out, residual),
        expected=table.capacity,
        group=(x.shape[3] // groups, problem.channels_out // groups) if grouped else None,
    )


def as_forward(problem):
    """Return a transposed convolution of stride 1 as a convolution of :func:`forward_kernel`.

    The taps come in the opposite order, and what was padding before is what the extent leaves. None
    where it is no such convolution.
    """
    window = problem.window
    extents = [(k - 1) * d for k, d in zip(window.kernel, window.dilation, strict=True)]
    before = [e - b for e, b in zip(extents, window.before, strict=True)]
    if not problem.transposed or math.prod(window.strides) > 1 or min(before) < 0:
        return None
    if problem.groups > 1:
        return None
    pads = tuple((b, 0) for b in before)  # what comes after follows from the sizes
    stages = {"fine": window.coarse, "coarse": window.fine}
    return problem._replace(
        window=window._replace(pads=pads, **stages), transposed=False, w_format="HWIO"
    )


def forward_kernel(problem, w):
    """View the kernel of a transposed convolution as that of :func:`as_forward`."""
    return problem.fine_to_coarse(w)[::-1, ::-1].transpose(0, 1, 3, 2)
