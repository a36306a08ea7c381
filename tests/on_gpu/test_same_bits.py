"""Every kernel of a convolution at sites gives the same bits at each run, on a GPU.

Whatever the order in which rows come, and of one kernel whatever the size of its tiles.
"""

from typing import NamedTuple

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy.core import operator
from sbnet_cupy.core.device import current_device
from sbnet_cupy.submanifold import site_conv_grad_launch, site_conv_launch
from sbnet_cupy.submanifold.site_conv_instances import (
    FmaPlan,
    MmaPlan,
    PipelinedPlan,
    SiteConvSizes,
)
from sbnet_cupy.submanifold.site_conv_plan import _SHARED_TILES, _TILINGS, _candidates, alone
from sbnet_cupy.submanifold.site_tiles import TileShape
from support.assertions import assert_same
from support.site_conv_cases import SiteConvCase, run_by_plan, sb_dtype
from support.site_map_cases import draw_sites

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
RUNS = 100
ELEMENTS = {"float16": "Half", "bfloat16": "BFloat16", "float32": "float"}


class Rerun(NamedTuple):
    """A convolution and its gradients, with the kernels that they run on an H100 or H200."""

    sites: int
    dtype: str  # or "tf32"
    channels: int
    channels_out: int
    forward: str  # kernel, engine, and whether rows are sorted by their taps
    backward: str  # kernel of the gradient of the weights
    d: int = 3

    def __str__(self):
        return f"{self.d}-D-{self.sites}-{self.dtype}-{self.channels}-{self.channels_out}"


RERUNS = [
    Rerun(500, "float16", 64, 64, "site_conv_once", "site_weight_grad_pipelined", 2),
    Rerun(7000, "bfloat16", 16, 16, "site_conv_once", "site_weight_grad", 2),
    Rerun(500, "tf32", 32, 32, "site_conv_once", "site_weight_grad", 2),
    Rerun(6000, "float16", 16, 16, "site_conv_once", "site_weight_grad"),
    Rerun(10_000, "float16", 16, 16, "site_conv_tiles NarrowMma", "site_weight_grad"),
    Rerun(14_000, "bfloat16", 16, 32, "site_conv_tiles TileMma", "site_weight_grad"),
    Rerun(14_000, "float16", 32, 32, "site_conv_tiles TileWgmma", "site_weight_grad"),
    Rerun(15_000, "bfloat16", 128, 128, "site_conv_tiles TileWgmma", "site_weight_grad_pipelined"),
    Rerun(15_000, "tf32", 64, 64, "site_conv_tiles TileWgmma", "site_weight_grad"),
    Rerun(14_000, "bfloat16", 128, 128, "site_conv_shared TileWgmma sorted",
          "site_weight_grad_pipelined"),
    Rerun(20_000, "float16", 256, 256, "site_conv_shared TileWgmma sorted",
          "site_weight_grad_pipelined"),
    Rerun(6000, "tf32", 64, 64, "site_conv_shared TileWgmma sorted", "site_weight_grad"),
    Rerun(6000, "float16", 64, 64, "site_conv_tiles SplitWgmma", "site_weight_grad_pipelined"),
    Rerun(6000, "tf32", 32, 32, "site_conv_tiles SplitWgmma", "site_weight_grad"),
    Rerun(50_000, "float16", 128, 128, "site_conv_pipelined TileWgmma sorted",
          "site_weight_grad_pipelined"),
    Rerun(50_000, "bfloat16", 256, 256, "site_conv_pipelined TileWgmma sorted",
          "site_weight_grad_pipelined"),
    Rerun(50_000, "tf32", 128, 128, "site_conv_pipelined TileWgmma sorted", "site_weight_grad"),
    Rerun(6000, "tf32", 96, 96, "site_conv_shared TileWgmma sorted", "site_weight_grad"),
    Rerun(6000, "float16", 20, 20, "site_conv", "site_weight_grad"),
    Rerun(50_000, "bfloat16", 20, 20, "site_conv sorted", "site_weight_grad"),
    Rerun(14_000, "float32", 24, 40, "site_conv_fma", "site_weight_grad_fma"),
    Rerun(6000, "float64", 16, 16, "site_conv_fma", "site_weight_grad_fma"),
]  # fmt: skip


def name_of(plan):
    """Return the kernel of a plan, its engine, and whether its rows are sorted."""
    sorted_rows = "sorted" if getattr(plan, "by_taps", False) else ""
    return " ".join(filter(None, (plan.kernel, getattr(plan, "engine", ""), sorted_rows)))


@pytest.fixture
def planned(monkeypatch):
    """The names of the plans that are made, forwards and of the gradients of weights."""
    found = []
    monkeypatch.setattr(operator, "_PLANS", operator._Plans())
    for module, function in (
        (site_conv_launch, "plan_site_conv"), (site_conv_grad_launch, "plan_weight_grad"),
    ):  # fmt: skip
        plan = getattr(module, function)

        def record(conv, device, plan=plan):
            found.append(plan(conv, device))
            return found[-1]

        monkeypatch.setattr(module, function, record)
    return found


