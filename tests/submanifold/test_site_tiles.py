"""The tiles of a kernel map by the CUDA kernel, on the CPU, against the map itself."""

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy.core.device import Device
from sbnet_cupy.submanifold import site_tiles as module
from sbnet_cupy.submanifold.site_tiles import SiteTiles, TileShape, head_numbers, site_tiles
from support import site_on_host
from support.site_tables import loads, read_back, sorted_tiles, table


@pytest.fixture(scope="module", autouse=True)
def _compiler(require):
    require("g++")


def tiles_of(rows, sources, shape, *sites):
    with site_on_host.by_kernels():
        return site_tiles(rows, sources, shape, *sites)


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
        tiles = tiles_of(rows, sources - 1, shape)
        assert (np.sort(tiles.order[tiles.order >= 0]) == np.arange(m)).all()
        expected = np.where(rows == sources - 1, -1, rows)
        assert (read_back(tiles, taps, m, shape) == expected).all()
        order = sorted_tiles(expected, np.arange(m), shape.rows)
        assert (tiles.order.ravel()[:m] == order).all()
        again = tiles_of(rows, sources - 1, shape)
        assert (again.order == tiles.order).all()
        assert (again.heads[:, :2] == tiles.heads[:, :2]).all()
    if m == 700 and shape.most < 128:
        assert (tiles.heads[:, 1] > 1).any()


@pytest.mark.parametrize("by_colour", [False, True])
def test_tiles_are_the_same_among_few_and_many(by_colour):
    """Where there are many, half as many threads make one."""
    offsets = tuple((i - 1, j - 1) for i in range(3) for j in range(3))
    cells = np.argwhere(np.ones((1, 24, 32), bool)).astype(np.int32)  # 12 whole tiles
    sites, _ = sb.coordinate_map(cells, spatial_shape=(24, 32))
    rows, shape = sb.kernel_map(sites, 3, onto=sites).rows, TileShape(64, 192, by_colour)
    few, many = (
        tiles_of(np.tile(rows, n), 768, shape, np.tile(sites.indices, (n, 1)), offsets)
        for n in (1, 24)
    )
    assert len(few.order) <= 256 < len(many.order)
    assert (read_back(many, 9, 24 * 768, shape) == np.tile(rows, 24)).all()
    assert (many.order[:12] == few.order).all()
    listed = few.heads[:, 0]
    for tile, count in enumerate(listed):
        assert (many.heads[tile, : 2 + count] == few.heads[tile, : 2 + count]).all()
        assert (many.locals[tile, :count] == few.locals[tile, :count]).all()


@pytest.mark.parametrize(
    "tiles, together", [(0, 1), (1, 1), (132, 1), (133, 2), (400, 4), (9999, 4)]
)
def test_few_tiles_are_shared_out_evenly(tiles, together, monkeypatch):
    """No multiprocessor has room for more of them than are its share."""
    device, asked = Device(132, 227 << 10, True, True), []
    monkeypatch.setattr(module, "current_device", lambda: device)
    monkeypatch.setattr(module.kernels, "prepare", lambda *a, shared, **k: asked.append(shared))
    module._launch.__wrapped__(27, 128 * tiles, 1000, None, TileShape(128, 384), "a GPU")
    assert device.resident(asked[0]) == together
    assert asked[0] <= device.shared_bytes


def test_a_tile_that_reads_more_rows_than_a_table_holds():
    shape = TileShape(128, 128)
    rows = np.random.default_rng(0).permutation(27 * 130).reshape(27, 130).astype(np.int32)
    tiles = tiles_of(rows, rows.size, shape)
    assert (read_back(tiles, 27, 130, shape) == rows).all()
    assert tiles.heads[:, 1].tolist() == [27, 1]


def test_rows_with_the_same_taps_are_neighbours():
    rows = np.full((9, 256), -1, np.int32)
    rows[:, ::2] = np.arange(128)
    tiles = tiles_of(rows, 128, TileShape(256, 256))
    assert (tiles.order[0, :128] % 2 == 1).all()
    assert (tiles.heads[0, 2:11] & 0xFFFF == 0xFF00).all()


