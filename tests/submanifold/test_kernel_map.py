"""kernel_map against a search in a dictionary of sites."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sbnet_cupy as sb
from support import site_cases, site_oracles
from support.assertions import assert_same, to_numpy


@given(data=st.data())
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_are_those_of_the_sites_that_are_read(xp, transposed, data):
    sites = data.draw(site_cases.sites(dimensions=(1, 2, 3)))
    kernel, stride, padding, dilation = data.draw(site_cases.windows(sites.dimensions))
    x = sites.tensor(np.zeros((len(sites.indices), 1)), xp.asarray).coordinates
    window = {"stride": stride, "padding": padding, "dilation": dilation}
    capacity = 30 * len(sites.indices) + 2 if sites.spare else None
    made = sb.kernel_map(x, kernel, **window, transposed=transposed, capacity=capacity)
    source, target = (_rows(m) for m in (made.source, made.target))
    coarse, fine = (source, target) if transposed else (target, source)
    expected = np.full((int(np.prod(kernel)), made.target.capacity), -1, np.int32)
    for (sample, *position), row in coarse.items():
        for tap, cell in enumerate(site_oracles.cells(kernel)):
            read = (sample, *site_oracles.reads(position, cell, stride, padding, dilation))
            if read in fine and transposed:
                expected[tap, fine[read]] = row
            elif read in fine:
                expected[tap, row] = fine[read]
    assert_same(made.rows, expected)
    back = to_numpy(made.transposed().rows)
    pairs = {(tap, m, row) for tap, m in np.argwhere(expected >= 0) for row in [expected[tap, m]]}
    assert {(t, back[t, row], row) for t, row in np.argwhere(back >= 0)} == pairs


def _rows(coordinates):
    """Return {(sample, *position): row}."""
    listed = to_numpy(coordinates.indices)[: coordinates.number()].tolist()
    return {tuple(site): row for row, site in enumerate(listed)}
