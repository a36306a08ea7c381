"""The benchmark of features at sites: its scenes, its rows, and that it refuses a wrong result."""


import numpy as np
import pytest

from support.bench_parts import check_rows, part

pytestmark = pytest.mark.usefixtures("benchmarks")


@pytest.mark.parametrize("make", ["surface", "scan", "blobs", "file", "file, from above"])
def test_scenes_are_distinct_sites_inside_their_grid(make, tmp_path):
    scenes = part("submanifold.scenes")
    if make.startswith("file"):
        points = np.random.default_rng(0).normal(0, 3, (500, 4)).astype(np.float32)
        points.tofile(tmp_path / "scan.bin")
        scene = scenes.from_file(tmp_path / "scan.bin")[make == "file, from above"]
        assert len(scene.spatial_shape) == (2 if "above" in make else 3)
    else:
        scene = scenes.blobs((40, 60), 0.1) if make == "blobs" else getattr(scenes, make)(1000)
    rows, shape = scene.rows, scene.spatial_shape
    assert rows.dtype == np.int32 and rows.shape[1] == 1 + len(shape)
    assert len(np.unique(rows, axis=0)) == len(rows) > 200 and not rows[:, 0].any()
    assert (rows[:, 1:] >= 0).all() and (rows[:, 1:] < shape).all()


def test_ratios_on_a_cpu(tmp_path):
    bench, rows = part("submanifold.bench_submanifold_conv"), part("harness.rows")
    assert bench.main(["--cpu", "--quick", "--channels", "8", "--out", str(tmp_path)]) == 0
    found = rows.read(tmp_path / "submanifold_conv.csv", rows.Ratio)
    assert len({row.suite for row in found}) == len(found) == 3
    assert all(0 < row.ratio <= row.ratio_p90 for row in found)


def test_the_flow_on_a_gpu(fake_gpu, tmp_path, monkeypatch):
    bench, rows = part("submanifold.bench_submanifold_conv"), part("harness.rows")
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    assert bench.main(["--quick", "--channels", "4", "8", "--out", str(tmp_path)]) == 0
    found = rows.read(tmp_path / "submanifold_conv.csv")
    check_rows(found, {rows.OURS, "torch, pair lists"})
    variants = {row.variant.partition(", ")[2] for row in found if row.ours}
    packed = "forward, weights packed"
    hosts = {"host", "host, weights packed", "host, weights packed, tensors"}
    maps = {"coordinate_map", "maps", "map, first forward"}
    assert variants == {"forward", packed, "backward"} | maps | hosts
    assert sum(row.variant.endswith(", maps") for row in found) == 3
    assert {row.timed_by for row in found} == {"graph", "events", "host"}


@pytest.mark.parametrize("wrong", [1, 0.01])
def test_a_wrong_convolution_is_refused(wrong, monkeypatch):
    bench, scenes = part("submanifold.bench_submanifold_conv"), part("submanifold.scenes")
    case = bench.Case(np, scenes.blobs((20, 30), 0.2), 4, np.float32)
    case.check()
    right = case.convolve()
    right[3, 1] += wrong
    monkeypatch.setattr(case, "convolve", lambda: right)
    with pytest.raises(AssertionError, match="beyond rounding"):
        case.check()


@pytest.mark.parametrize("wrong", [0, 0.5, np.nan])
def test_a_wrong_peer_is_refused(wrong, monkeypatch):
    """It has the rows in the order of the scene, and its results are compared in that order."""
    torch = pytest.importorskip("torch")
    bench, scenes = part("submanifold.bench_submanifold_conv"), part("submanifold.scenes")
    timing = part("harness.timing").spread([1.0], "kernels")
    scene = scenes.surface(300)
    assert scene.rows.flags.c_contiguous
    case = bench.Case(np, scene, 4, np.float32)
    case.check()
    rows, shape = scene.rows, scene.spatial_shape
    dense = torch.zeros(1, 4, *shape, dtype=torch.float64)
    at = (0, slice(None), *rows[:, 1:].T)
    dense[at] = torch.from_numpy(case.features_of_rows().T).double()
    w = torch.from_numpy(case.w).double().movedim((-1, -2), (0, 1))
    y = torch.nn.functional.conv3d(dense, w, padding=1)[at].T
    y[7] += wrong
    monkeypatch.setattr(bench, "spconv_of", lambda *_, **__: [("A", lambda: y, None)])
    monkeypatch.setattr(bench, "kernel_time", lambda *_: timing)
    monkeypatch.setattr(bench, "_row", lambda *row: row)
    found = bench._rows_of_spconv({}, case, bench.SPCONV, torch, True)
    if wrong:
        with pytest.raises(AssertionError, match="error"):
            next(found)
    else:
        assert float(next(found)[-1].split()[-1]) < 1e-6


def test_rows_of_pictures_follow_each_other():
    assert part("submanifold.scenes").blobs((20, 30), 0.2).rows.flags.c_contiguous


