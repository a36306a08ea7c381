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
# # Training in JAX
#
# A small network learns to remove noise from a picture of coins, but only where there are coins:
# its convolutions run on the blocks that contain part of a coin. Everything runs inside one
# `jit`, also the listing of the blocks, and `grad` differentiates it.
#
# Needs `pip install -e ".[demo,jax]"` in a checkout of this repository. On a CPU the operations
# use NumPy. On a GPU they are CUDA kernels on XLA's stream, and need CuPy (the extra `cuda13x`).

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from skimage.data import coins

import sbnet_cupy as sb
import sbnet_cupy.jax as sbj

picture = coins()[:288].astype(np.float32) / 255
left, right = (jnp.asarray(half)[None, ..., None] for half in np.hsplit(picture, 2))
print("train on", left.shape, "and look at", right.shape)

# %% [markdown]
# ## Blocks
#
# Both layers have 3 x 3 kernels: blocks of 10 pixels give tiles of 8. The second layer gives
# right results only where all pixels that it reads are right. So the first layer is active on a
# larger mask: `dilate` enlarges it by the one pixel that the second kernel reaches. In `jit`
# shapes are static, so the lists of blocks have a `capacity`. Unused rows hold -1; they take a
# little time, and do not change the results.

# %%
params = sb.calc_block_params(left.shape, bsize=10, ksize=3)
capacity = params.bcount[0] * params.bcount[1]


def coin_mask(image):
    """Return bool [N, H, W]: light, and what surrounds it."""
    return sb.masks.dilate(sb.masks.threshold(np.asarray(image), 0.55), 2)


def lists(mask):
    """List the output tiles of both layers that hold a pixel of the mask."""
    options = {"bsize": params.bsize_out, "capacity": capacity}
    near = jax.lax.reduce_window(mask, False, jnp.logical_or, (1, 3, 3), (1, 1, 1), "SAME")
    return [sbj.reduce_mask(m, params.bcount, **options) for m in (near, mask)]


# %% [markdown]
# ## The network
#
# The network predicts the noise, and returns the noisy picture minus that prediction. Outside
# active blocks a layer gives 0, so there the picture stays as it is.


# %%
def denoise(weights, noisy, mask):
    first, second = lists(mask)
    hidden = sbj.sparse_conv2d(
        noisy, weights["w1"], first, params, bias=weights["b1"], activation="silu"
    )
    return noisy - sbj.sparse_conv2d(hidden, weights["w2"], second, params)


def loss(weights, noisy, clean, mask):
    wrong = jnp.where(mask[..., None], denoise(weights, noisy, mask) - clean, 0)
    return (wrong**2).sum() / mask.sum()


def add_noise(key, image):
    return image + 0.1 * jax.random.normal(key, image.shape)


# %% [markdown]
# ## Training
#
# Adam in a few lines, with new noise in every step.


# %%
@jax.jit
def step(state, key, clean, mask):
    weights, mean, square, count = state
    value, grad = jax.value_and_grad(loss)(weights, add_noise(key, clean), clean, mask)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grad)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, square, grad)

    def move(w, m, s):
        return w - 0.01 * (m / (1 - 0.9**count)) / (jnp.sqrt(s / (1 - 0.99**count)) + 1e-8)

    return (jax.tree.map(move, weights, mean, square), mean, square, count + 1), value


keys = jax.random.split(jax.random.key(0), 123)
weights = {
    "w1": jax.random.normal(keys[0], (3, 3, 1, 16)) * 0.3,
    "b1": jnp.zeros(16),
    "w2": jax.random.normal(keys[1], (3, 3, 16, 1)) * 0.02,
}
zeros = jax.tree.map(jnp.zeros_like, weights)
state, mask = (weights, zeros, zeros, 1), jnp.asarray(coin_mask(left))
losses = []
for key in keys[3:]:
    state, value = step(state, key, left, mask)
    losses.append(float(value))
print(f"mean squared error where there are coins: {losses[0]:.4f}, at last {losses[-1]:.4f}")

# %% [markdown]
# ## On the other half

# %%
noisy, mask = add_noise(keys[2], right), jnp.asarray(coin_mask(right))
clean = jax.jit(denoise)(state[0], noisy, mask)
active = lists(mask)[1]


def error(image):
    return float((((image - right)[..., 0] ** 2) * mask).sum() / mask.sum())


print(f"{active.count()} of {capacity} blocks are active")
print(f"mean squared error there: {error(noisy):.4f} with noise, {error(clean):.4f} without")

# %%
figure, axes = plt.subplots(1, 3, figsize=(7.5, 3.6), layout="constrained")
shown = {"noise; the active blocks": noisy, "denoised there": clean}
for axis, (title, image) in zip(axes, shown.items(), strict=False):
    axis.imshow(image[0, ..., 0], cmap="gray", vmin=0, vmax=1)
    axis.set_title(title)
    axis.set_axis_off()
size = params.bsize_out
for _, hi, wi in np.asarray(active.active_block_indices[: active.count()]):
    corner = wi * size[1] - 0.5, hi * size[0] - 0.5
    axes[0].add_patch(plt.Rectangle(corner, *size, fill=False, color="gold", lw=0.4))
axes[2].semilogy(losses)
axes[2].set(title="training", xlabel="step", ylabel="mean squared error")
plt.show()
