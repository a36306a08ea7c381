"""sparse_res_block_bottleneck_grad: central differences, and PyTorch on the dense unit."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conftest import Library
from sbnet_cupy import BottleneckWeights, sparse_res_block_bottleneck_grad
from support import conv_oracles as oracles
from support.assertions import assert_same, to_numpy
from support.res_block_cases import ALL, NAMES, Case, cases
from support.strategies import FLOATS

NUMPY = Library("numpy", np)
FLOAT64 = np.dtype("f8")
CASES = [
    Case(dtype=FLOAT64),
    Case(dtype=FLOAT64, project=True),
    Case(dtype=FLOAT64, strides=(2, 2), channels=5),
    Case(dtype=FLOAT64, strides=(1, 3), steps=(6, 0), density=1.0),
    Case(dtype=FLOAT64, image=(1, 2, 2, 4), density=1.0),  # every pixel at a border
]


def arguments(case, based):
    """The arrays of a call by name; signs of all kinds, so that relu is a relu."""
    rng = np.random.default_rng(case.seed + 7)
    x, weights, project = case.data()
    shape = case.oracle(x, weights, project)[0].value.shape
    given = {"x": x} | dict(zip(NAMES, weights, strict=True))
    for name in ("shift1", "shift2", "shift3"):
        given[name] = rng.uniform(-0.6, 0.8, given[name].shape).astype(given[name].dtype)
    if project is not None:
        given["w_project"] = project
    if based:
        given["base"] = rng.standard_normal(shape).astype(case.dtype)
    return rng.standard_normal(shape).astype(case.dtype), given


def run(case, xp, grad, given, indices=None):
    """Return the gradients by name, after seeing that nothing was modified."""
    arrays = {name: xp.asarray(array) for name, array in given.items()}
    weights = BottleneckWeights(*(arrays.pop(name) for name in NAMES))
    indices = case.indices()[:2] if indices is None else indices
    grad_y = xp.asarray(grad)
    gradients = sparse_res_block_bottleneck_grad(
        grad_y, arrays.pop("x"), weights, tuple(map(xp.asarray, indices)), case.params,
        strides=case.strides, **arrays,
    )  # fmt: skip
    assert_same(grad_y, xp.writable(grad))
    for name, array in (*zip(NAMES, weights._arrays(), strict=True), *arrays.items()):
        assert_same(array, xp.writable(given[name]))
    found = {"x": gradients.x} | dict(zip(NAMES, gradients.weights._arrays(), strict=True))
    for name in ("w_project", "base"):
        assert (getattr(gradients, name) is None) == (name not in given)
        if name in given:
            found[name] = getattr(gradients, name)
    return found


@pytest.mark.parametrize("based", [False, True])
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_central_differences(xp, case, based):
    """Of <y, g> along a random direction of each argument; see test_sparse_gather_grad.py.

    The seeds are such that no relu passes its kink between steps of 1e-6.
    """
    grad, point = arguments(case, based)
    gradients = run(case, xp, grad, point)
    rng = np.random.default_rng(11)

    def value(name, direction, step):
        moved = point | {name: point[name] + step * direction}
        weights = [moved[n] for n in NAMES]
        base = {"base": xp.asarray(moved["base"])} if based else {}
        y = case.run(xp, moved["x"], weights, moved.get("w_project"), **base)
        terms = to_numpy(y) * grad
        return terms.sum(), abs(terms).sum()

    for name, array in point.items():
        direction = rng.uniform(-1, 1, array.shape)
        (above, size), (below, _) = (value(name, direction, step) for step in (1e-6, -1e-6))
        slope = (to_numpy(gradients[name]) * direction).sum()
        assert abs(slope - (above - below) / 2e-6) < 1e-7 * size, name


def torch_gradients(torch, case, grad, given):
    """Autograd's gradients of the dense unit, of which only active pixels count."""
    functional = torch.nn.functional
    tensors = {name: torch.tensor(array, requires_grad=True) for name, array in given.items()}

    def convolve(x, w, strides=(1, 1), padding=((0, 0), (0, 0))):
        (top, bottom), (left, right) = padding
        x = functional.pad(x.permute(0, 3, 1, 2), (left, right, top, bottom))
        return functional.conv2d(x, w.permute(3, 2, 0, 1), stride=strides).permute(0, 2, 3, 1)

    def activated(t, k):
        return torch.relu(t * tensors[f"scale{k}"] + tensors[f"shift{k}"])

    x = tensors["x"]
    t = convolve(activated(x, 1), tensors["w1"])
    padding = oracles.pads(x.shape[1:3], (3, 3), case.strides, "SAME")
    t = convolve(activated(t, 2), tensors["w2"], case.strides, padding)
    t = convolve(activated(t, 3), tensors["w3"])
    project = tensors.get("w_project")
    shortcut = x if project is None else convolve(x, project, case.strides)
    active = oracles.active_outputs(t.shape[:3], case.indices()[2], case.params.bsize_out)
    active = torch.tensor(active)[..., None]
    zero = torch.zeros((), dtype=t.dtype)
    elsewhere = tensors["base"] if "base" in given else shortcut
    y = torch.where(active, t, zero) + torch.where(active, shortcut, elsewhere)
    y.backward(torch.tensor(grad))
    return {
        name: np.zeros(tensor.shape) if tensor.grad is None else tensor.grad.numpy()
        for name, tensor in tensors.items()
    }


