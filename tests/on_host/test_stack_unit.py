"""The CUDA kernel of a residual unit on a stack, on the CPU.

By mma.sync and by wgmma.
"""

import pytest

from sbnet_cupy.block_sparse.stack import stack_unit
from sbnet_cupy.block_sparse.stack.stack_unit_plan import UnitPlan, missing_unit
from support.exhaustive import all_but, thinned_product
from support.stack_on_host import BLACKWELL, Blocks, use_shim
from support.stack_unit_cases import check, unit_of


def plan(piece, pieces, x_stages=2, wgmma=False):
    """Return a plan."""
    return UnitPlan(wgmma, piece, pieces, x_stages)


LARGE, SMALL = plan((8, 8), 1), plan((4, 4), 3)
CASES = [
    (True, Blocks(image=(20, 17), block=(8, 8)), LARGE, {}),
    (True, Blocks(image=(40, 33), block=(8, 8)), plan((8, 8), 1, 1), {"out": 64, "inner": 0}),
    (True, Blocks(), SMALL, {"channels": 64, "out": 192}),
    (True, Blocks(image=(17, 11), block=(2, 2)), plan((2, 2), 8), {"activation": 0}),
    (True, Blocks(image=(36, 18), block=(16, 8)), LARGE, {"element": "BFloat16"}),
    (True, Blocks(share=1.0, spare=0), SMALL, {}),
    (True, Blocks(share=0.0), SMALL, {}),
    (False, Blocks(image=(20, 17), block=(8, 8)), LARGE, {"channels": 64, "out": 64}),
    (False, Blocks(), plan((4, 4), 3, 1), {"channels": 64, "out": 64, "activation": 0}),
    (False, Blocks(image=(17, 11), block=(6, 4)), plan((2, 4), 4, 1), {"channels": 64, "out": 64}),
    (True, Blocks(), plan((4, 4), 3, 1, wgmma=True), {"element": "BFloat16", "out": 64}),
    (False, Blocks(), plan((4, 4), 3, wgmma=True), {"channels": 64, "out": 64}),
]
USUAL = [CASES[3], CASES[4], CASES[7], CASES[10]]  # of both units, elements and products
SANITIZED = [CASES[0], CASES[9], CASES[11]]  # with these, of each piece and plan


@pytest.mark.parametrize("case", all_but(CASES, USUAL, SANITIZED), ids=str)
def test_unit_of_whole_numbers_is_exact(case, monkeypatch):
    bottleneck, blocks, plan, sizes = case
    use_shim(monkeypatch, BLACKWELL)
    check(unit_of(blocks, bottleneck, **sizes), blocks, plan)


@pytest.mark.parametrize(
    ("bottleneck", "settled"), thinned_product(4, [False, True], [False, True], sanitized=3)
)
def test_planned_instance_without_a_residual(bottleneck, settled, monkeypatch):
    use_shim(monkeypatch, BLACKWELL, thread_blocks=2)
    monkeypatch.setattr(stack_unit, "current_device", lambda: BLACKWELL)
    blocks = Blocks(image=(30, 28), block=(8, 8), share=0.3)
    unit = unit_of(blocks, bottleneck, channels=64, out=64)
    assert missing_unit(unit, BLACKWELL) is None
    check(unit, blocks, None, False, settled, True)
