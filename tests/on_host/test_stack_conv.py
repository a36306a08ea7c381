"""The CUDA kernels on a stack of blocks, on the CPU: convolutions and blocks with their rims."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from sbnet_cupy.block_sparse.stack import stack_launch
from sbnet_cupy.block_sparse.stack.stack_conv_plan import (
    StackPlan,
    box_of_block,
    box_of_lines,
    candidates,
    has_boxes,
    missing_kernel,
    plan_cost,
    plan_stack_conv,
)
from sbnet_cupy.block_sparse.stack.stack_depthwise_plan import plan_stack_depthwise
from sbnet_cupy.block_sparse.stack.stack_launch import (
    FILLS,
    StackHalo,
    lowest_bits,
    prepare_stack_conv,
    prepare_stack_depthwise,
    prepare_stack_halo,
    prepare_stack_pack,
)
from sbnet_cupy.block_sparse.stack.stack_patch_plan import PatchPlan, patch_candidates
from sbnet_cupy.core.device import Device
from support.exhaustive import all_but, first_of, thinned_product
from support.stack_on_host import (
    AMPERE,
    BLACKWELL,
    FIRST,
    HALVED,
    LAST,
    Blocks,
    ConvCase,
    use_shim,
)

HOPPER = Device(multiprocessors=132, shared_bytes=227 << 10, hopper=True, bulk_copy=True)
SMALL, TALL, WIDE = ((64, 64), (2, 2)), ((128, 64), (4, 2)), ((128, 128), (4, 2))


def plan(tile, stages, split=1):
    """Return tile, stages and split of a plan; the kernel is the test's."""
    return (*tile, stages, split)


