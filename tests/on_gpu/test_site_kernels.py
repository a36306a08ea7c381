"""The kernels of operations at sites on a GPU give what the array operations give."""

import contextlib
import importlib

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy.core import device, launch, operator
from sbnet_cupy.core.device import current_device
from sbnet_cupy.core.graph_memory import memory_of_graphs
from sbnet_cupy.submanifold import map_kernels, site_conv_launch
from sbnet_cupy.submanifold.site_conv_instances import MmaPlan, PipelinedPlan, TilesPlan
from sbnet_cupy.submanifold.site_conv_plan import _SHARED_TILES, _SORTED, _candidates
from support.assertions import assert_same, to_numpy
from support.row_lists import assert_sorted, unsorted
from support.site_conv_cases import CASES, SiteConvCase, assert_result
from support.site_map_cases import (
    LISTS,
    MAPS,
    assert_same_map,
    assert_same_sites,
    draw_sites,
    make_maps,
)
from support.site_on_host import MODULES

pytestmark = pytest.mark.gpu


@contextlib.contextmanager
def by_kernels(chosen):
    """Have kernels compute within, or array operations."""
    with pytest.MonkeyPatch.context() as patch:
        for name in MODULES:
            module = importlib.import_module(f"sbnet_cupy.submanifold.{name}")
            patch.setattr(module, "by_kernels", lambda array: chosen)
        patch.setattr(operator, "_PLANS", operator._Plans())
        yield


@pytest.mark.parametrize("case", MAPS, ids=str)
def test_kernel_maps(case, cupy, monkeypatch):
    """Also by the kernel for many rows."""
    results = []
    for chosen, many in ((False, 0), (True, 0), (True, 1 << 16)):
        monkeypatch.setattr(map_kernels, "_MANY_ROWS", many)
        monkeypatch.setattr(map_kernels, "_MANY_PLACES", 0)
        map_kernels._finder.cache_clear()
        with by_kernels(chosen):
            results.append(make_maps(case, cupy.asarray))
    map_kernels._finder.cache_clear()
    for found in results[1:]:
        for one, other in zip(found, results[0], strict=True):
            assert_same_map(one, other)


@pytest.mark.parametrize("capacity", [None, 1000, 20], ids=str)
@pytest.mark.parametrize("name", LISTS)
def test_distinct_sites(name, capacity, cupy):
    rows, shape, batch = LISTS[name]
    options = {"spatial_shape": shape, "batch_size": batch, "capacity": capacity}
    results = []
    for chosen in (False, True):
        with by_kernels(chosen):
            results.append(sb.coordinate_map(cupy.asarray(rows), **options))
    (expected, numbers), (found, own) = results
    assert_same_sites(found, expected)
    assert (numbers == own).all()


MORE = [
    SiteConvCase(dtype, 2000, c, k, (3, 3, 3), whole=whole, precision=precision, spare=100)
    for dtype, precision in (("float16", None), ("bfloat16", None), ("float32", "tf32"))
    for c, k, whole in ((16, 16, True), (32, 64, True), (64, 64, True), (96, 128, True))
] + [
    SiteConvCase("float16", 2000, 64, 64, (3, 3, 3), activation="gelu", whole=False),
    SiteConvCase("bfloat16", 2000, 128, 128, (3, 3), activation=None, whole=False),
    SiteConvCase("float32", 2000, 64, 96, (3, 3, 3), activation="silu", whole=False),
]


@pytest.mark.parametrize("case", CASES + MORE, ids=str)
def test_convolutions(case, cupy):
    with by_kernels(True):
        first, again = (case.run(cupy.asarray) for _ in range(2))
    assert_result(case, first)
    assert_same(again, first)


@pytest.mark.parametrize("by_taps", [False, True])
@pytest.mark.parametrize("kind", [MmaPlan, PipelinedPlan])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_plan(dtype, kind, by_taps, cupy, monkeypatch):
    """Each tile, with rows as they are or sorted: the sums of whole numbers."""
    precision = "tf32" if dtype == "float32" else None
    case = SiteConvCase(dtype, 2000, 64, 256, (3, 3, 3), precision=precision, spare=300)
    tried = []

    def plan(conv, device):
        plans = [p for p in _candidates(conv, device) if (type(p), p.by_taps) == (kind, by_taps)]
        tried.append(plans[len(tried)] if len(tried) < len(plans) else None)
        return tried[-1] or plans[0]

    monkeypatch.setattr(site_conv_launch, "plan_site_conv", plan)
    if kind is PipelinedPlan and not current_device().hopper:
        pytest.skip("needs wgmma")
    found = []
    while None not in tried:
        with by_kernels(True):
            found.append(case.run(cupy.asarray))
    assert len(found) > 3
    for result in found:
        assert_result(case, result)


