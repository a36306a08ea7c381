"""Which CUDA kernel convolves a stack, if one does, and its launch."""

import math

from ...core.arrays import address, dtype_name, vector_bytes
from ...core.compile import cpp_name
from ...core.device import current_device
from ...dense.activation import ACTIVATIONS
from .stack_conv_plan import StackConv, missing_kernel
from .stack_depthwise import depthwise_launch, is_depthwise
from .stack_launch import prepare_stack_conv, prepare_stack_pack


def prepare_launch(x, w, table, problem, residual, out, weights):
    """Return a function of (x, w, table, epilogue, out) that launches a kernel, or None.

    There is none for float64, for float32 that must be multiplied as IEEE and is not depthwise, for
    groups of several channels and for transposed convolutions. ``weights`` is a PackedWeights, of
    which what is packed is kept, or None.
    """
    name, channels = dtype_name(x.dtype), x.shape[3]
    depthwise = is_depthwise(problem, channels)
    if name == "float64" or problem.transposed or not (depthwise or problem.groups == 1):
        return None
    if not (w.flags.c_contiguous and x.size and out.size and table.grid.size):
        return None
    conv, device = describe(x, table, problem, residual, out), current_device()
    if depthwise:
        return depthwise_launch(conv, problem.w_format, (x, residual, out))
    if (name == "float32" and not problem.tf32) or missing_kernel(conv, device) is not None:
        return None
    pack, run = prepare_stack_pack(conv, problem.w_format), prepare_stack_conv(conv)
    if weights is None:
        return _packing(pack, run)
    how = ("stack_conv2d", name, problem.w_format)
    return _packed(weights.packed(how, pack), run)


def describe(x, table, problem, residual, out):
    """Return the convolution as its planner sees it."""
    window, itemsize = problem.window, x.dtype.itemsize

    def whole_vectors(channels, *arrays):
        multiples = (channels * itemsize, *(address(a) for a in arrays if a is not None))
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
    )


def _packing(pack, run):
    def launch(x, w, table, epilogue, out):
        packed = pack(w, epilogue.scale, epilogue.bias)
        run(x, packed, epilogue.residual, *table._arrays(), out)

    return launch


def _packed(packed, run):
    def launch(x, w, table, epilogue, out):
        run(x, packed, epilogue.residual, *table._arrays(), out)

    return launch


def as_forward(problem, w):
    """Return a transposed convolution of stride 1 as a convolution, and its kernel; or None.

    The taps come in the opposite order, and what was padding before is what the extent leaves.
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
    kernel = problem.fine_to_coarse(w)[::-1, ::-1].transpose(0, 1, 3, 2)
    forward = problem._replace(
        window=window._replace(pads=pads, **stages), transposed=False, w_format="HWIO"
    )
    return forward, kernel
