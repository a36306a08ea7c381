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
# # A ResNet on active blocks, in JAX
#
# A small residual network classifies a shape that lies somewhere on a large, mostly empty
# picture. All layers keep only the blocks that are not empty: the picture is cut into blocks
# once, and one list of active blocks serves every stage. Listing the blocks, the network and its
# gradients run inside one `jit`.
#
# Needs `pip install -e ".[demo,jax]"` in a checkout of this repository.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import sbnet_cupy.jax as sbj

SIZE, BLOCK, BATCH = 96, 16, 32
NAMES = ("disc", "square", "cross")

# %% [markdown]
# ## Pictures
#
# A disc, a square or a cross of 10 to 18 pixels, turned by a random angle, with noise on it.


# %%
def pictures(rng, count):
    """Return float32 [count, SIZE, SIZE, 1], 0 where there is nothing, and the shapes' numbers."""
    label = rng.integers(0, len(NAMES), count)
    middle = rng.uniform(14, SIZE - 14, (2, count, 1, 1))
    radius = rng.uniform(5, 9, (count, 1, 1))
    turn = rng.uniform(0, np.pi, (count, 1, 1))
    y, x = np.arange(SIZE)[:, None] - middle[0], np.arange(SIZE) - middle[1]
    u, v = (np.abs(f) / radius for f in (y * np.cos(turn) - x * np.sin(turn),
                                         y * np.sin(turn) + x * np.cos(turn)))  # fmt: skip
    shapes = np.stack([np.hypot(u, v) < 1, np.maximum(u, v) < 0.9,
                       (np.maximum(u, v) < 1) & (np.minimum(u, v) < 0.3)])  # fmt: skip
    shown = shapes[label, np.arange(count)]
    noisy = shown * rng.uniform(0.5, 1, shown.shape)
    return noisy[..., None].astype(np.float32), label


images, labels = pictures(np.random.default_rng(0), BATCH)
print(images.shape, f"{(images > 0).mean():.1%} of the pixels are not 0")

# %% [markdown]
# ## The network
#
# `block_table` lists the blocks that contain a pixel that is not 0. `stack_conv2d` convolves the
# stack of these blocks as if it were the image: at the edge of a block it reads the neighbouring
# block, or 0 if that block is not active. A stride of 2 halves the blocks along with the image,
# so the list of blocks stays the same; `after_conv` returns the table of the next stage. Scale,
# bias, shortcut and activation are part of the call.


# %%
def block_list(images):
    """Return the table of active blocks; room for 6 a picture is enough for these shapes."""
    mask = jnp.abs(images[..., 0]) > 0
    return sbj.block_table(mask, BLOCK, capacity=6 * len(images))


def unit(p, x, table, stride):
    """Return a residual unit of a stack, and the table of its result."""
    after = table.after_conv(3, stride, 1)
    y = sbj.stack_conv2d(
        x, p["first"], table, strides=stride, padding=1, bias=p["bias"][0], activation="relu"
    )
    if "shortcut" in p:
        x = sbj.stack_conv2d(x, p["shortcut"], table, strides=stride, padding=0)
    second = {"padding": 1, "scale": p["scale"], "bias": p["bias"][1], "activation": "relu"}
    return sbj.stack_conv2d(y, p["second"], after, residual=x, **second), after


STRIDES = (1, 2, 1, 2)  # of the units


def resnet(params, images):
    """Return a number for each class."""
    table = block_list(images)
    x = sbj.stack_from_image(images, table)
    x = sbj.stack_conv2d(x, params["stem"], table, padding=1, activation="relu")
    for p, stride in zip(params["units"], STRIDES, strict=True):
        x, table = unit(p, x, table, stride)
    features = sbj.stack_global_pool(x, table, mode="max")
    return features @ params["head"]


def weights(rng, widths=(8, 16, 16, 32)):
    """Return the parameters; the second scale of each unit begins small."""

    def kernel(*shape):
        normal = rng.standard_normal(shape, np.float32)
        return jnp.asarray(normal * (2 / np.prod(shape[:-1])) ** 0.5)

    units, before = [], 8
    for width, stride in zip(widths, STRIDES, strict=True):
        p = {"first": kernel(3, 3, before, width), "second": kernel(3, 3, width, width),
             "bias": jnp.zeros((2, width)), "scale": jnp.full(width, 0.3)}  # fmt: skip
        if stride > 1 or before != width:
            p["shortcut"] = kernel(1, 1, before, width)
        units.append(p)
        before = width
    return {"stem": kernel(3, 3, 1, 8), "units": units, "head": kernel(before, len(NAMES))}


params = weights(np.random.default_rng(1))
table = block_list(jnp.asarray(images))
active, total = int(table.bin_counts[0]), table.grid.size
print(f"{active} of {total} blocks are active:", jax.jit(resnet)(params, images).shape)

# %% [markdown]
# ## Training
#
# `value_and_grad` differentiates all of it.


# %%
def loss_of(params, images, labels):
    """Return the cross entropy."""
    scores = jax.nn.log_softmax(resnet(params, images))
    return -jnp.take_along_axis(scores, labels[:, None], 1).mean()


@jax.jit
def step(params, momentum, images, labels):
    """Take a step of gradient descent with momentum."""
    loss, grads = jax.value_and_grad(loss_of)(params, images, labels)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.02 * m, params, momentum), momentum, loss


rng, losses = np.random.default_rng(2), []
momentum = jax.tree.map(jnp.zeros_like, params)
for _ in range(150):
    params, momentum, loss = step(params, momentum, *pictures(rng, BATCH))
    losses.append(float(loss))
print(f"loss {np.mean(losses[:10]):.2f} at first, {np.mean(losses[-10:]):.2f} in the end")

# %% [markdown]
# ## What it found
#
# New pictures with their active blocks, and the shape that the network predicts.

# %%
images, labels = pictures(np.random.default_rng(3), 8 * BATCH)
found = np.concatenate([jax.jit(resnet)(params, part).argmax(1) for part in np.split(images, 8)])
right = (found == labels).mean()
print(f"{'most' if right > 0.9 else 'some'} of {len(labels)} other pictures are named rightly")

figure, axes = plt.subplots(1, 6, figsize=(9, 1.9), layout="constrained")
table = block_list(jnp.asarray(images[:6]))
for sample, axis in enumerate(axes):
    axis.imshow(images[sample, :, :, 0], cmap="gray_r")
    for n, row, column in np.asarray(table.active_block_indices)[: int(table.bin_counts[0])]:
        if n == sample:
            corner = (column * BLOCK - 0.5, row * BLOCK - 0.5)
            axis.add_patch(plt.Rectangle(corner, BLOCK, BLOCK, fill=False, edgecolor="tab:red"))
    axis.set_title(NAMES[found[sample]])
    axis.set_xticks([]), axis.set_yticks([])
plt.show()