@pytest.fixture
def lower_multiprocessors(cupy, monkeypatch):
    """Return a function after which launches are planned for so few multiprocessors."""

    def lower(number):
        described, attribute = device._device, device._attribute
        monkeypatch.setattr(
            device, "_device", lambda its: described(its)._replace(multiprocessors=number)
        )
        monkeypatch.setattr(
            device, "_attribute",
            lambda its, name: number if name == "MultiProcessorCount" else attribute(its, name),
        )  # fmt: skip
        monkeypatch.setattr(launch, "_PARAMETERS", {})  # they know how many thread blocks there are

    return lower


PLANS = [(number, given.plan) for number in _SORTED for given in _SORTED[number]]
PLANS += [(number, plan) for number in _SORTED for plan in dict.fromkeys(_SHARED_TILES.values())]


@pytest.mark.parametrize("few", [False, True], ids=["all", "16 multiprocessors"])
@pytest.mark.parametrize(
    "number, given", PLANS, ids=lambda given: str(given if isinstance(given, int) else given[:5])
)
def test_tiles_are_shared_out(number, given, few, cupy, monkeypatch, lower_multiprocessors):
    """Several tiles for each thread block, or parts of them, with few and with many taps.

    The sums are those of others.

    On few multiprocessors it takes fewer rows, which compute-sanitizer comes through.
    """
    if not current_device().hopper:
        pytest.skip("needs wgmma")
    if few:
        lower_multiprocessors(16)
    side, scattered = (12, 4_200) if few else (25, 33_000)
    channels, dtype = given.tile[1], {2: np.float16, 4: np.float32}[number]
    precision = "tf32" if number == 4 else None
    dense = np.argwhere(np.ones((1, side, side, side)))
    far = dense + np.array([0, 90, 90, 90])
    sites = np.concatenate([far, draw_sites(5, scattered, (40 if few else 80,) * 3, 1)])
    rng = np.random.default_rng(5)
    x = rng.integers(-3, 4, (len(sites), channels)).astype(dtype)
    w = cupy.asarray(rng.integers(-2, 3, (3, 3, 3, channels, channels)).astype(dtype))
    results = []
    for plan in (MmaPlan((64, 64), (2, 2), 3), given):
        monkeypatch.setattr(site_conv_launch, "plan_site_conv", lambda conv, device, p=plan: p)
        with by_kernels(True):
            found = sb.sparse_tensor(cupy.asarray(x), cupy.asarray(sites), spatial_shape=(128,) * 3)
            results += [
                sb.submanifold_conv(found, w, precision=precision).features for _ in range(2)
            ]
    assert float(abs(results[0]).max()) < 2048  # whole numbers, without rounding
    for result in results[1:]:
        assert_same(result, results[0])


@pytest.mark.parametrize(("dtype", "channels", "channels_out"), [
    ("float16", 4, 64), ("bfloat16", 8, 96), ("float16", 16, 128), ("float16", 32, 256),
    ("float32", 4, 128), ("float32", 16, 96),
    ("float16", 3, 16), ("bfloat16", 5, 32), ("float16", 15, 64), ("float16", 6, 24),
    ("float16", 12, 64), ("float32", 3, 16), ("float32", 5, 64), ("float32", 7, 96),
])  # fmt: skip
@pytest.mark.parametrize("sites", [70, 450])
def test_narrow_rows(sites, dtype, channels, channels_out, cupy, monkeypatch):
    """By tiles, maybe side by side, and in pieces; with the bits of the other kernel."""
    if not current_device().hopper:
        pytest.skip("needs compute capability 9.0")
    precision = "tf32" if dtype == "float32" else None
    case = SiteConvCase(dtype, sites, channels, channels_out, (3, 3, 3), precision=precision,
                        spare=30)  # fmt: skip
    found, plan_site_conv = [], site_conv_launch.plan_site_conv

    def plan_tiles(conv, device):
        conv = conv._replace(sources=9000, targets=9000)  # of few sites others are faster
        plan = plan_site_conv(conv, device)
        assert isinstance(plan, TilesPlan)
        assert plan.tiles(conv)[1] > 1 or conv.channels_out <= 64
        return plan

    for plan in (plan_tiles, lambda conv, device: MmaPlan((64, 64), (2, 2), 3)):
        monkeypatch.setattr(site_conv_launch, "plan_site_conv", plan)
        with by_kernels(True):
            found.append(case.run(cupy.asarray))
    assert_result(case, found[0])
    assert_same(found[0], found[1])