CASES = [
    (ConvCase(blocks=Blocks(image=(40, 33), block=(8, 8))), plan(SMALL, 3)),
    (ConvCase(channels=72, channels_out=72), plan(SMALL, 4, 4)),
    (ConvCase(blocks=Blocks(image=(13, 18)), channels=64, channels_out=64), plan(TALL, 3)),
    (ConvCase(blocks=Blocks(image=(13, 18), block=(1, 1)), channels_out=200), plan(WIDE, 2)),
    (ConvCase(blocks=Blocks(block=(2, 2)), channels=128, kernel=(1, 1)), plan(SMALL, 3, 2)),
    (ConvCase(blocks=Blocks(block=(8, 8)), channels=24, strides=(2, 2)), plan(SMALL, 3, 2)),
    (ConvCase(kernel=(1, 1), strides=(2, 2), residual=False), plan(SMALL, 2)),
    (ConvCase("Half", Blocks(block=(7, 5)), 5, 13, dilation=(3, 2)), plan(SMALL, 3)),
    (ConvCase("Half", Blocks(block=(1, 1)), 8, kernel=(5, 7), dilation=(3, 2)), plan(SMALL, 3)),
    (ConvCase("BFloat16", Blocks(block=(2, 4)), channels=40, kernel=(2, 3)), plan(SMALL, 3, 2)),
    (ConvCase("float", Blocks(block=(2, 4)), channels=20, kernel=(2, 3)), plan(SMALL, 3, 2)),
    (ConvCase("float", Blocks(block=(2, 4)), channels=21, channels_out=43), plan(SMALL, 3)),
    (ConvCase(blocks=Blocks(share=0.0)), plan(SMALL, 3)),
    (ConvCase(blocks=Blocks(share=1.0, spare=0), activation=0), plan(SMALL, 3)),
    (ConvCase(blocks=Blocks(block=(8, 8)), activation=5), plan(SMALL, 3)),
    (ConvCase(blocks=Blocks(block=(8, 8)), activation=HALVED), plan(SMALL, 3)),
    (ConvCase(channels=72, channels_out=72, activation=FIRST + 5), plan(SMALL, 4, 4)),
    (ConvCase(channels_out=23, activation=FIRST + HALVED), plan(SMALL, 3)),
    (ConvCase(channels=96, channels_out=96, groups=4), plan(SMALL, 3, 2)),
    (ConvCase("BFloat16", Blocks(block=(2, 4)), 64, 128, groups=16), plan(SMALL, 3)),
    (ConvCase(channels=160, channels_out=80, groups=2, kernel=(1, 1)), plan(TALL, 2)),
    (ConvCase("float", Blocks(block=(2, 4)), 24, 204, strides=(2, 2), groups=3), plan(SMALL, 3)),
    (ConvCase("Half", Blocks(block=(4, 4)), 240, 240, groups=10, dilation=(2, 1)), plan(SMALL, 2)),
]  # fmt: skip
# Of each element, tile, split and way to load; channels that are no whole vectors; no block at all.
CHOSEN = {0: False, 1: True, 3: False, 7: True, 9: False, 10: True, 12: False}
SANITIZED = [(CASES[i], pipelined) for i, pipelined in CHOSEN.items()]
USUAL = [(CASES[i], CHOSEN[i]) for i in (1, 7, 9, 10, 12)]  # of each element and way to load
PATCHES = [
    (
        ConvCase(blocks=Blocks(image=(20, 17), block=(8, 8)), channels=64, channels_out=72),
        PatchPlan("TileMma", (8, 8), 1, 64, (2, 2), 2, 1, 2),
    ),
    (
        ConvCase("BFloat16", Blocks(image=(30, 20), block=(16, 16)), 128, 64, residual=False),
        PatchPlan("TileMma", (8, 16), 1, 64, (4, 2), 5, 2, 1),
    ),
    (
        ConvCase(
            blocks=Blocks(image=(30, 17), block=(16, 8)), channels=64, channels_out=133,
            kernel=(5, 3), dilation=(1, 2),
        ),
        PatchPlan("TileMma", (8, 8), 2, 64, (4, 2), 15, 1, 1),
    ),
    (
        ConvCase(blocks=Blocks(block=(8, 16), share=0.0), channels=64, kernel=(1, 3)),
        PatchPlan("TileMma", (8, 16), 1, 64, (4, 2), 3, 3, 1),
    ),
    # channels that are no whole chunks: 2, 4 and 6 units of 16 bytes, and 4 beside a chunk
    (
        ConvCase(blocks=Blocks(image=(20, 17), block=(8, 8)), channels=32, channels_out=40),
        PatchPlan("TileMma", (8, 8), 1, 64, (2, 2), 2, 1, 2),
    ),
    (
        ConvCase(
            "BFloat16", Blocks(image=(30, 17), block=(16, 8)), channels=16, kernel=(5, 3),
            dilation=(1, 2), residual=False,
        ),
        PatchPlan("TileMma", (8, 8), 2, 64, (4, 2), 4, 1, 1),
    ),
    (
        ConvCase(blocks=Blocks(image=(30, 20), block=(16, 16)), channels=48, channels_out=133),
        PatchPlan("TileMma", (8, 16), 1, 64, (4, 2), 3, 2, 1),
    ),
    (
        ConvCase("BFloat16", Blocks(image=(30, 20), block=(16, 16)), 96, 64),
        PatchPlan("TileMma", (8, 16), 1, 64, (4, 2), 5, 2, 1),
    ),
    # few output channels: half of a panel of weights; and a patch that reaches across whole blocks
    (
        ConvCase(blocks=Blocks(image=(30, 20), block=(16, 16)), channels=32, channels_out=24),
        PatchPlan("TileMma", (8, 16), 1, 32, (4, 1), 3, 1, 2),
    ),
    (
        ConvCase(
            "BFloat16", Blocks(image=(40, 33), block=(8, 8)), 64, 3, (5, 3), dilation=(5, 9),
            residual=False,
        ),
        PatchPlan("TileMma", (8, 8), 1, 32, (4, 1), 2, 1, 2),
    ),
    (
        ConvCase(
            blocks=Blocks(image=(20, 17), block=(8, 8)), channels=64, activation=FIRST + HALVED
        ),
        PatchPlan("TileMma", (8, 8), 1, 64, (2, 2), 2, 1, 2),
    ),
]  # fmt: skip
DEPTHWISE = [
    ConvCase(depthwise=True, channels_out=16),
    ConvCase(depthwise=True, channels_out=16, activation=LAST + 1),
    ConvCase(
        depthwise=True, blocks=Blocks(block=(2, 2)), channels=24, kernel=(7, 7), image_out=(24, 16)
    ),
    ConvCase("BFloat16", Blocks(block=(8, 4)), 13, 13, (5, 5), (2, 2), depthwise=True),
    ConvCase("float", Blocks(block=(1, 1)), 70, 70, (3, 5), dilation=(2, 3), depthwise=True),
    ConvCase(depthwise=True, blocks=Blocks(block=(7, 5), share=1.0, spare=0), channels_out=16),
    ConvCase(
        depthwise=True, blocks=Blocks(image=(45, 50), block=(20, 12)), channels=24,
        channels_out=24, kernel=(7, 7),
    ),
    ConvCase("float", Blocks(block=(2, 2)), 8, 8, dilation=(12, 9), depthwise=True),
    ConvCase("Half", Blocks(block=(4, 4)), 72, 72, (5, 5), (2, 2), activation=5, depthwise=True),
    ConvCase(channels_out=16, activation=FIRST + HALVED, depthwise=True),
    ConvCase("BFloat16", Blocks(block=(6, 6)), 12, 12, (2, 4), (3, 3), depthwise=True),
    ConvCase("Half", Blocks(block=(16, 16)), 40, 40, strides=(1, 2), depthwise=True),
    # More tiles at once than a slice has weights.
    ConvCase(
        "Half", Blocks(image=(33, 26), block=(2, 2)), 232, 232, strides=(2, 2), depthwise=True
    ),
]  # fmt: skip
HALOS = [  # dtype, block, pixels before and after, channels
    ("float16", (8, 8), (1, 1), (1, 1), 16),
    ("float32", (1, 1), (3, 2), (2, 3), 3),
    ("uint8", (4, 6), (5, 1), (0, 7), 5),
    ("int16", (2, 2), (1, 1), (1, 1), 2),
    ("float64", (7, 5), (0, 0), (4, 4), 70),
]


WGMMA = [  # case, tile, warps, stages, and what else of the plan
    (
        ConvCase(blocks=Blocks(image=(40, 33), block=(8, 8)), channels_out=72),
        (64, 64), (1, 1), 3, {},
    ),
    (ConvCase(channels=72, channels_out=136), (128, 128), (2, 1), 2, {"parts": 2, "teams": 2}),
    (ConvCase("BFloat16", Blocks(block=(2, 2)), 64, 64), (192, 128), (3, 1), 2, {"parts": 3}),
    (ConvCase("float", Blocks(block=(2, 4)), 36, 72, (1, 1)), (64, 64), (1, 1), 2, {"bulk": True}),
    (
        ConvCase(blocks=Blocks(block=(4, 4)), channels=136, kernel=(1, 1), channels_out=64),
        (256, 64), (2, 1), 2, {"bulk": True, "results": 1, "parts": 4},
    ),
    (
        ConvCase("BFloat16", Blocks(block=(2, 2)), 24, 136, residual=False, shortcut=(192, (1, 3))),
        (64, 128), (1, 1), 4, {},
    ),
    (ConvCase(channels=24, channels_out=264, residual=False), (64, 256), (1, 2), 2, {}),
    (
        ConvCase("BFloat16", Blocks(block=(2, 2)), 136, 72, (1, 1)),
        (192, 64), (3, 1), 3, {"bulk": True, "parts": 3},
    ),
]  # fmt: skip
WGMMA_PATCHES = [
    (PATCHES[0][0], PatchPlan("TileWgmma", (8, 8), 2, 64, (2, 1), 3, 1, 1)),
    (PATCHES[1][0], PatchPlan("TileWgmma", (8, 16), 1, 64, (1, 1), 9, 2, 1)),
    (PATCHES[4][0], PatchPlan("TileWgmma", (8, 8), 2, 64, (2, 1), 3, 1, 1)),
    (PATCHES[5][0], PatchPlan("TileWgmma", (8, 8), 1, 64, (1, 1), 4, 1, 1)),
    (PATCHES[6][0], PatchPlan("TileWgmma", (16, 16), 1, 128, (2, 1), 2, 2, 1)),
    (PATCHES[7][0], PatchPlan("TileWgmma", (8, 16), 1, 64, (1, 1), 9, 2, 1)),
    (PATCHES[8][0], PatchPlan("TileWgmma", (16, 16), 1, 32, (2, 1), 5, 1, 2)),
    (PATCHES[9][0], PatchPlan("TileWgmma", (8, 8), 1, 32, (1, 1), 3, 1, 3)),
]


