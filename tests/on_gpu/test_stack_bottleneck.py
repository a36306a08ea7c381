"""The kernel of a pre-activation unit on a stack, on a GPU: with wgmma, and with clusters."""

import pytest

from sbnet_cupy.block_sparse.stack.stack_bottleneck_plan import bottleneck_plans
from sbnet_cupy.core.device import current_device
from support.exhaustive import thinned
from support.stack_bottleneck_cases import check, unit_of
from support.stack_on_host import Blocks

pytestmark = pytest.mark.gpu

UNITS = [  # blocks, channels of x and between the layers
    (Blocks(image=(100, 81), block=(16, 16)), 96, 24),
    (Blocks(image=(60, 71), block=(8, 8)), 192, 48),
    (Blocks(image=(50, 41)), 256, 64),
    (Blocks(image=(27, 18), block=(2, 2)), 384, 96),
    (Blocks(image=(27, 18), block=(2, 2), share=1.0, spare=0), 72, 20),
    (Blocks(image=(36, 30), block=(6, 4), share=0.0), 64, 32),
]


@pytest.mark.parametrize("element", ["Half", "BFloat16", "float"])
@pytest.mark.parametrize(("blocks", "channels", "width"), UNITS, ids=str)
def test_unit_of_whole_numbers_is_exact(blocks, channels, width, element, require):
    require("gpu")
    import cupy

    unit = unit_of(blocks, element, channels, width)
    for settled in (False, True):
        check(unit, blocks, None, settled=settled, clear_rows=settled, xp=cupy)


@pytest.mark.parametrize("unit", thinned(range(len(UNITS)), 5, first=3), ids=str)
def test_every_plan_is_exact(unit, require):
    require("gpu")
    import cupy

    blocks, channels, width = UNITS[unit]
    unit = unit_of(blocks, "Half", channels, width)
    for plan in bottleneck_plans(unit, current_device()):
        check(unit, blocks, plan, settled=True, clear_rows=True, xp=cupy)
