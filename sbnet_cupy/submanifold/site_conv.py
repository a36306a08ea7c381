"""site_conv: convolution over a KernelMap, which all convolutions at sites come down to.

Kernel: cuda_src/submanifold/site_conv.cu, on CuPy arrays.
"""

from typing import NamedTuple

import numpy as np

from ..core.arrays import (
    array_function,
    compute_dtype,
    empty,
    is_cupy,
    namespace,
)
from ..core.checks import (
    check_array,
    check_contiguous,
    check_float,
    check_result,
    check_written,
    hint_of_order,
)
from ..core.graph_memory import memory_of_graphs
from ..core.half_floats import widen
from ..core.operator import Operator, Plan
from ..core.sizes import is_integer
from ..core.spec import group_of, spec_of
from ..dense.activation import apply_activation, apply_affine, check_activation
from ..dense.conv2d import check_per_channel, check_precision
from ..dense.im2col import multiply
from ..dense.packed_weights import PackedWeights, arrays_of_weights
from ..errors import ShapeError
from .coordinate_map import CoordinateMap
from .feature_rows import check_dtype, reads
from .kernel_map import check_kernel_map
from .site_conv_launch import OrderedPlan, plan_kernel
from .site_kernels import by_kernels

_CACHED_BYTES = 1 << 19


@array_function
def site_conv(
    features, w, kernel_map, *, groups=1, bias=None, scale=None, residual=None, activation=None,
    precision=None, out=None,
):  # fmt: skip
    """Convolve rows of features over a KernelMap: what all convolutions at sites come down to.

    ``y[m] = activation(scale * sum features[rows[t, m]] @ w[t] + bias + residual[m])``, the sum
    over the taps ``t`` at which row ``m`` reads a row.

    Parameters
    ----------
    features : array, shape (N, C)
        Rows on ``kernel_map.source``. Rows that no row of the map reads may hold anything.
    w : array, shape (*kernel_size, C / groups, K), or PackedWeights
        ``kernel_size`` is that of the map; (taps, C / groups, K) always does. On a GPU an array is
        packed at each call, a :class:`PackedWeights` once; that has its own scale and bias.
    kernel_map : KernelMap
        Of :func:`kernel_map`.
    groups, bias, scale, residual, activation, precision, out
        As for :func:`submanifold_conv`, the residual an array of shape (M, K).

    Returns
    -------
    y : array, shape (M, K)
        Rows on ``kernel_map.target``; 0 where that has no site.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        As :func:`submanifold_conv` does.

    Source: Graham et al. 2018, arXiv:1711.10275.

    Examples
    --------
    >>> import numpy as np
    >>> sites, _ = coordinate_map(np.array([[0, 1, 1], [0, 1, 2]]), spatial_shape=(4, 4))
    >>> cross = kernel_map(sites, offsets=[[0, 0], [0, 1], [0, -1], [1, 0], [-1, 0]])
    >>> site_conv(np.array([[1.0], [5.0]]), np.ones((5, 1, 1)), cross).ravel()
    array([6., 6.])
    """
    return compute(features, w, kernel_map, groups, scale, bias, residual, activation, precision,
                   out)  # fmt: skip


def compute(*arguments):
    """Check and compute :func:`site_conv`."""
    return compute_by_plan(*arguments)[0]


def compute_by_plan(
    features, w, made, groups, scale, bias, residual, activation, precision, out
):  # fmt: skip
    """Check and compute :func:`site_conv`; return the result and the Plan."""
    weights, (w, scale, bias, precision) = read_weights(w, scale, bias, precision)
    options = _options(made, groups, activation, precision)
    own = (w, scale, bias) if weights is None else (weights.specs,)
    rows, valid = made.rows, valid_rows(made.target)
    plan = SITE_CONV.plan_for((features, _specs(made, rows, valid), *own, residual, out), options)
    read = (features, rows, valid, w, scale, bias, residual)
    if out is not None:
        check_written(out, SITE_CONV.arrays[:-1], read)
    return _run(plan, made, (*read, out), weights), plan


def convolve(made, arrays, options):
    """Compute the operator over the rows of a map, in the order that the map keeps for it."""
    return _run(SITE_CONV.plan_for(arrays, options), made, arrays)


def _run(plan, made, arrays, weights=None):
    """Run a plan on the arrays of the operator, with weights that are packed once, if any."""
    features, rows, valid, w, scale, bias, residual, out = arrays
    if out is None:
        out = empty(plan.shape, features.dtype, features)
    w = w if weights is None else weights
    if isinstance(plan, OrderedPlan):
        order = made._ordered(plan)
        plan.run(features, rows, valid, w, scale, bias, residual, out, order)
    else:
        plan.run(features, rows, valid, w, scale, bias, residual, out)
    return out


