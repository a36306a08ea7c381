"""The sum of two to four stacks and an activation, by one kernel; some are enlarged on the way.

For what runs networks on a stack. Kernel: cuda_src/block_sparse/stack/stack_sum.cu

    total = StackSum(...)                             sizes
    run = prepare_stack_sum(total)                    keep it: it costs more than a call
    run(*stacks, bin_counts, out)                     None in place of stacks that there are not

Each stack has the blocks of the result, or some that are smaller by whole factors, whose pixels are
repeated: the nearest ones. Sums are rounded one after the other, in the order of the stacks, and
the last one behind the activation. Rows of the result past the count are not written. Stacks and
the result may be some channels of other stacks: ``parts_of`` and ``out_part_of``.
"""

import math
from typing import NamedTuple

from ...core import launch as kernels
from . import channel_vectors

MOST_TERMS = 4
_LARGEST = 1 << 32  # pixels of a block times its longer side, so that divisions are exact


class StackSum(NamedTuple):
    """What is computed: ``activation(x_0 + x_1 + ...)``."""

    element: str  # C++ type of all stacks: Half, BFloat16 or float
    element_bytes: int
    rows: int  # of the stacks: their capacity
    block: tuple[int, int]  # of the result
    channels: int
    factors: tuple[tuple[int, int], ...]  # of each stack: how many times larger its blocks become
    activation: int  # as in activation.cuh
    alignment: int = 16  # bytes of which all addresses are multiples
    parts_of: tuple[int | None, ...] | None = None  # channels of the stacks of which these are part
    out_part_of: int | None = None  # those of which the result is a part

    @property
    def pitches(self):
        """Channels from a pixel to the next, of each stack and of the result."""
        parts = *(self.parts_of or (None,) * len(self.factors)), self.out_part_of
        return tuple(part or self.channels for part in parts)

    vector = channel_vectors.elements  # channels of a thread


def sums(block):
    """Whether the kernel has results of such blocks."""
    return math.prod(block) * max(block) < _LARGEST


def prepare_stack_sum(total, settled=False):
    """Return the launch; ``settled`` promises that no kernel that still runs writes the count."""
    terms, (*pitches, pitch_out) = len(total.factors), total.pitches
    assert 2 <= terms <= MOST_TERMS and sums(total.block), "no kernel has so many, or such blocks"
    others = MOST_TERMS - terms
    down, across = zip(*total.factors, *[(1, 1)] * others, strict=True)
    vectors = total.rows * math.prod(total.block) * total.channels // total.vector
    return kernels.prepare(
        "block_sparse/stack/stack_sum",
        "stack_sum",
        (total.element, total.vector, terms, total.activation),
        -(-vectors // kernels.THREADS),
        kernels.THREADS,
        MOST_TERMS + 2,
        (
            total.rows, *total.block, total.channels, int(settled), *down, *across, *pitches,
            *[0] * others, pitch_out,
        ),
        persistent=True,
        dependent=True,
    )  # fmt: skip
