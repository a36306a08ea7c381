"""sample_sum, sample_max and sample_argmax: the rows of each sample reduced to one.

Kernels: cuda_src/submanifold/sample_pool.cu, for CuPy arrays.
"""

import itertools

import numpy as np

from ..core import launch as kernels
from ..core.arrays import compute_dtype, empty, vector_bytes, whole_pieces
from ..core.checks import check_array, check_contiguous, check_float, check_result
from ..core.compile import cpp_name
from ..core.graph_memory import memory_of_graphs
from ..core.operator import Operator, Plan
from ..dense.conv2d import check_choice
from .site_kernels import by_kernels, lanes_of

_FILE = "submanifold/sample_pool"
_THREADS = 256  # of a thread block, which takes a part
_EACH = 4  # rows of a part that each of its threads takes at least
_PARTS = 264  # at most: two for each multiprocessor of a large GPU
_RESULTS = 8192  # of parts and samples, each with a row of channels


def _infer_sum(specs, options):
    check_choice("reduce", options[1], ("sum", "mean"))
    return _infer(specs, options)


def _infer_argmax(specs, options):
    sample, features, out = specs
    return _infer((features, sample, out), options, np.int32)


def _infer(specs, options, dtype=None):
    features, sample, out = specs
    check_array("features", features, ndim=2)
    check_float("features", features.dtype)
    check_array("sample", sample, shape=features.shape[:1], like=features)
    result = features.new((options[0], features.shape[1]), dtype)
    check_result(out, result)
    return (result,)


def _plan_sum(specs, options):
    results, (batch, reduce) = _infer_sum(specs, options), options
    if by_kernels(specs[0]):
        return _plan_kernels(specs, results, batch, mean=reduce == "mean")

    def run(features, sample, out):
        wide = compute_dtype(features.dtype)
        with np.errstate(all="ignore"):
            for into, rows in zip(out, _rows_of_samples(sample, batch), strict=True):
                values = features[rows].astype(wide, copy=False)
                total = values.sum(axis=0)
                into[...] = total / wide.type(max(len(values), 1)) if reduce == "mean" else total

    return Plan(results, run)


def _plan_max(specs, options):
    results, (batch,) = _infer(specs, options), options
    if by_kernels(specs[0]):
        return _plan_kernels(specs, results, batch, largest=True)

    def run(features, sample, out):
        for into, rows in zip(out, _rows_of_samples(sample, batch), strict=True):
            values = features[rows]
            # Not the maximum, which may be 0 or -0 where both are there: that of the first row.
            into[...] = _at(values, values.argmax(axis=0)) if len(values) else 0

    return Plan(results, run)


def _plan_argmax(specs, options):
    results, (batch,) = _infer_argmax(specs, options), options
    sample, features, out = specs
    if by_kernels(features):
        return _plan_kernels((features, sample, out), results, batch, (1, 0, 2), largest=True)

    def run(sample, features, out):
        out.fill(-1)
        for into, rows in zip(out, _rows_of_samples(sample, batch), strict=True):
            values = features[rows]
            if len(values):  # of NaN the first, too
                first = values.argmax(axis=0)
                into[...] = first + rows.start if isinstance(rows, slice) else rows[first]

    return Plan(results, run)


def _at(values, rows):
    """Return the number of each column that is in a row."""
    return np.take_along_axis(values, rows[None], axis=0)[0]


def _plan_kernels(specs, results, batch, order=(0, 1, 2), *, largest=False, mean=False):
    """Return the plan of a call by kernels; ``order`` has the places of the specs' arrays."""
    features, sample, _ = specs
    for name, spec in (("features", features), ("sample", sample)):
        check_contiguous(name, spec)
    (result,), (n, channels) = results, features.shape
    if not result.size:
        return Plan(results, lambda *arrays: None)
    row = channels * features.dtype.itemsize
    vector = vector_bytes(row, features.alignment)
    width = row // vector
    lanes = lanes_of(width)
    parts = _parts(n, batch, lanes)
    element = cpp_name(features.dtype, "features")
    number = "int" if result.dtype == np.int32 else element
    sizes = n, batch, parts, -(-n // max(parts, 1)), width, lanes
    find = kernels.prepare(
        _FILE, "pool_parts", (element, f"Bytes<{vector}>::type", largest),
        (parts, -(-width // lanes)), _THREADS, 3, sizes, dependent=True,
    )  # fmt: skip
    put_together = kernels.prepare(
        _FILE, "pool_samples", (element, largest, number), (batch, -(-channels // 32)), 512, 2,
        (batch, parts, channels, int(mean)), dependent=True,
    )  # fmt: skip
    # Of each part and sample a number for each channel, with its row if it is the largest, and how
    # many rows there are.
    each = compute_dtype(features.dtype).itemsize * (2 if largest else 1)
    nbytes = parts * batch * (channels * each + 4)
    launch = kernels.Series((find, (0, 1, 3)), (put_together, (3, 2)))

    def run(*arrays):
        features, sample, out = (arrays[place] for place in order)
        with memory_of_graphs(features):
            launch(features, sample, out, empty((nbytes,), np.uint8, features))

    return Plan(results, run, launch, operands=(*order, 3), scratch=whole_pieces(nbytes))


def _parts(rows, batch, lanes):
    """Return in how many ranges the rows are reduced first, with ``lanes`` threads on a row."""
    least = _EACH * (_THREADS // lanes)
    return min(-(-rows // least), _PARTS, max(_RESULTS // batch, 1))


def _rows_of_samples(sample, batch):
    """Yield the rows of each sample, in their order: a slice of them, or an array, on a CPU.

    So all samples together read each row once.
    """
    place = np.where((sample >= 0) & (sample < batch), sample, batch)  # those of none come last
    order = None
    if (place[1:] < place[:-1]).any():
        order = place.argsort(kind="stable")
        place = place[order]
    ends = np.searchsorted(place, np.arange(batch), side="right").tolist()
    for start, end in itertools.pairwise([0, *ends]):
        yield slice(start, end) if order is None else order[start:end]


# Rows whose sample is -1 belong to none.
SAMPLE_SUM = Operator(
    "sample_sum",
    arrays=("features", "sample", "out"),
    options=("batch", "reduce"),
    infer=_infer_sum,
    plan=_plan_sum,
    linear=("features",),
)

SAMPLE_MAX = Operator(
    "sample_max",
    arrays=("features", "sample", "out"),
    options=("batch",),
    infer=_infer,
    plan=_plan_max,
)

# The row of the largest number. Results have the dtype of the first array.
SAMPLE_ARGMAX = Operator(
    "sample_argmax",
    arrays=("sample", "features", "out"),
    options=("batch",),
    infer=_infer_argmax,
    plan=_plan_argmax,
)
