"""Weights that kernels find packed: arrays that go through compiled functions with the others."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from ..core.packed import PackedPlan
from ..dense.packed_weights import PackedWeights
from ..errors import DTypeError
from ._callbacks import call, current_device
from ._kernel_calls import kernel_plan
from ._specs import computes_on_gpu


def pack_weights(weights, function, *arguments):
    """Pack weights once for the kernels by which a function convolves with them on a GPU.

    JAX arrays that are weights are packed at each call, also of a compiled function. This packs
    each :class:`sbnet_cupy.PackedWeights` in ``weights`` now. It is a pytree, whose packed forms
    are arrays of bytes beside ``w``, ``scale`` and ``bias``: pass it to the compiled function.
    Where no kernel packs, and for weights on a CPU, nothing is added.

    JAX arrays do not change, so that packed weights are never stale. New weights, as of a step of
    training, have to be packed again, of the PackedWeights without bytes: arithmetic on bytes gives
    no weights. JAX refuses gradients with respect to them, and a convolution what are no bytes.

    Parameters
    ----------
    weights : pytree
        In which some nodes are a :class:`sbnet_cupy.PackedWeights` of JAX arrays.
    function : callable
        ``function(weights, *arguments)`` calls :func:`stack_conv2d` or convolutions at sites. It is
        traced, and nothing of it is computed.
    *arguments
        What the function is called with, or ``jax.ShapeDtypeStruct`` of the same. For others, of
        other shapes or dtypes, weights may be packed at each call again.

    Returns
    -------
    pytree
        The same weights, each PackedWeights with the forms that the function needs.

    Raises
    ------
    DTypeError
        If no PackedWeights is in ``weights``.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from sbnet_cupy import PackedWeights
    >>> def network(weights, x, table):
    ...     return stack_conv2d(x, weights["first"], table, activation="relu")
    >>> from sbnet_cupy.jax import block_table, stack_conv2d
    >>> table = block_table(jnp.ones((1, 4, 4)), 2)
    >>> weights = {"first": PackedWeights(jnp.ones((3, 3, 1, 8)), bias=jnp.ones(8))}
    >>> weights = pack_weights(weights, network, jnp.ones((4, 2, 2, 1)), table)
    >>> jax.jit(network)(weights, jnp.ones((4, 2, 2, 1)), table).shape
    (4, 2, 2, 8)
    """
    nodes, structure = jax.tree.flatten(weights, is_leaf=_is_packed)
    if not any(map(_is_packed, nodes)):
        raise DTypeError(
            "weights must hold a PackedWeights, got none; wrap the arrays of a convolution: "
            "sbnet_cupy.PackedWeights(w, bias=bias)"
        )
    asking = [_asking(node) if _is_packed(node) else node for node in nodes]
    jax.eval_shape(function, jax.tree.unflatten(structure, asking), *arguments)
    packed = [node.answered() if _is_packed(node) else node for node in asking]
    return jax.tree.unflatten(structure, packed)


def packed_form(weights, plan, read, *call):
    """Return the bytes that were packed of PackedWeights for a call; None if none were.

    Parameters
    ----------
    weights : PackedWeights
        What the caller passed as w.
    plan : Plan or None
        That of the call, if there is a kernel for it.
    read : Reading
        What the kernel packs of the weights.
    *call
        The operator, the options, and the specs of the arrays.
    """
    if not isinstance(plan, PackedPlan):
        return None
    form = plan.how, read
    if isinstance(weights, _Asking):
        weights.asked.calls[form] = call
        return None
    packed = weights.kept(form)
    if packed is not None:
        _check_bytes(packed, plan.pack.nbytes)
    return packed


class Reading(NamedTuple):
    """What a kernel packs: ``function(*options, w, scale, bias)``."""

    function: Callable
    options: tuple

    def __call__(self, w, scale, bias):
        """Return what is packed."""
        return self.function(*self.options, w, scale, bias)


class _Asked:
    """Which forms are asked for: part of the kind of a pytree, shared by all copies of it."""

    def __init__(self):
        self.calls = {}  # (how, Reading) -> a call that reads this form


class _Asking(PackedWeights):
    """Weights of a function that is traced to find out how its kernels pack them."""

    asked: _Asked

    def answered(self):
        """Return the weights with all forms that were asked for, and those that they had."""
        arrays, meta = _flatten(self)
        found = _unflatten(meta, arrays)
        if computes_on_gpu(found.w):
            for form, call in self.asked.calls.items():
                found.keep(form, _packer(form[1], *call)(*found._given()))
        return found


_Asking.__name__ = PackedWeights.__name__  # as errors name it


def _asking(weights):
    """Return the same weights, as they ask."""
    arrays, meta = _flatten(weights)
    return _unflatten_asking((meta, _Asked()), arrays)


def _flatten(weights):
    forms = {how: packed for how, (packed, pack) in weights._packed.items() if pack is None}
    arrays = *weights._given(), *forms.values()
    return arrays, (weights.w_format, weights.precision, tuple(forms))


def _unflatten(meta, arrays, kind=PackedWeights):
    w_format, precision, forms = meta
    return kind.of(arrays[:3], w_format, precision, zip(forms, arrays[3:], strict=True))


def _flatten_asking(weights):
    arrays, meta = _flatten(weights)
    return arrays, (meta, weights.asked)


def _unflatten_asking(meta, arrays):
    made = _unflatten(meta[0], arrays, _Asking)
    made.asked = meta[1]
    return made


jax.tree_util.register_pytree_node(PackedWeights, _flatten, _unflatten)
jax.tree_util.register_pytree_node(_Asking, _flatten_asking, _unflatten_asking)


def _is_packed(value):
    return isinstance(value, PackedWeights)


def _check_bytes(packed, nbytes):
    """Raise for packed bytes that something was computed with."""
    if packed.dtype != np.uint8 or packed.shape != (nbytes,):
        raise DTypeError(
            f"w must hold packed bytes as pack_weights made them, uint8 ({nbytes},), got "
            f"{packed.dtype} {packed.shape}; compute with the arrays, and pack them again"
        )


@functools.cache
def _packer(read, operator, options, specs):
    """Return the jitted function that packs w, scale and bias for a call."""

    def pack(w, scale, bias):
        nbytes = kernel_plan(operator, [*specs, None], options).pack.nbytes
        result = jax.ShapeDtypeStruct((nbytes,), np.uint8)
        return call(_pack, (operator, options, specs), [result], read(w, scale, bias))[0]

    return jax.jit(pack)


def _pack(key, results, _, *arrays):
    """Pack native arrays: see ``_callbacks.call``."""
    operator, options, specs = key
    device = current_device()
    specs = [None if spec is None else spec._replace(device=device) for spec in specs]
    operator.plan_of([*specs, None], options).pack(*arrays, results[0])
