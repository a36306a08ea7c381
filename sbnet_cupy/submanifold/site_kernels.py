"""Whether operations at sites use their own CUDA kernels, or array operations.

The kernels have run on a CPU only, so that they are off: set the environment variable
``SBNET_SITE_KERNELS=1`` before the first call to use them for CuPy arrays.
"""

import functools
import os

from ..core.arrays import is_cupy


def by_kernels(array):
    """Whether an operation on an array of this kind uses kernels."""
    return is_cupy(array) and _requested()


@functools.cache
def _requested():
    return os.environ.get("SBNET_SITE_KERNELS") == "1"
