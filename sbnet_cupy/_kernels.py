"""CUDA kernels: from a template in ``cuda_src`` to a launch. The only file that knows how.

(stem, kernel, template arguments, architecture) becomes machine code through NVRTC, is kept on
disk, loaded with ``cupy.RawModule`` and remembered per device. :func:`compile_cubin` needs no GPU.
"""

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


def prepare(stem, kernel, template, grid, block, pointers, scalars, shared=0, persistent=False):
    """Return a launch with all but its arrays decided, bound to CuPy's current device.

    Called with ``pointers`` arrays (or None), it runs the kernel on the current stream. Making one
    costs far more than calling it: keep it.
    """
    import cupy

    key = (cupy.cuda.runtime.getDevice(), stem, kernel, template, shared > _SHARED_BY_DEFAULT)
    module_function = _LOADED.get(key)
    if module_function is None:
        module_function = _LOADED[key] = _load(stem, kernel, template, shared)
    if persistent:
        resident = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
            module_function.kernel.ptr, block, shared
        )
        grid = min(grid, max(resident, 1) * sm_count())
    return _Launch(module_function, grid, block, shared, pointers, scalars)


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
            cupy.cuda.driver.launchKernel, function.kernel.ptr, grid, 1, 1, block, 1, 1, shared
        )
        self._table = addresses.ctypes.data
        self._stream = cupy.cuda.get_current_stream
        self._device = cupy.cuda.runtime.getDevice()
        self._empty = grid == 0
        self._lock = threading.Lock()  # two threads must not fill in pointers at the same time

    def __call__(self, *arrays):
        """Launch on the current stream; None is a null pointer."""
        if self._empty:
            return
        values = self._values
        with self._lock:
            for position, array in enumerate(arrays):
                values[position] = 0 if array is None else array.data.ptr
            self._launch(self._stream(self._device).ptr, self._table, 0)


def sm_count():
    """Return the number of multiprocessors of CuPy's current device."""
    import cupy

    return _sm_count(cupy.cuda.runtime.getDevice())


@functools.cache
def _sm_count(device):
    import cupy

    return cupy.cuda.Device(device).attributes["MultiProcessorCount"]


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
    cubin = _cache_dir() / f"{stem}-{digest[:32]}.cubin"
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
    for path in sorted(SOURCE_DIR.glob("*.cu*")):
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