def read_weights(w, scale, bias, precision):
    """Return a PackedWeights or None, and w, scale, bias and precision: its own if there is one."""
    if not isinstance(w, PackedWeights):
        return None, (w, scale, bias, precision)
    own, scale, bias, w_format, precision = arrays_of_weights(w, scale, bias, "HWIO", precision)
    if w_format != "HWIO":
        raise ValueError(
            f"w must be a PackedWeights of w_format 'HWIO', (*kernel_size, C, K), got {w_format!r}"
        )
    return w, (own, scale, bias, precision)


def _options(made, groups, activation, precision):
    """Return the options of the operator over a map."""
    check_kernel_map(made)
    return made.kernel_size, made.source.capacity, groups, activation, precision


def _specs(made, rows, valid):
    """Return the specs of a map's arrays, kept by the map."""
    specs = made._kept.get("specs")
    if specs is None:
        specs = made._kept["specs"] = group_of((spec_of(rows), spec_of(valid)))
    return specs


def resolve_arguments(features, w, made, groups, scale, bias, residual, activation, precision):
    """Check arguments as :func:`site_conv` does; return the SiteConv and the result's spec."""
    options = _options(made, groups, activation, precision)
    read = (features, made.rows, valid_rows(made.target), w, scale, bias, residual)
    result, problem = _resolve([*map(spec_of, read), None], options)
    return problem, result


def valid_rows(coordinates: CoordinateMap):
    """Return which rows of coordinates hold a site, kept by the coordinates."""
    valid = coordinates._kept.get("valid")
    return coordinates._keep("valid", coordinates.valid) if valid is None else valid


class SiteConv(NamedTuple):
    """A convolution over a map without its arrays: sizes and options, checked."""

    taps: int
    groups: int
    channels: int
    channels_out: int
    activation: str | None
    tf32: bool


