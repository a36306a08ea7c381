"""Sizes that Python computes are those of the C++ code: g++ evaluates its constants."""

import itertools

import numpy as np
import pytest

import host_cuda
from sbnet_cupy.block_sparse.bottleneck.config import UnitCase, configure_bottleneck
from sbnet_cupy.block_sparse.conv.config import Case, configure_conv, halo_plane_bytes
from sbnet_cupy.block_sparse.gather_scatter import config as copy_config
from sbnet_cupy.block_sparse.mask import config as mask_config
from sbnet_cupy.block_sparse.stack import (
    stack_conv_plan,
    stack_image_conv2d,
    stack_norm_launch,
    stack_patch_plan,
)
from sbnet_cupy.block_sparse.stack.stack_bottleneck_plan import bottleneck_plans
from sbnet_cupy.block_sparse.stack.stack_unit_plan import unit_plans
from sbnet_cupy.core.compile import cpp_name
from sbnet_cupy.core.device import Device
from sbnet_cupy.core.launch import THREADS
from sbnet_cupy.submanifold import map_kernels, site_conv_grad_plan, site_conv_instances, site_order
from sbnet_cupy.submanifold.site_conv_grad_plan import (
    WeightGradSizes,
    _list_bytes,
    plan_weight_grad,
)
from support.fused_on_host import AMPERE, BLACKWELL, TURING
from support.stack_bottleneck_cases import unit_of as bottleneck_of
from support.stack_on_host import Blocks, ConvCase
from support.stack_unit_cases import unit_of

HOPPER = Device(multiprocessors=132, shared_bytes=227 << 10, hopper=True, bulk_copy=True)
DEVICES = (TURING, AMPERE, BLACKWELL, HOPPER)
NUMBERS = (("Half", 2, False), ("BFloat16", 2, False), ("float", 4, False), ("float", 4, True))
GATHER_SCATTER = "block_sparse/gather_scatter"


def check(stem, expected):
    """Compare a dictionary from C++ expressions to the numbers that Python has for them."""
    found = host_cuda.constants(stem, list(expected))
    wrong = {
        expression: (value, number)
        for (expression, number), value in zip(expected.items(), found, strict=True)
        if value != number
    }
    assert not wrong, "(C++, Python) differ"


def joined(*arguments):
    """Spell template arguments."""
    return ", ".join(str(a).lower() if isinstance(a, bool) else str(a) for a in arguments)


def test_planes_of_a_tile():
    expected = {}
    tiles, kernels = ((4, 8), (8, 8), (8, 16)), ((1, 1), (3, 3), (2, 5), (7, 7))
    for tile, kernel, strides in itertools.product(tiles, kernels, ((1, 1), (2, 2), (1, 3))):
        halo = f"Halo<{joined(*tile, *kernel, *strides, 2)}>"
        expected[f"{halo}::PLANE"] = halo_plane_bytes(tile, kernel, strides)
    check("block_sparse/conv/fused_conv", expected)


def test_fused_conv():
    """Packed weights, steps of K, and shared memory of every kind of plan."""
    expected, engines = {}, set()
    shapes = ((24, 24, (3, 3)), (256, 96, (3, 3)), (5, 7, (5, 2)), (16, 64, (1, 1)))
    for number, (channels, out, kernel), strides, blocks, device in itertools.product(
        NUMBERS, shapes, ((1, 1), (2, 2)), (0, 1 << 30), DEVICES
    ):
        case = Case(*number, channels, out, kernel, strides, True, True, 0)
        plan = configure_conv(case, blocks, (8, 8), 280000, device)
        tile = joined(*plan.tile, *kernel, *strides, plan.planes)
        halo, packed = f"Halo<{tile}>", f"Slice<Halo<{tile}>, {plan.slice}>"
        engine = joined(case.element, halo, plan.slice, *plan.warps)
        memory = joined(
            f"{plan.engine}<{engine}>", halo, plan.slice, plan.warps[2], plan.stages, plan.resident
        )
        expected[f"{halo}::STEPS"] = plan.steps(kernel)
        expected[f"{plan.slices(case)} * {packed}::bytes({plan.chunks})"] = plan.packed_bytes(case)
        expected[f"Memory<{memory}>::BYTES"] = plan.shared_bytes(case)
        engines.add((plan.engine, plan.resident, plan.stages, plan.warps[2] > 1))
    assert {"MmaSync", "WarpGroup", "Fma"} == {engine for engine, *_ in engines}
    assert len(engines) > 6
    check("block_sparse/conv/fused_conv", expected)


