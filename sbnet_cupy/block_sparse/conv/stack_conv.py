"""stack_conv2d: the convolution of a block stack, without padding, as layers need it.

On a GPU a stack is convolved by :func:`fused_conv`, each block an image with one block: it takes
the calling thread a tenth of the time of a library's graph, and leaves rows past the count alone.
"""

import numpy as np

from ...core.arrays import empty, is_cupy, namespace
from ...core.graph_memory import is_capturing
from ...core.plans import Plans
from ...dense.conv2d import conv2d, resolve_problem
from .fused_conv import fused_conv, missing_kernel

_NUMBERS = {}  # device -> rows (b, 0, 0), the most that were needed
_OUTGROWN = []  # other streams may still read them


def stack_conv2d(blocks, w, bin_counts, *, strides=(1, 1), precision=None, **epilogue):
    """Convolve the blocks below the count: :func:`conv2d` with ``padding="VALID"``.

    ``epilogue`` is its scale, bias and activation. What other rows hold is not defined.
    """
    if is_cupy(blocks):
        key = _PLANS.key((blocks, w), (strides, precision))
        shape = _PLANS.get(key) or _PLANS.keep(key, _shape(blocks, w, strides, precision))
        if shape != _NO_KERNEL:
            return fused_conv(
                blocks, w, bin_counts, _numbers(blocks), bsize=shape[1:3], strides=strides,
                padding="VALID", precision=precision, **epilogue,
                out=empty(shape, blocks.dtype, blocks),
            )  # fmt: skip
    return conv2d(blocks, w, strides=strides, padding="VALID", precision=precision, **epilogue)


_PLANS = Plans()
_NO_KERNEL = "none"


def _shape(blocks, w, strides, precision):
    """Return the shape of the result, or that there is no kernel for it."""
    problem = resolve_problem(blocks, w, strides, "VALID", None, "NHWC", "HWIO", precision)
    if missing_kernel(blocks, problem, problem.out_size, len(blocks)) is not None:
        return _NO_KERNEL
    return (len(blocks), *problem.out_shape)


def _numbers(blocks):
    """Return the list of all blocks of a stack, each an image of its own: int32 ``[M, 3]``."""
    xp, rows = namespace(blocks), len(blocks)
    if is_capturing(blocks):
        return _made(xp, rows)
    device = xp.cuda.runtime.getDevice()
    held = _NUMBERS.get(device)
    if held is None or len(held) < rows:
        if held is not None:
            _OUTGROWN.append(held)
        with xp.cuda.using_allocator():  # it outlives the call: CuPy's own, whoever calls
            held = _made(xp, 1 << max(rows - 1, 255).bit_length())
        xp.cuda.get_current_stream().synchronize()  # once, so that other streams may use it too
        _NUMBERS[device] = held
    return held[:rows]


def _made(xp, rows):
    numbers = xp.zeros((rows, 3), np.int32)
    numbers[:, 0] = xp.arange(rows, dtype=np.int32)
    return numbers
