"""The kernel of a residual unit on a GPU, with wgmma."""

import pytest

from support.stack_on_host import Blocks
from support.stack_unit_cases import check, unit_of

pytestmark = pytest.mark.gpu

UNITS = [
    # bottleneck, blocks, channels of x and of y
    (True, Blocks(image=(250, 201), block=(8, 8)), 256, 256),
    (True, Blocks(image=(170, 150), block=(16, 8)), 64, 256),
    (True, Blocks(image=(100, 81)), 256, 64),
    (True, Blocks(image=(27, 18), block=(2, 2)), 128, 192),
    (False, Blocks(image=(250, 201), block=(8, 8)), 64, 64),
    (False, Blocks(image=(100, 81), share=0.2), 64, 64),
    (False, Blocks(image=(50, 41), block=(2, 2), share=1.0, spare=0), 64, 64),
]


@pytest.mark.parametrize("element", ["Half", "BFloat16"])
@pytest.mark.parametrize(("bottleneck", "blocks", "channels", "out"), UNITS, ids=str)
def test_unit_of_whole_numbers_is_exact(bottleneck, blocks, channels, out, element, require):
    require("gpu")
    import cupy

    unit = unit_of(blocks, bottleneck, element, channels, 64, out)
    for settled in (False, True):
        check(unit, blocks, None, settled=settled, clear_rows=settled, xp=cupy)
