"""A progress bar that appears on the terminal once the work has taken two seconds."""

import threading

DELAY = 2.0  # seconds


class Progress:
    """Shows which step is running. Use as a context; at its end the bar is gone.

    The bar goes to standard error, and only to a terminal.
    """

    def __init__(self, console=None, delay=DELAY):
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        console = console or Console(stderr=True)
        look = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        self._bar = Bar(
            *look,
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)
        self._done = -1
        self._timer = threading.Timer(delay, self._bar.start)
        self._timer.daemon = True

    def __enter__(self):
        self._timer.start()
        return self

    def __exit__(self, *_):
        self._timer.cancel()
        self._timer.join()
        if not self._bar.disable:  # before 14.3 rich would write an empty line to a file
            self._bar.stop()

    def step(self, text, *, of=None):
        """Begin the next step; ``of`` is the number of all steps, once it is known."""
        self._done += 1
        total = {} if of is None else {"total": of}
        self._bar.update(self._task, description=_plain(text), completed=self._done, **total)

    def part(self, share):
        """Say what share of the step is done, 0 to 1."""
        self._bar.update(self._task, completed=self._done + share)


def _plain(text):
    """Protect text, such as a file's name, from being read as markup."""
    from rich.markup import escape

    return escape(text)
