"""What is measured: the paper's stages, large stacks, channel counts, densities; and the masks."""

import functools
from dataclasses import dataclass

import numpy as np

from benchmarks.harness.rows import times_sign
from sbnet_cupy import masks

KERNEL = 3  # SAME, stride 1: the halo of gather's blocks

# N, H, W, C and block size, halo included, of the paper's stages. The fourth column is the mask of
# the original's rows; the rest are its times on an H200, in us, for float32 and 10% of the pixels.
ORIGINAL = [
    # shape             block  mask        reduce  gather T  gather  scatter T  scatter  add
    ((1, 400, 700, 24), 18, "top-left", (5.7, 6.4, 5.8, 4.2, 3.7, 4.4)),
    ((1, 400, 700, 96), 18, "top-left", (5.7, 25.1, 18.7, 17.8, 12.6, 18.5)),
    ((1, 400, 700, 96), 34, "blobs", (7.1, 78.2, 52.9, 64.9, 47.0, 61.6)),
    ((1, 200, 350, 192), 10, "top-left", (4.1, 17.7, 12.7, 11.0, 8.2, 11.6)),
    ((1, 100, 175, 256), 10, "top-left", (3.6, 8.2, 6.2, 5.8, 3.9, 5.0)),
    ((1, 50, 88, 384), 8, "top-left", (3.8, 3.7, 2.5, 5.1, 4.7, 5.1)),
]
ORIGINAL_COLUMNS = [
    ("reduce_mask", "max"),
    ("sparse_gather", "transposed"),
    ("sparse_gather", "plain"),
    ("sparse_scatter", "transposed"),
    ("sparse_scatter", "plain"),
    ("sparse_scatter", "add"),
]
VARIANTS = {
    "sparse_gather": ("plain", "transposed", "fused"),
    "sparse_scatter": ("plain", "transposed", "add"),
    "reduce_mask": ("max",),
}
# Shares of active pixels; of blobs, they make 2% to 100% of the blocks active.
SWEEP = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 1.0)
CHANNELS = ((1, 64), (3, 21), (17, 4), (100, 1), (32, 2))  # with the images of a batch; 32 is even
LARGE_MASK = (8, 4096, 4096)


@dataclass(frozen=True)
class Case:
    """One set of inputs; its variants share them."""

    op: str
    suite: str
    shape: tuple  # of the image [N, H, W, C], or of the mask [N, H, W]
    dtype: str
    bsize: tuple[int, int]  # halo included, where there is one
    mask: str  # its kind
    density: float  # wanted share of active pixels
    variants: tuple = ()
    peers: bool = True
    halo: bool = True  # whether blocks are those of a 3x3 convolution with SAME padding

    @property
    def mask_name(self):
        """Name of the mask: its kind and its share of active pixels."""
        if self.mask in ("top-left", "blobs"):
            return f"{self.mask}, {100 * self.density:g}% active"
        return {"scan": "LiDAR scan", "all": "all active", "speckle": "1 pixel of 1024"}.get(
            self.mask, self.mask
        )

    @property
    def label(self):
        """One line that tells this case from others."""
        block = times_sign(self.bsize)
        return f"{times_sign(self.shape)} {self.dtype}, block {block}, {self.mask_name}"

    @property
    def columns(self):
        """The columns of a row that the case decides."""
        return {
            "op": self.op,
            "suite": self.suite,
            "shape": times_sign(self.shape),
            "dtype": self.dtype,
            "block": times_sign(self.bsize),
            "mask": self.mask_name,
        }

    def original_us(self, variant):
        """Return the time of the original's kernel for this very case, or None."""
        column = (self.op, variant)
        if (self.suite, self.dtype) != ("stages", "float32") or column not in ORIGINAL_COLUMNS:
            return None
        for shape, block, mask, times in ORIGINAL:
            same = shape[: len(self.shape)] == self.shape and (block, block) == self.bsize
            if same and (mask, 0.1) == (self.mask, self.density):
                return times[ORIGINAL_COLUMNS.index(column)]
        return None


