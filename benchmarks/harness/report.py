"""Writes the tables of README.md from the CSV files: ``python -m benchmarks.harness.report``."""

import argparse
import os
import sys
from pathlib import Path

from benchmarks.harness.plot import FUSED_FILES, STAGES_FILE, SWEEP_FILES, crossover, read_folder
from benchmarks.harness.ratios import slower, summary
from benchmarks.harness.rows import (
    DENSE,
    GATHER,
    GIVEN,
    OURS,
    RATIOS_FILE,
    SAME_INPUTS,
    Ratio,
    read,
)
from benchmarks.harness.targets import COPIES, EVEN, EVEN_BLOCK, FUSED, Run, evaluate

SITE_FILES = ("coordinate_map.csv", "submanifold_conv.csv", "site_networks.csv")
BENCHMARKS = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results: begin, written by report.py -->", "<!-- results: end -->"
NOTHING = "No run is committed yet: there is no CSV file under `results/`."
MOST_MISSED = 5  # rows shown for a target
PICTURES = {
    FUSED_FILES["fused_conv"]: "fused_conv by density, next to the best dense time",
    FUSED_FILES["fused_bottleneck"]: "fused_bottleneck by density, next to the best dense time",
    STAGES_FILE: "Time of each stage, the original's kernel and ours",
    SWEEP_FILES["sparse_gather"]: "sparse_gather by density, time and bandwidth",
    SWEEP_FILES["sparse_scatter"]: "sparse_scatter by density, time and bandwidth",
}


