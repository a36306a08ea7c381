"""Which instance of the residual unit's kernel runs, and for what there is none."""

import pytest

from sbnet_cupy.block_sparse.stack.stack_unit_plan import (
    missing_unit,
    plan_unit,
    unit_plans,
    worth_it,
)
from sbnet_cupy.core.device import Device
from support.stack_on_host import AMPERE, BLACKWELL, Blocks
from support.stack_unit_cases import unit_of

HOPPER = Device(multiprocessors=132, shared_bytes=227 << 10, hopper=True, bulk_copy=True)


@pytest.mark.parametrize("device", [BLACKWELL, HOPPER], ids=["blackwell", "hopper"])
@pytest.mark.parametrize("block", [(8, 8), (4, 4), (2, 2), (16, 8)], ids=str)
@pytest.mark.parametrize("bottleneck", [False, True])
def test_plans_fit_the_device(bottleneck, block, device):
    for channels in (64, 256):
        sizes = {"channels": channels, "out": 256} if bottleneck else {"channels": 64, "out": 64}
        unit = unit_of(Blocks(block=block), bottleneck, **sizes)
        plans = list(unit_plans(unit, device))
        assert (plan_unit(unit, device) in plans) == (missing_unit(unit, device) is None)
        assert plans
        for one in plans:
            assert one.shared_bytes(unit) <= device.shared_bytes


def test_one_kernel_for_few_blocks():
    """One tile for each multiprocessor."""
    few = unit_of(Blocks(block=(8, 8)), channels=256, out=256)._replace(expected=110)
    assert worth_it(few, HOPPER)
    assert not worth_it(few._replace(expected=1100), HOPPER)


def test_what_has_no_kernel_says_why():
    unit = unit_of(Blocks(block=(8, 8)))
    assert missing_unit(unit, HOPPER) is None
    assert "on this GPU" in missing_unit(unit, AMPERE)
    assert "on this GPU" in missing_unit(unit._replace(element="float"), HOPPER)
    assert "multiples of 64" in missing_unit(unit._replace(channels=96), HOPPER)
    assert "layers of 96" in missing_unit(unit._replace(width=96), HOPPER)
    assert "layers of 64 and 128" in missing_unit(unit._replace(bottleneck=False), HOPPER)
    assert "stacks of" in missing_unit(unit._replace(rows=2**24), HOPPER)
    assert "blocks of (7, 8)" in missing_unit(unit._replace(block=(7, 8)), HOPPER)
    assert "that many weights" in missing_unit(unit._replace(channels=1024), HOPPER)
