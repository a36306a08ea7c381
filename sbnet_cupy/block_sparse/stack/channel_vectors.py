"""Channels of a pixel as vectors: properties of the sizes of kernels that read stacks.

The sizes have ``channels``, ``element_bytes`` and ``alignment``, the bytes of which the addresses
of stacks are multiples; those of kernels that read or write parts of other stacks have ``pitches``,
the channels from a pixel to the next.
"""

from ...core.arrays import vector_bytes

_LANES = 8


@property
def vector(sizes):
    """Bytes of the widest access."""
    each = sizes.channels, *getattr(sizes, "pitches", ())
    return vector_bytes(sizes.alignment, *(c * sizes.element_bytes for c in each))


@property
def elements(sizes):
    """Channels of the widest access."""
    return vector.fget(sizes) // sizes.element_bytes


@property
def vectors(sizes):
    """Vectors of a pixel."""
    return sizes.channels * sizes.element_bytes // sizes.vector


@property
def lanes(sizes):
    """Threads that take a pixel together, a vector each: a power of 2."""
    return min(_LANES, 1 << max(sizes.vectors - 1, 0).bit_length())


@property
def slices(sizes):
    """Thread blocks that take a pixel together."""
    return -(-sizes.vectors // sizes.lanes)
