"""Between blocks and sites: the pixels of a list of blocks, and the blocks that hold sites."""

import math
from typing import Any

import numpy as np

from .block_sparse.active_blocks import ActiveBlocks, dense_blocks
from .block_sparse.block_params import BlockParams
from .block_sparse.from_mask import images_of_mask
from .core.arrays import array_function, namespace
from .core.checks import check_array
from .core.graph_memory import memory_of_graphs
from .core.list_cells import list_cells
from .core.sizes import pair
from .errors import ShapeError
from .submanifold.coordinate_map import CoordinateMap, check_sites
from .submanifold.dense_conversion import cells_of
from .submanifold.distinct import LEFT_OUT
from .submanifold.site_arguments import check_capacity


@array_function
def sites_of_blocks(active, params, mask=None, image_size=None, capacity=None):
    """See :meth:`ActiveBlocks.sites`."""
    block = params.bsize_out if isinstance(params, BlockParams) else pair(params, "params")
    counts, rows = active
    images, *blocks = active.grid
    covered = tuple(n * b for n, b in zip(blocks, block, strict=True))
    if mask is not None:
        mask = images_of_mask(mask)
        check_array("mask", mask, ndim=(3, 4), like=rows)
        mask = mask[..., 0] if mask.ndim == 4 and mask.shape[3] == 1 else mask
        if image_size is not None:
            raise ShapeError(f"image_size must be None where a mask is given, got {image_size!r}")
        image_size = mask.shape[1:]
    size = covered if image_size is None else pair(image_size, "image_size", minimum=0)
    if any(not c - b < n <= c for n, c, b in zip(size, covered, block, strict=True)):
        what = "image_size" if mask is None else "mask"
        raise ShapeError(
            f"{what} must have a height and width that blocks of {block} in a grid of "
            f"{tuple(blocks)} cover, got {size}"
        )
    if mask is not None:
        check_array("mask", mask, shape=(images, *size))
    check_capacity(capacity)
    with memory_of_graphs(rows):
        listed = dense_blocks(active).repeat(block[0], axis=1).repeat(block[1], axis=2)
        listed = listed[:, : size[0], : size[1]]
        if mask is not None:
            listed = listed & (mask != 0)
        indices, count, _ = list_cells(namespace(rows).ascontiguousarray(listed), capacity)
        status = (counts > len(rows)).astype(np.int32) * np.int32(LEFT_OUT)
        return CoordinateMap(indices, count, tuple(size), images, status)


@array_function
def mask_of_sites(coordinates):
    """Return the mask, bool ``[N, H, W]``, that is set at sites in two dimensions."""
    check_sites("coordinates", coordinates)
    indices, grid = coordinates.indices, (coordinates.spatial_shape, coordinates.batch_size)
    if coordinates.dimensions != 2:
        raise ShapeError(
            "coordinates must be those of images, with rows (image, row, column), got indices of "
            f"shape {tuple(indices.shape)}"
        )
    if None in grid:
        raise ShapeError(
            "coordinates must have a known shape and batch size, got "
            f"{grid[0]} and {grid[1]}; pass spatial_shape and batch_size to coordinate_map"
        )
    shape = (grid[1], *grid[0])
    mask = namespace(indices).zeros(math.prod(shape) + 1, bool)
    mask[cells_of(coordinates, shape)] = True  # rows that are no site set the last place
    return mask[:-1].reshape(shape)


def blocks_of(
    coordinates, *, bsize, ksize: Any = 1, strides=(1, 1), padding: Any = "SAME", capacity=None
):
    """List the blocks that hold sites of images, as ActiveBlocks.from_mask does those of a mask.

    Parameters
    ----------
    coordinates : CoordinateMap or SparseTensor
        Sites in two dimensions, of a known shape and batch size.
    bsize, ksize, strides, padding, capacity
        As for :meth:`ActiveBlocks.from_mask`.

    Returns
    -------
    ActiveBlocks
        The blocks of a convolution's result under which there is a site.

    Raises
    ------
    ShapeError, DTypeError
        If ``coordinates`` are no sites of images of a known size, or a size is wrong.

    Examples
    --------
    >>> import numpy as np
    >>> from sbnet_cupy import coordinate_map
    >>> rows = np.array([[0, 1, 1], [0, 5, 6]])
    >>> sites, _ = coordinate_map(rows, spatial_shape=(8, 8))
    >>> blocks_of(sites, bsize=4).active_block_indices.tolist()
    [[0, 0, 0], [0, 1, 1]]
    """
    mask = mask_of_sites(getattr(coordinates, "coordinates", coordinates))
    options = {"ksize": ksize, "strides": strides, "padding": padding, "capacity": capacity}
    return ActiveBlocks.from_mask(mask, bsize=bsize, **options)
