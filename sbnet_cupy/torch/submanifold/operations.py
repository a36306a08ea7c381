"""The operators of features at sites, with their gradients, which are made of themselves.

All take the table ``rows`` of a kernel map as a tensor. The gradient of what reads rows by a table
reads the gradient by the transposed one, which is made once and kept with the tensor of the table.
"""

import functools
import math
import sys
import weakref

import torch

from ...core.arrays import address
from ...core.graph_memory import capture_of
from ...core.torch_memory import to_tensor
from ...submanifold import relu_grad
from ...submanifold.keeping_container import kept_or_made, mark_capture
from ...submanifold.reduce_features import REDUCE_FEATURES
from ...submanifold.sample_pool import SAMPLE_ARGMAX, SAMPLE_MAX, SAMPLE_SUM
from ...submanifold.site_conv import SITE_CONV
from ...submanifold.site_conv_grad import SITE_WEIGHT_GRAD
from ...submanifold.site_features_grad import SITE_FEATURES_GRAD
from ...submanifold.site_max import SITE_MAX, SITE_MAX_GRAD, SITE_MAX_TANGENT
from ...submanifold.site_sum import SITE_SUM
from ...submanifold.transposed_rows import TRANSPOSED_ROWS
from .. import _dispatch_state as state
from .._blas_threads import one_blas_thread
from .._call import call
from .._graph_branch import branch
from .._namespace import activation_backward, affine, wide
from .._native import DTYPES, numpy_dtype, view, views
from .._operation import Operation
from ..network.cuda import start
from .kept_calls import keep_call, partials_of
from .maps import kept_with, out_of_modes
from .site_branch import find_beside, list_beside


def transposed_rows(rows, sites):
    """Return the table of the transposed map, of ``sites`` columns; keep it with ``rows``."""
    if not (state.thread_is_plain() and state.is_plain(rows)):
        return call(_TRANSPOSED, (rows, None), (sites,))

    def make():
        back = to_tensor(find_beside(lambda: TRANSPOSED_ROWS((view(rows), None), (sites,)), rows))
        kept = kept_with(back)
        kept["transposed"] = weakref.ref(rows)
        mark_capture(kept, capture_of(rows))
        return back

    kept = kept_with(rows)
    back = kept.get("transposed")
    if isinstance(back, weakref.ref):
        back = back()
        if back is None:  # the table that this one was made of is gone
            kept.pop("transposed", None)
    if back is not None:
        return back
    return kept_or_made(kept, "transposed", rows, out_of_modes(make))


def _order_of(plan, tensors, place=1):
    """Return the SiteOrder or SiteTiles that a convolution reads a table in, and its addresses.

    The table is at a ``place`` among the tensors.
    """
    rows, key = tensors[place], ("ordered", plan.order, tensors[0].shape[0])
    kept = kept_with(rows)
    found = kept.get(key)
    if found is None:

        def make():
            indices, offsets = kept.get("sites", (None, None))
            table = rows.detach()  # which refers to nothing that is kept: no cycle
            order = list_beside(lambda: plan.sort(*views(table, indices), offsets), rows, indices)
            return order, [0 if array is None else address(array) for array in order]

        found = kept_or_made(kept, key, rows, make)
    return found


def _with_parts(plan, tensors, place=1):
    """Return the order in which a convolution reads a table and the parts of tiles, if any.

    And the addresses of all these.
    """
    order, addresses = _order_of(plan, tensors, place)
    if not plan.partials:
        return (order, None), addresses
    parts = partials_of(plan, tensors[0])
    return (order, parts), [*addresses, parts.data_ptr()]


def convolve(features, w, rows, *, groups=1, precision=None):
    """Return the plain convolution with a kernel ``[taps, C / groups, K]``."""
    options = ((rows.shape[0],), features.shape[0], groups, None, precision)
    return call(CONV, (features, rows, None, w, None, None, None, None), options)


