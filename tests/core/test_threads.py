"""Four threads call the same function at once, each with arrays of its own, and get its own result.

And docs/reference.md says of every public name whether that is allowed.
"""

import inspect
import re
import threading
from pathlib import Path

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy.core.arrays import ArrayContainer
from support import bad_calls, site_bad_calls, stack_bad_calls
from support.adapter_cases import normal
from support.assertions import assert_same, to_numpy

VALID = bad_calls.VALID | stack_bad_calls.VALID | site_bad_calls.VALID
THREADS, ROUNDS = 4, 6
REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference.md"


def at_once(work):
    """Call ``work(number)`` in four threads that start together; return the four results.

    Each repeats its call, and finds the same bits every time.
    """
    together, results, errors = threading.Barrier(THREADS), [None] * THREADS, []

    def run(number):
        try:
            together.wait()
            results[number] = flat(work(number))
            for _ in range(ROUNDS):
                for again, first in zip(flat(work(number)), results[number], strict=True):
                    assert_same(again, first)
        except BaseException as error:  # the thread that waits asserts that there is none
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return results


def flat(result):
    """Return the arrays of a result as NumPy arrays."""
    if result is None or isinstance(result, sb.BlockParams):
        return [] if result is None else [np.array(list(vars(result).values()))]
    if isinstance(result, ArrayContainer):
        result = result._arrays()
    if isinstance(result, tuple | list):
        return [array for item in result for array in flat(item)]
    return [to_numpy(result)]


def check(work):
    """Assert that four threads find what one finds alone."""
    found = at_once(work)
    for number in range(THREADS):
        for actual, expected in zip(found[number], flat(work(number)), strict=True):
            assert_same(actual, expected)
    return found


def scaled(xp, value, number):
    """Return an argument for one of the threads: float images differ between them."""
    if isinstance(value, np.ndarray):
        own = value * (number + 1) if value.dtype == np.float32 else value
        return xp.asarray(own.astype(value.dtype))
    if isinstance(value, sb.BlockTable):
        return value._map_arrays(xp.asarray)
    if isinstance(value, site_bad_calls.Made):
        return value.of(xp.asarray, number)
    if isinstance(value, tuple) and value and isinstance(value[0], np.ndarray):
        return tuple(map(xp.asarray, value))
    return value


@pytest.mark.parametrize("function", [n for n in VALID if inspect.isfunction(getattr(sb, n))])
def test_functions(xp, function):
    def work(number):
        arguments = {k: scaled(xp, v, number) for k, v in VALID[function].items()}
        if "weights" in arguments:
            arguments["weights"] = sb.BottleneckWeights(*map(xp.asarray, arguments["weights"]))
        if function == "sparse_scatter_var":
            arguments["x"] = xp.writable(VALID[function]["x"] * (number + 1))
        return getattr(sb, function)(**arguments)

    found = check(work)
    same = ("bottleneck_grad", "sparse_avg_pool_grad", "unpool_grad", "global_pool_grad")
    if "x" in VALID[function] and not function.endswith(same):
        assert any((a != b).any() for a, b in zip(found[0], found[1], strict=True))


def test_every_public_function_is_tried():
    functions = {name for name in sb.__all__ if inspect.isfunction(getattr(sb, name))}
    assert functions <= set(VALID)


def test_one_mask_for_many_layers(xp):
    x, w = xp.asarray(normal(2, 24, 24, 8)), xp.asarray(normal(3, 3, 8, 8))
    masks = [xp.asarray(sb.masks.blobs((2, 24, 24), 0.2, seed=n, sigma=2)) for n in range(THREADS)]
    weights = sb.BottleneckWeights.random(8, 4)._map_arrays(xp.asarray)

    def work(number):
        active = sb.ActiveBlocks.from_mask(masks[number], bsize=4, ksize=3)
        assert repr(active).count("\n") == 14
        y = sb.sparse_conv2d(x, w, active, bsize=4)
        return active, y, sb.sparse_res_block_bottleneck(y, weights, masks[number], bsize=4)

    check(work)


@pytest.mark.parametrize("unit", [False, True])
def test_packed_weights_that_are_shared(xp, unit):
    """They are packed by the first of four calls at once."""
    images = [xp.asarray(normal(1, 24, 24, 8, seed=n)) for n in range(THREADS)]
    active = sb.ActiveBlocks.from_mask(xp.asarray(np.ones((1, 24, 24), bool)), bsize=8, ksize=3)
    for _ in range(3):  # new ones each time
        if unit:
            arrays = sb.BottleneckWeights.random(8, 4)._map_arrays(xp.asarray)
            packed = sb.PackedBottleneck(arrays, precision="tf32")
        else:
            packed = sb.PackedWeights(xp.asarray(normal(3, 3, 8, 8)))

        def work(number, packed=packed):
            function = sb.fused_bottleneck if unit else sb.fused_conv
            return function(images[number], packed, *active, bsize=8)

        check(work)


