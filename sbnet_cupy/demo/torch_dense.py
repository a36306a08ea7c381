"""The dense computation by PyTorch, timed beside this library's own where PyTorch is installed.

The image and the weights are those of the demo, as tensors on the same device, in both layouts:
NCHW and channels_last. float32 is IEEE, and cuDNN may choose its algorithm by measuring.
"""

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from ..core.arrays import is_cupy, namespace
from .interrupts import held_back

NCHW, CHANNELS_LAST = "NCHW", "channels_last"


@dataclass(frozen=True)
class TorchDense:
    """A computation on an image that PyTorch holds in several layouts."""

    name: str
    launches: dict[str, Callable]  # by layout; each returns a tensor
    to_native: Callable  # brings a result back as an array [N, H, W, K] of our library
    settings: Callable  # returns the context to run in


def convolution(image, kernels):
    """Return the SAME convolution of an image [N, H, W, C] with HWIO kernels, or None."""
    return _prepared(image, [kernels], _convolve)


def residual_unit(image, weights):
    """Return the residual unit of BottleneckWeights on an image [N, H, W, C], or None."""
    kernels = (weights.w1, weights.w2, weights.w3)
    scales = (weights.scale1, weights.scale2, weights.scale3)
    shifts = (weights.shift1, weights.shift2, weights.shift3)
    return _prepared(image, [*kernels, *scales, *shifts], _unit)


def _prepared(image, parameters, function):
    """Return ``function(torch, x, *parameters)`` as a TorchDense; None without PyTorch."""
    torch = import_torch(image)
    if torch is None:
        return None
    xp = namespace(image)
    x = torch.from_dlpack(xp.array(image)).permute(0, 3, 1, 2)
    parameters = [_tensor(torch, xp.array(p)) for p in parameters]
    launches = {}
    for name, form in ((NCHW, torch.contiguous_format), (CHANNELS_LAST, torch.channels_last)):
        arranged = [p.contiguous(memory_format=form) for p in (x, *parameters)]
        launches[name] = lambda tensors=arranged: function(torch, *tensors)

    return TorchDense(
        name=f"PyTorch {torch.__version__.partition('+')[0]}",
        launches=launches,
        to_native=lambda result: xp.from_dlpack(result.permute(0, 2, 3, 1)),
        settings=lambda: _settings(torch),
    )


def import_torch(image):
    """Return PyTorch if it is installed and can compute where ``image`` is, else None."""
    try:
        with held_back(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own, at import
            import torch
    except (ImportError, OSError):  # OSError: one of its libraries cannot be loaded
        return None
    return torch if not is_cupy(image) or torch.cuda.is_available() else None


@contextlib.contextmanager
def _settings(torch):
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.allow_tf32
    cudnn.benchmark, cudnn.allow_tf32 = True, False
    try:
        with torch.inference_mode():
            yield
    finally:
        cudnn.benchmark, cudnn.allow_tf32 = before


def _tensor(torch, array):
    """Return HWIO kernels as OIHW, and values per channel as [1, C, 1, 1]."""
    tensor = torch.from_dlpack(array)
    return tensor.permute(3, 2, 0, 1) if tensor.ndim == 4 else tensor.reshape(1, -1, 1, 1)


def _convolve(torch, x, w):
    return torch.nn.functional.conv2d(x, w, padding=w.shape[2] // 2)


def _unit(torch, x, *parameters):
    kernels, scales, shifts = (parameters[i : i + 3] for i in (0, 3, 6))
    y = x
    for w, scale, shift in zip(kernels, scales, shifts, strict=True):
        y = _convolve(torch, torch.addcmul(shift, y, scale).relu_(), w)
    return x + y
