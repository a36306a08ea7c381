"""Files for the tests of the demo: pictures of a made-up sky, made-up LiDAR scans."""

import numpy as np


def sky(shape=(64, 90), seed=0):
    """A grey picture, uint8: noise, and twelve round sources well apart."""
    rng = np.random.default_rng(seed)
    picture = rng.normal(20, 2, shape)
    rows, columns = np.indices(shape)
    for i in range(3):
        for j in range(4):
            distance = (rows - 12 - 20 * i) ** 2 + (columns - 12 - 21 * j) ** 2
            picture += 180 * np.exp(-distance / (2 * 1.7**2))
    return picture.clip(0, 255).astype(np.uint8)


def write_png(path, pixels):
    """Write a picture file; return its path as text."""
    from skimage.io import imsave

    imsave(path, pixels, check_contrast=False)
    return str(path)


def write_scan(path, points=4000, seed=0):
    """A synthetic scan: a wall before the sensor, clutter, and three points that do not fit."""
    rng = np.random.default_rng(seed)
    scan = rng.uniform((2, -3, -2, 0), (9, 3, 1, 1), (points, 4)).astype(np.float32)
    scan[: points // 2, 0] = 6
    scan[:3] = [[np.nan, 0, 0, 0], [500, 0, 0, 0], [5, 0, np.inf, 0]]
    scan.tofile(path)
    return str(path)


def lidar(columns=4, beams=16, turns=120, seed=0):
    """Points of a turning sensor before walls, float32 [P, columns], in the order of a scan.

    x, y, z, intensity 0 to 255, ring, azimuth.
    """
    rng = np.random.default_rng(seed)
    azimuth, height = np.meshgrid(
        np.linspace(-np.pi, np.pi, turns, endpoint=False), np.linspace(-0.4, 0.05, beams)
    )
    wall = (8 + 10 * abs(np.sin(3 * azimuth))) / np.cos(height)
    ground = np.where(height < 0, 1.7 / np.sin(np.maximum(-height, 1e-3)), np.inf)
    distance = np.minimum(wall, ground) + rng.normal(0, 0.02, wall.shape)
    ring = np.broadcast_to(np.arange(beams)[:, None], wall.shape)
    table = [
        distance * np.cos(height) * np.cos(azimuth),
        distance * np.cos(height) * np.sin(azimuth),
        distance * np.sin(height),
        np.floor(255 * rng.beta(1, 4, wall.shape)),
        ring,
        azimuth,
    ]
    return np.stack(table, axis=-1).reshape(-1, 6)[:, :columns].astype(np.float32)
