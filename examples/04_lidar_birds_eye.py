# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # LiDAR, seen from above
#
# A laser scanner on a car measures points on the ground and on what stands on it, out to 70 m.
# Seen from above, on a grid of 10 cm cells, nearly all cells are empty. SBNet was made for such
# data. This notebook simulates a scan, makes the bird's-eye mask of its points, and runs a
# convolution on the blocks that contain points.
#
# Needs `pip install -e ".[demo]"` in a checkout of this repository. To use a KITTI scan instead,
# set the environment variable `SBNET_POINTS` to its `.bin` file.

# %%
import os

import matplotlib.pyplot as plt
import numpy as np

import sbnet_cupy as sb

# %% [markdown]
# ## A scan
#
# 64 beams turn around once, 1.73 m above a flat road. Cars and houses are boxes. Each ray ends at
# the first box, or at the ground. The slab method gives the distance to a box: a ray is inside a
# box while it is between the two planes of every axis.


# %%
def road_scene(rng):
    """Return boxes [B, 2, 3]: lower and upper corner, in metres, of cars and houses."""
    boxes = []
    for side in (-1, 1):
        for x in np.arange(-70, 70, 18):  # houses along the road
            depth, height = rng.uniform(8, 14), rng.uniform(4, 10)
            y = sorted((side * 12, side * (12 + depth)))
            boxes.append(([x, y[0], -1.73], [x + rng.uniform(9, 15), y[1], height]))
        for x in np.arange(-65, 65, 9):  # cars, parked and driving
            if rng.random() < 0.75:
                x, y = x + rng.uniform(-2, 2), side * rng.choice([2.0, 7.5])
                if abs(x) > 4:
                    boxes.append(([x, y - 0.9, -1.73], [x + 4.4, y + 0.9, -0.25]))
    return np.array(boxes)


def scan(boxes, rng, beams=64, steps=1800, reach=70.0):
    """Return points [P, 3] in metres, the scanner at the origin."""
    up = np.radians(np.linspace(-24.8, 2.0, beams))[:, None]
    around = np.radians(np.linspace(0, 360, steps, endpoint=False))
    flat = np.cos(up) * np.ones(steps)
    rays = np.stack([flat * np.cos(around), flat * np.sin(around), np.sin(up) + 0 * flat], -1)
    rays = rays.reshape(-1, 3)
    inverse = 1 / np.where(rays == 0, 1e-9, rays)
    with np.errstate(divide="ignore"):
        distance = np.where(rays[:, 2] < 0, -1.73 / rays[:, 2], np.inf)  # to the ground
    for low, high in boxes:
        a, b = low * inverse, high * inverse
        enter, leave = np.minimum(a, b).max(axis=1), np.maximum(a, b).min(axis=1)
        hit = (enter < leave) & (enter > 0)
        distance = np.where(hit, np.minimum(distance, enter), distance)
    seen = distance < reach
    noisy = distance[seen] + 0.02 * rng.standard_normal(seen.sum())
    return (rays[seen] * noisy[:, None]).astype(np.float32)


rng = np.random.default_rng(0)
path = os.environ.get("SBNET_POINTS")
points = np.fromfile(path, np.float32).reshape(-1, 4) if path else scan(road_scene(rng), rng)
print(f"{len(points)} points")

# %% [markdown]
# ## The mask
#
# A cell is active if a point lies in it. Points on the ground are left out: they are everywhere,
# and a detector looks for what stands on the ground.

# %%
area = {"x_range": (-64.0, 64.0), "y_range": (-32.0, 32.0), "cell": 0.1}
standing = (-1.5, 2.5)  # metres below and above the scanner
mask = sb.masks.birds_eye(points, z_range=standing, **area)
print(f"{mask.shape[1]} x {mask.shape[2]} cells, {mask.mean():.2%} of them active")

# %% [markdown]
# ## Features, and a convolution on the active blocks
#
# Each cell has two features that a detector would start from: whether it is occupied, and the
# height of its highest point. The layer is a 5 x 5 convolution from 2 to 16 channels.

# %%
kept = points[(points[:, 2] >= standing[0]) & (points[:, 2] < standing[1])]
row, column = (
    np.floor((kept[:, axis] - area[name][0]) / area["cell"]).astype(int)
    for axis, name in enumerate(("x_range", "y_range"))
)
inside = (row >= 0) & (row < mask.shape[1]) & (column >= 0) & (column < mask.shape[2])
height = np.zeros(mask.shape, np.float32)
np.maximum.at(height, (0, row[inside], column[inside]), kept[inside, 2] - standing[0])
x = np.stack([mask.astype(np.float32), height], axis=-1)  # [1, H, W, 2]

w = rng.standard_normal((5, 5, 2, 16)).astype(np.float32) * 0.2
params = sb.calc_block_params(x.shape, bsize=36, ksize=5)
active = sb.reduce_mask(mask, params.bcount, bsize=params.bsize_out)
y = sb.sparse_conv2d(x, w, active, params, activation="relu")
print(f"{active.count()} blocks, {active.density():.0%} of the area, gave", y.shape)

# %% [markdown]
# In the active blocks the result equals that of the dense convolution.

# %%
dense = sb.conv2d(x, w, activation="relu")
tiles = np.kron(active.to_dense()[0], np.ones(params.bsize_out, bool))
tiles = tiles[: mask.shape[1], : mask.shape[2]]
print(f"largest difference: {np.abs(y - dense)[0, tiles].max():.0e}")

# %%
figure, (above, below) = plt.subplots(2, 1, figsize=(7, 7.6), layout="constrained")
above.imshow(mask[0].T, cmap="gray_r", origin="lower", interpolation="antialiased")
for _, hi, wi in active.active_block_indices:
    corner = hi * params.bsize_out[0] - 0.5, wi * params.bsize_out[1] - 0.5
    above.add_patch(plt.Rectangle(corner, *params.bsize_out, color="tab:orange", alpha=0.25, lw=0))
above.set_title(f"Points from above; active blocks: {active.density():.0%} of the area")
below.imshow(y[0].max(axis=-1).T, cmap="magma", origin="lower", interpolation="antialiased")
below.set_title("Strongest of the 16 channels")
for axis in (above, below):
    axis.set(xticks=[], yticks=[])
plt.show()
