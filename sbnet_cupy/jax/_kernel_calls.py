"""Operators whose kernels XLA calls back where it computes on a GPU.

Elsewhere, and where there is no kernel, the same is made of XLA's own operations. Nothing here is
differentiated: see ``_derivatives.py``.
"""

import functools

import jax
import jax.numpy as jnp

from ..core.arrays import compute_dtype
from ..core.spec import spec_of as spec_of_native
from ..dense.packed_weights import PackedWeights
from ._callbacks import allocating_from, call, current_device, has_gpu, vary_alike
from ._kernel_memory import dry_run, nowhere, planning, spec
from ._mapped import jit_one_by_one
from ._specs import computes_on_gpu

_PLATFORM = "cuda"


def on_gpu(kernel, otherwise, *arrays):
    """Return what ``kernel`` makes of arrays on a GPU, and ``otherwise`` elsewhere.

    Where a compiled function runs is known when XLA compiles it, not while JAX traces.
    """
    if not any(isinstance(array, jax.core.Tracer) for array in arrays):
        return (kernel if computes_on_gpu(arrays[0]) else otherwise)(*arrays)

    def alike(function):  # inside shard_map
        def same(*given):
            found, kind = jax.tree.flatten(function(*given))
            return jax.tree.unflatten(kind, vary_alike(found, jax.tree.leaves(given)))

        return same

    branches = {_PLATFORM: alike(kernel)}
    return jax.lax.platform_dependent(*arrays, default=alike(otherwise), **branches)


def kernel_plan(operator, specs, options):
    """Return the plan of a call by a kernel, on the current device; None where there is none."""
    if not has_gpu():
        return None
    device = current_device()
    specs = [spec and spec._replace(device=device) for spec in specs]
    with planning():
        plan = operator.plan_of(specs, options)
    return plan if _is_by_kernels(plan) else None


def _is_by_kernels(plan):
    return plan.by_kernels


def as_tables(x, *tables):
    """Return tables, or None, in the dtype that kernels read, so that nothing has to be copied."""
    wide = compute_dtype(x.dtype)
    return tuple(table if table is None else table.astype(wide) for table in tables)


@functools.cache
def called(operator, options, order=None, how=None):
    """Return the jitted call of an operator by its kernel.

    Of weights that are packed, in the form that a plan names ``how``, the bytes follow the
    operator's arrays. With an ``order``, the last array has what else the kernel reads:
    ``order.read(arrays, last)`` is one more argument of a plan that ``order.fits``.
    """
    key = operator, options, order, how

    def function(*arrays):
        own = _apart(key, arrays)[0]
        (result,) = operator.infer((*map(spec, own), None), options)
        if not result.size:
            return jnp.zeros(result.shape, result.dtype)
        result = jax.ShapeDtypeStruct(result.shape, result.dtype)
        return call(_run, key, [result], arrays, scratch=_scratch(key, tuple(map(spec, arrays))))[0]

    return jit_one_by_one(function)


def _apart(key, arrays):
    """Return the operator's arrays, the packed bytes and what an order reads, or None."""
    operator, _, order, how = key
    count = len(operator.arrays) - 1  # without out
    packed = None if how is None else arrays[count]
    return arrays[:count], packed, None if order is None else arrays[-1]


def _run(key, results, scratch, *arrays):
    """Compute a call on native arrays: see ``_callbacks.call``."""
    operator, options, order, how = key
    own, packed, last = _apart(key, arrays)
    given = (*own, results[0])
    plan = operator.plan_for(given, options)
    fits = _are_aligned(given) if order is None else order.fits(plan)
    if not fits or (how is not None and plan.how != how):
        plan.run(*given)  # another plan than :func:`_scratch` ran: it allocates what it needs
        return
    more = () if order is None else (order.read(own, last),)
    with allocating_from(scratch):
        plan.run(*_with_packed(plan, packed, given), *more)


def _with_packed(plan, packed, arrays):
    """Return the arrays of a call with weights that are packed for the plan in the place of w."""
    if packed is None:
        return arrays
    own = [arrays[place] for place in plan.weights]
    arrays = [None if place in plan.weights else a for place, a in enumerate(arrays)]
    arrays[plan.weights[0]] = PackedWeights.of(own, forms=[(plan.how, packed)])
    return arrays


def _are_aligned(arrays):
    """Whether arrays lie as those of a dry run do, so that a plan is the same."""
    return all(array is None or spec_of_native(array).alignment == 0 for array in arrays)


@functools.lru_cache(maxsize=1024)
def _scratch(key, specs):
    """Return the bytes that a call allocates."""
    operator, options, order, _ = key
    own, packed, last = _apart(key, specs)
    plan = kernel_plan(operator, [*own, None], options)
    if plan is None:
        return 0
    own = list(map(nowhere, own))
    more = () if order is None else (order.read(own, nowhere(last)),)
    given = _with_packed(plan, nowhere(packed), (*own, nowhere(plan.results[0])))
    with dry_run() as memory:
        plan.run(*given, *more)
    return memory.nbytes
