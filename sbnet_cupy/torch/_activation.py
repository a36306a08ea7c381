"""The activations of the operators in torch's terms, with gradients that can be differentiated."""

import torch


def wide(tensor):
    """Return a tensor in the dtype to compute in: float64 as it is, all others float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


def activate(z, name):
    """Return the activation of a tensor; None is the identity."""
    if name is None:
        return z
    return {"relu": torch.relu, "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}[
        name
    ](z)


def activation_backward(grad, z, name):
    """Return the gradient at z of ``activate(z, name)``; the derivative of relu at 0 is 0."""
    if name == "relu":
        return torch.where(z > 0, grad, 0)
    if name == "silu":
        s = torch.sigmoid(z)  # aten.silu_backward cannot be differentiated again
        return grad * (s * (1 + z * (1 - s)))
    if name == "gelu":
        return torch.ops.aten.gelu_backward(grad, z)
    return grad
