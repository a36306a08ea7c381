"""The order of a kernel map's rows by the CUDA kernels, on the CPU, against NumPy."""

import numpy as np
import pytest

from sbnet_cupy.submanifold import site_order
from support import site_on_host
from support.site_tables import masks_of, order_of, table


@pytest.fixture(scope="module", autouse=True)
def _compiler(require):
    require("g++")


@pytest.mark.parametrize(
    "size",
    [((3, 3, 3), 2500), ((3, 3), 1025), ((2, 2, 2), 31), ((5, 3, 3), 800), ((64,), 300),
     ((5, 5, 3), 700), ((12,), 1)],
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
    assert site_on_host.LAUNCHED.count("sort_tiles") == (2 if len(rows) <= 64 else 0)
    assert site_on_host.LAUNCHED.count("sort_rows") == (0 if len(rows) <= 64 else 2)
    if m > 500:
        asked = np.unpackbits(np.ascontiguousarray(masks_of(rows)).view(np.uint8)).sum()
        assert np.unpackbits(found.masks.view(np.uint8)).sum() < 0.9 * asked
    assert (found.order == order_of(rows, kernel_size)).all()


@pytest.mark.parametrize("kernel_size", [(3, 3, 3), (2, 5), (3, 3)], ids=str)
def test_many_rows_are_sorted_by_their_last_taps_too(kernel_size):
    """Where those say more than the bin, which of 3x3 has all taps."""
    m = site_order._FEWEST_TWICE
    rows = table(kernel_size, m, 0.8)
    with site_on_host.by_kernels():
        site_on_host.LAUNCHED.clear()
        found = site_order.site_order(rows, 50, kernel_size, True)
    assert (found.order == order_of(rows, kernel_size)).all()
    assert (found.rows == rows[:, found.order]).all()
    assert site_on_host.LAUNCHED.count("bin_digits") == (kernel_size != (3, 3))


@pytest.mark.parametrize("rare", [0, 13, 26, 40])
def test_rows_of_a_tile_with_a_rare_tap_are_neighbours(rare):
    """Whichever tap it is, and more taps than a key has bits; the last tile is not whole."""
    taps, m = 27 if rare < 27 else 45, 2 * 256 + 100
    rng = np.random.default_rng(rare)
    rows = np.where(rng.random((taps, m)) < 0.5, np.arange(m) % 50, -1).astype(np.int32)
    few = rng.permutation(m)[:40]
    rows[rare] = -1
    rows[rare, few] = 7
    rows[rare, np.setdiff1d(np.arange(m), few)[:9]] = 50  # no row of the source
    with site_on_host.by_kernels():
        found = site_order.site_order(rows, 50, (taps,), True)
    assert (found.rows == np.where(rows == 50, -1, rows)[:, found.order]).all()
    for start in range(0, m, 256):
        places = np.flatnonzero(found.rows[rare, start : start + 256] >= 0)
        assert np.ptp(places) == len(places) - 1


def test_rows_of_a_tile_with_the_same_taps_stay_in_their_order():
    rows = np.zeros((9, 700), np.int32)
    rows[4:, ::2] = -1
    with site_on_host.by_kernels():
        order = site_order.site_order(rows, 1, (9,), True).order
    assert (np.diff(order[:350]) == 2).all()
    assert (np.diff(order[350:]) == 2).all()


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


NONE, HALF = 65535, 1 << 15


def dealt(masks, rows, taps, shares):
    """Return what each of the shares gets in each round, and its costs.

    That is a tile of some rows; or NONE, where none is left. The longest tiles of 256 rows are cut
    in halves, HALF and more, as many as make the least of a lower bound of what a share has to do,
    if that is a quarter less. Where none is, and at most half of the shares get one in the last
    round, they get halves.
    """
    per_tile = rows // site_order.GROUP
    tiles = -(-len(masks) // per_tile)
    padded = np.zeros((tiles * per_tile, masks.shape[1]), np.uint32)
    padded[: len(masks)] = masks
    its = np.bitwise_or.reduce(padded.reshape(tiles, per_tile, -1), axis=1)
    counts = [sum(int(word).bit_count() for word in words) for words in its]
    costs = [(count + 2) * 31 // (taps + 2) for count in counts]
    longest_first = sorted(range(tiles), key=lambda tile: -costs[tile])
    rounds = -(-tiles // shares)
    cut, half = [], [-(-cost * 5 // 8) for cost in costs]
    if rows == 256:
        least = max(max(costs), -(-sum(costs) // shares)) * 3 // 4 + 1
        for cost in [*sorted(set(costs), reverse=True), 0]:
            its = [tile for tile in longest_first if costs[tile] > cost]
            if len(its) > rounds * shares - tiles:
                break
            total = sum(costs) + sum(2 * half[tile] - costs[tile] for tile in its)
            most = max(cost, max(half), -(-total // shares))
            if its and most < least:
                least, cut = most, its
    listed = [(tile, costs[tile]) for tile in range(tiles)]
    for tile in cut:
        listed[tile] = HALF + 2 * tile, half[tile]
        listed.append((HALF + 2 * tile + 1, half[tile]))
    longest_first = sorted(listed, key=lambda its: -its[1])
    turns, loads = np.full((rounds, shares), NONE, np.uint16), [0] * shares
    for turn in turns:
        listed = longest_first[:shares]
        del longest_first[:shares]
        if rows == 256 and not cut and 2 * len(listed) <= shares:
            listed = [(HALF + 2 * tile + half, cost) for tile, cost in listed for half in (0, 1)]
        order = sorted(range(shares), key=lambda share: loads[share])
        for share, (tile, cost) in zip(order, listed, strict=False):
            turn[share] = tile
            loads[share] += cost
    return turns, loads


@pytest.mark.parametrize(
    "size", [((3, 3, 3), 3000, 0), ((3, 3), 400, 2), ((5, 5, 3), 4001, 2), ((3, 3, 3), 3700, 0)],
    ids=str,
)  # fmt: skip
def test_tiles_are_dealt_out_by_their_taps(size):
    """To three multiprocessors; the numbers of taps that they then have differ by one tile's."""
    kernel_size, m, count = size  # of halves: the longest of two tiles, the only one left
    rows = table(kernel_size, m, 0.9)
    rows[1:, m // 2 :] = -1  # tiles with few taps
    with site_on_host.by_kernels():
        found = site_order.site_order(rows, 50, kernel_size, True)
    wide, loads = dealt(found.masks, 128, len(rows), 3)
    wider, _ = dealt(found.masks, 256, len(rows), 3)
    assert (found.turns == np.concatenate([wide.ravel(), wider.ravel()])).all()
    assert max(loads) - min(loads) <= 31
    halves = wider[(wider >= HALF) & (wider < NONE)] - HALF
    assert len(halves) == count
    computed = np.concatenate([2 * wider[wider < HALF], 2 * wider[wider < HALF] + 1, halves])
    assert (np.sort(computed) == np.arange(2 * -(-m // 256))).all()


@pytest.mark.parametrize("full, cut", [(128, 1), (256, 1), (1024, 0)], ids=str)
def test_the_longest_tiles_are_cut(full, cut):
    """Of five, where it is most of what one of three multiprocessors has to do."""
    m = 5 * 256
    rows = np.zeros((27, m), np.int32)
    rows[1:, full:] = -1
    with site_on_host.by_kernels():
        found = site_order.site_order(rows, 50, (3, 3, 3), True)
    wide, wider = np.split(found.turns, [12])
    assert (np.sort(wide[wide < NONE]) == np.arange(10)).all()
    assert len(wider) == 6 and ((wider >= HALF) & (wider < NONE)).sum() == 2 * cut
    last = [HALF + 8, HALF + 9] if cut else [4]
    assert set(last) <= set(wider.tolist())


def test_few_and_very_many_tiles_are_not_dealt_out():
    for m in (3 * 128, 8193 * 128):
        with site_on_host.by_kernels():
            launches = site_order._launches(1, m, 50, (1, 0), "cpu")
        assert launches._turns == 0


def test_tiles_are_not_dealt_out_to_very_many_thread_blocks(monkeypatch):
    for shares, rounds in ((512, 3), (513, 0)):  # two of 600 tiles, and one of 300
        device = site_on_host.AMPERE._replace(multiprocessors=shares)
        monkeypatch.setattr(site_on_host, "AMPERE", device)
        with site_on_host.by_kernels():
            launches = site_order._launches(1, 600 * 128, 50, (1, 0), "cpu")
        assert launches._turns == rounds * shares


def test_tiles_are_dealt_out_where_a_kernel_takes_turns(monkeypatch):
    rows = table((3, 3, 3), 3000, 0.8)
    with site_on_host.by_kernels():
        monkeypatch.setattr(site_order, "current_device", lambda: site_on_host.AMPERE)
        found = site_order.site_order(rows, 50, (3, 3, 3), True)
    assert found.turns is None and found.cuts is None


def cuts_of(masks, shares):
    """Return where each share of the taps of all tiles of 128 rows begins, and the end of all.

    That is a tile, and how many of its taps come before. A tile takes as long as two taps more than
    it has, and one tap at least.
    """
    places = []  # of each unit of time
    for tile in range(-(-len(masks) // 4)):
        taps = sum(int(word).bit_count() for word in np.bitwise_or.reduce(masks[4 * tile :][:4]))
        places += [(tile, max(unit - 2, 0)) for unit in range(max(taps, 1) + 2)]
    end = places[-1][0] + 1, 0
    each = -(-len(places) // shares)
    return [places[n * each] if n * each < len(places) else end for n in range(shares + 1)]


@pytest.mark.parametrize("shares", [1, 3, 40, 700])
@pytest.mark.parametrize("size", [((3, 3, 3), 3000), ((5, 5, 3), 900), ((3, 3), 1)], ids=str)
def test_taps_are_cut_into_shares(size, shares, monkeypatch):
    kernel_size, m = size
    rows = table(kernel_size, m, 0.9)
    rows[1:, m // 2 :] = -1  # tiles with few taps
    rows[:, -m // 9 :] = -1  # and without any
    monkeypatch.setattr(
        site_on_host, "AMPERE", site_on_host.AMPERE._replace(multiprocessors=shares)
    )
    with site_on_host.by_kernels():
        found = site_order.site_order(rows, 50, kernel_size, True)
    assert found.cuts.tolist() == [list(cut) for cut in cuts_of(found.masks, shares)]


def test_very_many_tiles_are_cut_into_shares():
    """More than a thread block has threads, several times."""
    m, taps = 8193 * 128, 40
    rng = np.random.default_rng(2)
    masks = rng.integers(0, 2**32, (-(-m // 32), 2), np.uint32) & np.array([2**32 - 1, 255])
    masks[rng.random(len(masks)) < 0.7] = 0
    masks, cuts = masks.astype(np.uint32), np.full((4, 2), -1, np.int32)
    with site_on_host.by_kernels():
        site_order._launches(taps, m, 50, (1, 0), "cpu")._deal(masks, None, cuts)
    assert cuts.tolist() == [list(cut) for cut in cuts_of(masks, 3)]
