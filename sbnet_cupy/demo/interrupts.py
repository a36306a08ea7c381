"""Hold Ctrl-C back while something runs that must not be interrupted."""

import contextlib
import signal


@contextlib.contextmanager
def held_back():
    """Raise KeyboardInterrupt at the end of the context if Ctrl-C was pressed inside.

    PyTorch's import needs it: interrupted in the middle, it aborts the process.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # whoever set another handler knows better
        return
    pressed = []
    try:
        signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    except ValueError:  # only the main thread may set handlers, and only it is interrupted
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt
