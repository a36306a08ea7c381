"""From a template to machine code, without a GPU: names, NVRTC, the cache on disk, parameters."""

import ctypes
import functools
import os
import re
import shutil
import stat
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import sbnet_cupy
from sbnet_cupy import DeviceError, DTypeError
from sbnet_cupy.core import arrays, compile_ahead
from sbnet_cupy.core import compile as compiling
from sbnet_cupy.core import launch as kernels
from sbnet_cupy.core.rehearsal import Rehearsal, rehearsing
from support import strategies

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
TOY = """#include "core/common.cuh"
template <int ADDED> __global__ void toy(int* x) { x[threadIdx.x] += ADDED + FROM_HEADER; }
"""


STEMS = sorted(
    path.relative_to(compiling.SOURCE_DIR).with_suffix("").as_posix()
    for path in compiling.SOURCE_DIR.rglob("*.cu")
)


@pytest.fixture(scope="module")
def nvrtc(require):
    """NVRTC through CuPy; neither needs a GPU."""
    require("cupy")
    from cupy.cuda import nvrtc

    try:
        nvrtc.getVersion()
    except Exception as error:  # whatever CuPy raises when it finds no library
        if "cupy" in os.environ.get("SBNET_REQUIRE", "").split(","):
            raise
        pytest.skip(f"needs NVRTC: {error}")
    return nvrtc


@pytest.fixture
def forget():
    """Make compile.py look at the environment and the sources again, now and after the test."""

    def forget():
        compiling._cache_dir.cache_clear()
        compiling._source_hash.cache_clear()

    forget()
    yield forget
    forget()


@pytest.fixture
def cache(tmp_path, monkeypatch, forget):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sbnet_cupy"


@pytest.fixture
def toy(tmp_path, monkeypatch, forget):
    """A folder of sources with the one kernel ``toy``."""
    folder = tmp_path / "sources"
    (folder / "core").mkdir(parents=True)
    (folder / "toy.cu").write_text(TOY)
    (folder / "core" / "common.cuh").write_text("constexpr int FROM_HEADER = 1;\n")
    monkeypatch.setattr(compiling, "SOURCE_DIR", folder)
    return folder


@pytest.fixture
def compiled(monkeypatch):
    """The list of compilations that happen."""
    calls, compile_cubin = [], compiling.compile_cubin

    def record(*arguments):
        calls.append(arguments)
        return compile_cubin(*arguments)

    monkeypatch.setattr(compiling, "compile_cubin", record)
    return calls


# ---------------------------------------------------------------------------- names


def test_name_expression():
    template = ("Bytes<16>::type", 18, -1, True, False, "Add<float>")
    expected = "gather<Bytes<16>::type, 18, -1, true, false, Add<float>>"
    assert compiling.name_expression("gather", template) == expected


@pytest.mark.parametrize("dtype", strategies.DTYPES, ids=str)
def test_every_dtype_has_a_cpp_name(dtype):
    assert re.fullmatch(r"[\w <>]+", compiling.cpp_name(dtype, "x"))


