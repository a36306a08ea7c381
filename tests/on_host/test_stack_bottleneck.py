"""The CUDA kernel of a pre-activation unit on a stack, on the CPU."""

import pytest

from sbnet_cupy.block_sparse.bottleneck.config import configuration
from sbnet_cupy.block_sparse.stack import stack_bottleneck
from sbnet_cupy.block_sparse.stack.stack_bottleneck_plan import (
    BottleneckPlan,
    missing_bottleneck,
)
from support.exhaustive import all_but, thinned_product
from support.stack_bottleneck_cases import check, unit_of
from support.stack_on_host import AMPERE, BLACKWELL, Blocks, use_shim

TF32, BFLOAT = {"element": "float"}, {"element": "BFloat16"}
SMALL, EVEN = {"channels": 64, "width": 16}, {"channels": 64, "width": 32}
ODD = {"channels": 40, "width": 12}
CASES = [  # blocks, tile, pieces, warps, what the unit has, whether weights come in bulk
    (Blocks(image=(20, 17), block=(8, 8)), (8, 8), 1, 4, {}, True),
    (Blocks(image=(36, 18), block=(16, 8)), (8, 8), 1, 8, BFLOAT | SMALL, False),
    (Blocks(image=(36, 18), block=(16, 8)), (4, 8), 1, 8, {}, True),
    (Blocks(), (4, 4), 1, 8, EVEN, True),
    (Blocks(), (16, 4), 4, 8, {"channels": 72, "width": 32}, False),
    (Blocks(), (8, 4), 2, 4, TF32 | ODD, True),
    (Blocks(image=(17, 11), block=(2, 2)), (8, 2), 4, 6, {"channels": 128, "width": 48}, True),
    (Blocks(image=(17, 11), block=(2, 2)), (16, 2), 8, 6, BFLOAT | {"width": 48}, True),
    (Blocks(image=(17, 11), block=(6, 4)), (8, 4), 4, 4, TF32 | ODD, False),
    (Blocks(share=1.0, spare=0), (4, 4), 1, 8, EVEN, True),
    (Blocks(share=0.0), (8, 4), 2, 4, EVEN, True),
]
USUAL = [CASES[0], CASES[6], CASES[8]]  # of each element but one, each piece but one
SANITIZED = [CASES[1], CASES[2], CASES[3], CASES[10]]


@pytest.mark.parametrize("case", all_but(CASES, USUAL, SANITIZED), ids=str)
def test_unit_of_whole_numbers_is_exact(case, monkeypatch):
    blocks, tile, pieces, warps, sizes, bulk = case
    use_shim(monkeypatch, BLACKWELL)
    unit = unit_of(blocks, **sizes)
    config = configuration(unit.case, tile, warps, 1, 1, False, False, pieces)
    check(unit, blocks, BottleneckPlan(config._replace(bulk_copy=bulk)))


@pytest.mark.parametrize("sizes", [SMALL, BFLOAT | EVEN], ids=str)
def test_products_of_four_warps_are_exact(sizes, monkeypatch):
    use_shim(monkeypatch, BLACKWELL, thread_blocks=3)
    blocks = Blocks(image=(36, 18), block=(16, 8))
    unit = unit_of(blocks, **sizes)
    config = configuration(unit.case, (8, 8), 4, 1, 1, True, False, 1)
    assert config.engine == "WarpGroup"
    check(unit, blocks, BottleneckPlan(config._replace(bulk_copy=True)))


CLUSTERS = [  # blocks, tile, pieces, warps, cluster, what the unit has, whether by wgmma
    (Blocks(image=(20, 17), block=(8, 8)), (8, 8), 1, 4, 2, EVEN, False),
    (Blocks(), (8, 4), 2, 6, 3, TF32 | {"channels": 48, "width": 12}, False),
    (Blocks(image=(36, 18), block=(16, 8)), (8, 8), 1, 4, 4, BFLOAT | {"channels": 128}, True),
    (Blocks(share=0.0), (4, 4), 1, 4, 4, {"width": 48}, False),
]


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize("case", all_but(CLUSTERS, CLUSTERS[:1], CLUSTERS[1:2]), ids=str)
def test_unit_that_a_cluster_shares_is_exact(case, order, monkeypatch):
    monkeypatch.setenv("SBNET_HOST_ORDER", order)
    blocks, tile, pieces, warps, cluster, sizes, wide = case
    use_shim(monkeypatch, BLACKWELL, thread_blocks=2 * cluster)
    unit = unit_of(blocks, **sizes)
    config = configuration(unit.case, tile, warps, cluster, 1, wide, True, pieces)
    assert config.cluster == cluster
    check(unit, blocks, BottleneckPlan(config._replace(bulk_copy=wide)))


@pytest.mark.parametrize(
    ("device", "settled"),
    thinned_product(4, [AMPERE, BLACKWELL], [False, True], sanitized=3),
    ids=str,
)
def test_planned_instance(device, settled, monkeypatch):
    use_shim(monkeypatch, device, thread_blocks=2)
    monkeypatch.setattr(stack_bottleneck, "current_device", lambda: device)
    blocks = Blocks(image=(30, 28), block=(4, 4), share=0.3)
    unit = unit_of(blocks, channels=64, width=16)
    assert missing_bottleneck(unit, device) is None
    check(unit, blocks, None, settled, True)
