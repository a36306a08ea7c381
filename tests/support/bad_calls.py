"""The table of bad calls: for each function one call that works, and what spoils it.

``VALID`` holds one call of each function that works; each row of ``BAD`` replaces one of its
arguments, so that the error can come from nothing else.
"""

import numpy as np

from sbnet_cupy import DTypeError, ShapeError, calc_block_params


def ramp(*shape, dtype=np.float32):
    """Return 0, 1, 2... in a shape."""
    return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)


def indices():
    """Return two active blocks in a table with room for three."""
    return {
        "bin_counts": np.array([2], np.int32),
        "active_block_indices": np.array([[0, 0, 0], [0, 1, 1], [-1, -1, -1]], np.int32),
    }


class Spoiled:
    """An argument made from the valid one ``v`` by an expression, in the array module ``xp``."""

    def __init__(self, expression):
        self.expression = expression
        self.code = compile(expression, expression, "eval")

    def __repr__(self):
        return self.expression

    def of(self, valid, module):
        return eval(self.code, {"v": valid, "xp": module})


PARAMS = calc_block_params((8, 8), 4, 3)
INDICES = tuple(indices().values())
SCATTER = {"blocks": ramp(3, 4, 4, 2)} | indices() | {"x": ramp(1, 8, 8, 2), "bsize": 4}
GATHER_GRAD = {"grad_blocks": ramp(3, 4, 4, 2)} | indices() | {"x": ramp(1, 8, 8, 2), "bsize": 4}
KERNELS = [ramp(1, 1, 2, 4), ramp(3, 3, 4, 4), ramp(1, 1, 4, 2)]
WEIGHTS = KERNELS + [ramp(c) for c in (2, 2, 4, 4, 4, 4)]  # of a BottleneckWeights
UNIT = [ramp(1, 1, 4, 6), ramp(3, 3, 6, 6), ramp(1, 1, 6, 4)]
UNIT += [ramp(c) for c in (4, 4, 6, 6, 6, 6)]

VALID = {
    "calc_block_params": {
        "in_size": (1, 20, 20, 3), "bsize": 8, "ksize": 3, "strides": 1, "padding": "SAME",
    },
    "calc_block_params_res_block": {"in_size": (20, 20), "bsize": 8, "ksize_list": [1, 3, 1]},
    "BlockParams": {
        "bsize": (4, 4), "bsize_out": (2, 2), "boffset": (-1, -1), "bcount": (3, 3),
        "bstride": (2, 2),
    },
    "reduce_mask": {"mask": ramp(1, 8, 8), "block_count": (2, 2), "bsize": (4, 4)},
    "sparse_gather": {"x": ramp(1, 8, 8, 2)} | indices() | {"bsize": 4},
    "sparse_scatter": SCATTER,
    "sparse_scatter_var": SCATTER,
    "sparse_gather_grad": GATHER_GRAD,
    "sparse_scatter_grad": {"grad_y": ramp(1, 8, 8, 2)} | indices() | {"bsize": 4},
    "conv2d": {"x": ramp(1, 8, 8, 2), "w": ramp(3, 3, 2, 4)},
    "conv2d_grad": {
        "grad_y": ramp(1, 8, 8, 4), "x": ramp(1, 8, 8, 2), "w": ramp(3, 3, 2, 4),
    },
    "fused_conv": {"x": ramp(1, 8, 8, 2), "w": ramp(3, 3, 2, 4)} | indices() | {"bsize": 4},
    "fused_bottleneck": {"x": ramp(1, 8, 8, 4), "weights": UNIT} | indices()
    | {"bsize": 4, "precision": "tf32"},  # vectors and a precision that a GPU has a kernel for
    "sparse_conv2d": {
        "x": ramp(1, 8, 8, 2), "w": ramp(3, 3, 2, 4), "indices": INDICES, "block_params": PARAMS,
    },
    "sparse_conv2d_grad": {
        "grad_y": ramp(1, 8, 8, 4), "x": ramp(1, 8, 8, 2), "w": ramp(3, 3, 2, 4),
        "indices": INDICES, "block_params": PARAMS,
    },
    "mask_conv2d": {
        "x": ramp(1, 8, 8, 2), "w": ramp(3, 3, 2, 4), "mask": ramp(1, 8, 8), "strides": (1, 1),
        "padding": "SAME",
    },
    "sparse_res_block_bottleneck": {
        "x": ramp(1, 8, 8, 2), "weights": WEIGHTS, "indices": INDICES, "block_params": PARAMS,
    },
    "sparse_res_block_bottleneck_grad": {
        "grad_y": ramp(1, 8, 8, 2), "x": ramp(1, 8, 8, 2), "weights": WEIGHTS, "indices": INDICES,
        "block_params": PARAMS,
    },
}  # fmt: skip