@pytest.mark.parametrize("name", ["coordinate_map", "site_networks", "site_pool"])
def test_ratios_of_maps_and_networks_on_a_cpu(name, tmp_path):
    bench, rows = part(f"submanifold.bench_{name}"), part("harness.rows")
    arguments = ["--cpu", "--quick", "--threads", "1", "--out", str(tmp_path)]
    assert bench.main(arguments + ["--networks", "unet"] * (name == "site_networks")) == 0
    found = rows.read(tmp_path / f"{name}.csv", rows.Ratio)
    assert all(0 < row.ratio <= row.ratio_p90 for row in found)
    variants = {row.variant for row in found}
    if name == "coordinate_map":
        assert variants == set(bench.OPS) and len(found) == 3 * len(variants)
    elif name == "site_pool":
        each = 2 * len(bench.OPS) + len(bench.GLOBAL)  # two windows, and whole samples
        assert variants == set(bench.OPS) and len(found) == 3 * 2 * each
    else:
        assert len(variants) == 2 and len(found) == 2 * 2 * len(variants)
        assert {row.implementation for row in found} == {bench.PAIRS, bench.DENSE}


def test_the_flow_of_maps_on_a_gpu(fake_gpu, tmp_path, monkeypatch):
    bench, rows = part("submanifold.bench_coordinate_map"), part("harness.rows")
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    assert bench.main(["--quick", "--out", str(tmp_path)]) == 0
    found = rows.read(tmp_path / "coordinate_map.csv")
    check_rows(found, {rows.OURS, bench.TORCH})
    assert {row.timed_by for row in found} == {"graph", "events", "host"}
    assert {row.variant for row in found if row.ours} == set(bench.OPS)


def test_the_flow_of_pooling_on_a_gpu(fake_gpu, tmp_path, monkeypatch):
    bench, rows = part("submanifold.bench_site_pool"), part("harness.rows")
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "CHANNELS", (3,))
    assert bench.main(["--quick", "--out", str(tmp_path)]) == 0
    found = rows.read(tmp_path / "site_pool.csv")
    check_rows(found, {rows.OURS, bench.TORCH, bench.TORCH_ROWS})
    timed = {(v, w) for v in bench.OPS for w in "23"} | {(v, bench.WHOLE) for v in bench.GLOBAL}
    assert {(row.variant, row.block) for row in found} == timed


def test_pooling_that_differs_is_refused(monkeypatch, torch):
    bench, scenes = part("submanifold.bench_site_pool"), part("submanifold.scenes")
    case = bench.Case(np, scenes.blobs((20, 30), 0.2), 3, "2", np.float32)
    plain = bench.Plain(torch, case, "cpu")
    bench.check(case, plain)
    monkeypatch.setattr(case, "average", case.max)
    with pytest.raises(AssertionError, match="average of 2: PyTorch finds something else"):
        bench.check(case, plain)


def test_the_flow_of_networks_on_a_gpu(fake_gpu, tmp_path, monkeypatch):
    bench, rows = part("submanifold.bench_site_networks"), part("harness.rows")
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    arguments = ["--quick", "--networks", "second", "--out", str(tmp_path)]
    assert bench.main(arguments) == 0
    found = rows.read(tmp_path / "site_networks.csv")
    check_rows(found, {rows.OURS, bench.PAIRS, bench.DENSE})
    assert {row.timed_by for row in found} == {"graph", "events", "host", "wall"}
    ours = {row.variant.partition(", ")[2] for row in found if row.ours}
    steps = {"forward", "forward and backward"}
    kinds = "host", "other points", f"{bench.GRAPHED}, other points"
    assert ours == steps | {f"{step}, {kind}" for step in steps for kind in kinds}


def test_tables_of_other_libraries_have_as_many_pairs(torch):
    bench, scenes = part("submanifold.bench_coordinate_map"), part("submanifold.scenes")
    case = bench.Case(np, scenes.blobs((20, 30), 0.2), waits=True)
    for variant in ("same", "strided"):
        table = torch.from_numpy(getattr(case, variant)().rows)
        bench.check_pairs(case, variant, table)
        table[0] = -1
        with pytest.raises(AssertionError, match="pairs of rows"):
            bench.check_pairs(case, variant, table)


@pytest.mark.parametrize("wrong", [False, True])
def test_networks_of_other_libraries_are_compared(wrong, torch):
    """They have distinct sites and other features, in any order."""
    bench, networks = part("submanifold.bench_site_networks"), part("submanifold.networks")
    scene = part("submanifold.scenes").surface(200)
    case = bench.Case(torch, "second", scene, "cpu", torch.float32)

    class Other(networks.Plain):
        def end(self, x):
            rows, features = super().end(x)
            return rows.flip(0).int(), features.flip(0) * (1.1 if wrong else 1.001)

    shape = case.networks["sbnet_cupy"].shape
    case.networks["spconv"] = Other(torch, "second", case.weights, shape)
    with torch.no_grad():
        if wrong:
            with pytest.raises(AssertionError, match="spconv: relative error"):
                case.check()
        else:
            case.check()


