"""The table of a benchmark on the terminal; a list where the terminal is too narrow for it."""

UNLIMITED = 10_000  # columns
WORKLOAD = ("image", "type", "block", "mask", "variant")
NUMBERS = ("us", "p10..p90", "GB/s", "% copy", "x original", "x dense", "best other", "x")


def fitting(name, rows, console):
    """Return what to print for rows: a table, without its empty columns if need be, or a list."""
    lines = _lines(rows)
    heads = (*WORKLOAD, *NUMBERS)
    filled = [head for head in heads if any(line[head] for line in lines)]
    for chosen in (heads, filled):
        shown = _table(name, lines, chosen)
        options = console.options.update(width=UNLIMITED)
        if shown.__rich_measure__(console, options).maximum <= console.width:
            return shown
    return _list(name, lines)


def _lines(rows):
    """Return a line, cells by head, for each workload: our time, and the best of the others."""
    groups = {}
    for row in rows:
        groups.setdefault(row.workload, []).append(row)
    lines = []
    for group in groups.values():
        ours = [row for row in group if row.ours]
        others = [row for row in group if not row.ours]
        best = min(others, key=lambda row: row.us, default=None)
        lines += [_line(row, best) for row in ours or [best]]
    return lines


def _line(row, best):
    return {
        "image": row.shape,
        "type": row.dtype,
        "block": row.block,
        "mask": row.mask,
        "variant": row.variant,
        "us": f"{row.us:,.2f}",
        "p10..p90": row.spread,
        "GB/s": _number(row.gb_per_s, ",.0f"),
        "% copy": _number(row.percent_of_copy, ".0f"),
        "x original": _number(row.ratio_to_original, ".1f"),
        "x dense": _number(row.ratio_to_dense, ".1f"),
        "best other": f"{best.us:,.2f} {best.implementation}" if best else "",
        "x": f"{best.us / row.us:.1f}" if best else "",
    }


def _table(name, lines, heads):
    from rich import box
    from rich.table import Table

    shown = Table(title=name, box=box.SIMPLE_HEAD, title_style="bold", title_justify="left")
    for head in heads:
        if head in WORKLOAD:
            shown.add_column(head, overflow="fold")
        else:
            shown.add_column(head, justify="right", no_wrap=True)
    for line in lines:
        shown.add_row(*(line[head] for head in heads))
    return shown


def _list(name, lines):
    """Return the lines as paragraphs: the workload, and below it the numbers that there are."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    parts = [Text(name, style="bold")]
    for line in lines:
        parts.append(Text("  ".join(line[head] for head in WORKLOAD if line[head])))
        for heads in (NUMBERS[:-2], NUMBERS[-2:]):  # ours, and the best of the others
            text = "   ".join(f"{head}: {line[head]}" for head in heads if line[head])
            if text:
                parts.append(Padding(Text(text), (0, 0, 0, 4), expand=False))
    return Group(*parts)


def _number(value, form):
    return "" if value is None else format(value, form)
