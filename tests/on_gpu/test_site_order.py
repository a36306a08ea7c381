"""The order of a kernel map's rows by the CUDA kernels, on a GPU, against NumPy."""

import pytest

from sbnet_cupy.submanifold import site_order
from support.site_tables import masks_of, order_of, table

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "size",
    [((3, 3, 3), 2500), ((3, 3), 1025), ((64,), 300), ((5, 5, 3), 700), ((3, 3, 3), 40_001),
     ((12,), 1)],
    ids=str,
)  # fmt: skip
def test_rows_are_sorted_by_the_taps_that_they_have(size, cupy):
    kernel_size, m = size
    rows = table(kernel_size, m, 0.8)
    for _ in range(3):
        found = site_order.site_order(cupy.asarray(rows), 50, kernel_size, True)
        order = found.order.get()
        assert (order == order_of(rows, kernel_size)).all()
        assert (found.rows.get() == rows[:, order]).all()
        assert (found.masks.get() == masks_of(rows[:, order])).all()
