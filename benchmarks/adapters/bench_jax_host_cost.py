"""What a call costs the calling thread in JAX: each operation alone in a jitted function.

The image is small, so that the GPU keeps up. Beside it what JAX itself costs: a jitted copy.
"""

import importlib.util
import os
from functools import partial

import numpy as np

import sbnet_cupy as sb
from benchmarks.harness.cases import ORIGINAL, Case
from benchmarks.harness.check import compare
from benchmarks.harness.inputs import filled_sets, find_blocks, to_host
from benchmarks.harness.rows import OURS
from benchmarks.harness.session import Work
from benchmarks.harness.timing import Contender

OP = "jax_host_cost"


def cases(session):
    """Return what is measured: nothing on a CPU, and nothing where JAX has no GPU."""
    if session.cpu or importlib.util.find_spec("jax") is None:
        return []
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave memory to the others
    import jax

    if jax.default_backend() != "gpu":
        return []
    shape, block, mask, _ = ORIGINAL[5]
    ops = ("reduce_mask", "sparse_gather", "sparse_scatter", "chain")
    return [Case(op, "jax host", shape, "float32", (block, block), mask, 0.1) for op in ops]


def works(case, session):
    """Yield (density, active blocks, workload) for the op of a case."""
    import jax
    import jax.numpy as jnp

    import sbnet_cupy.jax as sbj

    blocks = find_blocks(case, session)
    x = filled_sets(session, 1, case.shape, np.dtype(case.dtype))[0]
    native = {"x": to_host(x), "mask": to_host(blocks.mask)}
    given = {name: jnp.asarray(array) for name, array in native.items()}
    table = sb.reduce_mask(native["mask"], blocks.params.bcount, **blocks.gather_grid)
    native["table"], given["table"] = tuple(table), tuple(map(jnp.asarray, table))
    native["stack"] = sb.sparse_gather(native["x"], *table, **blocks.scatter_grid)
    given["stack"] = jnp.asarray(native["stack"])
    call = partial(_CALLS[case.op], blocks=blocks, capacity=len(table.active_block_indices))
    jitted = jax.jit(partial(call, sbj))
    copied = jax.jit(jnp.copy)
    ours = [
        Contender(OURS, [partial(jitted, **given)], "host"),
        Contender("jax copy", [partial(copied, given["stack"])], "host"),
    ]

    def check(contender):
        found = contender.calls[0]()
        expected = call(sb, **native) if contender.name == OURS else native["stack"]
        compare(np.asarray(found), expected)

    yield blocks.density, blocks.count, Work("jitted", None, ours, check)


def _reduce_mask(module, x, mask, table, stack, *, blocks, capacity):
    options = {"capacity": capacity, **blocks.gather_grid}
    return module.reduce_mask(mask, blocks.params.bcount, **options).active_block_indices


def _gather(module, x, mask, table, stack, *, blocks, capacity):
    return module.sparse_gather(x, *table, **blocks.gather_grid)


def _scatter(module, x, mask, table, stack, *, blocks, capacity):
    return module.sparse_scatter(stack, *table, x, **blocks.scatter_grid)


def _chain(module, x, mask, table, stack, *, blocks, capacity):
    """List the blocks, gather output tiles, add them to the image they came from."""
    grid = blocks.scatter_grid
    active = module.reduce_mask(mask, blocks.params.bcount, capacity=capacity, **grid)
    stack = module.sparse_gather(x, *active, **grid)
    return module.sparse_scatter(stack, *active, x, add=True, **grid)


_CALLS = {
    "reduce_mask": _reduce_mask,
    "sparse_gather": _gather,
    "sparse_scatter": _scatter,
    "chain": _chain,
}