def test_cpp_names_differ():
    names = [compiling.cpp_name(dtype, "x") for dtype in strategies.DTYPES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("dtype", ["M8[s]", "m8[s]", "V4", "S2", "U1", "g", "O"])
def test_a_dtype_without_a_cpp_name_is_refused(dtype):
    with pytest.raises(DTypeError, match=r"^weights must be one of bool, .*complex128 on a GPU"):
        compiling.cpp_name(np.dtype(dtype), "weights")


@pytest.mark.parametrize(
    ("capability", "name"),
    [("75", "sm_75"), ("80", "sm_80"), ("86", "sm_86"), ("89", "sm_89"), ("90", "sm_90a"),
     ("100", "sm_100"), ("103", "sm_103"), ("120", "sm_120")],
)  # fmt: skip
def test_architecture(capability, name):
    assert compiling.architecture(capability) == name


@pytest.mark.parametrize("capability", ["35", "60", "72"])
def test_an_old_gpu_is_refused(capability):
    with pytest.raises(DeviceError, match=rf"7\.5 or newer, got {capability}; use NumPy"):
        compiling.architecture(capability)


@pytest.mark.parametrize(
    ("multiples", "expected"),
    [((32,), 16), ((6,), 2), ((16, 24), 8), ((0, 4), 4), ((3,), 1), ((), 16)],
)
def test_vector_bytes(multiples, expected):
    assert arrays.vector_bytes(*multiples) == expected


# ---------------------------------------------------------------------------- compiling


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(nvrtc, toy, arch):
    cubin, symbols, log = compiling.compile_cubin("toy", ["toy<1>"], arch)
    assert cubin.startswith(b"\x7fELF")
    assert list(symbols) == ["toy<1>"]
    assert symbols["toy<1>"].encode() in cubin
    assert f"'{symbols['toy<1>']}' for '{arch}'" in log
    assert "registers" in log


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("stem", STEMS)
def test_every_source_compiles_alone(nvrtc, stem, arch):
    """The templates of it; .ci/compile_kernels.py compiles instantiations."""
    cubin, _, _ = compiling.compile_cubin(stem, [], arch)
    assert cubin[:4] == b"\x7fELF"


def test_several_instantiations_of_one_program(nvrtc, toy):
    expressions = [f"toy<{i}>" for i in (1, 2, 3)]
    cubin, symbols, _ = compiling.compile_cubin("toy", expressions, "sm_80")
    assert list(symbols) == expressions
    assert all(symbol.encode() in cubin for symbol in symbols.values())


def test_a_compile_error_names_the_file_and_the_line(nvrtc, toy):
    (toy / "toy.cu").write_text(TOY + "\nvoid broken( {}\n")
    with pytest.raises(RuntimeError) as info:
        compiling.compile_cubin("toy", ["toy<1>"], "sm_80")
    assert str(info.value).startswith(f"NVRTC could not compile {toy / 'toy.cu'} for sm_80")
    assert f"{(toy / 'toy.cu').as_posix()}(4): error" in str(info.value)


def test_an_unknown_kernel_is_an_error(nvrtc, toy):
    with pytest.raises(RuntimeError, match="no_such_kernel"):
        compiling.compile_cubin("toy", ["no_such_kernel<1>"], "sm_80")


# ---------------------------------------------------------------------------- cache on disk


def on_disk(expression="toy<1>", arch="sm_80"):
    return compiling.cubin_on_disk("toy", expression, arch)


def test_a_kernel_is_compiled_once(nvrtc, toy, cache, compiled, forget):
    path, symbol = on_disk()
    assert path.parent == cache
    assert symbol.encode() in path.read_bytes()
    forget()
    assert on_disk() == (path, symbol)
    assert compiled == [("toy", ["toy<1>"], "sm_80")]
    assert sorted(file.suffix for file in cache.iterdir()) == [".cubin", ".json"]


def damage(path, how):
    content = path.read_bytes()
    path.write_bytes({
        "truncated": content[: len(content) // 2],
        "longer": content + b"\0",
        "empty": b"",
        "foreign": b"\x7fELF" + bytes(len(content) - 4),
    }[how])  # fmt: skip


@pytest.mark.parametrize("how", ["truncated", "longer", "empty", "foreign"])
@pytest.mark.parametrize("suffix", [".cubin", ".json"])
def test_a_damaged_file_is_never_trusted(nvrtc, toy, cache, compiled, how, suffix):
    path, symbol = on_disk()
    before = path.read_bytes()
    damage(path.with_suffix(suffix), how)
    assert on_disk() == (path, symbol)
    assert len(compiled) == 2
    assert path.read_bytes() == before
    assert on_disk() == (path, symbol)
    assert len(compiled) == 2


@pytest.mark.parametrize("note", ["", "null", "[]", "3", "{}", '{"sha256": 1}', "\udc80"])
def test_a_strange_note_is_never_trusted(nvrtc, toy, cache, compiled, note):
    path, symbol = on_disk()
    path.with_suffix(".json").write_bytes(note.encode(errors="surrogateescape"))
    assert on_disk() == (path, symbol)
    assert len(compiled) == 2


def test_a_missing_file_is_made_again(nvrtc, toy, cache, compiled):
    path, symbol = on_disk()
    for missing in (path, path.with_suffix(".json")):
        missing.unlink()
        assert on_disk() == (path, symbol)
        assert path.is_file()
    assert len(compiled) == 3


def test_whatever_matters_changes_the_key(nvrtc, toy, cache, compiled, forget, monkeypatch):
    """A changed source or header, another expression, architecture or NVRTC: another file."""
    paths = [on_disk()[0], on_disk("toy<2>")[0], on_disk(arch="sm_90a")[0]]
    (toy / "common.cuh").write_text("constexpr int FROM_HEADER = 2;\n")
    forget()
    paths.append(on_disk()[0])
    (toy / "toy.cu").write_text(TOY + "// changed\n")
    forget()
    paths.append(on_disk()[0])
    (toy / "other.cuh").write_text("\n")
    forget()
    paths.append(on_disk()[0])
    monkeypatch.setattr(nvrtc, "getVersion", lambda: (99, 9))
    paths.append(on_disk()[0])
    assert len(set(paths)) == len(compiled) == 7


def test_kernels_are_compiled_at_once(nvrtc, toy, cache, compiled, monkeypatch):
    """By several threads, once each; those on disk and those that are loaded are not."""
    monkeypatch.setattr(compiling, "current_architecture", lambda: "sm_80")
    together, compile_cubin = threading.Barrier(2, timeout=60), compiling.compile_cubin

    def wait(*arguments):
        together.wait()
        return compile_cubin(*arguments)

    on_disk("toy<1>")
    monkeypatch.setattr(compiling, "compile_cubin", wait)
    monkeypatch.setattr(compile_ahead, "_processors", lambda: 2)
    names = {("toy", "toy", (number,)): None for number in (1, 2, 3)}
    compile_ahead.compile_kernels(names)
    assert sorted(call[1] for call in compiled) == [["toy<1>"], ["toy<2>"], ["toy<3>"]]
    compile_ahead.compile_kernels(names)
    assert len(compiled) == 3
    assert sorted(path.suffix for path in cache.iterdir()) == 3 * [".cubin"] + 3 * [".json"]
    assert [on_disk(f"toy<{n}>")[0].is_file() for n in (1, 2, 3)] == 3 * [True]
    compile_ahead.compile_kernels({})
    assert len(compiled) == 3


def test_a_kernel_that_does_not_compile_is_an_error_behind_the_others(
    nvrtc, toy, cache, monkeypatch
):
    monkeypatch.setattr(compiling, "current_architecture", lambda: "sm_80")
    with pytest.raises(Exception, match="absent"):
        compile_ahead.compile_kernels([("toy", "absent", (1,)), ("toy", "toy", (1,))])
    assert sorted(path.suffix for path in cache.iterdir()) == [".cubin", ".json"]


def test_kernels_are_compiled_beside_the_caller(nvrtc, toy, cache, compiled, monkeypatch):
    """Each once, while the caller goes on; an error is that of who loads the kernel."""
    monkeypatch.setattr(compiling, "current_architecture", lambda: "sm_80")
    may_go_on, compile_cubin = threading.Event(), compiling.compile_cubin

    def held(*arguments):
        assert may_go_on.wait(60)
        return compile_cubin(*arguments)

    monkeypatch.setattr(compiling, "compile_cubin", held)
    beside = compile_ahead.Beside()
    beside.wait()  # for nothing
    for number in (1, 2, 1):
        beside["toy", "toy", (number,)] = None
    beside["toy", "absent", (1,)] = None
    assert not list(cache.iterdir())
    may_go_on.set()
    beside.wait()
    assert sorted(call[1] for call in compiled) == [["absent<1>"], ["toy<1>"], ["toy<2>"]]
    assert sorted(path.suffix for path in cache.iterdir()) == 2 * [".cubin"] + 2 * [".json"]
    beside["toy", "toy", (1,)] = None
    beside["toy", "toy", (3,)] = None  # by threads of their own
    beside.wait()
    assert len(compiled) == 4


def test_what_was_compiled_is_noted_on_disk(nvrtc, toy, cache, monkeypatch, forget):
    monkeypatch.setattr(compiling, "current_architecture", lambda: "sm_80")
    note = compile_ahead.Note("a network")
    assert not note.is_there()
    note.write()
    assert note.is_there() and compile_ahead.Note("a network").is_there()
    assert not compile_ahead.Note("another").is_there()
    (toy / "toy.cu").write_text(TOY + "// changed\n")
    forget()
    changed = compile_ahead.Note("a network")
    assert not changed.is_there()
    shutil.rmtree(cache)  # as where there is no space
    changed.write()
    assert not changed.is_there()


def test_the_cache_belongs_to_the_user_alone(cache):
    assert compiling._cache_dir() == cache
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_the_cache_is_in_the_home_folder_by_default(tmp_path, monkeypatch, forget):
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compiling._cache_dir() == tmp_path / ".cupy" / "kernel_cache" / "sbnet_cupy"


def temporary(path):
    """Whether a folder is a fresh one of this user's own."""
    made = path.name.startswith("sbnet_cupy-") and stat.S_IMODE(path.stat().st_mode) == 0o700
    shutil.rmtree(path)
    return made


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702])
def test_a_folder_that_others_may_write_is_not_used(cache, mode):
    cache.mkdir(parents=True)
    cache.chmod(mode)
    assert temporary(compiling._cache_dir())


