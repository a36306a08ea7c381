"""Run an instantiation of a kernel on NumPy arrays: the CPU's ``sbnet_cupy.core.launch.launch``."""

import concurrent.futures
import ctypes
import dataclasses
import functools
import math
import operator
import os
import re
import subprocess
from pathlib import Path

import numpy as np

from . import compiler
from .instantiations import read_instantiations, record

CUDA_SRC = Path(__file__).resolve().parents[2] / "cuda_src"

# Limits of the GPUs that kernels must fit, in bytes.
_MAX_STATIC_SHARED = 48 * 1024
_MAX_SHARED = 227 * 1024
_MAX_CLUSTER = 16  # 8 are portable
_PER_LIBRARY = 16  # instantiations that `prepare` compiles together

_LOADED = {}  # (source directory, stem, kernel, template) -> _Kernel


class KernelError(RuntimeError):
    """A kernel did what would hang or corrupt it on a GPU, such as a divergent barrier."""


class _Region(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


class _Launch(ctypes.Structure):  # as in runtime.h
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dynamic_shared_bytes", ctypes.c_size_t),
        ("shared_variables", ctypes.POINTER(_Region)),
        ("shared_variable_count", ctypes.c_size_t),
        ("strict", ctypes.c_uint),
        ("reversed", ctypes.c_uint),
        ("cluster", ctypes.c_uint),
    )


class _TensorMap(ctypes.Structure):  # as in async_copy.h
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.c_longlong * 3),
        ("strides", ctypes.c_longlong * 2),
        ("box", ctypes.c_longlong * 3),
        ("itemsize", ctypes.c_longlong),
        ("unused", ctypes.c_char * 48),
    )


@dataclasses.dataclass
class _Kernel:
    name: str
    library: ctypes.PyDLL  # keeps it loaded
    run: object  # (void** arguments, Launch*) -> error message or None
    letters: str  # a letter for each parameter: r, w pointers (const or not), i, d, m tensor map
    shared_variables: ctypes.Array
    shared_elsewhere: bool  # functions of its library have such variables too


def launch(
    stem, kernel, template, grid, block, args, shared=0, *, cluster=1, source_dir=None, strict=True
):
    """Run ``kernel<template...>`` of ``cuda_src/<stem>.cu`` on the CPU.

    Arguments as in ``sbnet_cupy.core.launch.launch``; grid and block may also be tuples (x, y, z).
    ``cluster`` blocks, consecutive in x, run at the same time and reach each other's dynamic shared
    memory. ``source_dir`` replaces ``cuda_src``. Not ``strict``: as on GPUs since Volta, a barrier
    does not wait for threads that have exited and may be met at two places in the source.
    ``SBNET_HOST_ORDER=reverse`` gives the threads of a block, or of a cluster, their turns from
    last to first, which shows some missing barriers.
    """
    grid, block = _extent("grid", grid, 0, 2**31 - 1), _extent("block", block, 1, 1024)
    if not 1 <= cluster <= _MAX_CLUSTER or grid[0] % cluster:
        raise ValueError(
            f"cluster must be from 1 to {_MAX_CLUSTER} blocks that divide grid x, "
            f"got {cluster} for a grid of {grid}"
        )
    if 0 in grid:
        return
    if source_dir is None:
        record(stem, kernel, template)
    instance = _load([(stem, kernel, template)], source_dir)[0]
    values = _parameters(instance, args)
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    static = sum(region.bytes for region in instance.shared_variables)
    if static > _MAX_STATIC_SHARED or static + shared > _MAX_SHARED:
        raise ValueError(
            f"{instance.name}: shared memory must be at most {_MAX_STATIC_SHARED} bytes static and "
            f"{_MAX_SHARED} in all, got {static} static and {shared} dynamic"
        )
    if cluster > 1 and (static or instance.shared_elsewhere):
        raise ValueError(
            f"{instance.name}: the shim has no clusters of kernels with static __shared__ "
            "variables, of which all blocks have the same copy; use dynamic shared memory"
        )
    request = _Launch(
        grid,
        block,
        shared,
        instance.shared_variables,
        len(instance.shared_variables),
        strict,
        os.environ.get("SBNET_HOST_ORDER") == "reverse",
        cluster,
    )
    error = instance.run(pointers, ctypes.byref(request))
    if error is not None:
        raise KernelError(f"{instance.name}: {error.decode()}")