@pytest.mark.parametrize(("rows", "sites", "of_one"), [
    (20_000, 14_000, 0), (300_000, 90_000, 2000), (70_000, 30_000, 20_000), (40_000, 3, 0),
    (5, 9000, 0),
])  # fmt: skip
def test_rows_of_each_site_in_their_order(rows, sites, of_one, cupy):
    """In whatever order threads list them."""
    rng = np.random.default_rng(rows)
    inverse = rng.integers(-1, sites, rows)
    inverse[rng.permutation(rows)[:of_one]] = sites // 2
    for _ in range(3):
        assert_sorted(unsorted(inverse, sites, cupy).sorted(), inverse, sites)


@pytest.mark.parametrize("packed", [False, True], ids=["arrays", "packed"])
@pytest.mark.parametrize("channels", [(16, 32), (256, 128)], ids=str)
def test_a_network_replays_on_other_points(channels, packed, cupy):
    """Maps, strides and their inverse in one graph, without a read of the device.

    Wide features are sorted and their tiles cut in the graph, just ahead of what reads the cuts.
    """
    shape, n, capacity = (40, 40, 20), 900, 1000
    rng, (before, after) = np.random.default_rng(0), channels
    w1, w2, w3 = (
        cupy.asarray(rng.standard_normal(size).astype(np.float16) / 8)
        for size in ((3, 3, 3, before, after), (2, 2, 2, after, 32), (2, 2, 2, 32, 16))
    )
    if packed:
        w1 = sb.PackedWeights(w1)
    rows, features = cupy.empty((n, 4), np.int32), cupy.empty((n, before), np.float16)

    def network():
        x = sb.sparse_tensor(features, rows, spatial_shape=shape, batch_size=2, capacity=capacity)
        y = sb.submanifold_conv(x, w1, activation="relu")
        z = sb.strided_conv(y, w2, stride=2, capacity=capacity)
        back = sb.inverse_conv(z, w3, onto=y)
        return back.features, x.coordinates.indices, x.coordinates.count

    def fill(seed):
        source = np.random.default_rng(seed)
        rows.set(draw_sites(seed, n, shape))
        features.set(source.standard_normal(features.shape).astype(np.float16))
        cupy.cuda.runtime.deviceSynchronize()

    stream = cupy.cuda.Stream(non_blocking=True)
    fill(0)
    with by_kernels(True), stream:
        network()  # compile
        stream.begin_capture()
        with memory_of_graphs(rows):
            captured = network()
        graph = stream.end_capture()
        for seed in (1, 2, 3):
            fill(seed)
            graph.launch(stream)
            stream.synchronize()
            found = [array.copy() for array in captured]
            for one, other in zip(found, network(), strict=True):
                assert_same(one, other)


@pytest.mark.parametrize("mode", ["mean", "first"])
def test_points_become_sites_in_a_graph(cupy, mode):
    """What a call allocates on the way stays the graph's, whatever is allocated after it."""
    points, sample = cupy.empty((700, 4), np.float32), cupy.zeros(700, np.int32)
    options = {
        "ranges": [(0.0, 8.0), (0.0, 8.0), (-1.0, 1.0)], "voxel_size": 0.5, "batch_size": 2,
        "sample": sample, "mode": mode, "capacity": 600,
    }  # fmt: skip

    def fill(seed):
        source = np.random.default_rng(seed)
        points.set(source.uniform(-2, 9, points.shape).astype(np.float32))
        sample.set(source.integers(0, 2, sample.shape).astype(np.int32))
        cupy.cuda.runtime.deviceSynchronize()

    stream = cupy.cuda.Stream(non_blocking=True)
    fill(0)
    with by_kernels(True), stream:
        sb.voxelize(points, **options)  # compile
        stream.begin_capture()
        x, inverse = sb.voxelize(points, **options)
        graph = stream.end_capture()
        others = [cupy.full(size, 7, np.int32) for size in (250, 700, 1400, 2800, 5600) * 8]
        for seed in (1, 2):
            fill(seed)
            graph.launch(stream)
            stream.synchronize()
            found = [a.copy() for a in (x.features, x.indices, x.coordinates.count, inverse)]
            y, into = sb.voxelize(points, **options)
            expected = (y.features, y.indices, y.coordinates.count, into)
            for one, other in zip(found, expected, strict=True):
                assert_same(one, other)
            assert all(bool((other == 7).all()) for other in others)


