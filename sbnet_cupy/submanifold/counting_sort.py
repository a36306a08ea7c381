"""CountingSort: rows in the order of a number of few bits that each has.

Kernels: cuda_src/submanifold/site_order.cu; those that find the numbers are the callers'.
"""

import numpy as np

from ..core import launch as kernels
from ..core.arrays import empties, empty
from ..core.device import current_device

PART, _BINS = 1024, 1 << 11  # rows of a thread block, and numbers: those of counting_sort.cuh
_RANKS = 2 * 8 * _BINS  # bytes of its DigitRanks


class CountingSort:
    """The launches that sort lists of ``n`` rows, on the current device.

    Kernels that count have ``parts`` thread blocks with ``shared`` bytes of shared memory.
    """

    def __init__(self, n):
        self.parts = -(-n // PART)
        self.shared = current_device().spread_evenly(_RANKS, self.parts)
        self._n = n
        self._scan = _prepare("scan_bins", _BINS // 32, 1024, 3, (self.parts,))
        self._order = _prepare("order_rows", self.parts, 256, 5, (n,))

    def by_bin(self):
        """Return what counts rows by another digit, int32 ``[n]``: a ``count`` of :meth:`order`.

        But for the digit of each row, and the order of the rows so far.
        """
        return _prepare("bin_digits", self.parts, 256, 4, (self._n,), self.shared)

    def order(self, count, like, before=None):
        """Return the rows in order, int32 ``[n]``; rows of the same number stay in theirs.

        ``count`` launches the kernel that finds the numbers, and writes each row's number and place
        in its part, and how many rows of each number a part has. If the rows are sorted already, by
        lower digits, their order is the one ``before``.
        """
        each = self.parts, _BINS
        places, counts, sums, totals = empties(
            like, ((self._n,), np.uint32), (each, np.uint16), (each, np.int32), ((_BINS,), np.int32)
        )
        order = empty((self._n,), np.int32, like)
        count(places, counts)
        self._scan(counts, sums, totals)
        self._order(places, sums, totals, before, order)
        return order


def _prepare(kernel, grid, block, pointers, scalars, shared=0):
    return kernels.prepare(
        "submanifold/site_order", kernel, ("int",), grid, block, pointers, scalars, shared,
        dependent=True,
    )  # fmt: skip
