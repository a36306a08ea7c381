"""fused_bottleneck: a pre-activation residual unit at the active blocks, from image to image."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ...core import launch as kernels
from ...core.arrays import array_function, compute_dtype, dtype_name, empty, vector_bytes
from ...core.checks import check_result, check_written
from ...core.compile import cpp_name
from ...core.copy_image import copy_image
from ...core.device import current_device
from ...core.operator import Operator, Plan
from ...core.packed import PackedPlan, dtype_of_tables
from ...dense.conv2d import Problem, check_precision
from ...dense.im2col import convolve
from ...errors import ShapeError
from ..checks import LARGEST, MOST_BLOCKS, check_indices, cut_blocks, resolve_expected
from ..conv.config import expected_blocks, tiles_of_block
from ..corners import CHUNK_BYTES
from ..gather_scatter.sparse_gather import gather_numpy
from ..gather_scatter.sparse_scatter import scatter_numpy
from ..grid import Grid, Layout, inside_image, resolve_grid
from .config import UnitCase, configure_bottleneck
from .packing import prepare_unit_pack
from .weights import (
    WEIGHTS,
    BottleneckWeights,
    PackedBottleneck,
    arrays_of_unit,
    check_weights,
    plain_of,
    resolve_precision,
    widened,
)


@array_function
def fused_bottleneck(
    x, weights, bin_counts, active_block_indices, *, bsize, precision=None, expected=None, out=None
):
    """Apply a residual unit at the active blocks of an image, on a GPU in one kernel.

    ``y = x + conv3(a3(conv2(a2(conv1(a1(x))))))`` with ``a_i(t) = relu(t * scale_i + shift_i)`` at
    every pixel of the active blocks, zeros padding ``a2(...)`` at image borders; elsewhere x, or
    what was in ``out``. Block ``(n, hi, wi)`` has the pixels from ``(bsize[0] * hi, bsize[1] *
    wi)`` on. Sums are in float32 (float64 for float64). On a GPU what goes into a product is
    rounded to the dtype of ``x``, or to tf32.

    Parameters
    ----------
    x : array, shape (N, H, W, C)
        Images; float16, bfloat16, float32 or float64. C-contiguous; a NumPy array that is not is
        copied.
    weights : BottleneckWeights or PackedBottleneck
        Kernels of the dtype of ``x``, C to C channels. BottleneckWeights are laid out anew at each
        call, a :class:`PackedBottleneck` once.
    bin_counts : int32 array, shape (1,)
        Number of active blocks, as :func:`reduce_mask` returns it.
    active_block_indices : int32 array, shape (M, 3)
        Rows ``(n, hi, wi)``. Rows at or past ``bin_counts`` and rows of no block are passed over.
    bsize : int or (int, int)
        Size of a block in pixels: ``BlockParams.bsize_out``.
    precision : None, "ieee" or "tf32"
        How float32 is multiplied. On a GPU float32 needs "tf32"; that of a PackedBottleneck holds
        without being given again.
    expected : int, optional
        About how many blocks will be active; M by default. On a GPU it chooses between a kernel
        for few and one for many. Results differ by rounding at most.
    out : array of the shape and dtype of ``x``, optional
        Only its active pixels are written, and it is returned. It must share no memory with the
        other arrays: a pixel's neighbours are read from ``x``.

    Returns
    -------
    y : array, shape (N, H, W, C)
        In the dtype, in the library and on the device of ``x``.

    Raises
    ------
    ShapeError
        If sizes do not fit together, or an array is not contiguous.
    DTypeError
        If dtypes differ or are not floating.
    NotImplementedError
        If there is no CUDA kernel for a call on CuPy arrays; the message says why.

    Source: He et al. 2016, arXiv:1603.05027; Ren et al. 2018, arXiv:1801.02108, section 3.3.
    Kernel: cuda_src/block_sparse/bottleneck/fused_bottleneck.cu

    Examples
    --------
    >>> from sbnet_cupy import BottleneckWeights
    >>> x = np.ones((1, 8, 8, 16), np.float32)
    >>> counts, indices = np.array([1], np.int32), np.array([[0, 0, 1]], np.int32)
    >>> y = fused_bottleneck(x, BottleneckWeights.random(16, 4), counts, indices, bsize=4)
    >>> bool((y[:, :4, 4:] != x[:, :4, 4:]).any()), bool((y[:, 4:] == x[:, 4:]).all())
    (True, True)
    """
    precision = resolve_precision(weights, precision)
    plain = arrays_of_unit(x, plain_of(weights))
    packed = isinstance(weights, PackedBottleneck)
    read = (weights.specs,) if packed else plain
    arrays = (x, *read, bin_counts, active_block_indices, out)
    plan = FUSED_BOTTLENECK.plan_for(arrays, (bsize, precision, expected))
    if out is None:
        out = copy_image(x)
    else:
        check_written(out, _READ, (x, bin_counts, active_block_indices, *plain))
    first = weights if packed else plain[0]
    plan.run(x, first, *plain[1:], bin_counts, active_block_indices, out)
    return out


_READ = ("x", "bin_counts", "active_block_indices", *["weights"] * len(WEIGHTS))


class Unit(NamedTuple):
    """A checked residual unit at active blocks, without its arrays."""

    weights: BottleneckWeights  # of specs
    bsize: tuple[int, int]  # no larger than the image
    rows: int  # that are expected to be active
    precision: str | None


def _resolve(specs, options):
    """Check all arguments; return the spec of the result and the Unit."""
    x, *weights, bin_counts, active_block_indices, out = specs
    bsize, precision, expected = options
    check_precision(precision)
    weights = BottleneckWeights(*weights)
    cout = check_weights(x, weights)
    if cout != x.shape[3]:
        raise ShapeError(
            f"weights.w3 must have as many output channels as x, {x.shape[3]}, got {cout}; or use "
            "sparse_res_block_bottleneck with w_project"
        )
    check_indices(bin_counts, active_block_indices, like=x)
    bsize = cut_blocks(resolve_grid(bsize, (0, 0), None).bsize, x.shape[1:3])
    rows = resolve_expected(expected, active_block_indices)
    result = x.new(x.shape)
    check_result(out, result)
    return result, Unit(weights, bsize, rows, precision)


def _infer(specs, options):
    """Check all arguments; return the spec of the result."""
    return _resolve(specs, options)[:1]


def _plan(specs, options):
    """Check all arguments; return the plan of the call."""
    return plan_fused_bottleneck(specs, *_resolve(specs, options))


def plan_fused_bottleneck(specs, result, unit, background=False):
    """Return the plan of a checked call; its ``run`` takes a PackedBottleneck, too, as ``w1``.

    ``background`` has weights packed by a kernel that can write what lies below the result.
    """
    x, *_, active_block_indices, out = specs
    if not result.size:
        return Plan((result,), _nothing_computed)
    if x.on_gpu:
        rows = active_block_indices.shape[0]
        return _fused_bottleneck_cuda(x, rows, (out or result, result, background), unit)
    return Plan((result,), functools.partial(_fused_bottleneck_numpy, stack=_plan_stack(x, unit)))


def _nothing_computed(*arrays):
    """Write a result with no elements."""


class _Stack(NamedTuple):
    """How the NumPy body reads, convolves and writes some rows of the list."""

    gather: Callable
    scatter: Callable
    problems: tuple  # of the three convolutions
    grid: Grid


def _plan_stack(x, unit):
    """Plan the copies and the convolutions of the stack, with a rim of one pixel."""
    bsize, weights = unit.bsize, unit.weights
    grid = Grid(tuple(b + 2 for b in bsize), (-1, -1), bsize)
    image = Layout(*x.shape, True, True)
    middle, channels = weights.w1.shape[3], x.shape[3]

    def problem(kernel, out_size, channels_out, activation):
        return Problem(
            kernel, (1, 1), ((0, 0), (0, 0)), out_size, channels_out, True, "HWIO", activation,
            False,
        )  # fmt: skip

    return _Stack(
        functools.partial(gather_numpy, layout=image, grid=grid, activation=None),
        functools.partial(
            scatter_numpy, layout=image, grid=Grid(bsize, (0, 0), bsize), add=False, overlap=False
        ),
        (
            problem((1, 1), grid.bsize, middle, "relu"),
            problem((3, 3), bsize, middle, "relu"),
            problem((1, 1), bsize, channels, None),
        ),
        grid,
    )


def _fused_bottleneck_numpy(x, w1, *arrays, stack):
    """Gather with a rim of one pixel, three products, scatter; some rows of the list at a time."""
    *weights, bin_counts, active_block_indices, out = arrays
    if isinstance(w1, PackedBottleneck):
        arrays = w1.plain()
    else:
        arrays = widened(BottleneckWeights(w1, *weights))
    w1, w2, w3, scale1, shift1, scale2, shift2, scale3, shift3 = arrays
    wide, grid = compute_dtype(x.dtype), stack.grid
    first, second, third = stack.problems
    count = min(max(int(bin_counts[0]), 0), len(active_block_indices))
    step = max(1, CHUNK_BYTES // (math.prod(grid.bsize) * x.shape[3] * wide.itemsize))
    for start in range(0, count, step):
        rows = active_block_indices[start : min(start + step, count)]
        active = np.array([len(rows)], np.int32), rows
        read = empty((len(rows), *grid.bsize, x.shape[3]), x.dtype, x)
        stack.gather(x, *active, read, None, None)
        image = read.astype(wide, copy=False)
        with np.errstate(all="ignore"):  # infinities come with no warning, as on a GPU
            blocks = np.maximum(image * scale1 + shift1, wide.type(0))
            blocks = _convolved(blocks, w1, scale2, shift2, first)
            blocks[~inside_image(rows, grid, x.shape[1:3])] = 0  # the padding of conv2
            blocks = _convolved(blocks, w2, scale3, shift3, second)
            blocks = _convolved(blocks, w3, None, None, third)
            blocks += image[:, 1:-1, 1:-1]
            blocks = blocks.astype(x.dtype, copy=False)
        stack.scatter(blocks, *active, None, out)


def _convolved(blocks, w, scale, bias, problem):
    """Return the convolution of a stack in the dtype to compute in."""
    out = empty((len(blocks), *problem.out_shape), blocks.dtype, blocks)
    convolve(blocks, w, out, scale, bias, problem)
    return out


def missing_kernel(x, weights, bsize, rows, precision, out=None):
    """Return for what there is no CUDA kernel; None where there is one, or none is needed."""
    if not x.size:
        return None
    name = dtype_name(x.dtype)
    if name == "float64":
        return "float64"
    if name == "float32" and precision != "tf32":
        return "IEEE float32; pass precision='tf32' if factors of 11 significant bits will do"
    if name != "float16" and not current_device().tensor_floats:
        return f"{name} on this GPU, whose tensor cores take float16 alone"
    pointers = [spec.alignment for spec in (x, out) if spec is not None]
    if vector_bytes(x.shape[3] * x.dtype.itemsize, *pointers) < 16:
        return f"{x.shape[3]} channels of {name} that are not whole, aligned 16-byte vectors"
    if max(x.shape) > LARGEST:
        return f"sizes above 2**30, such as those of x {x.shape}"
    bsize = cut_blocks(bsize, x.shape[1:3])
    config = _configuration(x, weights, bsize, rows)
    if config is None:
        return (
            f"{x.shape[3]} and {weights.w1.shape[3]} channels of {name}: their weights do not fit "
            "this GPU's shared memory"
        )
    if tiles_of_block(bsize, config.tile) > MOST_BLOCKS:
        return f"blocks as large as {bsize}"
    return None


def require_kernel(x, weights, bsize, rows, precision, out=None):
    """Raise NotImplementedError, saying why, where there is no CUDA kernel for ``x``."""
    missing = missing_kernel(x, weights, bsize, rows, precision, out)
    if missing is not None:
        raise NotImplementedError(
            f"fused_bottleneck has no CUDA kernel for {missing}; or use "
            "sparse_res_block_bottleneck with method='gather'"
        )


def _case(x, weights):
    """Describe the unit to the planner."""
    tables = {weights.scale1.dtype, weights.shift1.dtype}
    return UnitCase(
        element=cpp_name(x.dtype, "x"),
        element_bytes=x.dtype.itemsize,
        channels=x.shape[3],
        channels_mid=weights.w1.shape[3],
        tight=x.dtype.itemsize == 2 and tables == {x.dtype},
    )


def _configuration(x, weights, bsize, rows):
    """Return the instance for about so many active rows."""
    blocks = expected_blocks(rows, bsize, math.prod(x.shape[:3]))
    return configure_bottleneck(_case(x, weights), blocks, bsize, current_device())


def _fused_bottleneck_cuda(x, rows, outs, unit):
    """Prepare one launch over the rows of the list; see fused_bottleneck.cu."""
    (out, result, background), (weights, bsize, expected, precision) = outs, unit
    require_kernel(x, weights, bsize, expected, precision, out)
    case, config = _case(x, weights), _configuration(x, weights, bsize, expected)
    blocks = tuple(-(-n // b) for n, b in zip(x.shape[1:3], bsize, strict=True))
    n, h, w, c = x.shape
    launch = kernels.prepare(
        "block_sparse/bottleneck/fused_bottleneck",
        "fused_bottleneck",
        config.template(case),
        (rows * config.cluster, 1, tiles_of_block(bsize, config.tile)),
        config.threads,
        5,
        (rows, n, c, h, w, *bsize, *blocks),
        shared=config.shared_bytes(case),
        persistent=True,
        dependent=True,
        cluster=config.cluster,
    )
    w1, _, _, *tables = weights._arrays()
    dtype = dtype_of_tables(w1.dtype, tables)
    pack = prepare_unit_pack(case, config, dtype, result.nbytes if background else 0)
    how = config.pack_template(case)

    def run(x, w1, *arrays, below=None):
        *others, bin_counts, active_block_indices, out = arrays
        if isinstance(w1, PackedBottleneck):
            packed = w1.packed(how, pack)
        else:
            packed = pack(w1, *others, background=below)
        launch(x, packed, bin_counts, active_block_indices, out)

    return PackedPlan(
        (result,),
        run,
        launch,
        operands=(0, 13, 10, 11, 12),
        scratch=pack.scratch(*weights._arrays()),
        base=(0,),
        pack=pack,
        how=how,
        weights=tuple(range(1, 10)),
        background=background,
    )


FUSED_BOTTLENECK = Operator(
    "fused_bottleneck",
    arrays=("x", *WEIGHTS, "bin_counts", "active_block_indices", "out"),
    options=("bsize", "precision", "expected"),
    infer=_infer,
    plan=_plan,
)
