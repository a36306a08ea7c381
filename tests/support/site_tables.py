"""Tables of kernel maps, and what their tiles say."""

import numpy as np


def table(kernel_size, rows, share, seed=0):
    """Return rows of a map: a share of all pairs, more where taps are near the middle."""
    rng = np.random.default_rng(seed)
    taps = int(np.prod(kernel_size))
    chance = share * (1 + np.cos(np.linspace(-3, 3, taps))) / 2
    there = rng.random((taps, rows)) < chance[:, None] * rng.random(rows)
    return np.where(there, rng.integers(0, 50, there.shape), -1).astype(np.int32)


def read_back(tiles, taps, m, shape):
    """Return the table that tiles stand for; check their lists on the way."""
    found = np.full((taps, m), -1)
    for order, head, sources, numbers in zip(*tiles, strict=True):
        count, rounds = head[:2]
        first_entry, first_source = head[2 + taps : 4 + 3 * taps].reshape(2, taps + 1)
        assert first_entry[0] == first_source[0] == 0
        assert first_entry[rounds] == count
        its = order >= 0
        assert not numbers[:count, ~its].any()
        for r in range(rounds):
            part = sources[first_source[r] : first_source[r + 1]]
            assert len(part) == len(set(part.tolist())) <= shape.most
            for entry in range(first_entry[r], first_entry[r + 1]):
                tap, groups = divmod(int(head[2 + entry]), 1 << 16)
                number = numbers[entry]
                has = (number > 0).reshape(-1, 16).any(1)
                assert (has == (groups >> np.arange(len(has)) & 1)).all()
                read = np.where(number > 0, part[number.astype(int) - 1], -1)
                found[tap, order[its]] = read[its]
    return found
