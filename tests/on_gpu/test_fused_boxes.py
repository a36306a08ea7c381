"""fused_conv of 1x1 kernels on a GPU, whose blocks are looked up: wgmma, clusters, tensor maps."""

import sys

import numpy as np
import pytest

from sbnet_cupy import PackedWeights, fused_conv, reduce_mask
from sbnet_cupy.block_sparse.conv import wide
from sbnet_cupy.block_sparse.stack.stack_conv_plan import candidates
from sbnet_cupy.core import operator
from support.assertions import assert_same
from support.fused_cases import Case

pytestmark = pytest.mark.gpu

RELU = {"extras": ("scale", "bias", "residual"), "activation": "relu"}
TILES = ((64, 64), (128, 64), (192, 64), (192, 128))
ROWS = [  # dtype, channels in and out, block, options: blocks stick out below and on the right
    ("float16", 136, 72, (8, 8), RELU),
    ("float16", 256, 200, (4, 4), {"extras": ("bias",), "w_format": "OIHW"}),
    ("float16", 512, 128, (2, 2), RELU),
    ("float16", 264, 136, (1, 1), {"extras": ("residual",)}),
    ("float16", 128, 130, (7, 5), RELU),
    ("bfloat16", 200, 128, (4, 16), RELU),
    ("bfloat16", 320, 64, (3, 12), {}),
    ("float32", 100, 72, (8, 8), RELU),
    ("float32", 132, 64, (2, 2), {"extras": ("bias", "residual")}),
]


def cases():
    """Yield the cases, each with a list of blocks of another kind."""
    tables = "some", "corrupt", "repeated", "count too large"
    for i, (dtype, channels, channels_out, bsize, options) in enumerate(ROWS):
        yield Case(
            image=(2, 61, 45, channels), channels=channels_out, kernel=(1, 1), dtype=dtype,
            precision="tf32" if dtype == "float32" else None, bsize=bsize, packed=True,
            table=tables[i % len(tables)], **options,
        )  # fmt: skip


@pytest.fixture
def by(require, monkeypatch):
    """Return a function that has fused_conv take a plan; the plans of a call, with None."""
    cupy = require("gpu")
    if int(cupy.cuda.Device().compute_capability) < 90:
        pytest.skip("needs compute capability 9.0")
    op = sys.modules["sbnet_cupy.block_sparse.conv.fused_conv"]

    def take(plan):
        monkeypatch.setattr(op, "is_for_wide", lambda *given: True)
        monkeypatch.setattr(wide, "plan_stack_conv", lambda *given: plan)
        monkeypatch.setattr(operator, "_PLANS", operator._Plans())

    def plans_of(call):
        found = {}

        def choose(conv, device):
            for plan in candidates(conv, device):
                if not (plan.bulk or plan.direct) or plan.split > 2:
                    continue
                if plan.tile in (TILES if plan.bulk else TILES[::2]):
                    found[plan.bulk, plan.tile, plan.split, plan.parts > 1] = plan
            return next(iter(found.values()))

        take(None)
        monkeypatch.setattr(wide, "plan_stack_conv", choose)
        call()
        return list(found.values())

    return take, plans_of


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_pixels_of_listed_blocks_are_exact(by, case):
    """At active pixels; all others keep the NaN that the result held."""
    import cupy

    take, plans_of = by
    arrays = case.arrays()
    plans = plans_of(lambda: case.run(arrays, cupy.asarray))
    assert {plan.split for plan in plans} == {1, 2} or case.image[3] * case.type.itemsize < 512
    expected = np.where(case.active()[..., None], case.exact(), np.nan).astype(case.type)
    for plan in plans:
        take(plan)
        out = cupy.asarray(np.full(case.shape, np.nan).astype(case.type))
        case.run(arrays, cupy.asarray, out=out)
        assert_same(out, cupy.asarray(expected), allow_nan=True, signed_zero=False)


def test_pixels_of_another_image_reach_no_result(by):
    """A box that sticks out of the first image reads the second, which is infinite and NaN."""
    import cupy

    take, plans_of = by
    case = Case(image=(2, 61, 45, 128), channels=64, kernel=(1, 1), dtype="float16", bsize=(8, 8),
                table="all")  # fmt: skip
    x, *rest = case.arrays()
    x[1, :20], x[1, 20:] = np.nan, np.inf
    plans = plans_of(lambda: case.run((x, *rest), cupy.asarray))
    for plan in plans:
        take(plan)
        y = case.run((x, *rest), cupy.asarray).get()
        assert_same(y[0], case.exact()[0].astype(case.type), signed_zero=False)
        assert not np.isfinite(y[1].astype(np.float32)).all()


@pytest.mark.parametrize("kind", ["boxes", "direct", "table"])
def test_replays_wait_for_a_count_that_the_kernel_ahead_writes(by, kind):
    """Masks of few and many blocks in turn: the count of the mask before would be seen."""
    import cupy

    take, plans_of = by
    shape, bsize = (1, 64, 96, 128), (8, 8)
    rng = np.random.default_rng(0)
    x = cupy.asarray(rng.integers(-3, 4, shape).astype(np.float16))
    w = PackedWeights(cupy.asarray(rng.integers(-1, 2, (1, 1, 128, 64)).astype(np.float16)))
    masks = [cupy.asarray((rng.random((1, 64, 96)) < share).astype(np.float32))
             for share in (0.001, 1.0)]  # fmt: skip

    def convolve(mask, out):
        active = reduce_mask(mask, (8, 12), bsize=bsize, capacity=96)
        fused_conv(x, w, active.bin_counts, active.active_block_indices, bsize=bsize, out=out)

    outs = [cupy.zeros((1, 64, 96, 64), np.float16) for _ in masks]
    plans = plans_of(lambda: convolve(masks[0], outs[0]))
    plan = next(plan for plan in plans if plan.bulk)._replace(bulk=kind == "boxes")
    take(plan._replace(direct=kind == "direct", cached=kind == "table"))
    convolve(masks[0], outs[0])  # compiled and packed
    convolve(masks[1], outs[1])
    cupy.cuda.runtime.deviceSynchronize()
    expected = [out.copy() for out in outs]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        for _ in range(50):
            for mask, out in zip(masks, outs, strict=True):
                out[...] = 0
                convolve(mask, out)
        graph = stream.end_capture()
        for _ in range(20):
            graph.launch(stream)
            stream.synchronize()
            for out, right in zip(outs, expected, strict=True):
                assert_same(out, right)
