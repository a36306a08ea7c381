"""The CUDA kernels equal the NumPy bodies: g++ compiles them, and they run on the CPU.

Each call of kernel_cases.py runs twice: as on a large GPU, and on one so small that every thread
block takes many turns, the threads in the opposite order. Results lie between guard bytes, in
memory that held something else; inputs are read-only and end where their memory ends, which
``python -m tests.host_cuda.sanitized tests/on_host/test_kernels.py`` watches.
"""

import importlib
import math
from dataclasses import replace

import numpy as np
import pytest

import host_cuda
from sbnet_cupy.block_sparse.mask import config as mask_config
from support import oracles
from support.assertions import assert_close, assert_same
from support.exhaustive import thinned
from support.host_memory import Memory
from support.kernel_calls import Copy, Mask
from support.kernel_cases import (
    AFFINE,
    COPIES,
    FUSED,
    GRADIENTS,
    IMAGES,
    MASKS,
    OUTSIDE,
    PLACES,
    REPEATED,
    SMOOTH,
)
from support.kernels_on_host import OPS, device

# order of the threads, multiprocessors, what results hold at first
RUNS = (("forward", 132, 0xA5), ("reverse", 1, 0xFF))


def arguments(case):
    return (list(case.calls()),) if isinstance(case, Mask) else ()


def instantiations(cases):
    """What the cases would launch."""
    found = {}
    for case in cases:
        for _, multiprocessors, _ in RUNS:
            with device(lambda *launch: None, multiprocessors, Memory()) as (_, launched):
                list(case.run(Memory(), *arguments(case)))
            found |= dict.fromkeys(launched)
    return list(found)


@pytest.fixture(scope="module", autouse=True)
def _compiled(request):
    """Compile what the chosen tests need, together."""
    items = [item for item in request.session.items if item.module is request.module]
    parameters = [item.callspec.params for item in items if hasattr(item, "callspec")]
    cases = [given["case"] for given in parameters if "case" in given]
    host_cuda.prepare(instantiations(cases))


def run_all(case, monkeypatch):
    """Yield the results of each run, after checking that kernels made them."""
    for order, multiprocessors, poison in RUNS:
        monkeypatch.setenv("SBNET_HOST_ORDER", order)
        memory, calls = Memory(poison), arguments(case)
        with device(host_cuda.launch, multiprocessors, memory) as (_, launched):
            results = list(case.run(memory, *calls))
        assert launched or case.launches_nothing
        memory.check()
        yield results


def check_same(case, monkeypatch, **options):
    expected = list(case.run(Memory(), *arguments(case)))
    for results in run_all(case, monkeypatch):
        for actual, wanted in zip(results, expected, strict=True):
            assert_same(actual, wanted, **options)


@pytest.mark.parametrize("case", thinned(MASKS, 11), ids=str)
def test_reduce_mask(case, monkeypatch):
    check_same(case, monkeypatch)


TABLES = [
    # mask, block, share of true pixels
    ((2, 70, 45), (8, 8), 0.01), ((1, 300, 400), (32, 32), 0.001), ((3, 9, 9), (1, 1), 0.5),
    ((1, 64, 5000), (4, 2), 0.1), ((2, 16, 16), (5, 7), 0.0), ((1, 40, 40), (64, 64), 1.0),
]  # fmt: skip


@pytest.mark.parametrize("sizes", thinned(TABLES, 2), ids=str)
def test_mask_table(sizes, monkeypatch):
    """The list of reduce_mask, and with it the row of the block at each place."""
    table, (shape, block, share) = OPS[5], sizes
    mask = np.random.default_rng(0).random(shape) < share
    count = table.block_table(mask, block).count()
    for capacity in (None, count, count + 5, max(count - 3, 0)):
        wanted = table.block_table(mask, block, capacity=capacity)
        for order, multiprocessors, poison in RUNS:
            monkeypatch.setenv("SBNET_HOST_ORDER", order)
            memory = Memory(poison)
            on_device = device(host_cuda.launch, multiprocessors, memory)
            with on_device as (_, launched), monkeypatch.context() as patch:
                patch.setattr(table, "is_cupy", lambda array: True)
                found = table.block_table(mask, block, capacity=capacity)
            assert [kernel for _, kernel, _ in launched] == ["mask_table"]
            memory.check()
            for one, other in zip(found._arrays(), wanted._arrays(), strict=True):
                assert_same(one, other)


SMALL_MASKS = [mask for mask in MASKS if not (mask.avgpool or mask.launches_nothing)]


@pytest.mark.parametrize("case", thinned(SMALL_MASKS[::6], 7), ids=str)
def test_reduce_mask_in_a_cluster(case, monkeypatch):
    """Blocks run in order, as kernels_on_host.py says: what each waits for is there."""
    monkeypatch.setattr(mask_config, "_GROUPS", ((8, 256), (8, 512)))
    expected, memory = list(case.run(Memory(), *arguments(case))), Memory(0xA5)
    with device(host_cuda.launch, 132, memory) as (prepared, _):
        results = list(case.run(memory, *arguments(case)))
    memory.check()
    assert {template[-1] for *_, template in prepared} == {8}
    for actual, wanted in zip(results, expected, strict=True):
        assert_same(actual, wanted)


@pytest.mark.parametrize("case", thinned(COPIES, 17), ids=str)
def test_copies(case, monkeypatch):
    check_same(case, monkeypatch, allow_nan=True)


