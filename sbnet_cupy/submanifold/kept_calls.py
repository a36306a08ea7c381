"""Calls of submanifold convolutions that were made before: their launch, with all but the features.

On a GPU a small convolution takes as long as the host needs to find its map, its plan and its
packed weights. A call like one before it, on the same sites with the same PackedWeights, finds its
launch in the coordinates instead, with the addresses of all that is kept.
"""

import weakref
from typing import Any, NamedTuple

from ..core.arrays import empty
from ..core.graph_memory import capture_of
from ..core.spec import fields_of
from ..dense.packed_weights import PackedWeights
from .keeping_container import CAPTURE
from .site_conv import valid_rows
from .site_conv_launch import OrderedPlan
from .sparse_tensor import SparseTensor

_CALLS = "calls"  # under which coordinates keep theirs: PackedWeights -> KeptCall


class KeptCall(NamedTuple):
    """A call on certain sites with certain PackedWeights."""

    options: tuple
    features: tuple  # the fields of their spec, and of that of the residual
    residual: tuple | None
    shape: tuple  # of the result
    launch: Any  # takes the features, the residual and the result


def compute_again(x, w, residual, options):
    """Compute a call like one that is kept, and return its SparseTensor; None if there is none."""
    if type(w) is not PackedWeights or type(x) is not SparseTensor:
        return None
    features, coordinates = x.features, x.coordinates
    calls = coordinates._kept.get(_CALLS)
    call = None if calls is None else calls.get(w)
    if call is None:
        return None
    dilation, groups, activation, precision = call.options
    same = (  # objects, since True and 1.0 are equal to 1, but no number of groups
        dilation is options[0] and groups is options[1]
        and activation is options[2] and precision is options[3]
    )  # fmt: skip
    if type(residual) is SparseTensor and residual.coordinates is coordinates:
        residual = residual.features
    if not same or call.features != fields_of(features) or call.residual != fields_of(residual):
        return None
    out = empty(call.shape, features.dtype, features)
    call.launch(features, residual, out)
    return SparseTensor.computed(out, coordinates)


def keep_call(x, w, made, residual, options, plan):
    """Keep a call that was just made by a plan over a map, for others like it.

    The coordinates refer to the weights weakly, and to no map: nothing lives longer for it. What a
    captured graph computes is not kept.
    """
    kept = x.coordinates._kept
    if type(plan) is not OrderedPlan or type(w) is not PackedWeights:
        return
    if CAPTURE in kept or CAPTURE in made._kept or capture_of(x.features):
        return
    decided = (w.kept(plan.how), *made._ordered(plan), valid_rows(x.coordinates))
    places = (0, len(decided) + 1, len(decided) + 2)
    launch = plan.launch.bound((None, *decided, None, None), places)
    fields = fields_of(x.features), fields_of(residual)
    calls = kept.setdefault(_CALLS, weakref.WeakKeyDictionary())
    calls[w] = KeptCall(options, *fields, plan.shape, launch)
