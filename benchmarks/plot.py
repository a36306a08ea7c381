"""Draws the pictures of a folder of results: ``python benchmarks/plot.py FOLDER...``."""

import sys
from pathlib import Path

from _rows import OURS, read

INK, MUTED, GRID = "#1f2933", "#66727f", "#e4e8ec"
ACCENT, OTHER = "#0b6fb8", "#b6bfc9"
PEERS = ["#d9822b", "#4c9a5f", "#a2589b", "#8a7a55", "#c0504d"]
MARKS = ["s", "^", "D", "v", "P"]
SWEEP_FILES = {"sparse_gather": "density_gather.png", "sparse_scatter": "density_scatter.png"}
STAGES_FILE = "stages.png"
OP_NAMES = {"sparse_gather": "gather", "sparse_scatter": "scatter", "reduce_mask": "reduce_mask"}


def main(arguments=None):
    """Draw the pictures of the folders that are named, or of all results."""
    results = Path(__file__).resolve().parent / "results"
    folders = list(map(Path, sys.argv[1:] if arguments is None else arguments))
    for folder in folders or sorted(path for path in results.glob("*") if path.is_dir()):
        for line in draw(folder):
            print(line)
    return 0


def read_folder(folder):
    """Return all rows of a folder's CSV files."""
    return [row for path in sorted(Path(folder).glob("*.csv")) for row in read(path)]


def draw(folder):
    """Draw what the rows of a folder allow; return a line about each picture."""
    rows, lines = read_folder(folder), []
    for op, name in SWEEP_FILES.items():
        swept = [row for row in rows if (row.op, row.suite) == (op, "density") and row.blocks]
        swept = [row for row in swept if row.variant == "plain"]
        if swept:
            copy = [r for r in rows if r.op == "copy"]
            lines.append(_save(_sweep(swept, copy[0].gb_per_s if copy else None), folder, name))
    compared = [row for row in rows if row.original_us]
    if compared:
        lines.append(_save(_stages(compared), folder, STAGES_FILE))
    return lines


def _save(figure, folder, name):
    path = Path(folder) / name
    figure.savefig(path, dpi=110, facecolor="white")
    return f"drew {path}"


def _figure(width, height, **options):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, 2, **options)
    for axis in axes:
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.spines["bottom"].set_color(MUTED)
        axis.tick_params(colors=MUTED, labelsize=9, length=0)
        axis.set_axisbelow(True)
    return figure, axes


def _titles(figure, title, under):
    """Set a bold title with a muted line under it."""
    figure.suptitle(f"{title}\n", x=0.012, ha="left", color=INK, fontsize=13, weight="bold")
    figure.text(0.012, 0.955, under, va="top", color=MUTED, fontsize=9.5)


def _sweep(rows, copy):
    """Time and bandwidth against the share of active pixels; ours in front."""
    figure, (time, rate) = _figure(11, 4.6)
    names = sorted({row.implementation for row in rows}, key=lambda name: (name != OURS, name))
    for position, name in enumerate(names):
        line = sorted((r.density, r.us, r.gb_per_s) for r in rows if r.implementation == name)
        density, us, gb_per_s = zip(*line, strict=True)
        ours = name == OURS
        style = {
            "color": ACCENT if ours else PEERS[(position - 1) % len(PEERS)],
            "marker": "o" if ours else MARKS[(position - 1) % len(MARKS)],
            "lw": 2.4 if ours else 1.3,
            "ms": 5.5 if ours else 4,
            "zorder": 3 if ours else 2,
        }
        percent = [100 * value for value in density]
        time.plot(percent, us, label=name, **style)
        rate.plot(percent, gb_per_s, **style)
    if copy:
        rate.axhline(copy, color=INK, lw=1, ls=(0, (4, 3)), zorder=1)
        rate.text(100, copy * 0.985, "copy", color=INK, fontsize=9, ha="right", va="top")
    time.set_yscale("log")
    time.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    rate.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    rate.set_ylim(bottom=0)
    for axis, what in ((time, "us per call"), (rate, "GB/s, block bytes read and written")):
        axis.grid(axis="y", color=GRID, lw=0.8)
        axis.set_title(what, loc="left", fontsize=10, color=INK)
        axis.set_xlabel("active pixels, %", color=MUTED, fontsize=9)
    figure.legend(
        loc="outside lower left", ncols=min(len(names), 5), frameon=False, fontsize=9,
        labelcolor=INK,
    )  # fmt: skip
    first = rows[0]
    what = f"{first.shape} {first.dtype}, block {first.block}, masks of blobs; {first.gpu}"
    _titles(figure, f"{first.op} by density", what)
    return figure


def _stages(rows):
    """Bars: the original's kernels and ours on the same stages; reduce_mask apart."""
    copies = [row for row in rows if row.op != "reduce_mask"]
    listing = [row for row in rows if row.op == "reduce_mask"]
    tallest = max(len(copies), len(listing))
    figure, axes = _figure(12, 1.7 + 0.27 * tallest)
    for axis, part, title in zip(
        axes, (copies, listing), ("gather and scatter", "reduce_mask, float32"), strict=True
    ):
        _bars(axis, part, tallest, title)
    _titles(
        figure,
        "Stages of the paper, 10% of the pixels active: us per call",
        f"original SBNet kernels (grey) and {OURS} (blue, with times faster); {rows[0].gpu}",
    )
    return figure


def _bars(axis, rows, tallest, title):
    places = range(len(rows))
    axis.barh(places, [row.original_us for row in rows], height=0.76, color=OTHER)
    axis.barh(places, [row.us for row in rows], height=0.4, color=ACCENT)
    axis.set_yticks(list(places), [_bar_label(row) for row in rows], color=INK, fontsize=8.5)
    axis.set_ylim(tallest - 0.4, -0.6)
    axis.set_xscale("symlog", linthresh=10)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.grid(axis="x", color=GRID, lw=0.8)
    axis.set_title(title, loc="left", fontsize=10, color=INK)
    for place, row in zip(places, rows, strict=True):
        axis.annotate(
            f"{row.ratio_to_original:.1f}x", (max(row.original_us, row.us), place), (4, 0),
            textcoords="offset points", va="center", fontsize=8.5, color=INK,
        )  # fmt: skip


def _bar_label(row):
    image = "x".join(row.shape.split("x")[1:])
    block = row.block.split("x")[0]
    variant = "" if row.op == "reduce_mask" else f"{OP_NAMES[row.op]} {row.variant}, "
    return f"{variant}{image}, block {block}"


if __name__ == "__main__":
    sys.exit(main())
