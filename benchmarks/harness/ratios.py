"""What the ratios of a run on a CPU come to: for each kind of rival, op and variant."""

import numpy as np

from benchmarks.harness.rows import SAME_INPUTS

SAME = "PyTorch from the same inputs"
PREPARED = "PyTorch, all indices and padding made beforehand"
LOOP = "a loop over blocks in NumPy"


def _rival(ratio):
    """Return the kind of rival that a ratio is to, or None for those without a table."""
    if ratio.implementation.startswith("torch"):
        return SAME if ratio.note.startswith(SAME_INPUTS) else PREPARED
    return LOOP if ratio.implementation == "numpy loop" else None


def _fastest(ratios, rival):
    """Return, for each workload, the ratio to the fastest rival of a kind."""
    found = {}
    for ratio in ratios:
        if _rival(ratio) == rival:
            known = found.setdefault(ratio.workload, ratio)
            found[ratio.workload] = max(known, ratio, key=lambda r: r.ratio)
    return list(found.values())


def summary(ratios):
    """Return {(rival, op, variant): (workloads at 1 or below, workloads, median, the worst)}."""
    found = {}
    for rival in (SAME, PREPARED, LOOP):
        for ratio in _fastest(ratios, rival):
            found.setdefault((rival, ratio.op, ratio.variant), []).append(ratio)
    return {key: _numbers(group) for key, group in found.items()}


def _numbers(group):
    values = [ratio.ratio for ratio in group]
    worst = max(group, key=lambda ratio: ratio.ratio)
    return sum(value <= 1 for value in values), len(values), float(np.median(values)), worst


def slower(ratios):
    """Return the workloads where PyTorch is faster from the same inputs."""
    return [ratio for ratio in _fastest(ratios, SAME) if ratio.ratio > 1]