def test_wrong_maps_are_refused(monkeypatch, torch):
    bench, scenes = part("submanifold.bench_coordinate_map"), part("submanifold.scenes")
    case = bench.Case(np, scenes.blobs((20, 30), 0.2), waits=True)
    bench.check(case, bench.Plain(torch, case, "cpu"))
    made = case.strided()
    made.rows[:] = made.rows[::-1].copy()
    monkeypatch.setattr(case, "strided", lambda: made)
    with pytest.raises(AssertionError, match="something else for strided"):
        bench.check(case, bench.Plain(torch, case, "cpu"))


def test_a_wrong_network_is_refused(torch):
    bench, scenes = part("submanifold.bench_site_networks"), part("submanifold.scenes")
    scene = scenes.blobs((20, 30), 0.2)
    case = bench.Case(torch, "unet", scene, "cpu", torch.float32)
    with torch.no_grad():
        case.check()
        w, b = case.networks[bench.OURS].weights[5]
        case.networks[bench.OURS].weights = list(case.weights)
        case.networks[bench.OURS].weights[5] = (w * 1.01, b)
        with pytest.raises(AssertionError, match="sbnet_cupy: relative error"):
            case.check()


@pytest.mark.parametrize("layout", ["clustered", "scattered"])
def test_blocks_and_sites_of_one_mask(layout, monkeypatch):
    bench = part("submanifold.bench_blocks_or_sites")
    mask = bench.mask_of(64, 0.3, layout)
    blocks = mask.reshape(4, 16, 4, 16).sum(axis=(1, 3))
    assert sorted(blocks.ravel())[-3:] == [0, 77, 77] and blocks.sum() == 154
    case = bench.Case(np, 64, 8, 0.3, layout)
    case.check()
    assert (case.blocks, case.number) == (2, 154)
    right = case.at_sites()
    right[3, 1] += np.float16(0.1)
    monkeypatch.setattr(case, "at_sites", lambda: right)
    with pytest.raises(AssertionError, match="beyond rounding"):
        case.check()


def test_the_flow_of_blocks_and_sites_on_a_gpu(fake_gpu, tmp_path, monkeypatch):
    bench, rows = part("submanifold.bench_blocks_or_sites"), part("harness.rows")
    for name, values in {"SIZES": (64,), "CHANNELS": (8,), "OCCUPANCIES": (0.1, 1.0)}.items():
        monkeypatch.setattr(bench, name, values)
    assert bench.main(["--quick", "--out", str(tmp_path)]) == 0
    found = rows.read(tmp_path / bench.FILE)
    check_rows(found, {rows.OURS})
    assert {row.variant for row in found} == {"stack_conv2d", "submanifold_conv"}
    assert len(found) == 2 * 2 * 2


def test_a_unet_of_sparse_conv_net_s_layers(tmp_path):
    bench, rows = part("submanifold.bench_scn_unet"), part("harness.rows")
    assert bench.main(["--cpu", "--quick", "--out", str(tmp_path)]) == 0
    found = rows.read(tmp_path / "scn_unet.csv")
    check_rows(found, {rows.OURS})
    variants = ["forward"] * 2 + ["training step"] * 2
    assert [row.variant.partition(",")[0] for row in found] == variants


def test_layers_and_networks_in_jax(jax_on_cpu, tmp_path, monkeypatch, capsys):
    """On a CPU they are compared, and no rows are written."""
    bench, scenes = part("submanifold.bench_jax_sites"), part("submanifold.scenes")
    monkeypatch.setattr(bench, "CHANNELS", (3,))
    monkeypatch.setattr(bench, "LAYERS", 2)
    monkeypatch.setattr(bench.scenes, "standard", lambda quick: [scenes.blobs((20, 30), 0.2)])
    second = part("submanifold.networks").NETWORKS["second"]
    small = {"second": lambda net, x: second(net, x, (3, 4))}
    monkeypatch.setattr(bench.networks, "NETWORKS", small)
    assert bench.main(["--cpu", "--quick", "--out", str(tmp_path)]) == 0
    assert not part("harness.rows").read(tmp_path / "jax_sites.csv")
    assert capsys.readouterr().out.count("forward") == 3  # ours, plain JAX, and the network


def test_layers_in_jax_that_differ_are_refused(jax_on_cpu):
    bench, scenes = part("submanifold.bench_jax_sites"), part("submanifold.scenes")
    layers = bench.Layers(jax_on_cpu, scenes.blobs((20, 30), 0.2), 3, np.float32)
    found = [layers.function(name, "forward") for name in layers.calls]
    layers.compare("forward", found)
    with pytest.raises(AssertionError, match="3 channels: forward of plain JAX differs"):
        layers.compare("forward", [found[0], lambda: found[1]() * 1.01])


@pytest.fixture
def jax_on_cpu():
    jax = pytest.importorskip("jax")
    with jax.default_device(jax.devices("cpu")[0]):
        yield jax