def main(arguments=None):
    """Rewrite what stands between the markers of the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="?", type=Path, default=BENCHMARKS / "results")
    parser.add_argument("--readme", type=Path, default=BENCHMARKS / "README.md")
    options = parser.parse_args(arguments)
    text = options.readme.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    written = report(options.results, options.readme.resolve().parent)
    options.readme.write_text(f"{before}{BEGIN}\n\n{written}\n\n{END}{after}", encoding="utf-8")
    print(f"Wrote {options.readme}")
    return 0


def report(results, base):
    """Return the Markdown for all devices under ``results``; links are relative to ``base``."""
    folders = sorted(path for path in Path(results).glob("*") if any(path.glob("*.csv")))
    return "\n\n".join(device(folder, base) for folder in folders) or NOTHING


def device(folder, base):
    """Return the Markdown for one device."""
    if (folder / RATIOS_FILE).is_file():
        return "\n\n".join(_cpu(folder / RATIOS_FILE, base) + _sites(folder, base))
    run = Run(read_folder(folder))
    parts = [_head(run, folder, base), *_targets(run.rows)]
    for name, alt in PICTURES.items():
        if (folder / name).is_file():
            parts.append(f"![{alt}]({_link(folder / name, base)})")
    for op in FUSED:
        parts += _fused(run, op) + _dense(run, op)
    parts += _stages(run) + _others(run)
    parts += _suite(run, "large", "Large stacks, everything active", COPIES)
    parts += _channels(run)
    parts += _suite(run, "large", "reduce_mask, large masks", ("reduce_mask",))
    parts += _host(run, "host", "What a call costs the calling thread, and three ops in one graph.")
    for name in ("torch", "jax"):
        title = f"What a call of sbnet_cupy.{name} costs the calling thread."
        parts += _host(run, f"{name} host", title)
    return "\n\n".join(parts)


def _head(run, folder, base):
    row = run.rows[0]
    parts = [f"driver {row.driver}", f"CUDA {row.cuda}", f"CuPy {row.cupy}"] if row.cuda else []
    torch = next((r.torch for r in run.rows if r.torch), None)  # some benchmarks run without
    parts += [f"PyTorch {torch}"] if torch else []
    commits = sorted({row.commit for row in run.rows})
    parts += [f"NumPy {row.numpy}", f"commit {', '.join(commits)}"]
    lines = [f"### {row.gpu}", "", ", ".join(parts) + "."]
    ceilings = [
        f"{r.op} {r.us:,.2f} us{f', {r.gb_per_s:,.0f} GB/s' if r.gb_per_s else ''} "
        f"({r.implementation})"
        for r in {row.op: row for row in run.rows if row.op in ("copy", "empty")}.values()
    ]
    lines += ["Ceilings: " + "; ".join(ceilings) + "."] if ceilings else []
    files = [f"[{path.name}]({_link(path, base)})" for path in sorted(folder.glob("*.csv"))]
    return "\n".join([*lines, f"Rows: {', '.join(files)}."])


def _targets(rows):
    """Return the table of targets, and that of the worst rows that miss one."""
    groups = {}
    for verdict in evaluate(rows):
        groups.setdefault(verdict.target, []).append(verdict)
    lines, missed = [], []
    for target, verdicts in groups.items():
        wanted = "at least" if target.at_most is None else "at most"
        limit = target.at_least if target.at_most is None else target.at_most
        worst = min(verdicts, key=lambda verdict: (verdict.met, verdict.margin))
        met = sum(verdict.met for verdict in verdicts)
        result = "met" if met == len(verdicts) else "**missed**"
        cells = [f"{wanted} {limit:g}{target.unit}", f"{met} of {len(verdicts)}", result]
        lines.append([target.text, *cells, f"{worst.value:.3g}{target.unit}: {_name(worst.row)}"])
        missed += _missed(target, verdicts)
    parts = []
    if lines:
        heads = ["Target", "Each row", "Rows that meet it", "", "The worst"]
        parts.append(_table(heads, lines))
    if missed:
        parts.append(f"The worst {MOST_MISSED} rows that miss each target; the files have all.")
        parts.append(_table(["Missed", "Row", "Is", "us"], missed))
    return parts


def _missed(target, verdicts):
    """Return lines of the worst rows that miss a target, and of how many more do."""
    missed = sorted((v for v in verdicts if not v.met), key=lambda verdict: verdict.margin)
    lines = [
        [target.text, _name(v.row), f"{v.value:.3g}{target.unit}", f"{v.row.us:,.2f}"]
        for v in missed[:MOST_MISSED]
    ]
    more = len(missed) - len(lines)
    return lines + ([[target.text, f"and {more} more", "", ""]] if more else [])


def _stages(run):
    """The rows of the original's table: us, GB/s of block bytes, times faster."""
    compared = [row for row in run.ours if row.original_us]
    columns = list(dict.fromkeys((row.op, row.variant) for row in compared))
    grid = {}
    for row in compared:
        if row.op == "reduce_mask":  # which knows no channels: the same for all of an image's
            keys = [key for key in _images(compared) if _is_of(key, row)] or [_image(row)]
        else:
            keys = [_image(row)]
        for key in keys:
            grid.setdefault(key, {})[row.op, row.variant] = row
    lines = [
        [key[0], key[1], key[2], *(_stage_cell(cells.get(column)) for column in columns)]
        for key, cells in grid.items()
    ]
    heads = ["Image", "Block", "Mask"]
    heads += [op if op == "reduce_mask" else f"{op} {variant}" for op, variant in columns]
    title = "Stages of the paper in float32: us, GB/s, and times faster than the original's kernel."
    return [title, _table(heads, lines)] if lines else []


def _image(row):
    return row.shape, row.block, row.mask


def _images(rows):
    return dict.fromkeys(_image(row) for row in rows if row.op != "reduce_mask")


def _is_of(key, row):
    return key[0].rpartition("x")[0] == row.shape and key[1:] == (row.block, row.mask)


def _stage_cell(row):
    if row is None:
        return ""
    rate = "" if row.op == "reduce_mask" else f" ({row.gb_per_s:,.0f})"
    return f"{row.us:,.2f}{rate} **{row.ratio_to_original:.1f}x**"