def full_plan(given, pipelined, results):
    """Return the StackPlan of a case."""
    tile, warps, stages, split = given
    return StackPlan("TileMma", tile, warps, stages, split, split > 1, pipelined, True, results, 1)


@pytest.mark.parametrize(
    "chosen", all_but(itertools.product(CASES, [False, True]), USUAL, SANITIZED), ids=str
)
def test_convolution_of_whole_numbers_is_exact(chosen, monkeypatch):
    """Results that may be are staged: in one buffer or two, as many as the tile has stages."""
    (case, given), pipelined = chosen
    use_shim(monkeypatch, BLACKWELL if pipelined else AMPERE)
    clear_rows = pipelined
    staged = pipelined and given[-1] == 1 and case.sizes(1).vectors_out
    assert_exact(case, full_plan(given, pipelined, given[2] % 3 if staged else 0), clear_rows)


@pytest.mark.parametrize("chosen", all_but(WGMMA, [WGMMA[0], *WGMMA[4:]], WGMMA), ids=str)
def test_products_of_four_warps_are_exact(chosen, monkeypatch):
    """They run as late as they may: a stage that is given back too early spoils them."""
    case, tile, warps, stages, more = chosen
    use_shim(monkeypatch, BLACKWELL, thread_blocks=3)
    plan = StackPlan("TileWgmma", tile, warps, stages, 1, False, True, True, 0, 1)
    assert_exact(case, plan._replace(**more), clear_rows=True)


@pytest.mark.parametrize(("case", "plan"), first_of(WGMMA_PATCHES, 1, sanitized=2), ids=str)
def test_products_of_patches_by_four_warps_are_exact(case, plan, monkeypatch):
    use_shim(monkeypatch, BLACKWELL, thread_blocks=4)
    assert_exact(case, plan, clear_rows=True)


SHORTCUTS = [
    (
        ConvCase(channels=72, kernel=(1, 1), residual=False, shortcut=(64, (2, 2))),
        plan(SMALL, 3),
    ),
    (
        ConvCase(
            "BFloat16", Blocks(block=(2, 2)), 24, 136, residual=False, shortcut=(192, (1, 3))
        ),
        plan(TALL, 2),
    ),
    (
        ConvCase(blocks=Blocks(share=0.0), residual=False, shortcut=(64, (1, 1))),
        plan(WIDE, 2),
    ),
]


@pytest.mark.parametrize(
    ("case", "given"), first_of([CASES[i] for i in (1, 3, 7, 13, 17)], 2, sanitized=3), ids=str
)
def test_two_teams_that_copy_are_exact(case, given, monkeypatch):
    """Chunks taken in turn, also those of the rest; results that both teams stage."""
    use_shim(monkeypatch, BLACKWELL, thread_blocks=2)
    results = 2 if case.sizes(1).vectors_out else 0
    plan = full_plan((*given[:3], 1), True, results)._replace(teams=2)
    assert_exact(case, plan, clear_rows=True)


@pytest.mark.parametrize(("case", "sizes"), first_of(SHORTCUTS, 1), ids=str)
def test_two_teams_copy_a_shortcut(case, sizes, monkeypatch):
    use_shim(monkeypatch, BLACKWELL, thread_blocks=2)
    assert_exact(case, full_plan(sizes, True, 0)._replace(teams=2), clear_rows=True)


@pytest.mark.parametrize("results", [1, 2])
@pytest.mark.parametrize("residual", [False, True])
def test_staged_results_are_exact(results, residual, monkeypatch):
    use_shim(monkeypatch, BLACKWELL, thread_blocks=2)
    case = ConvCase(channels_out=200, kernel=(1, 1), residual=residual)
    assert_exact(case, full_plan((*TALL, 2, 1), True, results), clear_rows=False)


CLUSTERS = [  # case, tile, what else of the plan, thread blocks of a round
    (ConvCase(channels=72, channels_out=72), (*SMALL, 4, 4), {}, 8),
    (ConvCase("BFloat16", Blocks(block=(2, 4)), 40, kernel=(2, 3)), (*SMALL, 3, 3), {}, 3),
    (ConvCase("float", Blocks(block=(2, 4)), 20, 43, kernel=(2, 3)), (*TALL, 2, 2), {}, 5),
    (
        ConvCase(
            "BFloat16", Blocks(block=(2, 2)), 24, 136, residual=False, shortcut=(192, (1, 3))
        ),
        (*SMALL, 3, 2), {}, 4,
    ),
    (ConvCase(channels=96, channels_out=96, groups=4), (*SMALL, 3, 2), {"teams": 2}, 2),
    (ConvCase(blocks=Blocks(share=0.0)), (*SMALL, 3, 3), {}, 6),
    (ConvCase(channels=136, kernel=(1, 1)), (*SMALL, 2, 3), {"bulk": True}, 6),
    (
        ConvCase(channels=72, channels_out=136), ((64, 128), (1, 1), 2, 3),
        {"engine": "TileWgmma"}, 6,
    ),
]  # fmt: skip


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize("chosen", all_but(CLUSTERS, CLUSTERS[:3], CLUSTERS[:4]), ids=str)
def test_sums_of_a_cluster_are_exact(chosen, order, monkeypatch):
    """K shared unevenly, also a shortcut's; the sums of several tiles, one after another."""
    monkeypatch.setenv("SBNET_HOST_ORDER", order)
    case, given, more, thread_blocks = chosen
    use_shim(monkeypatch, BLACKWELL, thread_blocks)
    plan = full_plan(given, True, 0)._replace(partials=False, **more)
    assert plan.clustered
    assert_exact(case, plan, clear_rows=True)


