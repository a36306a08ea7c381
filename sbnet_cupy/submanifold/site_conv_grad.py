"""site_conv_grad: from the gradient of a convolution at sites to those of its arguments.

Kernels: cuda_src/submanifold/site_conv_grad.cu, on CuPy arrays, and those of :func:`site_conv` and
of the gradient of scale, bias and activation.
"""

from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import array_function, compute_dtype, is_cupy, namespace
from ..core.checks import check_array, check_contiguous, check_result
from ..core.graph_branch import branch
from ..core.graph_memory import memory_of_graphs
from ..core.half_floats import widen
from ..core.operator import Operator, Plan
from ..core.sizes import is_integer
from ..dense.activation import activation_grad, apply_affine
from ..dense.affine_grad import affine_grad
from ..dense.conv2d import check_precision
from ..dense.conv2d_grad import check_wanted
from ..dense.im2col import multiply
from ..errors import ShapeError
from .feature_rows import check_dtype, check_rows, reads
from .kernel_map import KernelMap
from .site_conv import (
    channels,
    convolve,
    resolve_arguments,
    row_elements,
    rows_at_once,
    sums,
    take,
    valid_rows,
)
from .site_conv_grad_launch import plan_kernels
from .site_features_grad import features_grad
from .site_kernels import by_kernels


class SiteConvGradients(NamedTuple):
    """Gradients of the arguments of :func:`site_conv`; None for what was None or not wanted."""

    features: Any = None
    w: Any = None
    scale: Any = None
    bias: Any = None
    residual: Any = None


GRADIENTS = SiteConvGradients._fields


@array_function
def site_conv_grad(
    grad_y, features, w, kernel_map, *, groups=1, bias=None, scale=None, residual=None,
    activation=None, precision=None, wanted=GRADIENTS, y=None,
):  # fmt: skip
    """Compute the gradients of site_conv from the gradient of its result.

    They are those of all convolutions at sites, each with its own map: :func:`submanifold_conv`,
    :func:`strided_conv`, :func:`inverse_conv` and :func:`transposed_conv`. The gradient of the
    features is the convolution over the transposed map; that of ``w`` the product of the rows that
    a tap reads with those of the gradient. Sums are in float32 (float64 for float64), in a fixed
    order, and rounded once. With ``scale`` or ``activation`` the sums are computed again, unless
    ``y`` tells what they are needed for. On a GPU the value before the activation is rounded to the
    dtype of the features first, unless there is a ``scale`` and no ``residual``: so where it is
    almost 0, the gradient may differ from NumPy's.

    Parameters
    ----------
    grad_y : array, shape (M, K)
        Gradient of the result, in its dtype. Rows that are no site are not read.
    features, w, kernel_map, groups, bias, scale, residual, activation, precision
        As they were given to :func:`site_conv`.
    wanted : tuple of "features", "w", "scale", "bias" and "residual"
        The gradients to compute; the others are None.
    y : array, shape (M, K), optional
        The result of :func:`site_conv` with these arguments. With ``activation="relu"`` it tells
        where the gradient passes, so that sums are computed again for that of ``scale`` alone.

    Returns
    -------
    gradients : SiteConvGradients(features, w, scale, bias, residual)
        Fresh arrays of the shapes and dtypes of the arguments; rows that are no site are 0.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        As :func:`site_conv` does; or if ``wanted`` names another gradient.

    Source: Graham et al. 2018, arXiv:1711.10275.

    Examples
    --------
    >>> import numpy as np
    >>> sites, _ = coordinate_map(np.array([[0, 1], [0, 2], [0, 5]]), spatial_shape=8)
    >>> window = kernel_map(sites, 3, onto=sites)
    >>> ones, w = np.ones((3, 1)), np.array([1.0, 10, 100]).reshape(3, 1, 1)
    >>> gradients = site_conv_grad(ones, ones, w, window)
    >>> gradients.features.ravel(), gradients.w.ravel()
    (array([ 11., 110.,  10.]), array([1., 3., 1.]))
    """
    problem, _ = resolve_arguments(
        features, w, kernel_map, groups, scale, bias, residual, activation, precision
    )
    check_wanted(wanted, GRADIENTS)
    shape = (kernel_map.target.capacity, problem.channels_out)
    check_array("grad_y", grad_y, shape=shape, like=features)
    check_contiguous("grad_y", grad_y)
    check_dtype("grad_y", grad_y, features)
    if y is not None:
        check_array("y", y, shape=shape, like=features)
        check_contiguous("y", y)
        check_dtype("y", y, features)
    y = y if activation == "relu" else None
    given = {"features": features, "w": w, "scale": scale, "bias": bias, "residual": residual}
    wanted = {name for name in wanted if given[name] is not None}
    with memory_of_graphs(features), np.errstate(all="ignore"):
        return _gradients(grad_y, given, kernel_map, problem, wanted, y)


