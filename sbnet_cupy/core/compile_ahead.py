"""Kernels compiled at once, by as many threads as there are processors, and notes of that."""

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

from . import compile as compiling


def compile_kernels(kernels):
    """Compile each (stem, kernel, template) that is not on disk for the current device."""
    if not kernels:
        return
    arch = compiling.current_architecture()
    named = [(stem, compiling.name_expression(*instance)) for stem, *instance in kernels]
    with ThreadPoolExecutor(min(len(named), _processors())) as pool:
        for made in [pool.submit(compiling.cubin_on_disk, *each, arch) for each in named]:
            made.result()


class Beside:
    """Kernels that threads compile while the caller goes on: the ``kernels`` of a Rehearsal."""

    def __init__(self):
        self._begun, self._pool, self._lock = set(), None, threading.Lock()

    def __setitem__(self, kernel, _):
        """Begin to compile a (stem, kernel, template) that is not on disk, unless it was begun."""
        stem, *instance = kernel
        arch = compiling.current_architecture()
        with self._lock:
            if (kernel, arch) in self._begun:
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_processors())
            named = compiling.name_expression(*instance)
            self._pool.submit(compiling.cubin_on_disk, stem, named, arch)
            self._begun.add((kernel, arch))

    def wait(self):
        """Wait until all are compiled; an error comes from who loads the kernel."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()


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
