"""Checked once: a call whose arrays and options look like an earlier one's reuses its launch.

The key holds everything that checks and launch parameters depend on: shapes, dtypes, contiguity
and alignment of the arrays, and the options as they were given. Never an array's contents.
"""

import contextlib

from .._arrays import device_of, signature_of

_MOST = 4096  # launches kept per operation; then all are dropped and made again as needed


class Plans:
    """The launches of one operation, by key."""

    def __init__(self):
        self._plans = {}

    @staticmethod
    def key(arrays, options):
        """Return the key of a call; the first of ``arrays`` says on which device."""
        return (device_of(arrays[0]), *map(signature_of, arrays), options)

    def get(self, key):
        """Return the launch kept under ``key``, or None. Lists among the options are never kept."""
        try:
            return self._plans.get(key)
        except TypeError:
            return None

    def keep(self, key, launch):
        """Keep ``launch``, unless an option cannot be hashed; return it."""
        if len(self._plans) >= _MOST:
            self._plans.clear()
        with contextlib.suppress(TypeError):
            self._plans[key] = launch
        return launch

    def clear(self):
        """Drop all launches."""
        self._plans.clear()
