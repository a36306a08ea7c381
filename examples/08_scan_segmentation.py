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
# # Labels for the points of a scan: a U-Net on voxels
#
# A LiDAR scan occupies a thousandth of the cells of its grid. A U-Net of submanifold convolutions
# computes only at the voxels that contain points. This notebook makes synthetic scans of a
# street, trains such a network for a minute on a CPU to tell the ground, walls, poles and cars
# apart, and draws its labels for a scan that it has not seen.
#
# Needs `pip install -e ".[demo,torch]"` in a checkout of this repository. It runs on a CPU, or on
# a GPU if there is one. To label your own scan, set the environment variable `SBNET_POINTS` to a
# file of x, y, z and reflectance as float32, such as a `.bin` file of KITTI.

# %%
import os

import matplotlib.pyplot as plt
import numpy as np
import torch

import sbnet_cupy.torch.scn as scn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("ground", "wall", "pole", "car")

# %% [markdown]
# ## A scan
#
# A sensor 1.8 m above a street sends rays in 24 rings. Each ray ends at what it hits first: the
# ground, a wall on either side, a pole, or a car. The end of a ray is a point, with noise of 2
# cm.


# %%
def scan(rng, rings=24, rays=400, reach=24.0):
    """Return points, float32 [n, 3] in metres, and what each is, int64 [n]."""
    angle = np.tile(np.linspace(-np.pi, np.pi, rays, endpoint=False), rings)
    down = np.repeat(np.deg2rad(np.linspace(-3, 22, rings)), rays)
    way = np.stack([np.cos(down) * np.cos(angle), np.cos(down) * np.sin(angle), -np.sin(down)])
    with np.errstate(divide="ignore", invalid="ignore"):
        ends = [np.where(way[2] < 0, -1.8 / way[2], np.inf)]  # the ground
        sides = [np.where(way[1] * side > 0, side * away / way[1], np.inf)
                 for side, away in ((1, rng.uniform(7, 11)), (-1, rng.uniform(7, 11)))]  # fmt: skip
        ends.append(np.minimum(*sides))
        poles = [upright(way, *place, 0.15) for place in places(rng, 8, 5.5)]
        ends.append(np.min(poles, 0))
        cars = [box(way, *place, (2.1, 0.9, 1.5)) for place in places(rng, 6, 3.2)]
        ends.append(np.min(cars, 0))
    distance, label = np.min(ends, 0), np.argmin(ends, 0)
    distance = distance + rng.normal(0, 0.02, len(distance))
    seen = distance < reach
    return (way * distance).T[seen].astype(np.float32), label[seen]


def places(rng, count, side):
    """Return places along both sides of the street."""
    return np.stack([rng.uniform(-20, 20, count), side * rng.choice([-1, 1], count)], 1)


def upright(way, x, y, radius):
    """Return how far away rays meet a pole without end; inf where they do not."""
    a, b = way[0] ** 2 + way[1] ** 2, way[0] * x + way[1] * y
    root = b**2 - a * (x**2 + y**2 - radius**2)
    return np.where((root > 0) & (b > 0), (b - np.sqrt(np.abs(root))) / a, np.inf)


def box(way, x, y, half):
    """Return how far away rays meet a car on the ground; inf where they do not."""
    middle = np.array([x, y, half[2] / 2 - 1.8])
    size = np.array([half[0], half[1], half[2] / 2])
    planes = (middle[:, None] + np.array([[-1], [1]])[:, None] * size[:, None]) / way
    near, far = planes.min(0).max(0), planes.max(0).min(0)
    return np.where((near < far) & (near > 0), near, np.inf)


points, label = scan(np.random.default_rng(0))
print(f"{len(points)} points:", dict(zip(NAMES, np.bincount(label).tolist(), strict=True)))

# %% [markdown]
# ## Voxels
#
# Voxels have sides of 20 cm. `InputLayer` takes the points of all samples, with the index of the
# sample in the last column, and combines the points of each voxel; mode 4 is their mean. The
# features of a point are its height and its position in its voxel. `OutputLayer` gives each point
# the features of its voxel.

# %%
VOXEL, GRID = 0.2, (256, 256, 32)


def batch_of(scans):
    """Return coordinates [n, 4], features [n, 4] and labels [n] of several scans."""
    rows, features, labels = [], [], []
    for sample, (points, label) in enumerate(scans):
        place = points / VOXEL + np.array([GRID[0] / 2, GRID[1] / 2, 12])
        cell = np.floor(place)
        rows.append(np.column_stack([cell, np.full(len(cell), sample)]))
        features.append(np.column_stack([points[:, 2:], place - cell - 0.5]))
        labels.append(label)
    rows, labels = (torch.from_numpy(np.concatenate(a).astype(np.int64)) for a in (rows, labels))
    features = torch.from_numpy(np.concatenate(features).astype(np.float32))
    return rows, features.to(device), labels.to(device)


net = scn.Sequential(
    scn.InputLayer(3, GRID, mode=4),
    scn.SubmanifoldConvolution(3, 4, 16, 3, False),
    scn.UNet(3, 1, [16, 24, 32, 40], residual_blocks=True, downsample=[2, 2]),
    scn.BatchNormReLU(16),
    scn.OutputLayer(3),
    torch.nn.Linear(16, len(NAMES)),
).to(device)
rows, features, labels = batch_of([(points, label)])
voxels = net[0]([rows, features])
share = len(voxels.features) / np.prod(GRID)
print(f"{len(voxels.features)} voxels, {share:.2%} of the grid")
print("scores:", tuple(net([rows, features]).shape))

# %% [markdown]
# ## Training
#
# Each step uses two new scans. The loss weighs rare classes more.

# %%
optimizer = torch.optim.Adam(net.parameters(), 0.01)
weight = torch.tensor([0.5, 0.5, 3.0, 1.0], device=device)
rng, losses = np.random.default_rng(1), []
for _ in range(30):
    rows, features, labels = batch_of([scan(rng), scan(rng)])
    loss = torch.nn.functional.cross_entropy(net([rows, features]), labels, weight)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {losses[0]:.1f} at first, {np.mean(losses[-5:]):.1f} in the end")

# %% [markdown]
# ## A new scan
#
# The intersection over union of each class, and the labelled scan from above. Your own scan has
# no labels to compare with, and only its points inside the grid are used.

# %%
net.eval()
path = os.environ.get("SBNET_POINTS")
if path:
    points = np.fromfile(path, np.float32).reshape(-1, 4)[:, :3]
    inside = np.abs(points) < np.array([25.0, 25.0, 2.3])
    points, label = points[inside.all(1)], None
else:
    points, label = scan(np.random.default_rng(2))
with torch.no_grad():
    unknown = np.zeros(len(points), np.int64)
    rows, features, _ = batch_of([(points, unknown if label is None else label)])
    found = net([rows, features]).argmax(1).cpu().numpy()
if label is None:
    print(dict(zip(NAMES, np.bincount(found, minlength=len(NAMES)).tolist(), strict=True)))
for number, name in enumerate(NAMES if label is not None else ()):
    both, either = (found == number) & (label == number), (found == number) | (label == number)
    print(f"{name:>6}: {both.sum() / either.sum():.1f}")

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained", sharey=True)
colours = np.array(["silver", "tab:brown", "tab:red", "tab:blue"])
left = ("points", np.zeros_like(found)) if label is None else ("true", label)
for axis, (title, labels) in zip(axes, (left, ("found", found)), strict=True):
    order = np.argsort(labels)
    axis.scatter(*points[order, :2].T, s=0.4, c=colours[labels[order]])
    axis.set_title(title)
    axis.set_aspect("equal")
plt.show()
