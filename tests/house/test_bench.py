"""The benchmarks: what they write, what they refuse, and the GPU's flow on a CuPy that is NumPy."""

import dataclasses
import io
import sys
import types

import numpy as np
import pytest

import sbnet_cupy
from sbnet_cupy import __main__ as command
from support.bench_parts import ROOT, check_rows, make_row, part, verdicts
from support.demo_files import lidar
from support.fake_cupy import Clockwork, Stream

pytestmark = pytest.mark.usefixtures("benchmarks")

NAMES = ["reduce_mask", "sparse_gather", "sparse_scatter"]
FUSED = ["fused_conv", "fused_bottleneck"]


# ------------------------------------------------------------------------------- on the CPU, whole


@pytest.fixture(scope="module")
def cpu_run(benchmarks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("results") / "cpu"
    assert command.main(["bench", "--cpu", "--quick", "--out", str(folder)]) == 0
    return folder


def test_cpu_rows(cpu_run):
    rows = part("harness.rows")
    assert sorted(path.stem for path in cpu_run.glob("*.csv")) == ["ratios", *NAMES]
    for name in NAMES:
        found = rows.read(cpu_run / f"{name}.csv")
        check_rows(found, {"sbnet_cupy", "numpy loop"})
        assert {row.op for row in found} == {"copy", name}
        assert {row.timed_by for row in found} == {"wall"}
        assert any("torch" in row.implementation for row in found)
        assert any(row.note.startswith(rows.SAME_INPUTS) for row in found)
        assert all(row.original_us is None for row in found)
        for workload in {row.workload for row in found if row.op == name}:
            ours = [row for row in found if row.workload == workload and row.ours]
            assert len(ours) == 1, workload
        header = (cpu_run / f"{name}.csv").read_text("utf-8").splitlines()[0]
        assert header == ",".join(rows.COLUMNS)


def test_cpu_ratios(cpu_run):
    """One for each contender that was timed beside ours: the median of ratios, round by round."""
    rows = part("harness.rows")
    ratios = rows.read(cpu_run / rows.RATIOS_FILE, rows.Ratio)
    plot = part("harness.plot")
    timed = {(row.workload, row.implementation) for row in plot.read_folder(cpu_run)}
    others = {key for key in timed if key[1] != rows.OURS and (key[0], rows.OURS) in timed}
    assert {(r.workload, r.implementation) for r in ratios} == others != set()
    assert all(0 < r.ratio <= r.ratio_p90 for r in ratios)
    table = part("harness.timing").WallClock(quick=True)
    waits = [part("harness.timing").Contender(str(k), [lambda: None] * 2) for k in range(2)]
    table._once = lambda contender, turn: (2.0, 8.0)[int(contender.name)]
    first, second = table.time_all(waits)
    assert (first.ratio, second.ratio, second.ratio_p90) == (1.0, 0.25, 0.25)


def test_cpu_pictures_and_report(cpu_run, tmp_path):
    report = part("harness.report")
    pictures = sorted(cpu_run.glob("*.png"))
    assert [path.name for path in pictures] == ["density_gather.png", "density_scatter.png"]
    for path in pictures:
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size < 200_000
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nstale\n{report.END}\nafter\n", encoding="utf-8")
    for _ in range(2):  # writing twice changes nothing
        assert report.main([str(cpu_run.parent), "--readme", str(readme)]) == 0
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "stale" not in text
    assert "[ratios.csv](" in text and "PyTorch from the same inputs" in text and " us" not in text
    assert text.count(report.BEGIN) == 1


def test_the_readme_is_what_the_rows_say():
    """The tables are those that report.py writes from the committed rows."""
    report = part("harness.report")
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    written = text.partition(report.BEGIN)[2].partition(report.END)[0].strip()
    assert written == report.report(ROOT / "benchmarks" / "results", ROOT / "benchmarks")


# ------------------------------------------------------------------------------------ command line


def test_list(capsys):
    assert command.main(["bench", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        *NAMES, *FUSED, "host_cost", "torch_host_cost", "jax_host_cost"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convolution"], "there is no benchmark 'convolution'; there are: reduce_mask"),
        (["--cpu", "--points", "nowhere.bin"], "--points: nowhere.bin does not exist"),
        (["--cpu", "--out", __file__], "--out: cannot write to"),
        (["--cpu", "--out", "taken"], "taken/reduce_mask.csv: Is a directory"),
        (["--cpu", "--points", "five.bin"], "values 5 apart are alike, values 4 apart are not\n"),
        ([], "CuPy cannot be imported"),
    ],
)
def test_a_mistake_gets_one_line(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken" / "reduce_mask.csv").mkdir(parents=True)
    lidar(5).tofile("five.bin")
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert command.main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sbnet-cupy bench: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize("installed", [True, False])
def test_a_busy_machine_matters_to_pytorch(installed, capsys, monkeypatch, tmp_path):
    """Without PyTorch there are no threads of its to warn of."""
    monkeypatch.setattr(part("harness.machine"), "is_busy", lambda: True)
    if not installed:
        monkeypatch.setitem(sys.modules, "torch", None)
    arguments = ["bench", "--cpu", "--quick", "reduce_mask", "--out", str(tmp_path)]
    assert command.main(arguments) == 0
    assert ("PyTorch's threads" in capsys.readouterr().out) == installed


def test_what_has_nothing_to_time_is_named(capsys, tmp_path):
    arguments = ["bench", "--cpu", "--quick", "--out", str(tmp_path)]
    assert command.main([*arguments, "fused_conv", "reduce_mask"]) == 0
    shown = capsys.readouterr().out
    assert "fused_conv has nothing to time with --cpu" in shown and shown.count("nothing to") == 1


@pytest.mark.parametrize("width", [60, 80, 120, 190])
def test_every_number_is_shown_in_a_terminal_of_any_width(width):
    from rich.console import Console

    rows = [
        make_row(shape=shape, dtype="float32", block="18x18", mask="top-left, 10% active",
                 variant="transposed", op="sparse_gather", us=us, implementation=name)
        for shape in ("1x100x176x384", "8x720x1280x96")
        for us, name in ((123_456.78, "sbnet_cupy"), (54_321.09, "torch index_select of pixels"))
    ]  # fmt: skip
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(part("harness.table").fitting("sparse_gather", rows, console))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for word in ("1x100x176x384", "8x720x1280x96", "18x18", "top-left, 10% active", "transposed",
                 "123,456.78", "9.00..11.00", "1,000", "50", "0.4", "sparse_gather",
                 "54,321.09 torch index_select of pixels"):  # fmt: skip
        assert word in text, word
    for line in lines:  # no number is cut in two
        assert not line.endswith((",", "."))


def test_an_installed_package_says_where_benchmarks_are(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "CHECKOUT", tmp_path)
    assert command.main(["bench", "--list"]) == 2
    message = "sbnet-cupy bench: benchmarks come with the source checkout"
    assert capsys.readouterr().err.startswith(message)


# ------------------------------------------------------------------------------------- arithmetic


def test_bytes():
    rows = part("harness.rows")
    stack = rows.block_bytes(112, (18, 18), 24, 4)
    assert stack == 3_483_648
    assert rows.moved_bytes("plain", stack) == rows.moved_bytes("fused", stack) == 6_967_296
    assert rows.moved_bytes("add", stack) == 10_450_944
    # The original's row: 6.4 us at 1091 GB/s.
    assert rows.gigabytes_per_second(6_967_296, 6.4) == pytest.approx(1089, rel=0.001)


def test_sets_outgrow_the_cache():
    session = part("harness.session").Session(cpu=True, quick=False)
    session.cpu, session.cache_bytes = False, 60e6
    assert session.sets(1.5e6, 4e6) * 1.5e6 > 2 * 60e6  # many small sets
    assert session.sets(1e9, 4e9) == 2  # never fewer than two
    assert session.sets(1, 1e9) * 1e9 <= 6e9  # and no more than there is memory for


def test_a_row_survives_the_file(tmp_path):
    rows = part("harness.rows")
    row = make_row(original_us=6.4, note='a "note", with a comma')
    with rows.Writer(tmp_path / "x.csv") as writer:
        writer.write(row)
        assert rows.read(tmp_path / "x.csv") == [row]  # flushed, should the run end here


def test_rows_of_other_cases_stay(tmp_path):
    """A run of chosen cases replaces their rows, where they stand, and no others."""
    rows, path = part("harness.rows"), tmp_path / "x.csv"
    first, second, third = (make_row(shape=shape, us=1.0) for shape in ("1", "2", "3"))
    with rows.Writer(path, keep=True) as writer:
        for row in (first, second, first, third):
            writer.write(row)
    assert rows.read(path) == [first, second, first, third]
    faster = dataclasses.replace(first, us=0.5)
    with rows.Writer(path, keep=True) as writer:
        assert rows.read(path) == [first, second, first, third]
        writer.write(faster)
        assert rows.read(path) == [faster, second, third]
        writer.write(dataclasses.replace(faster, density=0.5))
    assert rows.read(path) == [faster, second, third, dataclasses.replace(faster, density=0.5)]
    with rows.Writer(path) as writer:
        writer.write(third)
    assert rows.read(path) == [third]


def test_a_file_of_other_columns_is_begun_anew(tmp_path):
    rows, path = part("harness.rows"), tmp_path / "x.csv"
    path.write_text("op,us\nsparse_gather,1\n")
    with rows.Writer(path, keep=True) as writer:
        writer.write(make_row())
    assert rows.read(path) == [make_row()]


def test_strips_cover_all_or_both_ends():
    strips = part("harness.check").strips
    assert strips(2, 3, 1) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    some = strips(8, 512, 1e5)
    assert some[0] == (0, 0) and some[-1] == (7, 511) and len(some) == 64
    assert len(strips(1, 100, 1e9)) == 4


def test_the_original_has_its_rows():
    cases = part("harness.cases")
    session = types.SimpleNamespace(cpu=False, quick=False, points=None)
    for op, variant in cases.ORIGINAL_COLUMNS:
        found = cases.mask_cases(session) if op == "reduce_mask" else cases.copy_cases(op, session)
        times = [case.original_us(variant) for case in found if case.original_us(variant)]
        assert len(times) == (5 if op == "reduce_mask" else 6), (op, variant)
        assert len(found) == len(set(found))
    case = next(c for c in found if c.original_us("plain") == 47.0)
    assert (case.shape, case.bsize, case.mask) == ((1, 400, 700, 96), (34, 34), "blobs")
    device = types.SimpleNamespace(xp=np, points=None)
    blocks = part("harness.inputs").find_blocks(case, device)
    assert blocks.count == 112  # as many as the original had


# ---------------------------------------------------------------------------------------- targets


def test_targets_of_large_stacks():
    large = {"op": "sparse_gather", "suite": "large"}
    found = verdicts(
        make_row(**large, variant="plain", percent_of_copy=80.0),
        make_row(**large, variant="plain", percent_of_copy=79.9, dtype="float16"),
        make_row(**large, variant="transposed", percent_of_copy=71.0),
        make_row(**large, variant="plain", percent_of_copy=1.0, implementation="torch index"),
    )
    assert found == [
        ("Large stacks, plain", 80.0, True),
        ("Large stacks, plain", 79.9, False),
        ("Large stacks, transposed", 71.0, True),
    ]


def test_targets_against_the_original():
    empty = make_row(op="empty", us=0.5, implementation="empty kernel")
    stage = {"suite": "stages", "variant": "plain", "original_us": 2.5}
    slow = make_row(**stage, op="sparse_gather", us=1.6, ratio_to_original=2.5 / 1.6)
    near = make_row(**stage, op="sparse_gather", us=1.5, ratio_to_original=2.5 / 1.5)
    mask = make_row(**stage, op="reduce_mask", us=1.5, ratio_to_original=2.5 / 1.5)
    assert [met for *_, met in verdicts(empty, slow, near, mask)] == [False, True, False]


def test_targets_of_channels_host_and_masks():
    channels = {"op": "sparse_scatter", "suite": "channels", "variant": "add", "block": "18x18"}
    even = make_row(**channels, shape="2x800x1400x32", us=10.0, bytes=1000)
    odd = make_row(**channels, shape="64x800x1400x1", us=16.0, bytes=1000)
    host = {"suite": "host", "timed_by": "host", "op": "reduce_mask"}
    calls = [make_row(**host, variant="capacity", us=12.5), make_row(**host, variant="waits")]
    large = {"op": "reduce_mask", "suite": "large", "shape": "8x4096x4096", "dtype": "uint8"}
    found = verdicts(even, odd, *calls, make_row(**large, percent_of_copy=50.0))
    assert [(value, met) for _, value, met in found] == [(50.0, True), (1.6, False), (12.5, False)]


def test_targets_of_networks_sites_and_calls():
    """Each row has a number of its own: what share of it was reached."""
    network = {"op": "network", "suite": "resnet18", "variant": "batch 1", "dtype": "float16"}
    layer = {"op": "fused_conv", "suite": "resnet50", "variant": "1x1/1 64-256"}
    conv = {"op": "submanifold_conv", "dtype": "float16"}
    stage = {"suite": "blobs 10%", "shape": "50x88, 440 sites"}
    maps = {"op": "kernel_map", "suite": "scan 14000", "dtype": "int32"}
    sites = {"op": "site_network", "suite": "surface 100000"}
    calls = {"op": "SparseConv2d", "suite": "torch host", "timed_by": "host"}
    found = verdicts(
        make_row(**network, density=0.1, ratio_to_dense=4.5),
        make_row(**network, density=1.0, ratio_to_dense=0.475),
        make_row(**network, density=0.3, ratio_to_dense=1.0),  # which has no target
        make_row(**layer, density=0.1, ratio_to_dense=1.0),
        make_row(**conv, suite="scan 14000", variant="64 channels, forward, weights packed", us=8),
        make_row(**conv, suite="scan 14000", variant="64 channels, forward", us=9),
        make_row(**conv, **stage, variant="96 channels, forward, weights packed", us=10.4),
        make_row(**maps, variant="same", us=25),
        make_row(**maps, variant="strided", us=25),
        make_row(**sites, variant="unet, forward", us=923),
        make_row(**sites, variant="unet, forward, kernels", implementation="spconv", us=1000),
        make_row(**calls, variant="list of blocks", us=50),
        make_row(**calls, variant="mask, capacity", us=90),
    )
    reached = [(round(value, 2), met) for _, value, met in found]
    assert reached == [
        (1.0, True), (0.5, False), (0.5, False), (1.25, True), (0.5, False), (0.8, False),
        (1.0, True), (0.9, False),
    ]  # fmt: skip


def test_the_worst_rows_that_miss_a_target():
    large = {"op": "sparse_gather", "suite": "large", "variant": "plain"}
    rows = [make_row(**large, percent_of_copy=percent) for percent in (81.0, 79.0, *range(71, 76))]
    targets, title, missed = part("harness.report")._targets(rows)
    assert "| 1 of 7 | **missed** | 71% of copy: " in targets and title.startswith("The worst 5")
    values = [line.split(" | ")[2] for line in missed.splitlines()[2:]]
    assert values == [f"{percent}% of copy" for percent in range(71, 76)] + [""]
    assert missed.splitlines()[-1] == "| Large stacks, plain | and 1 more |  |  |"
    assert part("harness.report")._missed(part("harness.targets").TARGETS[0], []) == []


# ------------------------------------------------------------------------------------ wrong results


@pytest.fixture
def tiny(monkeypatch):
    """Runs of one small case, on small buffers."""
    cases = part("harness.cases")
    one = cases.Case(
        "sparse_gather", "stages", (1, 20, 24, 8), "float32", (6, 6), "top-left", 0.3,
        cases.VARIANTS["sparse_gather"],
    )  # fmt: skip
    monkeypatch.setattr(part("harness.ceiling"), "CPU_BYTES", {True: 1 << 16})
    monkeypatch.setattr(part("block_sparse.bench_sparse_gather"), "cases", lambda session: [one])
    return one


def test_a_wrong_result_is_refused(tiny, tmp_path, capsys, monkeypatch):
    """Wrong in one element of the transposed stack: no row for it, and the exit code tells."""
    right = sbnet_cupy.sparse_gather

    def wrong(*args, **options):
        stack = right(*args, **options)
        if args[0].shape == tiny.shape and options.get("transpose"):  # not the check's strips
            stack[-1, -1, -1, -1] += 1
        return stack

    monkeypatch.setattr(sbnet_cupy, "sparse_gather", wrong)
    arguments = ["bench", "sparse_gather", "--cpu", "--quick", "--out", str(tmp_path)]
    assert command.main(arguments) == 1
    rows = part("harness.rows").read(tmp_path / "sparse_gather.csv")
    assert {row.variant for row in rows if row.ours} == {"plain", "fused"}
    assert {row.variant for row in rows if not row.ours} >= {"plain", "transposed"}
    output = " ".join(capsys.readouterr().out.split())
    assert "sbnet_cupy is wrong and has no row" in output and "1 of" in output


def test_checks_see_what_is_wrong():
    check = part("harness.check")
    session = types.SimpleNamespace(xp=np, points=None)
    case = part("harness.cases").Case("", "", (2, 20, 24, 3), "float32", (6, 6), "blobs", 0.3)
    blocks = part("harness.inputs").find_blocks(case, session)
    x = part("harness.inputs").fill(np.empty(case.shape, np.float32), np, 1)
    stack = sbnet_cupy.sparse_gather(x, *blocks.active, **blocks.gather_grid)
    check.check_gather(x, stack, blocks, {})
    with pytest.raises(check.WrongResult, match="blocks instead of"):
        check.check_gather(x, stack[1:], blocks, {})
    stack[0, 2, 2, 0] = np.nan
    with pytest.raises(check.WrongResult, match="1 of"):
        check.check_gather(x, stack, blocks, {}, tolerance=0.1)

    tiles = part("harness.inputs").fill(np.empty((blocks.count, 4, 4, 3), np.float32), np, 2)
    with pytest.raises(check.WrongResult):  # one pixel outside the blocks is written
        check.check_scatter(x, tiles, blocks, {}, lambda: x.__setitem__((1, -1, -1), 9))
    rows, sizes = blocks.indices, (blocks.params.bcount, blocks.gather_grid)
    check.check_indices(blocks.mask, rows, *sizes)
    for wrong in (rows[::-1], rows[1:], np.concatenate([rows, rows[-1:] + 100])):
        with pytest.raises(check.WrongResult):
            check.check_indices(blocks.mask, wrong, *sizes)


# ----------------------------------------------------------------------- the GPU's flow, on the CPU


def test_the_flow_on_a_gpu(fake_gpu, tiny, tmp_path, monkeypatch):
    small = dataclasses.replace(tiny, op="sparse_scatter", variants=("plain", "add"))
    masks = dataclasses.replace(tiny, op="reduce_mask", shape=(1, 20, 24), variants=("max",))
    monkeypatch.setattr(part("block_sparse.bench_sparse_scatter"), "cases", lambda session: [small])
    monkeypatch.setattr(part("block_sparse.bench_reduce_mask"), "cases", lambda session: [masks])
    stage = ((1, 20, 24, 8), 6, "top-left", 0)
    for name in ("block_sparse.bench_host_cost", "adapters.bench_torch_host_cost"):
        monkeypatch.setattr(part(name), "ORIGINAL", [stage] * 6)
    monkeypatch.setattr(part("block_sparse.bench_host_cost"), "FUSED", {})
    unit = part("harness.fused_cases").Stage(20, 24, 8, (8, 4), 4)
    monkeypatch.setattr(part("adapters.bench_torch_host_cost"), "STAGES", [unit])
    arguments = ["bench", *NAMES, "host_cost", "torch_host_cost", "--quick", "--out", str(tmp_path)]
    assert command.main([*arguments, "--commit", "abc"]) == 0
    rows = part("harness.plot").read_folder(tmp_path)
    check_rows(rows, {"sbnet_cupy", "cupy take of pixels", "torch index", "empty kernel"})
    assert {row.commit for row in rows} == {"abc"} and {row.cuda for row in rows} == {"13.0"}
    assert {row.timed_by for row in rows if row.ours} == {"graph", "host"}
    assert {row.timed_by for row in rows if "mask" in row.implementation} == {"events"}
    layers = {"sparse_conv2d", "sparse_res_block_bottleneck", "SparseConv2d", "SparseBottleneck"}
    assert {row.op for row in rows if row.ours} == {*NAMES, "chain", *layers}
    assert "chain" in part("harness.report").device(tmp_path, tmp_path)


def test_networks_in_jax_are_compared(jax, tmp_path, monkeypatch, capsys):
    """On a CPU no rows are written; a result that differs is an error."""
    pytest.importorskip("torch")  # which makes the masks
    bench = part("networks.bench_jax_networks")
    command = ["--cpu", "--quick", "--batch", "1", "--out", str(tmp_path)]
    assert bench.main(command) == 0
    assert not part("harness.rows").read(tmp_path / bench.FILE)
    found = capsys.readouterr().out
    kinds = len(bench.DENSE)
    assert found.count(" of dense") == 2 * (kinds + len(bench.SHARES)) + kinds + len(bench.TRAINED)
    dense = bench.dense
    monkeypatch.setattr(bench, "dense", lambda *given: 1.1 * dense(*given))
    with pytest.raises(AssertionError, match=r"batch 1: relative error 9\.1e-02 to"):
        bench.main(command)


def test_the_calls_in_jax_are_checked_and_run(jax, tiny):
    """Each jitted call gives what the package gives; on a GPU the same calls are timed."""
    bench, session = part("adapters.bench_jax_host_cost"), types.SimpleNamespace(xp=np, points=None)
    for op in ("reduce_mask", "sparse_gather", "sparse_scatter", "chain"):
        case = dataclasses.replace(tiny, op=op)
        ((_, count, work),) = bench.works(case, session)
        assert count and [c.clock for c in work.contenders] == ["host"] * 2
        for contender in work.contenders:
            work.check(contender)
        contender.calls[0] = lambda: jax.numpy.zeros(3)
        with pytest.raises(part("harness.check").WrongResult):
            work.check(contender)
    assert bench.cases(types.SimpleNamespace(cpu=True)) == []


def test_what_cannot_be_captured_is_timed_with_events(fake_gpu, torch):
    timing = part("harness.timing")

    def waits():
        if Clockwork.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    for clock in (timing.CupyClock(sys.modules["cupy"], Stream()), timing.TorchClock(torch)):
        assert clock.time(timing.Contender("x", [lambda: 0] * 4), 1).timed_by == "graph"
        measured = clock.time(timing.Contender("x", [waits] * 4), 1)
        assert measured.timed_by == "events" and not Clockwork.capturing
        assert measured.us == pytest.approx(1000 / timing.LOOP_CALLS)  # 1 ms for all


def test_memory_is_that_of_the_call(torch, monkeypatch):
    """Of the allocator's blocks, and before they are rounded up."""
    held = {"allocated_bytes": 2_000_000, "requested_bytes": 1_500_000}
    most = dict.fromkeys(held, 10**9)  # of earlier calls

    def stats():
        now = {f"{kind}.all.current": number for kind, number in held.items()}
        return now | {f"{kind}.all.peak": number for kind, number in most.items()}

    def call():
        most.update(allocated_bytes=1_236_600_000, requested_bytes=9_940_000)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: most.update(held))
    peak = part("networks.timing").peak_of(call)
    assert f"peak {peak}" == "peak 1,234.6 MB (requested 8.4)"


def test_pictures_of_a_gpu(tmp_path):
    cases, draw = part("harness.cases"), part("harness.plot").draw
    with part("harness.rows").Writer(tmp_path / "sparse_gather.csv") as writer:
        for shape, block, mask, times in cases.ORIGINAL:
            for (op, variant), original in zip(cases.ORIGINAL_COLUMNS, times, strict=True):
                writer.write(
                    make_row(
                        op=op, suite="stages", shape="x".join(map(str, shape)), mask=mask,
                        block=f"{block}x{block}", variant=variant, us=original / 3,
                        original_us=original, ratio_to_original=3.0,
                    )
                )  # fmt: skip
    assert [line.split("/")[-1] for line in draw(tmp_path)] == ["stages.png"]
    assert (tmp_path / "stages.png").stat().st_size < 200_000
    assert "**3.0x**" in part("harness.report").device(tmp_path, tmp_path)


def test_networks_have_a_picture_where_they_were_swept(tmp_path):
    """Not on a CPU: the rows that lie in the folder of one are in float32, at few densities."""
    draw = part("harness.plot").draw
    options = {"op": "network", "dense_us": 40.0, "suite": "unet", "variant": "batch 1"}
    for dtype, densities, drawn in (
        ("float32", (0.1, 0.25, 0.5, 1.0), []),
        ("float16", (0.1, 1.0), []),
        ("float16", (0.1, 0.25, 0.5, 1.0), ["density_networks.png"]),
    ):
        with part("harness.rows").Writer(tmp_path / "networks.csv") as writer:
            for density in densities:
                writer.write(make_row(**options, dtype=dtype, density=density))
        assert [line.split("/")[-1] for line in draw(tmp_path)] == drawn
    for path in (ROOT / "benchmarks" / "results" / "cpu").glob("*.csv"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    draw(tmp_path)


def test_pictures_of_sites(tmp_path):
    """Weights packed before count where they were timed; a scene without rows has no panel."""
    sites = part("harness.plot_sites")
    rows = [
        make_row(
            op="submanifold_conv", suite="scan 14000", shape="9x9x9, 14000 sites", dtype="float16",
            variant=f"{channels} channels, {what}", us=us,
        )
        for channels, what, us in (
            (32, "forward, weights packed", 6.0), (32, "forward", 9.0), (16, "forward", 7.0),
            (16, "backward", 90.0), (16, "maps", 20.0),
        )
    ]  # fmt: skip
    assert sites.forward_times(rows) == {16: 7.0, 32: 6.0}
    rows += [
        make_row(
            op="blocks_or_sites", suite="clustered", shape="1x8x8x32", dtype="float16",
            density=density, variant=op, us=us,
        )
        for density in (0.1, 0.5)
        for op, us in (("stack_conv2d", 8.0), ("submanifold_conv", 4.0))
    ]  # fmt: skip
    with part("harness.rows").Writer(tmp_path / "sites.csv") as writer:
        for row in rows:
            writer.write(row)
    drawn = [line.split("/")[-1] for line in part("harness.plot").draw(tmp_path)]
    assert drawn == ["site_convolutions.png", "blocks_or_sites.png"]
    figures = {name: figure for figure, name in sites.pictures(rows)}
    (axis,) = figures["site_convolutions.png"].axes
    lines = {line.get_label(): list(line.get_ydata()) for line in axis.get_lines()}
    assert lines["sbnet_cupy"] == [7.0, 6.0] and lines["target"] == [7, 7, 10, 22, 60]
    (axis,) = figures["blocks_or_sites.png"].axes
    assert [list(line.get_ydata()) for line in axis.get_lines()] == [[8.0, 8.0], [4.0, 4.0]]
