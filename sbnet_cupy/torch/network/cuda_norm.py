"""The CUDA kernels of batch norms in training, on tensors: statistics, the stack, gradients."""

import functools
import math

import torch

from . import cuda

_PARAMETERS = cuda._ELEMENTS | {torch.float64: "double"}
_ROWS = 5  # of the statistics


def serves(x, table, block, size, parameters):
    """Whether kernels normalize a stack, with these parameters and running statistics, or None."""
    if not x.is_cuda or x.dtype not in cuda._ELEMENTS or table.whole or table.static:
        return False
    given = [t for t in parameters if t is not None]
    dtypes = {t.dtype for t in given}
    alike = len(dtypes) < 2 and dtypes <= _PARAMETERS.keys()
    alike = alike and all(t.is_contiguous() and t.device == x.device for t in given)
    alike = alike and all(tuple(t.shape) == (x.shape[1],) for t in given)
    if not alike or (parameters[2] is None) != (parameters[3] is None) or not x.numel():
        return False
    return _sizes(x, table, block, size).norm.fits


def statistics(x, table, block, size, parameters, momentum, eps):
    """Return the statistics of a stack, ``[5 C + 1]``, and follow them with the running ones.

    ``parameters`` are weight, bias, running mean and running variance, of which all may be None.
    The rows are mean, variance, one over the standard deviation, scale and shift; the number of
    pixels follows them.
    """
    from ...core.launch import Number

    rows, own = cuda._rows(x.detach()), [t if t is None else t.detach() for t in parameters]
    sizes = _sizes(x, table, block, size)
    given = next((t.dtype for t in own if t is not None), torch.float32)
    found = x.new_empty(_ROWS * x.shape[1] + 1, dtype=_wide(x.dtype))
    with cuda._at_home(x) as device:
        launch, partials = sizes.prepared(device, _prepare_statistics, given, float(eps))
        memory = x.new_empty(partials, dtype=found.dtype)
        lists = table.counts, table.indices
        _launch(launch, (rows, *lists, *own, memory, found, Number(momentum)))
    for running in own[2:]:
        if running is not None:
            torch.autograd.graph.increment_version(running)  # as of what PyTorch writes itself
    return found


def normalize(x, table, block, size, found, residual, activation):
    """Return ``activation(x * scale + shift + residual)``, 0 outside of the images."""
    rows = cuda._rows(x)
    added = None if residual is None else cuda._rows(residual)
    out = cuda.new_stack(x, x.shape[0], block, x.shape[1])
    with cuda._at_home(x) as device:
        sizes = _sizes(x, table, block, size)
        launch = sizes.prepared(device, _prepare_norm, cuda._CODES[activation])
        lists = table.counts, table.indices
        _launch(launch, (rows, added, found, *lists, out.permute(0, 2, 3, 1)))
    return out


def differentiate(grad, x, y, table, block, size, found, activation, dtype, wanted):
    """Return gradients of x, weight, bias and residual, None where one is not ``wanted``.

    ``y`` is the result where there was a residual and an activation, which is relu; else None.
    ``dtype`` is that of the parameters.
    """
    grad, rows = cuda._rows(grad), cuda._rows(x)
    result = None if y is None else cuda._rows(y)
    sizes, channels = _sizes(x, table, block, size), x.shape[1]
    code, lists = cuda._CODES[activation], (table.counts, table.indices)
    factors = dweight = dbias = dx = added = None
    same = activation is None and sizes.norm.whole  # the residual's gradient is the one that came
    with cuda._at_home(x) as device:
        if any(wanted[:3]):
            launch, partials = sizes.prepared(device, _prepare_sums, dtype, code)
            memory, factors = (x.new_empty(n, dtype=found.dtype) for n in (partials, 2 * channels))
            dweight, dbias = (
                x.new_empty(channels, dtype=dtype) if w else None for w in wanted[1:3]
            )
            _launch(launch, (grad, rows, result, found, *lists, memory, dweight, dbias, factors))
        dx = torch.empty_like(rows) if wanted[0] else None
        added = torch.empty_like(rows) if wanted[3] and not same else None
        if dx is not None or added is not None:
            launch = sizes.prepared(device, _prepare_gradient, code)
            _launch(launch, (grad, rows, result, found, factors, *lists, dx, added))
    added = grad if wanted[3] and same else added
    dx, added = (t if t is None else t.permute(0, 3, 1, 2) for t in (dx, added))
    return dx, dweight, dbias, added


def _wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Sizes:
    """The sizes of a norm, and what was prepared for them."""

    def __init__(self, norm):
        self.norm, self._plans = norm, {}

    def prepared(self, device, prepare, *options):
        """Return what ``prepare`` makes for these sizes on the current device, made once."""
        key = device, prepare, options
        if key not in self._plans:
            self._plans[key] = prepare(self.norm, *options)
        return self._plans[key]


def _sizes(x, table, block, size):
    """Return the sizes of the norm of a stack, ``[M, C, *block]``."""
    kept, key = table.kept, ("norm", x.dtype, x.shape[1], block, size)
    if key not in kept:
        whole = table.divides(block, size)  # whether rows below the count are whole blocks
        facts = x.dtype, x.shape[0], table.batch, table.grid, x.shape[1], block, size, whole
        kept[key] = _described(*facts)
    return kept[key]


def _launch(launch, given):
    launch(*(cuda._At(g) if isinstance(g, torch.Tensor) else g for g in given))


@functools.lru_cache(maxsize=1024)
def _described(dtype, rows, images, grid, channels, block, size, whole):
    from ...block_sparse.stack.stack_norm_launch import StackNorm

    element = _PARAMETERS[dtype]
    norm = StackNorm(
        element, dtype.itemsize, rows, images, grid, channels, block, size,
        alignment=math.gcd(16, channels * dtype.itemsize), whole=whole,
    )  # fmt: skip
    return _Sizes(norm)


def _prepare_statistics(norm, parameter, eps):
    from ...block_sparse.stack.stack_norm_launch import prepare_stack_statistics

    return prepare_stack_statistics(norm, _PARAMETERS[parameter], eps), norm.partials


def _prepare_norm(norm, code):
    from ...block_sparse.stack.stack_norm_launch import prepare_stack_norm

    return prepare_stack_norm(norm, code)


def _prepare_sums(norm, parameter, code):
    from ...block_sparse.stack.stack_norm_launch import prepare_stack_norm_sums

    return prepare_stack_norm_sums(norm, _PARAMETERS[parameter], code), norm.partials


def _prepare_gradient(norm, code):
    from ...block_sparse.stack.stack_norm_launch import prepare_stack_norm_grad

    return prepare_stack_norm_grad(norm, code)
