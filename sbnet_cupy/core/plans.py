"""Checked once: a call whose arrays and options look like an earlier one's reuses its launch, or
on NumPy arrays whatever its body needs to know.

The key holds everything that checks and launch parameters depend on: shapes, dtypes, contiguity
and alignment of the arrays, and the options as they were given. Never an array's contents.
"""

import marshal

import numpy as np

from .arrays import device_of, signature_of


class Plans:
    """The launches of one operation, by key."""

    def __init__(self, most=4096):
        self._plans = {}
        self._most = most  # kept; then all are dropped, and made again as needed

    @staticmethod
    def key(arrays, options):
        """Return the key of a call; the first of ``arrays`` says on which device.

        Options are told apart by type as well: 1, 1.0 and True are equal in Python but not as a
        size. Those that cannot be spelled out (an object of the user's) give None.
        """
        try:
            spelled = marshal.dumps(options, 2)
        except ValueError:
            return None
        return (device_of(arrays[0]), *map(signature_of, arrays), spelled)

    @staticmethod
    def host_key(arrays, options):
        """Return the key of a call with NumPy arrays, or None where one is something else."""
        seen = []
        for array in arrays:
            if type(array) is np.ndarray:
                seen.append((array.shape, array.dtype, array.flags.c_contiguous))
            elif array is None:
                seen.append(None)
            else:
                return None
        try:
            return (*seen, marshal.dumps(options, 2))
        except ValueError:
            return None

    def get(self, key):
        """Return the launch kept under ``key``, or None."""
        return self._plans.get(key)

    def keep(self, key, launch):
        """Keep ``launch`` unless the key is None; return it."""
        if key is not None:
            if len(self._plans) >= self._most:
                self._plans.clear()
            self._plans[key] = launch
        return launch

    def clear(self):
        """Drop all launches."""
        self._plans.clear()
