"""The benchmark of features at sites: its scenes, its rows, and that it refuses a wrong result."""


import numpy as np
import pytest

from support.bench_parts import check_rows, part

pytestmark = pytest.mark.usefixtures("benchmarks")


@pytest.mark.parametrize("make", ["surface", "scan", "blobs", "file"])
def test_scenes_are_distinct_sites_inside_their_grid(make, tmp_path):
    scenes = part("submanifold.scenes")
    if make == "file":
        points = np.random.default_rng(0).normal(0, 3, (500, 4)).astype(np.float32)
        points.tofile(tmp_path / "scan.bin")
        scene = scenes.from_file(tmp_path / "scan.bin")
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
    assert variants == {"forward", "backward", "host", "coordinate_map", "maps"}
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
