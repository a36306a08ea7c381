"""Rehearsals: work that launches next to nothing, and notes each kernel that is not loaded yet.

All are compiled when it is known which. What kernels would have written has any values, so that
nothing of a rehearsal may be kept but plans.
"""

import contextlib
import threading


class _Rehearsing(threading.local):
    now = None  # the Rehearsal that this thread is in


REHEARSING = _Rehearsing()


class Rehearsal:
    """What becomes of launches while a thread rehearses.

    Parameters
    ----------
    launched : sequence of str
        Files of kernels that may be launched.

    Attributes
    ----------
    kernels : dict
        Its keys are the kernels of other files that are not loaded: (stem, kernel, template).
    """

    def __init__(self, launched=()):
        self.launched, self.kernels = launched, {}

    def skips(self, stem, addresses):
        """Whether a kernel is not launched with arrays at some addresses; so if its file is None.

        It is asked at each launch.
        """
        return stem not in self.launched

    def allocated(self, tensor):
        """Note that memory was allocated for kernels to write to."""


@contextlib.contextmanager
def rehearsing(rehearsal):
    """Have the thread rehearse."""
    before, REHEARSING.now = REHEARSING.now, rehearsal
    try:
        yield
    finally:
        REHEARSING.now = before
