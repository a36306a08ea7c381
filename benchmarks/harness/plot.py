"""Draws the pictures of a folder of results: ``python -m benchmarks.harness.plot FOLDER...``."""

import argparse
import sys
from pathlib import Path

from benchmarks.harness import plot_sites
from benchmarks.harness.plot_style import (
    ACCENT,
    INK,
    MUTED,
    OTHER,
    PEERS,
    SLOWER,
    dress,
    figure_of,
    log_ticks,
)
from benchmarks.harness.rows import OURS, RATIOS_FILE, read

MARKS = ["s", "^", "D", "v", "P", "X"]
SWEEP_FILES = {"sparse_gather": "density_gather.png", "sparse_scatter": "density_scatter.png"}
FUSED_FILES = {
    "fused_conv": "density_fused_conv.png",
    "fused_bottleneck": "density_fused_bottleneck.png",
}
NETWORKS_FILE = "density_networks.png"
STAGES_FILE = "stages.png"
OP_NAMES = {"sparse_gather": "gather", "sparse_scatter": "scatter", "reduce_mask": "reduce_mask"}


def main(arguments=None):
    """Draw the pictures of the folders that are named, or of all results."""
    results = Path(__file__).resolve().parents[1] / "results"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, help="[all of benchmarks/results]")
    folders = parser.parse_args(arguments).folders
    for folder in folders or sorted(path for path in results.glob("*") if path.is_dir()):
        for line in draw(folder):
            print(line)
    return 0


def read_folder(folder):
    """Return all rows of a folder's CSV files."""
    paths = sorted(path for path in Path(folder).glob("*.csv") if path.name != RATIOS_FILE)
    return [row for path in paths for row in read(path)]


def draw(folder):
    """Draw what the rows of a folder allow; return a line about each picture."""
    rows, lines = read_folder(folder), []
    for op, name in SWEEP_FILES.items():
        swept = [row for row in rows if (row.op, row.suite) == (op, "density") and row.blocks]
        swept = [row for row in swept if row.variant == "plain"]
        if swept:
            copy = [r for r in rows if r.op == "copy"]
            lines.append(_save(_sweep(swept, copy[0].gb_per_s if copy else None), folder, name))
    for op, name in FUSED_FILES.items():
        swept = [row for row in rows if (row.op, row.suite) == (op, "density") and row.dense_us]
        if swept:
            lines.append(_save(_crossover(swept), folder, name))
    networks = _panels_of_networks(rows)
    if networks:
        lines.append(_save(_networks(networks), folder, NETWORKS_FILE))
    compared = [row for row in rows if row.original_us]
    if compared:
        lines.append(_save(_stages(compared), folder, STAGES_FILE))
    lines += [_save(figure, folder, name) for figure, name in plot_sites.pictures(rows)]
    return lines


def _save(figure, folder, name):
    path = Path(folder) / name
    figure.savefig(path, dpi=100, facecolor="white", pil_kwargs={"optimize": True})
    return f"drew {path}"


