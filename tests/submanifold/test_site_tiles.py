"""The tiles of a kernel map by the CUDA kernel, on the CPU, against the map itself."""

import numpy as np
import pytest

from sbnet_cupy.submanifold.site_tiles import TileShape, head_numbers, site_tiles
from support import site_on_host
from support.site_tables import read_back, table


@pytest.fixture(scope="module", autouse=True)
def _compiler(require):
    require("g++")


def tiles_of(rows, sources, kernel_size, shape):
    with site_on_host.by_kernels():
        return site_tiles(rows, sources, kernel_size, shape)


@pytest.mark.parametrize("shape", [(64, 64), (64, 100), (128, 300)], ids=str)
@pytest.mark.parametrize(
    "size", [((3, 3, 3), 700), ((3, 3), 129), ((2, 2, 2), 31), ((2, 2, 3, 2, 2), 70), ((9,), 1)],
    ids=str,
)  # fmt: skip
def test_tiles_stand_for_the_map(size, shape):
    """Few sources, and so many that a tile is read in rounds; rows past the source are none."""
    kernel_size, m = size
    shape, taps = TileShape(*shape), int(np.prod(kernel_size))
    for sources in (50, 5000):
        rows = table(kernel_size, m, 0.8)
        rows = np.where(rows < 0, -1, rows * sources // 50 + np.arange(m) % (sources // 50))
        rows = rows.astype(np.int32)
        tiles = tiles_of(rows, sources - 1, kernel_size, shape)
        assert (np.sort(tiles.order[tiles.order >= 0]) == np.arange(m)).all()
        expected = np.where(rows == sources - 1, -1, rows)
        assert (read_back(tiles, taps, m, shape) == expected).all()
        again = tiles_of(rows, sources - 1, kernel_size, shape)
        assert (again.order == tiles.order).all()
        assert (again.heads[:, :2] == tiles.heads[:, :2]).all()
    if m == 700 and shape.most < 128:
        assert (tiles.heads[:, 1] > 1).any()


def test_a_tile_that_reads_more_rows_than_a_table_holds():
    shape = TileShape(128, 128)
    rows = np.random.default_rng(0).permutation(27 * 130).reshape(27, 130).astype(np.int32)
    tiles = tiles_of(rows, rows.size, (3, 3, 3), shape)
    assert (read_back(tiles, 27, 130, shape) == rows).all()
    assert tiles.heads[:, 1].tolist() == [27, 1]


def test_rows_with_the_same_taps_are_neighbours():
    rows = np.full((9, 256), -1, np.int32)
    rows[:, ::2] = np.arange(128)
    tiles = tiles_of(rows, 128, (3, 3), TileShape(256, 256))
    assert (tiles.order[0, :128] % 2 == 1).all()
    assert (tiles.heads[0, 2:11] & 0xFFFF == 0xFF00).all()


def test_no_rows():
    tiles = tiles_of(np.zeros((9, 0), np.int32), 0, (3, 3), TileShape(64, 64))
    assert [array.shape[0] for array in tiles] == [0] * 4


def test_heads_are_whole_vectors():
    assert [head_numbers(taps) for taps in (1, 4, 27)] == [8, 16, 88]
