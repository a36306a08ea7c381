"""The house rules: imports go down only, public names are exact, every one documented and run."""

import ast
import doctest
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import sbnet_cupy
from support.doctests import doctests_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(sbnet_cupy.__file__).resolve().parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

PUBLIC = {
    "ActiveBlocks",
    "BlockParams",
    "BlockTable",
    "BottleneckWeights",
    "CapacityError",
    "DTypeError",
    "DeviceError",
    "PackedBottleneck",
    "PackedWeights",
    "ShapeError",
    "block_table",
    "blocks_of",
    "calc_block_params",
    "calc_block_params_res_block",
    "conv2d",
    "conv2d_grad",
    "fused_bottleneck",
    "fused_conv",
    "mask_conv2d",
    "masks",
    "reduce_mask",
    "sparse_conv2d",
    "sparse_conv2d_grad",
    "sparse_gather",
    "sparse_gather_grad",
    "sparse_res_block_bottleneck",
    "sparse_res_block_bottleneck_grad",
    "sparse_scatter",
    "sparse_scatter_grad",
    "sparse_scatter_var",
    "CoordinateMap",
    "KernelMap",
    "SparseTensor",
    "coordinate_map",
    "dense_to_sparse",
    "dense_to_sparse_grad",
    "global_pool",
    "global_pool_grad",
    "inverse_conv",
    "inverse_conv_grad",
    "kernel_map",
    "site_conv",
    "site_conv_grad",
    "sparse_avg_pool",
    "sparse_avg_pool_grad",
    "sparse_max_pool",
    "sparse_max_pool_grad",
    "sparse_tensor",
    "sparse_tensor_grad",
    "sparse_to_dense",
    "sparse_to_dense_grad",
    "sparse_unfold",
    "sparse_unfold_grad",
    "sparse_unpool",
    "sparse_unpool_grad",
    "strided_conv",
    "strided_conv_grad",
    "submanifold_conv",
    "submanifold_conv_grad",
    "transposed_conv",
    "transposed_conv_grad",
    "voxelize",
    "stack_avg_pool",
    "stack_avg_pool_grad",
    "stack_conv2d",
    "stack_conv2d_grad",
    "stack_from_image",
    "stack_from_image_grad",
    "stack_global_pool",
    "stack_global_pool_grad",
    "stack_halo",
    "stack_halo_grad",
    "stack_interpolate",
    "stack_interpolate_grad",
    "stack_max_pool",
    "stack_max_pool_grad",
    "stack_per_block",
    "stack_per_block_grad",
    "stack_pixel_mask",
    "stack_to_image",
    "stack_to_image_grad",
}
FUNCTIONS = sorted(n for n in PUBLIC if inspect.isfunction(getattr(sbnet_cupy, n, None)))

# Who may import whom: a module imports from lower levels, or from siblings, never in a circle, and
# no system imports another. Rooms that are still to come have their level too.
ORDER = (
    ("errors",),
    ("core",),
    ("dense",),
    ("block_sparse", "submanifold", "block_weights", "sparse_kernel"),
    ("networks", "blocks", "blocks_and_sites", "operators"),
    ("torch", "jax", "tensorflow"),
    ("dask", "demo", "__main__"),
)
LEVELS = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
SYSTEMS = ORDER[3]
ADAPTERS = LEVELS["torch"]


# Imports in a function that go up: a method returns what is made there of two systems.
UPWARD = {("block_sparse.active_blocks", "blocks_and_sites")}
# Imports in a function that close a circle: a class is made by an operation that returns it.
DEFERRED = UPWARD | {
    ("block_sparse.active_blocks", "block_sparse.mask.reduce_mask"),
    ("submanifold.sparse_tensor", "submanifold.dense_conversion"),
}