def copy_cases(op, session):
    """Return the cases of sparse_gather and sparse_scatter."""
    variants = VARIANTS[op]
    case = functools.partial(Case, op, variants=variants)
    if session.quick:
        sweep = functools.partial(case, "density", (1, 50, 88, 48), "float32", (10, 10), "blobs")
        return [
            case("stages", *_stage(ORIGINAL[5]), *_mask(ORIGINAL[5])),
            *(sweep(density, variants=("plain",)) for density in (0.1, 0.5, 1.0)),
        ]
    found = []
    for row in ORIGINAL:
        for mask, density in _stage_masks(session):
            for dtype in ("float32", "float16"):
                if session.cpu and dtype == "float16" and mask != "top-left":
                    continue
                peers = mask == "top-left" or (mask, density, dtype) == ("blobs", 0.1, "float32")
                found.append(case("stages", *_stage(row, dtype), mask, density, peers=peers))
    sweep = functools.partial(case, "density", (1, 400, 700, 96), "float32", (18, 18), "blobs")
    for density in SWEEP[::3] if session.cpu else SWEEP:
        found.append(sweep(density, variants=("plain",)))
    return found + ([] if session.cpu else _large_cases(case) + _channel_cases(case))


def _large_cases(case):
    return [
        case("large", (1, 1600, 2800, 64), dtype, (block, block), "all", 1.0)
        for block in (18, 16)
        for dtype in ("float32", "float16")
    ]


def _channel_cases(case):
    case = functools.partial(case, peers=False)
    found = []
    for dtype in ("float32", "float16"):
        for channels, images in CHANNELS:
            shape = (images, 800, 1400, channels)
            found.append(case("channels", shape, dtype, (18, 18), "all", 1.0))
        found.append(case("channels", (2, 800, 1400, 32), dtype, (12, 22), "all", 1.0))
    return found


def mask_cases(session):
    """Return the cases of reduce_mask."""
    case = functools.partial(Case, "reduce_mask", variants=VARIANTS["reduce_mask"])
    grids = list({(shape[:3], block): None for shape, block, *_ in ORIGINAL})
    found = []
    for shape, block in grids[-2:] if session.quick else grids:
        for mask, density in _stage_masks(session)[: 1 if session.quick else None]:
            for dtype in ("float32", "float16", "uint8", "bool"):
                peers = density == 0.1 and dtype in ("float32", "uint8")
                found.append(
                    case("stages", shape, dtype, (block, block), mask, density, peers=peers)
                )
    large = (2, 512, 512) if session.quick or session.cpu else LARGE_MASK
    blocks = [(16, False)] if session.quick else [(n, n == 18) for n in (8, 16, 18, 32, 64)]
    for block, halo in blocks:
        for dtype in ("uint8", "float32"):
            for mask in ("speckle", "empty"):
                found.append(case("large", large, dtype, (block, block), mask, 0.0, halo=halo))
    for density in (0.1, 1.0) if session.quick else (0.01, 0.1, 0.25, 0.5, 0.75, 1.0):
        found.append(
            case("density", large, "uint8", (16, 16), "top-left", density, peers=False, halo=False)
        )
    return found


def _stage(row, dtype="float32"):
    return row[0], dtype, (row[1], row[1])


def _mask(row):
    return row[2], 0.1


def _stage_masks(session):
    found = [("top-left", 0.1), ("blobs", 0.1), ("blobs", 0.25)]
    return found + ([("scan", 0.0)] if session.points is not None else [])


def make_mask(case, session):
    """Return the mask of a case as a bool array ``[N, H, W]`` of the session's library."""
    n, h, w = case.shape[:3]
    xp = session.xp
    if case.mask == "all":
        return xp.ones((n, h, w), bool)
    if case.mask == "empty":
        return xp.zeros((n, h, w), bool)
    if case.mask == "speckle":
        pixel = xp.arange(n * h * w, dtype=np.uint32) * np.uint32(2654435761)
        return (pixel >> np.uint32(22) == 0).reshape(n, h, w)
    if case.mask == "top-left":
        return masks.top_left((n, h, w), case.density, xp=xp)
    if case.mask == "scan":
        return xp.asarray(_scan(session.points, 400 // h))
    return xp.asarray(_blobs(n, h, w, case.density))


@functools.cache
def _blobs(n, h, w, density):
    """Blobs as wide, for the image, as those that touch 112 of the original's blocks of 34."""
    return np.repeat(masks.blobs((1, h, w), density, sigma=14 * h / 400, seed=4), n, axis=0)


@functools.cache
def _scan(path, factor):
    """The ground that a KITTI scan hits, 40 m ahead and 35 m to each side, at a coarser stage."""
    from sbnet_cupy.demo.scan_file import read_points

    mask = masks.birds_eye(read_points(path), x_range=(0, 40), y_range=(-35, 35), cell=0.1)
    return masks.downsample(mask, factor)
