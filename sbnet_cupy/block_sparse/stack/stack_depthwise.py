"""Depthwise convolution of a stack: by a kernel of its own on a GPU, with no matrix product.

Part of stack_conv2d, whose checks are done. Kernel: cuda_src/block_sparse/stack/stack_depthwise.cu
"""

import numpy as np

from ...core.arrays import address, vector_bytes
from .stack_launch import prepare_stack_depthwise


def is_depthwise(problem, channels):
    """Whether each of several channels is convolved into one of its own."""
    return problem.groups == channels == problem.channels_out and channels > 1


def depthwise_launch(conv, w_format, stacks):
    """Return a function of (x, w, table, epilogue, out) that launches the kernel, or None.

    ``stacks`` are x, residual and out, of which the residual may be None.
    """
    alignment = vector_bytes(16, *(address(a) for a in stacks if a is not None))
    run = prepare_stack_depthwise(conv, w_format, alignment)
    if run is None:
        return None

    def launch(x, w, table, epilogue, out):
        tables = map(_as_float32, (epilogue.scale, epilogue.bias))
        run(x, w, *tables, epilogue.residual, *table._arrays(), out)

    return launch


def _as_float32(array):
    return array if array is None or array.dtype == np.float32 else array.astype(np.float32)
