"""The progress bar: on a terminal, once the work takes long, and gone at the end."""

import io

import pytest

from sbnet_cupy.demo.progress import Progress


@pytest.fixture(autouse=True, scope="module")
def _extra(require):
    require("demo")


def shown(*, terminal, delay, wait, error=None):
    """What the bar writes while a step runs."""
    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    try:
        with Progress(console, delay=delay) as progress:
            progress.step("reading", of=2)
            if wait:
                progress._timer.join()
            progress.part(0.5)
            if error:
                raise error
            progress.step("drawing [a file].png")
    except KeyboardInterrupt:
        assert error
    return console.file.getvalue()


def test_the_bar_says_what_is_done():
    assert "drawing [a file].png" in shown(terminal=True, delay=0, wait=True)


@pytest.mark.parametrize(
    ("terminal", "delay", "wait"), [(True, 1000, False), (False, 0, True), (False, 1000, False)]
)
def test_no_bar_for_short_work_and_where_there_is_no_terminal(terminal, delay, wait):
    assert shown(terminal=terminal, delay=delay, wait=wait).strip() == ""


def test_the_bar_is_gone_after_an_interrupt():
    text = shown(terminal=True, delay=0, wait=True, error=KeyboardInterrupt())
    show_cursor, erase_line = "\x1b[?25h", "\x1b[2K"
    assert text.endswith(erase_line) or erase_line in text[text.rindex(show_cursor) :]