def test_masks(xp):
    pictures = [xp.asarray(normal(1, 20, 30, seed=n)) for n in range(THREADS)]
    points = [xp.asarray(10 * normal(50, 3, seed=n)) for n in range(THREADS)]

    def work(number):
        mask = sb.masks.threshold(pictures[number], 1)
        moved = sb.masks.change(pictures[number], pictures[0], 0.5)
        area = {"x_range": (-9, 9), "y_range": (-9, 9), "cell": 1}
        seen = sb.masks.birds_eye(points[number], **area)
        made = [sb.masks.blobs((9, 9), 0.3, seed=number), sb.masks.top_left((9, 9), 0.2)]
        return [mask, moved, seen, sb.masks.dilate(mask, 2), sb.masks.downsample(mask, 3), *made]

    check(work)


# ------------------------------------------------------------------------------ the adapters

X = [normal(1, 12, 12, 4, seed=n) for n in range(THREADS)]
MASKS = [sb.masks.blobs((1, 12, 12), 0.3, seed=n, sigma=1) for n in range(THREADS)]
W = normal(3, 3, 4, 4)


def test_torch(torch, st, device):
    w = torch.from_numpy(W).to(device)
    arrays = sb.BottleneckWeights.random(4, 4)._map_arrays(lambda a: torch.from_numpy(a).to(device))

    def work(number):
        x = torch.from_numpy(X[number]).to(device).requires_grad_()
        mask = torch.from_numpy(MASKS[number]).to(device)
        y = st.sparse_conv2d(x, w, mask, bsize=4, activation="gelu")
        y = st.sparse_res_block_bottleneck(y, arrays, mask, bsize=4)
        counts, rows = st.reduce_mask(mask, (3, 3), bsize=4)
        blocks = st.sparse_gather(y, counts, rows, bsize=4)
        y = st.sparse_scatter(2 * blocks, counts, rows, y, bsize=4)
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        return y.detach(), grad

    check(work)


def test_torch_modules_in_evaluation(torch, st, device):
    conv = st.nn.SparseConv2d(4, 4, 3, padding=1, block_size=6).to(device).eval()
    unit = st.nn.SparseBottleneck(4, 4, block_size=6).to(device).eval()

    def work(number):
        x = torch.from_numpy(X[number].transpose(0, 3, 1, 2).copy()).to(device)
        mask = torch.from_numpy(MASKS[number]).to(device)
        with torch.no_grad():
            return unit(conv(x, mask), mask)

    check(work)


def test_jax(jax, sbj):
    @jax.jit
    def apply(x, w, mask):
        active = sbj.reduce_mask(mask, (3, 3), bsize=4, capacity=9)
        y = sbj.sparse_conv2d(x, w, mask, bsize=4, capacity=9)
        return sbj.sparse_scatter(sbj.sparse_gather(y, *active, bsize=4), *active, x, bsize=4)

    gradient = jax.jit(jax.grad(lambda *a: (apply(*a) ** 2).sum()))

    def work(number):
        arrays = [jax.numpy.asarray(a) for a in (X[number], W, MASKS[number])]
        return apply(*arrays), gradient(*arrays)

    check(work)


@pytest.mark.parametrize("graph", [False, True])
def test_tensorflow(tf, sbt, graph):
    def gradient(x, w, mask):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = sbt.sparse_conv2d(x, w, mask, bsize=4)
            active = sbt.reduce_mask(mask, (3, 3), bsize=4)
            blocks = sbt.sparse_gather(y, *active, bsize=4)
            total = tf.reduce_sum(sbt.sparse_scatter(blocks, *active, x, bsize=4) ** 2)
        return y, tape.gradient(total, x)

    call = tf.function(gradient, autograph=False) if graph else gradient

    def work(number):
        return call(*map(tf.constant, (X[number], W, MASKS[number])))

    check(work)


# ------------------------------------------------------------------------------ what is said


def names_of(entry):
    """Return the public names that an entry of the reference means: ``stack_...`` is several."""
    if not entry.endswith("..."):
        return [entry]
    return [name for name in sb.__all__ if name.startswith(entry.removesuffix("..."))]


def test_the_reference_says_it_of_every_name(st, sbj, sbt):
    text = REFERENCE.read_text(encoding="utf-8")
    section = text.partition("\n## Threads\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")][1:]
    told = [name for row in rows for name in re.findall(r"`([\w.]+)`", row)]
    told = [name for entry in told for name in names_of(entry)]
    assert len(told) == len(set(told))
    modules = {"sbnet_cupy.torch", "sbnet_cupy.jax", "sbnet_cupy.tensorflow"}
    of_torch = {f"sbnet_cupy.torch.nn.{name}" for name in st.nn.__all__}
    of_torch.add("sbnet_cupy.torch.sparsify")
    assert set(told) == set(sb.__all__) | modules | of_torch
    for module in (st, sbj, sbt):
        others = [n for n in module.__all__ if not inspect.isfunction(getattr(module, n))]
        assert set(others) <= {"nn"}