def module_name(path):
    """Dotted name below the package: ``ops.sparse_gather``; the package itself is empty."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def imports_of(path, in_functions=True):
    """Names, below the package, of our modules that a file imports, also in functions or not."""
    package = list(path.relative_to(PACKAGE).parts[:-1])
    nodes = set(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    if not in_functions:
        functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        nodes.difference_update(*map(ast.walk, functions))
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            yield from (".".join(n[1:]) for n in names if n[0] == "sbnet_cupy")
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
            elif node.module.split(".")[0] == "sbnet_cupy":
                base = []
            else:
                continue
            module = (node.module or "").split(".") if node.module else []
            base = base + (module if node.level else module[1:])
            for alias in node.names:
                whole = ".".join([*base, alias.name])
                yield whole if whole in MODULES else ".".join(base)


def level(name):
    return LEVELS[name.split(".")[0]]


@pytest.mark.parametrize("name", [n for n in MODULES if n])
def test_imports_go_down_only(name):
    assert name.split(".")[0] in LEVELS, f"{name} has no level: add it to LEVELS"
    for imported in imports_of(MODULES[name]):
        if not imported:  # the package itself: a demo or a command uses it like anyone else
            assert level(name) >= ADAPTERS, f"{name} imports the package"
        else:
            goes_down = level(imported) <= level(name) or (name, imported) in UPWARD
            assert goes_down, f"{name} imports {imported}, which is above it"


@pytest.mark.parametrize(("name", "imported"), sorted(DEFERRED))
def test_exceptions_are_imports_in_functions(name, imported):
    assert imported in set(imports_of(MODULES[name]))
    assert imported not in set(imports_of(MODULES[name], in_functions=False))
    assert (level(imported) > level(name)) == ((name, imported) in UPWARD)


def test_no_system_imports_another():
    rooms = {name: name.split(".")[0] for name in MODULES}
    assert "block_sparse" in rooms.values()
    for name in (name for name in MODULES if rooms[name] in SYSTEMS):
        imported = {other.split(".")[0] for other in imports_of(MODULES[name])}
        assert not imported & set(SYSTEMS) - {rooms[name]}, name


def test_imports_go_in_no_circle():
    graph = {
        name: {other for other in imports_of(path) if other and (name, other) not in DEFERRED}
        for name, path in MODULES.items()
        if name
    }
    assert tuple(TopologicalSorter(graph).static_order())  # raises CycleError


def test_only_two_files_know_how_kernels_are_made():
    words = re.compile(r"RawModule|RawKernel|nvrtc")
    named = {n: p for n, p in MODULES.items() if words.search(p.read_text(encoding="utf-8"))}
    found = {name for name, path in named.items() if words.search(code_of(path))}
    assert found <= {"core.compile", "core.launch", "__main__", "demo", "demo.report"}, found


def code_of(path):
    """A file's code without its comments and docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
    return ast.unparse(tree)


def test_public_names_are_exact():
    assert set(sbnet_cupy.__all__) == PUBLIC
    assert len(sbnet_cupy.__all__) == len(PUBLIC)
    for name in PUBLIC:
        assert getattr(sbnet_cupy, name) is not None
    own = {n for n, v in vars(sbnet_cupy).items() if n[0] != "_" and not inspect.ismodule(v)}
    assert own == PUBLIC - {"masks"}


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True, text=True, check=True, env=os.environ | environment,
    ).stdout  # fmt: skip


def test_the_geometry_is_public_under_blocks():
    """Users import it from sbnet_cupy.blocks, whatever room it lives in."""
    from sbnet_cupy import blocks

    for name in ("BlockParams", "calc_block_params", "calc_block_params_res_block"):
        assert getattr(blocks, name) is getattr(sbnet_cupy, name)
    helpers = {"image_size", "is_integer", "kernel_pair", "output_size", "padding_pairs", "pair"}
    assert helpers == {n for n in blocks.__all__ if not hasattr(sbnet_cupy, n)}


def test_import_brings_numpy_and_nothing_else():
    code = "import sys, sbnet_cupy; print(*{name.partition('.')[0] for name in sys.modules})"
    bare = "import sys, numpy; print(*{name.partition('.')[0] for name in sys.modules})"
    extra = set(run_python(code).split()) - set(run_python(bare).split())
    assert extra - set(sys.stdlib_module_names) == {"sbnet_cupy"}


def test_numpy_arrays_need_no_other_library():
    """A whole pass over the ops, with every optional library made impossible to import."""
    code = """
import sys
for name in "cupy cupyx torch jax jaxlib tensorflow ml_dtypes scipy skimage matplotlib".split():
    sys.modules[name] = None
import numpy as np, sbnet_cupy as sb
x = np.ones((1, 8, 8, 2), np.float32)
active = sb.reduce_mask(x[..., :1].copy(), (2, 2), bsize=4)
blocks = sb.sparse_gather(x, *active, bsize=4, scale=np.ones(2, np.float32), activation="gelu")
print(sb.sparse_scatter(blocks, *active, x, bsize=4).shape, active.count())
"""
    assert run_python(code).strip() == "(1, 8, 8, 2) 4"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_is_documented(name):
    function = getattr(sbnet_cupy, name)
    text = inspect.getdoc(function)
    first, rest = text.split("\n", 1)
    assert first.endswith(".") and len(first) < 100
    for section in ("Parameters", "Returns", "Raises", "Examples"):
        assert re.search(rf"^{section}\n-+$", rest, re.MULTILINE), f"{name} has no {section}"
    assert ">>> " in rest
    for parameter in inspect.signature(function).parameters:
        assert re.search(rf"^[^>]*\b{parameter}\b", rest, re.MULTILINE), (name, parameter)


def documented_modules():
    names = [m.name for m in pkgutil.walk_packages([str(PACKAGE)], "sbnet_cupy.")]
    return [n for n in names if n.split(".")[1] not in ("torch", "jax", "tensorflow", "__main__")]


