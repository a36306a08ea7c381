"""What fused_conv and fused_bottleneck check alike: blocks, how many are expected, limits."""

from ..blocks import is_integer
from ..errors import ShapeError

LARGEST = 2**30  # size that a kernel counts in 32 bits
MOST_BLOCKS = 2**16 - 1  # thread blocks along an axis of a grid


def cut_blocks(bsize, size):
    """Return blocks no larger than the image, ``size``, where there is one."""
    return tuple(max(min(b, n), 1) for b, n in zip(bsize, size, strict=True))


def resolve_expected(expected, active_block_indices):
    """Return about how many blocks will be active: by default all that are listed."""
    if expected is None:
        return len(active_block_indices)
    if not is_integer(expected) or expected < 0:
        raise ShapeError(f"expected must be None or a non-negative integer, got {expected!r}")
    return expected
