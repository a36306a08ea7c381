"""The layer norm of the channels of each pixel of a stack, by one kernel.

For what runs networks on a stack. Kernel: cuda_src/block_sparse/stack/stack_layer_norm.cu

    norm = StackLayerNorm(...)                        sizes
    run = prepare_stack_layer_norm(norm)              None where a pixel has too many channels
    run(x, scale, shift, bin_counts, out)

x and out are stacks, as in stack_launch.py, of which out may have a wider dtype; scale and shift
are ``[C]``, or None. Rows of out past the count are not written, and pixels outside their image may
hold anything.
"""

import math
from typing import NamedTuple

from ...core import launch as kernels
from . import channel_vectors

_THREADS = 128
_MOST = 4  # vectors of a thread


class StackLayerNorm(NamedTuple):
    """Sizes, and what is added to the variance."""

    element: str  # C++ type of x: Half, BFloat16 or float
    element_bytes: int
    scale_element: str  # of scale and shift: that, or float
    out_element: str  # likewise
    rows: int  # of the stacks: their capacity
    block: tuple[int, int]
    channels: int
    eps: float
    alignment: int = 16  # bytes of which all addresses are multiples

    vector = channel_vectors.elements  # channels that a thread loads at once

    @property
    def lanes(self):
        """Threads of a pixel: a power of 2."""
        return min(32, 1 << (self.channels // self.vector - 1).bit_length())

    @property
    def each(self):
        """Vectors of a thread."""
        return -(-self.channels // (self.vector * self.lanes))

    @property
    def fits(self):
        """Whether threads can hold a pixel's channels."""
        return self.each <= _MOST


def prepare_stack_layer_norm(norm, settled=False):
    """Return the launch, or None.

    ``settled`` promises that no kernel that still runs writes the count, scale or shift.
    """
    if not norm.fits:
        return None
    return kernels.prepare(
        "block_sparse/stack/stack_layer_norm",
        "stack_layer_norm",
        (
            norm.element, norm.scale_element, norm.out_element, norm.vector, norm.lanes, norm.each,
        ),
        -(-norm.rows * math.prod(norm.block) * norm.lanes // _THREADS),
        _THREADS,
        5,
        (norm.rows, math.prod(norm.block), norm.channels, float(norm.eps), int(settled)),
        persistent=True,
        dependent=True,
    )  # fmt: skip