def _fused(run, op):
    """Stages, masks and dtypes of a fused op: us, times faster than dense, cost of reduce_mask."""
    rows = [row for row in run.rows if (row.op, row.suite) == (op, "stages")]
    ours = [row for row in rows if row.ours and row.variant == GIVEN]
    if not ours:
        return []
    dtypes = list(dict.fromkeys(row.dtype for row in ours))
    lines = {}
    for row in ours:
        key = (row.shape, row.note, row.block, row.mask, row.blocks)
        lines.setdefault(key, {})[row.dtype] = _fused_cell(run, row)
    heads = ["Image", "Channels", "Block", "Mask", "Blocks", *dtypes]
    title = (
        f"{op}: us, **times faster than the best dense time**, and what reduce_mask in the same\n"
        "graph costs. Sizes of blocks include the halo; active is what holds a pixel of the mask\n"
        "without it."
    )
    cells = [[*key, *(found.get(dtype, "") for dtype in dtypes)] for key, found in lines.items()]
    return [title, _table(heads, cells)]


def _fused_cell(run, row):
    ratio = f" **{row.ratio_to_dense:.1f}x**" if row.ratio_to_dense else ""
    masked = [r for r in run.ours if run.given_blocks(r) is row and r is not row]
    cost = f" {masked[0].us - row.us:+.2f}" if masked else ""
    return f"{row.us:,.2f}{ratio}{cost}"


def _dense(run, op):
    """What a fused op is held against: dense times, the stack of blocks, and the crossover."""
    rows = [row for row in run.rows if row.op == op]
    groups = {}
    for row in rows:
        if row.variant == DENSE or (row.implementation == GATHER and row.suite == "stages"):
            groups.setdefault((row.shape, row.dtype), []).append(row)
    lines = [
        [*key, "; ".join(f"{_dense_name(row)} {row.us:,.1f}" for row in found)]
        for key, found in groups.items()
    ]
    swept = {}
    for row in rows:
        if row.suite == "density" and row.ours and row.dense_us:
            swept.setdefault((row.shape, row.dtype), []).append(row)
    parts = []
    if lines:
        title = f"{op}: dense times, and the same layer through a stack of blocks; us."
        parts += [title, _table(["Image", "Type", "Contenders"], lines)]
    if swept:
        said = [f"{shape} {dtype} {crossover(r)}" for (shape, dtype), r in swept.items()]
        parts.append(f"{op} against dense, by density: {'; '.join(said)}.")
    return parts


def _dense_name(row):
    return row.implementation if row.variant == DENSE else f"{row.implementation} ({row.mask})"


def _others(run):
    """Ours and everyone else on the stages, float32, top-left mask."""
    rows = [row for row in run.ours if (row.suite, row.dtype) == ("stages", "float32")]
    rows = [row for row in rows if row.op not in FUSED]
    rows = [row for row in rows if row.mask.startswith("top-left") and run.best_other(row)]
    lines = []
    for row in rows:
        group = [r for r in run.by_workload[row.workload] if not r.ours]
        cells = [
            f"{r.implementation}{_marks(r)} {r.us:,.1f} ({r.us / row.us:.1f}x)"
            for r in sorted(group, key=lambda r: r.us)
        ]
        cells = [f"{row.us:,.2f}", "; ".join(cells)]
        lines.append([row.op, row.shape, row.block, row.variant, *cells])
    heads = ["Op", "Image", "Block", "Variant", OURS, "others, from the fastest"]
    title = (
        "What a user would write instead, float32, 10% of the pixels active: us (times ours).\n"
        "All start from padded images and index tables made beforehand, but for those with †,\n"
        "which start from what this library is given. Those with ‡ wait for the device, so that\n"
        "they are timed around eager calls and not in a graph."
    )
    return [title, _table(heads, lines)] if lines else []


def _marks(row):
    eager = row.timed_by == "events"
    return ("†" if row.note.startswith(SAME_INPUTS) else "") + ("‡" if eager else "")


def _suite(run, suite, title, ops):
    rows = [row for row in run.ours if row.suite == suite and row.op in ops]
    heads = ["Op", "Image", "Type", "Block", "Mask", "Variant", "us", "p10..p90", "GB/s",
             "% of copy", "best other"]  # fmt: skip
    lines = [_line(run, row) for row in rows]
    return [f"{title}.", _table(heads, lines)] if lines else []


def _line(run, row):
    other = run.best_other(row)
    return [
        row.op, row.shape, row.dtype, row.block, row.mask, row.variant, f"{row.us:,.2f}",
        row.spread, f"{row.gb_per_s:,.0f}",
        f"{row.percent_of_copy:.0f}",
        f"{other.implementation} {other.us / row.us:.1f}x" if other else "",
    ]  # fmt: skip


