"""The ResNet of examples/07_jax_resnet.py equals a dense one, zeroed outside the active blocks."""

from pathlib import Path

import numpy as np
import pytest

from support.assertions import to_numpy

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "07_jax_resnet.py"


@pytest.fixture(scope="module")
def example(jax, require):
    """The names that the example defines before it trains."""
    require("demo")
    code, training, _ = SCRIPT.read_text(encoding="utf-8").partition("# ## Training")
    assert training
    names = {}
    exec(compile(code, str(SCRIPT), "exec"), names)
    return names


def active_grid(example, images):
    """Return which blocks hold something, bool [N, rows, columns]."""
    n, size, block = len(images), example["SIZE"], example["BLOCK"]
    cut = (n, size // block, block, size // block, block)
    return (to_numpy(images).reshape(cut) != 0).any((2, 4))


def dense_resnet(jax, example, params, images, grid):
    """Return what whole images give; every activation outside the active blocks becomes 0."""
    jnp, block = jax.numpy, example["BLOCK"]

    def conv(x, w, stride=1, padding=1):
        pads = [(padding, padding)] * 2
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (stride,) * 2, pads, dimension_numbers=numbers)

    def active(x):
        side = block * x.shape[1] // example["SIZE"]
        return jnp.where(np.repeat(np.repeat(grid, side, 1), side, 2)[..., None], x, 0)

    x = active(jax.nn.relu(conv(active(images), params["stem"])))
    for p, stride in zip(params["units"], example["STRIDES"], strict=True):
        y = active(jax.nn.relu(conv(x, p["first"], stride) + p["bias"][0]))
        shortcut = conv(x, p["shortcut"], stride, 0) if "shortcut" in p else x
        x = active(jax.nn.relu(conv(y, p["second"]) * p["scale"] + p["bias"][1] + shortcut))
    return x.max((1, 2)) @ params["head"]


def trained_a_little(jax, example):
    """Return parameters whose biases are not 0, so that blocks that are not active would show."""
    rng = np.random.default_rng(5)

    def moved(p):
        return p + jax.numpy.asarray(rng.standard_normal(p.shape, np.float32) / 10)

    return jax.tree.map(moved, example["weights"](rng))


def relative(found, expected):
    """Return the norm of the difference over that of what is expected."""
    found, expected = (to_numpy(a).astype(np.float64) for a in (found, expected))
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def test_results_and_gradients_are_those_of_the_dense_network(jax, example):
    images, labels = example["pictures"](np.random.default_rng(4), 4)
    images, params = jax.numpy.asarray(images), trained_a_little(jax, example)
    table, grid = example["block_list"](images), active_grid(example, images)
    assert ((to_numpy(table.grid) >= 0) == grid).all() and 0 < grid.sum() < grid.size / 2

    def loss(network):
        def of(params):
            scores = jax.nn.log_softmax(network(params, images))
            return -jax.numpy.take_along_axis(scores, labels[:, None], 1).mean(), scores

        return jax.jit(jax.value_and_grad(of, has_aux=True))

    with jax.default_matmul_precision("highest"):  # on a GPU XLA rounds factors otherwise
        (_, found), grads = loss(example["resnet"])(params)
        (_, expected), dense_grads = loss(lambda *a: dense_resnet(jax, example, *a, grid))(params)
    layers = 2 + 2 * len(example["STRIDES"])
    bound = 2 * layers * 9 * 32 * np.finfo(np.float32).eps  # 9 * 32 terms a sum, at most
    assert relative(found, expected) <= bound
    pairs = list(zip(*map(jax.tree.leaves, (grads, dense_grads)), strict=True))
    assert len(pairs) == 20
    for grad, dense_grad in pairs:
        assert relative(grad, dense_grad) <= 2 * bound  # forth and back


def test_blocks_that_are_not_active_matter_to_the_oracle(jax, example):
    images, _ = example["pictures"](np.random.default_rng(4), 2)
    params, grid = trained_a_little(jax, example), active_grid(example, images)
    images = jax.numpy.asarray(images)
    one, other = (
        dense_resnet(jax, example, params, images, of) for of in (grid, np.ones_like(grid))
    )
    assert relative(one, other) > 1e-3
