"""Block geometry: how a convolution's image is cut into blocks. Integers only, no arrays.

Along one axis, with block size ``b``, kernel ``k`` and stride ``s``, a block of ``b`` input pixels
yields ``(b - k) // s + 1`` output pixels, so neighbouring blocks start ``b - k + s`` pixels apart::

    input    |<------ b ------>|
                     |<------ b ------>|
             |<----->|  bstride = b - k + s          (blocks overlap by k - s pixels: the halo)
    output   [ b_out ][ b_out ][ b_out ]             (they tile the output without overlap)

The first block starts at ``boffset = -pad_before``: the padding is part of the first block.
"""

from dataclasses import dataclass
from typing import Any

from ..core.sizes import image_size, kernel_pair, output_size, padding_pairs, pair
from ..errors import ShapeError


@dataclass(frozen=True)
class BlockParams:
    """Where the blocks of an image lie; each field is a pair ``(h, w)`` of int.

    Parameters
    ----------
    bsize : (int, int)
        Size of an input block, halo included.
    bsize_out : (int, int)
        Size of the output block that a convolution makes of it.
    boffset : (int, int)
        Position of the first block's corner in the image, 0 or negative for padding.
    bcount : (int, int)
        Number of blocks along each axis.
    bstride : (int, int)
        Distance between the corners of neighbouring blocks.

    Examples
    --------
    >>> BlockParams(bsize=(18, 18), bsize_out=(16, 16), boffset=(-1, -1),
    ...             bcount=(25, 44), bstride=(16, 16)).bcount
    (25, 44)
    """

    bsize: tuple[int, int]
    bsize_out: tuple[int, int]
    boffset: tuple[int, int]
    bcount: tuple[int, int]
    bstride: tuple[int, int]

    def __post_init__(self):
        for name, minimum in _FIELD_MINIMUM.items():
            object.__setattr__(self, name, pair(getattr(self, name), name, minimum=minimum))


_FIELD_MINIMUM = {"bsize": 1, "bsize_out": 1, "boffset": None, "bcount": 0, "bstride": 1}


def calc_block_params(in_size, bsize, ksize, strides=(1, 1), padding: Any = "SAME"):
    """Cut the image of one convolution into blocks that produce every output pixel.

    Parameters
    ----------
    in_size : (N, H, W, C) or (H, W)
        Size of the input image.
    bsize : int or (int, int) or [1, int, int, 1]
        Size of an input block in pixels, halo included; ``(bsize - ksize) % strides`` must be 0.
    ksize : int or (int, int) or [kh, kw, cin, cout]
        Size of the convolution kernel.
    strides : int or (int, int) or [1, int, int, 1]
        Strides of the convolution.
    padding : "SAME", "VALID", int, (int, int) or ((top, bottom), (left, right))
        Padding of the convolution; SAME is TensorFlow's, with the odd pixel at the end.

    Returns
    -------
    BlockParams
        ``bcount`` is the smallest count whose blocks produce every output pixel.

    Raises
    ------
    ShapeError
        If a block is smaller than the kernel, or its outputs do not line up with the strides.

    Source: Ren et al. 2018, arXiv:1801.02108, section 3.1, with a count that covers every row.

    Examples
    --------
    >>> p = calc_block_params((1, 400, 700, 24), (18, 18), (3, 3))
    >>> p.bstride, p.boffset, p.bcount
    ((16, 16), (-1, -1), (25, 44))
    """
    size = image_size(in_size)
    block = pair(bsize, "bsize")
    kernel = kernel_pair(ksize)
    stride = pair(strides, "strides")
    for b, k, s in zip(block, kernel, stride, strict=True):
        if b < k or (b - k) % s:
            raise ShapeError(
                f"bsize must be ksize plus a multiple of strides on each axis, got bsize {block}, "
                f"ksize {kernel}, strides {stride}; in place of {b} the next one that fits "
                f"is {k + -(-max(b - k, 0) // s) * s}"
            )
    pads = padding_pairs(size, kernel, stride, padding)
    out_size = output_size(size, kernel, stride, padding)
    axes = list(zip(block, kernel, stride, strict=True))
    block_out = tuple((b - k) // s + 1 for b, k, s in axes)
    return BlockParams(
        bsize=block,
        bsize_out=block_out,
        boffset=tuple(-before for before, _ in pads),
        bcount=tuple(-(-n // b) for n, b in zip(out_size, block_out, strict=True)),
        bstride=tuple(b - k + s for b, k, s in axes),
    )


def calc_block_params_res_block(in_size, bsize, ksize_list, strides=(1, 1), padding: Any = "SAME"):
    """Cut the image of a residual unit into blocks: its convolutions act as one large kernel.

    Parameters
    ----------
    in_size, bsize, strides, padding
        As for :func:`calc_block_params`.
    ksize_list : sequence of kernel sizes
        One entry per convolution of the unit, each an int, a pair or ``[kh, kw, cin, cout]``.

    Returns
    -------
    BlockParams
        For a kernel of size ``1 + sum(k_i - 1)`` on each axis.

    Raises
    ------
    ShapeError
        If ``ksize_list`` is empty, or as :func:`calc_block_params`.

    Source: Ren et al. 2018, arXiv:1801.02108, section 3.3.

    Examples
    --------
    >>> calc_block_params_res_block((400, 700), 18, [1, 3, 1]).bstride
    (16, 16)
    """
    if not isinstance(ksize_list, (list, tuple)) or not ksize_list:
        raise ShapeError(
            f"ksize_list must be a non-empty sequence of kernel sizes, got {ksize_list!r}; "
            "a bottleneck's is [1, 3, 1]"
        )
    kernels = [kernel_pair(ksize, "ksize_list") for ksize in ksize_list]
    effective = tuple(1 + sum(k[axis] - 1 for k in kernels) for axis in (0, 1))
    return calc_block_params(in_size, bsize, effective, strides, padding)