def test_fused_bottleneck():
    """Packed weights and shared memory, with clusters and without."""
    expected, kinds = {}, set()
    units = ((96, 24), (192, 48), (256, 64), (384, 96), (8, 8), (40, 20), (64, 128), (200, 56))
    for number, unit, blocks, device in itertools.product(
        NUMBERS[:3], units, (0, 100, 1 << 30), DEVICES
    ):
        case = UnitCase(*number[:2], *unit, False)
        plan = configure_bottleneck(case, blocks, (8, 8), device)
        if plan is None:
            continue
        sizes = joined(case.element, plan.chunks, plan.mid, *plan.tile, plan.cluster, plan.slice)
        shares = joined(plan.warps, plan.split1, plan.second[2])
        expected[f"Unit3<{sizes}>::PACKED"] = plan.packed_bytes(case)
        expected[f"Behind<Unit3<{sizes}>, {shares}>::BYTES"] = plan.shared_bytes(case)
        kinds.add((plan.engine, plan.cluster > 1, plan.split1 > 1, plan.second[2] > 1))
    assert len(kinds) > 4
    check("block_sparse/bottleneck/fused_bottleneck", expected)


def test_tiles_that_turn():
    expected = {}
    for item, rows, columns in itertools.product((1, 2, 4, 8, 16), (1, 36, 100), (3, 16, 24, 100)):
        matrix = joined(f"Bytes<{item}>::type", rows, columns, item, item, 64)
        # rows are pixels, columns are channels
        size = copy_config._tile_bytes(rows, columns, item, True)
        expected[f"SharedTranspose<{matrix}>::BYTES"] = size
    check(f"{GATHER_SCATTER}/sparse_gather", expected)


def test_staged_blocks():
    expected = {"sizeof(Block<6, 5>)": copy_config._BLOCK_BYTES}
    for last, item, bsize, channels in itertools.product(
        (True, False), (1, 2, 4), ((6, 5), (18, 18), (1, 40)), (1, 3, 17)
    ):
        block = joined(last, f"Bytes<{item}>::type", *bsize, channels)
        layout = Layout(last, channels)
        expected[f"StagedBlock<{block}>::BYTES"] = copy_config._staged_bytes(layout, bsize, item)
    check(f"{GATHER_SCATTER}/sparse_gather", expected)


class Layout:
    """What a staged block needs to know of a layout."""

    def __init__(self, channels_last, channels):
        self.channels_last, self.C = channels_last, channels


