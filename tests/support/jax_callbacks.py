"""Calls of kernels from XLA: into NumPy, where there is no GPU; what is compared of them."""

import contextlib

import numpy as np

from sbnet_cupy.core.device import Device
from support.assertions import to_numpy


def call_back_on_cpu(setattr=setattr):
    """Take NumPy's plans for kernels, and a CPU for where they run, in sbnet_cupy.jax."""
    from sbnet_cupy.jax import _kernel_calls, _site_kernels

    for module, name, value in (
        (_kernel_calls, "has_gpu", lambda: True),
        (_kernel_calls, "current_device", lambda: "cpu"),
        (_kernel_calls, "computes_on_gpu", lambda x: True),
        (_kernel_calls, "_is_by_kernels", lambda plan: True),
        (_kernel_calls, "_scratch", lambda key, specs: 0),
        (_kernel_calls, "_PLATFORM", "cpu"),
        (_site_kernels, "_has_finder", lambda *given: False),  # the memory of these is CuPy's
        (_site_kernels, "_has_lister", lambda *given: False),
    ):
        setattr(module, name, value)


HOPPER, AMPERE = Device(132, 227 << 10, True, True), Device(84, 99 << 10, False, False)


class _Unlaunched:
    """A launch that does nothing, on a GPU that is not there."""

    def __call__(self, *arrays):
        """Take arrays."""

    def on(self, stream, addresses):
        """Take addresses."""

    def bound(self, arrays, given):
        """Return itself."""
        return self


@contextlib.contextmanager
def plan_without_gpu(setattr=setattr):
    """Plan calls of JAX for a GPU that is not there, until the end of a ``with``.

    It gives a function of a Device, on which layers are planned then.
    """
    from sbnet_cupy.block_sparse.stack import stack_conv_launch, stack_launch, stack_pool_launch
    from sbnet_cupy.core import graph_memory, launch, operator, packed
    from sbnet_cupy.jax import _kernel_calls, _kernel_memory, packed_weights
    from sbnet_cupy.submanifold import site_conv_launch

    def plan_for(its):
        for module in (stack_conv_launch, stack_launch, stack_pool_launch, site_conv_launch):
            setattr(module, "current_device", lambda: its)

    for module in (_kernel_calls, _kernel_memory, packed_weights):
        setattr(module, "current_device", lambda: 0)
    for module in (graph_memory, packed):
        setattr(module, "is_capturing", lambda array: False)
    setattr(launch, "prepare", lambda *given, **options: _Unlaunched())
    setattr(_kernel_calls, "has_gpu", lambda: True)
    setattr(packed_weights, "computes_on_gpu", lambda x: True)
    operator.clear_plans()
    yield plan_for
    operator.clear_plans()
    _kernel_calls._scratch.cache_clear()


def check_close(one, other, tolerance=2e-5):
    """Assert that two results differ by rounding, as a share of the largest number."""
    one, other = (to_numpy(array).astype(np.float64) for array in (one, other))
    size = abs(other).max(initial=1e-30)
    np.testing.assert_allclose(one, other, atol=tolerance * size, rtol=0)


def derivatives_of(jax, run, arrays, tangents):
    """Return a result, its tangent, the gradient of a loss, and the tangent of that."""

    @jax.jit
    def both(arrays, tangents):
        forwards = jax.jvp(run, (arrays,), (tangents,))
        gradient = jax.grad(lambda arrays: (run(arrays) ** 3).sum())
        return forwards, jax.jvp(gradient, (arrays,), (tangents,))

    return both(arrays, tangents)


def check_members(jax, loss, *many):
    """Assert that the mapped gradients of a loss of two arrays are those of each member alone."""
    gradient = jax.value_and_grad(loss, argnums=(0, 1))
    for axes in ((0, None), (None, 0), (0, 0)):
        pairs = list(zip(many, axes, strict=True))
        given = (array if axis == 0 else array[0] for array, axis in pairs)
        found = jax.jit(jax.vmap(gradient, in_axes=axes))(*given)
        for member in range(2):
            own = (array[member if axis == 0 else 0] for array, axis in pairs)
            expected = jax.jit(gradient)(*own)
            for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
                check_close(one[member], other)
