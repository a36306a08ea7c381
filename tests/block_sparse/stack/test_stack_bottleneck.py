"""Which instance of the pre-activation unit's kernel runs, and for what there is none."""

import pytest

from sbnet_cupy.block_sparse.stack.stack_bottleneck_plan import (
    bottleneck_cost,
    bottleneck_plans,
    missing_bottleneck,
    plan_bottleneck,
    worth_it,
)
from sbnet_cupy.core.device import Device
from support.fused_on_host import TURING
from support.stack_bottleneck_cases import unit_of
from support.stack_on_host import AMPERE, BLACKWELL, Blocks

HOPPER = Device(multiprocessors=132, shared_bytes=227 << 10, hopper=True, bulk_copy=True)
STAGES = ((16, 96, 24), (8, 192, 48), (4, 256, 64), (2, 384, 96))  # of SBNet's backbone


def stage(block, channels, width, expected=29, element="Half"):
    """Return a unit at blocks of so many pixels."""
    return unit_of(Blocks(block=(block, block)), element, channels, width, expected)


@pytest.mark.parametrize(
    "device", [AMPERE, BLACKWELL, HOPPER], ids=["ampere", "blackwell", "hopper"]
)
@pytest.mark.parametrize("element", ["Half", "float"])
@pytest.mark.parametrize("sizes", STAGES, ids=str)
def test_plans_fit_the_device(sizes, element, device):
    unit = stage(*sizes, element=element)
    plans = list(bottleneck_plans(unit, device))
    assert bool(plans) == (missing_bottleneck(unit, device) is None)
    for plan in plans:
        config = plan.config
        assert plan.shared_bytes(unit) <= device.shared_bytes
        assert (config.cluster == 1 and config.engine == "MmaSync") or device.hopper
        assert config.pieces == 1 or config.engine == "MmaSync"
        piece = (config.tile[0] // config.pieces, config.tile[1])
        assert not any(b % p for b, p in zip(unit.block, piece, strict=True))


@pytest.mark.parametrize("expected", [29, 72, 143, 286])
@pytest.mark.parametrize("sizes", STAGES, ids=str)
def test_when_one_kernel_is_faster(sizes, expected):
    """As measured on an H200: always, but where stack_unit computes many small blocks."""
    unit = stage(*sizes, expected=expected)
    assert worth_it(unit, HOPPER) == ((sizes[1], expected) != (256, 286))


def test_clusters_for_few_tiles():
    few, many = (plan_bottleneck(stage(*STAGES[2], expected=n), HOPPER) for n in (29, 143))
    assert few.config.cluster > many.config.cluster == 1
    assert few.config.pieces < many.config.pieces
    unit = stage(*STAGES[0], expected=286)
    costs = [bottleneck_cost(p, unit, HOPPER) for p in bottleneck_plans(unit, HOPPER)]
    assert bottleneck_cost(plan_bottleneck(unit, HOPPER), unit, HOPPER) == min(costs)
    assert plan_bottleneck(unit, HOPPER).config.engine == "WarpGroup"


def test_what_has_no_kernel_says_why():
    unit = stage(4, 64, 32)
    assert missing_bottleneck(unit, AMPERE) is None
    assert "BFloat16 on this GPU" in missing_bottleneck(unit._replace(element="BFloat16"), TURING)
    assert "12 channels" in missing_bottleneck(unit._replace(channels=12), HOPPER)
    assert "stacks of" in missing_bottleneck(unit._replace(rows=2**26), HOPPER)
    assert "blocks of (5, 4)" in missing_bottleneck(unit._replace(block=(5, 4)), HOPPER)
    assert "that many weights" in missing_bottleneck(unit._replace(width=512), HOPPER)
