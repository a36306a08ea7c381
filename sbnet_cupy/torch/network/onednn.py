"""Convolution and products on a CPU with weights that oneDNN laid out once.

PyTorch's own convolution lays out its weights in each call, which for few blocks takes as long as
the products. These are the operators that torch.compile uses for frozen weights; where a build of
PyTorch lacks them, :func:`conv` returns None, and :func:`multiplies` is False.
"""

import torch

from .epilogue import finish

_NAMES = {
    None: "none", "relu": "relu", "silu": "swish", "hardswish": "hardswish", "sigmoid": "sigmoid",
    "tanh": "tanh", "hardsigmoid": "hardsigmoid", "gelu": "gelu",
}  # fmt: skip


def _are_there(*names):
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in names
    )


_AVAILABLE = _are_there("_convolution_pointwise", "_reorder_convolution_weight")
_MULTIPLIES = _are_there("_linear_pointwise", "_reorder_linear_weight")


def product(x, weight, bias, residual, activation):
    """Multiply each pixel of channels_last pictures by the weights; None where that is not served.

    ``x`` holds for each pixel what the kernel's pixels have: ``kh * kw * Cin`` channels. A
    convolution would do; but how its weights lie depends on the number of pixels, and for another
    number they are laid out anew in each call, which takes many times as long as the product.
    """
    if not (_MULTIPLIES and getattr(weight, "is_kept", False) and _serves(x, weight)):
        return None
    kept = vars(weight).setdefault("packed_for", {})
    if "matrix" not in kept:
        matrix = weight.permute(0, 2, 3, 1).reshape(weight.shape[0], -1)
        kept["matrix"] = torch.ops.mkldnn._reorder_linear_weight(matrix, None)
    (n, _, h, w), k = x.shape, weight.shape[0]
    rows = x.permute(0, 2, 3, 1).reshape(n * h * w, -1)
    if residual is not None:
        residual = residual.permute(0, 2, 3, 1).reshape(n * h * w, k)
    y = linear(rows, kept["matrix"], bias, residual, activation)
    return y.as_strided((n, k, h, w), (h * w * k, 1, w * k, k))


def conv(x, weight, bias, stride, padding, dilation, groups, residual, activation):
    """Convolve; return None where oneDNN's operators do not serve the call."""
    if not (_AVAILABLE and getattr(weight, "is_kept", False) and _serves(x, weight)):
        return None
    if tuple(weight.shape[2:]) == (1, 1) and groups == 1 and not any(padding):
        return product(x[:, :, :: stride[0], :: stride[1]], weight, bias, residual, activation)
    options = list(padding), list(stride), list(dilation), groups
    packed = _packed(x, weight, options)
    name = _NAMES.get(activation)
    if residual is not None and activation in (None, "relu"):
        run = torch.ops.mkldnn._convolution_pointwise.binary
        last = None if activation is None else "relu"
        return run(x, residual, packed, bias, *options, "add", None, last, [], None)
    run = torch.ops.mkldnn._convolution_pointwise
    if residual is None and name is not None:
        return run(x, packed, bias, *options, name, [], _algorithm(name))
    return finish(run(x, packed, bias, *options, "none", [], ""), residual, activation)


def _serves(x, weight):
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.enabled
        and min(x.shape) > 0
    )


def _algorithm(name):
    """Return how an activation is computed: gelu exactly, not by tanh."""
    return "none" if name == "gelu" else ""


def multiplies(x, weight, bias, weights):
    """Whether :func:`linear` serves a product, with weights that are kept."""
    kept = weights.keeps and isinstance(weight, torch.nn.Parameter) and not weight.is_inference()
    fits = weight.dim() == 2 and (bias is None or bias.dtype == weight.dtype)
    return _MULTIPLIES and kept and fits and _serves(x, weight)


def packed_matrix(x, weight, weights):
    """Return the weights of a product as oneDNN lays them out, kept."""
    rows = x.numel() // x.shape[-1]
    reorder = torch.ops.mkldnn._reorder_linear_weight
    return weights.packed(weight, lambda: reorder(weight.detach(), rows))


def linear(x, packed, bias, residual, activation):
    """Return ``activation(x @ weight.T + bias + residual)``, which oneDNN :func:`multiplies`."""
    name = _NAMES.get(activation) if residual is None else None
    run = torch.ops.mkldnn._linear_pointwise
    if name is not None:
        return run(x, packed, bias, name, [], _algorithm(name))
    return finish(run(x, packed, bias, "none", [], ""), residual, activation)


def _packed(x, weight, options):
    """Return the weights as oneDNN wants them for such a convolution, kept beside the weights."""
    kept = vars(weight).setdefault("packed_for", {})
    key = tuple(map(str, options))
    if key not in kept:
        kept[key] = torch.ops.mkldnn._reorder_convolution_weight(weight, *options, list(x.shape))
    return kept[key]
