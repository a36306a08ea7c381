"""From a mask of the image to the active blocks of a layer.

A layer takes a mask in place of a list of blocks, and ``bsize``, the size of a block in pixels of
the result, in place of BlockParams. Each output pixel owns the mask's pixels that lie under it, and
a block is active where its output pixels own a pixel that is set::

    SAME, stride 2      output     p0      p1      p2        output pixel p owns the pixels
                        mask     [0 1]   [2 3]   [4 5]       from 2p up to 2p + 2

The halo of a block does not count: its neighbours own it. With stride ``s`` output pixel ``p`` owns
the ``s`` pixels from ``s * p`` on, as in :func:`masks.downsample`. This holds where the padding
keeps the image in place: SAME, or half a kernel. A smaller padding (VALID) cuts a frame off the
image; output pixel 0 then lies under the middle of its window, and the mask is shifted by as much.
The frame itself lies under no output pixel, and has no owner. A larger padding shifts the mask the
other way.
"""

from ..core.arrays import ArrayContainer, library_of
from ..core.sizes import kernel_pair, pair
from ..errors import ShapeError
from .block_params import BlockParams, calc_block_params


def images_of_mask(mask):
    """Return a mask ``[H, W]`` or ``[N, 1, H, W]`` as ``[N, H, W]``; anything else as it is.

    With one channel last ``[N, 1, H, 1]`` is that of images of one row.
    """
    dimensions = getattr(mask, "ndim", None)
    if dimensions == 4 and mask.shape[1] == 1 and mask.shape[3] != 1:
        return mask[:, 0]
    return mask[None] if dimensions == 2 else mask


def params_of_output(image_hw, bsize, ksize, strides, padding):
    """Return the BlockParams of a convolution whose result has blocks of ``bsize`` pixels."""
    bsize, kernel, strides = pair(bsize, "bsize"), kernel_pair(ksize), pair(strides, "strides")
    block = [(b - 1) * s + k for b, k, s in zip(bsize, kernel, strides, strict=True)]
    return calc_block_params(image_hw, tuple(block), kernel, strides, padding)


def grid_on_mask(block_params, ksize, strides):
    """Return the arguments of reduce_mask that give each block the pixels that it owns."""
    shift = []
    for offset, k, s in zip(block_params.boffset, ksize, strides, strict=True):
        least, most = (k - s) // 2, k // 2  # padding before that keeps the image in place
        shift.append(max(least + offset, 0) + min(most + offset, 0))
    return {"bsize": block_params.bstride, "boffset": tuple(shift)}


def takes_blocks_from(indices, bsize, capacity):
    """Whether a call of a layer gives a mask, or ``bsize``, so that :func:`find_blocks` is due."""
    if bsize is not None or capacity is not None:
        return True
    return not isinstance(indices, _LISTS) and is_mask(indices)


_LISTS = (ArrayContainer, tuple, list)  # no mask: the usual argument, told at once


def is_mask(indices):
    """Whether the third argument of a layer is an array like a mask, of any library."""
    if library_of(indices) is None:
        return False
    rank = getattr(indices.shape, "rank", -1)  # TensorFlow's; None where it is not known
    return (len(indices.shape) if rank == -1 else rank) in (2, 3, 4)


def find_blocks(indices, block_params, bsize, capacity, convolution, reduce_mask):
    """Return the list of blocks and the BlockParams of a layer's call.

    Parameters
    ----------
    indices, block_params, bsize, capacity
        As the layer was given them.
    convolution : ((N, H, W), kernel, strides, padding)
        The images and the convolution, checked; None for N where it is not known.
    reduce_mask : function
        That of the library of the mask.
    """
    image, *sizes = convolution
    if bsize is not None:
        if block_params is not None:
            raise TypeError(f"bsize must be None where block_params is given, got {bsize!r}")
        block_params = params_of_output(image[1:], bsize, *sizes)
    if not is_mask(indices):
        is_pair = isinstance(indices, tuple | list) and len(indices) == 2
        if capacity is not None and (is_pair or isinstance(indices, ArrayContainer)):
            raise TypeError(
                f"capacity must be None with a list of blocks, got {capacity!r}; it is the number "
                "of blocks to list of a mask"
            )
        return indices, block_params
    if block_params is None:
        raise TypeError(
            "bsize must be given with a mask: the size of a block in pixels of the result, such as "
            "bsize=16"
        )
    if not isinstance(block_params, BlockParams):
        raise TypeError(
            f"block_params must be a BlockParams, got {type(block_params).__name__}; give bsize "
            "instead, the size of a block in pixels of the result"
        )
    if len(indices.shape) == 2 and indices.shape[1] == 3 and tuple(indices.shape) != image[1:]:
        raise TypeError(
            "indices must be an ActiveBlocks, a pair (bin_counts, active_block_indices) or a mask, "
            f"got an array of shape {tuple(indices.shape)}, as active_block_indices alone; give "
            "the pair"
        )
    mask = as_batch("indices, where it is a mask,", indices, image)
    grid = grid_on_mask(block_params, *sizes[:2])
    return reduce_mask(mask, block_params.bcount, capacity=capacity, **grid), block_params


def as_batch(name, mask, image):
    """Return a mask as ``[N, H, W]``, or raise ShapeError where it is not of the image's size."""
    n, h, w = image
    shape = tuple(mask.shape)
    images = shape[:1] if len(shape) > 2 else (1,)
    sizes = shape[-2:] if len(shape) == 2 else shape[1:]
    if sizes in ((h, w), (h, w, 1), (1, h, w)) and (None in (n, *images) or images == (n,)):
        if len(shape) == 2:
            return mask[None]
        if len(shape) == 4:
            return mask[..., 0] if sizes == (h, w, 1) else mask[:, 0]
        return mask
    raise ShapeError(
        f"{name} must have shape ({n}, {h}, {w}), ({n}, {h}, {w}, 1) or ({n}, 1, {h}, {w}), the "
        f"size of x, or ({h}, {w}) for one image, got {shape}"
    )
