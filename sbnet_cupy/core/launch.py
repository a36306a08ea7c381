"""Launches of CUDA kernels: grid, scalars and attributes decided once, pointers at each call.

This file and ``compile.py`` are the only ones that know how kernels are made and launched.
"""

import bisect
import contextlib
import ctypes
import functools
import struct
import threading

import numpy as np

from .compile import SHARED_BY_DEFAULT, load
from .device import driver, has_dependent_launch, sm_count
from .rehearsal import REHEARSING
from .tensor_map import encode

THREADS = 256  # of a thread block, where nothing speaks for another number
_LOADED = {}  # (device, stem, kernel, template, ...) -> cupy.RawKernel
_PARAMETERS = {}  # (RawKernel's key, block, shared, ...) -> _Parameters
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

    Called with ``pointers`` arrays (or None), it runs the kernel on the current stream. Launches
    that differ in grid and scalars alone share the rest: another one takes microseconds to make.

    A ``persistent`` grid is cut to what the GPU holds at once; of a grid of several numbers the
    first is cut. A ``dependent`` kernel begins before the one ahead of it on the stream has ended,
    and itself waits for it (``dependent_wait`` of async_copy.cuh). ``cluster`` blocks of a row form
    a cluster. ``maps`` are the kernel's last parameters, a TensorMap each.
    """
    import cupy

    device = cupy.cuda.runtime.getDevice()
    cupy.cuda.runtime.setDevice(device)  # makes its context this thread's, if the thread is new
    function = (device, stem, kernel, template, shared > SHARED_BY_DEFAULT)
    types = tuple(map(type, scalars))
    key = (function, block, shared, pointers, types, len(maps), dependent, cluster)
    parameters = _PARAMETERS.get(key)
    if parameters is None:
        if function not in _LOADED:
            rehearsal = REHEARSING.now
            if rehearsal is not None and stem not in rehearsal.launched:
                rehearsal.kernels[stem, kernel, template] = None
                sizes = (grid, block, pointers, scalars, shared, persistent, dependent, cluster)
                return Later(lambda: prepare(stem, kernel, template, *sizes, maps))
            _LOADED[function] = load(stem, kernel, template, shared)
        parameters = _PARAMETERS[key] = _make_parameters(_LOADED[function], *key[1:], stem)
    extent = _extent(grid)
    if persistent:
        extent = _cut(extent, parameters.most(), cluster)
    return _Launch(parameters, extent, scalars, maps)


def _make_parameters(function, block, shared, pointers, types, maps, dependent, cluster, stem):
    kinds = "".join("d" if issubclass(its, float) else "q" for its in types)
    if shared > max(SHARED_BY_DEFAULT, function.max_dynamic_shared_size_bytes):
        function.max_dynamic_shared_size_bytes = shared  # more than any launch before needed
    extended = cluster > 1 or (dependent and has_dependent_launch())
    kind = _ExtendedParameters if extended else _Parameters
    return kind(function, block, shared, pointers, kinds, maps, dependent, cluster, stem)


def _cut(extent, most, cluster):
    """Return the grid with its first number lowered to ``most`` thread blocks, whole clusters."""
    x, y, z = extent
    return min(x, max(most // (y * z) // cluster, 1) * cluster), y, z


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


def movable(calls, buffers):
    """Return what was recorded as launches that can be moved to other memory; None if some cannot.

    Parameters
    ----------
    calls : list
        What :func:`recorded` gave.
    buffers : sequence of (int, int) or None
        The memory on which the work was recorded: where each piece begins, and its bytes.

    Returns
    -------
    list of (launch, list of (number, bytes))
        For each array of a launch the piece it lies in and where; (None, address) for a null
        pointer and for a number. They can be moved to pieces whose beginnings are the same modulo
        16. None where pieces overlap, where an array lies in none, and for what is no launch.
    """
    pieces = sorted((*its, number) for number, its in enumerate(buffers) if its is not None)
    ends = (start + nbytes for start, nbytes, _ in pieces)
    if any(end > start for end, (start, *_) in zip(ends, pieces[1:], strict=False)):
        return None
    starts, found = [start for start, *_ in pieces], []
    for launch, arrays in calls:
        if type(launch) is not _Launch:
            return None
        places = []
        for array in arrays:
            if array is None or isinstance(array, Number):
                places.append((None, 0 if array is None else array.ptr))
                continue
            own = bisect.bisect_right(starts, array.data.ptr) - 1
            start, nbytes, number = pieces[own] if own >= 0 else (0, 0, None)
            if array.data.ptr >= start + nbytes:
                return None
            places.append((number, array.data.ptr - start))
        found.append((launch, places))
    return found


def launch_at(moved, stream, starts):
    """Do what :func:`movable` returned, on pieces of memory that begin elsewhere, on a stream."""
    for launch, places in moved:
        addresses = [at if number is None else starts[number] + at for number, at in places]
        launch.on(stream, addresses)


def enqueue(function, *arguments):
    """Call a function of CuPy's that works on the current stream, so that it can be recorded."""
    if _RECORDING.calls is not None:
        _RECORDING.calls.append((function, arguments))
    function(*arguments)