def site_sum(features, rows, valid=None, count="one"):
    """Return the sum, or average, of the rows that each row of the table reads."""
    return call(_SUM, (features, rows, valid, None), (count,))


def site_max(features, rows, valid, floor, ties):
    """Return the largest of the rows that each row of the table reads."""
    return call(_MAX, (features, rows, valid, None), (floor, ties))


def reduce_features(features, order, site, starts, mode):
    """Return the sum or mean of the rows of each site."""
    return call(_REDUCE, (features, order, site, starts, None), (mode,))


def sample_sum(features, sample, batch, reduce):
    """Return the sum of the rows of each sample, or their mean."""
    return call(_SAMPLE_SUM, (features, sample, None), (batch, reduce))


def sample_max(features, sample, batch):
    """Return the largest number of each column among the rows of each sample, 0 without rows."""
    return call(_SAMPLE_MAX, (features, sample, None), (batch,))


def rows_of(values, place):
    """Return ``values[place]``, 0 where the place is negative."""
    if not values.shape[0]:
        return values.new_zeros((place.shape[0], *values.shape[1:])) + values.sum(0)
    there = (place >= 0)[:, None]
    return torch.where(there, values[place.clamp(min=0).long()], 0)


def filled(like, shape, number):
    """Return a tensor of one number; of infinity where it is too large for a dtype of floats."""
    if isinstance(number, float) and abs(number) > torch.finfo(like.dtype).max:
        number = math.copysign(math.inf, number)
    return like.new_full(shape, number)


def _features_grad(grad, w, groups, precision, rows, sites):
    """Return the gradient of features from that of a convolution by ``w [taps, C / groups, K]``."""
    reverse = getattr(rows, "kept_of_map", {}).get("symmetric", False)
    back = rows if reverse else transposed_rows(rows, sites)
    return call(_FEATURES_GRAD, (grad, w, back, None), (groups, reverse, precision))


