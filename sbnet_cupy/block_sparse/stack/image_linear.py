"""A product of the channels of each of few images with a matrix, by one kernel.

For what runs networks on a stack: squeeze and excitation is two of them. Kernel:
cuda_src/block_sparse/stack/image_linear.cu

    linear = ImageLinear(...)                         sizes
    run = prepare_image_linear(linear)                keep it: it costs more than a call
    run(x, w, bias, out)

x is ``[N, C]``, w ``[O, C]``, out ``[N, O]`` and bias ``[O]``, or None; all C-contiguous and of one
dtype. Products are summed in float32, in an order that the sizes decide, and rounded once.
"""

from typing import NamedTuple

from ...core import launch as kernels
from . import channel_vectors

_WARPS = 4  # of a thread block, as in image_linear.cu


class ImageLinear(NamedTuple):
    """The sizes of ``activation(x @ w.T + bias)``."""

    element: str  # C++ type: Half, BFloat16 or float
    element_bytes: int
    images: int
    channels: int
    channels_out: int
    activation: int = 0  # as in activation.cuh
    alignment: int = 16  # bytes of which the addresses of x and w are multiples

    vector = channel_vectors.elements  # channels that a thread loads at once


def prepare_image_linear(linear, settled=False):
    """Return the launch; ``settled`` promises that no kernel that still runs writes w or bias."""
    return kernels.prepare(
        "block_sparse/stack/image_linear",
        "image_linear",
        (linear.element, linear.vector, linear.activation),
        -(-linear.images * linear.channels_out // _WARPS),
        32 * _WARPS,
        4,
        (linear.images, linear.channels, linear.channels_out, int(settled)),
        dependent=True,
    )
