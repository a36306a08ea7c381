"""copy_image: what a result shows where no block is active is a copy of another image."""


from . import launch as kernels
from .arrays import empty, is_cupy
from .launch import THREADS
from .operator import Operator, Plan

_VECTOR = 16  # bytes
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
    COPY_IMAGE.plan_for((array, out), ()).run(array, out)
    return out


def _infer(specs, options):
    """Return the spec of the copy."""
    return (specs[0].new(specs[0].shape),)


def _plan(specs, options):
    """Return the plan of a copy on a GPU."""
    array, out = specs
    whole = array.nbytes % _VECTOR == array.alignment == out.alignment == 0
    if array.nbytes < _LEAST or not whole:
        return Plan(_infer(specs, options), _copy_by_driver)
    launch = _copy_image_cuda(array.nbytes)
    return Plan(_infer(specs, options), launch, launch, operands=(0, 1))


def _copy_by_driver(array, out):
    out.data.copy_from_device_async(array.data, array.nbytes)


def _copy_image_cuda(nbytes):
    """Prepare one launch; see copy_image.cu."""
    count = nbytes // _VECTOR
    return kernels.prepare(
        "core/copy_image", "copy_image", (f"Bytes<{_VECTOR}>::type",), -(-count // THREADS),
        THREADS, 2, (count,), dependent=True,
    )  # fmt: skip


COPY_IMAGE = Operator(
    "copy_image", arrays=("array", "out"), options=(), infer=_infer, plan=_plan, linear=("array",)
)
