"""mask_conv2d: a dense convolution, multiplied by the mask: what a sparse one should give."""

from typing import Any

import numpy as np

from ...core.arrays import array_function, compute_dtype, namespace
from ...core.checks import check_array
from ...core.spec import spec_of
from ...dense.conv2d import conv2d, resolve_problem
from ...errors import ShapeError
from ..from_mask import images_of_mask


@array_function
def mask_conv2d(x, w, mask, strides=(1, 1), padding: Any = "SAME", *, precision=None):
    """Convolve densely, then multiply by the mask pooled with the kernel's window.

    What a sparse convolution should compute where its mask is set, at the full price: a check, not
    the fast path. The pooled mask is the maximum over the window, with the strides and padding of
    the convolution; pixels outside the image are skipped, and a window wholly outside gives 0.

    Parameters
    ----------
    x : array, shape (N, H, W, C)
        Images; float16, bfloat16, float32 or float64.
    w : array, shape (R, S, C, K)
        Kernel, of the dtype of ``x``.
    mask : array, shape (N, H, W), (N, H, W, 1) or (N, 1, H, W), or (H, W) for one
        bool, integer or float. The pooled value itself is the factor: 0 or 1 for a bool mask.
    strides : int or (int, int)
        Steps between output pixels.
    padding : "SAME", "VALID", int, (int, int) or ((top, bottom), (left, right))
        As for :func:`conv2d`.
    precision : None, "ieee" or "tf32"
        As for :func:`conv2d`.

    Returns
    -------
    y : array, shape (N, H', W', K)
        In the dtype, in the library and on the device of ``x``.

    Raises
    ------
    ShapeError
        If the sizes of ``mask`` and ``x`` differ.

    Source: Ren et al. 2018, arXiv:1801.02108; ``mask_conv2d`` of its reference implementation.

    Examples
    --------
    >>> import numpy as np
    >>> mask = np.eye(3, dtype=bool)[None]
    >>> y = mask_conv2d(np.ones((1, 3, 3, 2)), np.ones((1, 1, 2, 1)), mask, 1, "VALID")
    >>> y[0, :, :, 0]
    array([[2., 0., 0.],
           [0., 2., 0.],
           [0., 0., 2.]])
    """
    mask = images_of_mask(mask)
    problem = resolve_mask_conv(*map(spec_of, (x, w, mask)), strides, padding, precision)
    y = conv2d(x, w, strides=strides, padding=padding, precision=precision)
    pooled = _max_pool(mask.reshape(mask.shape[:3]).astype(compute_dtype(x.dtype)), problem)
    with np.errstate(all="ignore"):  # infinity times 0 is NaN, with no warning, as on a GPU
        y[...] = y.astype(pooled.dtype, copy=False) * pooled[..., None]
    return y


def resolve_mask_conv(x, w, mask, strides, padding, precision):
    """Check the arguments, of which the first three are specs; return the convolution."""
    problem = resolve_problem(x, w, strides, padding, None, "NHWC", "HWIO", precision)
    check_array("mask", mask, ndim=(3, 4), kinds="biuf", like=x)
    if mask.shape[:3] != x.shape[:3] or mask.shape[3:] not in ((), (1,)):
        n, h, width, _ = x.shape
        raise ShapeError(
            f"mask must have shape ({n}, {h}, {width}), ({n}, {h}, {width}, 1) or ({n}, 1, {h}, "
            f"{width}), the size of x, got {mask.shape}"
        )
    return problem


def masked_convolution(ops, x, w, mask, problem, precision):
    """Return the same for the arrays of an adapter, by its own operations.

    ``ops`` is a namespace of :mod:`..compositions` that has ``pad`` and ``maximum``, too, and
    ``mask`` has the dtype to compute in, and a channel.
    """
    (step_h, step_w), (rows, columns), pooled = problem.strides, problem.out_size, None
    if not rows or not columns:
        return ops.zeros((ops.shape(x)[0], rows, columns, problem.channels_out), x.dtype, like=x)
    x, mask = ops.pad(x, problem.pads, 0), ops.pad(mask, problem.pads, -np.inf)
    for r, s in np.ndindex(problem.kernel):
        window = mask[:, r : r + rows * step_h : step_h, s : s + columns * step_w : step_w]
        window = window[:, :rows, :columns]
        pooled = window if pooled is None else ops.maximum(pooled, window)
    y = ops.convolve(x, w, strides=problem.strides, padding="VALID", precision=precision)
    pooled = ops.where(pooled != -np.inf, pooled, 0)
    return ops.cast(ops.cast(y, mask.dtype) * pooled, x.dtype)


def _max_pool(mask, problem):
    """Pool a float mask ``[N, H, W]`` with the window, strides and padding of a convolution."""
    xp = namespace(mask)
    n, h, w = mask.shape
    (top, bottom), (left, right) = problem.pads
    padded = xp.full((n, h + top + bottom, w + left + right), -xp.inf, mask.dtype)
    padded[:, top : top + h, left : left + w] = mask
    pooled = xp.full((n, *problem.out_size), -xp.inf, mask.dtype)
    (step_h, step_w), (rows, columns) = problem.strides, problem.out_size
    for r, s in np.ndindex(problem.kernel):
        window = padded[:, r : r + rows * step_h : step_h, s : s + columns * step_w : step_w]
        xp.maximum(pooled, window[:, :rows, :columns], out=pooled)
    return xp.where(pooled == -xp.inf, mask.dtype.type(0), pooled)
