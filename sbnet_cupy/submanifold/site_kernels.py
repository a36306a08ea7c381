"""Whether operations at sites use their own CUDA kernels, and how threads share rows there."""

from ..core.arrays import is_cupy
from ..core.spec import ArraySpec

_WARP = 32


def lanes_of(width):
    """Return how many threads of a warp stand side by side on a row of so many vectors."""
    return min(_WARP, 1 << max(width - 1, 0).bit_length())


def by_kernels(array):
    """Whether an operation on such an array, or on one of such a spec, uses kernels."""
    return array.on_gpu if isinstance(array, ArraySpec) else is_cupy(array)