STRIDED = Spoiled("xp.repeat(v, 2, axis=-1)[..., ::2]")
REVERSED = Spoiled("v[::-1]")
LIST = Spoiled("v.tolist()")

V, T, S, D = ValueError, TypeError, ShapeError, DTypeError
BAD = [
    # function, argument, bad value, exception; the message must name the argument
    *[("calc_block_params", "in_size", v, S) for v in ["20", None, 20, (20,), (1, 2, 3)]],
    *[("calc_block_params", "in_size", v, S) for v in [(20, -1), (20.0, 20), (True, 20)]],
    *[("calc_block_params", "bsize", v, S) for v in [(4, 2.5), 0, (-1, 4), (4, 4, 4), True, "8"]],
    *[("calc_block_params", "bsize", v, S) for v in [None, [2, 8, 8, 1], (2, 8), np.array([8, 8])]],
    *[("calc_block_params", "ksize", v, S) for v in [0, (3,), 3.0, (3, 3, 3), None, (3, False)]],
    *[("calc_block_params", "strides", v, S) for v in [0, -1, 1.0, 2, (1, 3), [2, 1, 1, 1]]],
    *[("calc_block_params", "padding", v, V) for v in ["Same", None, -1, ((1, 1),), "FULL"]],
    *[("calc_block_params", "padding", v, V) for v in [((-1, 0), (0, 0)), ((1, 1), (1, "a"))]],
    *[("calc_block_params_res_block", "ksize_list", v, S) for v in [[], 3, [0], "abc", [3, None]]],
    *[("BlockParams", "bsize", v, S) for v in [(1.5, 2), 0, None]],
    *[("BlockParams", "bcount", v, S) for v in [(-1, 2), "3"]],
    # reduce_mask
    *[("reduce_mask", "mask", v, T) for v in [LIST, None, 3.5, "mask", np.float32(1)]],
    ("reduce_mask", "mask", Spoiled("v.astype('c8')"), D),
    ("reduce_mask", "mask", Spoiled("v.astype(object)"), D),
    ("reduce_mask", "mask", Spoiled("v.astype('U1')"), D),
    ("reduce_mask", "mask", Spoiled("v.astype('M8[s]')"), D),
    ("reduce_mask", "mask", Spoiled("xp.ma.masked_array(v)"), D),
    ("reduce_mask", "mask", Spoiled("v[0, 0, 0, ...]"), S),
    ("reduce_mask", "mask", Spoiled("xp.stack([v, v, v], axis=-1)"), S),
    ("reduce_mask", "mask", Spoiled("v[None, None]"), S),
    ("reduce_mask", "mask", STRIDED, S),
    ("reduce_mask", "mask", Spoiled("v[..., ::-1]"), S),
    *[("reduce_mask", "block_count", v, S) for v in [(-1, 2), (2.0, 2), None, (1, 2, 3), "44"]],
    ("reduce_mask", "block_count", (2**20, 2**20), S),
    *[("reduce_mask", "bsize", v, S) for v in [(4, 2.5), (4.0, 4.0), -4, (4, 4, 4), None, True]],
    *[("reduce_mask", "boffset", v, S) for v in [(0.5, 0), (False, False), (0,), "00", None]],
    *[("reduce_mask", "bstride", v, S) for v in [0, (2, -2), (1, 2, 3), 2.5]],
    *[("reduce_mask", "tol", v, V) for v in [float("nan"), np.float16("nan")]],
    *[("reduce_mask", "tol", v, T) for v in [None, "x", 1j, [1, 2]]],
    *[("reduce_mask", "capacity", v, S) for v in [-1, 2.5, "3", True, (2,), 2**40]],
    # sparse_gather
    *[("sparse_gather", "x", v, D) for v in [LIST, None, Spoiled("v.astype(object)")]],
    ("sparse_gather", "x", Spoiled("v.astype('S3')"), D),
    ("sparse_gather", "x", Spoiled("v[0]"), S),
    ("sparse_gather", "x", Spoiled("v[None]"), S),
    ("sparse_gather", "x", STRIDED, S),
    ("sparse_gather", "x", Spoiled("xp.asfortranarray(v)"), S),
    ("sparse_gather", "bin_counts", LIST, D),
    ("sparse_gather", "bin_counts", 2, D),
    ("sparse_gather", "bin_counts", Spoiled("v.astype('i8')"), D),
    ("sparse_gather", "bin_counts", Spoiled("v.astype('f4')"), D),
    ("sparse_gather", "bin_counts", Spoiled("v.reshape(())"), S),
    ("sparse_gather", "bin_counts", Spoiled("xp.repeat(v, 2)"), S),
    ("sparse_gather", "active_block_indices", LIST, D),
    ("sparse_gather", "active_block_indices", Spoiled("v[:, :2].copy()"), S),
    ("sparse_gather", "active_block_indices", Spoiled("v[0]"), S),
    ("sparse_gather", "active_block_indices", Spoiled("v[None]"), S),
    ("sparse_gather", "active_block_indices", Spoiled("v.astype('i8')"), D),
    ("sparse_gather", "active_block_indices", Spoiled("v.astype('f4')"), D),
    ("sparse_gather", "active_block_indices", STRIDED, S),
    ("sparse_gather", "active_block_indices", REVERSED, S),
    *[("sparse_gather", "bsize", v, S) for v in [0, (4, 2.5), 4.0, None, (1, 2, 3), 2**31]],
    *[("sparse_gather", "boffset", v, S) for v in [(0, 0.5), (0.0, 0.0), None, (1, 2, 3)]],
    *[("sparse_gather", "bstride", v, S) for v in [0, (4, -4), "4"]],
    *[("sparse_gather", "data_format", v, V) for v in ["nhwc", None, "NCWH", 3]],
    *[("sparse_gather", "scale", v, D) for v in [2.0, [1.0, 2.0], ramp(2, dtype=np.int32)]],
    *[("sparse_gather", "scale", v, S) for v in [ramp(3), ramp(1), ramp(1, 2), ramp(0)]],
    ("sparse_gather", "shift", ramp(3), S),
    ("sparse_gather", "shift", ramp(2, dtype=np.complex64), D),
    *[("sparse_gather", "activation", v, V) for v in ["tanh", "RELU", 1, np.tanh, ["relu"]]],
    ("sparse_gather", "out", ramp(2, 4, 4, 2), S),
    ("sparse_gather", "out", ramp(3, 2, 4, 4), S),
    ("sparse_gather", "out", ramp(3, 4, 4, 2, dtype=np.float64), D),
    ("sparse_gather", "out", Spoiled("xp.zeros((3, 4, 4, 4), 'f4')[..., ::2]"), S),
    ("sparse_gather", "out", [1, 2], D),
    # sparse_scatter
    ("sparse_scatter", "blocks", LIST, D),
    ("sparse_scatter", "blocks", Spoiled("v[:2]"), S),
    ("sparse_scatter", "blocks", Spoiled("v[..., :1].copy()"), S),
    ("sparse_scatter", "blocks", Spoiled("v[:, :2].copy()"), S),
    ("sparse_scatter", "blocks", Spoiled("v.transpose(0, 3, 1, 2).copy()"), S),
    ("sparse_scatter", "blocks", Spoiled("v[0]"), S),
    ("sparse_scatter", "blocks", Spoiled("v.astype('f2')"), D),
    ("sparse_scatter", "blocks", STRIDED, S),
    ("sparse_scatter", "bin_counts", Spoiled("v.astype('i8')"), D),
    ("sparse_scatter", "active_block_indices", Spoiled("v[:, 0].copy()"), S),
    ("sparse_scatter", "x", LIST, D),
    ("sparse_scatter", "x", Spoiled("v[0]"), S),
    ("sparse_scatter", "x", STRIDED, S),
    *[("sparse_scatter", "bsize", v, S) for v in [0, 4.0, (4, 4.0)]],
    ("sparse_scatter", "bstride", (0, 4), S),
    ("sparse_scatter", "data_format", "HWC", V),
    ("sparse_scatter", "out", ramp(1, 8, 8, 3), S),
    ("sparse_scatter", "out", ramp(1, 8, 8, 2, dtype=np.int32), D),
    ("sparse_scatter", "out", Spoiled("xp.zeros((1, 8, 8, 4), 'f4')[..., 1::2]"), S),
    ("sparse_scatter_var", "x", LIST, D),
    ("sparse_scatter_var", "blocks", Spoiled("v[:1]"), S),
    # gradients of gather and scatter
    ("sparse_gather_grad", "grad_blocks", LIST, D),
    ("sparse_gather_grad", "grad_blocks", Spoiled("v[:2]"), S),
    ("sparse_gather_grad", "grad_blocks", Spoiled("v.transpose(0, 3, 1, 2).copy()"), S),
    ("sparse_gather_grad", "grad_blocks", Spoiled("v[0]"), S),
    ("sparse_gather_grad", "grad_blocks", Spoiled("v.astype('f2')"), D),
    ("sparse_gather_grad", "grad_blocks", STRIDED, S),
    ("sparse_gather_grad", "bin_counts", Spoiled("v.astype('i8')"), D),
    ("sparse_gather_grad", "active_block_indices", Spoiled("v[:, 0].copy()"), S),
    ("sparse_gather_grad", "x", LIST, D),
    ("sparse_gather_grad", "x", Spoiled("v[0]"), S),
    ("sparse_gather_grad", "x", Spoiled("v.astype('i4')"), D),
    ("sparse_gather_grad", "x", Spoiled("v.astype('c8')"), D),
    ("sparse_gather_grad", "x", STRIDED, S),
    *[("sparse_gather_grad", "bsize", v, S) for v in [0, 4.0, (4, 4.0)]],
    ("sparse_gather_grad", "bstride", (0, 4), S),
    ("sparse_gather_grad", "data_format", "HWC", V),
    *[("sparse_gather_grad", "scale", v, D) for v in [2.0, ramp(2, dtype=np.int32)]],
    ("sparse_gather_grad", "scale", ramp(3), S),
    ("sparse_gather_grad", "shift", ramp(1, 2), S),
    ("sparse_gather_grad", "activation", "tanh", V),
    ("sparse_scatter_grad", "grad_y", LIST, D),
    ("sparse_scatter_grad", "grad_y", Spoiled("v[0]"), S),
    ("sparse_scatter_grad", "grad_y", Spoiled("v.astype('i4')"), D),
    ("sparse_scatter_grad", "grad_y", STRIDED, S),
    ("sparse_scatter_grad", "bin_counts", Spoiled("v.astype('i8')"), D),
    ("sparse_scatter_grad", "active_block_indices", Spoiled("v[:, 0].copy()"), S),
    *[("sparse_scatter_grad", "bsize", v, S) for v in [0, 4.0, (4, 4.0)]],
    ("sparse_scatter_grad", "bstride", (0, 4), S),
    ("sparse_scatter_grad", "boffset", (0, 0.5), S),
    ("sparse_scatter_grad", "data_format", "HWC", V),
    # conv2d
    ("conv2d", "x", LIST, D),
    ("conv2d", "x", Spoiled("v[0]"), S),
    ("conv2d", "x", Spoiled("v.astype('i4')"), D),
    ("conv2d", "x", Spoiled("v.astype('c8')"), D),
    ("conv2d", "w", Spoiled("v[0]"), S),
    ("conv2d", "w", Spoiled("v[:, :, :1].copy()"), S),
    ("conv2d", "w", Spoiled("v.astype('f8')"), D),
    *[("conv2d", "strides", v, S) for v in [0, (1, 2, 3), 1.5]],
    *[("conv2d", "padding", v, V) for v in ["Same", -1, ((0, 0),), ((0, -1), (0, 0))]],
    ("conv2d", "bias", ramp(3), S),
    ("conv2d", "bias", [1.0] * 4, D),
    ("conv2d", "activation", "swish", V),
    ("conv2d", "data_format", "NHCW", V),
    ("conv2d", "w_format", "IOHW", V),
    ("conv2d", "precision", "fp8", V),
    ("conv2d", "out", ramp(1, 8, 8, 3), S),
    ("conv2d", "out", ramp(1, 8, 8, 4, dtype=np.float64), D),
    ("conv2d_grad", "grad_y", LIST, D),
    ("conv2d_grad", "grad_y", Spoiled("v[:, 1:].copy()"), S),
    ("conv2d_grad", "grad_y", Spoiled("v[..., :2].copy()"), S),
    ("conv2d_grad", "grad_y", Spoiled("v.astype('f8')"), D),
    ("conv2d_grad", "grad_y", STRIDED, S),
    ("conv2d_grad", "x", Spoiled("v[0]"), S),
    ("conv2d_grad", "x", Spoiled("v.astype('i4')"), D),
    ("conv2d_grad", "x", STRIDED, S),
    ("conv2d_grad", "w", Spoiled("v[:, :, :1].copy()"), S),
    ("conv2d_grad", "w", Spoiled("v.astype('f8')"), D),
    ("conv2d_grad", "strides", 0, S),
    ("conv2d_grad", "padding", "full", V),
    ("conv2d_grad", "bias", ramp(3), S),
    ("conv2d_grad", "scale", [1.0] * 4, D),
    ("conv2d_grad", "activation", "tanh", V),
    ("conv2d_grad", "data_format", "NHCW", V),
    ("conv2d_grad", "w_format", "IOHW", V),
    ("conv2d_grad", "precision", "fp8", V),
    *[("conv2d_grad", "wanted", v, V) for v in ["x", None, ("y",), ("x", 1), ([],), True]],
    # fused_conv
    ("fused_conv", "x", LIST, D),
    ("fused_conv", "x", Spoiled("v[0]"), S),
    ("fused_conv", "x", Spoiled("v.astype('i4')"), D),
    ("fused_conv", "x", STRIDED, S),
    ("fused_conv", "x", Spoiled("v[..., :1].copy()"), S),
    *[("fused_conv", "w", v, D) for v in [LIST, None, Spoiled("v.astype('i4')")]],
    ("fused_conv", "w", Spoiled("v[0]"), S),
    ("fused_conv", "w", Spoiled("v[:, :, :1].copy()"), S),
    ("fused_conv", "w", Spoiled("v.astype('f2')"), D),
    *[("fused_conv", "bin_counts", v, D) for v in [LIST, 2, Spoiled("v.astype('i8')")]],
    ("fused_conv", "bin_counts", Spoiled("xp.repeat(v, 2)"), S),
    *[("fused_conv", "active_block_indices", v, S) for v in [STRIDED, Spoiled("v[:, :2].copy()")]],
    *[("fused_conv", "active_block_indices", v, D) for v in [LIST, Spoiled("v.astype('i8')")]],
    *[("fused_conv", "bsize", v, S) for v in [0, (4, 2.5), 4.0, None, (1, 2, 3), 2**31]],
    *[("fused_conv", "strides", v, S) for v in [0, (1, 2, 3), 1.5]],
    *[("fused_conv", "padding", v, V) for v in ["Same", -1, ((0, 0),), ((0, -1), (0, 0))]],
    *[("fused_conv", "scale", v, D) for v in [2.0, ramp(4, dtype=np.int32)]],
    *[("fused_conv", "scale", v, S) for v in [ramp(3), ramp(1, 4)]],
    ("fused_conv", "bias", ramp(3), S),
    ("fused_conv", "bias", [1.0] * 4, D),
    ("fused_conv", "residual", 1.0, D),
    *[("fused_conv", "residual", v, S) for v in [ramp(1, 8, 8, 3), ramp(1, 4, 8, 8)]],
    ("fused_conv", "residual", Spoiled("xp.zeros((1, 8, 8, 8), 'f4')[..., ::2]"), S),
    ("fused_conv", "residual", ramp(1, 8, 8, 4, dtype=np.float64), D),
    *[("fused_conv", "activation", v, V) for v in ["tanh", 1, ["relu"]]],
    *[("fused_conv", "data_format", v, V) for v in ["nhwc", None]],
    ("fused_conv", "w_format", "IOHW", V),
    ("fused_conv", "precision", "fp8", V),
    *[("fused_conv", "expected", v, S) for v in [-1, 2.5, "3", True, (2,)]],
    ("fused_conv", "out", ramp(1, 8, 8, 3), S),
    ("fused_conv", "out", ramp(1, 8, 8, 4, dtype=np.float64), D),
    ("fused_conv", "out", Spoiled("xp.zeros((1, 8, 8, 8), 'f4')[..., ::2]"), S),
    ("fused_conv", "out", [1, 2], D),
    # fused_bottleneck
    ("fused_bottleneck", "x", LIST, D),
    ("fused_bottleneck", "x", Spoiled("v[0]"), S),
    ("fused_bottleneck", "x", Spoiled("v.astype('i4')"), D),
    ("fused_bottleneck", "x", STRIDED, S),
    ("fused_bottleneck", "x", Spoiled("xp.concatenate([v, v], -1)"), S),
    *[("fused_bottleneck", "weights", v, T) for v in [None, 2.0, (ramp(1, 1, 2, 4),)]],
    ("fused_bottleneck", "weights", Spoiled("type(v)(v.w1[..., :3], *v._arrays()[1:])"), S),
    ("fused_bottleneck", "weights", Spoiled("type(v)(v.w1[..., :0], *v._arrays()[1:])"), S),
    ("fused_bottleneck", "weights", Spoiled("type(v)(v.w1, v.w2, v.w2, *v._arrays()[3:])"), S),
    (
        "fused_bottleneck",
        "weights",
        Spoiled("type(v)(v.w1, v.w2, v.w3[..., :1], *v._arrays()[3:])"),
        S,
    ),
    ("fused_bottleneck", "weights", Spoiled("type(v)(*v._arrays()[:8], v.scale1)"), S),
    ("fused_bottleneck", "weights", Spoiled("type(v)(*v._arrays()[:8], None)"), D),
    ("fused_bottleneck", "weights", Spoiled("v._map_arrays(lambda a: a.astype('f8'))"), D),
    *[("fused_bottleneck", "bin_counts", v, D) for v in [LIST, 2, Spoiled("v.astype('i8')")]],
    ("fused_bottleneck", "bin_counts", Spoiled("xp.repeat(v, 2)"), S),
    ("fused_bottleneck", "active_block_indices", STRIDED, S),
    ("fused_bottleneck", "active_block_indices", Spoiled("v[:, :2].copy()"), S),
    *[("fused_bottleneck", "bsize", v, S) for v in [0, (4, 2.5), 4.0, None, (1, 2, 3), 2**31]],
    ("fused_bottleneck", "precision", "fp8", V),
    *[("fused_bottleneck", "expected", v, S) for v in [-1, 2.5, "3", True, (2,)]],
    ("fused_bottleneck", "out", ramp(1, 8, 8, 3), S),
    ("fused_bottleneck", "out", ramp(1, 8, 8, 4, dtype=np.float64), D),
    ("fused_bottleneck", "out", Spoiled("xp.zeros((1, 8, 8, 4), 'f4')[..., ::2]"), S),
    ("fused_bottleneck", "out", [1, 2], D),
    # flags
    *[(n, a, v, V) for n, *flags in [
        ("reduce_mask", "avgpool"), ("sparse_gather", "transpose"),
        ("sparse_scatter", "add", "atomic", "transpose"), ("sparse_gather_grad", "transpose"),
        ("sparse_scatter_grad", "add", "transpose"),
      ] for a in flags for v in [None, 1, "no", ramp(3)]],
    *[(n, "data_format", ramp(3), V) for n in ("sparse_gather", "sparse_scatter")],
    # layers
    ("sparse_conv2d", "x", LIST, D),
    ("sparse_conv2d", "method", ramp(3), V),
    ("sparse_conv2d", "w", Spoiled("v[:, :, :1].copy()"), S),
    ("sparse_conv2d", "indices", None, T),
    ("sparse_conv2d", "indices", Spoiled("v[0]"), T),
    ("sparse_conv2d", "block_params", None, T),
    ("sparse_conv2d", "block_params", (4, 4), T),
    ("sparse_conv2d", "strides", 0, S),
    ("sparse_conv2d", "padding", "full", V),
    ("sparse_conv2d", "bias", ramp(3), S),
    ("sparse_conv2d", "activation", "tanh", V),
    ("sparse_conv2d", "base", ramp(1, 8, 8, 3), S),
    ("sparse_conv2d", "base", ramp(1, 8, 8, 4, dtype=np.float64), D),
    ("sparse_conv2d", "data_format", "CHW", V),
    ("sparse_conv2d", "w_format", "OHWI", V),
    ("sparse_conv2d", "precision", "half", V),
    ("sparse_conv2d", "method", "fast", V),
    ("sparse_conv2d", "out", ramp(1, 8, 8, 3), S),
    ("sparse_conv2d", "out", ramp(1, 8, 8, 4, dtype=np.float64), D),
    ("mask_conv2d", "mask", Spoiled("v[:, 1:].copy()"), S),
    ("mask_conv2d", "mask", LIST, D),
    ("sparse_res_block_bottleneck", "x", Spoiled("xp.concatenate([v, v], -1)"), S),
    ("sparse_res_block_bottleneck", "weights", None, T),
    ("sparse_res_block_bottleneck", "weights", (ramp(1, 1, 2, 4),), T),
    ("sparse_res_block_bottleneck", "indices", None, T),
    ("sparse_res_block_bottleneck", "block_params", (4, 4), T),
    ("sparse_res_block_bottleneck", "w_project", ramp(1, 1, 3, 2), S),
    ("sparse_res_block_bottleneck", "base", ramp(1, 8, 8, 3), S),
    ("sparse_res_block_bottleneck", "out", ramp(1, 8, 7, 2), S),
    ("sparse_res_block_bottleneck", "precision", "tf16", V),
    ("sparse_res_block_bottleneck", "method", "gathered", V),
    # gradients of layers
    ("sparse_conv2d_grad", "grad_y", LIST, D),
    ("sparse_conv2d_grad", "grad_y", Spoiled("v[..., :3].copy()"), S),
    ("sparse_conv2d_grad", "grad_y", Spoiled("v.astype('f8')"), D),
    ("sparse_conv2d_grad", "grad_y", STRIDED, S),
    ("sparse_conv2d_grad", "x", LIST, D),
    ("sparse_conv2d_grad", "w", Spoiled("v[:, :, :1].copy()"), S),
    ("sparse_conv2d_grad", "indices", None, T),
    ("sparse_conv2d_grad", "block_params", (4, 4), T),
    ("sparse_conv2d_grad", "strides", 0, S),
    ("sparse_conv2d_grad", "padding", "full", V),
    ("sparse_conv2d_grad", "bias", ramp(3), S),
    ("sparse_conv2d_grad", "activation", "tanh", V),
    ("sparse_conv2d_grad", "base", ramp(1, 8, 8, 3), S),
    ("sparse_conv2d_grad", "data_format", "CHW", V),
    ("sparse_conv2d_grad", "w_format", "OHWI", V),
    ("sparse_conv2d_grad", "precision", "half", V),
    *[("sparse_conv2d_grad", "wanted", v, V) for v in ["base", ("scale",), None]],
    ("sparse_res_block_bottleneck_grad", "grad_y", Spoiled("v[:, 1:].copy()"), S),
    ("sparse_res_block_bottleneck_grad", "grad_y", Spoiled("v.astype('f8')"), D),
    ("sparse_res_block_bottleneck_grad", "grad_y", STRIDED, S),
    ("sparse_res_block_bottleneck_grad", "x", Spoiled("xp.concatenate([v, v], -1)"), S),
    ("sparse_res_block_bottleneck_grad", "weights", None, T),
    ("sparse_res_block_bottleneck_grad", "indices", None, T),
    ("sparse_res_block_bottleneck_grad", "block_params", (4, 4), T),
    ("sparse_res_block_bottleneck_grad", "w_project", ramp(1, 1, 3, 2), S),
    ("sparse_res_block_bottleneck_grad", "base", ramp(1, 8, 8, 3), S),
    ("sparse_res_block_bottleneck_grad", "precision", "tf16", V),
]


def spoil_id(value):
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}".replace(" ", "")
    return value.__name__ if isinstance(value, type) else str(value).replace(" ", "")
