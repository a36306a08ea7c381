"""Functions that reduce: batch norm and its like over pixels, sums and others over channels."""

import functools
import math

import torch
from torch.nn import functional as F

from .._namespace import wide
from . import casts, cuda, cuda_affine, cuda_norm, onednn, unread
from . import tensor as T
from .batch_statistics import trained
from .ends import rest_of, with_rest
from .handlers import handles
from .image_values import plainly
from .plans import LinearPlan, MatrixPlan, NormPlan, normalized, wider
from .pointwise import alias, pointwise, step
from .scales import postponed
from .trees import tree_map
from .windows import global_maximum, global_mean, is_image

OF_A_BATCH = "a batch norm by the statistics of the batch"


@handles("batch_norm")
def batch_norm(
    func, input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1,
    eps=1e-5,
):  # fmt: skip
    """Normalize channels: folded into a convolution that waits, or by active pixels in training."""
    if not is_image(input):
        return NotImplemented
    if training:
        table = T.facts(input)[0]
        table.reduced = table.reduced or OF_A_BATCH
        return trained(input, running_mean, running_var, weight, bias, momentum, eps)
    norm = (running_mean, running_var, weight, bias, float(eps))
    plan = T.plan_of(input)
    learns = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (weight, bias)
    )
    waits = plan is not None and not (plan.norm or plan.activation or plan.residual is not None)
    if waits and not learns:
        return step(input, plan.then(norm=norm), False, (normalized, norm))
    if plan is not None and running_mean is not None and plan.takes_last(*norm[:4]):
        return step(input, plan.then(last=norm), False, (normalized, norm))
    value = T.value_of(input)
    table, block, size, _, reach = T.facts(input)
    records = learns or (torch.is_grad_enabled() and value.requires_grad)
    waits = not records and table.weights is not None and running_mean is not None
    if not waits:
        call = value, *norm[:4], False, momentum, eps
        out, rest = T.wrap(table.compute(F.batch_norm, *call), input), rest_of(input)
        if rest is None:
            return out
        return with_rest(out, lambda: normalized(rest()[None, :, None, None], norm).flatten())
    row = None if table.trace is None else table.trace.row
    plan = NormPlan(value, T.facts(input), norm, T.shape(input)[1], row)
    return T.postpone(table, plan.then(before=rest_of(input)), block, size, reach)


@handles("group_norm")
def group_norm(func, input, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True):
    """Normalize groups of channels of an image, in which inactive pixels are 0."""
    if not is_image(input):
        return NotImplemented
    table, block, size, _, _ = T.facts(input)
    table.reduced = table.reduced or "a norm over the image"
    value, reach = T.value_of(input), float("inf")
    args = table, block, size, num_groups, weight, bias, eps
    divides = isinstance(num_groups, int) and num_groups > 0 and value.shape[1] % num_groups == 0
    same = (F.instance_norm,) if func.__name__ == "instance_norm" else (F.group_norm, 1)
    if divides and cuda_norm.serves_images(value, *args[:3], weight, bias):
        scale, shift = table.compute(cuda_norm.of_images, value, *args)
        dtype = casts.dtype_in(value, *same)
        return postponed(input, value, scale, reach, dtype, shift=shift)
    value = casts.widened(value, *same)
    return T.wrap(table.compute(_group_norm, value, *args), input, reach=reach)


