"""The CUDA kernels of batch norms, on tensors: statistics, the stack, gradients."""

import functools
import math

import torch

from . import cuda, cuda_affine

_PARAMETERS = cuda._ELEMENTS | {torch.float64: "double"}
_ROWS = 5  # of the statistics


def serves(x, table, block, size, parameters):
    """Whether kernels normalize a stack, with these parameters and running statistics, or None."""
    if not x.is_cuda or x.dtype not in cuda._ELEMENTS or table.whole or table.static:
        return False
    if (parameters[2] is None) != (parameters[3] is None) or not x.numel():
        return False
    dtype, shape, device = None, x.shape[1:2], x.device
    for t in parameters:
        if t is not None:
            dtype = dtype or t.dtype
            alike = t.dtype == dtype and t.shape == shape and t.device == device
            if not alike or dtype not in _PARAMETERS or not t.is_contiguous():
                return False
    return _sizes(x, table, block, size).norm.fits


def statistics(x, table, block, size, parameters, momentum, eps):
    """Return the statistics of a stack, ``[5 C + 1]``, and follow them with the running ones.

    ``parameters`` are weight, bias, running mean and running variance, of which all may be None.
    The rows are mean, variance, one over the standard deviation, scale and shift; the number of
    pixels follows them.
    """
    from ...core.launch import Number

    dtype = next((t.dtype for t in parameters if t is not None), torch.float32)
    sizes = _sizes(x, table, block, size)
    launch, partials = sizes.prepared(x, _prepare_statistics, dtype, float(eps))
    wide, device = _wide(x.dtype), x.device
    found = torch.empty(_ROWS * x.shape[1] + 1, dtype=wide, device=device)
    memory = torch.empty(partials, dtype=wide, device=device)
    lists = table.counts, table.indices
    cuda.start(launch, cuda.last(x), *lists, *parameters, memory, found, Number(momentum))
    for running in parameters[2:]:
        if running is not None:
            torch.autograd.graph.increment_version(running)  # as of what PyTorch writes itself
    return found


def serves_images(x, table, block, size, weight, bias):
    """Whether kernels find the norm of each image of a stack, with these parameters or None."""
    given = [t for t in (weight, bias) if t is not None]
    return (
        cuda_affine.fits(x, table, *given)
        and all(t.numel() == x.shape[1] for t in given)
        and not table.static
        and math.prod(size) > 0
        and _sizes(x, table, block, size).norm.fits
    )


def of_images(x, table, block, size, groups, weight, bias, eps):
    """Return (scale, shift), ``[N, C]``, of the group norm of each image; its other pixels are 0.

    Where :func:`serves_images`.
    """
    sizes, (channels, device) = _sizes(x, table, block, size), (x.shape[1], x.device)
    norm, dtype = sizes.norm, next((t.dtype for t in (weight, bias) if t is not None), x.dtype)
    in_group = channels // groups
    facts = dtype, in_group, float(eps), table.settled
    launch = sizes.prepared(x, _prepare_image_norm, *facts)
    scale, shift = torch.empty(2, table.batch, channels, dtype=torch.float32, device=device)
    memory = torch.empty(norm.image_partials, dtype=torch.float32, device=device)
    count = norm.moments if in_group > 1 else 0
    moments = torch.empty(count, dtype=torch.float32, device=device)
    given = cuda.last(x), table.counts, table.indices, weight, bias
    outs = memory, moments, scale, shift
    cuda.start(launch, *given, *outs, order=table.order, out=outs)
    table.settled = True
    return scale, shift


def running(x, table, block, size, parameters, eps):
    """Return statistics that are the running ones, for a norm in evaluation."""
    from ...core.launch import Number

    dtype = parameters[2].dtype
    launch = _sizes(x, table, block, size).prepared(x, _prepare_running, dtype, float(eps))
    found = torch.empty(_ROWS * x.shape[1] + 1, dtype=_wide(x.dtype), device=x.device)
    cuda.start(launch, *parameters[2:], *parameters[:2], found, Number(0))
    return found


