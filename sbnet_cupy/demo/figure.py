"""The demo's picture file: four panels."""

import numpy as np

from .output import cannot_write
from .reduction import block_max, block_mean

BACKGROUND, INK, MUTED, ACCENT = "#0c0f16", "#e8eaf0", "#8b93a5", "#ffb454"
OFF = "#1b202b"  # blocks that are not computed
PANEL = 7.0  # inches
MOST_DRAWN = 1680  # pixels along a side: twice what a panel has at 120 per inch; more are reduced


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
    task = f"{report.task}; {report.sizes()}" if report.reduced_from else report.task
    figure.text(0.5 / total_w, 1 - 0.72 / total_h, task, color=MUTED, fontsize=12)
    try:
        figure.savefig(path, dpi=120, facecolor=BACKGROUND)
    except OSError as error:
        raise cannot_write(path, error) from error


class Panels:
    """The panels of the figure, drawn one on each axis; large images are reduced for it."""

    def __init__(self, report):
        self.report = report
        self.inside = to_numpy(report.result.inside)[0]
        self.factor = -(-max(self.inside.shape) // MOST_DRAWN)
        self.small_inside = block_max(self.inside, self.factor)

    def picture(self, figure, axis):
        """Draw the picture, dimmed where no block is active, and the outline of the blocks."""
        picture = self.report.picture
        small = block_mean(picture, self.factor)
        if picture.dtype == np.uint8:
            small = small.round().astype(np.uint8)
        pixels = displayable(small)
        if pixels.ndim == 2:
            pixels = np.repeat(pixels[:, :, None], 3, axis=2)
        self._show(axis, np.where(self.small_inside[:, :, None], pixels, 0.5 * pixels))
        self._outline(axis)
        self._title(axis, self.report.picture_label + ", active blocks outlined")

    def mask(self, figure, axis):
        """Draw the mask over the blocks it makes active."""
        colors = _rgb(BACKGROUND, "#3a3f63", INK)
        mask = block_max(to_numpy(self.report.mask), self.factor)
        self._show(axis, colors[np.where(mask, 2, self.small_inside.astype(int))])
        self._title(axis, self.report.mask_label + ", in the blocks that it makes active")

    def response(self, figure, axis):
        """Draw the block-sparse response, with circles around what was found."""
        response = to_numpy(self.report.response)
        highest = self._highest(response, 99.7)
        image = self._show(axis, self._active(response), cmap="magma", vmin=0, vmax=highest)
        points = to_numpy(self.report.points)
        axis.scatter(
            points[:, 1], points[:, 0], s=30, facecolors="none", edgecolors="#5ad1e6", lw=0.5
        )
        self._bar(figure, axis, image)
        self._title(axis, self.report.response_label)

    def difference(self, figure, axis):
        """Draw the absolute difference from the dense run, inside active blocks."""
        result = self.report.result
        difference = to_numpy(result.difference)
        highest = self._highest(difference, 99.97) if result.error else result.tolerance
        shown = self._active(difference)
        image = self._show(axis, shown, cmap="viridis", vmin=0, vmax=highest or 1)
        self._bar(figure, axis, image)
        self._title(axis, f"|block-sparse - dense|: at most {result.error:.2g}, grey: not computed")

    def _active(self, values):
        """Reduce values to their maximum inside active blocks; elsewhere they are masked."""
        if self.factor > 1:
            values = block_max(np.where(self.inside, values, -np.inf), self.factor)
        return np.ma.masked_array(values, ~self.small_inside)

    def _show(self, axis, values, **style):
        h, w = self.inside.shape
        placed = {"extent": (-0.5, w - 0.5, h - 0.5, -0.5)}  # in pixels that were computed
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
