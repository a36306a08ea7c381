"""Fixtures: the array libraries that every test runs on, and which optional parts must be there.

``SBNET_REQUIRE`` is a comma list of torch, torchvision, timm, jax, tensorflow, sklearn, g++, demo,
cupy and gpu: what it names must be present, and its absence fails where it would otherwise skip.
``HYPOTHESIS_PROFILE`` says how many examples a test draws: few (for slow checkers such as
compute-sanitizer), quick (the default) or exhaustive. A test that is marked exhaustive runs where
``-m`` asks for it: ``pytest -m ""`` runs everything.
"""

import collections
import functools
import importlib
import os
import shutil
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from support.fake_cupy import TORCH_CUDA, FakeCupy
from support.frameworks import FRAMEWORKS
from support.torch_cases import DEVICES, on_device

for _profile, _examples in (("few", 8), ("quick", 25), ("exhaustive", 60)):
    settings.register_profile(
        _profile, deadline=None, derandomize=True, print_blob=True, max_examples=_examples
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

os.environ.pop("COLUMNS", None)  # tests decide how wide the text of a command is
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave GPU memory to the others

REQUIRED = {name.strip() for name in os.environ.get("SBNET_REQUIRE", "").split(",") if name.strip()}
ROOT = Path(__file__).resolve().parent.parent
DEMO_MODULES = ("skimage", "matplotlib", "rich")


def pytest_collection_modifyitems(config, items):
    """Leave out writable NumPy arrays where the cases are fixed: read-only ones had the same.

    Drawn tests keep them, and draw more examples with them.
    """
    again = {
        item: None
        for item in items
        if hasattr(item, "callspec")
        and getattr(item.callspec.params.get("xp"), "id", item.callspec.params.get("xp")) == "numpy"
        and not getattr(item.obj, "is_hypothesis_test", False)
    }
    config.hook.pytest_deselected(items=list(again))
    items[:] = [item for item in items if item not in again]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config, specs):
    """Give the processes of ``-n`` a thread for each core: more would wait for each other.

    Also in what they start: PyTorch's threads spin while they wait.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // len(specs))))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With ``-n``, let idle processes take tests of others: a few take much longer than most."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_terminal_summary(terminalreporter):
    """Say why tests were skipped: a line for each reason, in place of one for each test."""
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = collections.Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in skipped
        if isinstance(report.longrepr, tuple)  # (file, line, reason)
    )
    if reasons:
        terminalreporter.section("skipped")
    for reason, count in reasons.most_common(20):
        terminalreporter.write_line(f"{count:6} {reason}")
    if len(reasons) > 20:
        terminalreporter.write_line(f"       and {len(reasons) - 20} other reasons: pytest -rs")


def require(name):
    """Return the module ``name`` (or what a tool is); skip without it, or fail if required."""
    found = _find(name)
    if found is None:
        if name in REQUIRED:
            pytest.fail(f"{name} is missing, and SBNET_REQUIRE names it")
        pytest.skip(f"needs {name}")
    return found


@functools.cache  # Python looks for a module that is missing again at every import
def _find(name):
    if name == "g++":
        return shutil.which("g++")
    if name == "demo":
        return all(_import(module) for module in DEMO_MODULES) or None
    if name == "gpu":
        cupy = _import("cupy")
        return cupy if cupy is not None and cupy.cuda.is_available() else None
    return _import(name)


def _import(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, at import: not ours to fix
        try:
            return importlib.import_module(name)
        except ImportError:
            return None


@pytest.fixture(name="require", scope="session")
def _require():
    return require


@pytest.fixture(scope="session")
def torch():
    module = require("torch")
    module.set_num_threads(1)  # threads that wait for a core cost more than tiny tensors gain
    return module


@pytest.fixture(scope="session")
def jax():
    return require("jax")


@pytest.fixture(scope="session")
def tf():
    return require("tensorflow")


@pytest.fixture(scope="session")
def st(torch):
    return importlib.import_module("sbnet_cupy.torch")


@pytest.fixture(params=DEVICES)
def device(request, torch):
    """Of tensors: for "cuda" both libraries need a GPU."""
    return on_device(require, torch, request.param)


@pytest.fixture(scope="session")
def sbj(jax):
    return importlib.import_module("sbnet_cupy.jax")


@pytest.fixture(scope="session")
def sbt(tf):
    return importlib.import_module("sbnet_cupy.tensorflow")


@pytest.fixture(scope="session", autouse=True)
def _memory_to_check():
    """Make CuPy's memory show mistakes, for slow runs on a GPU.

    SBNET_NO_POOL=1 gives each array its own allocation, so that memory checkers see its ends;
    SBNET_POISON=1 also fills it with NaN, so that a read of what nobody wrote shows in the result.
    """
    poison = os.environ.get("SBNET_POISON") == "1"
    if not poison and os.environ.get("SBNET_NO_POOL") != "1":
        return
    cupy = require("gpu")

    def allocate(nbytes):
        pointer = cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0)
        if poison and nbytes:
            pointer.memset(0xFF, nbytes)
        return pointer

    cupy.cuda.set_allocator(allocate)


class Library:
    """An array library under test: how to get arrays into it and out again."""

    def __init__(self, name, module, *, readonly=False):
        self.name = name
        self.module = module
        self.readonly = readonly

    def __repr__(self):
        return self.name

    def asarray(self, array):
        """Hand ``array`` over as an input: a copy, which the read-only library protects."""
        copy = self.writable(array)
        if self.readonly:
            copy.flags.writeable = False
        return copy

    def writable(self, array):
        """Hand ``array`` over as an output: a copy that may be written."""
        return self.module.array(np.ascontiguousarray(array).reshape(np.shape(array)), order="C")

    def to_numpy(self, array):
        """Bring an array of this library back."""
        assert type(array).__module__.split(".")[0] == self.module.__name__, type(array)
        return array if self.module is np else array.get()


def _gpu_expected():
    return "gpu" in REQUIRED or _find("gpu") is not None


def _library_names():
    cupy = pytest.param("cupy", marks=pytest.mark.gpu)
    writable = pytest.param("numpy", marks=pytest.mark.exhaustive)  # the other sees more mistakes
    return [writable, "numpy-readonly", *([cupy] if _gpu_expected() else [])]


@pytest.fixture(params=_library_names(), scope="session")
def xp(request):
    """Every array library: NumPy, NumPy with read-only inputs, and CuPy where there is a GPU."""
    if request.param == "cupy":
        return Library("cupy", require("gpu"))
    return Library(request.param, np, readonly=request.param == "numpy-readonly")


def _framework_names():
    cuda = [pytest.param(f"{name}-cuda", marks=pytest.mark.gpu) for name in ("torch", "jax")]
    return [*FRAMEWORKS, *(cuda if _gpu_expected() else [])]


@pytest.fixture(params=_framework_names(), scope="session")
def lib(request):
    """Every library that comes through the DLPack door, on the CPU and, if there is one, a GPU."""
    name, _, device = request.param.partition("-")
    module = require(name)
    return FRAMEWORKS[name](module, device, require("gpu")) if device else FRAMEWORKS[name](module)


def _places():
    return ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if _gpu_expected() else [])]


@pytest.fixture(params=_places(), scope="session")
def place(request, jax):
    """A device of JAX, and the library whose results must be the same there."""
    native = np if request.param == "cpu" else require("gpu")
    lib = FRAMEWORKS["jax"](jax, request.param, native)
    return types.SimpleNamespace(
        name=request.param, make=lib.make, address=lib.address, native=native.asarray
    )


@pytest.fixture(params=["eager", "graph", "unknown sizes"])
def call_tensors(request, tf):
    """Ways to call a function of tensors with NumPy arrays."""

    def wrap(function):
        def with_tensors(*arrays):
            tensors = [tf.constant(array) for array in arrays]
            if request.param == "eager":
                return function(*tensors)
            specs = None
            if request.param != "graph":  # a first size, of batch or list, that is not known
                specs = [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in tensors]
                specs[1:2] = [tf.TensorSpec(t.shape, t.dtype) for t in tensors[1:2]]
            return tf.function(function, input_signature=specs, autograph=False)(*tensors)

        return with_tensors

    wrap.static = request.param != "unknown sizes"
    return wrap


@pytest.fixture(scope="module")
def benchmarks():
    """Modules of the benchmarks can be imported, and what they need is there."""
    require("demo")
    require("torch")
    sys.path.insert(0, str(ROOT))
    yield
    sys.path.remove(str(ROOT))


@pytest.fixture
def fake_gpu(benchmarks, monkeypatch, torch):
    """A GPU's flow through the benchmarks, on a CuPy that is NumPy."""
    importlib.import_module("sbnet_cupy.torch")  # before: PyTorch looks into every module there is
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy())
    for name, fake in TORCH_CUDA.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    machine = importlib.import_module("benchmarks.harness.machine")
    monkeypatch.setattr(machine, "_output", lambda command: None)
    sizes = dict.fromkeys((True, False), 1 << 16)
    monkeypatch.setattr(importlib.import_module("benchmarks.harness.ceiling"), "GPU_BYTES", sizes)
