"""Machine code of CUDA kernels: from a template in ``cuda_src``, through NVRTC, kept on disk.

(source file, kernel, template arguments, architecture) becomes a cubin, whose name is a hash of all
that went into it, and is loaded with ``cupy.RawModule``. :func:`compile_cubin` needs no GPU.
"""

import functools
import hashlib
import json
import os
import stat
import tempfile
from pathlib import Path

from ..errors import DeviceError, DTypeError
from .arrays import dtype_name

_PACKAGE = Path(__file__).resolve().parent.parent
_INSTALLED, _CHECKOUT = _PACKAGE / "cuda_src", _PACKAGE.parent / "cuda_src"
SOURCE_DIR = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT
SHARED_BY_DEFAULT = 48 << 10  # bytes of dynamic shared memory that need no permission

# C++ names of the dtypes, as cuda_src/core/common.cuh defines them.
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
        return _CPP_NAMES[dtype_name(dtype)]
    except KeyError:
        raise DTypeError(
            f"{argument} must be one of {', '.join(_CPP_NAMES)} on a GPU, got {dtype}; convert it"
        ) from None


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

    ``stem`` is its path below ``cuda_src`` without the suffix, such as ``dense/affine_grad``.
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


def load(stem, kernel, template, shared):
    """Return a launchable function: from disk if it is there and whole, else compiled."""
    import cupy

    path, symbol = cubin_on_disk(stem, name_expression(kernel, template), current_architecture())
    function = cupy.RawModule(path=str(path)).get_function(symbol)
    if shared > SHARED_BY_DEFAULT:
        function.max_dynamic_shared_size_bytes = shared
    return function


def current_architecture():
    """Return NVRTC's name for the current device's compute capability."""
    import cupy

    return architecture(cupy.cuda.Device().compute_capability)


def cubin_on_disk(stem, expression, arch):
    """Return (path of the cubin, symbol). A truncated or foreign file is compiled again."""
    cubin = path_on_disk(stem, expression, arch).with_suffix(".cubin")
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


def path_on_disk(stem, what, arch):
    """Return the path of what is kept for an architecture, a name without a suffix.

    It is another for other sources, options and versions of NVRTC.
    """
    from cupy.cuda import nvrtc

    digest = hashlib.sha256(
        json.dumps([stem, what, _options(arch), nvrtc.getVersion(), _source_hash()]).encode()
    ).hexdigest()
    return _cache_dir() / f"{Path(stem).name}-{digest[:32]}"


@functools.cache
def _source_hash():
    """Hash of every source and header: a changed header changes every kernel's key."""
    digest = hashlib.sha256()
    for path in sorted(SOURCE_DIR.rglob("*.cu*")):
        name = path.relative_to(SOURCE_DIR).as_posix()
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
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
