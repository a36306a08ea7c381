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
# # Whole networks on active blocks
#
# `sparsify` runs an ordinary PyTorch network only in the blocks of an image in which a mask is
# set. This notebook does that on a CPU, in float32, with two networks: ResNet-18 on a LiDAR scan
# seen from above, and a U-Net on a picture of stained tissue. It
#
# - compares results and times with the dense networks, layer by layer,
# - finds the share of active blocks at which both take the same time,
# - shows what changes near the edges of active blocks.
#
# Needs `pip install -e ".[demo,torch]"` in a checkout of this repository. The weights are random;
# they do not affect how long a network takes.

# %%
import time

import matplotlib.pyplot as plt
import numpy as np
import torch
from skimage import color, data
from torch import nn

import sbnet_cupy as sb
from sbnet_cupy.torch import sparsify

torch.manual_seed(0)
torch.set_grad_enabled(False)
rng = np.random.default_rng(0)


def milliseconds(run, repeats=4):
    """Return the least time of some calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


# %% [markdown]
# ## ResNet-18, without its classifier


# %%
def conv_norm(cin, cout, kernel=3, stride=1):
    """Return convolution and batch norm."""
    conv = nn.Conv2d(cin, cout, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(cout))


class Basic(nn.Module):
    """Two convolutions, added to their input."""

    def __init__(self, cin, cout, stride):
        super().__init__()
        self.body = nn.Sequential(conv_norm(cin, cout, 3, stride), nn.ReLU(), conv_norm(cout, cout))
        self.down = conv_norm(cin, cout, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        """Add."""
        return torch.relu(self.body(x) + self.down(x))


def resnet18(channels):
    """Return the features of a ResNet-18 with ``channels`` in its input."""
    layers, cin = [conv_norm(channels, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
    for cout in (64, 128, 256, 512):
        layers += [Basic(cin, cout, 1 if cout == 64 else 2), Basic(cout, cout, 1)]
        cin = cout
    return nn.Sequential(*layers).eval().to(memory_format=torch.channels_last)


network = resnet18(3)

# %% [markdown]
# ## A scan, seen from above
#
# Cars and walls on an area of 51 by 38 metres, as points on their outlines. A cell of 10 cm has
# features if it contains points; all others are 0. The network only needs to compute where there
# are points.


# %%
def outlines(boxes, spacing=0.04):
    """Return points (x, y, z) on the sides of boxes (x, y, length, width)."""
    points = []
    for x, y, length, width in boxes:
        along = np.arange(0, length, spacing)
        across = np.arange(0, width, spacing)
        for edge in (0, width):
            points.append(np.stack([x + along, y + edge + 0 * along], 1))
        for edge in (0, length):
            points.append(np.stack([x + edge + 0 * across, y + across], 1))
    points = np.concatenate(points) + 0.03 * rng.standard_normal((sum(map(len, points)), 2))
    return np.column_stack([points, rng.uniform(0.1, 1.6, len(points))]).astype(np.float32)


boxes = [(6, 5, 4.4, 1.8), (14, 5.3, 4.4, 1.8), (31, 5, 4.4, 1.8), (9, 30, 4.6, 1.9)]
boxes += [(24, 29.7, 4.4, 1.8), (40, 14, 1.8, 4.4), (19, 20, 0.6, 0.6), (44, 33, 5, 3)]
points = outlines(boxes)
area = {"x_range": (0.0, 51.2), "y_range": (0.0, 38.4), "cell": 0.1}
mask = torch.from_numpy(sb.masks.birds_eye(points, z_range=(0.0, 2.0), **area))
row, column = (points[:, :2] / area["cell"]).astype(int).clip(0, (511, 383)).T
features = torch.zeros(1, 3, *mask.shape[1:])
features[0, 0, row, column] = 1.0
features[0, 1, row, column] = torch.from_numpy(points[:, 2])
features[0, 2].index_put_((torch.tensor(row), torch.tensor(column)), torch.tensor(0.1), True)
features = features.to(memory_format=torch.channels_last)

sparse = sparsify(network, block_size=32)
result, expected = sparse(features, mask), network(features)
share = next(iter(sparse.computed().values()))
print(f"{len(points)} points; {mask.float().mean():.1%} of the cells, {share:.0%} of the blocks")
print(f"result {tuple(result.shape)}, dense {tuple(expected.shape)}")

# %% [markdown]
# ## Layer by layer
#
# `profile` runs the network once and returns a table with the time of each layer. The column
# "computed" is the share of the dense layer's work. Convolution, batch norm, sum and activation
# run as one call, whose time is in the row of the last of them.

# %%
scan_ms = milliseconds(lambda: network(features))
sparse_ms = milliseconds(lambda: sparse(features, mask))
table = sparse.profile(features, mask).splitlines()
print("\n".join(table[:14]))
print(f"... {len(table) - 14} more")
times_faster = scan_ms / sparse_ms
print(f"dense {scan_ms:.0f} ms, sparse {sparse_ms:.0f} ms: {times_faster:.1f} times as fast")

# %% [markdown]
# ## The crossover
#
# The same network, with more and more of the blocks active. From some share on, the whole image
# is faster than a stack of blocks. There `sparsify` computes the whole image, with 0 outside
# active blocks. `sparse.tune(x)` measures that share.

# %%
blocks = torch.arange(16 * 12).view(1, 16, 12)
shares, times = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0), []
for wanted in shares:
    chosen = (blocks < wanted * blocks.numel()).repeat_interleave(32, 1).repeat_interleave(32, 2)
    sparse.break_even = 2.0  # always blocks
    times.append(milliseconds(lambda chosen=chosen: sparse(features, chosen), 3))
sparse.break_even = None
below = [wanted for wanted, ms in zip(shares, times, strict=True) if ms < scan_ms]
print(f"blocks are faster at {', '.join(f'{wanted:.0%}' for wanted in below)} active")

# %% [markdown]
# ## Stained tissue, and what lies near the edges of blocks
#
# Diaminobenzidine stains some cells brown, and a U-Net of two levels computes only there.
# Activations outside active blocks are 0. So near the edge of an active region the sparse network
# reads zeros where the dense network reads the activations of neighbouring pixels. `halo="exact"`
# adds blocks around the mask, as far as the network's receptive field reaches. Then the result at
# the mask's pixels equals that of the dense network.


# %%
class UNet(nn.Module):
    """Two levels, with a skip connection."""

    def __init__(self):
        super().__init__()
        self.top = nn.Sequential(conv_norm(3, 16), nn.ReLU(), conv_norm(16, 16), nn.ReLU())
        self.low = nn.Sequential(nn.MaxPool2d(2), conv_norm(16, 32), nn.ReLU())
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.head = nn.Sequential(conv_norm(32, 16), nn.ReLU(), nn.Conv2d(16, 1, 1))

    def forward(self, x):
        """Return one value for each pixel."""
        top = self.top(x)
        return self.head(torch.cat([top, self.up(self.low(top))], 1))


tissue = data.immunohistochemistry()
brown = torch.from_numpy(color.rgb2hed(tissue)[..., 2].astype(np.float32))
smooth = nn.functional.avg_pool2d(brown[None, None], 15, 1, 7)[:, 0]
stained = smooth > smooth.quantile(0.97)
x = torch.from_numpy(tissue / np.float32(255)).permute(2, 0, 1)[None]  # channels_last
unet = UNet().eval().to(memory_format=torch.channels_last)
whole = unet(x)
found, away = {}, {}
dense_ms = milliseconds(lambda: unet(x))
for halo in ("zero", "exact"):
    cells = sparsify(unet, 16, halo=halo)
    found[halo] = cells(x, stained)
    error = (found[halo] - whole)[0, 0].abs() / whole.std()
    away[halo] = torch.where(stained[0], error, 0.0)
    worst, share = away[halo].max(), cells.computed()["head.2"]
    sparse_ms = milliseconds(lambda cells=cells: cells(x, stained))
    print(f'halo="{halo}": {share:.0%} of the blocks, largest difference at the mask {worst:.1e}')
    print(f"  dense {dense_ms:.0f} ms, sparse {sparse_ms:.0f} ms")

# %% [markdown]
# Dense results are on the left, results at active blocks on the right. For the scan they are the
# mean over the channels of the last stage, for the tissue the U-Net's result.

# %%
figure, axes = plt.subplots(4, 2, figsize=(8.4, 13), layout="constrained")
axes[0, 0].imshow(mask[0].T, cmap="gray_r", origin="lower", interpolation="antialiased")
axes[0, 0].set_title("The scan's mask")
axes[0, 1].plot([100 * wanted for wanted in shares], times, "o-", label="blocks")
axes[0, 1].axhline(scan_ms, color="black", ls="--", label="dense")
axes[0, 1].set(xlabel="active blocks, %", ylabel="ms", title="ResNet-18", ylim=(0, None))
axes[0, 1].legend()
scan = (image[0].mean(0).T for image in (expected, result))
cells = (image[0, 0] for image in (whole, found["zero"]))
for line, name, (dense, active) in zip(axes[1:3], ("scan", "tissue"), (scan, cells), strict=True):
    for axis, image, title in zip(line, (dense, active), ("dense", "sparse"), strict=True):
        limits = {"vmin": dense.min(), "vmax": dense.max()}
        axis.imshow(image, origin="lower" if name == "scan" else "upper", **limits)
        axis.set_title(f"The {name}, {title}")
axes[3, 0].imshow(tissue[128:384, 128:384])
axes[3, 0].contour(stained[0, 128:384, 128:384], [0.5], colors="black", linewidths=0.8)
axes[3, 0].set_title("Stained cells")
shown = axes[3, 1].imshow(away["zero"][128:384, 128:384], cmap="magma")
axes[3, 1].set_title('halo="zero": difference / deviation')
figure.colorbar(shown, ax=axes[3, 1])
for axis in (axes[0, 0], *axes[1:].flat):
    axis.set(xticks=[], yticks=[])
plt.show()
