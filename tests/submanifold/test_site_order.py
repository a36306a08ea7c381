"""The order of a kernel map's rows by the CUDA kernels, on the CPU, against NumPy."""

import numpy as np
import pytest

from sbnet_cupy.submanifold import site_order
from support import site_on_host
from support.site_tables import table


@pytest.fixture(scope="module", autouse=True)
def _compiler(require):
    require("g++")


def masks_of(rows):
    """Return the taps that any of 32 neighbouring rows has, as words of 32 bits."""
    taps, m = rows.shape
    there = np.zeros((-(-taps // 32) * 32, -(-m // 32) * 32), bool)
    there[:taps, :m] = rows >= 0
    bits = there.reshape(len(there) // 32, 32, -1, 32).any(3)
    return (bits << np.arange(32, dtype=np.uint32)[:, None]).sum(1, dtype=np.uint32).T


@pytest.mark.parametrize(
    "size", [((3, 3, 3), 2500), ((3, 3), 1025), ((2, 2, 2), 31), ((5, 5, 3), 700), ((12,), 1)],
    ids=str,
)  # fmt: skip
def test_rows_are_sorted_by_the_taps_that_they_have(size):
    kernel_size, m = size
    rows = table(kernel_size, m, 0.8)
    with site_on_host.by_kernels():
        found = site_order.site_order(rows, 50, kernel_size, True)
        again = site_order.site_order(rows, 50, kernel_size, True)
    assert (np.sort(found.order) == np.arange(m)).all()
    assert (found.order == again.order).all()
    assert (found.rows == rows[:, found.order]).all()
    assert (found.masks == masks_of(found.rows)).all()
    if m > 500:
        asked = np.unpackbits(np.ascontiguousarray(masks_of(rows)).view(np.uint8)).sum()
        assert np.unpackbits(found.masks.view(np.uint8)).sum() < 0.9 * asked
    columns, side = site_order._sides(kernel_size)
    code = np.zeros(m, np.int64)
    for tap, its in enumerate(rows >= 0):
        here = 1 << tap % columns | (tap < side) << 9 | (tap >= len(rows) - side) << 10
        code |= np.where(its, here, 0)
    for shift in (1, 2, 4, 8):
        code ^= code >> shift
    assert (found.order == np.argsort(code, kind="stable")).all()


@pytest.mark.parametrize("taps", [1, 7, 40])
def test_masks_of_rows_as_they_are(taps):
    rows = table((taps,), 77, 0.5)
    rows[:, 5] = 60  # no row of the source
    with site_on_host.by_kernels():
        found = site_order.site_order(rows, 50, (taps,), False)
    assert found.rows is rows
    assert found.order is None
    rows[:, 5] = -1
    assert (found.masks == masks_of(rows)).all()
