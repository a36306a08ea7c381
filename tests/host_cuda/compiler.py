"""Compile a kernel file with g++ into a shared library, once; libraries are kept on disk.

A library's name is a hash of everything it was made from: sources, headers, options, compiler.
The shim's header is compiled first, alone: g++ would read it again for every library.
``SBNET_HOST_CACHE`` names the folder; the default is a private folder of the user in the system's
temporary folder. ``SBNET_SANITIZE=1`` compiles with the sanitizers, see ``sanitized.py``;
``SBNET_HOST_UCONTEXT=1`` switches fibers the portable way even on x86-64, see ``fiber.h``.
"""

import contextlib
import functools
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SANITIZE = os.environ.get("SBNET_SANITIZE") == "1"

_OPTIONS = [
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-gnu-unique",  # libraries must not share variables
    "-fno-strict-aliasing",  # kernels read arrays as wide vectors
    "-ffp-contract=off",
    "-fno-omit-frame-pointer",
    "-DSBNET_HOST",
    "-Wall",
    "-Werror",
    "-Wno-unknown-pragmas",  # #pragma unroll
    "-Wno-maybe-uninitialized",  # wrong about values that cross a barrier
]
_SANITIZER_OPTIONS = [
    "-g1",  # their reports name lines
    "-fsanitize=address,undefined",
    "-fno-sanitize=vptr",  # kernels have no classes with virtual functions
    "-fno-sanitize-recover=all",
]


class CompileError(RuntimeError):
    """The compiler refused a kernel; the message is the compiler's."""


def available():
    """Return whether g++ is installed and the system is supported: Linux."""
    return sys.platform == "linux" and shutil.which("g++") is not None


def kernel_library(name, text, source_dir):
    """Return the path of the library made from ``text``, which includes files of ``source_dir``."""
    sources = sorted(path for kind in ("*.cu*", "*.h") for path in source_dir.rglob(kind))
    folders = [_precompiled_header().parent, HERE, source_dir]  # the first has only the .gch
    command = [*_kernel_options(), *(f"-I{folder}" for folder in folders), "-shared"]
    command += ["-x", "c++", "-", "-x", "none", str(_runtime_library())]
    return _made(name + "-{}.so", text, command, [*sources, *_shim_headers()])


def _kernel_options():
    return _OPTIONS + (_SANITIZER_OPTIONS if SANITIZE else [])


@functools.cache
def _precompiled_header():
    """Return the path of the shim's header in the form that g++ loads at once."""
    options = [*_kernel_options(), "-w"]  # it warns of #pragma once in a file compiled alone
    command = [*options, "-x", "c++-header", str(HERE / "cuda_on_host.h")]
    return _made("header-{}/cuda_on_host.h.gch", "", command, _shim_headers())


@functools.cache
def _runtime_library():
    """Return the path of the scheduler's library, which kernel libraries link to."""
    options = ["-std=c++17", "-O2", "-g", "-fPIC", "-Wall", "-Werror", "-shared"]
    if SANITIZE:
        options.append("-DHOST_CUDA_ASAN")
    if os.environ.get("SBNET_HOST_UCONTEXT") == "1":
        options.append("-DHOST_CUDA_UCONTEXT")
    inputs = [HERE / "runtime.cpp", *_shim_headers()]
    return _made("runtime-{}.so", "", [*options, str(HERE / "runtime.cpp")], inputs)


def _shim_headers():
    return sorted(HERE.glob("*.h"))


def _made(name, text, command, inputs):
    """Run g++ unless the file exists; two processes do not make the same file."""
    digest = hashlib.sha256("\0".join([text, *command, _version()]).encode())
    for path in inputs:
        digest.update(b"\0" + path.name.encode() + b"\0" + path.read_bytes())
    made = _cache_dir() / name.format(digest.hexdigest()[:24])
    if made.exists():
        return made
    made.parent.mkdir(mode=0o700, exist_ok=True)
    with _locked(made.with_suffix(".lock")):
        if not made.exists():
            part = made.with_suffix(f".{os.getpid()}.part")
            try:
                _gpp([*command, "-o", str(part)], text)
                os.replace(part, made)
            finally:
                part.unlink(missing_ok=True)
    return made


def _gpp(arguments, text):
    result = subprocess.run(
        ["g++", *arguments], input=text, capture_output=True, text=True, env=plain_environment()
    )
    if result.returncode:
        raise CompileError(f"g++ failed:\n{result.stderr}")
    return result.stdout


def plain_environment():
    """Return the environment without the sanitizers, for the compiler's own processes."""
    return {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "ASAN_OPTIONS")}


@functools.cache
def _version():
    return _gpp(["--version"], "")


@contextlib.contextmanager
def _locked(path):
    import fcntl  # not on Windows, where this file can still be imported

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def _cache_dir():
    """Return the libraries' folder. Code is loaded from it, so only the user may write there."""
    default = Path(tempfile.gettempdir()) / f"sbnet-host-cuda-{os.getuid()}"
    path = Path(os.environ.get("SBNET_HOST_CACHE") or default).resolve()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise PermissionError(f"{path} must be yours and writable by you alone")
    return path
