"""Launches of CUDA kernels: grid, scalars and attributes decided once, pointers at each call.

This file and ``compile.py`` are the only ones that know how kernels are made and launched.
"""

import contextlib
import ctypes
import functools
import struct
import threading

import numpy as np

from .compile import SHARED_BY_DEFAULT, load
from .device import driver, has_dependent_launch, sm_count
from .tensor_map import encode

THREADS = 256  # of a thread block, where nothing speaks for another number
_LOADED = {}  # (device, stem, kernel, template, ...) -> cupy.RawKernel
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


def launch(stem, kernel, template, grid, block, args, shared=0, persistent=False):
    """Run ``kernel<template...>`` of ``cuda_src/<stem>.cu`` on CuPy's current device and stream.

    ``stem`` is the path of a file below ``cuda_src``, such as ``"dense/affine_grad"``.
    ``args`` holds CuPy arrays or None (a null pointer), then int (``long long``) and float
    (``double``). ``grid`` and ``block`` are numbers of thread blocks and of threads; an empty grid
    launches nothing, and a ``persistent`` one is cut to what the GPU holds at once.
    """
    scalars = tuple(arg for arg in args if isinstance(arg, int | float))
    arrays = args[: len(args) - len(scalars)]
    sizes = (grid, block, len(arrays), scalars, shared, persistent)
    prepare(stem, kernel, template, *sizes)(*arrays)


def prepare(
    stem,
    kernel,
    template,
    grid,
    block,
    pointers,
    scalars,
    shared=0,
    persistent=False,
    dependent=False,
    cluster=1,
    maps=(),
):
    """Return a launch with all but its arrays decided, bound to CuPy's current device.

    Called with ``pointers`` arrays (or None), it runs the kernel on the current stream. Making one
    costs far more than calling it: keep it.

    A ``persistent`` grid is cut to what the GPU holds at once; of a grid of several numbers the
    first is cut. A ``dependent`` kernel begins before the one ahead of it on the stream has ended,
    and itself waits for it (``dependent_wait`` of async_copy.cuh). ``cluster`` blocks of a row form
    a cluster. ``maps`` are the kernel's last parameters, a TensorMap each.
    """
    import cupy

    device = cupy.cuda.runtime.getDevice()
    cupy.cuda.runtime.setDevice(device)  # makes its context this thread's, if the thread is new
    key = (device, stem, kernel, template, shared > SHARED_BY_DEFAULT)
    module_function = _LOADED.get(key)
    if module_function is None:
        module_function = _LOADED[key] = load(stem, kernel, template, shared)
    if shared > max(SHARED_BY_DEFAULT, module_function.max_dynamic_shared_size_bytes):
        module_function.max_dynamic_shared_size_bytes = shared  # more than any launch before needed
    if persistent:
        resident = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
            module_function.kernel.ptr, block, shared
        )
        most = max(resident, 1) * sm_count()
        if cluster > 1:
            most = min(most, cluster * _active_clusters(module_function, block, shared, cluster))
        grid = _cut(grid, most, cluster)
    sizes = (module_function, grid, block, shared, pointers, scalars, maps)
    if cluster > 1 or (dependent and has_dependent_launch()):
        return _ExtendedLaunch(*sizes, dependent, cluster)
    return _Launch(*sizes)