@given(case=cases(), based=st.booleans())
@example(case=ALL, based=False)
@example(case=Case(strides=(2, 2), channels=5, density=1.0), based=True)
def test_pytorch_agrees_with_every_element(xp, torch, case, based):
    """In float64, where different orders of summation are all that differs."""
    case = replace(case, dtype=FLOAT64)
    grad, given = arguments(case, based)
    gradients = run(case, xp, grad, given)
    expected = torch_gradients(torch, case, grad, given)
    for name, value in expected.items():
        error = np.full(value.shape, 1e-12 * (1 + abs(value).max(initial=0)))
        oracles.assert_within(to_numpy(gradients[name]), oracles.Bounded(value, error))


@pytest.mark.parametrize("based", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("project", [False, True])
def test_every_dtype(xp, dtype, project, based):
    """Against float64 on the same numbers, all of them positive: every sum is one of magnitudes.

    Each is rounded at most 24 times on its way there and back, products and sums of overlapping
    blocks included.
    """
    case = Case(dtype=dtype, project=project)
    grad, given = arguments(case, based)
    grad, given = abs(grad), {name: abs(array) for name, array in given.items()}
    gradients = run(case, xp, grad, given)
    wide = {name: array.astype(np.float64) for name, array in given.items()}
    exact = run(replace(case, dtype=FLOAT64), NUMPY, grad.astype("f8"), wide)
    sums = 4 * oracles.epsilon_of_sums(dtype) * (grad.size // case.channels)
    unit, tiny = oracles.rounding(dtype)
    for name, value in exact.items():
        actual = to_numpy(gradients[name])
        assert (actual.dtype, actual.shape) == (given[name].dtype, given[name].shape)
        oracles.assert_within(actual, oracles.Bounded(value, (24 * unit + sums) * value + tiny))


def test_the_base_gets_the_rest(xp):
    case = Case()
    grad, given = arguments(case, True)
    gradients = run(case, xp, grad, given)
    active = oracles.active_outputs(grad.shape[:3], case.indices()[2], case.params.bsize_out)
    expected = np.where(active[..., None], np.float32(0), grad)
    assert_same(gradients["base"], xp.writable(expected))


def test_without_active_blocks_only_the_shortcut_has_a_gradient(xp):
    case = Case(density=0.0)
    grad, given = arguments(case, False)
    gradients = run(case, xp, grad, given)
    assert_same(gradients.pop("x"), xp.writable(grad), signed_zero=False)
    for name, gradient in gradients.items():
        assert not to_numpy(gradient).any(), name


def test_rows_that_are_no_blocks_contribute_nothing(xp):
    grad, given = arguments(ALL, False)
    int32 = np.iinfo(np.int32)
    rows = [[0, 0, 0], [0, 50, 50], [0, -9, 0], [7, 0, 0], [0, int32.max, int32.min], [1, 1, 1]]
    corrupt = np.array([6], np.int32), np.array([*rows, [0, 1, 1]], np.int32)
    clean = np.array([2], np.int32), np.array([[0, 0, 0], [1, 1, 1]], np.int32)
    first, second = (run(ALL, xp, grad, given, indices) for indices in (corrupt, clean))
    for name in first:
        a, b = to_numpy(first[name]), to_numpy(second[name]).astype("f8")
        error = np.full(b.shape, abs(b).max() * 2.0**-18)  # zeros among the terms regroup them
        oracles.assert_within(a, oracles.Bounded(b, error))


@given(case=cases(), based=st.booleans())
def test_twice_gives_the_same_bits(xp, case, based):
    grad, given = arguments(case, based)
    first, second = (run(case, xp, grad, given) for _ in range(2))
    for name in first:
        assert_same(first[name], second[name])


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_other_libraries(require, library):
    module = require(library)
    asarray = module.asarray if library == "torch" else module.numpy.asarray
    grad, given = arguments(ALL, False)
    expected = run(ALL, NUMPY, grad, given)
    gradients = sparse_res_block_bottleneck_grad(
        asarray(grad), asarray(given["x"]),
        BottleneckWeights(*(asarray(given[name]) for name in NAMES)),
        tuple(map(asarray, ALL.indices()[:2])), ALL.params,
    )  # fmt: skip
    assert isinstance(gradients.weights, BottleneckWeights)
    found = (gradients.x, *gradients.weights._arrays())
    for actual, name in zip(found, ("x", *NAMES), strict=True):
        assert type(actual).__module__.startswith(library)
        assert_same(np.asarray(actual), expected[name])