def prepare(instantiations, *, source_dir=None):
    """Compile (stem, kernel, template) triples together and in parallel, ahead of `launch`."""
    directory = Path(source_dir or CUDA_SRC).resolve()
    batches = _batches([(directory, *instantiation) for instantiation in instantiations])
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda batch: _load([key[1:] for key in batch], source_dir), batches))


def describe(maps, arrays):
    """Return the arguments for TensorMaps of ``sbnet_cupy.core.tensor_map``, of these arrays."""
    return [_described(one, arrays[one.array]) for one in maps]


def _described(its, array):
    size, alignment = ctypes.sizeof(_TensorMap), 64
    room = ctypes.create_string_buffer(size + alignment)
    made = _TensorMap.from_buffer(room, -ctypes.addressof(room) % alignment)
    made.data, made.itemsize = array.ctypes.data, its.itemsize
    made.sizes[:], made.strides[:], made.box[:] = its.sizes, its.strides, its.box
    return made


def constants(stem, expressions):
    """Return the values of C++ constant expressions, of integers, in ``cuda_src/<stem>.cu``."""
    lines = ['#include "cuda_on_host.h"', f'#include "{stem}.cu"']
    lines += [
        f'extern "C" __attribute__((visibility("default"))) const long long constant_{i} = {text};'
        for i, text in enumerate(expressions)
    ]
    name = stem.rpartition("/")[2]
    path = compiler.kernel_library(f"{name}-constants", "\n".join(lines) + "\n", CUDA_SRC)
    library = ctypes.CDLL(str(path))
    return [
        ctypes.c_longlong.in_dll(library, f"constant_{i}").value for i in range(len(expressions))
    ]


def sm_count():
    """Return a number of multiprocessors: small, so that persistent grids take several turns."""
    return 4


def _extent(name, value, least, most):
    """Return three sizes from an int or a tuple of up to three."""
    sizes = value if isinstance(value, tuple) else (value,)
    sizes = tuple(map(operator.index, sizes)) + (1,) * (3 - len(sizes))
    if len(sizes) != 3 or min(sizes) < least or math.prod(sizes) > most:
        raise ValueError(
            f"{name} must be up to three sizes from {least}, of at most {most} in all, got {value}"
        )
    return sizes


def _parameters(instance, args):
    """Return the arguments as the C values that the kernel takes."""
    if len(args) != len(instance.letters):
        raise TypeError(f"{instance.name} takes {len(instance.letters)} arguments, got {len(args)}")
    return [
        _parameter(f"argument {i} of {instance.name}", letter, value)
        for i, (letter, value) in enumerate(zip(instance.letters, args, strict=True))
    ]


def _parameter(name, letter, value):
    if letter in "rw":
        if value is None:
            return ctypes.c_void_p(None)
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{name} must be a NumPy array or None, got {value!r}")
        if not value.flags.c_contiguous:
            raise ValueError(f"{name} must be C-contiguous, got strides {value.strides}")
        if letter == "w" and not value.flags.writeable:
            raise ValueError(f"{name} is a pointer that the kernel may write, got read-only memory")
        return ctypes.c_void_p(value.ctypes.data)
    if letter == "i" and isinstance(value, (int, np.integer)):
        if not -(2**63) <= value < 2**63:
            raise OverflowError(f"{name} must fit in a long long, got {value}")
        return ctypes.c_longlong(int(value))
    if letter == "d" and isinstance(value, (float, np.floating)):
        return ctypes.c_double(float(value))
    if letter == "m" and isinstance(value, _TensorMap):
        return value
    wanted = {"i": "an int", "d": "a float", "m": "what describe() returns"}[letter]
    raise TypeError(f"{name} must be {wanted}, got {value!r}")


def _expression(kernel, template):
    """Return the C++ name of an instantiation: ``kernel<args...>``, or ``kernel`` without any."""
    spelled = (str(a).lower() if isinstance(a, bool) else str(a) for a in template)
    return f"{kernel}<{', '.join(spelled)}>" if template else kernel


def _load(instantiations, source_dir):
    """Return the _Kernel of each instantiation of one stem; compile together what is missing."""
    directory = Path(source_dir or CUDA_SRC).resolve()
    keys = [(directory, stem, kernel, tuple(template)) for stem, kernel, template in instantiations]
    missing = {key for key in keys if key not in _LOADED}
    if missing:
        _check_preload()
    together = _together() if source_dir is None else {}
    while missing:
        batch = together.get(next(iter(missing))) or sorted(missing - set(together), key=repr)
        names, path = _library(batch)
        _LOADED.update(zip(batch, _open(path, names), strict=True))
        missing -= set(batch)
    return [_LOADED[key] for key in keys]