CUT = [  # case, tile, results; of 128 rows, in rounds of so many thread blocks
    (ConvCase(blocks=Blocks(image=(40, 33)), channels_out=72), TALL, 0, 3),
    (ConvCase("BFloat16", Blocks(block=(2, 2), share=0.8), 64, 136, (1, 1)), WIDE, 0, 5),
    (ConvCase(channels=72, kernel=(1, 1), channels_out=64), TALL, 1, 4),
    (ConvCase(blocks=Blocks(share=0.05), channels_out=64), TALL, 0, 8),
]


@pytest.mark.parametrize(("case", "tile", "results", "thread_blocks"), CUT, ids=str)
def test_tiles_of_the_last_round_that_are_cut_are_exact(
    case, tile, results, thread_blocks, monkeypatch
):
    use_shim(monkeypatch, BLACKWELL, thread_blocks=thread_blocks)
    plan = full_plan((*tile, 2, 1), True, results)._replace(parts=2)
    assert_exact(case, plan, clear_rows=True)


@pytest.mark.parametrize("residual", [False, True])
def test_a_residual_has_a_plan_of_its_own(residual, monkeypatch):
    use_shim(monkeypatch, BLACKWELL, thread_blocks=2)
    monkeypatch.setattr(
        stack_launch, "plan_stack_conv",
        lambda conv, device: full_plan((*TALL, 2, 1), True, 2 if conv.residual else 0),
    )  # fmt: skip
    case = ConvCase(channels_out=200, kernel=(1, 1), residual=residual)
    assert_exact(case, None, clear_rows=False)


@pytest.mark.parametrize(("case", "plan"), first_of(PATCHES, 2, sanitized=4), ids=str)
def test_convolution_from_patches_is_exact(case, plan, monkeypatch):
    use_shim(monkeypatch, BLACKWELL, thread_blocks=4)
    assert_exact(case, plan, clear_rows=plan.patch_stages == 1, settled=plan.stages == 2)


SCALED = [  # last, behind the activation, or behind the sum that it comes before
    (ConvCase(channels_out=40, activation=LAST + 1), full_plan(plan(SMALL, 3), False, 0)),
    (ConvCase(channels_out=23, activation=LAST + HALVED), full_plan(plan(SMALL, 3), False, 0)),
    (
        ConvCase("float", Blocks(block=(2, 4)), 20, 44, activation=LAST + FIRST + 5),
        full_plan(plan(SMALL, 3, 2), False, 0),
    ),
    (
        ConvCase(channels=72, channels_out=136, activation=LAST + 1, residual=False),
        full_plan(plan(WIDE, 2), True, 0),
    ),
    (
        ConvCase("BFloat16", Blocks(block=(2, 2)), 24, 72, (1, 1), activation=LAST + FIRST + 1),
        full_plan(plan(TALL, 2), True, 2),
    ),
    (
        ConvCase(channels=72, channels_out=72, activation=LAST + 1),
        full_plan(plan(SMALL, 3, 3), True, 0)._replace(partials=False),
    ),
    *((replace(case, activation=LAST + 1), plan) for case, plan in PATCHES[:3]),
]


@pytest.mark.parametrize(("case", "plan"), first_of(SCALED, 4, sanitized=6), ids=str)
def test_channels_that_are_scaled_last_are_exact(case, plan, monkeypatch):
    use_shim(monkeypatch, AMPERE if plan.kernel == "stack_conv" else BLACKWELL, thread_blocks=2)
    assert_exact(case, plan, clear_rows=True)