def _wide_dtype(tensor):
    """Return the dtype in which sums of a tensor are computed."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _conv_saves(arrays, options):
    names = {"features", "w", "rows", "valid", "scale"}
    if options["activation"] == "relu":
        names |= {"result"}
    elif options["activation"] is not None:
        names |= {"bias", "residual"}
    return names


def _conv_gradient(ops, arrays, options, grad, wanted, result):
    """Differentiate activation, sums and products one by one; sums that are needed again, again."""
    features, rows, valid, w, scale, bias, residual, _ = arrays
    _, sites, groups, activation, precision = options
    taps = w.reshape(rows.shape[0], *w.shape[-2:])
    how, found, sums = {"groups": groups, "precision": precision}, {}, None
    if activation == "relu" and wanted & {"bias"} and _has_relu_grad(grad, result, bias):
        grad, sums = _relu_grad(grad, result)
    elif activation == "relu":  # one kernel; the result is 0 where there is no site
        grad = torch.ops.aten.threshold_backward(grad, result, 0)
    elif valid is not None and (activation or wanted - {"features", "w"}):
        grad = torch.where(valid[:, None], grad, 0)
    total = None
    if "scale" in wanted or activation not in (None, "relu"):
        total = wide(ops.convolve(features, taps, rows, **how))
    if activation not in (None, "relu"):
        z = affine(total, scale, bias, None)
        if residual is not None:  # where there is no site, it is not read: it may be NaN
            z = z + (residual if valid is None else torch.where(valid[:, None], residual, 0))
        grad = activation_backward(wide(grad), z, activation)
    if "residual" in wanted:
        found["residual"] = grad.to(residual.dtype)
    if "bias" in wanted and sums is None:
        found["bias"] = grad.sum(0, dtype=_wide_dtype(grad)).to(bias.dtype)
    if "scale" in wanted:
        found["scale"] = (wide(grad) * total).sum(0).to(scale.dtype)
    if scale is not None:
        grad = grad * scale.to(_wide_dtype(grad))
    grad = grad.to(w.dtype)
    with branch(grad) as beside:
        if "w" in wanted:
            with beside:
                dw = call(_WEIGHT_GRAD, (features, grad, rows, None), (groups, precision))
            found["w"] = dw.reshape(w.shape)
        if "features" in wanted:
            found["features"] = _features_grad(grad, taps, groups, precision, rows, sites)
        if sums is not None:  # nothing waits for it
            found["bias"] = _bias_grad(sums, bias)
    return found


def _has_relu_grad(grad, result, bias):
    """Whether kernels compute the gradients of a relu and of a bias; they record none."""
    if not grad.is_cuda or grad.get_device() != state.current_device():
        return False
    plain = not torch.is_grad_enabled() and state.thread_is_plain()
    if not (plain and state.is_plain(grad) and state.is_plain(result)):
        return False
    dtypes = numpy_dtype(grad.dtype, "grad"), numpy_dtype(bias.dtype, "bias")
    return relu_grad.has_kernel(*dtypes, grad.numel())


def _relu_grad(grad, result):
    """Return the gradient before a relu, and sums of groups of its rows."""
    if grad.stride(1) != 1 or grad.stride(0) < grad.shape[1]:  # no columns of a wider tensor
        grad = grad.contiguous()
    m, channels = grad.shape
    alignments = grad.data_ptr() & 15, result.data_ptr() & 15
    sizes = m, channels, grad.stride(0), DTYPES[grad.dtype], alignments
    groups, launch = relu_grad.prepare_relu_grad(*sizes, f"cuda:{grad.get_device()}")
    dx = grad.new_empty((m, channels))
    sums = grad.new_empty((groups, channels), dtype=_wide_dtype(grad))
    start(launch, grad, result, dx, sums)
    return dx, sums


def _bias_grad(sums, bias):
    """Return the gradient of a bias from these sums."""
    sizes = *sums.shape, DTYPES[bias.dtype]
    launch = relu_grad.prepare_bias_grad(*sizes, f"cuda:{sums.get_device()}")
    dbias = sums.new_empty(sums.shape[1:], dtype=bias.dtype)
    start(launch, sums, dbias)
    return dbias


def _weight_grad_gradient(ops, arrays, options, grad, wanted, result):
    features, grad_y, rows, _ = arrays
    groups, precision = options
    how, found = {"groups": groups, "precision": precision}, {}
    if "features" in wanted:
        sites = features.shape[0]
        found["features"] = _features_grad(grad_y, grad, groups, precision, rows, sites)
    if "grad_y" in wanted:
        found["grad_y"] = ops.convolve(features, grad, rows, **how)
    return found


def _features_grad_gradient(ops, arrays, options, grad, wanted, result):
    grad_y, w, back, _ = arrays
    groups, reverse, precision = options
    rows, found = back if reverse else transposed_rows(back, grad_y.shape[0]), {}
    if "grad_y" in wanted:
        found["grad_y"] = ops.convolve(grad, w, rows, groups=groups, precision=precision)
    if "w" in wanted:
        found["w"] = call(_WEIGHT_GRAD, (grad, grad_y, rows, None), (groups, precision))
    return found


def _sum_gradient(ops, arrays, options, grad, wanted, result):
    features, rows, valid, _ = arrays
    share = wide(grad if valid is None else torch.where(valid[:, None], grad, 0))
    if options[0] == "volume":
        share = share / max(rows.shape[0], 1)
    elif options[0] == "active":
        share = share / (rows >= 0).sum(0).clamp(min=1)[:, None]
    back = transposed_rows(rows, features.shape[0])
    return {"features": ops.site_sum(share, back).to(grad.dtype)}


def _max_gradient(ops, arrays, options, grad, wanted, result):
    features, rows, valid, _ = arrays
    grad = torch.where(valid[:, None], grad, 0)
    back = transposed_rows(rows, features.shape[0])
    tensors = (grad, features.detach(), result.detach(), rows, back, None)
    return {"features": call(_MAX_GRAD, tensors, options[1:])}


def _max_grad_gradient(ops, arrays, options, grad, wanted, result):
    _, features, y, rows, _, _ = arrays
    return {"grad_y": call(_MAX_TANGENT, (grad, features, y, rows, None), options)}


def _max_tangent_gradient(ops, arrays, options, grad, wanted, result):
    _, features, y, rows, _ = arrays
    back = transposed_rows(rows, features.shape[0])
    return {"tangent": call(_MAX_GRAD, (grad, features, y, rows, back, None), options)}


def _reduce_gradient(ops, arrays, options, grad, wanted, result):
    _, order, site, starts, _ = arrays
    if options[0] == "mean":
        number = (starts[0, 1:] - starts[0, :-1]).clamp(min=1)[:, None]
        grad = (wide(grad) / number).to(grad.dtype)
    listed = rows_of(grad, torch.where(site < grad.shape[0], site, -1))
    return {"features": torch.zeros_like(listed).index_copy(0, order.long(), listed)}


def _sample_sum_gradient(ops, arrays, options, grad, wanted, result):
    features, sample, _ = arrays
    batch, reduce = options
    if reduce == "mean":
        ones = sample.new_ones((sample.shape[0], 1), dtype=torch.float64)
        number = ops.sample_sum(ones, sample, batch, "sum")
        grad = (grad / number.clamp(min=1)).to(features.dtype)
    return {"features": rows_of(grad, sample)}


def _sample_max_gradient(ops, arrays, options, grad, wanted, result):
    """Give the gradient to the first row that holds the largest number."""
    features, sample, _ = arrays
    number = torch.arange(1, features.shape[0] + 1, dtype=torch.int32, device=sample.device)
    winner = call(_SAMPLE_ARGMAX, (sample, features.detach(), None), options)
    mine = rows_of(winner + 1, sample) == number[:, None]
    return {"features": torch.where(mine, rows_of(grad, sample), 0)}


_HERE = sys.modules[__name__]
_TRANSPOSED = Operation(TRANSPOSED_ROWS)
CONV = Operation(
    SITE_CONV, _HERE, gradient=_conv_gradient, saves=_conv_saves, weights=slice(3, 6),
    around=one_blas_thread, derived=_with_parts, keep=keep_call,
    prefixes={"rows": "kernel_map.", "valid": "kernel_map.target."},
)  # fmt: skip
_WEIGHT_GRAD = Operation(
    SITE_WEIGHT_GRAD,
    _HERE,
    gradient=_weight_grad_gradient,
    saves=lambda arrays, options: {"features", "grad_y", "rows"},
    around=one_blas_thread,
)
_FEATURES_GRAD = Operation(
    SITE_FEATURES_GRAD,
    _HERE,
    gradient=_features_grad_gradient,
    saves=lambda arrays, options: {"grad_y", "w", "back"},
    around=one_blas_thread,
    derived=functools.partial(_with_parts, place=2),
)
_SUM = Operation(SITE_SUM, _HERE, gradient=_sum_gradient)
_MAX = Operation(
    SITE_MAX,
    _HERE,
    gradient=_max_gradient,
    saves=lambda arrays, options: {"features", "rows", "valid", "result"},
)
_MAX_GRAD = Operation(SITE_MAX_GRAD, _HERE, gradient=_max_grad_gradient)
_MAX_TANGENT = Operation(SITE_MAX_TANGENT, _HERE, gradient=_max_tangent_gradient)
_REDUCE = Operation(REDUCE_FEATURES, _HERE, gradient=_reduce_gradient)
_SAMPLE_SUM = Operation(SAMPLE_SUM, _HERE, gradient=_sample_sum_gradient)
_SAMPLE_MAX = Operation(
    SAMPLE_MAX,
    _HERE,
    gradient=_sample_max_gradient,
    saves=lambda arrays, options: {"features", "sample"},
)
_SAMPLE_ARGMAX = Operation(SAMPLE_ARGMAX)
