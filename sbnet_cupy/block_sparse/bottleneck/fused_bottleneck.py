"""fused_bottleneck: a pre-activation residual unit at the active blocks, from image to image."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...core import launch as kernels
from ...core.arrays import address, array_function, compute_dtype, dtype_name, is_cupy, vector_bytes
from ...core.checks import apart, apart_from, check_apart, check_out
from ...core.compile import cpp_name
from ...core.copy_image import copy_image
from ...core.device import current_device
from ...core.packed import Pack
from ...core.plans import Plans
from ...dense.conv2d import conv2d
from ...errors import ShapeError
from ..checks import LARGEST, MOST_BLOCKS, check_indices, cut_blocks, resolve_expected
from ..conv.plan import expected_blocks, tiles_of_block
from ..corners import CHUNK_BYTES
from ..gather_scatter.sparse_gather import sparse_gather
from ..gather_scatter.sparse_scatter import sparse_scatter
from ..gather_scatter.zero_outside import zero_outside
from ..grid import Grid, resolve_grid
from .plan import UnitCase, plan_bottleneck
from .weights import PackedBottleneck, check_weights, plain_of, resolve_precision, widened


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
    packed = isinstance(weights, PackedBottleneck)
    plain = plain_of(weights)
    plans, key = _PLANS, None
    if is_cupy(x):
        plans = weights.launches if packed else _PLANS
        own = () if packed else _arrays_of(plain)  # what is packed has its own plans
        others = (x, bin_counts, active_block_indices)
        key = plans.key((*others, out, *own), (bsize, precision, expected))
    launch = plans.get(key)
    at_once = launch is not None and packed and out is not None
    if at_once and apart(out, others) and apart_from(out, weights.extents):
        launch(x, plain, bin_counts, active_block_indices, out)
        return out
    if launch is None:
        bsize, expected = _check(x, plain, bin_counts, active_block_indices, bsize, expected)
        precision = resolve_precision(weights, precision)
    inputs = (("x", x), ("bin_counts", bin_counts), ("active_block_indices", active_block_indices))
    inputs += tuple(("weights", array) for array in _arrays_of(plain))
    if out is None:
        out = copy_image(x)
    elif launch is None:
        check_out(out, x.shape, x.dtype, x, inputs)
    else:
        check_apart(out, inputs)
    if launch is None and is_cupy(x) and out.size:
        launch = _fused_bottleneck_cuda(
            x, active_block_indices, out, weights, bsize, precision, expected, packed
        )
        plans.keep(key, launch)
    if launch is not None:
        launch(x, plain, bin_counts, active_block_indices, out)
    elif out.size:
        arrays = weights.plain() if packed else widened(plain)
        _fused_bottleneck_numpy(x, arrays, bin_counts, active_block_indices, bsize, out)
    return out


_PLANS = Plans()


def launch_of_bottleneck(x, bin_counts, active_block_indices, out, *weights, options):
    """Return the launch that a call with plain weights left, or None.

    Its ``pack`` takes the weights; ``run`` takes x, what that packed, bin_counts,
    active_block_indices and out.
    """
    arrays = (x, bin_counts, active_block_indices, out, *weights)
    return _PLANS.get(_PLANS.key(arrays, options))


def _arrays_of(weights):
    """Return the arrays of a BottleneckWeights; what is no such thing is refused by the checks."""
    return weights._arrays() if hasattr(weights, "_arrays") else ()


def _check(x, weights, bin_counts, active_block_indices, bsize, expected):
    """Check the arguments but out; return bsize, no larger than the image, and expected."""
    cout = check_weights(x, weights)
    if cout != x.shape[3]:
        raise ShapeError(
            f"weights.w3 must have as many output channels as x, {x.shape[3]}, got {cout}; or use "
            "sparse_res_block_bottleneck with w_project"
        )
    check_indices(bin_counts, active_block_indices, like=x)
    bsize = cut_blocks(resolve_grid(bsize, (0, 0), None).bsize, x.shape[1:3])
    return bsize, resolve_expected(expected, active_block_indices)


def _fused_bottleneck_numpy(x, arrays, bin_counts, active_block_indices, bsize, out):
    """Gather with a rim of one pixel, three products, scatter; some rows of the list at a time."""
    wide = compute_dtype(x.dtype)
    w1, w2, w3, scale1, shift1, scale2, shift2, scale3, shift3 = arrays
    grid = Grid(tuple(b + 2 for b in bsize), (-1, -1), bsize)
    relu = {"padding": "VALID", "activation": "relu"}
    count = min(max(int(bin_counts[0]), 0), len(active_block_indices))
    step = max(1, CHUNK_BYTES // (math.prod(grid.bsize) * x.shape[3] * wide.itemsize))
    for start in range(0, count, step):
        rows = active_block_indices[start : min(start + step, count)]
        active = np.array([len(rows)], np.int32), rows
        image = sparse_gather(x, *active, **grid._asdict()).astype(wide, copy=False)
        with np.errstate(all="ignore"):  # infinities come with no warning, as on a GPU
            blocks = np.maximum(image * scale1 + shift1, wide.type(0))
        blocks = conv2d(blocks, w1, scale=scale2, bias=shift2, **relu)
        zero_outside(blocks, *active, grid, x.shape[1:3])  # the padding of conv2
        blocks = conv2d(blocks, w2, scale=scale3, bias=shift3, **relu)
        blocks = conv2d(blocks, w3, padding="VALID")
        with np.errstate(all="ignore"):
            blocks += image[:, 1:-1, 1:-1]
            blocks = blocks.astype(x.dtype, copy=False)
        sparse_scatter(blocks, *active, out, bsize=bsize, out=out)


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
    pointers = [address(array) for array in (x, out) if array is not None]
    if vector_bytes(x.shape[3] * x.dtype.itemsize, *pointers) < 16:
        return f"{x.shape[3]} channels of {name} that are not whole, aligned 16-byte vectors"
    if max(x.shape) > LARGEST:
        return f"sizes above 2**30, such as those of x {x.shape}"
    bsize = cut_blocks(bsize, x.shape[1:3])
    plan = _plan(x, weights, bsize, rows)
    if plan is None:
        return (
            f"{x.shape[3]} and {weights.w1.shape[3]} channels of {name}: their weights do not fit "
            "this GPU's shared memory"
        )
    if tiles_of_block(bsize, plan.tile) > MOST_BLOCKS:
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


def packed_bytes(x, weights, bsize, rows, precision):
    """Return how many bytes the packed weights of a call take; 0 where there is no CUDA kernel."""
    if not x.size or missing_kernel(x, weights, bsize, rows, precision) is not None:
        return 0
    plan = _plan(x, weights, cut_blocks(bsize, x.shape[1:3]), rows)
    return plan.cluster * plan.packed_bytes(_case(x, weights))


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


def _plan(x, weights, bsize, rows):
    """Return the plan for about so many active rows."""
    blocks = expected_blocks(rows, bsize, math.prod(x.shape[:3]))
    return plan_bottleneck(_case(x, weights), blocks, bsize, current_device())


class _Launch(NamedTuple):
    """A checked call: where the weights are packed, and the kernel."""

    how: tuple  # weights are packed
    packed: Any  # array of bytes; None where weights are packed at each call
    pack: Callable
    run: Callable

    def __call__(self, x, weights, bin_counts, active_block_indices, out):
        packed = self.pack(*weights._arrays()) if self.packed is None else self.packed
        self.run(x, packed, bin_counts, active_block_indices, out)


def _fused_bottleneck_cuda(
    x, active_block_indices, out, weights, bsize, precision, expected, keep
):
    """Prepare one launch over the rows of the list.

    See cuda_src/block_sparse/bottleneck/fused_bottleneck.cu.
    """
    plain = plain_of(weights)
    require_kernel(x, plain, bsize, expected, precision, out)
    case, plan = _case(x, plain), _plan(x, plain, bsize, expected)
    rows = len(active_block_indices)
    blocks = tuple(-(-n // b) for n, b in zip(x.shape[1:3], bsize, strict=True))
    n, h, w, c = x.shape
    run = kernels.prepare(
        "block_sparse/bottleneck/fused_bottleneck",
        "fused_bottleneck",
        plan.template(case),
        (rows * plan.cluster, 1, tiles_of_block(bsize, plan.tile)),
        plan.threads,
        5,
        (rows, n, c, h, w, *bsize, *blocks),
        shared=plan.shared_bytes(case),
        persistent=True,
        dependent=True,
        cluster=plan.cluster,
    )
    pack = _prepare_pack(case, plan)
    how = plan.pack_template(case)
    packed = weights.packed(how, pack) if keep else None
    return _Launch(how, packed, pack, run)


def _prepare_pack(case, plan):
    """Return what packs the arrays of a BottleneckWeights."""
    each = plan.packed_bytes(case)
    launch = kernels.prepare(
        "block_sparse/bottleneck/fused_bottleneck",
        "pack_bottleneck",
        plan.pack_template(case),
        (-(-each // 4096), plan.cluster),
        256,
        10,
        (case.channels, case.channels_mid),
    )
    return Pack(launch, each * plan.cluster, 3, 6)
