"""zero_outside equals its loop: pixels of active blocks outside the image are 0, all else stays."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sbnet_cupy.block_sparse.gather_scatter.zero_outside import zero_outside
from sbnet_cupy.block_sparse.grid import Grid
from support import strategies
from support.assertions import assert_same, to_numpy


def loop(blocks, bin_counts, rows, grid, image_hw):
    """Look at every pixel."""
    expected = blocks.copy()
    for b in range(min(int(bin_counts[0]), len(rows))):
        for i in range(grid.bsize[0]):
            for j in range(grid.bsize[1]):
                h, w = (
                    grid.boffset[axis] + grid.bstride[axis] * int(rows[b][1 + axis]) + (i, j)[axis]
                    for axis in (0, 1)
                )
                if not (0 <= h < image_hw[0] and 0 <= w < image_hw[1]):
                    expected[b, i, j] = 0
    return expected


@given(data=st.data())
def test_equals_the_loop(xp, data):
    """Corrupt rows and counts too; -0, NaN and every other bit inside is kept."""
    drawn = data.draw(strategies.grids())
    active = data.draw(strategies.actives(drawn))
    shape = (len(active[1]), *drawn.bsize, data.draw(strategies.channels()))
    blocks = data.draw(strategies.images(shape))
    grid = Grid(drawn.bsize, drawn.boffset, drawn.step)
    expected = loop(blocks, *active, grid, drawn.size)
    for _ in range(2):  # the second call finds the launch of the first
        stack = xp.writable(blocks)
        assert zero_outside(stack, *map(xp.asarray, active), grid, drawn.size) is None
        assert_same(to_numpy(stack), expected, allow_nan=True)


def test_blocks_of_many_pixels(xp):
    blocks = np.ones((3, 70, 90, 12), np.float16)
    active = np.array([2], np.int32), np.array([[0, 0, 0], [0, 1, 1], [0, 9, 9]], np.int32)
    grid = Grid((70, 90), (-3, -5), (60, 80))
    stack = xp.writable(blocks)
    zero_outside(stack, *map(xp.asarray, active), grid, (100, 120))
    assert_same(to_numpy(stack), loop(blocks, *active, grid, (100, 120)))
