"""The benchmarks of the fused ops: cases, checks, dense times, targets, tables and pictures."""

import functools
import types

import numpy as np
import pytest

import sbnet_cupy
from sbnet_cupy import __main__ as command
from support.bench_parts import check_rows, make_row, part, verdicts

pytestmark = pytest.mark.usefixtures("benchmarks")

OPS = ["fused_conv", "fused_bottleneck"]
DTYPES = {
    "fused_conv": ["float16", "bfloat16", "tf32", "float32"],
    "fused_bottleneck": ["float16", "bfloat16", "tf32"],
}


@pytest.fixture
def tiny(fake_gpu, monkeypatch, torch):
    """Stages of a few pixels, few masks, and nothing compiled."""
    cases = part("harness.fused_cases")
    monkeypatch.setattr(part("harness.timing"), "calls_per_round", lambda sets, byte_count: 1)
    monkeypatch.setattr(cases, "STAGES", (cases.Stage(12, 14, 8, (16, 8), 4),))
    monkeypatch.setattr(cases, "SWEEP", (0.1, 0.5, 1.0))
    monkeypatch.setattr(cases, "SWEEP_GATHERED", (1.0,))
    monkeypatch.setattr(part("harness.fused"), "MOST_SETS", 2)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)


def bench(names, folder):
    arguments = ["bench", *names, "--out", str(folder), "--commit", "abc"]
    return command.main(arguments), part("harness.plot").read_folder(folder)


# ------------------------------------------------------------------------------------------- whole


@pytest.mark.parametrize("op", OPS)
def test_the_flow(op, tiny, tmp_path):
    """Every dtype, mask and contender, pictures and tables, from checks on real results."""
    cases = part("harness.fused_cases")
    code, found = bench([op], tmp_path)
    assert code == 0
    rows = [row for row in found if row.op == op]
    check_rows(rows, {"sbnet_cupy", "sbnet_cupy gather"})
    assert list(dict.fromkeys(row.dtype for row in rows)) == DTYPES[op]
    dense = [row for row in rows if row.variant == "dense"]
    contenders = {row.implementation for row in dense}
    assert len(dense) == len(contenders) * len(DTYPES[op])
    assert {name.rpartition(", ")[2] for name in contenders} == {"channels_last", "NCHW"}
    assert any("compile" in name for name in contenders) == (op == "fused_bottleneck")
    assert all(row.dense_us is None for row in dense)
    for row in (row for row in rows if row not in dense):
        best = min(r.us for r in dense if r.dtype == row.dtype)
        assert row.dense_us == pytest.approx(best, rel=1e-3)
        assert row.ratio_to_dense == pytest.approx(best / row.us, rel=1e-3)
    for dtype in DTYPES[op]:
        ours = [r for r in rows if r.ours and (r.suite, r.dtype) == ("stages", dtype)]
        assert len(ours) == 2 * len(cases.MASKS)  # with reduce_mask and without
    assert (tmp_path / f"density_{op}.png").stat().st_size < 200_000
    text = part("harness.report").device(tmp_path, tmp_path)
    assert f"density_{op}.png" in text and "by density: 1x12x14" in text
    table = text.partition(f"{op}: us, **times faster")[2]
    assert "| all active | 12 | " in table and "x** +0.00 |" in table and "torch " in table


def test_host_cost_of_fused_ops(tiny, tmp_path, monkeypatch):
    host, cases = part("block_sparse.bench_host_cost"), part("harness.fused_cases")
    monkeypatch.setattr(host, "STAGES", cases.STAGES)
    monkeypatch.setattr(host, "ORIGINAL", [((1, 20, 24, 8), 6, "top-left", 0)] * 6)
    code, found = bench(["host_cost", "--quick"], tmp_path)
    assert code == 0
    rows = [row for row in found if row.op in OPS]
    assert {(row.op, row.variant, row.timed_by) for row in rows} == {
        (op, variant, "host") for op in OPS for variant in ("out=", "new result")
    }