def test_without_a_place_for_the_cache_a_temporary_one_does(cache):
    cache.parent.parent.mkdir(exist_ok=True)
    cache.parent.write_text("a file where the folder should be")
    assert temporary(compiling._cache_dir())


def test_a_temporary_cache_works(nvrtc, toy, cache, compiled):
    cache.parent.write_text("a file where the folder should be")
    first = on_disk()
    assert on_disk() == first
    assert len(compiled) == 1
    shutil.rmtree(first[0].parent)


def test_sources_are_found_beside_the_package_or_in_it():
    package = Path(sbnet_cupy.__file__).resolve().parent
    assert compiling.SOURCE_DIR in (package / "cuda_src", package.parent / "cuda_src")
    assert (compiling.SOURCE_DIR / "core" / "common.cuh").is_file()


# ---------------------------------------------------------------------------- launching


@pytest.fixture
def launches(require, monkeypatch):
    """What reaches the driver: a function's address, sizes, stream, and the words it is given."""
    cupy = require("cupy")
    launches = []

    def launch_kernel(function, *rest):
        *sizes, table, _ = rest
        addresses = (ctypes.c_void_p * 10).from_address(table)
        words = [ctypes.c_int64.from_address(address).value for address in addresses]
        launches.append((function, *sizes, words))

    monkeypatch.setattr(cupy.cuda.driver, "launchKernel", launch_kernel)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda device: SimpleNamespace(ptr=55))
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 0)
    return launches


