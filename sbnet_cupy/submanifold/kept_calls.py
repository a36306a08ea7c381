"""Calls of submanifold convolutions that were made before: their launch, with all but the features.

On a GPU a small convolution takes as long as the host needs to find its map, its plan and its
packed weights. A call like one before it, on the same sites with the same PackedWeights, finds its
launch in the coordinates instead, with the addresses of all that is kept.
"""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import empty, is_cupy
from ..core.graph_memory import capture_of
from ..core.spec import CPU, fields_of
from ..dense.packed_weights import PackedWeights
from .keeping_container import CAPTURE
from .site_conv import valid_rows
from .site_conv_launch import OrderedPlan, bound_launch, parts_of_tiles
from .sparse_tensor import SparseTensor

_CALLS = "calls"  # under which coordinates keep theirs: PackedWeights -> list of KeptCall


class KeptCall(NamedTuple):
    """A call on certain sites with certain PackedWeights."""

    options: tuple
    features: tuple  # the fields of their spec, and of that of the residual
    residual: tuple | None
    device: Callable  # gives the current one, as specs name it
    result: Callable  # makes the array of a result
    partials: int  # bytes of the parts of tiles
    launch: Any  # takes the features, the residual, the result and the parts of tiles, if any


def compute_again(x, w, residual, dilation, groups, activation, precision):
    """Compute a call like one that is kept, and return its SparseTensor; None if there is none.

    It takes arguments that have not passed the door. What is kept are calls that have, so those
    like them would pass it as they are, if their device is the current one.
    """
    if type(w) is not PackedWeights or type(x) is not SparseTensor:
        return None
    features, coordinates = x.features, x.coordinates
    calls = coordinates._kept.get(_CALLS)
    calls = None if calls is None else calls.get(w)
    if calls is None:
        return None
    if type(residual) is SparseTensor and residual.coordinates is coordinates:
        residual = residual.features
    fields = fields_of(features)
    fields_of_residual = None if residual is None else fields_of(residual)
    for options, own, own_residual, device, result, partials, launch in calls:
        if (  # objects, since True and 1.0 are equal to 1, but no number of groups
            options[0] is dilation and options[1] is groups
            and options[2] is activation and options[3] is precision
            and own == fields and own_residual == fields_of_residual
        ):  # fmt: skip
            if device() != fields[2]:
                return None
            out = result()
            launch(features, residual, out, *parts_of_tiles(partials, features))
            return SparseTensor.computed(out, coordinates)
    return None


def keep_call(x, w, made, residual, options, plan):
    """Keep a call that was just made by a plan over a map, for others like it, from the second on.

    Where each input has sites of its own, there is no second call at them by the same weights. The
    coordinates refer to the weights weakly, and to no map: nothing lives longer for it. What a
    captured graph computes is not kept.
    """
    kept = x.coordinates._kept
    if type(plan) is not OrderedPlan or type(w) is not PackedWeights:
        return
    if CAPTURE in kept or CAPTURE in made._kept or capture_of(x.features):
        return
    calls = kept.setdefault(_CALLS, weakref.WeakKeyDictionary())
    if w not in calls:
        calls[w] = []
        return
    calls, like = calls[w], (options, fields_of(x.features), fields_of(residual))
    if any(call[:3] == like for call in calls):  # with other objects as options: one will do
        return
    decided = (w.kept(plan.how), *made._ordered(plan), valid_rows(x.coordinates))
    launch = bound_launch(plan, decided)
    calls.append(KeptCall(*like, *_around(x.features, plan.shape), plan.partials, launch))


def _around(like, shape):
    """Return functions of nothing: the current device, and a new array like another of a shape."""
    if not is_cupy(like):
        return lambda: CPU, functools.partial(empty, shape, like.dtype, np.empty(0))
    cupy = sys.modules["cupy"]
    return cupy.cuda.runtime.getDevice, functools.partial(cupy.ndarray, shape, like.dtype)