def copy_first(stem, out, array):
    """Copy the first bytes of a CuPy array, which a rehearsal takes for a kernel of a file."""
    rehearsal = REHEARSING.now
    if rehearsal is None or not rehearsal.skips(stem, (out.data.ptr, array.data.ptr)):
        out.data.copy_from_device_async(array.data, out.nbytes)


_JOINED = set()  # addresses of streams whose next kernel waits for another stream, too


def joined(stream):
    """Have the next dependent kernel on a stream begin when all ahead of it has ended.

    It waits for another stream, too: in a CUDA graph one that begins early takes longer there, or
    what runs beside it does.
    """
    _JOINED.add(stream)


class _Parameters:
    """A kernel and the memory of its parameters, which launches share: each fills it in.

    The parameters of our kernels are 8 bytes (a pointer, long long or double), so that one block of
    numbers holds them all; tensor maps follow them. While one launch is repeated, only its pointers
    are filled in.
    """

    def __init__(
        self, function, block, shared, pointers, kinds, maps, dependent=False, cluster=1, stem=None
    ):
        import cupy

        self._made = (function, block, shared, pointers, kinds, maps, dependent, cluster, stem)
        self.stem = stem  # of the kernel's file
        self.values = np.zeros(pointers + len(kinds), np.int64)
        self.addresses = _address(self.values) + 8 * np.arange(
            len(self.values) + maps, dtype=np.int64
        )
        self.first_map = len(self.values)
        self.memory = memoryview(self.values)
        # Both take a third of the time of a loop.
        fill, fill_scalars = (struct.Struct(kind).pack_into for kind in (f"{pointers}q", kinds))
        self.fill = functools.partial(fill, self.memory, 0)
        self._fill_scalars = functools.partial(fill_scalars, self.memory, 8 * pointers)
        self.stream = cupy.cuda.get_current_stream
        self.device = cupy.cuda.runtime.getDevice()
        self.error, self.enter = cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.setDevice
        self.lock = threading.Lock()  # two threads must not fill in numbers at the same time
        self.table = _address(self.addresses)
        self.scalars = self._most = None  # the scalars that are filled in; see most()

    def call_of(self, extent):
        """Return the call that launches a grid, of a stream, ``table`` and 0."""
        import cupy

        function, block, shared = self._made[:3]
        sizes = (*extent, block, 1, 1, shared)
        return functools.partial(cupy.cuda.driver.launchKernel, function.kernel.ptr, *sizes)

    def take(self, scalars):
        """Fill in the scalars of a launch."""
        self._fill_scalars(*scalars)
        self.scalars = scalars

    def twin(self):
        """Return the same with memory of its own."""
        return type(self)(*self._made)

    def apart(self, given):
        """Have the pointers at the places ``given`` lie apart, and return what fills these in.

        Side by side they are filled in at once, where a loop takes three times as long.
        """
        values = np.zeros(len(given), np.int64)
        self.addresses[list(given)] = _address(values) + 8 * np.arange(len(given), dtype=np.int64)
        return functools.partial(struct.Struct(f"{len(given)}q").pack_into, memoryview(values), 0)

    def most(self):
        """Return how many thread blocks the device holds at once, whole clusters."""
        if self._most is None:
            import cupy

            function, block, shared, *_, cluster, _ = self._made
            resident = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
                function.kernel.ptr, block, shared
            )
            self._most = max(resident, 1) * sm_count()
            if cluster > 1:
                clusters = _active_clusters(function, block, shared, cluster)
                self._most = min(self._most, cluster * clusters)
        return self._most


class _Launch:
    """A kernel with its grid and scalars; call it with the arrays."""

    __slots__ = ("_call", "_extent", "_fill", "_maps", "_parameters", "_scalars")

    def __init__(self, parameters, extent, scalars, maps=()):
        self._parameters, self._extent = parameters, extent
        self._scalars, self._maps = scalars, maps
        self._fill = parameters.fill  # takes the addresses of a call
        self._call = None if 0 in extent else parameters.call_of(extent)

    def __call__(self, *arrays):
        """Launch on the current stream; None is a null pointer."""
        if _RECORDING.calls is not None and self._call is not None:
            _RECORDING.calls.append((self, arrays))
        addresses = [0 if array is None else array.data.ptr for array in arrays]
        parameters = self._parameters
        self.on(parameters.stream(parameters.device).ptr, addresses)

    def bound(self, arrays, given):
        """Return this launch with its arrays decided too, but for those at the places ``given``.

        It keeps the arrays, and is called with the others, in the order of ``given``. A kernel with
        tensor maps has none such.
        """
        assert not self._maps
        return _BoundLaunch(self._parameters.twin(), self._extent, self._scalars, arrays, given)

    def on(self, stream, addresses):
        """Launch on a stream of the current device, with the arrays at these addresses."""
        call, parameters = self._call, self._parameters
        if call is None:
            return
        rehearsal = REHEARSING.now
        if rehearsal is not None and rehearsal.skips(parameters.stem, addresses):
            return
        with parameters.lock:
            if parameters.scalars is not self._scalars:
                parameters.take(self._scalars)
            self._fill(*addresses)
            described = self._describe() if self._maps else None  # kept until it is copied
            try:
                call(stream, parameters.table, 0)
            except parameters.error as error:
                if error.status != _NO_CONTEXT:
                    raise
                # A thread that has not used CUDA, such as one of an autograd engine.
                parameters.enter(parameters.device)
                call(stream, parameters.table, 0)
            del described

    def _describe(self):
        """Point the parameters that are tensor maps at those of the arrays; return these."""
        parameters = self._parameters
        described = [encode(its, parameters.memory[its.array]) for its in self._maps]
        for place, its in enumerate(described, parameters.first_map):
            parameters.addresses[place] = ctypes.addressof(its)
        return described