def resolve_site_conv(features, w, rows, kernel_size, sites, groups, activation, precision):
    """Check the arguments that decide sizes; return them as a SiteConv."""
    check_activation(activation)
    check_precision(precision)
    check_array("features", features, ndim=2, shape=(sites, None), like=rows)
    check_contiguous("features", features)
    check_float("features", features.dtype)
    check_array("w", w, like=features)
    check_dtype("w", w, features)
    channels, taps = features.shape[1], rows.shape[0]
    if not is_integer(groups) or groups < 1 or channels % groups:
        raise ShapeError(
            f"groups must be a positive integer that divides the {channels} channels, got "
            f"{groups!r}"
        )
    kernels = (tuple(kernel_size), (taps,))
    *kernel, c, k = w.shape if w.ndim > 2 else (0, 0, 0)
    if tuple(kernel) not in kernels or c * groups != channels or k < 1 or k % groups:
        raise ShapeError(
            f"w must have shape ({', '.join(map(str, kernel_size))}, {channels // groups}, K), K a "
            f"positive multiple of groups, {groups}, got {w.shape}"
            + _hint_of_order(w.shape, channels // groups)
        )
    return SiteConv(taps, groups, channels, k, activation, precision == "tf32")


def _hint_of_order(shape, channels):
    """Return what the error adds where weights may have the order of another library."""
    axes = "".join(map(chr, range(ord("a"), ord("a") + len(shape) - 2)))
    others = {
        "(K, C, *kernel_size), as in PyTorch": f"OI{axes}",
        "(K, *kernel_size, C), as in spconv": f"O{axes}I",
    }
    return hint_of_order(shape, channels, f"{axes}IO", others)


def _resolve(specs, options):
    features, rows, _, w, scale, bias, residual, out = specs
    problem = resolve_site_conv(features, w, rows, *options)
    check_per_channel(scale, bias, problem.channels_out, like=features)
    result = features.new((rows.shape[1], problem.channels_out))
    if residual is not None:
        check_array("residual", residual, shape=result.shape, like=features)
        check_contiguous("residual", residual)
        check_dtype("residual", residual, features)
    check_result(out, result)
    return result, problem


def _infer(specs, options):
    """Check all arguments; return the spec of the result."""
    return _resolve(specs, options)[:1]


def _plan(specs, options):
    """Check all arguments; return the plan of the call."""
    result, problem = _resolve(specs, options)
    if not result.size:
        return Plan((result,), lambda *arrays: None)
    features, rows, _, w, scale, bias, residual, out = specs
    if by_kernels(features):
        plan = plan_kernel(
            problem, options[0], features, w, rows, scale, bias, residual, out or result, result
        )
        if plan is not None:
            return plan

    def run(features, rows, valid, w, scale, bias, residual, out):
        with memory_of_graphs(features), np.errstate(all="ignore"):
            if isinstance(w, PackedWeights):
                w, scale, bias = w.copied() if is_cupy(features) else w.plain()
            w = w.reshape(problem.taps, *w.shape[-2:])
            total = sums(features, w, rows, problem.groups, problem.tf32)
            apply_affine(total, scale, bias, None)
            if residual is not None:
                total += residual
            apply_activation(total, problem.activation)
            if valid is not None:
                total = namespace(out).where(valid[:, None], total, total.dtype.type(0))
            out[...] = total

    return Plan((result,), run)


def sums(features, w, rows, groups, tf32):
    """Return the sum over the taps of ``features[rows[t]] @ w[t]``: float32 or float64, ``[M, K]``.

    ``w`` is ``[taps, C / groups, K]``. Taps are added in their order; those that a row does not
    have are left out of its sum, so that a weight that is not finite reaches only those who use it.
    """
    if not is_cupy(features):
        return _sums(widen(features), widen(w), rows, groups)
    xp, wide = namespace(features), compute_dtype(features.dtype)
    c, k = w.shape[1], w.shape[2] // groups
    total = xp.zeros((rows.shape[1], groups * k), wide)
    for tap in range(len(rows) if len(features) else 0):
        taken, here = take(features, rows[tap])
        product = xp.empty((len(taken), groups * k), wide)
        for g in range(groups):
            into = product if groups == 1 else xp.empty((len(taken), k), wide)
            multiply(channels(taken, g, c), channels(w[tap], g, k), into, tf32)
            product[:, g * k : (g + 1) * k] = into
        add(total, here, product)
    return total


def _sums(features, w, rows, groups):
    """Return these sums on NumPy, of float32 or float64: some rows at a time, which stay cached."""
    taps, c, k = w.shape[0], w.shape[1], w.shape[2]
    total = np.zeros((rows.shape[1], k), features.dtype)
    if not total.size or not features.size:
        return total
    by_group = w.reshape(taps, c, groups, k // groups).transpose(0, 2, 1, 3)
    step = rows_at_once(features.shape[1] + k, features.itemsize)
    taken = np.empty((step, features.shape[1]), features.dtype)
    product, sums = np.empty((2, step, k), features.dtype)
    whole_rows = [row_elements(array) for array in (features, total, taken, sums)]
    source, results, into, old = whole_rows
    for start in range(0, len(total), step):
        for tap, read in enumerate(rows[:, start : start + step]):
            here = np.flatnonzero(reads(read, len(features)))
            n = len(here)
            if not n:
                continue
            source.take(read[here], out=into[:n], mode="clip")
            if groups == 1:
                np.matmul(taken[:n], w[tap], out=product[:n])
            elif c == 1 and k == groups:  # depthwise
                np.multiply(taken[:n], w[tap], out=product[:n])
            else:
                parts = [a[:n].reshape(n, groups, -1).transpose(1, 0, 2) for a in (taken, product)]
                np.matmul(parts[0], by_group[tap], out=parts[1])
            here += start
            results.take(here, out=old[:n], mode="clip")
            sums[:n] += product[:n]
            results[here] = old[:n]
    return total


def rows_at_once(channels, itemsize):
    """Return how many rows with so many channels, read and written, fit a core's cache."""
    return max(_CACHED_BYTES // (channels * itemsize), 64)


def row_elements(array):
    """View each row of a matrix as one element, which NumPy copies fastest."""
    return array.view(np.dtype((np.void, array.shape[1] * array.itemsize)))[:, 0]


def take(features, read):
    """Return the rows that one tap reads, and which rows of the result they are for.

    On NumPy that is their numbers, or None for all rows; on CuPy, where the number of rows stays on
    the device, a mask of all rows.
    """
    if is_cupy(features):
        here = reads(read, len(features))
        return features[namespace(features).where(here, read, 0)], here[:, None]
    here = np.flatnonzero(reads(read, len(features)))
    if len(here) == len(read):
        return features[read], None
    return features[read[here]], here


def add(total, here, product):
    """Add what :func:`take` found to the rows of the result that it is for."""
    if here is None:
        total += product
    elif here.dtype == bool:
        total += namespace(total).where(here, product, total.dtype.type(0))
    else:
        total[here] += product


def channels(matrix, group, count):
    """Return the columns of one group, contiguous."""
    if matrix.shape[1] == count:
        return matrix
    part = matrix[:, group * count : (group + 1) * count]
    return namespace(matrix).ascontiguousarray(part)


SITE_CONV = Operator(
    "site_conv",
    arrays=("features", "rows", "valid", "w", "scale", "bias", "residual", "out"),
    options=("kernel_size", "sites", "groups", "activation", "precision"),
    infer=_infer,
    plan=_plan,
    lengths={"features": 0, "rows": 1, "valid": 0, "residual": 0, "out": 0, "sites": None},
)
