"""The operator sparse_res_block_bottleneck, and its stack in torch's terms for the gradient."""

from functools import partial

import torch

from ..block_sparse.block_params import BlockParams
from ..block_sparse.bottleneck.fused_bottleneck import launch_of_bottleneck
from ..block_sparse.bottleneck.res_block import sparse_res_block_bottleneck as core_bottleneck
from ..block_sparse.bottleneck.weights import BottleneckWeights
from ._activation import wide
from ._calls import LayerCalls
from ._convolution import CONVOLVE, Geometry, pairs
from ._copies import GATHER, SCATTER, read_inside
from ._launches import Launches, apart, lay, run
from ._native import check_contiguous, compute
from ._packed import packed
from ._registry import register

_WEIGHTS = ("w1", "w2", "w3", "scale1", "shift1", "scale2", "shift2", "scale3", "shift3")
_ARGUMENTS = (
    f"Tensor x, {', '.join(f'Tensor {name}' for name in _WEIGHTS)}, Tensor bin_counts, "
    "Tensor active_block_indices, SymInt[] params, int[] strides, Tensor? w_project, Tensor? base, "
    "str? precision, str method"
)
_PLAIN = (None, None, None)


def _launch_of(x, counts, indices, out, base, *weights, options):
    params, strides, is_plain, precision, method = options
    if method == "gather" or not is_plain or tuple(strides) != (1, 1):
        return None
    options = (tuple(params[2:4]), precision, None)
    return launch_of_bottleneck(x, counts, indices, out, *weights, options=options)


_UNITS = Launches(_launch_of)
CALLS = LayerCalls()


def unit_again(key, known, x, weights, counts, indices, base, out):
    """Do a call that is known; return its result, or None where it must go the whole way."""
    y = CALLS.again(key, known, x, weights, counts, indices, x if base is None else base, out)
    if y is None or not key[1]:
        return y
    params, strides, precision, method = known[3]
    rest = (params, strides, None, base, precision, method)
    return UNIT.recorded(x, *weights, counts, indices, *rest, [y])


def keep_unit(key, arguments, y):
    """Keep the launch of a call of the operator that had this result."""
    x, *weights, counts, indices, params, strides, w_project, base, precision, method = arguments
    options = (params, strides, w_project is None, precision, method)
    launch = _UNITS.find((x, counts, indices, y, base), options, weights)
    CALLS.keep(key, launch, x, y, weights, (params, strides, precision, method))


def _unit_into(x, *arguments):
    *weights, counts, indices, params, strides, w_project, base, precision, method, out = arguments
    check_contiguous("out", out)
    tensors = (x, counts, indices, out, base)
    options = (params, strides, w_project is None, precision, method)
    launch = _UNITS.find(tensors, options, weights)
    below = x if base is None else base
    if launch and apart(out, (x, counts, indices, *weights)) and lay(out, below):
        run(launch.run, x, packed(launch, *weights), counts, indices, out)
        return
    compute(
        core_bottleneck, x, x, BottleneckWeights(*weights), (counts, indices),
        BlockParams(*pairs(params)), strides=strides, w_project=w_project, base=base, out=out,
        precision=precision, method=method,
    )  # fmt: skip
    _UNITS.keep(tensors, options, weights)


def _fake(x, w1, w2, w3, *arguments):
    strides = arguments[9]
    return x.new_empty((x.shape[0], *same_size(x.shape[1:3], strides), w3.shape[3]))