class _BoundLaunch(_Launch):
    """A launch with some of its arrays, and with parameters of its own, where these stay."""

    __slots__ = ("_arrays",)

    def __init__(self, parameters, extent, scalars, arrays, given):
        super().__init__(parameters, extent, scalars)
        self._arrays = arrays
        parameters.fill(*(0 if array is None else array.data.ptr for array in arrays))
        self._fill = parameters.apart(given)


def _address(array):
    return array.__array_interface__["data"][0]  # in a fifth of the time of array.ctypes.data


class Later:
    """A launch that is prepared when it is first used: of several, only those that are.

    Parameters
    ----------
    prepare : function
        Returns the launch, on the device that is current when it is used.
    """

    def __init__(self, prepare):
        self._prepare = prepare

    def __call__(self, *arrays):
        """Launch on the current stream; None is a null pointer."""
        self._prepared()(*arrays)

    def on(self, stream, addresses):
        """As that of the launch."""
        self._prepared().on(stream, addresses)

    def bound(self, arrays, given):
        """As that of the launch; in a rehearsal it is bound later."""
        launch = self._prepared()
        if launch is _NOTHING:
            return Later(lambda: self._prepared().bound(arrays, given))
        return launch.bound(arrays, given)

    def _prepared(self):
        """Return the launch; in a rehearsal nothing, where its kernel is not loaded."""
        launch = self._prepare()
        if REHEARSING.now is not None and (launch is _NOTHING or isinstance(launch, Later)):
            return _NOTHING
        self._prepared = lambda: launch
        self.on = launch.on  # straight from now on
        return launch


class _Nothing:
    """What a rehearsal launches."""

    def __call__(self, *arrays):
        """Say which arrays a kernel is not launched with."""
        self.on(None, [0 if array is None else array.data.ptr for array in arrays])

    def on(self, stream, addresses):
        """Say which addresses a kernel is not launched with."""
        REHEARSING.now.skips(None, addresses)

    def bound(self, arrays, given):
        """Return itself."""
        return self


_NOTHING = _Nothing()


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

    def bound(self, arrays, given):
        """Return the same with its arrays decided, but for those at the places ``given``."""
        steps = []
        for launch, places in self._steps:
            own = tuple(None if place is None else arrays[place] for place in places)
            left = [number for number, place in enumerate(places) if place in given]
            taken = [given.index(places[number]) for number in left]
            steps.append((launch.bound(own, left), taken))
        return Series(*steps)


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


class _ExtendedParameters(_Parameters):
    """Those of launches with attributes, through the driver's own call."""

    def __init__(self, function, block, shared, *others):
        super().__init__(function, block, shared, *others)
        dependent, cluster = others[3:5]
        config = _launch_config(1, block, shared, dependent, cluster)
        call, error, extent = driver().cuLaunchKernelEx, self.error, config.grid
        where, kernel = ctypes.byref(config), ctypes.c_void_p(function.kernel.ptr)
        parameters, filled, streamed = ctypes.c_void_p(self.table), None, None
        may_overlap = config.attributes[config.attribute_count - 1].value if dependent else None

        def launch(grid, stream, _table, _extra):
            nonlocal filled, streamed
            if filled is not grid:
                extent[:], filled = grid, grid
            if streamed != stream:
                config.stream, streamed = stream, stream
            has_joined = _JOINED and dependent and stream in _JOINED
            if has_joined:
                _JOINED.discard(stream)
                may_overlap[0] = 0
            status = call(where, kernel, parameters, None)
            if has_joined:
                may_overlap[0] = 1
            if status:
                raise error(status)

        self._launch = launch

    def call_of(self, grid):
        """Return the call that launches a grid, of a stream and two numbers that it leaves."""
        return functools.partial(self._launch, grid)


def _extent(grid):
    """Return three numbers of thread blocks from one, or from up to three."""
    return (*grid, 1, 1)[:3] if type(grid) is tuple else (grid, 1, 1)