def _gradients(grad_y, given, made: KernelMap, problem, wanted, y):
    """Return the gradients of checked arguments."""
    features, w = given["features"], given["w"]
    taps = w.reshape(problem.taps, *w.shape[-2:])
    precision = "tf32" if problem.tf32 else "ieee"
    through = _through_kernels if by_kernels(features) else _through_epilogue
    grad, found = through(grad_y, given, taps, made, problem, wanted, y)
    with branch(features) as beside:
        if "w" in wanted:
            with beside:
                arrays = (features, grad, made.rows, None)
                dw = SITE_WEIGHT_GRAD(arrays, (problem.groups, precision))
            found["w"] = dw.reshape(w.shape)
        if "features" in wanted:
            found["features"] = features_grad(grad, taps, made, problem.groups, precision)
    return SiteConvGradients(**found)


def _through_epilogue(grad_y, given, taps, made, problem, wanted, y):
    """Return the gradient of the sums of products, and by name those of what follows these."""
    features, _, scale, bias, residual = given.values()
    xp, wide = namespace(features), compute_dtype(features.dtype)
    valid = valid_rows(made.target)[:, None]
    grad = xp.where(valid, grad_y.astype(wide, copy=False), wide.type(0))
    total = None
    if (problem.activation is not None and y is None) or "scale" in wanted:
        total = sums(features, taps, made.rows, problem.groups, problem.tf32)
    if problem.activation is not None:
        before = y if y is not None else apply_affine(total.copy(), scale, bias, None)
        if residual is not None and y is None:
            before += residual
        grad = xp.where(valid, activation_grad(grad, before, problem.activation), wide.type(0))
    found = {}
    if "residual" in wanted:
        found["residual"] = grad.astype(residual.dtype)
    if "bias" in wanted:
        found["bias"] = grad.sum(axis=0).astype(bias.dtype)
    if "scale" in wanted:
        found["scale"] = (grad * xp.where(valid, total, wide.type(0))).sum(axis=0)
        found["scale"] = found["scale"].astype(scale.dtype)
    if scale is not None:
        grad = grad * scale.astype(wide, copy=False)
    # In the dtype of the result, which it is the gradient of.
    return grad.astype(features.dtype, copy=False), found


def _through_kernels(grad, given, taps, made, problem, wanted, y):
    """Return the same; without an epilogue the gradient is that of the result, as it is."""
    features, _, scale, bias, residual = given.values()
    valid, activation, found = valid_rows(made.target), problem.activation, {}

    def again(x, w, precision, *epilogue):
        options = ((problem.taps,), len(x), problem.groups, None, precision)
        return convolve(made, (x, made.rows, valid, w, *epilogue, None), options)

    def sums_again():
        """Return the sums, not rounded: products of 16-bit numbers are exact in tf32."""
        wide = compute_dtype(features.dtype)
        precision = "tf32" if problem.tf32 or features.dtype != wide else "ieee"
        x, w = (array.astype(wide, copy=False) for array in (features, taps))
        return again(x, w, precision, None, None, None)

    def back(grad, x, scale, shift, activation):
        grad, x = (a if a is None else a[None, None] for a in (grad, x))
        step = affine_grad(grad, x, scale, shift, activation, True, valid[None, None, :, None])
        return step._replace(x=step.x[0, 0])

    if activation is not None and (scale is None or residual is not None or y is not None):
        zeros = namespace(features).zeros_like(bias) if "bias" in wanted else None
        precision = "tf32" if problem.tf32 else "ieee"
        before = again(features, taps, precision, scale, bias, residual) if y is None else y
        step = back(grad, before, None, zeros, activation)
        found |= {"bias": step.shift, "residual": step.x}
        grad, activation = step.x, None
    elif "residual" in wanted:
        found["residual"] = back(grad, None, None, None, None).x
    left = wanted - found.keys()
    if scale is not None or "bias" in left:
        needs_sums = "scale" in wanted or activation is not None
        total = sums_again() if needs_sums else None
        grad = grad if total is None else grad.astype(total.dtype, copy=False)
        step = back(grad, total, scale, None if "bias" in found else bias, activation)
        grad = step.x.astype(features.dtype, copy=False)
        found = {"scale": step.scale, "bias": step.shift} | found
    return grad, {name: value for name, value in found.items() if name in wanted}


