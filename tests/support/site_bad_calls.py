"""The table of bad calls of the operations at sites; see bad_calls.py."""

import functools

import numpy as np

import sbnet_cupy as sb
from sbnet_cupy import DTypeError, ShapeError
from support.bad_calls import LIST, STRIDED, Spoiled, ramp

ROWS = np.array([[0, 1, 1], [0, 1, 2], [0, 5, 6], [1, 0, 0]], np.int32)
SHAPE = (8, 8)


@functools.lru_cache(maxsize=32)
def made(asarray, number=0):
    """Return sites in the library of ``asarray``, and what hangs together by them, by name."""
    features = asarray(ramp(4, 2) * (number + 1))
    x = sb.sparse_tensor(features, asarray(ROWS), spatial_shape=SHAPE, batch_size=2)
    pooled = sb.sparse_max_pool(x, 2)
    window = sb.kernel_map(x.coordinates, 3, onto=x.coordinates)
    count = asarray(np.array([4], np.int32))
    everywhere = sb.CoordinateMap(x.indices, count, (2**31 - 1, 2**31 - 1), 4)
    huge = sb.SparseTensor(features, everywhere)
    return {"x": x, "sites": x.coordinates, "pooled": pooled, "window": window, "count": count,
            "huge": huge}  # fmt: skip


class Made:
    """An argument that is made anew in each library."""

    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return self.name

    def of(self, asarray, number=0):
        """Return it; arguments of one call come from the same sites."""
        return made(asarray, number)[self.name]


X, SITES, POOLED, WINDOW = map(Made, ("x", "sites", "pooled", "window"))
W = ramp(3, 3, 2, 4)
CONV = {"x": X, "w": W}
STRIDED_CONV = CONV | {"stride": 2}
POOL = {"x": X, "kernel_size": 2}

VALID = {
    "CoordinateMap": {"indices": ROWS, "count": Made("count"), "spatial_shape": SHAPE,
                      "batch_size": 2},
    "SparseTensor": {"features": ramp(4, 2), "coordinates": SITES},
    "KernelMap": {"rows": np.zeros((9, 4), np.int32), "source": SITES, "target": SITES,
                  "kernel_size": (3, 3)},
    "coordinate_map": {"indices": ROWS, "spatial_shape": SHAPE, "batch_size": 2},
    "sparse_tensor": {"features": ramp(4, 2), "indices": ROWS, "spatial_shape": SHAPE,
                      "batch_size": 2},
    "kernel_map": {"coordinates": SITES, "kernel_size": 3},
    "submanifold_conv": CONV,
    "strided_conv": STRIDED_CONV,
    "transposed_conv": STRIDED_CONV,
    "inverse_conv": {"x": POOLED, "w": ramp(2, 2, 2, 4), "onto": X},
    "submanifold_conv_grad": {"grad_y": ramp(4, 4)} | CONV,
    "strided_conv_grad": {"grad_y": ramp(4, 4)} | STRIDED_CONV,
    "transposed_conv_grad": {"grad_y": ramp(33, 4)} | STRIDED_CONV,
    "inverse_conv_grad": {"grad_y": ramp(4, 4), "x": POOLED, "w": ramp(2, 2, 2, 4), "onto": X},
    "sparse_tensor_grad": {"grad_y": ramp(4, 2), "features": ramp(4, 2), "indices": ROWS,
                           "spatial_shape": SHAPE, "batch_size": 2},
    "site_conv": {"features": ramp(4, 2), "w": W, "kernel_map": WINDOW},
    "site_conv_grad": {"grad_y": ramp(4, 4), "features": ramp(4, 2), "w": W, "kernel_map": WINDOW},
    "sparse_max_pool": POOL,
    "sparse_max_pool_grad": {"grad_y": ramp(4, 2)} | POOL,
    "sparse_avg_pool": POOL,
    "sparse_avg_pool_grad": {"grad_y": ramp(4, 2)} | POOL,
    "sparse_unpool": {"x": POOLED, "onto": X},
    "sparse_unpool_grad": {"grad_y": ramp(4, 2), "x": POOLED, "onto": X},
    "sparse_unfold": {"features": ramp(4, 2), "kernel_map": WINDOW},
    "sparse_unfold_grad": {"grad_y": ramp(4, 9, 2), "features": ramp(4, 2), "kernel_map": WINDOW},
    "voxelize": {"points": ramp(4, 3), "ranges": [(0, 8), (0, 8), (0, 8)], "voxel_size": 2.0},
    "blocks_of": {"coordinates": SITES, "bsize": 4},
    "global_pool": {"x": X},
    "global_pool_grad": {"grad_y": ramp(2, 2), "x": X},
    "dense_to_sparse": {"x": ramp(1, 4, 4, 2)},
    "dense_to_sparse_grad": {"grad_y": ramp(4, 2), "x": X},
    "sparse_to_dense": {"x": X},
    "sparse_to_dense_grad": {"grad_y": ramp(2, 8, 8, 2), "x": X},
}  # fmt: skip

