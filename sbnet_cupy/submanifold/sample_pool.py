"""sample_sum and sample_argmax: the rows of each sample reduced to one."""

import itertools

import numpy as np

from ..core.arrays import compute_dtype, is_cupy, namespace
from ..core.checks import check_array, check_result
from ..core.graph_memory import memory_of_graphs
from ..core.operator import Operator, Plan


def _infer_sum(specs, options):
    features, sample, out = specs
    return _infer(features, sample, out, options, features.dtype)


def _infer_argmax(specs, options):
    sample, features, out = specs
    return _infer(features, sample, out, options, np.int32)


def _infer(features, sample, out, options, dtype):
    (batch,) = options
    check_array("features", features, ndim=2)
    check_array("sample", sample, shape=features.shape[:1], like=features)
    result = features.new((batch, features.shape[1]), dtype)
    check_result(out, result)
    return (result,)


def _plan_sum(specs, options):
    results, (batch,) = _infer_sum(specs, options), options

    def run(features, sample, out):
        xp, wide = namespace(features), compute_dtype(features.dtype)
        with memory_of_graphs(features), np.errstate(all="ignore"):
            if not is_cupy(features):
                for into, rows in zip(out, _rows_of_samples(sample, batch), strict=True):
                    into[...] = features[rows].astype(wide, copy=False).sum(axis=0)
                return
            for b, into in enumerate(out):
                mine = (sample == b)[:, None]
                values = xp.where(mine, features.astype(wide, copy=False), wide.type(0))
                into[...] = values.sum(axis=0)

    return Plan(results, run)


def _plan_argmax(specs, options):
    results, (batch,) = _infer_argmax(specs, options), options

    def run(sample, features, out):
        xp, least = namespace(features), features.dtype.type(-np.inf)
        out.fill(-1)
        with memory_of_graphs(features):
            if not is_cupy(features):
                for into, rows in zip(out, _rows_of_samples(sample, batch), strict=True):
                    values = features[rows]
                    if len(values):  # of NaN the first, too
                        first = values.argmax(axis=0)
                        into[...] = first + rows.start if isinstance(rows, slice) else rows[first]
                return
            for b, into in enumerate(out if len(features) else ()):
                mine = sample == b
                values = xp.where(mine[:, None], features, least)
                first = values.argmax(axis=0)  # of NaN the first, too
                # All -inf: the first row of the sample, not of the list.
                first = xp.where(mine[first], first, mine.argmax())
                into[...] = xp.where(mine.any(), first, -1)

    return Plan(results, run)


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
    options=("batch",),
    infer=_infer_sum,
    plan=_plan_sum,
    linear=("features",),
)

SAMPLE_ARGMAX = Operator(
    "sample_argmax",
    arrays=("sample", "features", "out"),
    options=("batch",),
    infer=_infer_argmax,
    plan=_plan_argmax,
)
