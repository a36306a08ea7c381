"""copy_image: what a result shows where no block is active is a copy of another image."""

from . import launch as kernels
from .arrays import address, device_of, empty, is_cupy
from .launch import THREADS
from .plans import Plans

_VECTOR = 16  # bytes
_PLANS = Plans()
_LEAST = 1 << 20  # bytes; less, the driver copies in less time


def copy_image(array, out=None):
    """Copy a contiguous array, into ``out`` of its shape and dtype if given; return the copy.

    The two share no memory. Not by assignment: CuPy's moves an element a thread, and halves at a
    fifth of the bandwidth. See cuda_src/core/copy_image.cu.

    Examples
    --------
    >>> import numpy as np
    >>> copy_image(np.arange(3))
    array([0, 1, 2])
    """
    if out is None:
        out = empty(array.shape, array.dtype, array)
    if not is_cupy(array):
        out[...] = array
        return out
    launch = launch_of_copy(device_of(out), array.nbytes, address(array) | address(out))
    if launch is None:
        out.data.copy_from_device_async(array.data, array.nbytes)
    else:
        launch(array, out)
    return out


def launch_of_copy(device, nbytes, addresses):
    """Return the launch that copies so many bytes, or None: the driver had better copy them.

    It takes the source and the copy. ``addresses`` is the bitwise or of both. ``device`` is the
    current one.
    """
    if nbytes < _LEAST or nbytes % _VECTOR or addresses % _VECTOR:
        return None
    launch = _PLANS.get((device, nbytes))
    if launch is None:
        count = nbytes // _VECTOR
        launch = kernels.prepare(
            "core/copy_image", "copy_image", (f"Bytes<{_VECTOR}>::type",), -(-count // THREADS),
            THREADS,
            2, (count,), dependent=True,
        )  # fmt: skip
        _PLANS.keep((device, nbytes), launch)
    return launch
