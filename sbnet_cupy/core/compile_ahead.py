"""Kernels of many launches compiled at once, by as many threads as there are processors.

A rehearsal is work that launches next to nothing: it notes each kernel that is not loaded yet, and
all are compiled when it is known which. What kernels would have written has any values, so that
nothing of a rehearsal may be kept but plans.
"""

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

from . import compile as compiling


class _Rehearsal(threading.local):
    kernels = None  # those of the rehearsal that this thread is in, as keys
    skips = None  # says whether a launch is left out, by its file and the addresses of its arrays
    launched = ()  # files of which it may not be left out


REHEARSAL = _Rehearsal()


@contextlib.contextmanager
def rehearsing(kernels, skips, launched=()):
    """Within this, the thread launches no kernels but some of the files ``launched``.

    ``kernels``, a dict, gets those of other files that are not loaded as keys (stem, kernel,
    template). ``skips`` is asked of each launch, with its stem and the addresses of its arrays: it
    returns whether to leave it out, which it must where the stem is None.
    """
    before = REHEARSAL.kernels, REHEARSAL.skips, REHEARSAL.launched
    REHEARSAL.kernels, REHEARSAL.skips, REHEARSAL.launched = kernels, skips, launched
    try:
        yield
    finally:
        REHEARSAL.kernels, REHEARSAL.skips, REHEARSAL.launched = before


def compile_kernels(kernels):
    """Compile each (stem, kernel, template) that is not on disk for the current device."""
    if not kernels:
        return
    arch = compiling.current_architecture()
    named = [(stem, compiling.name_expression(*instance)) for stem, *instance in kernels]
    with ThreadPoolExecutor(min(len(named), _processors())) as pool:
        for made in [pool.submit(compiling.cubin_on_disk, *each, arch) for each in named]:
            made.result()


class Note:
    """A note on disk that the kernels of some work were compiled, for this GPU and by this version.

    Parameters
    ----------
    work : str
        What was compiled.
    """

    def __init__(self, work):
        self._path = compiling.path_on_disk("compiled", work, compiling.current_architecture())

    def is_there(self):
        """Whether it was written, by this process or an earlier one."""
        return self._path.exists()

    def write(self):
        """Write it, where there is space; it is not needed."""
        with contextlib.suppress(OSError):
            self._path.touch()


def _processors():
    """Return how many processors this process may use."""
    may_use = getattr(os, "sched_getaffinity", None)
    return len(may_use(0)) if may_use else os.cpu_count() or 1