def normalize(x, table, block, size, found, residual, activation):
    """Return ``activation(x * scale + shift + residual)``, 0 outside of the images."""
    launch = _sizes(x, table, block, size).prepared(x, _prepare_norm, cuda.code_of(activation))
    x, out = cuda.last(x), cuda.new_stack(x, x.shape[0], block, x.shape[1])
    cuda.start(launch, x, cuda.last(residual), found, table.counts, table.indices, out)
    return out


def differentiate(grad, x, y, table, block, size, found, activation, dtype, wanted):
    """Return gradients of x, weight, bias and residual, None where one is not ``wanted``.

    ``y`` is the result where there was a residual and an activation, which is relu; else None.
    ``dtype`` is that of the parameters.
    """
    grad, x, y = aligned(cuda.last(grad)), cuda.last(x), cuda.last(y)
    sizes, channels = _sizes(x, table, block, size), x.shape[1]
    code, lists = cuda.code_of(activation), (table.counts, table.indices)
    factors = dweight = dbias = dx = added = None
    same = activation is None and sizes.norm.whole  # the residual's gradient is the one that came
    if wanted[0] or wanted[1] or wanted[2]:
        launch, partials = sizes.prepared(x, _prepare_sums, dtype, code)
        memory = torch.empty(partials, dtype=found.dtype, device=x.device)
        factors = torch.empty(2 * channels, dtype=found.dtype, device=x.device)
        if wanted[1]:
            dweight = torch.empty(channels, dtype=dtype, device=x.device)
        if wanted[2]:
            dbias = torch.empty(channels, dtype=dtype, device=x.device)
        cuda.start(launch, grad, x, y, found, *lists, memory, dweight, dbias, factors)
    if wanted[0]:
        dx = torch.empty_like(x)
    if wanted[3]:
        added = grad if same else torch.empty_like(x)
    if wanted[0] or (wanted[3] and not same):
        launch = sizes.prepared(x, _prepare_gradient, code)
        cuda.start(launch, grad, x, y, found, factors, *lists, dx, None if same else added)
    return dx, dweight, dbias, added


def aligned(t):
    """Return a tensor, or a copy, whose memory begins where a vector can."""
    return t.clone() if t.data_ptr() % 16 else t


def _wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Sizes:
    """The sizes of a norm, and what was prepared for them."""

    def __init__(self, norm):
        self.norm, self._plans = norm, {}

    def prepared(self, x, prepare, *options):
        """Return what ``prepare`` makes for these sizes on the device of x, made once."""
        return cuda.prepared(self._plans, (prepare, options), x, prepare, self.norm, *options)


def _sizes(x, table, block, size):
    """Return the sizes of the norm of a stack, ``[M, C, *block]``."""
    kept, key = table.kept, ("norm", x.dtype, x.shape[1], block, size)
    if key not in kept:
        whole = table.divides(block, size)  # whether rows below the count are whole blocks
        facts = x.dtype, x.shape[0], table.batch, table.grid, x.shape[1], block, size, whole
        kept[key] = _described(*facts)
    return kept[key]


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


def _prepare_image_norm(norm, parameter, in_group, eps, settled):
    from ...block_sparse.stack.stack_norm_launch import prepare_stack_image_norm

    return prepare_stack_image_norm(norm, _PARAMETERS[parameter], in_group, eps, settled)


def _prepare_running(norm, parameter, eps):
    from ...block_sparse.stack.stack_norm_launch import prepare_stack_running

    return prepare_stack_running(norm, _PARAMETERS[parameter], eps)


def _prepare_norm(norm, code):
    from ...block_sparse.stack.stack_norm_launch import prepare_stack_norm

    return prepare_stack_norm(norm, code)


def _prepare_sums(norm, parameter, code):
    from ...block_sparse.stack.stack_norm_launch import prepare_stack_norm_sums

    return prepare_stack_norm_sums(norm, _PARAMETERS[parameter], code), norm.partials


def _prepare_gradient(norm, code):
    from ...block_sparse.stack.stack_norm_launch import prepare_stack_norm_grad

    return prepare_stack_norm_grad(norm, code)
