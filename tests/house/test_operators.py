"""Every operation is declared once, in one table, and known in few places."""

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import numpy as np
import pytest

import sbnet_cupy
from sbnet_cupy.core import operator
from sbnet_cupy.core.operator import Operator
from sbnet_cupy.core.spec import ArraySpec, spec_of
from sbnet_cupy.operators import OPERATORS
from support import bad_calls, site_bad_calls, stack_bad_calls

VALID = bad_calls.VALID | stack_bad_calls.VALID | site_bad_calls.VALID
ROOT = Path(sbnet_cupy.__file__).resolve().parent.parent
ADAPTERS = ("torch", "jax", "tensorflow", "demo", "__main__")
PUBLIC = [name for name in OPERATORS if hasattr(sbnet_cupy, name)]
OFFERED = ("reduce_mask", "sparse_gather", "sparse_scatter", "sparse_conv2d",
           "sparse_res_block_bottleneck")  # fmt: skip
OWN_CHECKS = {  # of operations that JAX makes of its own
    ROOT / "sbnet_cupy" / "jax" / f"{name}.py"
    for name in ("stack", "stack_pool", "sites", "submanifold", "site_pool", "norms", "voxelize")
}
KERNELS = ("reduce_mask", "sparse_gather", "sparse_scatter", "fused_conv", "fused_bottleneck")

# An argument of a public function, and the arrays or options of the operator that it becomes.
UNITS = {"weights": ("w1", "w2", "w3", "scale1", "shift1", "scale2", "shift2", "scale3", "shift3")}
TABLE = ("bin_counts", "active_block_indices", "grid", "block_size", "image_size")
SITES = ("rows", "valid", "kernel_size", "sites")
BECOMES = UNITS | {
    "indices": ("bin_counts", "active_block_indices"), "table": TABLE, "kernel_map": SITES,
}  # fmt: skip


def modules():
    for module in pkgutil.walk_packages(sbnet_cupy.__path__, "sbnet_cupy."):
        if module.name.split(".")[1] not in ADAPTERS:
            yield importlib.import_module(module.name)


def test_the_table_holds_every_operator():
    found = {id(v): v for m in modules() for v in vars(m).values() if isinstance(v, Operator)}
    assert {declared.name for declared in found.values()} == set(OPERATORS)
    assert len(found) == len(OPERATORS)


@pytest.mark.parametrize("name", PUBLIC)
def test_an_operator_names_the_arguments_of_its_function(name):
    declared = OPERATORS[name]
    parameters = inspect.signature(getattr(sbnet_cupy, name)).parameters
    wanted = {part for p in parameters for part in BECOMES.get(p, (p,))}
    named = {*declared.arrays, *declared.options}
    assert len(named) == len(declared.arrays) + len(declared.options)
    if name in ("sparse_conv2d", "sparse_res_block_bottleneck"):
        named -= {"scale", "in_place"}  # of a PackedWeights; whether out is x
    if "block_params" in wanted:
        wanted -= {"bsize", "capacity"}  # from which it is made
    assert named == wanted
    assert {*declared.results, *declared.linear} <= {*declared.arrays}


def call_of(name):
    """Return the arrays and options of the valid call of a public function."""
    declared = OPERATORS[name]
    parameters = inspect.signature(getattr(sbnet_cupy, name)).parameters
    given = {p: v.default for p, v in parameters.items() if v.default is not v.empty}
    for argument, value in VALID[name].items():
        parts = BECOMES.get(argument, (argument,))
        if argument == "table":
            value = (*value._arrays(), value.block_size, value.image_size)
        if argument == "kernel_map":
            made = value.of(np.asarray)
            valid, sites = made.target.valid(), made.source.capacity
            value = (made.rows, valid, made.kernel_size, sites)
        given |= dict(zip(parts, value if len(parts) > 1 else (value,), strict=True))
    if "block_params" in given:
        given["block_params"] = tuple(vars(given["block_params"]).values())
    given |= {"in_place": False} | ({} if "scale" in given else {"scale": None})
    return [given[a] for a in declared.arrays], tuple(given[o] for o in declared.options)


