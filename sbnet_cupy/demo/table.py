"""The demo's table on the terminal, in a narrow form where the terminal is narrow."""

import os

from .report import verdict

PIPED_WIDTH = 120  # columns, where no terminal says how wide it is
UNLIMITED = 10_000


def print_table(report, device):
    """Print the comparison as a table that fits the terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    table = _wide(report, device)
    if width_of(table, console) > console.width:
        table = _narrow(report, device)
    with console.capture() as captured:
        console.print(table)
    print(captured.get(), end="")  # by print, which raises where a pipe is closed


def width_of(table, console):
    """Return the number of columns that a table takes if nothing in it is folded."""
    return table.__rich_measure__(console, console.options.update(width=UNLIMITED)).maximum


def _wide(report, device):
    """Return a table with a column for each way to compute."""
    table = _table(report, device)
    heads = _heads(report.result)
    for head in ("", *heads):
        table.add_column(head, justify="right" if head else "left")
    for label, cells in _rows(report):
        table.add_row(label, *(cells.get(head, "") for head in heads))
    return table


def _narrow(report, device):
    """Return a table of two columns, with a line for each way to compute."""
    table = _table(report, device)
    table.show_header = False
    table.add_column("", overflow="fold")
    table.add_column("", justify="right", overflow="fold")
    for label, cells in _rows(report):
        if len(cells) == 1:
            table.add_row(label, *cells.values())
        else:
            table.add_row(label, "")
            for head, cell in cells.items():
                table.add_row(f"  {head}", cell)
    return table


def _table(report, device):
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    return Table(
        title=escape(f"{report.name}, {report.sizes()}, on {device}\n{report.task}"),
        caption=verdict(report.result),
        box=box.SIMPLE_HEAD,
        title_style="bold",
        caption_style="green" if report.result.agrees else "bold red",
    )


def _heads(result):
    peer = [_peer_head(result.peer)] if result.peer else []
    return ["dense", *peer, "block-sparse"]


def _peer_head(peer):
    return f"dense, {peer.name}"


def _rows(report):
    """Return the rows: a label, and the cells by the head of their column."""
    result = report.result
    active, total = result.blocks
    tile = " x ".join(map(str, result.tile))
    times = {"dense": result.dense_ms, "block-sparse": result.sparse_ms}
    ratios = {"dense": result.dense_ms / result.whole_sparse_ms}
    if result.peer and result.peer.ms is not None:
        head = _peer_head(result.peer)
        times = {"dense": result.dense_ms, head: result.peer.ms, "block-sparse": result.sparse_ms}
        ratios[head] = result.peer.ms / result.whole_sparse_ms
    return [
        (
            f"blocks computed ({tile} pixels)",
            {"dense": "all", "block-sparse": f"{active:,} of {total:,} ({active / total:.1%})"},
        ),
        ("time: list the blocks", {"block-sparse": _ms(result.list_ms)}),
        ("time: convolve", {head: _ms(ms) for head, ms in times.items()}),
        *_peer_rows(result),
        ("dense time / block-sparse time", {head: f"{r:.2f}" for head, r in ratios.items()}),
        *((label, _cells(dense, sparse)) for label, dense, sparse in report.rows),
        ("largest difference in active blocks", {"block-sparse": f"{result.error:.2g}"}),
    ]


def _cells(dense, sparse):
    """Return the cells that are not empty; whole numbers with commas."""
    cells = {"dense": dense, "block-sparse": sparse}
    texts = {head: f"{c:,}" if isinstance(c, int) else c for head, c in cells.items()}
    return {head: text for head, text in texts.items() if text}


def _peer_rows(result):
    """Say which of PyTorch's layouts was faster, or why there is no time."""
    if result.peer is None:
        return []
    head = _peer_head(result.peer)
    if result.peer.ms is None:
        return [("... not timed: differs from dense by", {head: f"{result.peer.error:.2g}"})]
    return [("... in the faster layout", {head: result.peer.layout})]


def _ms(value):
    return f"{value:,.2f} ms" if value < 1000 else f"{value:,.0f} ms"