@pytest.mark.parametrize("case", RERUNS, ids=str)
def test_of_all_reruns_and_orders_of_rows(case, cupy, planned):
    """Each run makes its sites and maps anew; every second one has its rows in another order."""
    precision = "tf32" if case.dtype == "tf32" else None
    dtype = sb_dtype("float32" if precision else case.dtype)
    rng, shape = np.random.default_rng(case.sites), {2: (230, 230), 3: (70, 70, 40)}[case.d]
    if case.sites < 5000:
        shape = tuple(size // 5 for size in shape)
    rows = draw_sites(1, case.sites, shape)
    w, bias = (
        cupy.asarray(rng.standard_normal(size).astype(dtype))
        for size in ((*[3] * case.d, case.channels, case.channels_out), case.channels_out)
    )
    features = rng.standard_normal((len(rows), case.channels)).astype(dtype)
    grads = rng.standard_normal((len(rows), case.channels_out)).astype(dtype)
    rows, features, grads = map(cupy.asarray, (rows, features, grads))
    grid = {"spatial_shape": shape, "batch_size": 2}

    def run(order):
        x = sb.sparse_tensor(features[order], rows[order], **grid)
        # In the order of the sites, which is that of every run.
        grad = sb.sparse_tensor(grads[order], rows[order], **grid).features
        y = sb.submanifold_conv(x, w, bias=bias, activation="relu", precision=precision)
        more = {"bias": bias, "activation": "relu", "precision": precision}
        found = sb.submanifold_conv_grad(grad, x, w, **more, y=y)
        return x.indices, y.features, found.features, found.w, found.bias

    first, differ = run(cupy.arange(len(rows))), cupy.zeros(5, np.int64)
    names = {name_of(plan) for plan in planned}
    assert {case.forward, case.backward} <= names
    for number in range(1, RUNS):
        order = rng.permutation(len(rows)) if number % 2 else np.arange(len(rows))
        for place, (one, other) in enumerate(zip(run(cupy.asarray(order)), first, strict=True)):
            differ[place] += (one.view(np.uint8) != other.view(np.uint8)).sum()
    assert not differ.any()
    assert all(bool(array.any()) for array in first)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("kind", [MmaPlan, PipelinedPlan])
def test_of_every_tile_of_gathered_rows(kind, dtype, cupy, monkeypatch):
    """Random numbers; rows as they are and sorted by their taps."""
    wide = dtype == "float32"
    channels = 64 if wide else 128
    case = SiteConvCase(dtype, 1200, channels, 256, (3, 3, 3), whole=False, spare=40,
                        precision="tf32" if wide else None)  # fmt: skip
    sizes = SiteConvSizes(ELEMENTS[dtype], 1240, 1240, 27, channels, 256, 1, 1, wide, 16, 16)
    plans = [p for p in _candidates(sizes, current_device()) if type(p) is kind]
    assert {plan.by_taps for plan in plans} == {False, True}
    assert len({plan.tile for plan in plans}) > 4
    first, *others = (run_by_plan(case, plan, cupy.asarray, monkeypatch) for plan in plans)
    for other in others:
        assert_same(other, first)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_of_every_width_of_shared_tiles(dtype, cupy, monkeypatch):
    """Random numbers: tiles are cut between the same taps, however many channels they have."""
    wide = dtype == "float32"
    case = SiteConvCase(dtype, 1200, 64 if wide else 128, 256, (3, 3, 3), whole=False, spare=40,
                        precision="tf32" if wide else None)  # fmt: skip
    plans = dict.fromkeys(_SHARED_TILES.values())
    first, *others = (run_by_plan(case, plan, cupy.asarray, monkeypatch) for plan in plans)
    assert len(others) == 2
    for other in others:
        assert_same(other, first)


def kinds_of_tilings():
    """Return the tilings that add up a row in the same order: by engine, parts and shares of taps.

    Each with tiles of other rows than any plan has.
    """
    kinds = {}
    for plan, size, _ in _TILINGS:
        shares = plan.warps[0] if plan.engine == "SplitWgmma" else 1
        kinds.setdefault((plan.engine, size, shares), []).extend((plan, alone(plan)))
    for plans in kinds.values():
        rows, most, by_colour = plans[0].order
        plans.append(plans[0]._replace(order=TileShape(rows, most - 64, by_colour)))
        plans[:] = dict.fromkeys(plans)
    return kinds


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("kind", list(kinds_of_tilings()), ids=str)
def test_of_every_tile_of_a_kernel(kind, dtype, cupy, monkeypatch):
    """Random numbers: the sum of a row does not depend on its tile."""
    plans, (_, size, _) = kinds_of_tilings()[kind], kind
    numbers = size // (4 if dtype == "float32" else 2)  # of a part
    case = SiteConvCase(
        dtype, 1200, numbers * (2 if size == 128 else 1), max(plan.columns for plan in plans),
        (3, 3, 3), whole=False, spare=40, precision="tf32" if dtype == "float32" else None,
    )  # fmt: skip
    first, *others = (run_by_plan(case, plan, cupy.asarray, monkeypatch) for plan in plans)
    assert others
    for other in others:
        assert_same(other, first)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_of_every_width_of_multiply_add(dtype, groups, cupy, monkeypatch):
    case = SiteConvCase(dtype, 1200, 24, 36, (3, 3, 3), groups=groups, whole=False, spare=40)
    widths = [width for width in (4, 2, 1) if width * np.dtype(dtype).itemsize <= 16]
    first, *others = (
        run_by_plan(case, FmaPlan(width), cupy.asarray, monkeypatch) for width in widths
    )
    assert others
    for other in others:
        assert_same(other, first)
