"""Whether operations at sites use their own CUDA kernels, or array operations."""

from ..core.arrays import is_cupy
from ..core.spec import ArraySpec


def by_kernels(array):
    """Whether an operation on such an array, or on one of such a spec, uses kernels."""
    return array.on_gpu if isinstance(array, ArraySpec) else is_cupy(array)
