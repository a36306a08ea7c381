"""The demo's table on the terminal and its picture file."""

from dataclasses import dataclass, field

import numpy as np

from .compare import Comparison
from .inputs import DemoError

BACKGROUND, INK, MUTED, ACCENT = "#0c0f16", "#e8eaf0", "#8b93a5", "#ffb454"
OFF = "#1b202b"  # blocks that are not computed
PANEL = 7.0  # inches


@dataclass(frozen=True)
class Report:
    """What one demo found: the comparison, and what to show of it."""

    name: str
    task: str
    picture: np.ndarray  # [H, W] or [H, W, 3]
    picture_label: str
    mask: object  # [H, W] bool
    mask_label: str
    response: object  # [H, W], of the block-sparse run
    response_label: str
    result: Comparison
    rows: list  # further rows of the table: (what, dense, block-sparse)
    points: object = field(default_factory=lambda: np.zeros((0, 2)))  # (row, column) to circle
    extent: tuple | None = None  # (y0, y1, x0, x1) in metres, for a grid seen from above


def print_table(report, device):
    """Print the comparison as a table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    result = report.result
    active, total = result.blocks
    h, w = report.mask.shape
    table = Table(
        title=f"{report.name}, {h} x {w}, on {device}\n{report.task}",
        caption=verdict(result),
        box=box.SIMPLE_HEAD,
        title_style="bold",
        caption_style="green" if result.agrees else "bold red",
    )
    table.add_column("")
    table.add_column("dense", justify="right")
    table.add_column("block-sparse", justify="right")
    tile = " x ".join(map(str, result.tile))
    share = f"{active:,} of {total:,} ({active / total:.1%})"
    rows = [
        (f"blocks computed ({tile} pixels)", "all", share),
        ("time: list the blocks", "", _ms(result.list_ms)),
        ("time: convolve", _ms(result.dense_ms), _ms(result.sparse_ms)),
        ("dense time / block-sparse time", "", f"{result.speedup:.2f}"),
        *report.rows,
        ("largest difference in active blocks", "", f"{result.error:.2g}"),
    ]
    for row in rows:
        table.add_row(*(f"{cell:,}" if isinstance(cell, int) else cell for cell in row))
    Console(highlight=False).print(table)


def verdict(result):
    """Say in one line whether the two runs agree."""
    if result.agrees:
        return f"Equal up to rounding, which explains {result.tolerance:.2g}."
    return f"DIFFERENT: rounding explains no more than {result.tolerance:.2g}."


def save_picture(report, path):
    """Write the four panels: picture with the active blocks, mask, response, difference."""
    from matplotlib.figure import Figure

    h, w = report.mask.shape
    height = min(max(PANEL * h / w, PANEL / 4), PANEL * 3)
    figure = Figure(figsize=(2 * PANEL + 2.25, 2 * height + 2.4), facecolor=BACKGROUND)
    total_w, total_h = figure.get_size_inches()
    axes = figure.subplots(
        2,
        2,
        gridspec_kw={
            "left": 0.5 / total_w,
            "right": 1 - 0.8 / total_w,
            "bottom": 0.5 / total_h,
            "top": 1 - 1.2 / total_h,
            "wspace": 0.95 / PANEL,
            "hspace": 0.7 / height,
        },
    ).ravel()
    panels = Panels(report)
    for axis, draw in zip(
        axes, (panels.picture, panels.mask, panels.response, panels.difference), strict=True
    ):
        draw(figure, axis)
    result = report.result
    active, total = result.blocks
    figure.text(
        0.5 / total_w,
        1 - 0.45 / total_h,
        f"{report.name}: {active:,} of {total:,} blocks computed ({active / total:.1%})",
        color=INK,
        fontsize=17,
        weight="bold",
    )
    figure.text(0.5 / total_w, 1 - 0.72 / total_h, report.task, color=MUTED, fontsize=12)
    try:
        figure.savefig(path, dpi=120, facecolor=BACKGROUND)
    except OSError as error:
        raise DemoError(f"--out: cannot write {path}: {error.strerror or error}") from error


class Panels:
    """The panels of the figure, drawn one on each axis."""

    def __init__(self, report):
        self.report = report
        self.inside = to_numpy(report.result.inside)[0]

    def picture(self, figure, axis):
        """Draw the picture, dimmed where no block is active, and the outline of the blocks."""
        pixels = displayable(self.report.picture)
        if pixels.ndim == 2:
            pixels = np.repeat(pixels[:, :, None], 3, axis=2)
        self._show(axis, np.where(self.inside[:, :, None], pixels, 0.5 * pixels))
        self._outline(axis)
        self._title(axis, self.report.picture_label + ", active blocks outlined")

    def mask(self, figure, axis):
        """Draw the mask over the blocks it makes active."""
        colors = _rgb(BACKGROUND, "#3a3f63", INK)
        levels = np.where(to_numpy(self.report.mask), 2, self.inside.astype(int))
        self._show(axis, colors[levels])
        self._title(axis, self.report.mask_label + ", in the blocks that it makes active")

    def response(self, figure, axis):
        """Draw the block-sparse response, with circles around what was found."""
        response = to_numpy(self.report.response)
        shown = np.ma.masked_array(response, ~self.inside)
        image = self._show(axis, shown, cmap="magma", vmin=0, vmax=self._highest(response, 99.7))
        points = to_numpy(self.report.points)
        axis.scatter(
            points[:, 1], points[:, 0], s=30, facecolors="none", edgecolors="#5ad1e6", lw=0.5
        )
        self._bar(figure, axis, image)
        self._title(axis, self.report.response_label)

    def difference(self, figure, axis):
        """Draw the absolute difference from the dense run, inside active blocks."""
        result = self.report.result
        difference = to_numpy(abs(result.dense - result.sparse).max(axis=3)[0])
        shown = np.ma.masked_array(difference, ~self.inside)
        highest = self._highest(difference, 99.97) if result.error else result.tolerance
        image = self._show(axis, shown, cmap="viridis", vmin=0, vmax=highest or 1)
        self._bar(figure, axis, image)
        self._title(axis, f"|block-sparse - dense|: at most {result.error:.2g}, grey: not computed")

    def _show(self, axis, values, **style):
        placed = {}
        if self.report.extent is not None:
            placed = {"extent": self.report.extent, "origin": "lower"}
        axis.set_facecolor(OFF)
        image = axis.imshow(values, interpolation="antialiased", **style, **placed)
        axis.spines[:].set_visible(False)
        if self.report.extent is None:
            axis.set(xticks=[], yticks=[])
        else:  # y grows to the left of one who looks along x
            axis.invert_xaxis()
            axis.tick_params(colors=MUTED, labelsize=8, length=2)
            axis.set_xlabel("y in m", color=MUTED, fontsize=8, labelpad=1)
            axis.set_ylabel("x in m", color=MUTED, fontsize=8, labelpad=1)
        return image

    def _outline(self, axis):
        """Draw the border between active and inactive blocks."""
        from matplotlib.collections import LineCollection

        axis.add_collection(LineCollection(self._borders(), colors=ACCENT, linewidths=0.5))

    def _borders(self):
        th, tw = self.report.result.tile
        h, w = self.inside.shape
        blocks = np.pad(self.inside[::th, ::tw], 1)
        rows, columns = np.nonzero(blocks[1:] != blocks[:-1])  # edges below block row - 1
        flat = np.stack([rows * th, (columns - 1) * tw, rows * th, columns * tw], axis=-1)
        rows, columns = np.nonzero(blocks[:, 1:] != blocks[:, :-1])
        upright = np.stack([(rows - 1) * th, columns * tw, rows * th, columns * tw], axis=-1)
        ends = np.concatenate([flat, upright]).reshape(-1, 2, 2)  # (row, column)
        ends = np.minimum(ends, (h, w)) - 0.5
        if self.report.extent is not None:
            y0, y1, x0, x1 = self.report.extent
            ends = (ends + 0.5) * ((x1 - x0) / h, (y1 - y0) / w) + (x0, y0)
        return ends[:, :, ::-1]  # (column, row), as matplotlib has it

    def _highest(self, values, percent):
        """Return a percentile inside the active blocks, or 1 where there is nothing above 0."""
        inside = values[self.inside]
        return (max(np.percentile(inside, percent), 0) if inside.size else 0) or 1

    def _title(self, axis, text):
        axis.set_title(text, color=INK, fontsize=12, loc="left")

    def _bar(self, figure, axis, image):
        beside = axis.inset_axes((1.012, 0, 0.02, 1))
        bar = figure.colorbar(image, cax=beside, format=lambda value, _: f"{value:.3g}")
        bar.outline.set_visible(False)
        bar.ax.tick_params(colors=MUTED, labelsize=8, length=2)


def to_numpy(array):
    """Bring an array to the host."""
    return array if isinstance(array, np.ndarray) else array.get()


def displayable(pixels):
    """Scale a picture to 0..1 for the screen, and brighten a dark one."""
    values = np.nan_to_num(pixels.astype(float), posinf=0, neginf=0)
    low, high = (0, 255) if pixels.dtype == np.uint8 else np.percentile(values, (0.1, 99.9))
    values = np.clip((values - low) / ((high - low) or 1), 0, 1)
    return values**0.5 if np.median(values) < 0.1 else values


def _rgb(*colors):
    from matplotlib.colors import to_rgb

    return np.array([to_rgb(color) for color in colors])


def _ms(value):
    return f"{value:,.2f} ms"
