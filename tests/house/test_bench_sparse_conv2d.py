"""The benchmark of sparse_conv2d on a CPU: its rows, and that it refuses a wrong result."""

import pytest

from support.bench_parts import part

pytestmark = pytest.mark.usefixtures("benchmarks", "torch")


def test_ratios_of_arrays_and_of_tensors(tmp_path):
    bench, rows = part("block_sparse.bench_sparse_conv2d"), part("harness.rows")
    assert bench.main(["--quick", "--out", str(tmp_path)]) == 0
    found = rows.read(tmp_path / "sparse_conv2d.csv", rows.Ratio)
    cases = {(row.block, row.mask, row.variant) for row in found}
    assert len(cases) == len(found) == len(bench.BLOCKS) * 4 * 2
    assert all(0 < row.ratio <= row.ratio_p90 for row in found)


@pytest.mark.parametrize("name", ["on_arrays", "on_tensors"])
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_a_wrong_result_is_refused(place, name, torch, monkeypatch):
    bench = part("block_sparse.bench_sparse_conv2d")
    mask = bench.masks_of((40, 50), 16)["top-left, 10% of the blocks"]
    case = bench.Case(torch, (40, 50), 16, mask)
    case.check()
    wrong = getattr(case, name)()
    wrong[0, 3, 4, 5] += 0.01 if place == "inside" else 0
    wrong[0, -1, -1, 0] += 0 if place == "inside" else 0.01
    monkeypatch.setattr(case, name, lambda: wrong)
    with pytest.raises(AssertionError, match="beyond rounding"):
        case.check()
