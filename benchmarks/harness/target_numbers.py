"""The numbers of the targets of layers, networks and sites on an H200, in float16.

docs/design/networks.md and docs/design/submanifold.md say where they come from. A key says which
rows a number is for.
"""

# Times faster than the better of eager and compiled dense PyTorch: (network, batch) -> by the share
# of active blocks.
NETWORKS = {
    ("resnet50", "batch 1"): {0.1: 6, 0.25: 3, 0.5: 1.7, 1.0: 0.95},
    ("resnet50", "batch 8"): {0.1: 8, 0.25: 3.6, 0.5: 1.9, 1.0: 0.95},
    ("resnet18", "batch 1"): {0.1: 4.5, 0.25: 2.5, 0.5: 1.6, 1.0: 0.95},
    ("fcn_resnet50", "batch 1"): {0.1: 7, 0.25: 3.3, 0.5: 1.8, 1.0: 0.95},
    ("unet", "batch 1"): {0.1: 6, 0.25: 3, 0.5: 1.7, 1.0: 0.95},
    ("convnext_tiny", "batch 1"): {0.1: 3.5, 0.25: 2, 1.0: 0.9},
    ("mobilenet_v3_large", "batch 1"): {0.1: 2.5, 0.25: 1.5, 1.0: 0.9},
    ("paper", "batch 1"): {0.1: 10, 0.25: 5, 1.0: 1.5},
    ("resnet18, training step", "batch 8"): {0.1: 3, 0.25: 2, 1.0: 0.8},
}
LAYERS = {0.1: 2, 1.0: 0.9}  # times as fast as cuDNN with everything active, by the share

# Microseconds of the forward pass with weights that are packed already: (scene, image) -> by
# channels; the image where a scene has several.
_SCAN = {16: 7, 32: 7, 64: 10, 128: 22, 256: 60}
SITE_CONVOLUTIONS = {
    ("scan 14000", ""): _SCAN,
    ("scan of a file", ""): _SCAN,  # frame 000008 of KITTI, and that from above
    ("scan of a file, from above", ""): {32: 3.5, 64: 4.3, 128: 7.5},
    ("surface 50000", ""): {16: 10, 32: 14, 64: 25, 128: 65, 256: 210},
    ("surface 100000", ""): {16: 13, 32: 24, 64: 42, 128: 108, 256: 370},
    ("surface 500000", ""): {16: 55, 32: 95, 64: 190, 128: 480},
    ("blobs 10%", "400x700"): {24: 6.7},
    ("blobs 10%", "200x350"): {48: 4.5},
    ("blobs 10%", "100x175"): {64: 4.3},
    ("blobs 10%", "50x88"): {96: 5.2},
}
# Microseconds of a tree and the map of a 3^d kernel, by the scene and its image.
SITE_MAPS = {
    ("blobs 10%", "400x700"): 14, ("scan 14000", ""): 20, ("surface 50000", ""): 25,
    ("surface 100000", ""): 32, ("surface 500000", ""): 110,
}  # fmt: skip
SITE_NETWORKS = {  # microseconds, by the scene and what is computed
    ("scan 14000", "second, forward"): 475, ("scan 14000", "unet, forward"): 599,
    ("surface 100000", "second, forward"): 668, ("surface 100000", "unet, forward"): 923,
    ("scan 14000", "second, forward and backward"): 987,
    ("scan 14000", "unet, forward and backward"): 1644,
    ("surface 100000", "second, forward and backward"): 1496,
    ("surface 100000", "unet, forward and backward"): 2998,
}  # fmt: skip
TORCH_HOST = {  # microseconds of the calling thread, by the operation and the variant
    ("sparse_gather", "new result"): 25, ("sparse_conv2d", "new result"): 35,
    ("sparse_res_block_bottleneck", "new result"): 40, ("SparseConv2d", "list of blocks"): 45,
}  # fmt: skip
