"""The options of a SparseModel, checked when they are set."""

import math
from numbers import Real

import torch

from ...block_sparse.checks import check_capacity
from ...core.sizes import pair
from ...errors import DTypeError


def check_outside(outside):
    """Return what is wanted outside active blocks, or raise."""
    if isinstance(outside, torch.Tensor):
        if outside.is_complex() or outside.layout != torch.strided:
            raise DTypeError(
                "outside must be of real numbers and dense, got a tensor of "
                f"{outside.dtype}, {outside.layout}; use .real or .to_dense()"
            )
        return outside
    if outside == "bias" if isinstance(outside, str) else _is_number(outside):
        return outside if isinstance(outside, (str, int, float)) else float(outside)
    raise ValueError(f'outside must be a number, "bias" or a tensor, got {outside!r}')


def check_break_even(share):
    """Return the share of active blocks from which whole images are computed, or raise."""
    if share is None or (_is_number(share) and not math.isnan(share)):
        return share if share is None else float(share)
    raise ValueError(f"break_even must be None or a share of blocks, got {share!r}")


def check_halo(halo):
    """Return how far blocks are active, or raise."""
    if isinstance(halo, str) and halo in ("zero", "exact"):
        return halo
    raise ValueError(f'halo must be "zero" or "exact", got {halo!r}')


def check_replay(replay):
    """Return whether calls are replayed, or raise."""
    if replay is True or replay is False or (isinstance(replay, str) and replay == "auto"):
        return replay
    raise ValueError(f'replay must be "auto", True or False, got {replay!r}')


def _is_number(value):
    return isinstance(value, Real) and not isinstance(value, bool)


CHECKS = {
    "block_size": lambda value: pair(value, "block_size"),
    "capacity": check_capacity,
    "halo": check_halo,
    "outside": check_outside,
    "replay": check_replay,
    "break_even": check_break_even,
}