def _library(batch):
    """Compile instantiations of one stem; return their names, and the path of the library."""
    directory, stem = batch[0][:2]
    names = [_expression(kernel, template) for _, _, kernel, template in batch]
    lines = ['#include "cuda_on_host.h"', f'#include "{stem}.cu"']
    lines += [f"HOST_CUDA_ENTRY({i}, {name})" for i, name in enumerate(names)]
    text = "\n".join(lines) + "\n"
    return names, compiler.kernel_library(Path(stem).name, text, directory)


@functools.cache
def _together():
    """Return {key: the keys compiled with it} of what ``SBNET_HOST_TOGETHER`` lists."""
    path = os.environ.get("SBNET_HOST_TOGETHER")
    listed = [(CUDA_SRC, *key) for key in read_instantiations(path)] if path else []
    return {key: batch for batch in _batches(listed) for key in batch}


def _batches(keys):
    """Split keys into those of one stem, a library each."""
    by_stem = {}
    for key in keys:
        by_stem.setdefault(key[1], []).append(key)
    for members in by_stem.values():
        for start in range(0, len(members), _PER_LIBRARY):
            yield members[start : start + _PER_LIBRARY]


def compile_together():
    """Compile what ``SBNET_HOST_TOGETHER`` lists, on all cores, without loading it.

    It is a file that an earlier run wrote, with ``SBNET_RECORD_INSTANTIATIONS`` naming it. A run
    that launches the same then compiles nothing; each kernel alone takes about twice as long.
    """
    batches = {id(batch): batch for batch in _together().values()}.values()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_library, sorted(batches, key=len, reverse=True)))


def _check_preload():
    if compiler.SANITIZE and "libasan" not in os.environ.get("LD_PRELOAD", ""):
        raise RuntimeError(
            "SBNET_SANITIZE=1 needs libasan in this process from its start; "
            "run python -m tests.host_cuda.sanitized, with pytest's arguments"
        )


def _open(path, names):
    library = ctypes.PyDLL(str(path))  # keeps Python's lock: one kernel at a time
    symbols = _symbols(path)
    kernels, elsewhere = [], any(map(_is_shared_elsewhere, symbols.items()))
    for i, name in enumerate(names):
        run, signature, address = (
            library[f"{role}_{i}"] for role in ("run", "signature", "address")
        )
        run.restype = signature.restype = ctypes.c_char_p
        address.restype = ctypes.c_void_p
        regions = _shared_variables(symbols, f"run_{i}", run, address())
        kernels.append(_Kernel(name, library, run, signature().decode(), regions, elsewhere))
    return kernels


def _symbols(path):
    """Return {name: (kind, address in the file, size)} of a library, local symbols included."""
    listing = subprocess.run(
        ["nm", "-S", "--defined-only", str(path)],
        capture_output=True,
        text=True,
        check=True,
        env=compiler.plain_environment(),
    ).stdout
    rows = re.findall(r"^([0-9a-f]+) ([0-9a-f]+) (\w) (.+)$", listing, re.MULTILINE)
    return {name: (kind, int(address, 16), int(size, 16)) for address, size, kind, name in rows}


def _is_shared_elsewhere(symbol):
    """Return whether a symbol is a ``__shared__`` variable of a function that is no kernel."""
    name, (kind, *_) = symbol
    return kind == "b" and name.startswith("_ZZ") and not name.startswith("_ZZL")


def _shared_variables(symbols, entry_name, entry, kernel_address):
    """Return the memory of a kernel's static ``__shared__`` variables.

    They are static variables of the kernel's function, and mangled as such: those of the function
    ``_ZL4sumI...`` are called ``_ZZL4sumI...E<name>``.
    """
    base = ctypes.cast(entry, ctypes.c_void_p).value - symbols[entry_name][1]
    place = ("t", kernel_address - base)  # t: code; b: variables that start as zero
    kernel = next(name for name, symbol in symbols.items() if symbol[:2] == place)
    prefix = f"_ZZ{kernel.removeprefix('_Z')}E"
    found = [
        (base + address, size)
        for name, (kind, address, size) in symbols.items()
        if kind == "b" and name.startswith(prefix)
    ]
    return (_Region * len(found))(*found)
