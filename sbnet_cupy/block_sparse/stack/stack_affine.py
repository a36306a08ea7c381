"""A scale and a shift of each channel of a stack, a sum and an activation, by one kernel.

For what runs networks on a stack. Kernel: cuda_src/block_sparse/stack/stack_affine.cu

    affine = StackAffine(...)                         sizes
    run = prepare_stack_affine(affine)                keep it: it costs more than a call
    run(x, scale, shift, residual, slopes, bin_counts, active_block_indices, out, rounded)

x, residual and out are stacks, as in stack_launch.py, of which the last two may have a wider dtype;
scale and shift are ``[C]``, or ``[N, C]`` of each image; slopes, of a PReLU, are float32 ``[C]``;
rounded is the result in one more dtype. All but x and out may be None. Rows of results past the
count are not written, and pixels outside their image may hold anything. x, residual and out may
be some channels of other stacks: ``part_of``, ``added_part_of`` and ``out_part_of``.
"""

import math
from typing import NamedTuple

from ...core import launch as kernels
from . import channel_vectors

PRELU = 8  # as in stack_affine.cu: what is below 0 times the slope of its channel


class StackAffine(NamedTuple):
    """What is computed: ``activation(x * scale + shift + residual)``."""

    element: str  # C++ type of x: Half, BFloat16 or float
    element_bytes: int
    scale_element: str  # of scale and shift: that, or float
    residual_element: str  # likewise
    out_element: str  # likewise
    rounded_element: str  # any of the three
    rows: int  # of the stacks: their capacity
    images: int
    block: tuple[int, int]
    channels: int
    per_image: bool
    activation: int  # as in activation.cuh, or PRELU
    alignment: int = 16  # bytes of x that are as many elements as all addresses are multiples of
    part_of: int | None = None  # channels of the stack of which x is a part, if it is one
    added_part_of: int | None = None  # those of which the residual is a part
    out_part_of: int | None = None  # those of which y is a part

    @property
    def pitches(self):
        """Channels from a pixel to the next, of x, of the residual and of y."""
        parts = self.part_of, self.added_part_of, self.out_part_of
        return tuple(part or self.channels for part in parts)

    vector = channel_vectors.elements  # channels of a thread


def prepare_stack_affine(affine, settled=False):
    """Return the launch; ``settled`` promises that no kernel that still runs writes the count.

    It may write all else, but the list of blocks where there are values for each image.
    """
    vectors = affine.rows * math.prod(affine.block) * affine.channels // affine.vector
    return kernels.prepare(
        "block_sparse/stack/stack_affine",
        "stack_affine",
        (
            affine.element, affine.scale_element, affine.residual_element, affine.out_element,
            affine.rounded_element, affine.vector, affine.per_image, affine.activation,
            affine.pitches != (affine.channels,) * 3,
        ),
        -(-vectors // kernels.THREADS),
        kernels.THREADS,
        9,
        (
            affine.rows, affine.images, math.prod(affine.block), affine.channels, int(settled),
            *affine.pitches,
        ),
        persistent=True,
        dependent=True,
    )  # fmt: skip