def test_what_a_graph_finds_of_sites_is_not_given_out_again(cupy):
    """A call outside finds the maps again and keeps its own; those of the graph stay its memory."""
    rows = cupy.asarray(draw_sites(0, 900, (40, 40, 20)))
    features = cupy.asarray(np.random.default_rng(0).standard_normal((900, 16)), np.float32)
    w, down = (cupy.full((size, size, size, 16, 16), 1 / 16, np.float32) for size in (3, 2))

    def sites():
        return sb.sparse_tensor(features, rows, spatial_shape=(40, 40, 20), capacity=1000)

    def network(x):
        y = sb.submanifold_conv(x, w)
        z = sb.strided_conv(y, down, stride=2, capacity=1000)
        return y, z, sb.inverse_conv(z, down, onto=y)  # which a caller keeps

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with by_kernels(True), stream:
        expected, x = network(sites())[-1].features, sites()
        stream.begin_capture()
        captured = network(x)
        graph = stream.end_capture()
        assert_same(network(x)[-1].features, expected)
        others = [cupy.full(size, 7, np.int32) for size in (250, 1000, 8000, 27000) * 8]
        for _ in range(3):
            captured[-1].features.fill(0)
            graph.launch(stream)
            stream.synchronize()
            assert_same(captured[-1].features, expected)
            assert all(bool((other == 7).all()) for other in others)


MANY, CHANNELS, PERIOD = 2**21 + 1000, 1024, 4099  # more numbers than 31 bits count


def many_rows(xp):
    """Return many rows of -1, 0 and 1, which repeat, and those that they repeat.

    The period is prime, so that an offset that lost its high bits is that of another row.
    """
    period = np.random.default_rng(0).integers(-1, 2, (PERIOD, CHANNELS)).astype(np.float16)
    features, block = xp.empty((MANY, CHANNELS), np.float16), xp.asarray(period)
    for start in range(0, MANY, PERIOD):
        features[start : start + PERIOD] = block[: MANY - start]
    return features, period


def on_a_line(xp, places):
    """Return rows ``(0, place)``."""
    return xp.stack([xp.zeros_like(places), places], axis=1)


def rows_to_compare(number):
    """Return rows at both ends, and where numbers and bytes are no longer counted by 31 bits."""
    begins = (0, 2**20 - 32, 2**21 - 32, number - 64)
    return np.concatenate([np.arange(begin, begin + 64) for begin in begins])


def test_convolution_of_many_rows(cupy):
    """Sums are whole numbers that float16 holds: they are exact."""
    features, period = many_rows(cupy)
    w = np.random.default_rng(1).integers(-1, 2, (3, CHANNELS, CHANNELS)).astype(np.float16)
    places = on_a_line(cupy, cupy.arange(MANY, dtype=np.int32))
    sites, _ = sb.coordinate_map(places, spatial_shape=MANY)
    y = sb.submanifold_conv(sb.SparseTensor(features, sites), cupy.asarray(w)).features
    rows = rows_to_compare(MANY)
    read = rows[:, None] + np.arange(-1, 2)
    there = (read >= 0) & (read < MANY)
    values = np.where(there[..., None], period[read % PERIOD], 0).astype(np.float32)
    expected = np.tensordot(values, w.astype(np.float32), 2)
    assert_same(to_numpy(y[cupy.asarray(rows)]), expected.astype(np.float16))


def test_sums_of_many_rows(cupy):
    """Each site has one row but for the first eight, which have one of the last rows, too."""
    features, period = many_rows(cupy)
    sites, places = MANY - 8, cupy.arange(MANY, dtype=np.int32)
    rows = on_a_line(cupy, places % np.int32(sites))
    y = sb.sparse_tensor(features, rows, spatial_shape=sites, mode="sum").features
    rows = rows_to_compare(sites)
    again = np.where(rows[:, None] < 8, period[(rows + sites) % PERIOD], 0)
    assert_same(to_numpy(y[cupy.asarray(rows)]), period[rows % PERIOD] + again.astype(np.float16))