def _sweep(rows, copy):
    """Time and bandwidth against the share of active blocks; ours in front."""
    first, every = rows[0], max(row.blocks for row in rows)
    what = f"{first.shape} {first.dtype}, block {first.block}, masks of blobs; {first.gpu}"
    figure = figure_of(11, 5, f"{first.op} by density", what)
    time, rate = figure.subplots(
        1,
        2,
        gridspec_kw={"left": 0.05, "right": 0.985, "bottom": 0.235, "top": 0.8, "wspace": 0.13},
    )
    dress(time, "us per call", "y")
    dress(rate, "GB/s, block bytes read and written", "y")
    names = sorted({row.implementation for row in rows}, key=lambda name: (name != OURS, name))
    for position, name in enumerate(names):
        points = [(r.blocks / every, r.us, r.gb_per_s) for r in rows if r.implementation == name]
        share, us, gb_per_s = zip(*sorted(points), strict=True)
        ours = name == OURS
        style = {
            "color": ACCENT if ours else PEERS[(position - 1) % len(PEERS)],
            "marker": "o" if ours else MARKS[(position - 1) % len(MARKS)],
            "lw": 2.4 if ours else 1.3,
            "ms": 5.5 if ours else 4,
            "zorder": 3 if ours else 2,
        }
        percent = [100 * value for value in share]
        time.plot(percent, us, label=name, **style)
        rate.plot(percent, gb_per_s, **style)
    if copy:
        rate.axhline(copy, color=INK, lw=1, ls=(0, (4, 3)), zorder=1)
        edge = rate.get_yaxis_transform()
        rate.text(1, copy, "copy", transform=edge, color=INK, fontsize=9, ha="right", va="bottom")
    time.set_yscale("log")
    log_ticks(time.yaxis)
    rate.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    rate.set_ylim(bottom=0)
    for axis in (time, rate):
        axis.set_xlim(0, 102)
        axis.set_xlabel("active blocks, %", color=MUTED, fontsize=9)
    figure.legend(
        loc="lower left", bbox_to_anchor=(0.01, 0.005), ncols=4, frameon=False, fontsize=9,
        labelcolor=INK,
    )  # fmt: skip
    return figure


def _crossover(rows):
    """Time against the share of active blocks, under the dense time: a panel for each image."""
    panels = {}
    for row in rows:
        panels.setdefault(row.shape, []).append(row)
    first = rows[0]
    what = f"{first.dtype}, masks of a top-left rectangle; {first.gpu}"
    figure = figure_of(11, 4.6, f"{first.op} by density, next to the best dense time", what)
    axes = figure.subplots(
        1, len(panels), squeeze=False,
        gridspec_kw={"left": 0.05, "right": 0.985, "bottom": 0.21, "top": 0.78, "wspace": 0.13},
    )[0]  # fmt: skip
    for axis, (shape, found) in zip(axes, panels.items(), strict=True):
        _under_dense(axis, shape, found)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(0.01, 0.005), ncols=3, frameon=False,
        fontsize=9, labelcolor=INK,
    )  # fmt: skip
    return figure


def _panels_of_networks(rows):
    """Return the rows of each network and batch that was swept in float16: none on a CPU."""
    panels = {}
    for row in rows:
        if row.op == "network" and row.dense_us and row.dtype == "float16":
            panels.setdefault(f"{row.suite}, {row.variant}", []).append(row)
    return {name: found for name, found in panels.items() if len(found) > 3}


def _networks(panels):
    """Time of whole networks against the share of active blocks: a panel for each and its batch."""
    deep = -(-len(panels) // 3)
    height = 1.1 + 2.9 * deep
    first = next(iter(panels.values()))[0]
    what = f"CUDA graphs with the mask in them, masks of blobs; {first.gpu}"
    figure = figure_of(11, height, "Whole networks by density, next to the best dense time", what)
    axes = figure.subplots(
        deep, min(len(panels), 3), squeeze=False,
        gridspec_kw={
            "left": 0.05, "right": 0.985, "bottom": 0.85 / height, "top": 1 - 1.1 / height,
            "wspace": 0.16, "hspace": 0.52,
        },
    ).flat  # fmt: skip
    for axis, (name, found) in zip(axes, panels.items(), strict=False):
        _under_dense(axis, name, found, separator="\n")
    for axis in figure.axes[len(panels) :]:
        axis.set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(0.01, 0.005), ncols=3, frameon=False,
        fontsize=9, labelcolor=INK,
    )  # fmt: skip
    return figure


