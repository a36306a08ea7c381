"""What a run ran on: the device, the versions, the commit, and the size of the cache."""

import os
import platform
import re
import subprocess
from pathlib import Path

import numpy as np

import sbnet_cupy
from sbnet_cupy.demo.interrupts import held_back

ROOT = Path(__file__).resolve().parents[2]


def describe(cupy, torch, commit=None):
    """Return the columns that all rows of a run share; ``cupy`` is None for a run on the CPU."""
    if cupy and not cupy.cuda.is_available():
        raise SystemExit("CuPy finds no CUDA device; benchmarks with --cpu run without one")
    runtime = cupy.cuda.runtime if cupy else None
    return {
        "gpu": gpu_name(cupy) if cupy else cpu_name(),
        "driver": _driver(runtime) if cupy else "",
        "cuda": _dotted(runtime.runtimeGetVersion()) if cupy else "",
        "cupy": cupy.__version__ if cupy else "",
        "torch": torch.__version__ if torch else "",
        "numpy": np.__version__,
        "commit": commit or _commit() or f"version {sbnet_cupy.__version__}",
    }


def results_folder(columns, cpu, out=None):
    """Make the folder that a run's rows go to, ``out`` or that of the device; return it."""
    name = "cpu" if cpu else folder_name(columns["gpu"])
    folder = out or ROOT / "benchmarks" / "results" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def gpu_name(cupy):
    """Return the name of CuPy's current device."""
    return cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()


def cpu_name():
    """Return the processor's name and the number of cores that this process may use."""
    found = re.search(r"^model name\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    name = found[1] if found else platform.processor() or platform.machine()
    cores = cpu_cores()
    return f"{name}, {cores} core{'s' if cores > 1 else ''}"


def cpu_cores():
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_busy():
    """Whether more threads than there are cores wanted to run in the last five minutes, about."""
    return hasattr(os, "getloadavg") and os.getloadavg()[1] > cpu_cores() + 0.5


def folder_name(device):
    """Return the name of a device's folder: ``NVIDIA H200`` is ``h200``."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower().replace("nvidia", "")).strip("-") or "device"


def gpu_cache_bytes(cupy):
    """Return the size of the L2 cache of CuPy's current device."""
    return int(cupy.cuda.Device().attributes["L2CacheSize"])


def cpu_cache_bytes():
    """Return the size of the CPU's last cache, or a guess."""
    sizes = [_text(f"/sys/devices/system/cpu/cpu0/cache/index{i}/size") for i in range(5)]
    units = {"K": 1 << 10, "M": 1 << 20}
    found = [re.fullmatch(r"(\d+)([KM])\s*", size) for size in sizes]
    return max((int(size[1]) * units[size[2]] for size in found if size), default=32 << 20)


def import_torch(cpu):
    """Return PyTorch set up for this run, or None where it cannot take part."""
    try:
        with held_back():
            import torch
    except ImportError:
        return None
    if cpu:
        torch.set_num_threads(cpu_cores())
        return torch
    return torch if torch.cuda.is_available() else None


def _driver(runtime):
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    version = (_output(query) or "").partition("\n")[0]
    return version or f"CUDA {_dotted(runtime.driverGetVersion())}"


def _commit():
    commit = _output(["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"])
    if not commit:
        return None
    changed = _output(["git", "-C", str(ROOT), "status", "--porcelain", "-uno"])
    return f"{commit}-changed" if changed else commit


def _output(command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _dotted(version):
    return f"{version // 1000}.{version % 1000 // 10}"


def _text(path):
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