STYLES = [
    (Copy(op=op, dtype=dtype, channels=channels, layout=layout, grid="stage 2 out"), style)
    for layout, channels, dtype, style in (
        ("NHWC", 3, "uint8", "staged"), ("NHWC", 1, "float16", "staged"),
        ("NHWC to NCHW", 17, "float16", "staged"), ("NHWC to NCHW", 3, "float32", "staged"),
        ("NHWC", 24, "float32", "runs"), ("NHWC to NCHW", 24, "float32", "tiles"),
    )
    for op in ("gather", "scatter", "add")
]  # fmt: skip


@pytest.mark.parametrize(("case", "style"), STYLES, ids=str)
def test_odd_pixels_are_staged(case, style):
    with device(lambda *launch: None, 132, Memory()) as (_, launched):
        list(case.run(Memory()))
    direction = "gather" if case.op == "gather" else "scatter"
    assert [kernel for _, kernel, _ in launched] == [f"{direction}_{style}"]


@pytest.mark.parametrize("case", thinned(FUSED, 9), ids=str)
def test_exact_fused_arithmetic(case, monkeypatch):
    """Bit by bit, but for which zero relu gives and which NaN an operation gives."""
    with np.errstate(over="ignore"):
        (expected,) = case.run(Memory())
    no_number = expected != expected
    expected[no_number] = 0
    for (actual,) in run_all(case, monkeypatch):
        assert_same(actual != actual, no_number)
        actual[no_number] = 0
        assert_same(actual, expected, signed_zero=False)


SMOOTH_ACTIVATIONS = {
    "silu": lambda t: t / (1 + np.exp(-t)),
    "gelu": lambda t: t / 2 * (1 + np.vectorize(math.erf)(t / math.sqrt(2))),
}


@pytest.mark.parametrize("case", thinned(SMOOTH, 4), ids=str)
def test_smooth_activations(case, monkeypatch):
    """exp and erf of two libraries differ by a few roundings; see test_sparse_gather.py."""
    image, _ = case.arrays
    exact = case.keywords | {"rounded": False, "activation": None}
    argument = oracles.sparse_gather(image, *case.active, **exact)
    with np.errstate(over="ignore"):
        expected = SMOOTH_ACTIVATIONS[case.options["activation"]](argument)
    wide = np.float64 if image.dtype == np.float64 else np.float32
    for (blocks,) in run_all(case, monkeypatch):
        assert_close(blocks, expected, terms=8, dtype=wide, magnitude=abs(argument))


@pytest.mark.parametrize("case", PLACES, ids=str)
def test_places_of_blocks(case, monkeypatch):
    """One thread block, and several that each look after a few places."""
    check_same(case, monkeypatch)
    monkeypatch.setattr(OPS[-1], "_PLACES", 7)
    check_same(case, monkeypatch)


@pytest.mark.parametrize("case", thinned(GRADIENTS, 5), ids=str)
def test_gradients_of_copies(case, monkeypatch):
    """Bit by bit, through relu too, but for which zero it gives; NaN where bits are only moved."""
    moves = case.op == "scatter grad"
    check_same(case, monkeypatch, allow_nan=moves, signed_zero=moves)


@pytest.mark.parametrize("case", thinned(AFFINE, 11), ids=str)
def test_affine_gradients(case, monkeypatch):
    """See test_affine_grad.py. The sums have the same bits on a large GPU and on a small one."""
    grad, x, scale, shift, *_ = case.arguments
    expected = oracles.affine_grad(*case.arguments)
    wide = np.float64 if grad.dtype == np.float64 else np.float32
    of_numpy, before = list(case.run(Memory())), None
    for results in run_all(case, monkeypatch):
        for name, actual, like in zip(("x", "scale", "shift"), results, (x, scale, shift),
                                      strict=True):  # fmt: skip
            if actual is not None:
                value, size = expected[name]
                assert actual.dtype == like.dtype
                terms = 8 if name == "x" else 8 + math.prod(case.shape[:3])
                assert_close(actual, value, terms=terms, dtype=wide, magnitude=size)
        if case.activation in (None, "relu"):
            assert_same(results[0], of_numpy[0], signed_zero=False)
        assert [r is None for r in results] == [r is None for r in of_numpy]
        for now, then in zip(results, before or results, strict=True):
            if now is not None:
                assert_same(now, then)
        before = results


@pytest.mark.parametrize("case", IMAGES, ids=str)
def test_images_are_copied(case, monkeypatch):
    (expected,) = case.run(Memory())
    module = importlib.import_module("sbnet_cupy.core.copy_image")
    monkeypatch.setattr(module, "is_cupy", lambda array: True)
    monkeypatch.setattr(module, "_LEAST", 0)
    for (actual,) in run_all(case, monkeypatch):
        assert_same(actual, expected)


@pytest.mark.parametrize("case", thinned(OUTSIDE, 5), ids=str)
def test_what_is_outside_becomes_zero(case, monkeypatch):
    check_same(case, monkeypatch, allow_nan=True)


@pytest.mark.parametrize("case", thinned(REPEATED, 3), ids=str)
def test_a_second_call_needs_no_second_plan(case, monkeypatch):
    """The same launch on other data and other memory, and with the same alignment only."""
    cases = [case, replace(case, seed=7), replace(case, offset=2, stack_offset=2)]
    memory = Memory(0xA5)
    with device(host_cuda.launch, 4, memory) as (prepared, launched):
        results = [list(c.run(memory)) for c in (case, cases[1])]
        assert (len(prepared), len(launched)) == (1, 2)
        results.append(list(cases[2].run(memory)))
        assert (len(prepared), len(launched)) == (2, 3)
    memory.check()
    for other, (actual,) in zip(cases, results, strict=True):
        (expected,) = other.run(Memory())
        assert_same(actual, expected, allow_nan=True)
