"""sbnet_cupy.torch as a package: its names, what its import needs, its documentation."""

import doctest
import importlib
import inspect
import re
import subprocess
import sys

import pytest

import sbnet_cupy as sb

PUBLIC = {
    "calc_block_params",
    "calc_block_params_res_block",
    "mask_conv2d",
    "nn",
    "reduce_mask",
    "sparse_conv2d",
    "sparse_gather",
    "sparse_res_block_bottleneck",
    "sparse_scatter",
    "sparse_scatter_var",
    "sparsify",
}
SITES = {
    "compile_ahead", "coordinate_map", "dense_to_sparse", "global_pool", "graphed", "inverse_conv",
    "kernel_map", "masked_batch_norm", "site_conv", "sparse_avg_pool", "sparse_max_pool",
    "sparse_tensor", "sparse_to_dense", "sparse_unfold", "sparse_unpool", "strided_conv",
    "submanifold_conv", "transposed_conv", "voxelize",
}  # fmt: skip
PUBLIC |= SITES


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_without_torch_the_import_says_what_to_install():
    code = """
import sys
sys.modules["torch"] = None
import sbnet_cupy
try:
    import sbnet_cupy.torch
except ImportError as error:
    print(error)
"""
    assert 'pip install "sbnet-cupy[torch]"' in run_python(code)


@pytest.mark.parametrize("version", ["2.5.1", "1.13.0+cu117", "2.0.0a0+git"])
def test_an_old_torch_is_refused(torch, monkeypatch, version):
    check = importlib.import_module("sbnet_cupy.torch")._version.check_version
    check()
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(
        ImportError, match=rf"needs PyTorch 2\.6 or newer, got {re.escape(version)}"
    ):
        check()


def test_public_names_are_exact(st):
    assert set(st.__all__) == PUBLIC and len(st.__all__) == len(PUBLIC)
    assert set(st.nn.__all__) == {"SparseBottleneck", "SparseConv2d"}
    own = {n for n, v in vars(st).items() if n[0] != "_" and not inspect.ismodule(v)}
    assert own == PUBLIC - {"nn"}
    for name in PUBLIC & set(sb.__all__):
        core = inspect.signature(getattr(sb, name))
        assert str(inspect.signature(getattr(st, name))) == str(core), name


@pytest.mark.parametrize("name", sorted(PUBLIC - {"nn"}))
def test_every_function_is_documented(st, name):
    text = inspect.getdoc(getattr(st, name))
    for section in ("Parameters", "Returns", "Raises", "Examples"):
        assert re.search(rf"^{section}\n-+$", text, re.MULTILINE), f"{name} has no {section}"
    if name in sb.__all__ and name not in SITES:  # in the core's words, but for tensors
        text = text.partition("Parameters\n")[2].partition("Examples\n")[0]
        assert not re.search("NumPy|CuPy|array", text)
        for parameter in inspect.signature(getattr(st, name)).parameters:
            assert re.search(rf"\b{parameter}\b", text), parameter


EXAMPLES = [
    "ops", "layers", "modules.sparse_conv2d", "modules.sparse_bottleneck", "sparsify",
    "submanifold.ahead", "submanifold.convs", "submanifold.graphs", "submanifold.norms",
    "submanifold.pools", "submanifold.sites",
]  # fmt: skip


def test_the_examples_of_every_function_run(st):
    modules = {inspect.unwrap(getattr(st, name)).__module__ for name in PUBLIC - {"nn"}}
    own = {name for name in modules if name.startswith("sbnet_cupy.torch.")}
    assert own <= {f"sbnet_cupy.torch.{name}" for name in EXAMPLES}


@pytest.mark.parametrize("module", EXAMPLES)
def test_examples_run(st, torch, module):
    module = sys.modules[f"sbnet_cupy.torch.{module}"]
    torch.manual_seed(0)
    globs = {**vars(st), **vars(module), "torch": torch}
    runner, examples = doctest.DocTestRunner(), 0
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, globs=globs):
        examples += len(test.examples)
        runner.run(test)
    assert examples and not runner.summarize().failed


def test_bfloat16_without_ml_dtypes_is_refused(torch, require):
    require("torch")
    code = """
import sys
sys.modules["ml_dtypes"] = None
import torch, sbnet_cupy.torch as st, sbnet_cupy
one = torch.ones(1, dtype=torch.int32)
try:
    x = torch.ones(1, 4, 4, 2, dtype=torch.bfloat16)
    st.sparse_gather(x, one, one.new_zeros(1, 3), bsize=2)
except sbnet_cupy.DTypeError as error:
    print(error)
"""
    assert "pip install ml_dtypes" in run_python(code)
