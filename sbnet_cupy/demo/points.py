"""See a LiDAR scan from above, and run a residual unit over the blocks that hold points."""

from pathlib import Path

import numpy as np

from .. import (
    BottleneckWeights,
    calc_block_params_res_block,
    conv2d,
    masks,
    sparse_res_block_bottleneck,
)
from ..block_sparse.mask.birds_eye import cell_index
from . import torch_dense
from .compare import STEPS, compare
from .inputs import DemoError, check_size
from .picture_file import read_mask
from .report import Report
from .scan_file import read_points

CHANNELS, BOTTLENECK = 32, 16
BLOCK_SIZE = 18
MOST_CELLS = 2e7


def run(path, columns, mask_path, block_size, xp, grid, progress):
    """Run the residual unit on a scan; ``grid`` holds x_range, y_range and cell in metres."""
    _check_grid(**grid)
    progress.step(f"reading {Path(path).name}", of=STEPS + 2)
    points = read_points(path, columns)
    index, shape = cell_index(points, **grid)
    check_size("the grid", shape, block_size)
    inside = index < shape[0] * shape[1]
    if not inside.any():
        raise DemoError(
            f"{path} must have points within x {_range(grid['x_range'])} and "
            f"y {_range(grid['y_range'])} metres, got none of {len(points):,}, which have "
            f"{_extent(points)}; see --x-range and --y-range"
        )
    if mask_path is None:
        mask = masks.birds_eye(points, **grid)
    else:
        mask = read_mask(mask_path, shape)[None]
    summary = summarise(points[inside], index[inside], shape)
    features, result = refine(summary, mask, block_size, xp, progress)
    return Report(
        name=Path(path).name,
        task=f"residual unit, {CHANNELS} channels over {BOTTLENECK}, float32",
        picture=colored(summary),
        picture_label="greatest height per cell",
        mask=mask[0],
        mask_label=f"mask: {Path(mask_path).name if mask_path else 'cells that hold a point'}",
        response=xp.sqrt(((result.sparse - features)[0] ** 2).sum(axis=2)),
        response_label="what the unit adds: norm over channels",
        result=result,
        rows=[
            ("points in the grid", "", f"{int(inside.sum()):,} of {len(points):,}"),
            ("cells occupied", "", f"{mask.mean():.1%}"),
        ],
        extent=(*grid["y_range"], *grid["x_range"]),
    )


def refine(summary, mask, block_size, xp, progress):
    """Run the unit on random features of [H, W, 4]; return the features and the comparison."""
    projection = np.random.default_rng(0).standard_normal((summary.shape[2], CHANNELS)) / 2
    features = xp.asarray((summary @ projection.astype(np.float32))[None])
    weights = BottleneckWeights.random(CHANNELS, BOTTLENECK, xp=xp)
    params = calc_block_params_res_block(features.shape, block_size, [1, 3, 1])
    result = compare(
        xp.asarray(mask),
        params,
        dense=lambda: dense_unit(features, weights, xp),
        sparse=lambda indices: sparse_res_block_bottleneck(features, weights, indices, params),
        terms=CHANNELS + 9 * BOTTLENECK + BOTTLENECK,
        progress=progress,
        torch_dense=torch_dense.residual_unit(features, weights),
    )
    return features, result


def summarise(points, index, shape):
    """Return [H, W, 4]: log(1 + count), greatest and mean height, mean intensity; 0 where empty."""
    cells = shape[0] * shape[1]
    count = np.bincount(index, minlength=cells)
    greatest = np.full(cells, -np.inf)
    np.maximum.at(greatest, index, points[:, 2])
    mean_z, mean_intensity = (
        np.bincount(index, weights=points[:, column], minlength=cells) / np.maximum(count, 1)
        for column in (2, 3)
    )
    greatest[count == 0] = 0
    stacked = np.stack([np.log1p(count), greatest, mean_z, mean_intensity], axis=-1)
    return stacked.reshape(*shape, 4).astype(np.float32)


def colored(summary):
    """Return [H, W, 3]: the greatest height of each occupied cell as a colour, dark elsewhere."""
    from matplotlib import colormaps

    occupied = summary[:, :, 0] > 0
    low, high = np.percentile(summary[:, :, 1][occupied], (1, 99))
    height = (summary[:, :, 1] - low) / ((high - low) or 1)
    rgb = colormaps["turbo"](0.15 + 0.85 * height.clip(0, 1), bytes=True)[:, :, :3]
    return np.where(occupied[:, :, None], rgb, 14).astype(np.uint8)


def dense_unit(x, weights, xp):
    """Compute ``x + conv3(a3(conv2(a2(conv1(a1(x))))))`` from its definition, everywhere."""
    y = x
    for w, scale, shift in (
        (weights.w1, weights.scale1, weights.shift1),
        (weights.w2, weights.scale2, weights.shift2),
        (weights.w3, weights.scale3, weights.shift3),
    ):
        y = conv2d(xp.maximum(y * scale + shift, 0), w)
    return x + y


def _check_grid(x_range, y_range, cell):
    """Raise DemoError unless the grid has some cells, and not too many to hold in memory."""
    for name, (low, high) in (("--x-range", x_range), ("--y-range", y_range)):
        if not -np.inf < low < high < np.inf:
            raise DemoError(f"{name} must be two numbers, LOW < HIGH, got {low:g} {high:g}")
    if not 0 < cell < np.inf:
        raise DemoError(f"--cell must be a positive number of metres, got {cell:g}")
    cells = np.ptp(x_range) / cell * np.ptp(y_range) / cell
    if cells > MOST_CELLS:
        raise DemoError(f"--cell {cell:g} makes {cells:.2g} cells, more than {MOST_CELLS:.2g}")


def _range(pair):
    return f"{pair[0]:g}..{pair[1]:g}"


def _extent(points):
    ranges = zip("xy", points[:, :2].min(axis=0), points[:, :2].max(axis=0), strict=True)
    return " and ".join(f"{name} {_range((low, high))}" for name, low, high in ranges)