FUNCTION = SimpleNamespace(kernel=SimpleNamespace(ptr=44))
ARRAY = SimpleNamespace(data=SimpleNamespace(ptr=2**47))
SCALARS = (-1, 2**62, -(2**63), True, 0.1, -0.0, float("inf"))


def launch_of(grid, shared, pointers, scalars, maps=()):
    """Return a launch of FUNCTION, with parameters of its own."""
    kinds = "".join("d" if isinstance(scalar, float) else "q" for scalar in scalars)
    parameters = kernels._Parameters(FUNCTION, 256, shared, pointers, kinds, len(maps))
    return kernels._Launch(parameters, kernels._extent(grid), scalars, maps)


def test_parameters_reach_the_kernel_as_its_64_bit_words(launches):
    run = launch_of(7, 1024, 3, SCALARS)
    run(ARRAY, None, ARRAY)
    run(None, ARRAY, None)
    words = [-1, 2**62, -(2**63), 1, *np.array(SCALARS[4:]).view(np.int64).tolist()]
    fixed = (44, 7, 1, 1, 256, 1, 1, 1024, 55)
    assert launches == [(*fixed, [2**47, 0, 2**47, *words]), (*fixed, [0, 2**47, 0, *words])]


def test_launches_that_differ_in_sizes_share_parameters(launches):
    """Each launches its own grid with its own scalars, in any order."""
    first = launch_of(7, 0, 3, SCALARS)
    second = kernels._Launch(first._parameters, (8, 2, 1), (*SCALARS[:-1], 1.5))
    for run in (first, second, second, first):
        run(ARRAY, None, None)
    assert [fixed[1:4] for *fixed, _ in launches] == [[7, 1, 1], [8, 2, 1], [8, 2, 1], [7, 1, 1]]
    last = [int(np.float64(number).view(np.int64)) for number in (SCALARS[-1], 1.5)]
    assert [words[-1] for *_, words in launches] == [last[0], last[1], last[1], last[0]]
    assert len({tuple(words[:-1]) for *_, words in launches}) == 1


