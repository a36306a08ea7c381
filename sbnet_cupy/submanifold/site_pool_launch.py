"""Launches of the kernels that pool: cuda_src/submanifold/site_pool.cu."""

import numpy as np

from ..core import launch as kernels
from ..core.arrays import vector_bytes
from ..core.checks import check_contiguous
from ..core.compile import cpp_name
from .site_kernels import by_kernels, lanes_of

COUNTS = "one", "volume", "active"  # what sums are divided by, as site_pool.cu numbers them
_FILE = "submanifold/site_pool"
_THREADS = 256


def has_kernel(features, *tables):
    """Whether there is a kernel for features and tables of such specs."""
    return by_kernels(features) and all(table.dtype == np.int32 for table in tables)


def prepare_pool(features, rows, valid, out, how, floor=None):
    """Prepare the launch that takes features, rows, valid and out, of these specs.

    ``how`` is "largest", of which ``floor`` is the least or None, or one of COUNTS.
    """
    _check(features=features, rows=rows, valid=valid, out=out)
    largest = how == "largest"
    number = int(floor is not None) if largest else COUNTS.index(how)
    vector, width, lanes = _vectors(features, out)
    template = cpp_name(features.dtype, "features"), f"Bytes<{vector}>::type", largest
    taps, m = rows.shape
    sizes = features.shape[0], m, taps, width, lanes, number
    return kernels.prepare(
        _FILE, "pool_rows", template, _blocks(m, lanes), _THREADS, 4, (*sizes, float(floor or 0)),
        dependent=True,
    )  # fmt: skip


def prepare_max_grad(grad_y, features, y, rows, back, out, ties):
    """Prepare the launch that takes arrays of these specs, and writes the gradient of a maximum."""
    _check(grad_y=grad_y, features=features, y=y, rows=rows, back=back, out=out)
    vector, width, lanes = _vectors(features, grad_y, y, out)
    template = cpp_name(features.dtype, "features"), f"Bytes<{vector}>::type", ties == "first"
    (n, _), (taps, m) = features.shape, rows.shape
    return kernels.prepare(
        _FILE, "pool_max_grad", template, _blocks(n, lanes), _THREADS, 6,
        (n, m, taps, width, lanes), dependent=True,
    )  # fmt: skip


def _check(**specs):
    for name, spec in specs.items():
        if spec is not None:
            check_contiguous(name, spec)


def _vectors(*specs):
    """Return the bytes of a vector, the vectors of a row, and how many threads take a row."""
    row = specs[0].shape[1] * specs[0].dtype.itemsize
    vector = vector_bytes(row, *(spec.alignment for spec in specs if spec is not None))
    width = row // vector
    return vector, width, lanes_of(width)


def _blocks(rows, lanes):
    return -(-rows // (_THREADS // lanes))