PARTS = [  # some channels of other stacks: of x, and of the residual
    (ConvCase(channels=40, channels_out=72, beside=(8, 24)), full_plan(plan(SMALL, 3), False, 0)),
    (
        ConvCase("float", Blocks(block=(2, 4)), 20, 44, beside=(4, 0)),
        full_plan(plan(SMALL, 3, 2), False, 0),
    ),
    (ConvCase(channels=72, channels_out=136, beside=(0, 8)), full_plan(plan(TALL, 2), True, 0)),
    (
        ConvCase("BFloat16", Blocks(block=(2, 2)), 136, 64, (1, 1), beside=(64, 8)),
        full_plan(plan(SMALL, 3, 2), True, 0),
    ),
    (
        ConvCase(channels=24, channels_out=72, kernel=(1, 1), beside=(16, 16)),
        full_plan(plan(TALL, 2), True, 2),
    ),
    (
        ConvCase(channels=72, channels_out=72, beside=(8, 16)),
        full_plan(plan(SMALL, 3, 3), True, 0)._replace(partials=False),
    ),
    (
        ConvCase(channels=72, channels_out=72, kernel=(1, 1), beside=(8, 16)),
        full_plan(plan(SMALL, 3), True, 0)._replace(bulk=True),
    ),
    (
        ConvCase(channels=96, channels_out=96, groups=4, beside=(8, 8)),
        full_plan(plan(SMALL, 3), True, 0),
    ),
    (
        ConvCase(channels=72, residual=False, shortcut=(64, (2, 2)), beside=(8, 0)),
        full_plan(plan(SMALL, 3), True, 0),
    ),
    *((replace(case, beside=(8, 8)), plan) for case, plan in PATCHES[:2]),
    (  # sums of a cluster; sums that are added up by another kernel
        ConvCase(channels=136, channels_out=72, beside=(8, 16)),
        full_plan(plan(SMALL, 3, 2), True, 0),
    ),
    (
        ConvCase(channels=136, channels_out=72, beside=(8, 16)),
        full_plan(plan(SMALL, 3, 2), False, 0),
    ),
    (  # channels that become pixels: by tables, by the copy engine, in patches
        ConvCase(channels=40, channels_out=96, kernel=(2, 2), residual=False, unfolded=(2, 2)),
        full_plan(plan(SMALL, 3), False, 0),
    ),
    (
        ConvCase("BFloat16", channels=136, channels_out=48, residual=False, unfolded=(1, 3),
                 beside=(8, 16)), full_plan(plan(SMALL, 3), True, 0),
    ),
    (
        ConvCase("float", Blocks(block=(3, 5)), 72, 96, (1, 1), residual=False, unfolded=(4, 2),
                 beside=(4, 0)), full_plan((*TALL, 2, 1), True, 0)._replace(bulk=True),
    ),
    *((replace(case, residual=False, unfolded=(1, 1), beside=beside), plan)
      for (case, plan), beside in zip(PATCHES[:2], (None, (8, 8)), strict=True)),
    (  # a shortcut whose pixels the copy engine brings
        ConvCase(channels=72, kernel=(1, 1), residual=False, shortcut=(64, (2, 2)), beside=(8, 8)),
        full_plan((*SMALL, 2, 1), True, 0)._replace(bulk=True),
    ),
]


@pytest.mark.parametrize(("case", "plan"), first_of(PARTS, 4, sanitized=7), ids=str)
def test_parts_of_other_stacks_are_read_and_written_where_they_lie(case, plan, monkeypatch):
    use_shim(monkeypatch, AMPERE if plan.kernel == "stack_conv" else BLACKWELL, thread_blocks=2)
    assert_exact(case, plan, clear_rows=True)


@pytest.mark.parametrize("given", SHORTCUTS, ids=str)
def test_shortcut_is_exact(given, monkeypatch):
    use_shim(monkeypatch, BLACKWELL, thread_blocks=2)
    case, sizes = given
    assert_exact(case, full_plan(sizes, True, 0), clear_rows=True)


def test_shortcut_is_planned_by_the_kernel_that_takes_it():
    case = ConvCase(channels=64, channels_out=64, residual=False, shortcut=(64, (2, 2)))
    conv = case.sizes(110)
    assert missing_kernel(conv, HOPPER) is None
    assert plan_stack_conv(conv, HOPPER).kernel == "stack_conv_pipelined"
    assert conv.chunks == 9 + 1
    assert "shortcut" in missing_kernel(conv, AMPERE)
    uneven = conv._replace(shortcut=conv.shortcut._replace(channels=24))
    assert "shortcut" in missing_kernel(uneven, HOPPER)


BOXES = [  # case, tile, results and parts
    (ConvCase(channels=72, kernel=(1, 1), channels_out=64), TALL, 1, 2),
    (ConvCase("BFloat16", Blocks(block=(3, 5)), 136, 136, (1, 1)), WIDE, 0, 1),
    (ConvCase("float", Blocks(block=(2, 4)), 36, 72, (1, 1)), SMALL, 0, 1),
    (ConvCase(blocks=Blocks(share=0.0), channels=64, kernel=(1, 1)), SMALL, 0, 1),
    (
        ConvCase(channels=72, kernel=(1, 1), residual=False, shortcut=(64, (2, 2))), SMALL, 0, 1,
    ),
    (
        ConvCase("BFloat16", Blocks(block=(2, 1)), 24, 136, (1, 1), residual=False,
                 shortcut=(192, (1, 3))), TALL, 0, 1,
    ),
    (
        ConvCase(blocks=Blocks(image=(20, 130), block=(2, 128)), channels_out=64, kernel=(1, 1),
                 residual=False, shortcut=(128, (3, 2))), SMALL, 0, 1,
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "tile", "results", "parts"), first_of(BOXES, 3, sanitized=7), ids=str
)
def test_pixels_that_the_copy_engine_brings_are_exact(case, tile, results, parts, monkeypatch):
    """Channels that are no whole chunk, cut tiles, shortcuts of lines and of parts of them."""
    use_shim(monkeypatch, BLACKWELL, thread_blocks=3)
    plan = full_plan((*tile, 2, 1), True, results)._replace(parts=parts, bulk=True)
    assert has_boxes(case.sizes(10), BLACKWELL)
    assert_exact(case, plan, clear_rows=True)


def test_boxes_are_whole_lines_or_parts_of_them():
    boxes = {1: (1, 64), 4: (4, 16), 64: (64, 1), 192: (64, 1), 3: None, 48: None, 65: None}
    assert {width: box_of_lines(width) for width in boxes} == boxes
    conv = ConvCase(channels=64, kernel=(1, 1), residual=False, shortcut=(64, (2, 2))).sizes(10)
    assert has_boxes(conv, HOPPER) and not has_boxes(conv, AMPERE)
    for change in (
        {"block_out": (4, 3)}, {"kernel": (3, 3)}, {"vectors_in": False}, {"group": (8, 8)},
    ):  # fmt: skip
        assert not has_boxes(conv._replace(**change), HOPPER)


