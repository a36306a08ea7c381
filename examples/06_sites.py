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
# # Features at sites: SparseConvNet's hello world
#
# A submanifold convolution computes only at listed cells of a grid, the **sites**. So thin
# strokes stay thin from layer to layer. `sbnet_cupy.torch.scn` has the layers of
# [SparseConvNet](https://github.com/facebookresearch/SparseConvNet) under their original names.
# This notebook runs SparseConvNet's first example, two messages in one batch, and draws the
# features along the network.
#
# Needs `pip install -e ".[demo,torch]"` in a checkout of this repository. It runs on a CPU, or on
# a GPU if there is one.

# %%
import matplotlib.pyplot as plt
import torch

import sbnet_cupy.torch.scn as scn

torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown]
# ## A network
#
# A VGG network with three poolings, a submanifold convolution to 32 planes (channels), and a
# layer that writes the features to a dense grid. `input_spatial_size` computes the size of the
# input from that of the output, here 10 x 10 cells.

# %%
model = (
    scn.Sequential()
    .add(
        scn.SparseVggNet(
            2, 1,
            [["C", 8], ["C", 8], ["MP", 3, 2],
             ["C", 16], ["C", 16], ["MP", 3, 2],
             ["C", 24], ["C", 24], ["MP", 3, 2]],
        )
    )
    .add(scn.SubmanifoldConvolution(2, 24, 32, 3, False))
    .add(scn.BatchNormReLU(32))
    .add(scn.SparseToDense(2, 32))
    .to(device)
)  # fmt: skip
size = model.input_spatial_size(torch.LongTensor([10, 10]))
print("spatial size of the input:", size.tolist())

# %% [markdown]
# ## Two messages
#
# Each X is a point with one feature. An `InputLayer` takes the points of all samples as one list
# of coordinates. The last column is the index of the sample.

# %%
messages = [
    [
        " X   X  XXX  X    X    XX     X       X   XX   XXX   X    XXX   ",
        " X   X  X    X    X   X  X    X       X  X  X  X  X  X    X  X  ",
        " XXXXX  XX   X    X   X  X    X   X   X  X  X  XXX   X    X   X ",
        " X   X  X    X    X   X  X     X X X X   X  X  X  X  X    X  X  ",
        " X   X  XXX  XXX  XXX  XX       X   X     XX   X  X  XXX  XXX   ",
    ],
    [
        " XXX              XXXXX      x   x     x  xxxxx  xxx ",
        " X  X  X   XXX       X       x   x x   x  x     x  x ",
        " XXX                X        x   xxxx  x  xxxx   xxx ",
        " X     X   XXX       X       x     x   x      x    x ",
        " X     X          XXXX   x   x     x   x  xxxx     x ",
    ],
]
locations = torch.LongTensor(
    [
        [y, x, sample]
        for sample, message in enumerate(messages)
        for y, line in enumerate(message)
        for x, letter in enumerate(line)
        if letter == "X"
    ]
)
features = torch.ones(len(locations), 1, device=device)
x = scn.InputLayer(2, size)([locations, features])
print(x)

# %%
output = model(x)
print("output:", tuple(output.shape))

# %% [markdown]
# ## Sites stay sparse
#
# Pooling makes a new site for each window that contains a site; submanifold convolutions make
# none. The picture shows the first message at three sizes on the way to the output: the largest
# feature of each site, and nothing where there is no site.

# %%
stages, y = [x], x
for layer in model[0]:
    y = layer(y)
    if isinstance(layer, scn.MaxPooling):
        stages.append(y)
for stage in stages:
    cells = stage.spatial_size.prod().item() * stage.batch_size()
    print(f"{tuple(stage.spatial_size.tolist())}: {len(stage.features)} of {cells} cells are sites")

# %%
figure, axes = plt.subplots(3, 1, figsize=(7, 3.4), layout="constrained")
for axis, stage in zip(axes, stages, strict=False):
    image = scn.SparseToDense(2, stage.features.shape[1])(stage)[0].amax(0).detach().cpu()
    sites = stage.replace(torch.ones_like(stage.features[:, :1]))
    mask = scn.SparseToDense(2, 1)(sites)[0, 0].cpu()
    shown = torch.where(mask > 0, image, torch.nan)
    side = int(stage.spatial_size[0])
    axis.imshow(shown[: side * 7 // 87 + 1, : side * 67 // 87])
    axis.set_ylabel(f"of {side}")
    axis.set_xticks([]), axis.set_yticks([])
plt.show()
