"""stack_conv2d: the convolution of a block stack, without padding, as layers need it.

On a GPU a stack is convolved by :func:`fused_conv`, each block an image with one block: it takes
the calling thread a tenth of the time of a library's graph, and leaves rows past the count alone.
"""

import numpy as np

from ...core.arrays import empty, namespace
from ...core.graph_memory import is_capturing
from ...core.operator import Operator, Plan
from ...dense.conv2d import plan_conv2d, resolve_problem
from ..checks import cut_blocks
from .fused_conv import Convolution, missing_kernel, plan_fused_conv

_NUMBERS = {}  # device -> rows (b, 0, 0), the most that were needed
_OUTGROWN = []  # other streams may still read them


def stack_conv2d(
    blocks, w, bin_counts, *, strides=(1, 1), precision=None, scale=None, bias=None, activation=None
):
    """Convolve the blocks below the count: :func:`conv2d` with ``padding="VALID"``.

    What other rows hold is not defined.
    """
    arrays = (blocks, w, bin_counts, scale, bias)
    plan = STACK_CONV.plan_for(arrays, (strides, activation, precision))
    out = empty(plan.shape, blocks.dtype, blocks)
    plan.run(*arrays, out)
    return out


def _infer(specs, options):
    """Return the spec of the result."""
    blocks, w, *_ = specs
    return (blocks.new((blocks.shape[0], *_problem(blocks, w, *options).out_shape)),)


def _problem(blocks, w, strides, activation, precision):
    return resolve_problem(blocks, w, strides, "VALID", activation, "NHWC", "HWIO", precision)


def _plan(specs, options):
    """Return the plan of the call."""
    blocks, w, bin_counts, scale, bias = specs
    problem, rows = _problem(blocks, w, *options), blocks.shape[0]
    (result,) = _infer(specs, options)
    kernel_for = (blocks, problem, problem.out_size, rows)
    if not blocks.on_gpu or missing_kernel(*kernel_for) is not None:
        dense = plan_conv2d(result, problem)

        def run(blocks, w, bin_counts, scale, bias, out):
            dense.run(blocks, w, scale, bias, out)

        return Plan((result,), run)
    table = blocks.new((rows, 3), np.int32)
    convolution = Convolution(problem, cut_blocks(problem.out_size, problem.out_size), rows)
    given = (blocks, w, bin_counts, table, scale, bias, None, result)
    fused = plan_fused_conv(given, result, convolution)

    def run_fused(blocks, w, bin_counts, scale, bias, out):
        fused.run(blocks, w, bin_counts, _numbers(blocks), scale, bias, None, out)

    return Plan((result,), run_fused)


STACK_CONV = Operator(
    "stack_conv",
    arrays=("blocks", "w", "bin_counts", "scale", "bias"),
    options=("strides", "activation", "precision"),
    infer=_infer,
    plan=_plan,
    results=(),
)


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
