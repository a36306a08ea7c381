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
# # A ResNet in PyTorch, made sparse
#
# A handwritten digit lies somewhere on a large, empty sheet, and a small ResNet classifies it.
# `sparsify` turns the ResNet into a network that computes only where there is ink. It has the
# same modules and weights, and takes the mask as a second argument. This notebook compares it
# with the dense network, and trains it.
#
# Needs `pip install -e ".[examples]"` in a checkout of this repository. It runs on a GPU if
# PyTorch and CuPy see one.

# %%
import importlib.util

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import sbnet_cupy.torch as st

gpu = torch.cuda.is_available() and importlib.util.find_spec("cupy") is not None
device = torch.device("cuda" if gpu else "cpu")
torch.backends.cudnn.allow_tf32 = False  # IEEE float32 in the dense network too
torch.manual_seed(0)
rng = np.random.default_rng(0)

# %% [markdown]
# ## Digits on a sheet
#
# The digits of scikit-learn have 8 x 8 pixels. Each is enlarged to 16 x 16 and placed at random
# on a sheet of 80 x 80. The mask is True where there is ink.

# %%
small, label = load_digits(return_X_y=True)
images = np.zeros((len(small), 1, 80, 80), np.float32)
for image, digit in zip(images[:, 0], small.reshape(-1, 8, 8) / 16, strict=True):
    top, left = rng.integers(0, 80 - 16, 2)
    image[top : top + 16, left : left + 16] = np.kron(digit, np.ones((2, 2)))

order = rng.permutation(len(images))
images, label = (torch.from_numpy(a[order]).to(device) for a in (images, label))
ink = images[:, 0] > 0
train, test = slice(0, 1397), slice(1397, None)
print(f"{len(images[train])} sheets to train on, {len(images[test])} to test on")
print(f"{ink.float().mean():.1%} of the pixels hold ink")

# %% [markdown]
# ## The dense network
#
# An ordinary PyTorch network: nothing in it knows of blocks or masks. The digit may lie anywhere,
# so the head takes the maximum over all pixels.


# %%
class BasicBlock(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.relu = nn.ReLU()
        self.shortcut = nn.Identity()
        if stride != 1 or cin != cout:
            projection = nn.Conv2d(cin, cout, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(cout))

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.shortcut(x))


dense = nn.Sequential(
    nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
    BasicBlock(8, 16), BasicBlock(16, 32, stride=2), BasicBlock(32, 64, stride=2),
    nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(64, 10),
).to(device)  # fmt: skip


def fit(network, inputs, steps):
    """Train on random batches of the inputs; return the loss of each step."""
    network.train()
    optimizer = torch.optim.Adam(network.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=steps)
    losses = []
    for _ in range(steps):
        chosen = torch.from_numpy(rng.integers(0, train.stop, 32)).to(device)
        logits = network(*(tensor[chosen] for tensor in inputs))
        loss = nn.functional.cross_entropy(logits, label[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def predict(network, *inputs):
    """Return the logits of the test sheets."""
    return network.eval()(*(tensor[test] for tensor in inputs))


def accuracy(logits):
    return (logits.argmax(1) == label[test]).float().mean().item()


losses = fit(dense, [images], steps=100)
expected = predict(dense, images)
print(f"loss {losses[0]:.2f}, after {len(losses)} steps {np.mean(losses[-10:]):.2f}")
print(f"dense: {accuracy(expected):.1%} of the test sheets are right")

# %% [markdown]
# ## The sparse network
#
# The sheet is cut into 5 x 5 blocks of 16 pixels. After a call, the table shows for every layer
# where it ran and which share of it was computed. `dense_layers` names functions that need the
# whole image.

# %%
sparse = st.sparsify(dense, block_size=16)
inked = predict(sparse, images, ink)
print(sparse.table())
print()
for name, why in sparse.dense_layers.items():
    print(f"{name}: {why}")

# %% [markdown]
# With a full mask every block is active, and the result is that of the dense network. The
# predictions are the same, and the logits differ only by rounding, because sums are added up in
# another order. The rounding error grows like the square root of the number of terms.

# %%
full = predict(sparse, images, torch.ones_like(ink))
convolutions = [dense.get_submodule(name) for name in sparse.sparse_layers]
terms = sum(conv.weight[0].numel() for conv in convolutions)
rounding = terms**0.5 * torch.finfo(torch.float32).eps * expected.abs().max().item()
difference = (full - expected).abs().max().item()
assert torch.equal(full.argmax(1), expected.argmax(1))
assert difference <= rounding
print(f"full mask: {accuracy(full):.1%}, every prediction as before")
print(f"largest difference of a logit: {difference:.0e}, within {rounding:.0e}")

# %% [markdown]
# ## Only where there is ink
#
# A block is active if it contains ink. The same blocks are active in all layers.

# %%
inked = predict(sparse, images, ink)
computed = sparse.computed()
for name in sparse.sparse_layers:
    print(f"{name:14} computes {computed[name]:.1%} of its blocks")
print(f"ink mask: {accuracy(inked):.1%} of the test sheets are right")

# %% [markdown]
# ## Training through the sparse network
#
# Far from the ink, activations of the dense network are what its batch norms make of an empty
# sheet. In the sparse network they are zeros, which the weights were not trained for. So training
# continues with the mask, to adapt the weights. Gradients are computed on active blocks only,
# too.

# %%
tuning = fit(sparse, [images, ink], steps=120)
tuned = predict(sparse, images, ink)
first, last = np.mean(tuning[:10]), np.mean(tuning[-10:])
assert last < first and accuracy(tuned) > accuracy(inked)
print(f"loss {first:.2f}, after {len(tuning)} steps {last:.2f}")
print(f"ink mask: {accuracy(tuned):.1%} of the test sheets are right")

# %% [markdown]
# ## The picture
#
# The digits on their sheets, with the active blocks.

# %%
shown = slice(test.start, test.start + 4)
step = sparse.block_size
active = st.reduce_mask(ink[shown], (5, 5), bsize=step)
figure, axes = plt.subplots(2, 4, figsize=(8, 4.4), layout="constrained")
for number, (above, below) in enumerate(axes.T):
    sheet = shown.start + number
    above.imshow(images[sheet, 0].cpu(), cmap="gray_r")
    above.set_title(f"{tuned[number].argmax()}, truly {label[sheet]}")
    below.imshow(ink[sheet].cpu(), cmap="gray_r")
    for n, hi, wi in active.active_block_indices.tolist():
        if n == number:
            corner = wi * step[1] - 0.5, hi * step[0] - 0.5
            below.add_patch(plt.Rectangle(corner, *step[::-1], color="tab:orange", alpha=0.4, lw=0))
for axis in axes.flat:
    axis.set(xticks=[], yticks=[])
axes[0, 0].set_ylabel("sheet")
axes[1, 0].set_ylabel("mask; blocks")
plt.show()