def test_cases_of_the_paper():
    session = types.SimpleNamespace(cpu=False, quick=False, points="scan.bin")
    for op in OPS:
        cases = part(f"block_sparse.bench_{op}").cases(session)
        stages = [case for case in cases if case.suite == "stages"]
        assert len(stages) == 4 * len(DTYPES[op]) * 7  # five masks, the scan, and dense
        assert len(cases) == len(set(cases)) and "scan" in {case.mask for case in cases}
        swept = [case for case in cases if case.suite == "density"]
        assert {case.shape[1] for case in swept} == {400, 100}
        assert {case.dtype for case in swept} == {"float16"}
        seen = []  # cases that share arrays follow one another, the dense one first
        for case in cases:
            if not seen or seen[-1] != case.shared:
                assert case.shared not in seen and case.mask == "dense"
                seen.append(case.shared)
        assert part(f"block_sparse.bench_{op}").cases(types.SimpleNamespace(cpu=True)) == []
    session = types.SimpleNamespace(xp=np, points=None)
    case = part("block_sparse.bench_fused_conv").cases(types.SimpleNamespace(
        cpu=False, quick=False, points=None
    ))[1]  # fmt: skip
    blocks = part("harness.inputs").find_blocks(case, session)
    assert (blocks.count, blocks.params.bsize_out) == (112, (16, 16))


def test_ten_percent_are_ten_percent_of_the_blocks():
    """Of the result: with its halo, a block more on each side would see the mask."""
    cases, session = part("harness.fused_cases"), types.SimpleNamespace(xp=np, points=None)
    for stage in cases.STAGES:
        case = cases.stage_case("fused_conv", stage, "float16", "stages", "top-left", 0.1)
        blocks = part("harness.inputs").find_blocks(case, session, halo=False)
        assert blocks.count / np.prod(blocks.params.bcount) == pytest.approx(0.1, abs=0.005)
        height, width = blocks.params.bsize_out
        expected = {(0, i // height, j // width) for _, i, j in np.argwhere(blocks.mask)}
        assert set(map(tuple, blocks.indices)) == expected


# ------------------------------------------------------------------------------------ what is wrong


def one_value_off(y):
    y[0, 0, 0, 0] += 0.25


def one_pixel_too_many(y):
    y[0, -1, -1] = 0


def no_kernel(y):
    raise NotImplementedError("no kernel for this")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (one_value_off, "sbnet_cupy is wrong and has no row: 1x12x14x8 float16, block 6x6, top-"),
        (one_pixel_too_many, "1 pixels outside the active blocks were written"),
        (no_kernel, "sbnet_cupy does not run and has no row: 1x12x14x8 float16, block 6x6, top-"),
    ],
)
def test_a_wrong_result_is_refused(spoil, said, tiny, tmp_path, capsys, monkeypatch):
    """It has no row, the run goes on, and the exit code tells."""
    right = sbnet_cupy.fused_conv

    def wrong(x, *args, **options):
        y = right(x, *args, **options)
        if x.dtype == np.float16:
            spoil(y)
        return y

    monkeypatch.setattr(sbnet_cupy, "fused_conv", wrong)
    code, found = bench(["fused_conv"], tmp_path)
    assert code == 1
    ours = {(row.dtype, row.mask) for row in found if row.ours}
    assert ("tf32", "top-left, 10% active") in ours
    assert ("float16", "top-left, 10% active") not in ours
    assert said in " ".join(capsys.readouterr().out.split())


def test_without_the_others(tiny, tmp_path, capsys, monkeypatch, torch):
    """No Triton: the eager unit is what counts. No PyTorch: no ratio. Both are said."""

    def missing(x, kernels, norms):
        raise RuntimeError("Cannot find a working triton installation")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: missing)
    code, found = bench(["fused_bottleneck", "--quick"], tmp_path)
    assert code == 0 and all(row.ratio_to_dense for row in found if row.ours)
    output = " ".join(capsys.readouterr().out.split())
    assert "torch.compile, channels_last does not run and has no row" in output
    monkeypatch.setattr(part("harness.machine"), "import_torch", lambda cpu: None)
    code, found = bench(["fused_conv", "--quick"], tmp_path / "alone")
    ours = [row for row in found if row.ours]
    assert code == 0 and ours and not any(row.ratio_to_dense for row in ours)
    assert "no PyTorch for this device, so no dense time" in capsys.readouterr().out


def test_bounds_hold_and_bite():
    """An image in float32 arithmetic lies within its bounds; one rounded to half does not."""
    exact, rng = part("harness.exact"), np.random.default_rng(0)
    x = rng.uniform(-1, 1, (1, 6, 7, 8)).astype(np.float32)
    w = rng.uniform(-1, 1, (3, 3, 8, 4)).astype(np.float32)
    compare, wrong = part("harness.fused").compare_within, part("harness.check").WrongResult
    everywhere = np.ones(x.shape[:3], bool)
    expected = exact.convolution(x, w, exact.Arithmetic("float32"), np)
    y = sbnet_cupy.conv2d(x, w)
    compare(y, expected, everywhere, np)
    with pytest.raises(wrong, match="of 168 values are out of bounds"):
        compare(y.astype(np.float16).astype(np.float32), expected, everywhere, np)
    half = exact.convolution(x, w, exact.Arithmetic("float16"), np)
    compare(y.astype(np.float16), half, everywhere, np)
    y[0, 0, 0, 0] = np.nan
    with pytest.raises(wrong, match=r"1 of 168 .* at \(0, 0, 0, 0\): off by nan"):
        compare(y, expected, everywhere, np)


