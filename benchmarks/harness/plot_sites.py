"""The pictures of features at sites: convolutions by channels, and blocks against sites."""

from benchmarks.harness.plot_style import ACCENT, INK, MUTED, PEERS, dress, figure_of, log_ticks
from benchmarks.harness.rows import OURS
from benchmarks.harness.target_numbers import SITE_CONVOLUTIONS

CONVOLUTIONS_FILE = "site_convolutions.png"
BLOCKS_OR_SITES_FILE = "blocks_or_sites.png"
FORWARD = ("forward, weights packed", "forward")  # the first that was timed

_BLOBS = "400x700"  # of blobs, the image of which all channels are timed
_TARGETS = {
    scene: times for (scene, image), times in SITE_CONVOLUTIONS.items() if image in ("", _BLOBS)
}


def pictures(rows):
    """Yield (figure, file) of what the rows of a folder allow."""
    rows = [row for row in rows if row.dtype == "float16"]
    timed = [r for r in rows if r.op == "submanifold_conv" and r.suite in _TARGETS]
    timed = [r for r in timed if not r.suite.startswith("blobs") or r.shape.startswith(_BLOBS)]
    if timed:
        yield _convolutions(timed), CONVOLUTIONS_FILE
    rows = [row for row in rows if row.implementation == OURS]
    compared = [r for r in rows if (r.op, r.suite) == ("blocks_or_sites", "clustered")]
    if compared:
        yield _blocks_or_sites(compared), BLOCKS_OR_SITES_FILE


def forward_times(rows, names=FORWARD, implementation=OURS):
    """Return {channels: microseconds} of the forward pass of a scene, its weights packed before."""
    times = {}
    for name in reversed(names):
        for row in rows:
            channels, _, what = row.variant.partition(" channels, ")
            if (what, row.implementation) == (name, implementation):
                times[int(channels)] = row.us
    return dict(sorted(times.items()))


def _convolutions(rows):
    scenes = {name: [r for r in rows if r.suite == name] for name in _TARGETS}
    scenes = {name: found for name, found in scenes.items() if forward_times(found)}
    under = (
        f"3x3x3, of blobs 3x3, float16, the convolution alone: ours in a graph, of spconv its "
        f"kernels without the time between them; {rows[0].gpu}"
    )
    figure = figure_of(11, 7.4, "submanifold_conv by channels: us per call", under)
    axes = _panels(figure, len(scenes), 2)
    for axis, (name, found) in zip(axes, scenes.items(), strict=True):
        dress(axis, f"{name.split()[0]}, {found[0].shape.partition(', ')[2]}", "y")
        lines = [
            (OURS, forward_times(found), {"color": ACCENT, "marker": "o", "lw": 2.4, "ms": 5.5}),
            ("spconv 2.3.8", forward_times(found, ("forward",), "spconv"),
             {"color": PEERS[0], "marker": "s", "lw": 1.3, "ms": 4}),
            ("target", _TARGETS[name], {"color": INK, "marker": "_", "lw": 0, "ms": 12}),
        ]  # fmt: skip
        for label, times, style in lines:
            axis.plot(list(times), list(times.values()), label=label, **style)
        axis.set_xscale("log")
        axis.set_yscale("log")
        log_ticks(axis.yaxis)
        log_ticks(axis.xaxis)
        axis.set_xticks(list(forward_times(found)))
        axis.set_xlabel("channels", color=MUTED, fontsize=9)
    _legend(figure, axes[0])
    return figure


def _blocks_or_sites(rows):
    shapes = dict.fromkeys(row.shape for row in rows)
    under = f"one 3x3 convolution, float16, a tenth of the blocks of 16x16 active; {rows[0].gpu}"
    figure = figure_of(11, 7.4, "Blocks or sites, by how full active blocks are: us", under)
    axes = _panels(figure, len(shapes), 2)
    names = {
        "stack_conv2d": ("at blocks", ACCENT, "o"),
        "submanifold_conv": ("at sites", PEERS[1], "^"),
    }
    for axis, shape in zip(axes, shapes, strict=True):
        dress(axis, shape.removeprefix("1x"), "y")
        for op, (label, color, marker) in names.items():
            found = sorted(
                (100 * r.density, r.us) for r in rows if (r.shape, r.variant) == (shape, op)
            )
            style = {"color": color, "marker": marker, "lw": 1.8, "ms": 4.5}
            axis.plot(*zip(*found, strict=True), label=label, **style)
        axis.set_ylim(bottom=0)
        axis.set_xlim(0, 102)
        axis.set_xlabel("pixels of active blocks that are sites, %", color=MUTED, fontsize=9)
    _legend(figure, axes[0])
    return figure


def _panels(figure, count, deep=1):
    """Return axes of panels side by side, in rows."""
    height = figure.get_figheight()
    grid = {
        "left": 0.05, "right": 0.985, "bottom": 0.95 / height, "top": 1 - 1.05 / height,
        "wspace": 0.16, "hspace": 0.45,
    }  # fmt: skip
    deep = min(deep, count)
    axes = list(figure.subplots(deep, -(-count // deep), squeeze=False, gridspec_kw=grid).flat)
    for axis in axes[count:]:
        axis.set_visible(False)
    return axes[:count]


def _legend(figure, axis):
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(0.01, 0.005), ncols=3, frameon=False,
        fontsize=9, labelcolor=INK,
    )  # fmt: skip
