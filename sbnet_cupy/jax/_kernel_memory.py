"""Memory of kernels that XLA calls back: how much they need is known while JAX traces.

What a kernel reads besides the arrays, such as the tiles of a map, is an array of bytes. A jitted
function makes it, so that XLA makes it once in a compiled function. How many bytes there are, and
what is where, a dry run tells: the same Python code, with arrays at addresses where nothing is.
"""

import contextlib
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core.arrays import whole_pieces
from ..core.rehearsal import Rehearsal, rehearsing
from ._callbacks import BESIDE, allocating_from, call, current_device
from ._mapped import jit_one_by_one
from ._specs import spec_of


def made(make, key, *arrays):
    """Have XLA call ``make(key, *arrays)``; return all that it allocates, as bytes."""
    return _maker(make, key)(*arrays)


@functools.cache
def _maker(make, key):
    def bytes_of(*arrays):
        layout = layout_of(make, key, tuple(map(spec, arrays)))
        result = jax.ShapeDtypeStruct((layout.nbytes,), jnp.uint8)
        return call(_fill, (make, key), [result], arrays)[0]

    return jit_one_by_one(bytes_of)


def _fill(key, results, _, *arrays):
    """Make it on native arrays: see ``_callbacks.call``."""
    make, key = key
    with allocating_from(results[0]):
        make(key, *arrays)


class Layout(NamedTuple):
    """Where the arrays of a tuple are among the bytes that were allocated for them."""

    nbytes: int
    kind: type
    fields: tuple  # of each: (first byte, shape, dtype), the number of an argument, or None

    def views(self, arena, *given):
        """Return the arrays."""
        import cupy

        return [
            field if field is None
            else given[field] if isinstance(field, int)
            else cupy.ndarray(field[1], field[2], arena.data + field[0])
            for field in self.fields
        ]  # fmt: skip

    def in_xla(self, arena):
        """Return the arrays, none of which were given, as XLA's own."""
        fields = (None if field is None else _piece(arena, *field) for field in self.fields)
        return self.kind(*fields)


def _piece(arena, start, shape, dtype):
    """Return an array among bytes."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    words = arena[start : start + size].reshape(*shape, np.dtype(dtype).itemsize)
    return jax.lax.bitcast_convert_type(words, dtype)


@functools.lru_cache(maxsize=1024)
def layout_of(make, key, specs):
    """Return the Layout of what ``make`` returns for arrays of these specs."""
    given = list(map(nowhere, specs))
    with dry_run() as memory:
        found = make(key, *given)
    numbers = {id(array): number for number, array in enumerate(given) if array is not None}

    def field(array):
        if array is None or id(array) in numbers:
            return numbers.get(id(array))
        return array.data.ptr - _ALLOCATED, array.shape, array.dtype

    return Layout(memory.nbytes, type(found), tuple(map(field, found)))


_GIVEN, _ALLOCATED, _ROOM = 1 << 44, 1 << 45, 1 << 44  # addresses at which nothing is


def nowhere(its):
    """Return a CuPy array of a spec without memory, for a dry run; None for None."""
    if its is None:
        return None
    import cupy

    memory = cupy.cuda.UnownedMemory(_GIVEN, _ROOM, None, current_device())
    return cupy.ndarray(its.shape, its.dtype, cupy.cuda.MemoryPointer(memory, 0))


class _Addresses:
    """An allocator of CuPy's kind that hands out addresses alone, as ``allocating_from`` does."""

    def __init__(self):
        import cupy

        self.nbytes = 0
        self._memory = cupy.cuda.UnownedMemory(_ALLOCATED, _ROOM, None, current_device())
        self._pointer = cupy.cuda.MemoryPointer

    def __call__(self, nbytes):
        start, self.nbytes = self.nbytes, self.nbytes + whole_pieces(nbytes)
        return self._pointer(self._memory, start)


class _DryRun(Rehearsal):
    """A rehearsal in which no kernel is launched; those that are not loaded are compiled beside."""

    def __init__(self):
        super().__init__()
        self.kernels = BESIDE

    def skips(self, stem, addresses):
        return True


def planning():
    """Return a context in which plans are made, whose kernels are compiled beside."""
    return rehearsing(_DryRun())


@contextlib.contextmanager
def dry_run():
    """Launch nothing, and count what is allocated, until the end of a ``with``."""
    import cupy

    memory = _Addresses()
    with rehearsing(_DryRun()), cupy.cuda.using_allocator(memory):
        yield memory


spec = functools.partial(spec_of, "array")
