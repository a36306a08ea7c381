"""CUDA kernels: from a template in ``cuda_src`` to a launch. The only file that knows how.

(stem, kernel, template arguments, architecture) becomes machine code through NVRTC, is kept on
disk, loaded with ``cupy.RawModule`` and remembered per device. :func:`compile_cubin` needs no GPU.
"""

import contextlib
import ctypes
import functools
import hashlib
import json
import math
import os
import stat
import tempfile
import threading
from pathlib import Path

import numpy as np

from . import _arrays
from .errors import DeviceError, DTypeError

_HERE = Path(__file__).resolve().parent
_INSTALLED, _CHECKOUT = _HERE / "cuda_src", _HERE.parent / "cuda_src"
SOURCE_DIR = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT
_LOADED = {}  # (device, stem, kernel, template, ...) -> cupy.RawKernel
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_SHARED_BY_DEFAULT = 48 << 10  # bytes of dynamic shared memory that need no permission

# C++ names of the dtypes, as cuda_src/common.cuh defines them.
_CPP_NAMES = {
    "bool": "bool",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned int",
    "int64": "long long",
    "uint64": "unsigned long long",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float32": "float",
    "float64": "double",
    "complex64": "Complex<float>",
    "complex128": "Complex<double>",
}


def cpp_name(dtype, argument):
    """Return the C++ type of a dtype, or raise DTypeError naming ``argument``."""
    try:
        return _CPP_NAMES[_arrays.dtype_name(dtype)]
    except KeyError:
        raise DTypeError(
            f"{argument} must be one of {', '.join(_CPP_NAMES)} on a GPU, got {dtype}; use astype"
        ) from None


def launch(stem, kernel, template, grid, block, args, shared=0, persistent=False):
    """Run ``kernel<template...>`` of ``cuda_src/<stem>.cu`` on CuPy's current device and stream.

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
):
    """Return a launch with all but its arrays decided, bound to CuPy's current device.

    Called with ``pointers`` arrays (or None), it runs the kernel on the current stream. Making one
    costs far more than calling it: keep it.

    A ``persistent`` grid is cut to what the GPU holds at once; of a grid of several numbers the
    first is cut. A ``dependent`` kernel begins before the one ahead of it on the stream has ended,
    and itself waits for it (``dependent_wait`` of async_copy.cuh). ``cluster`` blocks of a row form
    a cluster.
    """
    import cupy

    device = cupy.cuda.runtime.getDevice()
    cupy.cuda.runtime.setDevice(device)  # makes its context this thread's, if the thread is new
    key = (device, stem, kernel, template, shared > _SHARED_BY_DEFAULT)
    module_function = _LOADED.get(key)
    if module_function is None:
        module_function = _LOADED[key] = _load(stem, kernel, template, shared)
    if persistent:
        resident = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
            module_function.kernel.ptr, block, shared
        )
        most = max(resident, 1) * sm_count()
        if cluster > 1:
            most = min(most, cluster * _active_clusters(module_function, block, shared, cluster))
        grid = _cut(grid, most, cluster)
    sizes = (module_function, grid, block, shared, pointers, scalars)
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

    Every parameter of our kernels is 8 bytes (a pointer, long long or double), so that one block of
    numbers holds them all and only the pointers change from call to call.
    """

    def __init__(self, function, grid, block, shared, pointers, scalars):
        import cupy

        self._function = function  # keeps the module loaded
        values = np.zeros(pointers + len(scalars), np.int64)
        for position, scalar in enumerate(scalars, pointers):
            kind = np.float64 if isinstance(scalar, float) else np.int64
            values[position] = np.array(scalar, kind).view(np.int64)
        addresses = values.ctypes.data + 8 * np.arange(len(values), dtype=np.int64)
        self._values, self._addresses = memoryview(values), addresses
        self._launch = functools.partial(
            cupy.cuda.driver.launchKernel, function.kernel.ptr, *_extent(grid), block, 1, 1, shared
        )
        self._table = addresses.ctypes.data
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

    def on(self, stream, addresses):
        """Launch on a stream of the current device, with the arrays at these addresses."""
        if self._empty:
            return
        values = self._values
        with self._lock:
            for position, address in enumerate(addresses):
                values[position] = address
            try:
                self._launch(stream, self._table, 0)
            except self._error as error:
                if error.status != _NO_CONTEXT:
                    raise
                # A thread that has not used CUDA, such as one of an autograd engine.
                self._enter(self._device)
                self._launch(stream, self._table, 0)


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
    query = _driver().cuOccupancyMaxActiveClusters
    status = query(ctypes.byref(count), kernel, ctypes.byref(config))
    if status:
        raise RuntimeError(f"cuOccupancyMaxActiveClusters failed with CUresult {status}")
    return max(count.value, 1)


class _ExtendedLaunch(_Launch):
    """A launch with attributes, through the driver's own call."""

    def __init__(self, function, grid, block, shared, pointers, scalars, dependent, cluster):
        super().__init__(function, grid, block, shared, pointers, scalars)
        config = _launch_config(grid, block, shared, dependent, cluster)
        call = _driver().cuLaunchKernelEx
        where, kernel = ctypes.byref(config), ctypes.c_void_p(function.kernel.ptr)
        table = ctypes.c_void_p(self._table)

        def launch(stream, _table, _extra):
            config.stream = stream
            status = call(where, kernel, table, None)
            if status:
                raise self._error(status)

        self._launch = launch