def _channels(run):
    """Channel counts and a rectangular block: GB/s, and time per byte over the even one's."""
    found = {}
    for verdict in evaluate(run.rows):
        if verdict.row.suite == "channels":
            found[verdict.row] = f"{verdict.value:.2f}"
    rows = [row for row in run.ours if row.suite == "channels"]
    heads = ["Op", "Image", "Type", "Block", "Variant", "us", "GB/s", "% of copy", "time per byte"]
    lines = [
        [row.op, row.shape, row.dtype, row.block, row.variant, f"{row.us:,.1f}",
         f"{row.gb_per_s:,.0f}", f"{row.percent_of_copy:.0f}", found.get(row, "1")]
        for row in rows
    ]  # fmt: skip
    title = f"Channel counts, everything active. Time per byte: 1 is {EVEN}, block {EVEN_BLOCK}."
    return [title, _table(heads, lines)] if lines else []


def _host(run, suite, title):
    rows = [row for row in run.rows if row.suite == suite]
    lines = [
        [row.op, row.variant, row.implementation, f"{row.us:,.2f}",
         row.spread, row.timed_by, row.note]
        for row in rows
    ]  # fmt: skip
    heads = ["Op", "Call", "By", "us", "p10..p90", "Timed by", ""]
    return [title, _table(heads, lines)] if lines else []


def _cpu(path, base):
    """Ratios of times in a run on a CPU."""
    ratios = read(path, Ratio)
    first = ratios[0]
    head = f"### NumPy arrays: {first.cpu}\n\nPyTorch {first.torch}, NumPy {first.numpy}, commit "
    head += f"{first.commit}. Rows: [{path.name}]({_link(path, base)})."
    about = (
        "Our time over that of the fastest of the others, in the same rounds of one run: below 1,\n"
        "we are faster. PyTorch has a thread for each core; this library has one in all."
    )
    lines = [
        [*group, f"{met} of {count}", f"{median:.2f}", f"{worst.ratio:.2f}", _name(worst)]
        for group, (met, count, median, worst) in summary(ratios).items()
    ]
    heads = ["Against", "Op", "Variant", "1 or below", "Median", "Worst", "The worst"]
    parts = [head, about, _table(heads, lines)]
    lines = [[_name(r), f"{r.ratio:.2f}", r.implementation] for r in slower(ratios)]
    heads = ["PyTorch from the same inputs is faster", "Ratio", "By"]
    return [*parts, _table(heads, lines)] if lines else parts


def _sites(folder, base):
    """Ratios of features at sites in runs on a CPU, one table for each file."""
    parts = []
    for path in (folder / name for name in SITE_FILES if (folder / name).is_file()):
        ratios = read(path, Ratio)
        groups = {}
        for r in ratios:
            groups.setdefault((r.op, r.variant, r.implementation, r.note), {})[r.shape] = r.ratio
        shapes = list(dict.fromkeys(r.shape for r in ratios))
        lines = [
            [*group, *(f"{found[shape]:.2f}" if shape in found else "" for shape in shapes)]
            for group, found in groups.items()
        ]
        first = ratios[0]
        parts.append(
            f"At sites, our time over another's, {first.cpu}, PyTorch {first.torch}, commit "
            f"{first.commit}. Rows: [{path.name}]({_link(path, base)})."
        )
        parts.append(_table(["Op", "Variant", "Against", "", *shapes], lines))
    return parts


def _name(row):
    parts = [row.op, row.shape, row.dtype, f"block {row.block}", row.mask, row.variant]
    if row.op == "network":
        parts = [row.suite, row.shape, row.dtype, f"{row.density:.0%} of the blocks", row.variant]
    elif row.op == "site_network":
        parts = [row.suite, row.variant]
    return " ".join(part for part in parts if part)


def _table(heads, lines):
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def _link(path, base):
    return Path(os.path.relpath(Path(path).resolve(), base)).as_posix()


if __name__ == "__main__":
    sys.exit(main())
