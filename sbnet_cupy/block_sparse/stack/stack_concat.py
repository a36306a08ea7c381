"""Stacks, or channels of them, side by side in the channels of one, by a CUDA kernel.

Some may be unfolded or enlarged.

``y[m, i, j, first_k + c] = x_k[m, i, j, c]`` with ``first_k`` the channels ahead of stack k; or, of
an unfolded stack, ``x_k[m, i // f_h, j // f_w, (i % f_h * f_w + j % f_w) * C_k + c]``, whose
channels become pixels; or, of an enlarged one, the nearest: ``x_k[m, i // f_h, j // f_w, c]``.
Kernel: cuda_src/block_sparse/stack/stack_concat.cu

    run = prepare_stack_concat(rows, block, channels, itemsize, unfolded, enlarged, factors)
    run(*inputs, bin_counts, out)                     a stack each
"""

import math

from ...core import launch as kernels
from ...core.arrays import vector_bytes

MOST_INPUTS = 8
_LARGEST = 1 << 15  # pixels of a block, and vectors of a pixel, so that divisions are exact


def side_by_side(channels):
    """Return the first channel of each stack in the one that holds them in turn."""
    return [sum(channels[:k]) for k in range(len(channels))]


def prepare_stack_concat(
    rows, block, channels, itemsize, unfolded=(), enlarged=(), factors=(1, 1), pitches=None,
    alignment=16, clear_rows=True, part_of=None,
    firsts=None,
):  # fmt: skip
    """Return the launch that joins stacks, or None where there is none for such sizes.

    Parameters
    ----------
    rows : int
        Capacity of the stacks.
    block : (int, int)
        Pixels of a block of the result.
    channels : sequence of int
        Channels that each stack has in the result.
    itemsize : int
        Bytes of an element.
    unfolded : sequence of int
        Which stacks have ``factors[0] * factors[1]`` times as many channels, ordered by pixel.
    enlarged : sequence of int
        Of which other stacks each pixel becomes ``factors[0]`` by ``factors[1]``.
    factors : (int, int)
        How many times larger than theirs the blocks of the result are.
    pitches : sequence of int, optional
        How many elements a pixel lies behind the one before: more than its channels where a stack
        is some channels of another, which is not unfolded. Default: the channels.
    alignment : int
        The addresses of all stacks are multiples of so many bytes.
    clear_rows : bool
        Whether rows of the result past the count become 0; not of a part.
    part_of : int, optional
        The channels of the stack of which the result is some channels. Default: it is whole.
    firsts : sequence of int, optional
        The first channel of each stack in that; the others are not written. Default: side by side.
    """
    if clear_rows and part_of is not None:
        raise ValueError("clear_rows must be False where the result is a part of another stack")
    pitches = channels if pitches is None else pitches
    pitch_out = part_of or sum(channels)
    firsts = side_by_side(channels) if firsts is None else firsts
    all_channels = *channels, *pitches, *firsts, pitch_out
    width = vector_bytes(alignment, *(c * itemsize for c in all_channels))
    vectors, steps, places = (
        [c * itemsize // width for c in each] for each in (channels, pitches, firsts)
    )
    if len(channels) > MOST_INPUTS or max(math.prod(block), sum(vectors)) > _LARGEST:
        return None
    empty = [0] * (MOST_INPUTS - len(vectors))
    run = kernels.prepare(
        "block_sparse/stack/stack_concat",
        "stack_concat",
        (f"Bytes<{width}>::type", len(channels)),
        -(-rows * math.prod(block) * sum(vectors) // (4 * kernels.THREADS)),
        kernels.THREADS,
        MOST_INPUTS + 2,
        (
            rows, *block, *vectors, *empty, *steps, *empty, *places, *empty,
            pitch_out * itemsize // width,
            *(sum(1 << k for k in which) for which in (unfolded, enlarged)), *factors,
            int(clear_rows),
        ),
        persistent=True,
        dependent=True,
    )  # fmt: skip
    inputs = len(channels)
    return kernels.Series((run, (*range(inputs), *[None] * len(empty), inputs, inputs + 1)))