@pytest.mark.parametrize("dtype", DTYPES["fused_bottleneck"])
def test_bounds_of_a_unit_bite(dtype):
    """A unit lies within its bounds; one that saw less than all of w2 does not."""
    fused, cases, exact = part("harness.fused"), part("harness.fused_cases"), part("harness.exact")
    stage = cases.Stage(12, 12, 8, (64, 16), 12)
    case = cases.stage_case("fused_bottleneck", stage, dtype, "stages", "all", 1.0)
    bench = part("block_sparse.bench_fused_bottleneck")
    layer = bench.Bottleneck(types.SimpleNamespace(xp=np), case)
    weights = layer.weights
    assert weights.scale1.dtype == weights.shift3.dtype == case.array_dtype
    assert layer.weights_of_stack.scale1.dtype == np.float32
    x = np.random.default_rng(1).standard_normal(case.shape).astype(case.array_dtype)
    expected = exact.residual_unit(x, weights, case.arithmetic, np)
    everywhere, one = np.ones(x.shape[:3], bool), np.zeros((1, 3), np.int32)
    unit = functools.partial(sbnet_cupy.fused_bottleneck, x, bsize=12)
    active = np.ones(1, np.int32), one
    fused.compare_within(unit(weights, *active), expected, everywhere, np)
    fused.compare_within(unit(layer.packed, *active), expected, everywhere, np)
    weights.w2[:, 2] = 0
    with pytest.raises(part("harness.check").WrongResult, match="of 144 pixels are out of bounds"):
        fused.compare_within(unit(weights, *active), expected, everywhere, np)


# ------------------------------------------------------------------------------------------ targets


def fused_row(op, shape, dtype="float16", mask="top-left, 10% active", **changes):
    fixed = {"suite": "stages", "variant": "given blocks", "block": "10x10"}
    return make_row(op=op, shape=shape, dtype=dtype, mask=mask, **fixed | changes)


def test_every_number_of_the_table_is_a_target():
    shapes = part("harness.targets").FUSED
    session = types.SimpleNamespace(cpu=False, quick=False, points=None)
    for op in OPS:
        cases = part(f"block_sparse.bench_{op}").cases(session)
        assert list(dict.fromkeys(case.columns["shape"] for case in cases)) == list(shapes[op])
    rows = [
        fused_row(op, shape, dtype, mask, ratio_to_dense=3.0)
        for op in OPS
        for shape in shapes[op]
        for dtype in DTYPES[op]
        for mask in ("top-left, 10% active", "top-left, 50% active", "all active")
    ]
    found = [met for text, _, met in verdicts(*rows) if "against dense" in text]
    table = (
        "10 6 3.2 2.7",
        "10 6 3 2.5",
        "2 1.7 1.3 1.2",
        "22 14 7 5",
        "20 12 6 4",
        "3.5 2.5 2 1.5",
    )
    wanted = [float(number) for line in table for number in line.split()]
    assert sorted(found) == sorted(number <= 3.0 for number in wanted)


def test_targets_of_reduce_mask_and_the_host():
    given = fused_row("fused_conv", "1x50x88x96", us=3.0)
    masked = fused_row("fused_conv", "1x50x88x96", us=4.6, variant="with reduce_mask")
    host = fused_row("fused_bottleneck", "1x50x88x384", suite="host", timed_by="host", us=14.0)
    found = verdicts(given, masked, host)
    assert [(value, met) for _, value, met in found] == [(pytest.approx(1.6), False), (14.0, True)]


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ((1, 5, 9), "faster at every density"),
        ((5, 15, 20), "faster up to 30%"),
        ((11, 12, 13), "dense is faster at every density"),
    ],
)
def test_crossover(times, said):
    rows = [
        fused_row("fused_conv", "", us=float(us), blocks=blocks, dense_us=10.0)
        for us, blocks in zip(times, (10, 50, 100), strict=True)
    ]
    assert part("harness.plot").crossover(rows) == said


def test_scratch_of_graphs_comes_back(fake_gpu):
    """A case's graphs are gone when it ends: the next one's find the slab empty."""
    from sbnet_cupy.core import workspace

    workspace._KEPT.append(np.zeros(1))
    with part("harness.session").Session() as session:
        session.release()
    assert not workspace._KEPT