@pytest.mark.parametrize("name", ["sbnet_cupy", *documented_modules()])
def test_doctests_run(name):
    runner = doctest.DocTestRunner()
    for test in doctests_of(importlib.import_module(name)):
        runner.run(test)
    assert not runner.summarize().failed


def test_every_public_function_has_an_example_that_runs():
    modules = {getattr(sbnet_cupy, name).__module__ for name in FUNCTIONS}
    tests = [t for name in modules for t in doctests_of(importlib.import_module(name))]
    run = {test.name.rpartition(".")[2] for test in tests if test.examples}
    assert set(FUNCTIONS) <= run


def project_files():
    """Every text file that belongs to the project, as git would list it."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.split("\n")  # fmt: skip
    paths = [ROOT / name for name in listed if name] or list(ROOT.rglob("*"))
    kinds = {".py", ".cu", ".cuh", ".h", ".md", ".toml", ".yml", ".yaml", ".cfg", ".txt", ".ipynb"}
    return [p for p in paths if p.is_file() and (p.suffix in kinds or p.parent.name == ".ci")]


def test_no_file_names_a_path_of_some_machine():
    pattern = re.compile(r"(?<![\w.>)~])/(?:work|root|home|Users|mnt)" + r"/[\w.]|[A-Z]:\\\\?Users")
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in project_files()
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == sbnet_cupy.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## \[?v?(\d+\.\d+\.\d+)", changelog, re.MULTILINE)[1] == project["version"]


def test_one_op_one_stem():
    """Each kernel has its op and its test under the same stem, in the same room."""
    files = sorted((ROOT / "cuda_src").rglob("*.cu"))
    assert {"reduce_mask", "sparse_gather", "sparse_scatter"} <= {path.stem for path in files}
    assert len({path.stem for path in files}) == len(files)
    for path in files:
        place = path.relative_to(ROOT / "cuda_src").with_suffix("")
        name = place.as_posix()
        assert name.replace("/", ".") in MODULES, name
        assert (ROOT / "tests" / place.parent / f"test_{place.name}.py").is_file(), name
        source = path.read_text(encoding="utf-8")
        assert f"sbnet_cupy/{name}.py" in source, f"{name}.cu does not name its op"
        op = MODULES[name.replace("/", ".")].read_text(encoding="utf-8")
        assert f"cuda_src/{name}.cu" in op, f"{name}.py does not name its kernel"


def test_packages_have_the_same_rooms():
    """A room of cuda_src, tests or benchmarks with a system's name is one of the package."""
    for top in ("cuda_src", "tests", "benchmarks"):
        for room in ("core", "dense", *SYSTEMS):
            for folder in (ROOT / top / room).rglob("*/"):
                place = folder.relative_to(ROOT / top)
                if place.name != "__pycache__":
                    assert (PACKAGE / place).is_dir(), f"{top}/{place}"


def test_kernels_include_no_other_system():
    """core/ includes itself, dense/ also core/, a system also both."""
    rooms = ("core", "dense", *SYSTEMS)
    below = {room: {*rooms[: min(rooms.index(room), 2)], room} for room in rooms}
    found, folder = {}, ROOT / "cuda_src"
    for path in sorted(folder.rglob("*.cu*")):
        place = path.relative_to(folder).as_posix()
        found[place] = re.findall(r'^#include "([^"]+)"', path.read_text("utf-8"), re.MULTILINE)
    assert len(found) > 50
    for place, included in found.items():
        allowed = below[place.split("/")[0]]
        assert {name.split("/")[0] for name in included} <= allowed, place
        assert set(included) <= found.keys(), place


_BRANCH = re.compile(r"\bif (?:constexpr )?\(((?:[^()]|\([^()]*\))*)\)\s*")
_ALONE = re.compile(r"elected\(\)|\b(?:thread|threadIdx\.x|lane)(?: % 32)? == ")


def branch_at(text, start):
    """Return the statement or the block in braces that begins there."""
    if text[start] != "{":
        return text[start : text.index(";", start) + 1]
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if not depth:
            return text[start : at + 1]
    raise AssertionError(f"no closing brace after {text[start : start + 60]!r}")


def test_no_lane_waits_alone():
    """The others would go on, and overwrite the uniform registers that its copies use."""
    alone = []
    for path in sorted((ROOT / "cuda_src").rglob("*.cu*")):
        text = path.read_text("utf-8")
        found = [m for m in _BRANCH.finditer(text) if _ALONE.search(m[1])]
        alone += [(path.name, branch_at(text, m.end())) for m in found]
    assert len(alone) > 30
    assert not [
        (name, body) for name, body in alone if "barrier_wait" in body or "_for_all" in body
    ]


def test_there_is_no_utils():
    assert not [p.name for p in SOURCES if re.search("util|helper|common|misc", p.stem)]