def _group_norm(value, table, block, size, num_groups, weight, bias, eps):
    groups = value.unflatten(1, (num_groups, value.shape[1] // num_groups))
    _, mean, squares, count = _moments_of_images(groups, table, block, size, (3, 4), (2, 3, 4))
    each = mean, torch.rsqrt(squares / count + eps)
    mean, scale = (t.expand(-1, -1, groups.shape[2], 1, 1).flatten(1, 2) for t in each)
    scale = scale if weight is None else scale * weight[:, None, None]
    shift = -mean * scale if bias is None else bias[:, None, None] - mean * scale
    # of the stack itself: of five dimensions PyTorch gives one block strides that mislead it
    return (wide(value) * table.spread(scale) + table.spread(shift)).to(value.dtype)


def _moments_of_images(value, table, block, size, hw, over):
    """Find the moments of whole images, whose inactive pixels are 0, with all dimensions.

    Returns the active pixels less the mean, the mean, the sum of the squares of all pixels less the
    mean, and the number of pixels.
    """
    value = wide(value)
    channels = [i for i in over if i not in hw]
    times = math.prod(value.shape[i] for i in channels)
    ones = [1 if i in hw else n for i, n in enumerate(value.shape)][1:]

    def summed(pixels):
        sums = table.sum_pixels(pixels, block, size, hw).view(-1, *ones)
        return sums.sum(channels, keepdim=True) if channels else sums

    count = size[0] * size[1] * times
    mean = summed(value) / count
    apart = value - table.spread(mean)
    zeros = (size[0] * size[1] - table.active_pixels(block, size)).view(-1, *[1] * len(ones))
    return apart, mean, summed(apart.square()) + zeros * mean.square() * times, count


@handles("instance_norm")
def instance_norm(
    func, input, running_mean=None, running_var=None, weight=None, bias=None,
    use_input_stats=True, momentum=0.1, eps=1e-5,
):  # fmt: skip
    """Normalize channels of an image, in which inactive pixels are 0."""
    if not is_image(input) or not use_input_stats or running_mean is not None:
        return NotImplemented
    return group_norm(func, input, T.shape(input)[1], weight, bias, eps)


def _on_stack(x, func, *args, value=None, **kwargs):
    """Return a StackTensor of what a function makes of a stack, with blocks as they are."""
    value = T.value_of(x) if value is None else value
    (value,) = unread.harmless(func, [value], *T.facts(x)[:4])
    return T.wrap(T.facts(x)[0].compute(func, value, *args, **kwargs), x)


def own_dims(x):
    """Return the dimensions of a StackTensor that are neither images nor pixels."""
    hw = T.facts(x)[3]
    return [i for i in range(1, T.dims(x)) if i not in hw]


def _normal(dim, count):
    """Return dimensions as a tuple of numbers from 0, or None."""
    given = (dim,) if isinstance(dim, int) else dim
    if not isinstance(given, (tuple, list)):
        return None
    if any(isinstance(d, bool) or not isinstance(d, int) for d in given):
        return None  # torch.var(x, True) has no dimension
    return tuple(d % count for d in given)


@handles("layer_norm")
def layer_norm(
    func, input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True
):
    """Normalize over the last dimensions, where they are channels."""
    last = T.dims(input) - len(normalized_shape)
    if not isinstance(input, T.StackTensor) or last <= max(T.facts(input)[3]):
        return NotImplemented
    value, (table, _, _, hw, _) = T.value_of(input), T.facts(input)
    if hw == (1, 2) and not table.whole and cuda.serves(value):
        value = cuda.last(value.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)  # parts are copied
    dtype, narrow = casts.dtype_in(value, F.layer_norm, (2,)), casts.dtype_for(value)
    alike = all(t is None or t.dtype == dtype for t in (weight, bias))
    if not alike or not cuda_affine.norms(value, table, normalized_shape, weight, bias, eps):
        return _on_stack(input, func, normalized_shape, weight, bias, eps)
    made = functools.partial(cuda_affine.layer_norm, value, table, weight, bias, eps)
    if narrow is not None and dtype == torch.float32:
        return wider(input, made, T.shape(input), narrow)
    return T.wrap(table.compute(made.func, *made.args), input)


@handles("rms_norm")
def rms_norm(func, input, normalized_shape, weight=None, eps=None):
    """Normalize over the last dimensions, where they are channels."""
    last = T.dims(input) - len(normalized_shape)
    if not isinstance(input, T.StackTensor) or last <= max(T.facts(input)[3]):
        return NotImplemented
    return _on_stack(input, func, normalized_shape, weight, eps)


@handles("linear")
def linear(func, input, weight, bias=None):
    """Multiply the last dimension, where it is one of channels."""
    if not isinstance(input, T.StackTensor) or isinstance(weight, T.StackTensor):
        return NotImplemented
    if T.dims(input) - 1 in T.facts(input)[3]:
        return NotImplemented
    trace = T.facts(input)[0].trace
    if trace is not None:
        trace.linear(func.__name__, weight, input)
    table, block, size, hw, reach = T.facts(input)
    to = casts.for_waiting(table)
    value, made = T.value_as(input, to), None
    if table.weights is not None:
        if onednn.multiplies(value, weight, bias, table.weights):
            made = LinearPlan
        elif _by_kernel(value, weight, bias, table) and hw == (1, 2):
            made = MatrixPlan
    if made is None:
        return _on_stack(input, F.linear, weight, bias, value=value)
    row, shape = None if trace is None else trace.row, (*T.shape(input)[:-1], weight.shape[0])
    plan = made(value, T.facts(input), weight, bias, shape, to, row)
    return T.postpone(table, plan, block, size, reach, hw=hw)


def _by_kernel(x, weight, bias, table):
    """Whether the kernel of convolutions multiplies a stack ``[M, h, w, C]`` by a matrix."""
    given, to = [t for t in (weight, bias) if t is not None], casts.dtype_for(x)
    dtype = casts.after(x.dtype, to)
    return (
        x.dim() == 4
        and x.numel() > 0
        and cuda.serves(x)
        and cuda.multiplies(dtype)
        and not table.whole
        and table.weights.keeps
        and all(type(t) is torch.nn.Parameter for t in given)
        and all(casts.after(t.dtype, to) == dtype for t in given)
        and tuple(weight.shape[1:]) == tuple(x.shape[3:])
        and (bias is None or tuple(bias.shape) == tuple(weight.shape[:1]))
        and not cuda.records(*given)
    )


@handles("matmul", "__matmul__")
def matmul(func, a, b):
    """Multiply the last dimension by a matrix, where it is one of channels."""
    if not isinstance(a, T.StackTensor) or isinstance(b, T.StackTensor) or b.dim() != 2:
        return NotImplemented
    if T.dims(a) - 1 in T.facts(a)[3]:
        return NotImplemented
    return _on_stack(a, torch.matmul, b)


@handles("local_response_norm")
def local_response_norm(func, input, *args, **kwargs):
    """Divide by what lies around in the second dimension, where it is one of channels."""
    return _on_stack(input, func, *args, **kwargs) if is_image(input) else NotImplemented


@handles("flip")
def flip(func, input, *dims, **rest):
    """Reverse the order of channels."""
    dims = rest.pop("dims", dims)
    over = _normal(dims[0] if len(dims) == 1 else dims, T.dims(input))
    if rest or over is None or not set(over) <= set(own_dims(input)):
        return NotImplemented
    return _on_stack(input, torch.flip, over)


@handles("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "glu")
def along_channels(func, input, dim=None, *args, **kwargs):
    """Run a function along dimensions of channels."""
    over = None if dim is None else _normal(dim, T.dims(input))
    if over is None or not set(over) <= set(own_dims(input)):
        return NotImplemented
    out, rest = _on_stack(input, func, dim, *args, **kwargs), rest_of(input)
    if rest is None or over != (1,) or not is_image(input):
        return out
    return with_rest(out, lambda: func(rest(), 0, *args, **kwargs))


@handles("normalize")
def normalize(func, input, p=2.0, dim=1, eps=1e-12, out=None):
    """Divide by the norm over channels."""
    over = _normal(dim, T.dims(input))
    if over is None or out is not None or not set(over) <= set(own_dims(input)):
        return NotImplemented
    return _on_stack(input, func, p, dim, eps)


@handles("sum", "mean")
def total(func, input, dim=None, keepdim=False, *, dtype=None, **rest):
    """Sum or average channels, or whole images."""
    mean = func.__name__ == "mean"
    dim = rest.pop("axis", dim)
    if rest or dtype is not None or not isinstance(input, T.StackTensor):
        return NotImplemented
    table, _, _, hw, _ = T.facts(input)
    over = None if dim is None else _normal(dim, T.dims(input))
    if not _is_of_images(input, over):
        return reduce_channels(func, input, dim, keepdim)
    if len(over) == 2:
        return global_mean(input, hw, keepdim, not mean)
    pixels = plainly(global_mean(input, hw, True, not mean))
    return table.compute(func, pixels, over, keepdim)


def _is_of_images(x, over):
    """Whether a reduction over dimensions, or None, is one over whole images, each by itself."""
    if over is None or not x.is_floating_point() or 0 in over or len(set(over)) < len(over):
        return False
    return set(T.facts(x)[3]) <= set(over)


@handles("var", "std", "var_mean", "std_mean")
def variance(func, input, dim=None, *args, **kwargs):
    """Find the variance of channels, or of whole images, whose inactive pixels are 0."""
    given = dict(zip(("unbiased", "keepdim"), args, strict=False)) | kwargs
    over = None if dim is None else _normal(dim, T.dims(input))
    table, block, size, hw, _ = T.facts(input)
    if not _is_of_images(input, over):
        return reduce_channels(func, input, dim, *args, **kwargs)
    correction = given.get("correction")
    correction = int(given.get("unbiased", True)) if correction is None else correction
    table.reduced = table.reduced or "a variance over the image"
    call = T.value_of(input), table, block, size, hw, over, correction
    mean, result = table.compute(_variance_of_images, *call)
    if func.__name__.startswith("std"):
        result = table.compute(_root, result, input.dtype)
    results = [result, mean] if func.__name__.endswith("mean") else [result]
    for i, one in enumerate(results):
        one = table.compute(torch.Tensor.to, one, input.dtype)
        results[i] = one if given.get("keepdim") else table.compute(torch.squeeze, one, over)
    return results[0] if len(results) == 1 else tuple(results)


def _variance_of_images(value, table, block, size, hw, over, correction):
    _, mean, squares, count = _moments_of_images(value, table, block, size, hw, over)
    return mean, squares / max(count - correction, 0)


@handles(
    "max",
    "min",
    "amin",
    "argmax",
    "argmin",
    "prod",
    "logsumexp",
    "any",
    "median",
    "sort",
    "argsort",
    "topk_",
)
def reduce_channels(func, input, dim=None, *args, **kwargs):
    """Reduce dimensions of channels."""
    if isinstance(dim, torch.Tensor) and func.__name__ in ("max", "min"):  # of two tensors
        return pointwise(func, input, dim, *args, **kwargs)
    over = None if dim is None else _normal(dim, T.dims(input))
    if over is None or not over or not set(over) <= set(own_dims(input)):
        return NotImplemented
    hw, before = T.facts(input)[3], T.dims(input)
    given = (dim, *args) if args else ()  # by name alone where names follow, as sort wants it
    kwargs |= {} if args else {"dim": dim}
    (value,) = unread.harmless(func, [T.value_of(input)], *T.facts(input)[:4])
    result = T.facts(input)[0].compute(func, value, *given, **kwargs)

    def back(value):
        gone = before - value.dim()
        moved = tuple(i - sum(o < i for o in over) if gone else i for i in hw)
        return T.wrap(value, input, hw=moved)

    return tree_map(back, result)


@handles("amax")
def amax(func, input, dim=None, keepdim=False, **rest):
    """Take the maximum over channels, or over whole images where no gradient is recorded.

    Of equal numbers each has a share of the gradient, where pooling gives it to the first.
    """
    over = None if dim is None else _normal(dim, T.dims(input))
    images = is_image(input) and _is_of_images(input, over) and len(over) == 2
    if rest or not images or cuda.records(T.value_of(input)):
        return reduce_channels(func, input, dim, keepdim, **rest)
    largest = global_maximum(input)
    return largest if keepdim else T.facts(input)[0].compute(torch.flatten, largest, 1)


@handles("all")
def every(func, input, dim=None, keepdim=False, **rest):
    """Tell whether all are true: of what is boolean, all that lie in active blocks."""
    dim = rest.pop("axis", dim)
    over = None if dim is None else _normal(dim, T.dims(input))
    if over is not None and not set(over) & set(T.facts(input)[3]):
        return NotImplemented if rest else reduce_channels(func, input, dim, keepdim=keepdim)
    if rest or input.dtype != torch.bool:
        return NotImplemented
    table = T.facts(input)[0]
    untrue = T.wrap(table.compute(torch.logical_not, T.value_of(input)), input)
    given = () if dim is None else (dim, keepdim)
    untrue = T.dense(T.dispatch(torch.any, (untrue, *given), {}))
    return table.compute(torch.logical_not, untrue)


@handles("norm")
def norm(func, input, p="fro", dim=None, keepdim=False, dtype=None, **rest):
    """Take the norm over channels, or the Euclidean one over whole images."""
    p = rest.pop("ord", p)
    p = 2 if p in ("fro", None) else p
    over = None if dim is None else _normal(dim, T.dims(input))
    if rest or dtype is not None or over is None or isinstance(p, str):
        return NotImplemented
    table, _, _, hw, _ = T.facts(input)
    if p == 2 and _is_of_images(input, over):
        squares = T.wrap(table.compute(_squares, T.value_of(input)), input)
        sums = plainly(total(torch.sum, squares, over, keepdim))
        return table.compute(_root, sums, input.dtype)
    if not set(over) <= set(own_dims(input)):
        return NotImplemented
    call = torch.linalg.vector_norm, T.value_of(input), p, over, keepdim
    value = table.compute(*call)
    moved = hw if keepdim else tuple(i - sum(o < i for o in over) for i in hw)
    return T.wrap(value, input, hw=moved)


def _squares(value):
    return wide(value).square()


def _root(sums, dtype):
    """Return square roots, whose gradient at 0 is 0, as that of a norm."""
    none = sums == 0
    return torch.where(none, 0, torch.where(none, 1, sums).sqrt()).to(dtype)


alias(norm, torch.linalg.vector_norm)


def share(table):
    """Return the share of blocks that there is room for."""
    return table.rows / max(math.prod(table.grid) * table.batch, 1)