def test_boxes_of_blocks_are_whole_lines_or_parts_of_them():
    """Tiles begin at every 64th pixel: a box lies in one block, wherever a tile begins."""
    for down, across in itertools.product(range(1, 80), (*range(1, 70), 96, 128, 192, 200)):
        width, height = box_of_block((down, across))
        assert 64 % (width * height) == 0 and across % width == 0 and down % height == 0
        assert height == 1 or width == across
    boxes = {(8, 8): (8, 8), (4, 4): (4, 4), (1, 1): (1, 1), (16, 16): (16, 4), (3, 128): (64, 1)}
    assert {block: box_of_block(block) for block in boxes} == boxes


def test_images_are_planned_with_boxes_and_without():
    case = ConvCase(blocks=Blocks(image=(40, 33), block=(8, 8)), channels=256, kernel=(1, 1))
    conv = case.sizes(40)._replace(of_images=True)
    assert has_boxes(conv, HOPPER) and not conv.pointwise
    plans = list(candidates(conv, HOPPER))
    kinds = {(plan.bulk, plan.direct) for plan in plans}
    assert kinds == {(False, False), (False, True), (True, False)}
    assert all(plan.shared_bytes(conv) <= HOPPER.shared_of(plan.blocks) for plan in plans)
    assert plan_stack_conv(conv, HOPPER).bulk
    for change in ({"kernel": (3, 3), "pads": (1, 1)}, {"strides": (2, 2)}, {"pads": (1, 0)}):
        others = candidates(conv._replace(**change), HOPPER)
        assert not any(plan.bulk or plan.direct for plan in others)


# Images of whole blocks, fewer than the grid has; a padding below of a window of one pixel.
FEWER = ConvCase(blocks=Blocks(image=(24, 24), block=(8, 8), share=0.8), channels=64,
                 image_out=(16, 8))  # fmt: skip
PADDED = ConvCase(blocks=Blocks(image=(7, 6)), kernel=(1, 1), image_out=(8, 7))
SIZES_OUT = [
    (FEWER, full_plan(plan(SMALL, 3), False, 0)),
    (FEWER, full_plan(plan(SMALL, 3, 2), False, 0)),
    (FEWER, full_plan(plan(SMALL, 3), True, 0)),
    (FEWER, PATCHES[0][1]),
    (PADDED, full_plan(plan(SMALL, 3), False, 0)),
    (PADDED, full_plan(plan(SMALL, 3), True, 0)),
]


@pytest.mark.parametrize(("case", "plan"), first_of(SIZES_OUT, 6, sanitized=6), ids=str)
def test_images_that_are_smaller_or_larger_than_those_that_are_read(case, plan, monkeypatch):
    """Pixels outside of their image are 0, also those of whole blocks, and none is read."""
    use_shim(monkeypatch, AMPERE if plan.kernel == "stack_conv" else BLACKWELL, thread_blocks=2)
    assert_exact(case, plan, clear_rows=True)


def assert_exact(case, plan, clear_rows, settled=False):
    """Run a case by a plan; weights of either layout are packed alike."""

    def launch(x, w, scale, bias, residual, table, out):
        conv = case.sizes(len(x))
        packed = prepare_stack_pack(conv, "HWIO")(w, scale, bias)
        turned = np.ascontiguousarray(w.transpose(3, 2, 0, 1))
        np.testing.assert_array_equal(packed, prepare_stack_pack(conv, "OIHW")(turned, scale, bias))
        run = prepare_stack_conv(conv, settled, case.clears(clear_rows), plan)
        if case.shortcut:
            also, kernel, its_bias = case.stored_shortcut()
            pointwise = conv._replace(channels=also.shape[3], kernel=(1, 1), shortcut=None)
            packed_also = prepare_stack_pack(pointwise, "HWIO")(kernel, None, its_bias)
            run(case.part(x), packed, case.part(also), packed_also, *table, out)
        else:
            run(case.part(x), packed, case.part(residual), *table, out, *case.last())

    case.run(launch, clear_rows)


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("device", [AMPERE, BLACKWELL], ids=["ampere", "blackwell"])
def test_the_planned_instance_is_right(device, settled, monkeypatch):
    use_shim(monkeypatch, device, thread_blocks=2)
    case = ConvCase(blocks=Blocks(image=(30, 30), block=(3, 3)), channels_out=72)

    def launch(x, w, scale, bias, residual, table, out):
        conv = case.sizes(len(x))
        assert missing_kernel(conv, device) is None
        run = prepare_stack_conv(conv, settled=settled)
        run(x, prepare_stack_pack(conv, "HWIO")(w, scale, bias), residual, *table, out)

    case.run(launch, clear_rows=True)


@pytest.mark.parametrize(
    ("element", "channels"),
    thinned_product(
        4, ["Half", "BFloat16", "float"], [(1, 17, 1), (3, 17, 1), (13, 17, 1), (33, 99, 3)]
    ),
)
def test_channels_that_are_no_whole_vectors_are_padded(element, channels, monkeypatch):
    use_shim(monkeypatch, BLACKWELL)
    *channels, groups = channels
    case = ConvCase(element, Blocks(block=(8, 6)), *channels, (5, 3), (2, 2), groups=groups)

    def launch(x, w, scale, bias, residual, table, out):
        conv = case.sizes(len(x))
        assert not conv.vectors_in
        run = prepare_stack_conv(conv)
        run(x, prepare_stack_pack(conv, "HWIO")(w, scale, bias), residual, *table, out)

    case.run(launch, clear_rows=True)


@pytest.mark.parametrize(
    ("case", "w_format", "settled"),
    thinned_product(7, DEPTHWISE, ["HWIO", "OIHW"], [False, True], sanitized=3),
    ids=str,
)
def test_depthwise_convolution_of_whole_numbers_is_exact(case, w_format, settled, monkeypatch):
    use_shim(monkeypatch, BLACKWELL)

    def launch(x, w, scale, bias, residual, table, out):
        conv = case.sizes(len(x))
        run = prepare_stack_depthwise(conv, w_format, clear_rows=not settled, settled=settled)
        if w_format == "OIHW":
            w = np.ascontiguousarray(w.transpose(3, 2, 0, 1))
        run(x, w, scale, bias, residual, *table, out, *case.last())

    case.run(launch, clear_rows=not settled)