def _cut(grid, most, cluster):
    """Return the grid with its first number lowered to ``most`` thread blocks, whole clusters."""
    grid = _extent(grid)
    first = max(most // (grid[1] * grid[2]) // cluster, 1) * cluster
    return (min(grid[0], first), *grid[1:])


class _Recording(threading.local):
    calls = None  # what this thread's calls put on a stream, while somebody records it


_RECORDING = _Recording()


@contextlib.contextmanager
def recorded():
    """Give a list of (function, arguments) of all that is put on a stream within.

    To call them again on the same memory does the same work, with nothing checked or planned. That
    holds for what comes from here: launches, and what goes through :func:`enqueue`.
    """
    before, calls = _RECORDING.calls, []
    _RECORDING.calls = calls
    try:
        yield calls
    finally:
        _RECORDING.calls = before


def enqueue(function, *arguments):
    """Call a function of CuPy's that works on the current stream, so that it can be recorded."""
    if _RECORDING.calls is not None:
        _RECORDING.calls.append((function, arguments))
    function(*arguments)


class _Launch:
    """A kernel with its grid and scalars; call it with the arrays.

    The parameters of our kernels are 8 bytes (a pointer, long long or double), so that one block of
    numbers holds them all and only the pointers change from call to call; tensor maps follow them.
    """

    def __init__(self, function, grid, block, shared, pointers, scalars, maps=()):
        import cupy

        self._function = function  # keeps the module loaded
        self._decided = (grid, block, shared, pointers, scalars, maps)
        kinds = "".join("d" if isinstance(scalar, float) else "q" for scalar in scalars)
        packed = struct.pack(f"{pointers}q{kinds}", *(0,) * pointers, *scalars)
        values, self._arrays = np.frombuffer(bytearray(packed), np.int64), ()
        addresses = _address(values) + 8 * np.arange(len(values) + len(maps), dtype=np.int64)
        self._maps = tuple(enumerate(maps, len(values)))
        self._values, self._addresses = memoryview(values), addresses
        fill = struct.Struct(f"{pointers}q").pack_into  # a third of the time of a loop
        self._fill = functools.partial(fill, self._values, 0)
        self._launch = functools.partial(
            cupy.cuda.driver.launchKernel, function.kernel.ptr, *_extent(grid), block, 1, 1, shared
        )
        self._table = _address(addresses)
        self._stream = cupy.cuda.get_current_stream
        self._empty = 0 in _extent(grid)
        self._device = cupy.cuda.runtime.getDevice()
        self._error, self._enter = cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.setDevice
        self._lock = threading.Lock()  # two threads must not fill in pointers at the same time

    def __call__(self, *arrays):
        """Launch on the current stream; None is a null pointer."""
        if _RECORDING.calls is not None and not self._empty:
            _RECORDING.calls.append((self, arrays))
        addresses = [0 if array is None else array.data.ptr for array in arrays]
        self.on(self._stream(self._device).ptr, addresses)

    def bound(self, arrays, given):
        """Return this launch with its arrays decided too, but for those at the places ``given``.

        It keeps the arrays, and is called with the others, in the order of ``given``.
        """
        bound = self._twin()
        for position, array in enumerate(arrays):
            bound._values[position] = 0 if array is None else array.data.ptr
        bound._fill = functools.partial(_fill_in, bound._values, given)
        bound._arrays = arrays
        return bound

    def _twin(self):
        """Return another launch like this one, with parameters of its own."""
        return _Launch(self._function, *self._decided)

    def on(self, stream, addresses):
        """Launch on a stream of the current device, with the arrays at these addresses."""
        if self._empty:
            return
        with self._lock:
            self._fill(*addresses)
            described = self._describe() if self._maps else None  # kept until it is copied
            try:
                self._launch(stream, self._table, 0)
            except self._error as error:
                if error.status != _NO_CONTEXT:
                    raise
                # A thread that has not used CUDA, such as one of an autograd engine.
                self._enter(self._device)
                self._launch(stream, self._table, 0)
            del described

    def _describe(self):
        """Point the parameters that are tensor maps at those of the arrays; return these."""
        described = [
            encode(tensor_map, self._values[tensor_map.array]) for _, tensor_map in self._maps
        ]
        for (parameter, _), its in zip(self._maps, described, strict=True):
            self._addresses[parameter] = ctypes.addressof(its)
        return described


def _address(array):
    return array.__array_interface__["data"][0]  # in a fifth of the time of array.ctypes.data


def _fill_in(values, places, *addresses):
    """Write addresses to some places of a kernel's parameters."""
    for place, address in zip(places, addresses, strict=True):
        values[place] = address


class Series:
    """Launches one after the other, called as one.

    Parameters
    ----------
    steps : (launch, sequence of int or None)
        Each with the places of its arrays among those of the call; None is a null pointer.
    """

    def __init__(self, *steps):
        self._steps = steps

    def __call__(self, *arrays):
        """Launch all on the current stream; None is a null pointer."""
        for launch, places in self._steps:
            launch(*(None if place is None else arrays[place] for place in places))

    def on(self, stream, addresses):
        """Launch all on a stream of the current device, with the arrays at these addresses."""
        for launch, places in self._steps:
            launch.on(stream, [0 if place is None else addresses[place] for place in places])


class Number(float):
    """A number that changes from call to call, where a launch takes an array."""

    @property
    def data(self):
        """Itself, as an array has its memory."""
        return self

    @property
    def ptr(self):
        """Its bits, as an array's address."""
        return struct.unpack("q", struct.pack("d", self))[0]

    def data_ptr(self):
        """Return its bits, as a tensor's address."""
        return self.ptr


class _LaunchAttribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _LaunchConfig(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CUlaunchAttributeID


def _launch_config(grid, block, shared, dependent, cluster):
    """Return a CUlaunchConfig of attributes that CuPy has no argument for."""
    values = {}
    if cluster > 1:
        values[_CLUSTER_DIMENSION] = (cluster, 1, 1)
    if dependent:
        values[_PROGRAMMATIC_STREAM_SERIALIZATION] = (1,)
    attributes = (_LaunchAttribute * len(values))()
    for attribute, (kind, value) in zip(attributes, values.items(), strict=True):
        attribute.id = kind
        attribute.value[: len(value)] = value
    return _LaunchConfig(_extent(grid), (block, 1, 1), shared, None, attributes, len(values))


def _active_clusters(function, block, shared, cluster):
    """Return how many clusters of thread blocks the current device holds at once."""
    config = _launch_config(cluster, block, shared, False, cluster)
    count = ctypes.c_int()
    kernel = ctypes.c_void_p(function.kernel.ptr)
    query = driver().cuOccupancyMaxActiveClusters
    status = query(ctypes.byref(count), kernel, ctypes.byref(config))
    if status:
        raise RuntimeError(f"cuOccupancyMaxActiveClusters failed with CUresult {status}")
    return max(count.value, 1)


class _ExtendedLaunch(_Launch):
    """A launch with attributes, through the driver's own call."""

    def __init__(self, function, grid, block, shared, pointers, scalars, maps, dependent, cluster):
        super().__init__(function, grid, block, shared, pointers, scalars, maps)
        self._attributes = (dependent, cluster)
        config = _launch_config(grid, block, shared, dependent, cluster)
        call = driver().cuLaunchKernelEx
        where, kernel = ctypes.byref(config), ctypes.c_void_p(function.kernel.ptr)
        table = ctypes.c_void_p(self._table)

        def launch(stream, _table, _extra):
            config.stream = stream
            status = call(where, kernel, table, None)
            if status:
                raise self._error(status)

        self._launch = launch

    def _twin(self):
        return _ExtendedLaunch(self._function, *self._decided, *self._attributes)


def _extent(grid):
    """Return three numbers of thread blocks from one, or from up to three."""
    grid = grid if isinstance(grid, tuple) else (grid,)
    return grid + (1,) * (3 - len(grid))
