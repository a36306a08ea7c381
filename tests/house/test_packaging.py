"""What users install: extras that suffice, a wheel that carries the kernels, NumPy alone."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tarfile
import tomllib
import typing
import zipfile
from pathlib import Path

import numpy as np
import pytest

import sbnet_cupy
from sbnet_cupy.core import compile as compiling
from sbnet_cupy.core.arrays import array_function
from sbnet_cupy.core.documentation import documented_as

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
MODULE_NAMES = {"scikit_image": "skimage"}  # where they differ from the distribution's


def modules_of(requirements):
    names = [re.match(r"[\w.-]+", text)[0].replace("-", "_") for text in requirements]
    return {MODULE_NAMES.get(name, name) for name in names}


def third_party_imports(paths):
    """Top-level names that files import unconditionally, when they are imported themselves."""
    own = {"sbnet_cupy", "host_cuda", "tests", *(path.stem for path in TESTS.iterdir())}
    found = set()
    for path in paths:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.partition(".")[0])
    return found - own - set(sys.stdlib_module_names)


def test_numpy_is_the_only_requirement():
    assert modules_of(PROJECT["dependencies"]) == {"numpy"}
    package = Path(sbnet_cupy.__file__).parent
    optional = {"demo", "torch", "jax", "tensorflow"}  # imported by who has what they need
    sources = [
        path
        for path in package.rglob("*.py")
        if not optional & set(path.relative_to(package).with_suffix("").parts)
    ]
    assert third_party_imports(sources) == {"numpy"}


def test_the_test_extra_is_enough_for_pytest():
    assert third_party_imports(TESTS.rglob("*.py")) <= modules_of(EXTRAS["test"]) | {"numpy"}
    assert set(EXTRAS["demo"]) <= set(EXTRAS["test"])


def test_extras():
    assert set(EXTRAS) == {
        "cuda12x", "cuda13x", "cudnn", "torch", "jax", "tensorflow", "demo", "test", "examples"
    }  # fmt: skip


def test_installed_metadata_agrees():
    try:
        installed = importlib.metadata.metadata("sbnet-cupy")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("runs from a checkout that is not installed")
    assert installed["Version"] == sbnet_cupy.__version__ == PROJECT["version"]
    assert installed["License-Expression"] == "Apache-2.0"
    assert set(installed.get_all("Provides-Extra")) == set(EXTRAS)
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="sbnet-cupy")
    assert callable(command.load())


def test_type_checkers_are_told_that_there_are_types():
    assert (Path(sbnet_cupy.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("decorator", [array_function, documented_as(sbnet_cupy.conv2d, "array")])
def test_type_checkers_see_the_signatures_of_decorated_functions(decorator):
    hints = typing.get_type_hints(decorator)
    assert isinstance(hints["function"], typing.TypeVar) and hints["return"] is hints["function"]


def test_type_checkers_take_no_default_for_all_that_a_parameter_may_be():
    """They would: one that is not annotated has the type of its default, a number or a text."""
    wide = [
        "background",
        "block_size",
        "dilation",
        "output_padding",
        "outside",
        "padding",
        "stride",
    ]
    public = {*sbnet_cupy.__all__, "sparsify"}
    for path in sorted(Path(sbnet_cupy.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            function = isinstance(node, ast.FunctionDef) and "network" not in path.parts
            if function and node.name in public:
                ordered = node.args.args[len(node.args.args) - len(node.args.defaults) :]
                named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                for argument, default in (*zip(ordered, node.args.defaults, strict=True), *named):
                    narrow = isinstance(default, ast.Constant) and default.value is not None
                    told = argument.annotation is not None
                    assert told or not narrow or argument.arg not in wide, (path, node.name)


def test_the_licence_is_apache():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text


WORKS_ALONE = """
import numpy as np
import sbnet_cupy as sb
from sbnet_cupy.__main__ import main