def test_threads_that_share_parameters_launch_their_own(monkeypatch, launches):
    """Each fills them in while no other does."""
    read = read_slowly(monkeypatch)
    first = launch_of(7, 0, 3, SCALARS)
    second = kernels._Launch(first._parameters, (8, 1, 1), (*SCALARS[:-1], 1.5))

    def repeat(run, address):
        array = SimpleNamespace(data=SimpleNamespace(ptr=address))
        for _ in range(300):
            run(array, None, array)

    with ThreadPoolExecutor(4) as pool:
        calls = [(first, 1), (second, 2), (first, 3), (second, 4)]
        list(pool.map(lambda call: repeat(*call), calls))
    last = {7: SCALARS[-1], 8: 1.5}
    expected = {7: {1, 3}, 8: {2, 4}}
    assert len(read) == 1200
    for grid, words in read:
        assert words[0] == words[2] and words[0] in expected[grid] and words[1] == 0
        assert np.array(words[-1:], np.int64).view(np.float64)[0] == last[grid]


def read_slowly(monkeypatch):
    """Let launches read their parameters slowly; return what they read: grids, and words."""
    import cupy

    read = []

    def launch_kernel(function, grid, *rest):
        addresses = (ctypes.c_void_p * 10).from_address(rest[-2])
        words = []
        for number, address in enumerate(addresses):
            words.append(ctypes.c_int64.from_address(address).value)
            if number == 0:
                time.sleep(0)  # let another thread run
        read.append((grid, words))

    monkeypatch.setattr(cupy.cuda.driver, "launchKernel", launch_kernel)
    return read


def test_tensor_maps_follow_the_words(launches, monkeypatch):
    """Each is the map of the array that it names, at the address that this call has."""
    made = {address: ctypes.c_int64(-address) for address in (2**47, 0)}
    monkeypatch.setattr(kernels, "encode", lambda tensor_map, address: made[address])
    maps = (SimpleNamespace(array=1), SimpleNamespace(array=0))
    run = launch_of(7, 0, 2, SCALARS[:6], maps)
    run(ARRAY, None)
    run(None, ARRAY)
    first, second = (words for *_, words in launches)
    assert (first[:2], first[-2:]) == ([2**47, 0], [0, -(2**47)])
    assert (second[:2], second[-2:]) == ([0, 2**47], [-(2**47), 0])


def test_a_bound_launch_takes_the_arrays_that_are_not_decided(launches):
    """Neither it nor the launch that it is of changes the other's parameters."""
    run = launch_of(7, 1024, 3, SCALARS)
    bound = run.bound((None, ARRAY, None), (2, 0))
    bound(ARRAY, None)
    run(ARRAY, None, None)
    with kernels.recorded() as calls:
        bound(None, ARRAY)
    assert calls == [(bound, (None, ARRAY))]
    assert [words[:3] for *_, words in launches] == [
        [0, 2**47, 2**47], [2**47, 0, 0], [2**47, 2**47, 0],
    ]  # fmt: skip
    assert len({(*sizes, *words[3:]) for *sizes, words in launches}) == 1


def test_a_bound_series_takes_the_arrays_that_are_not_decided(launches):
    """Each of its launches takes those that it reads, in its own order."""
    first, second = launch_of(7, 0, 3, SCALARS), launch_of(9, 0, 3, SCALARS)
    series = kernels.Series((first, (2, 0, 1)), (second, (3, None, 0)))
    bound = series.bound((ARRAY, None, None, ARRAY), (1, 2))
    bound(None, ARRAY)
    bound.on(55, [16, 32])
    series.bound((None,) * 4, (3, 2, 1, 0)).on(55, [8, 16, 24, 40])
    assert [words[:3] for *_, words in launches] == [
        [2**47, 2**47, 0], [2**47, 0, 2**47], [32, 2**47, 16], [2**47, 0, 2**47],
        [16, 40, 24], [8, 0, 40],
    ]  # fmt: skip


def test_a_bound_launch_keeps_its_arrays(launches):
    array = SimpleNamespace(data=ARRAY.data, memory=np.zeros(1))
    known = weakref.ref(array.memory)
    bound = launch_of(7, 0, 1, ()).bound((array,), ())
    del array
    assert known() is not None
    del bound
    assert known() is None


def test_an_empty_grid_launches_nothing(launches):
    launch_of(0, 0, 3, SCALARS)(ARRAY, None, None)
    assert launches == []