V, S, D = ValueError, ShapeError, DTypeError
WITH_X = [n for n in VALID if isinstance(VALID[n].get("x"), Made) and n != "dense_to_sparse_grad"]
WITH_GRAD = [n for n in VALID if "grad_y" in VALID[n]]
CONVS = [n for n in VALID if "w" in VALID[n]]
CONV_GRADS = [n for n in CONVS if n in WITH_GRAD]
POOLS = [n for n in VALID if "kernel_size" in VALID[n] and n not in ("kernel_map", "KernelMap")]
BACK = ("inverse_conv", "inverse_conv_grad", "sparse_unpool", "sparse_unpool_grad")
OVER_MAPS = ("site_conv", "site_conv_grad", "sparse_unfold", "sparse_unfold_grad")
LISTS = ("coordinate_map", "sparse_tensor", "sparse_tensor_grad")
WITH_FEATURES = ("sparse_tensor", "sparse_tensor_grad")
STRIDES = ("strided_conv", "transposed_conv", "strided_conv_grad", "transposed_conv_grad")

BAD = [
    # function, argument, bad value, exception; the message must name the argument
    *[(n, "x", v, D) for n in WITH_X for v in (None, ramp(4, 2))],
    *[(n, "grad_y", v, D) for n in WITH_GRAD for v in (None, LIST)],
    *[(n, "grad_y", Spoiled("v[1:].copy()"), S) for n in WITH_GRAD if n != "dense_to_sparse_grad"],
    *[(n, "grad_y", Spoiled("v.astype('f8')"), D) for n in WITH_GRAD
      if n not in ("dense_to_sparse_grad", "sparse_to_dense_grad")],
    ("sparse_to_dense_grad", "grad_y", Spoiled("v.astype('i4')"), D),
    *[("dense_to_sparse_grad", "x", v, D) for v in [None, ramp(4, 2)]],
    ("dense_to_sparse_grad", "grad_y", Spoiled("v[1:].copy()"), S),
    # sites
    *[(n, "indices", v, D) for n in LISTS for v in (LIST, Spoiled("v.astype('f4')"))],
    *[(n, "indices", v, D) for n in LISTS for v in (Spoiled("v.astype('i2')"), None)],
    *[(n, "indices", v, S) for n in LISTS for v in (Spoiled("v[0]"), Spoiled("v + 7"))],
    *[(n, "indices", v, S) for n in LISTS for v in (Spoiled("v[:, :1].copy()"), Spoiled("v - 1"))],
    *[(n, "indices", Spoiled("v * 0"), V) for n in LISTS],
    *[(n, "spatial_shape", v, S) for n in LISTS for v in [(8,), (8, -1), (8, 8.0), 2**31, "8"]],
    *[(n, "spatial_shape", np.array(v), S) for n in LISTS for v in [[8], [8.0, 8.0], [[8, 8]]]],
    *[(n, "batch_size", v, S) for n in LISTS for v in [-1, 1.5, True, "2"]],
    *[(n, "mode", v, V) for n in LISTS for v in ["max", None, 1]],
    *[(n, "order", v, V) for n in LISTS for v in ["z", 1]],
    *[(n, "capacity", v, S) for n in LISTS for v in [-1, 2.5, True, 2**31]],
    *[(n, "features", v, D) for n in WITH_FEATURES for v in [LIST, Spoiled("v.astype('i4')")]],
    *[(n, "features", v, S) for n in WITH_FEATURES
      for v in [Spoiled("v[0]"), Spoiled("v[1:].copy()")]],
    *[("CoordinateMap", "indices", v, S) for v in [None, Spoiled("v[0]"), Spoiled("v[:, :1]")]],
    *[("CoordinateMap", "indices", Spoiled(f"v.astype('{kind}')"), D) for kind in ("i8", "f4")],
    *[("CoordinateMap", "count", v, S) for v in (None, 4, np.int32(4), ramp(2, dtype=np.int32))],
    *[("CoordinateMap", "count", v, D) for v in (ramp(1), ramp(1, dtype=np.int64))],
    ("CoordinateMap", "spatial_shape", (8,), S),
    ("CoordinateMap", "batch_size", -1, S),
    *[("SparseTensor", "features", v, S) for v in [Spoiled("v[0]"), Spoiled("v[1:]")]],
    *[("SparseTensor", "features", v, D) for v in [None, [[1.0, 2.0]] * 4]],
    *[("SparseTensor", "coordinates", v, D) for v in [None, ROWS]],
    *[("KernelMap", "rows", v, S) for v in [None, Spoiled("v[0]"), Spoiled("v[:, 1:]")]],
    *[("KernelMap", "rows", Spoiled(f"v.astype('{kind}')"), D) for kind in ("i8", "f4")],
    *[("KernelMap", n, v, D) for n in ("source", "target") for v in [None, ROWS]],
    # maps
    *[("kernel_map", "coordinates", v, D) for v in [None, ROWS, WINDOW]],
    *[("kernel_map", "kernel_size", v, S) for v in [0, (3,), (3, 1.5), None, "3"]],
    *[("kernel_map", n, v, S) for n in ("stride", "dilation") for v in [0, (1, 2, 3), 1.5, None]],
    *[("kernel_map", n, 2**31, S) for n in ("kernel_size", "stride", "dilation", "padding")],
    *[("kernel_map", "padding", v, S) for v in [-1, (1,), "SAME"]],
    *[("kernel_map", "onto", v, D) for v in [ROWS, WINDOW]],
    ("kernel_map", "output_padding", 1, V),
    ("kernel_map", "offsets", [[0, 0]], V),
    *[("kernel_map", "capacity", v, S) for v in [-1, 2.5, 2**40]],
    ("kernel_map", "padding", 2**31 - 1, S),
    # convolutions
    *[(n, "w", v, D) for n in CONVS for v in [LIST, None, Spoiled("v.astype('f8')")]],
    *[(n, "w", v, S) for n in CONVS for v in [Spoiled("v[:, :, :1].copy()"), Spoiled("v[..., :0]"),
                                              Spoiled("v[0, 0]")]],
    *[(n, "groups", v, S) for n in CONVS for v in [0, 3, 1.0, True, None]],
    *[(n, "scale", v, e) for n in CONVS for v, e in [(ramp(3), S), ([1.0] * 4, D)]],
    *[(n, "bias", v, e) for n in CONVS for v, e in [(ramp(3), S), ([1.0] * 4, D)]],
    *[(n, "residual", v, e) for n in CONVS for v, e in [(ramp(4, 3), S), (1.0, D)]],
    *[(n, "activation", v, V) for n in CONVS for v in ["swish", 1]],
    *[(n, "precision", "fp8", V) for n in CONVS],
    *[(n, "out", ramp(4, 3), S) for n in CONVS if n not in CONV_GRADS],
    *[(n, "stride", v, S) for n in STRIDES for v in [0, (1,), 1.5]],
    *[(n, "padding", v, S) for n in STRIDES for v in [-1, "SAME"]],
    *[(n, "stride", 2**30, S) for n in ("transposed_conv", "transposed_conv_grad")],
    *[(n, "onto", ROWS, D) for n in ("strided_conv", "strided_conv_grad")],
    *[(n, "onto", v, D) for n in BACK
      for v in [None, ROWS]],
    *[(n, "onto", POOLED, V) for n in BACK],
    *[(n, "kernel_map", v, D) for n in OVER_MAPS for v in [None, ROWS]],
    *[(n, "features", v, e) for n in OVER_MAPS
      for v, e in [(Spoiled("v[1:].copy()"), S), (LIST, D), (Spoiled("v.astype('i4')"), D),
                   (STRIDED, S)]],
    *[(n, "wanted", v, V) for n in CONV_GRADS for v in ["w", None, ("y",)]],
    *[(n, "y", v, e) for n in CONV_GRADS
      for v, e in [(ramp(4, 3), S), (ramp(*VALID[n]["grad_y"].shape).astype("f8"), D)]],
    # pooling
    *[(n, "kernel_size", v, S) for n in POOLS for v in [0, (2, 2.5), None]],
    *[(n, "stride", v, S) for n in POOLS for v in [0, (1,), 1.5]],
    *[(n, "count", v, V) for n in POOLS if "avg" in n for v in ["sites", 1]],
    *[(n, "floor", v, D) for n in POOLS if "max" in n for v in ["a", 1j, [0.0], 10**400]],
    *[(n, "floor", float("nan"), V) for n in POOLS if "max" in n],
    *[(n, "reduce", v, V) for n in ("global_pool", "global_pool_grad") for v in ["min", None, 1]],
    # points and blocks
    *[("voxelize", "points", v, e) for v, e in [(LIST, D), (ramp(4), S), (ramp(4, 2), S),
                                                (ramp(4, 3, dtype=bool), D)]],
    *[("voxelize", "features", v, e) for v, e in [(ramp(3, 1), S), ([[1.0]] * 4, D),
                                                  (ramp(4, 1, dtype=np.int32), D)]],
    *[("voxelize", "ranges", v, V) for v in [None, [], [(0, 8), (8, 0), (0, 8)], [(0, 8), 3, 4]]],
    *[("voxelize", "voxel_size", v, V) for v in [0, -1.0, (1.0, 2.0), "1", None]],
    *[("voxelize", "sample", v, e) for v, e in [(ramp(3, dtype=np.int32), S), (ramp(4), D)]],
    *[("voxelize", "mode", v, V) for v in ["unique", "max", None]],
    *[("voxelize", n, v, S) for n in ("capacity", "batch_size") for v in [-1, 2.5, 2**31]],
    ("voxelize", "order", "z", V),
    *[("blocks_of", "coordinates", v, D) for v in [None, ROWS]],
    *[("blocks_of", "bsize", v, S) for v in [0, (1, 2, 3), 1.5]],
    # grids
    *[("dense_to_sparse", "x", v, D) for v in [LIST, Spoiled("v.astype('i4')")]],
    ("dense_to_sparse", "x", Spoiled("v[0, 0]"), S),
    ("dense_to_sparse", "mask", ramp(1, 4), S),
    *[("dense_to_sparse", "tol", v, D) for v in ["a", None, ramp(3)]],
    ("dense_to_sparse", "tol", float("nan"), V),
    *[("dense_to_sparse", "capacity", v, S) for v in [-1, 2.5, 2**31]],
    *[(n, "data_format", v, V) for n in VALID if "dense" in n for v in ["NHWC", None]],
    *[("dense_to_sparse", "tol", v, D) for v in ["a", None, 1j, [1.0]]],
    ("dense_to_sparse", "tol", float("nan"), V),
    *[(n, "fill", v, D) for n in ("sparse_to_dense", "sparse_unfold")
      for v in ["a", None, [1.0], 1j]],
    *[("sparse_to_dense", "spatial_shape", v, S) for v in [(8,), (8, -1)]],
    ("sparse_to_dense", "x", Made("huge"), S),
]  # fmt: skip
