"""Colours and plain axes of the pictures."""

INK, MUTED, GRID = "#1f2933", "#66727f", "#e4e8ec"
ACCENT, OTHER = "#0b6fb8", "#b6bfc9"
PEERS = ["#d9822b", "#4c9a5f", "#a2589b", "#8a7a55", "#c0504d", "#4a5a78"]
SLOWER = "#c0392b"


def figure_of(width, height, title, under):
    """Return a figure with a bold title and a muted line under it, and room for axes below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    left = 0.15 / width
    figure.text(left, 1 - 0.33 / height, title, color=INK, fontsize=13.5, weight="bold")
    figure.text(left, 1 - 0.6 / height, under, color=MUTED, fontsize=9.5)
    return figure


def dress(axis, title, grid):
    """Leave of an axis what tells something."""
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(MUTED)
    axis.tick_params(which="both", colors=MUTED, labelsize=9, length=0)
    axis.set_axisbelow(True)
    axis.grid(axis=grid, color=GRID, lw=0.8)
    axis.set_title(title, loc="left", fontsize=10, color=INK)


def log_ticks(axis):
    """Label a logarithmic axis with plain numbers: 1, 2, 5, 10..."""
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