@functools.cache
def _driver():
    """Return the CUDA driver's library."""
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


def has_dependent_launch():
    """Whether the current device and the driver know dependent launches."""
    import cupy

    if int(cupy.cuda.Device().compute_capability) < 90:
        return False
    return hasattr(_driver(), "cuLaunchKernelEx")


def has_clusters():
    """Whether thread blocks of the current device can share each other's shared memory."""
    return has_dependent_launch()


def _extent(grid):
    """Return three numbers of thread blocks from one, or from up to three."""
    grid = grid if isinstance(grid, tuple) else (grid,)
    return grid + (1,) * (3 - len(grid))


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


def architecture(capability):
    """Return NVRTC's name for a compute capability such as "90"; Hopper's has its own features."""
    if int(capability) < 75:
        raise DeviceError(
            f"the GPU's compute capability must be 7.5 or newer, got {capability}; "
            "use NumPy arrays on this machine"
        )
    return "sm_90a" if capability == "90" else f"sm_{capability}"


def compile_cubin(stem, expressions, arch):
    """Compile name expressions of one source file; return (cubin, {expression: symbol}, log).

    ``expressions`` are like ``"gather_rows<uint4, 18, 32>"``. Needs NVRTC and no GPU. The log
    holds registers and spills of each kernel.
    """
    from cupy.cuda import nvrtc

    path = SOURCE_DIR / f"{stem}.cu"
    source = f'#line 1 "{path.as_posix()}"\n' + path.read_text(encoding="utf-8")
    program = nvrtc.createProgram(source, path.name, (), ())
    try:
        for expression in expressions:
            nvrtc.addNameExpression(program, expression)
        try:
            nvrtc.compileProgram(program, _options(arch))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise RuntimeError(f"NVRTC could not compile {path} for {arch}:\n{log}") from error
        symbols = {name: nvrtc.getLoweredName(program, name) for name in expressions}
        return nvrtc.getCUBIN(program), symbols, nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def name_expression(kernel, template):
    """Return the C++ expression of an instantiation: ``kernel<args...>``."""
    spelled = (str(a).lower() if isinstance(a, bool) else str(a) for a in template)
    return f"{kernel}<{', '.join(spelled)}>"


def _options(arch):
    return (
        "-std=c++17",
        f"-arch={arch}",
        f"-I{SOURCE_DIR.as_posix()}",
        "--ptxas-options=-v",
        "-lineinfo",
    )


def _load(stem, kernel, template, shared):
    """Return a launchable function: from disk if it is there and whole, else compiled."""
    import cupy

    capability = cupy.cuda.Device().compute_capability
    expression = name_expression(kernel, template)
    path, symbol = _cubin_on_disk(stem, expression, architecture(capability))
    function = cupy.RawModule(path=str(path)).get_function(symbol)
    if shared > _SHARED_BY_DEFAULT:
        function.max_dynamic_shared_size_bytes = shared
    return function


def _cubin_on_disk(stem, expression, arch):
    """Return (path of the cubin, symbol). A truncated or foreign file is compiled again."""
    from cupy.cuda import nvrtc

    digest = hashlib.sha256(
        json.dumps([stem, expression, _options(arch), nvrtc.getVersion(), _source_hash()]).encode()
    ).hexdigest()
    cubin = _cache_dir() / f"{Path(stem).name}-{digest[:32]}.cubin"
    note = cubin.with_suffix(".json")
    try:
        known = json.loads(note.read_text(encoding="utf-8"))
        if known["sha256"] == hashlib.sha256(cubin.read_bytes()).hexdigest():
            return cubin, known["symbol"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass  # nothing kept yet, or not what we wrote: compile
    code, symbols, _ = compile_cubin(stem, [expression], arch)
    _replace(cubin, code)
    known = {"sha256": hashlib.sha256(code).hexdigest(), "symbol": symbols[expression]}
    _replace(note, json.dumps(known).encode())
    return cubin, known["symbol"]


@functools.cache
def _source_hash():
    """Hash of every source and header: a changed header changes every kernel's key."""
    digest = hashlib.sha256()
    for path in sorted(SOURCE_DIR.rglob("*.cu*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def _cache_dir():
    """Return a directory that only this user can write: CuPy's cache, or a fresh temporary one."""
    base = os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")
    path = Path(base) / "sbnet_cupy"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
        private = not stat.S_IMODE(status.st_mode) & 0o022
        if private and (not hasattr(os, "getuid") or status.st_uid == os.getuid()):
            with tempfile.TemporaryFile(dir=path):
                return path
    except OSError:
        pass  # read-only or missing home: kernels are then kept for this process only
    return Path(tempfile.mkdtemp(prefix="sbnet_cupy-"))


def _replace(path, content):
    """Write a file whole or not at all: other processes may read it at any time."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(temporary, path)


def vector_bytes(*multiples):
    """Return the widest access, up to 16 bytes, that divides every one of the byte counts."""
    combined = 16
    for value in multiples:
        combined = math.gcd(combined, value)
    return combined