@pytest.mark.parametrize("rare", [0, 4, 13, 26])
def test_rows_with_a_rare_tap_are_neighbours(rare):
    """Whichever tap it is, and more taps than a key has bits."""
    rng = np.random.default_rng(rare)
    few = rng.permutation(256)[:16]
    rows = np.where(rng.random((27, 256)) < 0.5, np.arange(256), -1).astype(np.int32)
    rows[rare] = -1
    rows[rare, few] = few
    tiles = tiles_of(rows, 256, TileShape(256, 640))
    places = np.flatnonzero(np.isin(tiles.order[0], few))
    assert np.ptp(places) == 15


def map_of(shape, kernel_size, share, **options):
    """Return the map of a random share of the cells of a grid onto themselves."""
    cells = np.argwhere(np.random.default_rng(len(shape)).random((1, *shape)) < share)
    sites, _ = sb.coordinate_map(cells.astype(np.int32), spatial_shape=shape)
    return sb.kernel_map(sites, kernel_size, onto=sites, **options)


@pytest.mark.parametrize("rows", [64, 128, 192, 256])
@pytest.mark.parametrize(
    "grid",
    [((300,), (9,), 0.8), ((24, 24), (3, 3), 0.9), ((24, 24), (5, 3), 0.3),
     ((9, 9, 9), (3, 3, 3), 0.4), ((4, 5, 4, 5), (2, 2, 3, 2), 0.5)],
    ids=str,
)  # fmt: skip
def test_rows_are_numbered_by_the_colours_of_their_sites(rows, grid):
    """With room for all colours, for few rows of one, and for too few rows in one round."""
    made = map_of(*grid)
    taps, m = made.rows.shape
    for most in (3 * rows, rows + 8, rows):
        shape = TileShape(rows, most, True)
        tiles = tiles_of(made.rows, m, shape, *made._sites())
        assert (np.sort(tiles.order[tiles.order >= 0]) == np.arange(m)).all()
        assert (read_back(tiles, taps, m, shape) == made.rows).all()
        again = tiles_of(made.rows, m, shape, *made._sites())
        assert (again.order == tiles.order).all()
        if most > 2 * rows:
            plain = tiles_of(made.rows, m, shape)
            assert loads(tiles) < loads(plain) or loads(plain) < 1.1


def test_eight_neighbours_are_loaded_at_once():
    """All pixels of a picture: 64 in a row have eight of each colour, but in tiles at its edges.

    There pixels that lack a tap come first, and the others are 64 in a row no more.
    """
    shape = TileShape(256, 640, True)
    made = map_of((64, 64), (3, 3), 1.1)
    assert loads(tiles_of(made.rows, 4096, shape)) > 1.3  # without colours
    made = map_of((64, 128), (3, 3), 1.1)
    tiles = tiles_of(made.rows, 8192, shape, *made._sites())
    assert (read_back(tiles, 9, 8192, shape) == made.rows).all()
    inside = (made.rows >= 0).all(axis=0).reshape(-1, 256).all(axis=1)
    assert inside.sum() == 12
    assert loads(SiteTiles(*(array[inside] for array in tiles))) == 1
    assert loads(tiles) < 1.02


def test_lists_of_offsets_have_colours():
    cells = np.argwhere(np.ones((1, 20, 20), bool)).astype(np.int32)
    sites, _ = sb.coordinate_map(cells, spatial_shape=(20, 20))
    made = sb.kernel_map(sites, offsets=[[0, y * x] for y in (-3, 0, 3) for x in (1, 2, 3)])
    shape = TileShape(64, 192, True)
    tiles = tiles_of(made.rows, 400, shape, *made._sites())
    assert (read_back(tiles, 9, 400, shape) == made.rows).all()


def test_maps_whose_taps_read_at_no_fixed_distance_have_no_offsets():
    fine = map_of((9, 9), (3, 3), 0.5)
    assert len(fine._sites()) == 2
    assert sb.kernel_map(fine.source, 3, stride=2)._sites() == ()
    assert fine.transposed()._sites() == ()


def test_no_rows():
    tiles = tiles_of(np.zeros((9, 0), np.int32), 0, TileShape(64, 64))
    assert [array.shape[0] for array in tiles] == [0] * 4


def test_heads_are_whole_vectors():
    assert [head_numbers(taps) for taps in (1, 4, 27)] == [8, 16, 88]