def test_what_is_launched_can_be_recorded_and_done_again(launches):
    run = launch_of(7, 1024, 3, SCALARS)
    empty = launch_of(0, 0, 1, ())
    filled = []
    run(ARRAY, None, None)
    with kernels.recorded() as calls:
        run(None, ARRAY, None)
        empty(ARRAY)
        kernels.enqueue(filled.append, 3)
        with kernels.recorded() as inner:
            run(ARRAY, ARRAY, ARRAY)
    run(ARRAY, None, None)
    assert [arguments for _, arguments in calls] == [(None, ARRAY, None), (3,)]
    assert [arguments for _, arguments in inner] == [(ARRAY, ARRAY, ARRAY)]
    done = list(launches)
    for function, arguments in calls:
        function(*arguments)
    assert launches == [*done, done[1]] and filled == [3, 3]


class Loaded:
    """A function of a module: a launch may have the dynamic shared memory that it was allowed."""

    def __init__(self, symbol):
        self.kernel = SimpleNamespace(ptr=self)
        self.max_dynamic_shared_size_bytes = compiling.SHARED_BY_DEFAULT


@pytest.fixture
def driver(monkeypatch):
    """A GPU's driver: the files that were loaded, and the launches, as (function, numbers)."""
    seen = SimpleNamespace(loads=[], launches=[])

    def module(path):
        seen.loads.append(path)
        return SimpleNamespace(get_function=Loaded)

    cuda = SimpleNamespace(
        runtime=SimpleNamespace(getDevice=lambda: 0, setDevice=lambda device: None),
        driver=SimpleNamespace(
            launchKernel=lambda *given: seen.launches.append(given), CUDADriverError=RuntimeError
        ),
        get_current_stream=lambda device: SimpleNamespace(ptr=55),
        Device=lambda *number: SimpleNamespace(compute_capability="90"),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, RawModule=module))
    monkeypatch.setattr(kernels, "_LOADED", {})
    monkeypatch.setattr(kernels, "_PARAMETERS", {})
    monkeypatch.setattr(compiling, "cubin_on_disk", lambda *key: ("file.cubin", "symbol"))
    return seen


def test_shared_memory_is_allowed_again_when_a_launch_needs_more(driver):
    """A template is loaded once; its launches come in any order, and all may run afterwards."""
    sizes = [kib << 10 for kib in (60, 100, 80, 16, 48, 227)]
    prepared = [kernels.prepare("stem", "toy", (1,), 7, 256, 0, (), size) for size in sizes]
    for run in prepared + prepared[::-1]:
        run()
    for function, *_, shared, _, _, _ in driver.launches:
        assert shared <= function.max_dynamic_shared_size_bytes
    assert [given[-4] for given in driver.launches] == sizes + sizes[::-1]
    assert len(driver.loads) == 2  # with the shared memory of every kernel, and with more


def test_a_rehearsal_launches_nothing_and_notes_what_is_not_loaded(driver):
    """What it has prepared is a launch like others when it is over."""
    known = kernels.prepare("stem", "known", (), 7, 256, 1, ())
    array, skipped = SimpleNamespace(data=SimpleNamespace(ptr=16)), []

    class Noted(Rehearsal):
        def skips(self, stem, addresses):
            skipped.append((stem, *addresses))
            return super().skips(stem, addresses)

    rehearsal = Noted()
    with rehearsing(rehearsal):
        new = kernels.prepare("stem", "new", (1,), 5, 256, 1, (3,))
        series = kernels.Series((new, (0,)), (known, (0,)))
        bound = new.bound((None,), (0,))
        later = kernels.Later(lambda: kernels.prepare("stem", "later", (), 3, 256, 1, ()))
        for run in (known, new, series, later):
            run(array)
            run.on(55, [16])
        known.bound((None,), (0,)).on(55, [16])
        bound.on(55, [16])
    assert list(rehearsal.kernels) == [("stem", "new", (1,)), ("stem", "later", ())]
    assert not driver.launches and len(driver.loads) == 1
    assert len(skipped) == 12 and set(skipped) == {("stem", 16), (None, 16)}
    for run in (known, new, series, later):
        run(array)
        run.on(55, [16])
    bound.on(55, [16])
    grids = [given[1] for given in driver.launches]
    assert grids == [7, 7, 5, 5, 5, 7, 5, 7, 3, 3, 5]
    assert len(driver.loads) == 3


