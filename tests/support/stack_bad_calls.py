"""The table of bad calls of the operations on a stack of blocks; see bad_calls.py."""

import numpy as np

from sbnet_cupy import DTypeError, ShapeError, block_table
from support.bad_calls import LIST, STRIDED, Spoiled, ramp

TABLE = block_table(np.ones((1, 8, 8), bool), 4)
STACK, WEIGHTS = ramp(4, 4, 4, 2), ramp(3, 3, 2, 4)
HALVED = ramp(4, 2, 2, 2)
POOL = {"x": STACK, "table": TABLE, "kernel": 2}
RESIZE = {"x": STACK, "table": TABLE, "scale_factor": 2}
CONV = {"x": STACK, "w": WEIGHTS, "table": TABLE}

VALID = {
    "BlockTable": {
        "bin_counts": TABLE.bin_counts, "active_block_indices": TABLE.active_block_indices,
        "grid": TABLE.grid, "block_size": (4, 4), "image_size": (8, 8),
    },
    "block_table": {"mask": ramp(1, 8, 8), "block_size": 4},
    "stack_from_image": {"x": ramp(1, 8, 8, 2), "table": TABLE},
    "stack_from_image_grad": {"grad_stack": STACK, "table": TABLE},
    "stack_to_image": {"stack": STACK, "table": TABLE},
    "stack_to_image_grad": {"grad_y": ramp(1, 8, 8, 2), "table": TABLE},
    "stack_halo": {"x": STACK, "table": TABLE, "pads": 1},
    "stack_halo_grad": {"grad_y": ramp(4, 6, 6, 2), "table": TABLE, "pads": 1},
    "stack_conv2d": CONV,
    "stack_conv2d_grad": {"grad_y": ramp(4, 4, 4, 4)} | CONV,
    "stack_max_pool": POOL,
    "stack_max_pool_grad": {"grad_y": HALVED} | POOL,
    "stack_avg_pool": POOL,
    "stack_avg_pool_grad": {"grad_y": HALVED} | POOL,
    "stack_global_pool": {"x": STACK, "table": TABLE},
    "stack_global_pool_grad": {"grad_y": ramp(1, 2), "x": STACK, "table": TABLE},
    "stack_per_block": {"values": ramp(1, 2), "table": TABLE},
    "stack_per_block_grad": {"grad_y": ramp(4, 1, 1, 2), "table": TABLE},
    "stack_interpolate": RESIZE,
    "stack_interpolate_grad": {"grad_y": ramp(4, 8, 8, 2)} | RESIZE,
    "stack_pixel_mask": {"table": TABLE},
}  # fmt: skip

V, S, D = ValueError, ShapeError, DTypeError
IMAGES = ("stack_from_image", "stack_to_image_grad", "stack_per_block")
SUBJECTS = {  # what is checked first, where it is not x
    "stack_from_image_grad": "grad_stack", "stack_to_image": "stack", "stack_halo_grad": "grad_y",
    "stack_per_block_grad": "grad_y",
}  # fmt: skip
STACKS = [n for n in VALID if n.startswith("stack") and n not in (*IMAGES, "stack_pixel_mask")]
FLOATS = [n for n in STACKS if n not in ("stack_from_image_grad", "stack_to_image")]
OTHER_GRADIENTS = [n for n in VALID if n.endswith("_grad") and "x" in VALID[n]]
WITH_TABLE = [n for n in VALID if "table" in VALID[n]]
SLIDING = [n for n in VALID if "pool" in n and "global" not in n]

