"""BlockTable: where the blocks of a stack lie, and which block is at each place of the image."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core import launch as kernels
from ...core.arrays import ArrayContainer, array_function, device_of_all, empty, is_cupy
from ...core.checks import check_contiguous, check_flag
from ...core.device import sm_count
from ...core.operator import Operator, Plan
from ...core.readable import is_on_host, place_of, shape_of
from ...core.sizes import is_integer, pair
from ...errors import CapacityError, DTypeError, ShapeError
from ..active_blocks import ActiveBlocks
from ..checks import check_indices
from ..from_mask import images_of_mask
from ..mask.reduce_mask import plan_mask_table, reduce_mask
from .stages import (
    Stage,
    check_covered,
    default_image_size,
    new_stage,
    resolve_transposed,
    resolve_window,
)


@dataclass(frozen=True, eq=False, repr=False)
class BlockTable(ArrayContainer):
    """The active blocks of a network's stage, with the way from a block to its neighbours.

    The image is cut into blocks once; one list of active blocks serves all stages. After a layer
    of stride 2 the same blocks have half as many pixels: :meth:`after_conv` gives the table of
    that stage, which shares the arrays. :func:`block_table` makes one from a mask.

    Activations of a stage are a stack ``[M, block_size[0], block_size[1], C]``, row ``m`` the block
    ``active_block_indices[m]``. The stack operations agree on this: what is in no active block
    reads 0; what is outside the image is what the layer makes of its border; pixels of a block
    that stick out of the image may hold anything and are never read from another place; rows at or
    past the count are never read, and are 0 in every result.

    Methods that return Python numbers read the count and so wait for the device.

    Parameters
    ----------
    bin_counts : int32 array, shape (1,)
        Number of active blocks, also when there are not rows for all.
    active_block_indices : int32 array, shape (M, 3)
        Rows ``(n, hi, wi)``; -1 past the count. A row outside of ``grid`` is no block.
    grid : int32 array, shape (N, hb, wb)
        Row of the block at each place; -1 where none is active.
    block_size : (int, int)
        Pixels of a block at this stage.
    image_size : (int, int)
        Pixels of the image at this stage. Blocks at its end may stick out.

    Examples
    --------
    >>> import numpy as np
    >>> table = block_table(np.eye(5)[None], block_size=2)
    >>> table
    BlockTable: 3 blocks, grid (1, 3, 3), block_size (2, 2), image_size (5, 5), capacity 3, on cpu
    >>> table.active_block_indices.tolist()
    [[0, 0, 0], [0, 1, 1], [0, 2, 2]]
    >>> table.grid[0]
    array([[ 0, -1, -1],
           [-1,  1, -1],
           [-1, -1,  2]], dtype=int32)
    >>> half = table.after_conv(3, strides=2, padding=1)
    >>> half.block_size, half.image_size
    ((1, 1), (3, 3))
    """

    bin_counts: Any
    active_block_indices: Any
    grid: Any
    block_size: tuple[int, int]
    image_size: tuple[int, int]

    copies_strided = True

    def __post_init__(self):
        set_field = object.__setattr__
        set_field(self, "block_size", pair(self.block_size, "block_size"))
        set_field(self, "image_size", pair(self.image_size, "image_size", minimum=0))
        for name, dimensions in (("bin_counts", 1), ("active_block_indices", 2), ("grid", 3)):
            shape = getattr(getattr(self, name), "shape", None)
            if shape is None:
                kind = type(getattr(self, name)).__name__
                raise DTypeError(f"{name} must be an array, got {kind}; use block_table")
            if len(shape) != dimensions:
                raise ShapeError(
                    f"{name} must have {dimensions} dimensions, got shape {tuple(shape)}; "
                    "use block_table"
                )
        check_covered(Stage(self.block_size, self.image_size), self.grid.shape[1:], "image_size")

    def __repr__(self):
        """Tell the sizes, and the number of active blocks where it is known without waiting."""
        known = is_on_host(self.bin_counts) and tuple(self.bin_counts.shape) == (1,)
        place = place_of(self.grid)
        return (
            f"BlockTable: {f'{self.count()} blocks, ' if known else ''}grid {shape_of(self.grid)}, "
            f"block_size {self.block_size}, image_size {self.image_size}, capacity {self.capacity}"
            + (f", on {place}" if place else "")
        )

    def _arrays(self):
        return (self.bin_counts, self.active_block_indices, self.grid)

    def _map_arrays(self, function):
        return BlockTable(*map(function, self._arrays()), self.block_size, self.image_size)

    @functools.cached_property
    def _device(self):
        """Where the arrays are, which does not change."""
        return device_of_all(self._arrays())

    @property
    def capacity(self):
        """Number of rows of a stack."""
        return int(self.active_block_indices.shape[0])

    @property
    def batch(self):
        """Number of images."""
        return int(self.grid.shape[0])

    @property
    def active(self):
        """The list of blocks, as :func:`reduce_mask` returns it."""
        blocks = tuple(map(int, self.grid.shape))
        return ActiveBlocks(self.bin_counts, self.active_block_indices, blocks)

    @property
    def overflowed(self):
        """Whether more blocks are active than there are rows."""
        return self.count() > self.capacity

    def count(self):
        """Return the number of active blocks."""
        return int(self.bin_counts[0])

    def density(self):
        """Return the share of blocks that are active, 0 to 1; 0 for a grid with no blocks."""
        return self.count() / max(math.prod(self.grid.shape), 1)

    def check(self):
        """Return self, or raise CapacityError when blocks were left out."""
        count = self.count()
        if count > self.capacity:
            raise CapacityError(
                f"capacity must be at least the number of active blocks, got {self.capacity} for "
                f"{count} blocks; pass a larger capacity to block_table"
            )
        return self

    def at(self, block_size, image_size):
        """Return the table of the stage with these sizes, of a block and of the image."""
        return BlockTable(*self._arrays(), block_size, image_size)

    def at_stride(self, strides, image_size=None):
        """Return the table of a stage whose pixels are ``strides`` times larger.

        The image there has ``ceil(n / strides)`` pixels, or ``image_size``.
        """
        strides = pair(strides, "strides")
        if any(b % s for b, s in zip(self.block_size, strides, strict=True)):
            raise ShapeError(
                f"strides must divide the block size of the stage, got strides {strides} for "
                f"blocks of {self.block_size} pixels; make the table with a larger block_size"
            )
        block = tuple(b // s for b, s in zip(self.block_size, strides, strict=True))
        image = default_image_size(self, strides) if image_size is None else image_size
        return self.at(block, image)

    def after_conv(self, kernel, strides=(1, 1), padding: Any = "SAME", dilation=(1, 1), *,
                   ceil_mode=False):  # fmt: skip
        """Return the table of the stage after a convolution or a pooling with these options."""
        check_flag("ceil_mode", ceil_mode)
        window = resolve_window(self, kernel, strides, padding, dilation, ceil_mode=ceil_mode)
        return self.at(*window.coarse)

    def after_transposed(self, kernel, strides=(1, 1), padding: Any = "SAME", dilation=(1, 1),
                         output_padding=(0, 0)):  # fmt: skip
        """Return the table of the stage after a transposed convolution with these options."""
        options = (kernel, strides, padding, dilation, output_padding)
        return self.at(*resolve_transposed(self, *options).fine)

    def after_interpolate(self, scale_factor, size=None):
        """Return the table of the stage after :func:`stack_interpolate` with these options."""
        return self.at(*new_stage(self, scale_factor, size))


@array_function
def block_table(
    mask, block_size: Any = 32, *, image_size=None, tol=0.0, avgpool=False, capacity=None
):
    """Cut images into blocks, and find those where a mask is set.

    Block ``(n, hi, wi)`` holds the pixels ``[hi * b_h, (hi + 1) * b_h)`` by ``[wi * b_w, (wi + 1) *
    b_w)`` of image ``n``; it is active when its own pixels hold one of the mask. The blocks cover
    the image: where its size is not a multiple of the block's, the last ones stick out.

    Parameters
    ----------
    mask : array, shape (N, H, W), (N, H, W, 1), (N, 1, H, W) or (H, W), or ActiveBlocks
        bool, any integer or a float; (H, W) is one image. Or blocks that are known already, in a
        grid with no gaps.
    block_size : int or (int, int)
        Pixels of a block. Divisible by the product of the network's strides.
    image_size : (int, int), optional
        ``(H, W)`` of the images. Only for ActiveBlocks; by default their blocks end with the image.
    tol, avgpool : float, bool
        As for :func:`reduce_mask`. Only for a mask.
    capacity : int, optional
        Number of rows of a stack. With it nothing waits for the device: rows past the count are
        -1, and blocks past the capacity are left out (:attr:`BlockTable.overflowed` tells).
        Without it there are as many rows as active blocks. Only for a mask.

    Returns
    -------
    BlockTable
        In the library and on the device of ``mask``.

    Raises
    ------
    ShapeError
        If a size is wrong or the mask is not contiguous.
    DTypeError
        If the mask is complex or no array.
    ValueError
        If ActiveBlocks come with an option that is only for a mask.

    Source: the list of blocks is that of Ren et al. 2018, arXiv:1801.02108, section 3.1.
    Kernels: mask_table of cuda_src/block_sparse/mask/reduce_mask.cu; for blocks that are known,
    cuda_src/block_sparse/stack/block_table.cu

    Examples
    --------
    >>> import numpy as np
    >>> mask = np.zeros((1, 64, 100), bool)
    >>> mask[0, 40:50, 70:80] = True
    >>> table = block_table(mask)
    >>> table.count(), table.grid.shape, table.active_block_indices.tolist()
    (1, (1, 2, 4), [[0, 1, 2]])
    """
    block = pair(block_size, "block_size")
    if isinstance(mask, ActiveBlocks):
        active = _known(mask, tol, avgpool, capacity)
        image = tuple(n * b for n, b in zip(active.grid[1:], block, strict=True))
        image = image if image_size is None else pair(image_size, "image_size", minimum=0)
        check_covered(Stage(block, image), active.grid[1:], "image_size")
    else:
        if image_size is not None:
            raise ValueError(f"image_size must be None for a mask, got {image_size!r}")
        mask = images_of_mask(mask)
        image, blocks = _image_of(mask, block)
        pool = {"tol": tol, "avgpool": avgpool, "capacity": capacity}
        listed = list_blocks(mask, block, **pool)
        if listed is not None:
            return BlockTable(*listed, block, image)
        active = reduce_mask(mask, blocks, bsize=block, **pool)
    grid = empty(active.grid, np.int32, active.bin_counts)
    FILL_GRID((*active, grid), tuple(map(int, active.grid)))
    return BlockTable(*active, grid, block, image)


def list_blocks(mask, block, tol=0.0, avgpool=False, capacity=None):
    """Return the count, the list and the grid of a mask by one kernel; None where there is none."""
    if not is_cupy(mask):
        return None
    mask = images_of_mask(mask)
    options = (_image_of(mask, block)[1], block, (0, 0), None, tol, avgpool, capacity)
    plan = MASK_TABLE.plan_for((mask,), options)
    return None if plan.launch is None else plan.run(mask)


def _known(active, tol, avgpool, capacity):
    """Check blocks that are known, which leave no choice of how to find them."""
    given = {"tol": (tol, 0.0), "avgpool": (avgpool, False), "capacity": (capacity, None)}
    for name, (value, default) in given.items():
        if value is not default and value != default:
            raise ValueError(f"{name} must be {default} for ActiveBlocks, got {value!r}")
    check_indices(*active, like=active.bin_counts)
    if len(active.grid) != 3 or not all(is_integer(n) and n >= 0 for n in active.grid):
        raise ShapeError(f"mask.grid must be three sizes (N, hb, wb), got {active.grid}")
    return active


def _image_of(mask, block):
    """Return the size of the mask's images, and the number of blocks that cover it."""
    shape = tuple(getattr(mask, "shape", ()))
    image = shape[1:3]
    image = image if len(image) == 2 else (1, 1)  # which reduce_mask refuses
    return image, tuple(-(-n // b) for n, b in zip(image, block, strict=True))


def _fill_grid_numpy(bin_counts, active_block_indices, grid):
    """Write the row of each block at its place; of rows with one place the last stays."""
    count = min(max(int(bin_counts[0]), 0), len(active_block_indices))
    rows = active_block_indices[:count]
    inside = ((rows >= 0) & (rows < grid.shape)).all(axis=1)
    grid[...] = -1
    grid[tuple(rows[inside].T)] = np.flatnonzero(inside)


_THREADS = 1024
_PLACES = 8 << 10  # that a thread block looks after: one will do for most networks


def _infer(specs, options):
    """Return the spec of the grid."""
    return (specs[0].new(options, np.int32),)


def _plan(specs, options):
    """Return the plan of the call, whose arguments are checked."""
    (grid,) = results = _infer(specs, options)
    if not grid.size:
        return Plan(results, lambda *arrays: None)
    if not grid.on_gpu:
        return Plan(results, _fill_grid_numpy)
    launch = _fill_grid_cuda(specs[1].shape[0], grid)
    return Plan(results, launch, launch, operands=(0, 1, 2))


def _fill_grid_cuda(rows, grid):
    """Prepare one launch; see cuda_src/block_sparse/stack/block_table.cu."""
    thread_blocks = min(-(-grid.size // _PLACES), sm_count())
    sizes = (rows, *grid.shape, -(-grid.size // thread_blocks))
    stem, template = "block_sparse/stack/block_table", (_THREADS,)
    return kernels.prepare(
        stem, "block_table", template, thread_blocks, _THREADS, 3, sizes, dependent=True
    )


def _infer_table(specs, options):
    """Return the specs of the count, the list and the grid of a mask on a GPU."""
    return _plan_table(specs, options).results


def _plan_table(specs, options):
    """Check all arguments; return the plan, which has no launch where there is no kernel."""
    return plan_mask_table(specs, options) or Plan((), lambda mask: None)


MASK_TABLE = Operator(
    "mask_table",
    arrays=("mask",),
    options=("block_count", "bsize", "boffset", "bstride", "tol", "avgpool", "capacity"),
    infer=_infer_table,
    plan=_plan_table,
    results=(),
)

FILL_GRID = Operator(
    "fill_grid",
    arrays=("bin_counts", "active_block_indices", "grid"),
    options=("images", "blocks_h", "blocks_w"),
    infer=_infer,
    plan=_plan,
    results=("grid",),
)

# What an operator takes in place of a table: among its arrays, and first among its options.
TABLE_ARRAYS = ("bin_counts", "active_block_indices", "grid")
TABLE_SIZES = ("block_size", "image_size")


def split_table(table):
    """Return the arrays and the sizes of a table; raise DTypeError for anything else."""
    if not isinstance(table, BlockTable):
        raise DTypeError(
            f"table must be a BlockTable, got {type(table).__name__}; make one with block_table"
        )
    return table._arrays(), (table.block_size, table.image_size)


def check_table(table):
    """Raise unless ``table`` is a BlockTable of native arrays that fit each other."""
    split_table(table)
    check_indices(table.bin_counts, table.active_block_indices, like=table.grid)
    if table.grid.dtype != np.int32:
        raise DTypeError(f"table.grid must be int32, got {table.grid.dtype}; use block_table")
    check_contiguous("table.grid", table.grid)
