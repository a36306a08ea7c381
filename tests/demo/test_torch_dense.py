"""PyTorch's dense computation is the same as ours, and is timed only if it is."""

import dataclasses
import sys

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy.demo import picture, points, torch_dense
from sbnet_cupy.demo.progress import Progress


@pytest.fixture(autouse=True, scope="module")
def _extra(require, torch):
    require("demo")


def results_of(prepared):
    with prepared.settings():
        return {name: prepared.to_native(launch()) for name, launch in prepared.launches.items()}


def check(prepared, expected, terms):
    assert prepared.name.startswith("PyTorch ")
    results = results_of(prepared)
    assert set(results) == {"NCHW", "channels_last"}
    # Sums of this many terms, each rounded in another order.
    bound = terms * np.finfo(np.float32).eps * abs(expected).max()
    for result in results.values():
        assert type(result) is np.ndarray and result.dtype == np.float32
        assert result.shape == expected.shape
        assert abs(result - expected).max() <= bound


@pytest.mark.parametrize("channels", [1, 3])
def test_convolution(channels):
    rng = np.random.default_rng(0)
    image = rng.standard_normal((1, 40, 51, channels), np.float32)
    kernels = rng.standard_normal((11, 11, channels, 5), np.float32)
    before = image.copy()
    expected = sb.conv2d(image, kernels)
    check(torch_dense.convolution(image, kernels), expected, 121 * channels)
    assert np.array_equal(image, before)


def test_residual_unit():
    image = np.random.default_rng(0).standard_normal((1, 30, 41, 8), np.float32)
    weights = sb.BottleneckWeights.random(8, 4)
    expected = points.dense_unit(image, weights, np)
    check(torch_dense.residual_unit(image, weights), expected, 8 + 9 * 4 + 4)


@pytest.mark.parametrize("broken", [None, "OSError"])
def test_without_pytorch_there_is_none(broken, monkeypatch):
    class Finder:
        @staticmethod
        def find_spec(name, *_):
            if name == "torch":
                raise OSError("libtorch.so: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "torch", None)
    if broken:
        monkeypatch.delitem(sys.modules, "torch")
        monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    image = np.ones((1, 20, 20, 1), np.float32)
    assert torch_dense.convolution(image, np.ones((3, 3, 1, 1), np.float32)) is None


@pytest.mark.parametrize("scale", [1, 1.01, np.nan])
def test_a_result_that_differs_is_not_timed(scale, monkeypatch):
    right = torch_dense.convolution

    def scaled(image, kernels):
        prepared = right(image, kernels)
        native = prepared.to_native
        return dataclasses.replace(prepared, to_native=lambda result: native(result) * scale)

    monkeypatch.setattr(torch_dense, "convolution", scaled)
    values = np.random.default_rng(0).standard_normal((60, 60)).astype(np.float32)
    with Progress() as progress:
        result = picture.detect(values, values[None] > 2, 22, np, progress)
    assert result.agrees
    assert (result.peer.ms is not None) == (result.peer.layout is not None) == (scale == 1)
    assert (result.peer.error <= result.tolerance) == (scale == 1)


def test_without_pytorch_the_demo_compares_the_same(monkeypatch):
    values = np.random.default_rng(0).standard_normal((60, 60)).astype(np.float32)
    monkeypatch.setattr(torch_dense, "import_torch", lambda image: None)
    with Progress() as progress:
        result = picture.detect(values, values[None] > 2, 22, np, progress)
    assert result.peer is None
    assert result.agrees


def test_settings_are_those_of_ieee_float32_and_are_restored(torch):
    cudnn = torch.backends.cudnn
    image, kernels = np.ones((1, 20, 20, 1), np.float32), np.ones((3, 3, 1, 1), np.float32)
    before = cudnn.enabled, cudnn.benchmark, cudnn.allow_tf32
    with torch_dense.convolution(image, kernels).settings():
        assert (cudnn.enabled, cudnn.benchmark, cudnn.allow_tf32) == (before[0], True, False)
        assert torch.is_inference_mode_enabled()
    assert (cudnn.enabled, cudnn.benchmark, cudnn.allow_tf32) == before


@pytest.mark.gpu
def test_on_a_gpu(require, torch):
    cupy = require("gpu")
    if not torch.cuda.is_available():
        pytest.skip("needs PyTorch with CUDA")
    rng = np.random.default_rng(0)
    values = rng.standard_normal((200, 300)).astype(np.float32)
    summary = rng.standard_normal((90, 110, 4)).astype(np.float32)
    with Progress() as progress:
        found = [
            picture.detect(values, values[None] > 3, 22, cupy, progress),
            points.refine(summary, summary[None, :, :, 0] > 3, 18, cupy, progress)[1],
        ]
    for result in found:
        assert result.agrees
        assert result.peer.ms > 0
        assert result.peer.error <= result.tolerance
