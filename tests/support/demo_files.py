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
