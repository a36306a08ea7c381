"""Tables of kernel maps, and what their tiles say."""

import numpy as np

from sbnet_cupy.submanifold import site_order
from sbnet_cupy.submanifold.site_tiles import ZERO_ROWS


def table(kernel_size, rows, share, seed=0):
    """Return rows of a map: a share of all pairs, more where taps are near the middle."""
    rng = np.random.default_rng(seed)
    taps = int(np.prod(kernel_size))
    chance = share * (1 + np.cos(np.linspace(-3, 3, taps))) / 2
    there = rng.random((taps, rows)) < chance[:, None] * rng.random(rows)
    return np.where(there, rng.integers(0, 50, there.shape), -1).astype(np.int32)


def groups_apart():
    """Return the operands of a 3x3x3 convolution whose tiles have few taps of one group in three.

    Between the two taps that a tile of 64 rows has of that group are up to 18 of the others.
    Returns features, rows of the map, weights, and the result.
    """
    group = np.indices((3, 3, 3)).sum(0).ravel() % 3
    rows, sums = np.full((27, 64 * 6 + 3), -1, np.int32), np.zeros(64 * 6 + 3)
    for tile, start in enumerate(range(0, len(sums), 64)):
        lone = np.flatnonzero(group == tile % 3)
        listed = np.setdiff1d(np.arange(27), lone[1:-1])
        rows[listed, start : start + 64] = listed[:, None]
        sums[start : start + 64] = listed.sum()
    x = np.eye(27, 128, dtype=np.float16)
    w = np.arange(27, dtype=np.float16)[:, None, None] + np.zeros((27, 128, 64), np.float16)
    return x, rows, w, np.repeat(sums[:, None], 64, axis=1)


def read_back(tiles, taps, m, shape):
    """Return the table that tiles stand for; check their lists on the way."""
    found = np.full((taps, m), -1)
    for order, head, sources, numbers in zip(*tiles, strict=True):
        count, rounds = head[:2]
        first_entry, first_source = head[2 + taps : 4 + 3 * taps].reshape(2, taps + 1)
        assert first_entry[0] == first_source[0] == 0
        assert first_entry[rounds] == count
        its = order >= 0
        assert (numbers[:count, ~its] < ZERO_ROWS).all()
        for r in range(rounds):
            part = sources[first_source[r] : first_source[r + 1]]
            assert len(part) <= shape.most
            named = set()  # rows with their numbers
            for entry in range(first_entry[r], first_entry[r + 1]):
                tap, groups = divmod(int(head[2 + entry]), 1 << 16)
                number = numbers[entry].astype(int) - ZERO_ROWS
                has = (number >= 0).reshape(-1, 16).any(1)
                assert (has == (groups >> np.arange(len(has)) & 1)).all()
                read = np.where(number >= 0, part[np.maximum(number, 0)], -1)
                found[tap, order[its]] = read[its]
                named.update(zip(read.tolist(), np.maximum(number, -1).tolist(), strict=True))
            assert len({row for row, _ in named}) == len(named)
    return found


def loads(tiles):
    """Return how many loads 8 rows of a tile take at a tap that some of them have, on average.

    Numbers of one remainder by 8 are loaded one after the other, the same number once.
    """
    found = []
    for head, numbers in zip(tiles.heads, tiles.locals, strict=True):
        for eight in numbers[: head[0]].reshape(-1, 8):
            if (eight >= ZERO_ROWS).any():
                found.append(np.bincount(np.unique(eight) % 8).max())
    return np.mean(found)


def masks_of(rows):
    """Return the taps that any of 32 neighbouring rows has, as words of 32 bits."""
    taps, m = rows.shape
    there = np.zeros((-(-taps // 32) * 32, -(-m // 32) * 32), bool)
    there[:taps, :m] = rows >= 0
    bits = there.reshape(len(there) // 32, 32, -1, 32).any(3)
    return (bits << np.arange(32, dtype=np.uint32)[:, None]).sum(1, dtype=np.uint32).T


def order_of(rows, kernel_size):
    """Return the order of a table's rows that site_order finds."""
    taps, m = rows.shape
    bins = bins_of(rows, kernel_size)
    first = max(taps - 11, 0)  # of the taps by which many rows are sorted before
    last = gray_place(rows, [1 << tap - first if tap >= first else 0 for tap in range(taps)])
    by_last = m >= site_order._FEWEST_TWICE and taps > site_order._sides(kernel_size)[0]
    order = np.lexsort([last, bins] if by_last else [bins])
    return sorted_tiles(rows, order, 256) if taps <= 64 else order


def sorted_tiles(rows, order, size):
    """Return the order with the rows of each tile sorted by their taps, the rare ones first.

    Taps that none of them has do not count, and no more than 24.
    """
    tiles = []
    for tile in np.split(order, range(size, len(order), size)):
        counts = (rows[:, tile] >= 0).sum(axis=1)
        ranked = [tap for tap in np.argsort(counts, kind="stable") if counts[tap]][:24]
        bits = np.zeros(len(rows), np.int64)
        bits[ranked] = 1 << np.arange(23, 23 - len(ranked), -1)
        tiles.append(tile[np.argsort(gray_place(rows[:, tile], bits), kind="stable")])
    return np.concatenate(tiles)


def bins_of(rows, kernel_size):
    """Return the number of each row's bin."""
    columns, side = site_order._sides(kernel_size)
    bits = [
        1 << tap % columns | (tap < side) << 9 | (tap >= len(rows) - side) << 10
        for tap in range(len(rows))
    ]
    return gray_place(rows, bits)


def gray_place(rows, bits):
    """Return the place in Gray order of the bits of the taps that each row has."""
    code = np.zeros(rows.shape[1], np.int64)
    for its, bit in zip(rows >= 0, bits, strict=True):
        code |= np.where(its, bit, 0)
    for shift in (1, 2, 4, 8, 16):
        code ^= code >> shift
    return code
