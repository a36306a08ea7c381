"""Convolutions by packed weights that were made before: their launch, with all but the features.

A small convolution takes a GPU less time than the host needs to describe its tensors. A call like
one before it, over the same table of rows with the same PackedWeights, finds its launch with the
table instead; :mod:`sbnet_cupy.submanifold.kept_calls` for tensors.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...core.graph_memory import capture_of
from ...dense.packed_weights import PackedWeights
from ...submanifold.keeping_container import CAPTURE
from ...submanifold.site_conv_launch import OrderedPlan, bound_launch
from .. import _dispatch_state as state
from .._native import native_weights, view
from .maps import kept_with

_CALLS = "calls"  # under which a table keeps its own: packed weights -> list of KeptCall
_MOST = 8  # of the same table and weights


class KeptCall(NamedTuple):
    """A call over a certain table with certain packed weights."""

    options: tuple
    number: int  # of tensors: features, and a residual if there is one
    valid: torch.Tensor  # which rows of the result are sites
    matches: Callable  # whether features and residual are like those, in all but memory and values
    plan: OrderedPlan
    launch: Any  # takes the addresses of features, residual, result, and of parts of tiles, if any


def compute_again(features, w, made, groups, residual, activation):
    """Compute a call like one that is kept, and return its result.

    None if there is none, and where a gradient is to be recorded.
    """
    calls = getattr(made.rows, "kept_of_map", {}).get(_CALLS)
    if calls is None or type(w) is not PackedWeights:
        return None
    given = (features,) if residual is None else (features, residual)
    if not state.may_match(given):
        return None
    if torch.is_grad_enabled() and any([t.requires_grad for t in given]):
        return None
    if not state.thread_is_plain() or state.has_autocast():
        return None
    packed = native_weights(w)
    calls = None if packed is None else calls.get(packed)
    if calls is None:
        return None
    device, valid = features.get_device(), made.target._kept.get("valid")
    if device >= 0 and device != state.current_device():
        return None
    size = made.kernel_size, made.source.capacity
    for call in calls:
        options = call.options
        if not (  # objects, since True and 1.0 are equal to 1, but no number of groups
            options[2] is groups and options[3] is activation and options[:2] == size
            and call.valid is valid and call.number == len(given) and call.matches(*given)
        ):  # fmt: skip
            continue
        addresses = features.data_ptr(), 0 if residual is None else residual.data_ptr()
        if (addresses[0] | addresses[1]) & 15:
            return None
        out = features.new_empty_strided(call.plan.shape, call.plan.strides)
        addresses = (*addresses, out.data_ptr())
        if call.plan.partials:
            parts = partials_of(call.plan, features)
            addresses = (*addresses, parts.data_ptr())
        call.launch.on(state.current_stream(device), addresses)
        return out
    return None


def partials_of(plan, like):
    """Return the memory of the parts of tiles of a plan: a tensor like another."""
    return like.new_empty_strided((plan.partials,), (1,), dtype=torch.uint8)


def keep_call(plan, tensors, options, packed, owner):
    """Keep a call that was just made by a plan, for others like it, from the second one on.

    Where each input has sites of its own, there is no second call over a table by the same weights.
    The table refers to the weights weakly, and to no coordinates: nothing lives longer for it. What
    a captured graph computes is not kept. ``owner`` has the order of the table, and parts of tiles.
    """
    features, rows, valid, *_, residual, out = tensors
    kept = kept_with(rows)
    calls = kept.setdefault(_CALLS, weakref.WeakKeyDictionary())
    if packed not in calls:
        calls[packed] = []
        return
    calls = calls[packed]
    given = (features,) if residual is None else (features, residual)
    if out is not None or valid is None or residual is features:
        return
    if any(t.data_ptr() & 15 for t in given):
        return
    if CAPTURE in kept or capture_of(features) or not all(map(state.is_plain, given)):
        return
    like = options, len(given)
    if any(c[:2] == like and c.valid is valid and c.matches(*given) for c in calls):
        return  # with other objects as options: one will do
    matches = state.matcher(given)
    if not matches(*given):
        return
    order, _ = owner
    decided = (packed.kept(plan.how), *order, view(valid))
    calls.append(KeptCall(*like, valid, matches, plan, bound_launch(plan, decided)))
    del calls[:-_MOST]
