"""Operation: an operation of the core as a function of JAX arrays, made from its declaration.

The core's :class:`~sbnet_cupy.core.operator.Operator` names the arrays and options of an operation,
and has its checks, shape rules, plans and, where it is linear, its gradient. From these come, once
for each set of options and in this order: a callback that computes the result on XLA's memory, with
a rule for ``vmap``; around it the gradient; and ``jit``.
"""

import functools

import jax
import jax.numpy as jnp

from ..block_sparse.grid import resolve_grid
from ..core.sizes import pair
from . import _callbacks
from ._callbacks import call, has_gpu, vary_alike
from ._mapped import batch_members
from ._specs import Like, spec_of


class Operation:
    """A function of JAX arrays made from an operator of the core that has one result.

    Parameters
    ----------
    operator : Operator
        The declaration.
    gradient : function
        Of arrays, options, the gradient of the result and the wanted names: returns ``{name:
        gradient}``. Arrays whose values were not saved are a :class:`Like`.
    saves : function, optional
        Of arrays and options by name: the names of those arrays whose values the gradient needs. By
        default those in which the operation is not linear.
    prepare : function, optional
        Of all arrays: the arrays that the core's operator gets.
    prefixes : dict
        Words before the names of some arrays in errors.
    """

    def __init__(self, operator, *, gradient, saves=None, prepare=None, prefixes=None):
        self.operator, self.gradient = operator, gradient
        self._saves, self._prepare = saves, prepare or (lambda *arrays: arrays)
        self.names = [(prefixes or {}).get(name, "") + name for name in operator.arrays]
        self.function = functools.cache(self._function)

    def __call__(self, arrays, options):
        """Check a call, and have XLA compute it; return the result."""
        self.infer(arrays, options)
        return self.function(spelled(self.operator, options))(*arrays)

    def infer(self, arrays, options):
        """Check a call; return the specs of its arrays and that of its result."""
        specs = tuple(map(spec_of, self.names, arrays))
        return specs, self.operator.infer(specs, options)[0]

    def _function(self, options):
        """Return the jitted function of all arrays with these options, which are checked."""
        function = self._computed(options)

        def forward(*arrays):  # through the gradient again, which may be asked for too
            return self.function(options)(*arrays), self._kept(arrays, options)

        def backward(kept, grad):
            found = {}
            if jnp.issubdtype(grad.dtype, jnp.inexact):
                found = self.gradient(kept, options, grad, self._wanted(kept))
            return tuple(map(found.get, self.operator.arrays))

        differentiable = jax.custom_vjp(function)
        differentiable.defvjp(forward, backward)
        return jax.jit(lambda *arrays: differentiable(*vary_alike(arrays)))

    def _computed(self, options):
        """Return what computes the result."""
        compute = functools.partial(self._compute, options)
        return batch_members(compute, self.operator.arrays)

    def _kept(self, arrays, options):
        """Return what the gradient needs: values of some arrays, shape and dtype of the others."""
        given = dict(zip(self.operator.arrays, arrays, strict=True))
        names = set(given) - set(self.operator.linear)
        if self._saves is not None:
            names = self._saves(given, dict(zip(self.operator.options, options, strict=True)))
        return tuple(
            value if value is None or name in names else Like(value.shape, value.dtype)
            for name, value in given.items()
        )

    def _wanted(self, arrays):
        """Return the names of the arrays that have a gradient; XLA drops those nobody asked for."""
        named = zip(self.operator.arrays, arrays, strict=True)
        return {n for n, a in named if a is not None and jnp.issubdtype(a.dtype, jnp.inexact)}

    def _compute(self, options, *arrays):
        """Have XLA call back for the result, or return it where there is nothing to compute."""
        arrays = list(self._prepare(*arrays))
        specs = tuple(map(spec_of, self.names, arrays))
        plan = self.operator.plan_of(specs, options)
        result = jax.ShapeDtypeStruct(plan.shape, plan.results[0].dtype)
        below, rows = None, self.operator.arrays.index("active_block_indices")
        if plan.base is not None:  # the result begins as one of the arrays, or as zeros
            below = plan.base[0]
            given = (arrays[place] for place in plan.base if arrays[place] is not None)
            arrays[below] = next(given, None)
            if arrays[below] is None:
                arrays[below] = jnp.zeros(result.shape, result.dtype)
        if not result.size or not len(arrays[rows]) or (below is None and not arrays[0].size):
            # XLA would not call for nothing
            return jnp.zeros(result.shape, result.dtype) if below is None else arrays[below]
        return call(
            compute,
            (self.operator, options, below),
            [result],
            arrays,
            scratch=scratch_bytes(self.operator, specs, options),
            alias={} if below is None else {below: 0},
        )[0]


def compute(key, results, scratch, *arrays):
    """Compute a call on native arrays, as the core would with ``out``: see ``_callbacks.call``."""
    operator, options, below = key
    given = list(arrays)
    given[operator.arrays.index("out")] = results[0]
    if below is not None:  # it is there already
        given[below] = results[0]
    plan = operator.plan_for(given, options)
    with _callbacks.allocating_from(scratch):
        plan.run(*given)


def scratch_bytes(operator, specs, options):
    """Return the bytes that a call with arrays of these specs allocates on a GPU, if there is one.

    None are needed where there is no kernel: XLA then computes on a CPU, or raises.
    """
    if not has_gpu():
        return 0
    device = _callbacks.current_device()
    specs = [spec and spec._replace(device=device) for spec in specs]
    try:
        return operator.plan_of(specs, options).scratch
    except NotImplementedError:
        return 0


def spelled(operator, options):
    """Return options that were checked in one hashable form."""
    named = dict(zip(operator.options, options, strict=True))
    if "bsize" in named:
        grid = resolve_grid(named["bsize"], named["boffset"], named["bstride"])
        named["bsize"], named["boffset"], named["bstride"] = grid
    if "strides" in named:
        named["strides"] = pair(named["strides"], "strides")
    for name in {"add", "atomic", "transpose"} & set(named):
        named[name] = bool(named[name])
    return tuple(map(hashable, named.values()))


def hashable(value):
    """Return an option with tuples in the place of lists."""
    return tuple(map(hashable, value)) if isinstance(value, tuple | list) else value
