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
# # The operations, on NumPy and CuPy
#
# A source detector looks for stars and galaxies in a picture that is mostly dark. Block-sparse
# convolution runs it only where there is light:
#
# 1. `reduce_mask` lists the blocks that contain light,
# 2. `sparse_gather` copies them into a stack,
# 3. a dense convolution runs on the stack,
# 4. `sparse_scatter` puts the results back.
#
# Needs `pip install -e ".[demo]"` in a checkout of this repository. If there is a GPU and CuPy,
# the same code also runs there.

# %%
import matplotlib.pyplot as plt
import numpy as np
from skimage.data import hubble_deep_field

import sbnet_cupy as sb

picture = hubble_deep_field()[:320, :480]
x = picture.mean(axis=2, dtype=np.float32)[None, ..., None] / 255  # [N, H, W, C]
print(x.shape, x.dtype)

# %% [markdown]
# ## What matters: a mask
#
# A pixel counts as light if it is brighter than the sky by some margin.

# %%
mask = sb.masks.threshold(x, 0.45)
print(f"{mask.mean():.1%} of the pixels hold light")

# %% [markdown]
# ## Blocks
#
# The detector is a difference of two Gaussians, with a kernel of 9 x 9 pixels. A block of 24 x 24
# pixels gives 16 x 16 results, so neighbouring blocks overlap by 8 pixels, the halo.
# `calc_block_params` computes these sizes, and how many blocks cover the picture.

# %%
reach = np.arange(-4, 5)
gaussians = [np.exp(-(reach**2) / (2 * s * s)) for s in (1.0, 2.0)]
narrow, wide = (np.outer(g, g) / g.sum() ** 2 for g in gaussians)
w = (narrow - wide).astype(np.float32)[:, :, None, None]  # [R, S, C, K]

p = sb.calc_block_params(x.shape, bsize=24, ksize=9)
grid = {"bsize": p.bsize, "boffset": p.boffset, "bstride": p.bstride}
print(p)

# %% [markdown]
# ## Gather, convolve, scatter
#
# A tile of 16 x 16 results is active if it contains a pixel of the mask. Active tiles are listed
# as rows `(n, hi, wi)`: image, tile row, tile column. The same rows name the input blocks. On the
# stack the convolution needs no padding: the blocks contain the halo, which is 0 outside the
# picture.


# %%
def detect(x, w, mask):
    active = sb.reduce_mask(mask, p.bcount, bsize=p.bsize_out)
    blocks = sb.sparse_gather(x, *active, **grid)  # [M, 24, 24, 1]
    found = sb.conv2d(blocks, w, padding="VALID", activation="relu")  # [M, 16, 16, 1]
    nothing = 0 * x
    return active, sb.sparse_scatter(found, *active, nothing, bsize=p.bsize_out)


active, sources = detect(x, w, mask)
print(f"{active.count()} of {p.bcount[0] * p.bcount[1]} blocks are active")

# %% [markdown]
# In active blocks the result equals that of the dense convolution, up to rounding.

# %%
dense = sb.conv2d(x, w, activation="relu")
inside = np.kron(active.to_dense()[0], np.ones(p.bsize_out, bool))[: x.shape[1], : x.shape[2]]
error = np.abs(sources - dense)[0, inside].max()
print(f"largest difference inside: {error:.0e}")
print("outside everything is 0:", not sources[0, ~inside].any())

# %% [markdown]
# ## On a GPU
#
# The same function takes CuPy arrays, and then runs CUDA kernels. No array is moved between host
# and GPU: all arrays of a call belong to one library and one device.

# %%
try:
    import cupy
except ImportError:
    cupy = None
if cupy is not None and cupy.cuda.is_available():
    _, on_gpu = detect(*map(cupy.asarray, (x, w, mask)))
    print("largest difference to NumPy:", float(abs(on_gpu.get() - sources).max()))
else:
    print("no GPU here: the arrays above were NumPy's")

# %% [markdown]
# ## The picture

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
left.imshow(picture)
for _, hi, wi in active.active_block_indices:
    corner = wi * p.bsize_out[1] - 0.5, hi * p.bsize_out[0] - 0.5
    left.add_patch(plt.Rectangle(corner, *p.bsize_out, fill=False, color="gold", lw=0.5))
left.set_title(f"Active blocks: {active.density():.0%} of all")
right.imshow(sources[0, ..., 0] ** 0.5, cmap="magma")
right.set_title("Sources")
for axis in (left, right):
    axis.set_axis_off()
plt.show()