@pytest.mark.parametrize("average", [False, True], ids=["max", "mean"])
def test_columns_of_a_mask(average):
    """Bytes of shared memory: for each line as many words, or sums of each part, as C++ strides."""
    expected = {}
    for width, word, lanes in ((700, 4, False), (88, 1, False), (3000, 1, True)):
        lanes = lanes and not average
        plan = mask_config.MaskConfig(3, 5, width, 1 << 12, word, lanes, 4, 256, 0, 7)
        slots, kept = mask_config.shared_memory(plan, average)
        step = 32 if plan.lanes else word
        stored = step * min(width // step + 2, slots)
        pitch = f"Columns<double, {joined(average)}>::pitch_of({stored})"
        parts = plan.down if average else 1
        size = f"{plan.lines} * {parts} * {pitch} * {8 if average else 4}"
        expected[f"ceil_div({size}, 8) * 8"] = kept
    check("block_sparse/mask/reduce_mask", expected)


@pytest.mark.parametrize(
    "stem",
    [
        f"{GATHER_SCATTER}/sparse_gather",
        f"{GATHER_SCATTER}/sparse_scatter",
        f"{GATHER_SCATTER}/zero_outside",
        "dense/affine_grad",
        "core/copy_image",
    ],
)
def test_threads_of_a_thread_block(stem):
    check(stem, {"THREADS": THREADS})


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int16", "uint8"])
def test_elements(dtype):
    """The C++ type of a dtype has its size."""
    name = cpp_name(np.dtype(dtype), "x")
    check("core/copy_image", {f"sizeof({name})": np.dtype(dtype).itemsize})


def test_stack_unit():
    """Shared memory of the plans, but for weights and tables."""
    expected = {}
    for bottleneck, block in itertools.product((True, False), ((8, 8), (4, 4), (2, 2))):
        unit = unit_of(Blocks(block=block), bottleneck, channels=64, out=64)
        for plan in unit_plans(unit, HOPPER):
            tile = f"UnitTile<{joined(*plan.piece, plan.pieces, 1 if bottleneck else 9)}>"
            memory = f"UnitMemory<{tile}, {plan.x_stages}>"
            expected[f"{memory}::BYTES"] = plan.memory_bytes(unit)
    assert len(expected) == 6
    check("block_sparse/stack/stack_unit", expected)


def test_stack_bottleneck():
    """The unit's shared memory, and where two tiles' pixels lie."""
    expected, pieces = {}, set()
    for block, channels, width in ((8, 96, 24), (4, 256, 64), (2, 384, 96)):
        unit = bottleneck_of(Blocks(block=(block, block)), "Half", channels, width)
        for plan in bottleneck_plans(unit, HOPPER):
            c = plan.config
            sizes = joined("Half", c.chunks, c.mid, *c.tile, c.cluster, c.slice, c.pieces)
            shares = joined(c.warps, c.split1, c.second[2])
            offsets = f"StackPixels<Unit3<{sizes}>, {c.threads}>::BYTES"
            total = f"Behind<Unit3<{sizes}>, {shares}>::BYTES + {offsets}"
            expected[total] = plan.shared_bytes(unit)
            pieces.add(c.pieces)
    assert pieces == {1, 2, 4, 8}
    check("block_sparse/stack/stack_bottleneck", expected)


def test_site_weight_grad():
    """The list of pairs, and the rows of a stage."""
    expected = {f"Pairs<{threads}>::BYTES": _list_bytes(threads) for threads in (128, 256)}
    for (element, _, tf32), channels in itertools.product(NUMBERS, (8, 30, 64, 100)):
        conv = WeightGradSizes(element, 9000, 9000, 27, channels, 64, 1, tf32, 8, 8)
        plan = plan_weight_grad(conv, HOPPER)
        if plan.kernel != "site_weight_grad" or plan.warps[2] > 1:
            continue
        ring = plan.shared_bytes(conv) - _list_bytes(plan.threads)
        rows = [f"Rows<{element}, {size}, {plan.threads}, true>::PITCH" for size in plan.tile]
        expected[f"{plan.stages * plan.rows} * ({' + '.join(rows)})"] = ring
    assert len(expected) > 5
    check("submanifold/site_conv_grad", expected)


STACK, SITES = "block_sparse/stack", "submanifold"
CONSTANTS = {
    f"{STACK}/stack_conv2d": {
        "PANEL": stack_conv_plan.PANEL,
        "TILE_ROW": stack_patch_plan.ROW,
        "CELL": stack_patch_plan._CELL,
        "PATCH_COPIERS + 32": stack_patch_plan._COPIERS,  # a warp more copies weights
    },
    f"{STACK}/stack_image_conv2d": {
        "STEP": stack_image_conv2d._STEP,
        "PatchLoader<Half, 8, true, 128>::PER_UNIT * sizeof(Half)": stack_image_conv2d._UNIT,
    },
    f"{STACK}/stack_batch_norm": {"FINISH_CHANNELS": stack_norm_launch._FINISHED},
    f"{SITES}/site_conv": {
        "PANEL": site_conv_instances.PANEL,
        "TILE_ROW": site_conv_instances.ROW,
        "ROWS_OF_GROUP": site_order.GROUP,
    },
    f"{SITES}/site_conv_grad": {
        "GRAD_COPIERS": site_conv_grad_plan.COPIERS,
        "GRAD_PAIRS": site_conv_grad_plan.PAIRS,
        "Pairs<GRAD_COPIERS>::BYTES": site_conv_grad_plan._list_bytes(site_conv_grad_plan.COPIERS),
    },
    f"{SITES}/site_order": {
        "TILE": site_order._TILE,
        "SLICES": site_order._SLICES,
        "MOST_TILES": site_order._MOST_TILES,
        "MOST_SHARES": site_order._MOST_SHARES,
    },
    f"{SITES}/coordinate_map": {"THREADS": THREADS, "AXES": map_kernels._MOST_AXES},
}


@pytest.mark.parametrize("stem", CONSTANTS)
def test_constants(stem):
    """What plans add up of these and of taps is what the shim allots: sanitizers watch its end."""
    check(stem, CONSTANTS[stem])


BOXED = ConvCase(kernel=(1, 1)).sizes(1)._replace(of_images=True)


def test_stages_of_products():
    """A stage of the ring, a staged result, and the threads that copy, of both kinds of product."""
    expected = {}
    for pixels, columns, stages in ((64, 64, 3), (128, 64, 4), (128, 128, 2), (256, 128, 2)):
        memory = f"PipelineMemory<{pixels}, {columns}, {stages}, 1, 8>"
        expected[f"{memory}::STAGE"] = (pixels + columns) * stack_patch_plan.ROW
        for element, size in (("Half", 2), ("float", 4)):
            expected[f"Staged<{element}, {columns}>::PITCH"] = columns * size + 64
        tile = (pixels, columns)
        plan = stack_conv_plan.StackPlan("", tile, (2, 2), stages, 1, False, True, False, 0, 1)
        for width in (1, 2, 4, 8):
            conv = BOXED._replace(block_out=(width, width))
            expected[f"BlockBoxes<{pixels}, {width**2}, false>::COUNT"] = plan.boxes(conv)
    plan = stack_conv_plan.StackPlan(
        "TileMma", (64, 64), (2, 2), 3, 1, False, True, False, 1, 1
    )  # fmt: skip
    expected["COPIERS"] = plan.threads - 4 * 32
    expected["BOX_ROWS"] = stack_conv_plan.BOX_ROWS
    check(f"{STACK}/stack_conv2d", expected)
    sites = site_conv_instances.PipelinedPlan((128, 64), (2, 1), 3)
    stage = sum(sites.tile) * site_conv_instances.ROW
    check(f"{SITES}/site_conv", {"SiteMemory<128, 64, 3>::STAGE": stage,
                                 "COPIERS": sites.threads - 2 * 128})  # fmt: skip