@pytest.mark.parametrize("name", PUBLIC)
def test_what_is_inferred_is_what_is_planned_and_computed(name):
    declared = OPERATORS[name]
    arrays, options = call_of(name)
    specs = [spec_of(array) for array in arrays]
    inferred, plan = declared.infer(specs, options), declared.plan_for(arrays, options)
    assert inferred == plan.results
    assert all(spec is None or type(spec) is ArraySpec for spec in inferred)
    assert declared.plan_of(specs, options) is plan is declared.find(specs, options)
    if name == "reduce_mask":  # infers room for all blocks, and cuts the list to their number
        return
    results = declared(arrays, options)
    results = list(results) if isinstance(results, tuple) else [results]
    if name == "sparse_res_block_bottleneck_grad":
        results[1:2] = results[1]._arrays()
    for spec, result in zip(inferred, results, strict=True):
        assert (spec is None) == (result is None)
        if spec is not None:
            assert (result.shape, result.dtype) == (spec.shape, spec.dtype)


def test_options_that_are_equal_but_of_another_type_have_another_plan():
    arrays, options = call_of("sparse_gather")
    declared = OPERATORS["sparse_gather"]
    assert declared.find([spec_of(a) for a in arrays], (4.0, *options[1:])) is None
    with pytest.raises(sbnet_cupy.ShapeError, match="bsize"):
        declared.plan_for(arrays, (4.0, *options[1:]))


def test_the_cache_is_bounded(monkeypatch):
    monkeypatch.setattr(operator, "_MOST", 10)
    operator.clear_plans()
    x, table = np.ones((1, 8, 8, 1)), VALID["sparse_gather"]
    for bsize in range(1, 30):
        call = table | {"x": x, "bsize": bsize}
        sbnet_cupy.sparse_gather(**call)
        assert len(operator._PLANS) <= 10
        assert operator._PLANS.weight == sum(plan.weight for plan in operator._PLANS.values())
    assert len(operator._PLANS) >= 5
    operator.clear_plans()
    assert not operator._PLANS


# Where an operation with a kernel has to be made known; beside them, an adapter has one file for
# each system (ops.py), and CHANGELOG.md has a line.
OWN = (
    "sbnet_cupy/**/{name}.py",  # function, checks, NumPy body, launch, declaration
    "cuda_src/**/{name}.cu",
    "tests/**/test_{name}.py",
    "benchmarks/**/bench_{name}.py",
)
LISTS = (
    "sbnet_cupy/__init__.py",
    "sbnet_cupy/operators.py",
    "tests/house/test_structure.py",  # public names
    "tests/support/bad_calls.py",
    "benchmarks/harness/run.py",
    "ARCHITECTURE.md",
)


@pytest.mark.parametrize("name", KERNELS)
def test_an_operation_is_known_in_twelve_places_at_most(name):
    for pattern in OWN:
        assert list(ROOT.glob(pattern.format(name=name))), pattern
    for path in LISTS:
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text(encoding="utf-8")), path
    assert len(OWN) + len(LISTS) <= 12


def names_in(path):
    """Return all words of a file that are code, not prose."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        yield getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", "")
        if isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
        elif isinstance(node, ast.Constant):
            yield node.value


@pytest.mark.parametrize("adapter", ["jax", "tensorflow"])
@pytest.mark.parametrize("name", OFFERED)
def test_an_adapter_knows_an_operation_in_three_places_at_most(adapter, name):
    """Where it is made from its declaration, its signature, and ``__all__``.

    The layers and ``block_table`` call reduce_mask besides.
    """
    folder = ROOT / "sbnet_cupy" / adapter
    known = {path.name for path in folder.glob("*.py") if name in names_in(path)}
    assert "__init__.py" in known
    assert len(known - ({"layers.py", "stack.py"} if name == "reduce_mask" else set())) <= 3, known


@pytest.mark.parametrize("adapter", ["jax", "tensorflow"])
def test_an_adapter_has_no_checks_of_its_own(adapter):
    """They are those of the declarations, but for what is decided before a mask is listed, and
    that what must hold features does.

    JAX makes those of a stack and of sites of its own, and calls the checks by name.
    """
    for path in set((ROOT / "sbnet_cupy" / adapter).glob("*.py")) - OWN_CHECKS:
        written = [name for name in names_in(path) if isinstance(name, str)]
        checks = {name for name in written if name.startswith("check_")}
        assert checks <= {"check_active_grid", "check_method", "check_tensor", "check_unit"}, path


def test_no_other_file_lists_the_operations():
    """A file of the package, or one that tests share, which knows all of them is one more place."""
    files = [*ROOT.glob("sbnet_cupy/**/*.py"), *ROOT.glob("tests/support/*.py")]
    words = {path: path.read_text(encoding="utf-8") for path in files}
    listing = {
        path.relative_to(ROOT).as_posix()
        for path, text in words.items()
        if all(re.search(rf"\b{name}\b", text) for name in KERNELS)
    }
    assert listing <= set(LISTS)