@pytest.mark.parametrize("kernel", [(3, 3), (31, 31), (200, 1)], ids=str)
@pytest.mark.parametrize("device", [AMPERE, HOPPER], ids=["ampere", "hopper"])
def test_plans_of_depthwise_convolutions_fit_the_device(device, kernel):
    for block in (1, 2, 5, 7, 8, 13, 32):
        for channels in (1, 6, 18, 40, 96, 120, 2048):
            case = ConvCase("Half", Blocks(block=(block, block)), channels, channels, kernel)
            conv = case.sizes(100)
            plan = plan_stack_depthwise(conv, 16, device)
            assert plan.shared_bytes(conv) <= device.shared_bytes
            assert plan.threads <= 256
            tiles, slices = plan.grid(conv)
            assert tiles * plan.tiles * plan.tile_h * plan.runs * plan.run >= 100 * block**2
            assert slices * plan.lanes * plan.vector >= channels
    for large in ({"kernel": (300, 300)}, {"rows": 2**21}):  # of blocks of 32 x 32 pixels
        assert plan_stack_depthwise(conv._replace(**large), 16, device) is None


@pytest.mark.parametrize(("fill", "sizes"), thinned_product(4, FILLS, HALOS), ids=str)
def test_halo_is_what_numpy_pads(fill, sizes, monkeypatch):
    use_shim(monkeypatch, AMPERE)
    dtype, block, before, after, channels = sizes
    blocks = Blocks(block=block)
    bin_counts, indices, grid = blocks.table()
    count = int(bin_counts[0])
    floating = np.dtype(dtype).kind == "f"
    x = np.random.default_rng(2).integers(1, 50, (len(indices), *block, channels)).astype(dtype)
    blocks.spoil(x, indices[:count], np.nan if floating else 77)
    lowest = -np.inf if floating else np.iinfo(dtype).min
    how = {
        "zero": {"mode": "constant"},
        "lowest": {"mode": "constant", "constant_values": lowest},
        "nearest": {"mode": "edge"},
        "mirror": {"mode": "reflect"},
        "repeat": {"mode": "wrap"},
    }[fill]
    image, far = blocks.to_image(x, indices[:count]), 50
    padded = np.pad(image, ((0, 0), (far, far), (far, far), (0, 0)), **how).astype(dtype)
    size = tuple(map(sum, zip(before, block, after, strict=True)))
    halo = StackHalo(
        len(x), blocks.images, blocks.grid_size, block, blocks.image, before, after, fill,
        lowest_bits(dtype),
    )  # fmt: skip
    out = np.full((len(x), *size, channels), 99, dtype)
    prepare_stack_halo(halo, channels * x.itemsize)(x, bin_counts, indices, grid, out)
    for row, (n, hi, wi) in enumerate(indices[:count]):
        top, left = far + hi * block[0] - before[0], far + wi * block[1] - before[1]
        expected = padded[n, top : top + size[0], left : left + size[1]]
        np.testing.assert_array_equal(out[row], expected)
    assert not out[count:].any()


@pytest.mark.parametrize(
    "device", [AMPERE, BLACKWELL, HOPPER], ids=["ampere", "blackwell", "hopper"]
)
@pytest.mark.parametrize("case", [case for case, _ in CASES], ids=str)
def test_plans_fit_the_device(case, device):
    conv = case.sizes(1000)
    plans = list(candidates(conv, device))
    assert plan_stack_conv(conv, device) in [*plans, *patch_candidates(conv, device)]
    for one in plans:
        assert one.shared_bytes(conv) <= device.shared_bytes
        assert one.threads <= 1024
        assert one.partials == (one.split > 1 and not device.bulk_copy)


@pytest.mark.parametrize(
    "device", [AMPERE, BLACKWELL, HOPPER], ids=["ampere", "blackwell", "hopper"]
)
@pytest.mark.parametrize("sizes", [(48, 6, 3), (96, 54, 3), (108, 9, 3), (32, 2, 2)], ids=str)
def test_odd_channels_in_groups_have_a_plan(sizes, device):
    """Which need not add up as with more channels: those in groups are never padded."""
    channels, channels_out, groups = sizes
    case = ConvCase("Half", Blocks(block=(4, 4)), channels, channels_out, (1, 7), groups=groups)
    conv = case.sizes(3)
    assert missing_kernel(conv, device) is None
    costs = [plan_cost(one, conv, device) for one in candidates(conv, device)]
    assert plan_cost(plan_stack_conv(conv, device), conv, device) == min(costs)


