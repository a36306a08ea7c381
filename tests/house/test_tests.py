"""Rules for the tests and the benchmarks themselves."""

import ast
import functools
import inspect
import re
from pathlib import Path

import pytest

import sbnet_cupy

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
FILES = sorted(TESTS.rglob("*.py"))
CHECKS = re.compile(r"assert|check|raises|compare|^same$")  # names of functions that assert


@functools.cache
def nodes_of(path):
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def name_of(path):
    return path.relative_to(TESTS).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_test_imports_a_test(path):
    """What two test files need is in tests/support."""
    for node in nodes_of(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert not re.fullmatch(r"(\w+\.)+test_\w+", node.value), name_of(path)
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        if names[0].split(".")[0] not in ("jax", "numpy", "torch", "tensorflow"):  # jax.test_util
            parts = {part for name in names for part in name.split(".")}
            assert not [part for part in parts if part.startswith("test_")], name_of(path)


def names_in(function):
    """Every name that a function uses, of functions and methods among them."""
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def asserts(function):
    """Whether a function has an assert, or uses one whose name says that it asserts."""
    has_assert = any(isinstance(node, ast.Assert) for node in ast.walk(function))
    return has_assert or any(CHECKS.search(name) for name in names_in(function))


def test_every_test_asserts():
    """Itself, or by a function of its file, or by one whose name says so."""
    silent = []
    for path in (path for path in FILES if path.name.startswith("test_")):
        functions = [node for node in nodes_of(path) if isinstance(node, ast.FunctionDef)]
        sound = {function.name for function in functions if asserts(function)}
        for test in (f for f in functions if f.name.startswith("test_")):
            if test.name not in sound and not sound & set(names_in(test)):
                silent.append(f"{name_of(path)}: {test.name}")
    assert not silent


def is_of_gpus(node):
    """Whether a function, or the pytestmark of a file, is marked for a GPU."""
    marks = node.decorator_list if isinstance(node, ast.FunctionDef) else [node.value]
    return any("mark.gpu" in ast.unparse(mark) for mark in marks)


def test_what_requires_a_gpu_is_marked_so():
    """Or it is left out where those that are marked run: .ci/run_gpu."""
    unmarked = []
    for path in (path for path in FILES if path.name.startswith("test_")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        of_file = [n for n in body if isinstance(n, ast.Assign) and "pytestmark" in ast.unparse(n)]
        if any(map(is_of_gpus, of_file)):
            continue
        for test in (n for n in nodes_of(path) if isinstance(n, ast.FunctionDef)):
            needs = any(ast.unparse(line) == "require('gpu')" for line in test.body)
            if needs and test.name.startswith("test_") and not is_of_gpus(test):
                unmarked.append(f"{name_of(path)}: {test.name}")
    assert not unmarked


def test_tests_of_kernels_run_where_ci_watches_them():
    """CI runs these under sanitizers, and compiles for GPUs what they launch: see .ci/run."""
    shim = re.compile(r"^\s*(import host_cuda|from host_cuda|from support.*on_host)", re.MULTILINE)
    users = [path for path in FILES if path.name.startswith("test_")]
    users = [path for path in users if shim.search(path.read_text(encoding="utf-8"))]
    rooms = {path.relative_to(TESTS).parts[0] for path in users}
    watched = {"on_host", "core", "dense", "block_sparse", "submanifold"}
    assert {"on_host", "block_sparse"} <= rooms
    assert rooms - watched <= {"host_cuda", "on_gpu", "with_torch", "with_jax"}


def test_every_public_function_is_timed_or_it_is_said_why_not():
    """By a benchmark of its name, or in the table "Not timed on their own" of the README."""
    timed = {p.stem.removeprefix("bench_") for p in (ROOT / "benchmarks").rglob("bench_*.py")}
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    table = text.partition("## Not timed on their own")[2].partition("\n## ")[0]
    excused = set(re.findall(r"^\| `(\w+)` \| .{20,} \|$", table, re.MULTILINE))
    public = {n for n in sbnet_cupy.__all__ if inspect.isfunction(getattr(sbnet_cupy, n))}
    assert not public - timed - excused, "neither timed nor excused"
    assert excused <= public - timed, "excused, and timed or gone"
