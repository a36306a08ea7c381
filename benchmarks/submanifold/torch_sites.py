"""Lists of sites and the maps between them in plain PyTorch: sorted numbers of cells.

What a user would write without a library, and a check of ours: it shares no code with it. Sites
are in raster order here.
"""

import itertools
import math


class Cells:
    """Sites as sorted int64 numbers of the cells of a grid ``(batch, *spatial)``."""

    def __init__(self, torch, numbers, shape):
        self.torch, self.numbers, self.shape = torch, numbers, tuple(shape)

    @classmethod
    def of_rows(cls, torch, rows, shape):
        """Return the distinct sites of rows ``(sample, *position)``, and the site of each row."""
        numbers, inverse = torch.unique(_numbers(rows.long().unbind(1), shape), return_inverse=True)
        return cls(torch, numbers, shape), inverse

    def __len__(self):
        return len(self.numbers)

    def rows(self):
        """Return the sites as rows ``(sample, *position)``."""
        found, rest = [], self.numbers
        for size in reversed(self.shape):
            found.append(rest % size)
            rest = rest // size
        return self.torch.stack(found[::-1], 1)

    def places(self, numbers):
        """Return the row of each cell, -1 for cells that are no site."""
        if not len(self):
            return self.torch.full_like(numbers, -1)
        place = self.torch.searchsorted(self.numbers, numbers).clamp(max=len(self) - 1)
        return self.torch.where(self.numbers[place] == numbers, place, -1)

    def same_map(self, size=3):
        """Return which row each site reads at each tap of a kernel: ``[taps, N]``."""
        sample, *position = self.rows().unbind(1)
        table = []
        for tap in itertools.product(range(size), repeat=len(position)):
            moved = [p + r - size // 2 for p, r in zip(position, tap, strict=True)]
            inside = self._inside(moved, self.shape[1:])
            read = self.places(_numbers([sample, *moved], self.shape))
            table.append(self.torch.where(inside, read, -1))
        return self.torch.stack(table)

    def strided_map(self, size, padding, stride=2):
        """Return the sites of a convolution with a stride, and which rows they read."""
        torch, (sample, *position) = self.torch, self.rows().unbind(1)
        spatial = [(n + 2 * padding - size) // stride + 1 for n in self.shape[1:]]
        shape, pairs = (self.shape[0], *spatial), []
        for tap in itertools.product(range(size), repeat=len(position)):
            moved = [p + padding - r for p, r in zip(position, tap, strict=True)]
            fits = math.prod(m % stride == 0 for m in moved).bool()
            target = [torch.div(m, stride, rounding_mode="floor") for m in moved]
            here = (fits & self._inside(target, spatial)).nonzero()[:, 0]
            pairs.append((here, _numbers([sample, *target], shape)[here]))
        numbers, place = torch.unique(torch.cat([out for _, out in pairs]), return_inverse=True)
        table = numbers.new_full((len(pairs), len(numbers)), -1)
        for line, (read, _), out in zip(
            table, pairs, place.split([len(read) for read, _ in pairs]), strict=True
        ):
            line[out] = read
        return Cells(torch, numbers, shape), table

    def _inside(self, position, spatial):
        bounds = [(p >= 0) & (p < n) for p, n in zip(position, spatial, strict=True)]
        return math.prod(bounds[1:], start=bounds[0])


def pairs_of(table):
    """Return ``(read, written)`` rows for each tap of a table."""
    found = []
    for line in table:
        out = (line >= 0).nonzero()[:, 0]
        found.append((line[out], out))
    return found


def convolve(torch, x, w, pairs, count):
    """Return a convolution: rows selected, multiplied and added up, tap by tap."""
    y = x.new_zeros(count, w.shape[-1])
    for (read, out), tap in zip(pairs, w.flatten(0, -3), strict=True):
        y = y.index_add(0, out, x.index_select(0, read) @ tap)
    return y


def _numbers(columns, shape):
    number = 0
    for column, size in zip(columns, shape, strict=True):
        number = number * size + column
    return number
