"""Whether operations at sites use their own CUDA kernels, or array operations.

The kernels have run on a CPU only, so that they are off: set the environment variable
``SBNET_SITE_KERNELS=1`` before the first call to use them for CuPy arrays.
"""

import functools
import os

from ..core.arrays import is_cupy
from ..core.spec import ArraySpec


def by_kernels(array):
    """Whether an operation on such an array, or on one of such a spec, uses kernels."""
    on_gpu = array.on_gpu if isinstance(array, ArraySpec) else is_cupy(array)
    return on_gpu and _requested()


@functools.cache
def _requested():
    return os.environ.get("SBNET_SITE_KERNELS") == "1"
