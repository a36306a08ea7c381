"""reduce_mask as a function of JAX arrays: it lists into XLA's memory, with a capacity."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ..block_sparse.grid import resolve_grid
from ..block_sparse.mask.config import scratch_slots
from ..block_sparse.mask.reduce_mask import REDUCE_MASK
from ..core.launch import enqueue
from ..core.sizes import pair
from ._callbacks import call
from ._mapped import one_by_one


@functools.cache
def list_blocks(options):
    """Return the jitted function of a mask with these options, which are spelled and checked."""

    @custom_vmap
    def listed(mask):
        block_count, *grid, _, avgpool, capacity = options
        blocks = (mask.shape[0], *block_count)
        if not math.prod(blocks) or not mask.size:  # XLA would not call for nothing
            return jnp.zeros(1, jnp.int32), jnp.full((capacity, 3), -1, jnp.int32)
        rows = max(capacity, 1)  # of no rows XLA would not call either
        shapes = (1,), (rows, 3)
        results = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
        slots = scratch_slots(mask.shape, blocks, resolve_grid(*grid), avgpool)
        key = (*options[:-1], rows)
        counts, indices = call(fill, key, results, (mask,), scratch=8 * slots)
        return counts, indices[:capacity]

    @listed.def_vmap
    def rule(size, batched, mask):
        return one_by_one(listed, batched, (mask,)), (True, True)

    return jax.jit(listed)


def fill(options, results, scratch, mask):
    """Fill the count and the rows: see ``_callbacks.call``. On a GPU nothing is allocated."""
    plan = REDUCE_MASK.plan_for((mask,), options)
    if plan.launch is None:
        for result, found in zip(results, plan.run(mask), strict=True):
            result[...] = found
        return
    slots = scratch.view("uint64")
    enqueue(slots[: plan.workspace].fill, 0)
    plan.launch(mask, *results, slots)


def spelled(options):
    """Return the options of reduce_mask, which were checked, in one hashable form."""
    block_count, *grid, tol, avgpool, capacity = options
    block_count = pair(block_count, "block_count", minimum=0)
    return (block_count, *resolve_grid(*grid), float(tol), bool(avgpool), int(capacity))
