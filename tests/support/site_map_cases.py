"""Lists of sites and windows that reach every branch of the kernels that find sites."""

import numpy as np

import sbnet_cupy as sb
from support.assertions import assert_same


def draw_sites(seed, n, shape, batch=2, dtype=np.int32):
    """Draw distinct sites in any order."""
    rng = np.random.default_rng(seed)
    cells = batch * int(np.prod(shape))
    chosen = rng.choice(cells, min(n, cells), replace=False)
    return np.stack(np.unravel_index(chosen, (batch, *shape)), axis=1).astype(dtype)


def line(n):
    """Return sites in a line along the second axis."""
    return np.stack([np.zeros(n), np.full(n, 3), np.arange(n), np.full(n, 2)], 1).astype(np.int32)


def cube(edge):
    """Return all sites of a cube."""
    return np.argwhere(np.ones((1, edge, edge, edge))).astype(np.int32)


FAR = 2**19 - 1  # with strides of 4 in three axes, 63 bits
LISTS = {  # name: rows, spatial shape, batch
    "1-D": (draw_sites(1, 90, (300,)), (300,), 2),
    "2-D": (draw_sites(2, 150, (30, 41)), (30, 41), 2),
    "3-D": (draw_sites(3, 200, (20, 17, 9), 3), (20, 17, 9), 3),
    "4-D": (draw_sites(4, 150, (9, 8, 7, 6)), (9, 8, 7, 6), 2),
    "int64": (draw_sites(5, 60, (40, 40), dtype=np.int64), (40, 40), 2),
    "none": (np.zeros((0, 4), np.int32), (8, 8, 8), 2),
    "one": (np.array([[1, 7, 0, 7]], np.int32), (8, 8, 8), 2),
    "one leaf": (draw_sites(6, 64, (4, 4, 4), 1), (4, 4, 4), 1),
    "a line": (line(200), (8, 200, 8), 1),
    "a full cube": (cube(9), (9, 9, 9), 1),
    "a leaf each": (draw_sites(7, 150, (9, 9, 9), 1) * (1, 4, 4, 4), (64, 64, 64), 1),
    "largest keys": (
        np.array([[0, FAR, FAR, FAR], [0, 0, 0, 0], [0, FAR, 0, FAR], [0, FAR, FAR, FAR - 1]]),
        (2**19,) * 3, 1,
    ),
    "no shape": (draw_sites(8, 100, (20, 20, 20)), None, None),
    "a tall tree": (draw_sites(9, 200, (30, 30, 30)) * (1, 1001, 3001, 13), None, None),
}  # fmt: skip
for _name, (_rows, *_grid) in LISTS.items():
    LISTS[_name] = (_rows.astype(np.int32) if _rows.dtype == np.float64 else _rows, *_grid)
WINDOWS = {  # dimensions: (kernel, stride, padding, dilation)
    1: [((3,), (1,), (1,), (1,)), ((5,), (2,), (3,), (2,))],
    2: [
        ((3, 3), (1, 1), (1, 1), (1, 1)),
        ((2, 4), (2, 3), (0, 2), (3, 1)),
        ((1, 1), (2, 2), (0, 0), (1, 1)),
    ],
    3: [
        ((3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
        ((2, 2, 2), (2, 2, 2), (0, 0, 0), (1, 1, 1)),
        ((3, 1, 5), (2, 1, 4), (1, 0, 2), (1, 2, 2)),
        ((7, 7, 7), (1, 1, 1), (3, 3, 3), (1, 1, 1)),
    ],
    4: [((2, 3, 1, 2), (2, 1, 1, 2), (1, 1, 0, 0), (1, 2, 1, 1))],
}
MAPS = [
    (name, window, spare)
    for name, (rows, *_) in LISTS.items()
    for window in WINDOWS[rows.shape[1] - 1]
    for spare in (None, 5)
    if name in ("3-D", "a line") or window[0] != (7, 7, 7)
]


def make_maps(case, asarray=np.asarray):
    """Return kernel maps: submanifold, strided, its transpose, transposed, onto given sites."""
    name, (kernel, stride, padding, dilation), spare = case
    rows, shape, batch = LISTS[name]
    geometry = {"stride": stride, "padding": padding, "dilation": dilation}
    capacity = None if spare is None else len(rows) + spare
    options = {"spatial_shape": shape, "batch_size": batch, "capacity": capacity}
    sites, _ = sb.coordinate_map(asarray(rows), **options)
    room = None if spare is None else 40 * len(rows) + 3
    same = sb.kernel_map(sites, kernel, dilation=dilation, onto=sites)
    strided = sb.kernel_map(sites, kernel, **geometry, capacity=room)
    grown = sb.kernel_map(sites, kernel, **geometry, transposed=True, capacity=room)
    onto = sb.kernel_map(grown.target, kernel, **geometry, onto=sites)
    return same, strided, strided.transposed(), grown, grown.transposed(), onto


def assert_same_sites(found, expected):
    """Compare two CoordinateMaps."""
    for part in ("indices", "count", "status"):
        assert_same(getattr(found, part), getattr(expected, part))
    assert (found.spatial_shape, found.batch_size) == (expected.spatial_shape, expected.batch_size)


def assert_same_map(found, expected):
    """Compare two KernelMaps."""
    assert_same_sites(found.target, expected.target)
    assert_same_sites(found.source, expected.source)
    assert_same(found.rows, expected.rows)
    assert found.kernel_size == expected.kernel_size