def _weight_gradient(features, grad, rows, groups, tf32, dw):
    """Write the gradient of ``w [taps, C / groups, K]``."""
    if not is_cupy(features):
        dw[...] = _weight_gradient_by_parts(widen(features), widen(grad), rows, groups)
        return
    dw.fill(0)
    xp, wide = namespace(features), compute_dtype(features.dtype)
    c, k = dw.shape[1], dw.shape[2] // groups
    for tap in range(len(rows) if len(features) else 0):
        taken, here = take(features, rows[tap])
        kept = xp.where(here, taken, xp.zeros((), taken.dtype))  # what is not there may be NaN
        taken = kept.astype(taken.dtype, copy=False)  # CuPy makes float32 of bfloat16
        for g in range(groups):
            into = xp.empty((c, k), wide)
            multiply(channels(taken, g, c).T, channels(grad, g, k), into, tf32)
            dw[tap, :, g * k : (g + 1) * k] = into


def _weight_gradient_by_parts(features, grad, rows, groups):
    """Return this gradient on NumPy, of float32 or float64: some rows at a time."""
    taps, c, k = len(rows), features.shape[1] // groups, grad.shape[1] // groups
    by_group = np.zeros((taps, groups, c, k), features.dtype)
    if not features.size or not grad.size:
        return by_group.reshape(taps, c, groups * k)
    step = rows_at_once(features.shape[1] + grad.shape[1], features.itemsize)
    taken = np.empty((step, features.shape[1]), features.dtype)
    mine = np.empty((step, grad.shape[1]), grad.dtype)
    arrays = (features, grad, taken, mine)
    source, results, into, shares = map(row_elements, arrays)
    for start in range(0, len(grad), step):
        for tap, read in enumerate(rows[:, start : start + step]):
            here = np.flatnonzero(reads(read, len(features)))
            n = len(here)
            if not n:
                continue
            source.take(read[here], out=into[:n], mode="clip")
            results.take(here + start, out=shares[:n], mode="clip")
            parts = [a[:n].reshape(n, groups, -1).transpose(1, 0, 2) for a in (taken, mine)]
            by_group[tap] += np.matmul(parts[0].transpose(0, 2, 1), parts[1])
    return by_group.transpose(0, 2, 1, 3).reshape(taps, c, groups * k)


def _infer(specs, options):
    features, grad_y, rows, out = specs
    groups, precision = options
    check_precision(precision)
    check_rows(features, rows)
    check_array("grad_y", grad_y, shape=(rows.shape[1], None), like=features)
    check_contiguous("grad_y", grad_y)
    check_dtype("grad_y", grad_y, features)
    c, k = features.shape[1], grad_y.shape[1]
    if not is_integer(groups) or groups < 1 or c % groups or k % groups:
        raise ShapeError(
            f"groups must be a positive integer that divides {c} and {k} channels, got {groups!r}"
        )
    result = features.new((rows.shape[0], c // groups, k))
    check_result(out, result)
    return (result,)


def _plan(specs, options):
    results, (groups, precision) = _infer(specs, options), options
    features, grad_y, rows, out = specs
    if by_kernels(features):
        tf32 = precision == "tf32"
        plan = plan_kernels(features, grad_y, rows, out or results[0], groups, tf32)
        if plan is not None:
            return plan

    def run(features, grad_y, rows, out):
        with memory_of_graphs(features), np.errstate(all="ignore"):
            _weight_gradient(features, grad_y, rows, groups, precision == "tf32", out)

    return Plan(results, run)


SITE_WEIGHT_GRAD = Operator(
    "site_weight_grad",
    arrays=("features", "grad_y", "rows", "out"),
    options=("groups", "precision"),
    infer=_infer,
    plan=_plan,
    linear=("grad_y",),
    lengths={"features": 0, "grad_y": 0, "rows": 1},
)
