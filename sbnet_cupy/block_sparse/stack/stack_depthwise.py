"""Depthwise convolution of a stack: by a kernel of its own on a GPU, with no matrix product.

Part of stack_conv2d, whose checks are done. Kernel: cuda_src/block_sparse/stack/stack_depthwise.cu
"""

import numpy as np

from ...core.arrays import namespace, vector_bytes
from ...core.graph_memory import memory_of_graphs
from ...core.operator import Plan
from ...dense.packed_weights import PackedWeights
from .stack_launch import prepare_stack_depthwise


def is_depthwise(problem, channels):
    """Whether each of several channels is convolved into one of its own."""
    return problem.groups == channels == problem.channels_out and channels > 1


def plan_depthwise(conv, w_format, stacks, result):
    """Return the plan of a call of stack_conv2d by the kernel; None where it does not fit.

    ``stacks`` are the specs of x, residual and out, of which the residual may be None.
    """
    alignment = vector_bytes(16, *(s.alignment for s in stacks if s is not None))
    launch = prepare_stack_depthwise(conv, w_format, alignment)
    if launch is None:
        return None

    def run(x, w, bin_counts, active_block_indices, grid, scale, bias, residual, out):
        if isinstance(w, PackedWeights):
            w, scale, bias = w._given()
        with memory_of_graphs(x):
            tables = map(_as_float32, (scale, bias))
            launch(x, w, *tables, residual, bin_counts, active_block_indices, grid, out)

    return Plan((result,), run, by_kernels=True)


def _as_float32(array):
    """Return a scale or bias, if there is one, as the kernel reads it."""
    if array is None or (array.dtype == np.float32 and array.flags.c_contiguous):
        return array
    return namespace(array).ascontiguousarray(array, np.float32)
