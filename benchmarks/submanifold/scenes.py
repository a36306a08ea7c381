"""Lists of sites to measure on: surfaces, a scan, blobs in a picture; or a scan of yours."""

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Scene:
    """Distinct sites of one sample, in no particular order."""

    name: str
    rows: np.ndarray  # int32 [N, 1 + d], (sample, *position)
    spatial_shape: tuple
    channels: tuple = (16, 32, 64, 128, 256)  # of convolutions to be timed

    def __post_init__(self):
        """Have the rows follow each other in memory: spconv reads others as if they did."""
        object.__setattr__(self, "rows", np.ascontiguousarray(self.rows))

    @property
    def size(self):
        """The grid and the number of sites, as rows of results have them."""
        return "x".join(map(str, self.spatial_shape)) + f", {len(self.rows)} sites"


def standard(quick=False):
    """Return the scenes of a whole run, or one small scene of each kind."""
    if quick:
        return [surface(2000), scan(500), blobs((60, 80), 0.1)]
    return [surface(50_000), surface(100_000), surface(500_000), scan(14_000),
            *stages()]  # fmt: skip


def stages():
    """Return blobs at the stages of SBNet's network, with the channels of its units."""
    sizes = {(400, 700): 24, (200, 350): 48, (100, 175): 64, (50, 88): 96}
    first, *others = (replace(blobs(size, 0.1), channels=(c,)) for size, c in sizes.items())
    return [replace(first, channels=(*first.channels, *Scene.channels)), *others]


def networks(quick=False, cpu=False):
    """Return the scenes of whole networks; on a CPU one is small enough to be computed dense."""
    if quick:
        return [surface(200), blobs((24, 32), 0.2)]
    return [surface(5000), scan(14_000)] if cpu else [scan(14_000), surface(100_000)]


def surface(count, seed=0):
    """Return about ``count`` voxels of a room: floor, tilted walls, balls."""
    rng = np.random.default_rng(seed)
    planes = [(rng.uniform(0.2, 0.8, 3), _turned(rng, tilted), rng.uniform(0.4, 0.9, 2))
              for tilted in (False, False, True, True, True, True)]  # fmt: skip
    balls = [(rng.uniform(0.1, 0.9, 3), rng.uniform(0.04, 0.15)) for _ in range(10)]

    def voxels(scale):
        points = []
        for middle, axes, extent in planes:
            number = int(6 * extent.prod() * scale**2) + 1
            points.append(middle + (rng.uniform(-0.5, 0.5, (number, 2)) * extent) @ axes[:2])
        for middle, radius in balls:
            way = rng.standard_normal((int(80 * radius**2 * scale**2) + 1, 3))
            points.append(middle + radius * way / np.linalg.norm(way, axis=1, keepdims=True))
        return np.unique(np.floor(np.concatenate(points) * scale).astype(np.int32), axis=0)

    scale = (count / 3) ** 0.5
    for _ in range(4):  # until the surfaces have about so many voxels
        scale *= (count / len(voxels(scale))) ** 0.5
    found = rng.permutation(voxels(scale))[:count]
    return _scene(f"surface {count}", found)


def scan(count, seed=0):
    """Return about ``count`` voxels of a street as a LiDAR sees it: rings on the ground, walls."""
    rng = np.random.default_rng(seed)
    angle = rng.uniform(0, 2 * np.pi, 4 * count)
    elevation = -np.deg2rad(rng.choice(np.linspace(-2, 24, 64), 4 * count))
    height, wall = 1.7, rng.uniform(6, 60, 90)[(angle / (2 * np.pi) * 90).astype(int)]
    with np.errstate(divide="ignore"):
        ground = np.where(elevation < 0, height / np.tan(-elevation), np.inf)
    distance = np.minimum(ground, wall) + rng.normal(0, 0.02, len(angle))
    points = np.stack([distance * np.cos(angle), distance * np.sin(angle),
                       distance * np.tan(elevation)], 1)  # fmt: skip
    rows = np.floor(points / 0.05).astype(np.int32)
    _, first = np.unique(rows, axis=0, return_index=True)
    return _scene(f"scan {count}", rows[np.sort(first)[:count]])


def blobs(shape, share, seed=0):
    """Return the sites of smooth blobs that cover a share of a picture."""
    from sbnet_cupy import masks

    mask = masks.blobs((1, *shape), density=share, seed=seed)[0]
    rows = np.argwhere(mask).astype(np.int32)
    return Scene(f"blobs {share:.0%}", np.pad(rows, ((0, 0), (1, 0))), tuple(shape))


def from_file(path):
    """Return a scan ``.bin`` of float32 rows (x, y, z, intensity), in metres.

    First its voxels of 5 cm, then its cells of 10 cm as seen from above.
    """
    points = np.fromfile(path, np.float32).reshape(-1, 4)[:, :3]
    points = points[np.isfinite(points).all(1)]

    def cells(positions, size):
        return np.unique(np.floor(positions / size).astype(np.int32), axis=0)

    voxels, above = cells(points, 0.05), cells(points[:, :2], 0.1)
    return [_scene("scan of a file", voxels), _scene("scan of a file, from above", above)]


def points_of(scene, channels, seed=0):
    """Return points of a scene, one to three at each site, shuffled: rows, and float32 features."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(np.repeat(scene.rows, rng.integers(1, 4, len(scene.rows)), axis=0))
    return rows, rng.standard_normal((len(rows), channels), np.float32)


def _turned(rng, tilted):
    turn = np.linalg.qr(rng.standard_normal((3, 3)))[0]
    return turn if tilted else np.eye(3)[rng.permutation(3)]


def _scene(name, rows):
    rows = rows - rows.min(axis=0)
    shape = tuple(int(n) + 1 for n in rows.max(axis=0))
    return Scene(name, np.pad(rows, ((0, 0), (1, 0))).astype(np.int32), shape)