def same_size(image_hw, strides):
    """Size of the output under SAME padding; sizes may be symbolic."""
    return tuple(-(-n // s) for n, s in zip(image_hw, strides, strict=True))


def _unit(*arguments):
    out = _fake(*arguments)
    _unit_into(*arguments, out)
    return out


def affine(scale, shift, z, counted):
    """Return ``z * scale + shift`` per channel."""
    return z * scale.to(z.dtype) + shift.to(z.dtype)


def unit_stack(x, kernels, norms, table, params, strides, out_hw, precision):
    """Return the stack ``conv3(a3(conv2(a2(conv1(a1(x))))))`` of the active blocks of an image.

    ``a_i`` is ``norms[i]``, then relu. A norm gets a stack in float, and which of its pixels to
    count in statistics: those in the image, each once though blocks overlap. Kernels are OIHW.
    """
    grid = (params.bsize, params.boffset, params.bstride)
    tiles = (params.bsize_out, (0, 0), params.bsize_out)
    inside = read_inside(x, table, *grid)
    shown = read_inside(x.new_empty((x.shape[0], *out_hw, 1)), table, *tiles)
    counted = inside & _own(params, x.device)

    def activated(norm, z, counted):
        return torch.relu(norm(wide(z), counted))

    z = GATHER(x, *table, *grid, False, "NHWC", *_PLAIN)
    a = torch.where(inside, activated(norms[0], z, counted), 0).to(x.dtype)
    z = CONVOLVE(a, kernels[0], (1, 1), precision)
    a = torch.where(inside, activated(norms[1], z, counted), 0).to(x.dtype)
    z = CONVOLVE(a, kernels[1], strides, precision)
    a = activated(norms[2], z, shown).to(x.dtype)
    return CONVOLVE(a, kernels[2], (1, 1), precision)


def _own(params, device):
    """Return bool ``[bh, bw, 1]``: the pixels of a block that are not its neighbours' halo."""
    rows, columns = (
        torch.arange(size, device=device).add(offset).div(step, rounding_mode="floor") == 0
        for size, offset, step in zip(params.bsize, params.boffset, params.bstride, strict=True)
    )
    return (rows[:, None] & columns)[..., None]


def shortcut_blocks(x, w_project, table, params, strides, precision):
    """Return the stack of the shortcut's values, one for each output pixel of the active blocks."""
    size = [(n - 1) * s + 1 for n, s in zip(params.bsize_out, strides, strict=True)]
    step = [n * s for n, s in zip(params.bsize_out, strides, strict=True)]
    blocks = GATHER(x, *table, size, (0, 0), step, False, "NHWC", *_PLAIN)
    return blocks if w_project is None else CONVOLVE(blocks, w_project, strides, precision)


def _setup(ctx, inputs, output):
    *tensors, ctx.params, ctx.strides, w_project, base, ctx.precision, _ = inputs
    ctx.has_base = base is not None
    ctx.save_for_backward(*tensors, w_project)


def _backward(ctx, grad):
    """Differentiate the unit made of differentiable operators, recomputed: no stack is kept."""
    *tensors, counts, indices, w_project = ctx.saved_tensors
    table, again = (counts, indices), torch.is_grad_enabled()
    params = Geometry(*pairs(ctx.params))
    tiles = (params.bsize_out, (0, 0), params.bsize_out)
    grads = [None] * 18
    if ctx.has_base and ctx.needs_input_grad[15]:
        zeros = grad.new_zeros((indices.shape[0], *params.bsize_out, grad.shape[3]))
        grads[15] = SCATTER(zeros, *table, grad, *tiles, False, False, False, "NHWC")
    places = [i for i in (*range(10), 14) if ctx.needs_input_grad[i]]
    if not places:
        return tuple(grads)
    with torch.enable_grad():
        used = [*tensors, None, None, None, None, w_project]
        used = [used[i].view_as(used[i]) if i in places else used[i] for i in range(15)]
        outputs, of_outputs = _linear_parts(ctx, params, grad, table, used)
        found = torch.autograd.grad(
            outputs, [used[i] for i in places], of_outputs, create_graph=again
        )
    for place, value in zip(places, found, strict=True):
        grads[place] = value
    return tuple(grads)


def _linear_parts(ctx, params, grad, table, used):
    """Return what the result is linear in, the stack and the shortcut, and their gradients."""
    x, *kernels, s1, b1, s2, b2, s3, b3 = used[:10]
    w_project = used[14]
    kernels = [w.permute(3, 2, 0, 1) for w in kernels]
    norms = [partial(affine, *pair) for pair in ((s1, b1), (s2, b2), (s3, b3))]
    options = (ctx.strides, ctx.precision)
    tiles, out_hw = (params.bsize_out, (0, 0), params.bsize_out), grad.shape[1:3]
    stack = unit_stack(x, kernels, norms, table, params, ctx.strides, out_hw, ctx.precision)
    of_stack = GATHER(grad, *table, *tiles, False, "NHWC", *_PLAIN)
    w_project = None if w_project is None else w_project.permute(3, 2, 0, 1)
    if ctx.has_base:
        return (stack + shortcut_blocks(x, w_project, table, params, *options),), (of_stack,)
    shortcut = x if w_project is None else CONVOLVE(x, w_project, *options)
    if not shortcut.requires_grad:
        return (stack,), (of_stack,)
    return (stack, shortcut), (of_stack, grad)


UNIT = register(
    f"sparse_res_block_bottleneck({_ARGUMENTS}) -> Tensor",
    _unit,
    _fake,
    backward=_backward,
    setup_context=_setup,
)
UNIT_INTO = register(
    f"sparse_res_block_bottleneck_into({_ARGUMENTS}, Tensor(a!) out) -> ()",
    _unit_into,
    lambda *arguments: None,
)