@pytest.mark.parametrize(
    "device", [AMPERE, BLACKWELL, HOPPER], ids=["ampere", "blackwell", "hopper"]
)
@pytest.mark.parametrize("channels_out", [1, 18, 65, 255])
def test_odd_channels_add_up_as_padded_ones(channels_out, device):
    for channels, rows in itertools.product((24, 256, 2048), (1, 20, 500)):
        case = ConvCase("Half", Blocks(block=(4, 4)), channels, channels_out)
        conv = case.sizes(rows)
        padded = conv._replace(channels_out=-(-channels_out // 8) * 8, vectors_out=True)
        plans = [plan_stack_conv(one, device) for one in (conv, padded)]
        assert len({(plan.kernel, plan.split) for plan in plans}) == 1


@pytest.mark.parametrize("rows", [10, 110, 1000])
def test_few_thread_blocks_do_not_share_a_multiprocessor(rows):
    """Where they are at most half as many as multiprocessors, two do not fit into one."""
    conv = ConvCase(blocks=Blocks(block=(4, 4)), channels=128, channels_out=128).sizes(rows)
    available = HOPPER.shared_bytes + 1024  # 1 KiB of each thread block is the driver's
    for one in candidates(conv, HOPPER):
        launched, few = one.launched_bytes(conv, HOPPER), one.thread_blocks(conv) <= 66
        assert one.shared_bytes(conv) <= launched <= HOPPER.shared_bytes
        assert not few or 2 * (launched + 1024) > available
        assert few or launched == one.shared_bytes(conv)
        assert one.launched_bytes(conv, BLACKWELL) == one.shared_bytes(conv)


@pytest.mark.parametrize("device", [AMPERE, BLACKWELL, HOPPER])
def test_patches_fit_the_device(device):
    conv = ConvCase(blocks=Blocks(block=(16, 16)), channels=64, kernel=(3, 5)).sizes(1000)
    plans = list(patch_candidates(conv, device))
    assert bool(plans) == device.bulk_copy
    few = list(patch_candidates(conv._replace(channels_out=20), device))
    assert any(one.columns == 32 for one in few) == device.bulk_copy
    more = patch_candidates(conv._replace(channels_out=40), device)
    assert not any(one.columns == 32 for one in more)
    reaching = conv._replace(block_out=(8, 8), block=(8, 8), kernel=(5, 5), dilation=(18, 18))
    assert not list(patch_candidates(reaching, device))  # across more blocks than are found
    for one in plans:
        assert one.shared_bytes(conv) <= device.shared_bytes
        assert one.threads <= 1024
    for without in (
        {"strides": (2, 2)}, {"channels": 72}, {"kernel": (1, 1)}, {"block_out": (4, 4)},
        {"element": "float"},
    ):  # fmt: skip
        assert not list(patch_candidates(conv._replace(**without), device))


@pytest.mark.parametrize(
    ("side", "rows", "channels"),
    [(8, 820, 256), (8, 1640, 128), (16, 200, 256), (16, 410, 96), (16, 410, 128), (32, 100, 128)],
)
def test_patches_are_planned_where_they_take_least_time(side, rows, channels):
    """On an H200 9 to 15% less than tiles of 256 pixels."""
    case = ConvCase(blocks=Blocks(block=(side, side)), channels=channels, channels_out=channels)
    plan = plan_stack_conv(case.sizes(rows), HOPPER)
    assert (plan.kernel, plan.tile) == ("stack_conv_patch", (128, 128))


@pytest.mark.parametrize("activation", [2, 3, 7, FIRST + 3, LAST + 7])
def test_slow_activations_of_wide_patches_have_a_multiprocessor_for_themselves(activation):
    """Registers of two thread blocks would spill."""
    case = ConvCase(
        blocks=Blocks(block=(8, 8)), channels=64, channels_out=128, activation=activation,
    )
    plans = list(patch_candidates(case.sizes(200), HOPPER))
    assert all(one.blocks == 1 for one in plans if one.columns == 128)
    assert {one.columns for one in plans} == {64, 128}


@pytest.mark.parametrize(
    ("rows", "pixels", "parts"), [(275, 192, 1), (550, 256, 4), (1100, 192, 1)]
)
def test_rounds_are_what_a_plan_is_chosen_by(rows, pixels, parts):
    """Of 512 channels with dilation 4: the tiles that took least on an H200, none of a split K."""
    blocks = Blocks(images=1, image=(100, 176))
    case = ConvCase("Half", blocks, 512, 512, dilation=(4, 4), residual=False)
    plan = plan_stack_conv(case.sizes(rows), HOPPER)
    assert (plan.tile, plan.split, plan.parts) == ((pixels, 128), 1, parts)


@pytest.mark.parametrize(
    ("kernel", "block", "channels", "channels_out", "rows", "tile", "split"),
    [
        (3, 1, 512, 512, 110, (64, 64), 8), (3, 2, 256, 256, 110, (64, 64), 4),
        (3, 4, 128, 128, 110, (64, 64), 1), (3, 4, 128, 128, 275, (64, 128), 1),
        (3, 4, 2048, 512, 110, (128, 128), 2), (3, 2, 256, 256, 1100, (64, 256), 1),
        (1, 2, 1024, 256, 1100, (192, 64), 1), (1, 4, 512, 128, 1100, (192, 128), 1),
    ],
)  # fmt: skip
def test_layers_of_networks_have_the_plans_that_took_least(
    kernel, block, channels, channels_out, rows, tile, split
):
    """On an H200, in the network at few blocks."""
    blocks = Blocks(images=1, image=(25 * block, 44 * block), block=(block, block))
    sizes = (channels, channels_out, (kernel, kernel))
    plan = plan_stack_conv(ConvCase("Half", blocks, *sizes, residual=False).sizes(rows), HOPPER)
    assert (plan.tile, plan.split) == (tile, split)


@pytest.mark.parametrize("multiprocessors", [1, 3])
@pytest.mark.parametrize("large", [AMPERE, HOPPER])
def test_thread_blocks_that_share_channels_are_there_at_once(large, multiprocessors):
    """Fewer of a row of thread blocks than share a tile would never come to the next one."""
    device = large._replace(multiprocessors=multiprocessors)
    case = ConvCase(blocks=Blocks(block=(2, 2)), channels=2048, channels_out=8, kernel=(7, 7))
    for conv in (case.sizes(1), case.sizes(2)):
        assert plan_stack_conv(conv, device).split <= multiprocessors


def test_what_has_no_kernel_says_why():
    conv = ConvCase().sizes(10)
    assert missing_kernel(conv, AMPERE) is None
    assert "shared memory" in missing_kernel(conv._replace(kernel=(200, 200)), AMPERE)
    assert "stacks of" in missing_kernel(conv._replace(rows=2**28), AMPERE)
    assert "8192" in missing_kernel(conv._replace(pads=(9000, 1)), AMPERE)
    turing = AMPERE._replace(tensor_floats=False)
    assert "on this GPU" in missing_kernel(conv._replace(element="BFloat16"), turing)