def test_a_launch_of_a_rehearsal_may_be_kept(driver):
    rehearsal = Rehearsal()
    with rehearsing(rehearsal):
        make = functools.partial(kernels.prepare, "stem", "a", (), 7, 256, 0, ())
        kept = kernels.Later(functools.cache(make))
        kept()
    kernels.Later(lambda: kept)()
    assert list(rehearsal.kernels) == [("stem", "a", ())] and len(driver.launches) == 1


def test_a_rehearsal_launches_kernels_of_some_files(driver):
    array, rehearsal = SimpleNamespace(data=SimpleNamespace(ptr=16)), Rehearsal(("a", "b"))
    with rehearsing(rehearsal):
        for stem in "abc":
            kernels.prepare(stem, "kernel", (), 7, 256, 1, ())(array)
    assert list(rehearsal.kernels) == [("c", "kernel", ())]
    assert len(driver.launches) == len(driver.loads) == 2


def test_a_rehearsal_is_of_its_thread_alone(driver):
    launch = kernels.prepare("stem", "toy", (), 7, 256, 0, ())
    with rehearsing(Rehearsal()), ThreadPoolExecutor(1) as pool:
        launch()
        pool.submit(launch).result()
    assert len(driver.launches) == 1


def test_a_rehearsal_within_another_ends_alone(driver):
    outer, inner = Rehearsal(), Rehearsal()
    with rehearsing(outer):
        with rehearsing(inner):
            kernels.prepare("stem", "a", (), 7, 256, 0, ())()
        kernels.prepare("stem", "b", (), 7, 256, 0, ())()
    assert [list(its.kernels) for its in (outer, inner)] == [
        [("stem", "b", ())],
        [("stem", "a", ())],
    ]
    assert not driver.launches


def test_tensor_maps_of_a_launch_of_a_rehearsal(driver, monkeypatch):
    described, made = [], ctypes.c_int64()
    monkeypatch.setattr(kernels, "encode", lambda *given: described.append(given) or made)
    array, its = SimpleNamespace(data=SimpleNamespace(ptr=16)), SimpleNamespace(array=0)
    with rehearsing(Rehearsal()):
        launch = kernels.prepare("stem", "mapped", (), 7, 256, 1, (), maps=(its,))
    launch(array)
    assert described == [(its, 16)] and len(driver.launches) == 1


def test_a_launch_is_prepared_once_when_it_is_used(driver):
    made = []

    def prepare():
        made.append(kernels.prepare("stem", "a", (), 7, 256, 0, ()))
        return made[-1]

    later = kernels.Later(prepare)
    assert not made
    for _ in range(2):
        later()
        later.on(55, [])
    assert len(made) == 1 and len(driver.launches) == 4


def test_a_rehearsal_tells_copies_by_their_file():
    """They are made where kernels of that file are launched, and always when it is over."""
    copied, asked = [], []
    given, out = (
        SimpleNamespace(
            nbytes=nbytes,
            data=SimpleNamespace(ptr=ptr, copy_from_device_async=lambda *its: copied.append(its)),
        )
        for ptr, nbytes in ((16, 8), (64, 4))
    )

    class Noted(Rehearsal):
        def skips(self, stem, addresses):
            asked.append((stem, *addresses))
            return super().skips(stem, addresses)

    with rehearsing(Noted(("lists",))):
        kernels.copy_first("others", out, given)
        assert not copied
        kernels.copy_first("lists", out, given)
    kernels.copy_first("others", out, given)
    assert copied == 2 * [(given.data, 4)]
    assert asked == [("others", 64, 16), ("lists", 64, 16)]


def test_null_pointers_of_what_a_rehearsal_launches():
    """Those that a kernel is not launched with are told of all its arrays."""
    skipped, array = [], SimpleNamespace(data=SimpleNamespace(ptr=16))
    rehearsal = SimpleNamespace(skips=lambda *given: skipped.append(given))
    with rehearsing(rehearsal):
        kernels.Later(lambda: kernels._NOTHING)(None, array)
        kernels.Later(lambda: kernels._NOTHING).bound((None, array), (1,)).on(55, [16])
    assert skipped == [(None, [0, 16]), (None, [16])]
