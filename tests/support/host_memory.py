"""Memory for kernels that run on the host shim: it shows accesses outside of arrays."""

import ctypes
import math

import numpy as np

from sbnet_cupy.core import operator
from sbnet_cupy.core.spec import ArraySpec, SpecGroup, group_of

GUARD, GUARD_BYTE = 256, 0x5A


class Memory:
    """Arrays for one run, placed so that accesses outside of them show."""

    def __init__(self, poison=0):
        self.poison = poison
        self._guarded = []

    def read_only(self, array, offset=0):
        """Copy to memory that ends with the array, ``offset`` elements off a 16-byte boundary."""
        skipped = offset * array.itemsize
        copy = np.empty(skipped + array.nbytes, np.uint8)[skipped:].view(array.dtype)
        copy = copy.reshape(array.shape)
        copy[...] = array
        copy.flags.writeable = False
        return copy

    def poisoned(self, shape, dtype, like=None, *, offset=0):
        """Allocate a result of any old content between guard bytes."""
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        memory = np.full(64 + 2 * GUARD + offset * dtype.itemsize + size, GUARD_BYTE, np.uint8)
        start = -memory.ctypes.data % 64 + GUARD + offset * dtype.itemsize
        self._guarded.append((memory, start, start + size))
        content = memory[start : start + size]
        content[:] = self.poison
        return content.view(dtype).reshape(shape)

    def check(self):
        """Assert that nothing was written outside the results."""
        for memory, start, end in self._guarded:
            changed = memory != GUARD_BYTE
            changed[start:end] = False
            assert not changed.any(), f"byte {changed.argmax() - start} of {end - start} written"


def memory_at(address):
    """Return the first byte at an address, for a kernel; None for a null pointer."""
    if not address:
        return None
    return np.frombuffer((ctypes.c_char * 1).from_address(address), np.uint8)


def plan_as_on_a_gpu(patch):
    """Make operators plan calls with NumPy arrays as if these were CuPy's on device 0."""
    patch.setattr(operator, "fields_of", _fields_on_a_gpu)
    patch.setattr(operator, "_PLANS", operator._Plans())


class OnAGpu:
    """Plays an operator that plans calls with NumPy arrays as if these were CuPy's on device 0."""

    active = True

    def __init__(self, declared):
        self.declared = declared

    def plan_for(self, arrays, options):
        if OnAGpu.active:
            arrays = [
                ArraySpec(*_fields_on_a_gpu(a)) if isinstance(a, np.ndarray) else a for a in arrays
            ]
        return self.declared.plan_for(arrays, options)

    def __call__(self, arrays, options):
        self.plan_for(arrays, options).run(*arrays)


def plan_some_as_on_a_gpu(patch, *modules):
    """The same for the operators that these modules call; other calls are planned as ever."""
    patch.setattr(operator, "_PLANS", operator._Plans())
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, operator.Operator):
                patch.setattr(module, name, OnAGpu(value))


def _fields_on_a_gpu(array):
    """What a plan may depend on, as for CuPy arrays."""
    if array is None:
        return None
    if isinstance(array, ArraySpec):  # of packed weights
        return tuple(array._replace(device=0))
    if isinstance(array, SpecGroup):
        return group_of(tuple(spec and spec._replace(device=0) for spec in array.specs))
    strides = None if array.flags.c_contiguous else array.strides
    return array.shape, array.dtype, 0, strides, array.ctypes.data % 16
