"""Between blocks and sites: the pixels of a list of blocks, and the blocks that hold given pixels.

A :class:`PixelSites` has the fields of a :class:`~sbnet_cupy.CoordinateMap`, in their order.
"""

from typing import Any, NamedTuple

from ..core.arrays import array_function, library_of, namespace
from ..core.checks import check_array
from ..core.list_cells import list_cells
from ..core.sizes import is_integer, pair
from ..errors import DTypeError, ShapeError
from .block_params import BlockParams


class PixelSites(NamedTuple):
    """Pixels of images as a list; ``CoordinateMap(*sites)`` is the CoordinateMap of them."""

    indices: Any  # int32 [M, 3]: (image, row, column) in raster order, -1 past the count
    count: Any  # int32 [1]
    spatial_shape: tuple[int, int]
    batch_size: int


@array_function
def sites_of_blocks(active, bsize, mask=None, image_size=None, capacity=None):
    """See :meth:`ActiveBlocks.sites`."""
    block = bsize.bsize_out if isinstance(bsize, BlockParams) else pair(bsize, "bsize")
    xp = namespace(active.active_block_indices)
    images, *blocks = active.grid
    covered = tuple(n * b for n, b in zip(blocks, block, strict=True))
    if mask is not None:
        check_array("mask", mask, ndim=(3, 4), like=active.active_block_indices)
        mask = mask[..., 0] if mask.ndim == 4 and mask.shape[3] == 1 else mask
        if image_size is not None:
            raise ShapeError(f"image_size must be None where a mask is given, got {image_size!r}")
        image_size = mask.shape[1:]
    size = covered if image_size is None else pair(image_size, "image_size", minimum=0)
    if any(not c - b < n <= c for n, c, b in zip(size, covered, block, strict=True) if c):
        what = "image_size" if mask is None else "mask"
        raise ShapeError(
            f"{what} must have a height and width that blocks of {block} in a grid of "
            f"{tuple(blocks)} cover, got {size}"
        )
    if capacity is not None and (not is_integer(capacity) or capacity < 0):
        raise ShapeError(f"capacity must be a non-negative integer, got {capacity!r}")
    listed = _dense(active, xp)
    for axis, b in enumerate(block):
        listed = listed.repeat(b, axis=1 + axis)
    listed = listed[:, : size[0], : size[1]]
    if mask is not None:
        check_array("mask", mask, shape=(images, *size))
        listed = listed & (mask != 0)
    indices, count, _ = list_cells(xp.ascontiguousarray(listed), capacity)
    return PixelSites(indices, count, tuple(size), images)


def _dense(active, xp):
    """Return which blocks are active, without a look at the count: bool ``[N, bh, bw]``."""
    counts, indices = active
    valid = (xp.arange(len(indices)) < counts) & (indices >= 0).all(axis=1)
    place = xp.zeros(len(indices), "int64")
    for column, size in zip(indices.T, active.grid, strict=True):
        valid &= column < size
        place = place * size + column
    total = active.grid[0] * active.grid[1] * active.grid[2]
    dense = xp.zeros(total + 1, bool)
    dense[xp.where(valid, place, total)] = True
    return dense[:-1].reshape(active.grid)


@array_function
def mask_of_sites(coordinates):
    """Return the mask, bool ``[N, H, W]``, that is set at sites in two dimensions.

    ``coordinates`` is a CoordinateMap, a :class:`PixelSites` or what has their fields, or a tensor
    that has one as its ``coordinates``.
    """
    coordinates = getattr(coordinates, "coordinates", coordinates)
    if not all(hasattr(coordinates, name) for name in PixelSites._fields):
        raise DTypeError(
            f"coordinates must be a CoordinateMap, got {type(coordinates).__name__}; make one with "
            "coordinate_map"
        )
    indices, count, *grid = (getattr(coordinates, name) for name in PixelSites._fields)
    if library_of(indices) is None or indices.shape[1:] != (3,):
        raise ShapeError(
            f"coordinates must be those of images, with rows (image, row, column), got indices of "
            f"shape {tuple(getattr(indices, 'shape', ()))}"
        )
    if None in grid:
        raise ShapeError(
            "coordinates must have a known shape and batch size, got "
            f"{grid[0]} and {grid[1]}; pass spatial_shape and batch_size to coordinate_map"
        )
    (height, width), images = grid
    xp = namespace(indices)
    valid = xp.arange(len(indices)) < count
    n, row, column = indices.T.astype("int64")
    for value, size in ((n, images), (row, height), (column, width)):
        valid &= (value >= 0) & (value < size)
    mask = xp.zeros(images * height * width + 1, bool)
    mask[xp.where(valid, (n * height + row) * width + column, images * height * width)] = True
    return mask[:-1].reshape(images, height, width)


def blocks_of(coordinates, *, bsize, ksize=1, strides=(1, 1), padding="SAME", capacity=None):
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
    from .active_blocks import ActiveBlocks  # whose sites are made here

    options = {"ksize": ksize, "strides": strides, "padding": padding, "capacity": capacity}
    return ActiveBlocks.from_mask(mask_of_sites(coordinates), bsize=bsize, **options)