BAD = [
    # function, argument, bad value, exception; the message must name the argument
    *[(n, "table", v, D) for n in WITH_TABLE for v in (None, (1, 2), Spoiled("v.active"))],
    *[
        (n, SUBJECTS.get(n, "x"), v, error)
        for n in STACKS
        if SUBJECTS.get(n, "x") in VALID[n]
        for v, error in [(LIST, D), (Spoiled("v[0]"), S), (Spoiled("v[:3]"), S), (STRIDED, S)]
    ],
    *[(n, SUBJECTS.get(n, "x"), Spoiled("v.astype('i4')"), D) for n in FLOATS],
    *[(n, SUBJECTS.get(n, "x"), Spoiled("v.astype('c8')"), D) for n in FLOATS],
    *[(n, "grad_y", Spoiled("v.astype('f8')"), D) for n in OTHER_GRADIENTS],
    *[(n, "grad_y", Spoiled("v[..., :1].copy()"), S) for n in OTHER_GRADIENTS],
    *[(n, "grad_y", LIST, D) for n in OTHER_GRADIENTS],
    # BlockTable and block_table
    ("BlockTable", "bin_counts", LIST, D),
    ("BlockTable", "bin_counts", Spoiled("v.reshape(())"), S),
    ("BlockTable", "active_block_indices", Spoiled("v[0]"), S),
    ("BlockTable", "grid", Spoiled("v[0]"), S),
    *[("BlockTable", "block_size", v, S) for v in [0, (4, 2.5), None, True]],
    *[("BlockTable", "image_size", v, S) for v in [(9, 8), (8, -1), (8, 8.0), None]],
    *[("block_table", "mask", v, D) for v in [LIST, None, Spoiled("v.astype('c8')")]],
    *[("block_table", "mask", v, S) for v in [Spoiled("v[0, 0]"), Spoiled("v[None, None]")]],
    ("block_table", "mask", STRIDED, S),
    *[("block_table", "block_size", v, S) for v in [0, (4, 2.5), 4.0, None, (1, 2, 3), True]],
    *[("block_table", "avgpool", v, V) for v in [None, 1, "yes", ramp(3)]],
    ("block_table", "image_size", (8, 8), V),
    ("block_table", "tol", float("nan"), V),
    *[("block_table", "capacity", v, S) for v in [-1, 2.5, "3", True]],
    # images
    *[(n, a, v, e) for n, a in [("stack_from_image", "x"), ("stack_to_image_grad", "grad_y")]
      for v, e in [(LIST, D), (Spoiled("v[0]"), S), (STRIDED, S), (Spoiled("v[:, 1:].copy()"), S),
                   (Spoiled("v[:0]"), S), (Spoiled("v.transpose(0, 3, 1, 2).copy()"), S)]],
    *[(n, "data_format", v, V) for n in VALID if "_image" in n for v in ["nhwc", None, 3, ramp(3)]],
    ("stack_from_image", "out", ramp(4, 4, 4, 3), S),
    ("stack_to_image", "out", ramp(1, 8, 8, 3), S),
    ("stack_to_image", "out", ramp(1, 8, 8, 2, dtype=np.float64), D),
    *[("stack_to_image", "background", v, D) for v in [None, "0", ramp(2, dtype=np.float64)]],
    *[("stack_to_image", "background", v, S) for v in [ramp(3), ramp(1, 8, 8, 3), ramp(8, 8)]],
    # rims
    *[(n, "pads", v, S) for n in ("stack_halo", "stack_halo_grad")
      for v in [None, -1, (1, 2, 3), ((1, 1), 2.5), "1", (1, -1)]],
    *[(n, "fill", v, V) for n in ("stack_halo", "stack_halo_grad") for v in [None, 1, "zero"]],
    ("stack_halo", "out", ramp(4, 6, 6, 3), S),
    # convolution
    *[("stack_conv2d", "w", v, D) for v in [LIST, None, Spoiled("v.astype('f8')")]],
    *[("stack_conv2d", "w", v, S) for v in [Spoiled("v[0]"), Spoiled("v[:, :, :1].copy()"),
                                            Spoiled("v[:0]"), Spoiled("v[..., :0]")]],
    *[("stack_conv2d", "strides", v, S) for v in [0, (1, 2, 3), 1.5, 3, 8]],
    *[("stack_conv2d", "padding", v, V) for v in ["full", -1, None, ((0, 0),), ((0, -1), (0, 0))]],
    ("stack_conv2d", "padding", 3, S),
    *[("stack_conv2d", "dilation", v, S) for v in [0, (1, 2, 3), 1.5, None]],
    *[("stack_conv2d", "groups", v, S) for v in [0, 3, 1.0, True, None, "2"]],
    *[("stack_conv2d", "transposed", v, V) for v in [None, 1, "yes", ramp(3)]],
    *[("stack_conv2d", "output_padding", v, S) for v in [1, (0, 1), -1, np.int64(1), ramp(3)]],
    ("stack_conv2d", "scale", ramp(3), S),
    ("stack_conv2d", "bias", [1.0] * 4, D),
    *[("stack_conv2d", "residual", v, S) for v in [ramp(4, 4, 4, 3), ramp(4, 2, 2, 4)]],
    *[("stack_conv2d", "residual", v, D) for v in [1.0, ramp(4, 4, 4, 4, dtype=np.float64)]],
    ("stack_conv2d", "activation", "swish", V),
    *[("stack_conv2d", "w_format", v, V) for v in ["IOHW", "hwio", None]],
    ("stack_conv2d", "precision", "fp8", V),
    ("stack_conv2d", "out", ramp(4, 4, 4, 3), S),
    ("stack_conv2d", "out", ramp(4, 4, 4, 4, dtype=np.float64), D),
    ("stack_conv2d_grad", "w", Spoiled("v[:, :, :1].copy()"), S),
    ("stack_conv2d_grad", "strides", 3, S),
    *[("stack_conv2d_grad", "wanted", v, V) for v in ["x", None, ("y",), True]],
    # pooling
    *[(n, "kernel", v, S) for n in SLIDING for v in [0, (2, 2.5), None]],
    *[(n, "strides", v, S) for n in SLIDING for v in [0, 3, 1.5]],
    *[(n, "padding", v, V) for n in SLIDING for v in ["full", -1, ((0, 0),)]],
    *[(n, "ceil_mode", v, V) for n in SLIDING for v in [None, 1]],
    *[("stack_max_pool", "dilation", v, S) for v in [0, 1.5]],
    *[("stack_avg_pool", "count_include_pad", v, V) for v in [None, 1]],
    *[("stack_avg_pool", "divisor", v, V) for v in [0, "2", True, float("nan"), 10**400]],
    ("stack_max_pool", "out", ramp(4, 2, 2, 3), S),
    *[(n, "mode", v, V) for n in ("stack_global_pool", "stack_global_pool_grad")
      for v in ["min", None, 1]],
    ("stack_global_pool", "out", ramp(2, 2), S),
    ("stack_global_pool_grad", "grad_y", ramp(2, 2), S),
    *[("stack_per_block", "values", v, S) for v in [ramp(2, 2), ramp(2), ramp(1, 1, 2)]],
    ("stack_per_block", "values", LIST, D),
    # interpolation
    *[(n, "x", None, D) for n in ("stack_interpolate", "stack_interpolate_grad")],
    *[(n, "scale_factor", v, S) for n in ("stack_interpolate", "stack_interpolate_grad")
      for v in [0, -1, 1.1, None, "2", True, (2, 2, 2), float("nan"), float("inf")]],
    *[("stack_interpolate", "size", v, S) for v in [(17, 16), (8,), (8, -1), 8.0]],
    *[("stack_interpolate", "mode", v, V) for v in ["bicubic", None, 1]],
    *[("stack_interpolate", "align_corners", v, V) for v in [True, None, 1]],
]  # fmt: skip