x, w = np.ones((1, 20, 20, 3), np.float32), np.ones((3, 3, 3, 4), np.float32)
p = sb.calc_block_params(x.shape, 8, 3)
grid = {"bsize": p.bsize, "boffset": p.boffset, "bstride": p.bstride}
active = sb.reduce_mask(x[..., 0] > 0, p.bcount, **grid)
assert np.allclose(sb.sparse_conv2d(x, w, active, p), sb.conv2d(x, w))
print(main(["info"]))
"""


def test_works_with_numpy_and_nothing_else(tmp_path):
    """In a Python that finds the standard library, NumPy and the package, and no more."""
    site = Path(np.__file__).parent.parent
    for source in (*site.glob("numpy"), *site.glob("numpy.libs"), Path(sbnet_cupy.__file__).parent):
        (tmp_path / source.name).symlink_to(source)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}){WORKS_ALONE}"
    command = [sys.executable, "-I", "-S", "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\n0\n")


# ---------------------------------------------------------------------------- wheel and sdist


@pytest.fixture(scope="module")
def build(require, tmp_path_factory):
    """Build without a network: hatchling is asked directly."""
    require("hatchling")
    from hatchling.builders.sdist import SdistBuilder
    from hatchling.builders.wheel import WheelBuilder

    def build(kind, root=ROOT):
        builder = {"wheel": WheelBuilder, "sdist": SdistBuilder}[kind](str(root))
        folder = tmp_path_factory.mktemp(kind)
        (path,) = builder.build(directory=str(folder), versions=["standard"])
        return Path(path)

    return build


@pytest.fixture(scope="module")
def wheel(build):
    with zipfile.ZipFile(build("wheel")) as file:
        yield file


def expected_files():
    """Path in the wheel -> file of the checkout."""
    package = [p for p in (ROOT / "sbnet_cupy").rglob("*") if p.is_file() and p.suffix != ".pyc"]
    files = {path.relative_to(ROOT).as_posix(): path for path in package}
    for path in filter(Path.is_file, (ROOT / "cuda_src").rglob("*")):
        files[f"sbnet_cupy/{path.relative_to(ROOT).as_posix()}"] = path
    return files


def test_the_wheel_holds_the_package_and_the_kernels_and_nothing_else(wheel):
    expected = expected_files()
    assert {"sbnet_cupy/py.typed", "sbnet_cupy/cuda_src/core/common.cuh"} <= set(expected)
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == set(expected)
    for name, path in expected.items():
        assert wheel.read(name) == path.read_bytes(), name


def test_the_wheel_is_pure_python_and_carries_the_licence(wheel):
    info = f"sbnet_cupy-{sbnet_cupy.__version__}.dist-info"
    assert wheel.filename.endswith("-py3-none-any.whl")
    assert b"Root-Is-Purelib: true" in wheel.read(f"{info}/WHEEL")
    assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    metadata = wheel.read(f"{info}/METADATA").decode()
    required = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.MULTILINE)
    assert required == ["numpy"]


def test_the_wheel_finds_its_own_kernels(wheel, tmp_path):
    """Also when the checkout's cuda_src is not beside the package."""
    wheel.extractall(tmp_path)
    code = "from sbnet_cupy.core.compile import SOURCE_DIR; print(SOURCE_DIR)"
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(tmp_path)]}\n{code}"],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    ).stdout.strip()  # fmt: skip
    assert Path(found).resolve() == (tmp_path / "sbnet_cupy" / "cuda_src").resolve()
    names = {path.relative_to(found) for path in Path(found).rglob("*")}
    assert names == {path.relative_to(ROOT / "cuda_src") for path in (ROOT / "cuda_src").rglob("*")}


def test_the_sdist_gives_the_same_wheel(build, wheel, tmp_path):
    with tarfile.open(build("sdist")) as file:
        file.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    assert (root / "tests" / "conftest.py").is_file()
    with zipfile.ZipFile(build("wheel", root)) as again:
        assert sorted(again.namelist()) == sorted(wheel.namelist())
        for name in wheel.namelist():
            assert again.read(name) == wheel.read(name), name


def test_the_checkout_finds_its_kernels():
    assert (compiling.SOURCE_DIR / "core" / "common.cuh").read_bytes() == (
        ROOT / "cuda_src" / "core" / "common.cuh"
    ).read_bytes()
