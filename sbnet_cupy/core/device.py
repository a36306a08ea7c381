"""What the current CUDA device and its driver can do."""

import ctypes
import functools
import os
from typing import NamedTuple

RESERVED = 1024  # bytes of shared memory that each thread block takes besides its own


class Device(NamedTuple):
    """What a plan needs to know of a GPU."""

    multiprocessors: int
    shared_bytes: int  # of dynamic shared memory that a thread block may have
    hopper: bool  # wgmma
    bulk_copy: bool  # cp.async.bulk
    tensor_floats: bool = True  # tensor cores that take bfloat16 and tf32, not float16 alone

    def resident(self, shared):
        """For how many thread blocks of so much shared memory a multiprocessor has room."""
        return (self.shared_bytes + RESERVED) // (shared + RESERVED)

    def shared_of(self, blocks):
        """Return the most shared memory with which so many thread blocks fit a multiprocessor."""
        return (self.shared_bytes + RESERVED) // blocks - RESERVED

    def spread(self, shared, blocks):
        """Return shared memory, no less, with which no more than so many thread blocks fit.

        Where more fit, the GPU may give some multiprocessors several while others have none.
        """
        return max(shared, self.shared_of(blocks + 1) + 128)

    def spread_evenly(self, shared, blocks):
        """Return shared memory, no less, with which so many thread blocks in all are dealt evenly.

        No multiprocessor has room for more of them than an even deal would give it.
        """
        return self.spread(shared, max(1, -(-blocks // self.multiprocessors)))


@functools.cache
def driver():
    """Return the CUDA driver's library."""
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


def has_dependent_launch():
    """Whether the current device and the driver know dependent launches."""
    import cupy

    return _has_dependent_launch(cupy.cuda.runtime.getDevice())


@functools.cache
def _has_dependent_launch(number):
    import cupy

    if int(cupy.cuda.Device(number).compute_capability) < 90:
        return False
    return hasattr(driver(), "cuLaunchKernelEx")


def has_clusters():
    """Whether thread blocks of the current device can share each other's shared memory."""
    return has_dependent_launch()


def sm_count():
    """Return the number of multiprocessors of CuPy's current device."""
    import cupy

    return _attribute(cupy.cuda.runtime.getDevice(), "MultiProcessorCount")


def shared_bytes():
    """Return the most shared memory that a thread block of CuPy's current device may have."""
    import cupy

    return _attribute(cupy.cuda.runtime.getDevice(), "MaxSharedMemoryPerBlockOptin")


@functools.cache
def _attribute(device, name):
    import cupy

    return cupy.cuda.Device(device).attributes[name]


@functools.cache
def _device(number):
    import cupy

    device = cupy.cuda.Device(number)
    capability = int(device.compute_capability)
    return Device(
        multiprocessors=device.attributes["MultiProcessorCount"],
        shared_bytes=device.attributes["MaxSharedMemoryPerBlockOptin"],
        hopper=capability == 90,
        bulk_copy=capability >= 90,
        tensor_floats=capability >= 80,
    )


def current_device():
    """Describe CuPy's current device."""
    import cupy

    return _device(cupy.cuda.runtime.getDevice())