def _under_dense(axis, shape, rows, separator=" "):
    every, dense = max(row.blocks for row in rows), rows[0].dense_us
    dress(axis, f"{shape}: us per call;{separator}{crossover(rows)}", "y")
    for position, name in enumerate(sorted({r.implementation for r in rows})):
        found = sorted((100 * r.blocks / every, r.us) for r in rows if r.implementation == name)
        style = {"color": PEERS[0], "marker": MARKS[0], "lw": 1.3, "ms": 4}
        if name == OURS:
            style = {"color": ACCENT, "marker": "o", "lw": 2.4, "ms": 5.5}
        axis.plot(*zip(*found, strict=True), label=name, zorder=3 - position, **style)
    axis.axhline(dense, color=INK, lw=1, ls=(0, (4, 3)), zorder=1, label="dense, the best")
    axis.set_yscale("log")
    log_ticks(axis.yaxis)
    axis.set_xlim(0, 102)
    axis.set_xlabel("active blocks, %", color=MUTED, fontsize=9)


def crossover(rows):
    """Say up to which share of active blocks the op is faster than the best dense time."""
    every = max(row.blocks for row in rows)
    points = sorted((100 * r.blocks / every, r.us, r.dense_us) for r in rows if r.ours)
    before = None
    for share, us, dense in points:
        if us > dense:
            if before is None:
                return "dense is faster at every density"
            low, low_us = before
            return f"faster up to {low + (share - low) * (dense - low_us) / (us - low_us):.0f}%"
        before = share, us
    return "faster at every density"


def _stages(rows):
    """The original's kernels and ours on the same stages, each pair joined by a line."""
    parts = {op: [row for row in rows if row.op == op] for op in OP_NAMES}
    left = len(parts["sparse_gather"]) + len(parts["reduce_mask"]) + 3
    height = 1.5 + 0.27 * max(left, len(parts["sparse_scatter"]))
    under = f"grey: original SBNet kernels; blue: {OURS}, with times faster; {rows[0].gpu}"
    title = "Stages of the paper, float32, 10% of the pixels active: us per call"
    figure = figure_of(12, height, title, under)
    columns = figure.add_gridspec(
        1, 2, left=0.2, right=0.985, bottom=0.5 / height, top=1 - 1.05 / height, wspace=0.64
    )
    ratios = [max(len(parts[op]), 1) for op in ("sparse_gather", "reduce_mask")]
    upper = columns[0].subgridspec(2, 1, height_ratios=ratios, hspace=3.4 / left * 2)
    places = {"sparse_gather": upper[0], "reduce_mask": upper[1], "sparse_scatter": columns[1]}
    for op, place in places.items():
        if parts[op]:
            _pairs(figure.add_subplot(place), parts[op])
    return figure


def _pairs(axis, rows):
    dress(axis, OP_NAMES[rows[0].op], "x")
    places = range(len(rows))
    for place, row in zip(places, rows, strict=True):
        slower = row.ratio_to_original < 1
        axis.plot([row.us, row.original_us], [place] * 2, color=OTHER, lw=2.5, zorder=1)
        axis.annotate(
            f"{row.ratio_to_original:.1f}x", (max(row.original_us, row.us), place), (7, 0),
            textcoords="offset points", va="center", fontsize=8.5, color=SLOWER if slower else INK,
        )  # fmt: skip
    axis.scatter([row.original_us for row in rows], places, s=34, color=MUTED, zorder=2)
    axis.scatter([row.us for row in rows], places, s=48, color=ACCENT, zorder=3)
    axis.set_xscale("log")
    log_ticks(axis.xaxis)
    low, high = min(min(r.us, r.original_us) for r in rows), max(r.original_us for r in rows)
    axis.set_xlim(min(low / 1.3, 1), high * 1.6)
    axis.set_yticks(list(places), [_pair_label(row) for row in rows], color=INK, fontsize=8.5)
    axis.set_ylim(len(rows) - 0.4, -0.6)


def _pair_label(row):
    image = "x".join(row.shape.split("x")[1:])
    variant = "" if row.op == "reduce_mask" else f", {row.variant}"
    return f"{image}, block {row.block.split('x')[0]}{variant}"


if __name__ == "__main__":
    sys.exit(main())
