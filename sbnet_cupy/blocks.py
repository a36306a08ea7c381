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
from numbers import Integral

from .errors import ShapeError


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


def calc_block_params(in_size, bsize, ksize, strides=(1, 1), padding="SAME"):
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
    padding : "SAME", "VALID" or ((top, bottom), (left, right))
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
                f"ksize {kernel}, strides {stride}; the next size that fits axis size {b} is "
                f"{k + -(-max(b - k, 0) // s) * s}"
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


def calc_block_params_res_block(in_size, bsize, ksize_list, strides=(1, 1), padding="SAME"):
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
    if not isinstance(ksize_list, list | tuple) or not ksize_list:
        raise ShapeError(
            f"ksize_list must be a non-empty sequence of kernel sizes, got {ksize_list!r}; "
            "a bottleneck's is [1, 3, 1]"
        )
    kernels = [kernel_pair(ksize, "ksize_list") for ksize in ksize_list]
    effective = tuple(1 + sum(k[axis] - 1 for k in kernels) for axis in (0, 1))
    return calc_block_params(in_size, bsize, effective, strides, padding)


def is_integer(value):
    """Whether ``value`` is a whole number of an integer type; bool is not one."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def pair(value, name, *, minimum=1):
    """Read an int, a pair or TensorFlow's ``[1, h, w, 1]`` as ``(h, w)``, or raise ShapeError."""
    if (
        type(value) is tuple
        and len(value) == 2
        and type(value[0]) is type(value[1]) is int
        and (minimum is None or (value[0] >= minimum and value[1] >= minimum))
    ):
        return value  # the usual case, at once
    given = value
    if is_integer(value):
        value = (value, value)
    elif isinstance(value, list | tuple) and len(value) == 4 and value[0] == 1 == value[3]:
        value = value[1:3]
    if (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(is_integer(v) for v in value)
        and (minimum is None or min(value) >= minimum)
    ):
        return int(value[0]), int(value[1])
    kind = {1: "positive ", 0: "non-negative ", None: ""}[minimum]
    raise ShapeError(f"{name} must be two {kind}integers, got {given!r}")


def kernel_pair(ksize, name="ksize"):
    """Read an int, a pair or ``[kh, kw, cin, cout]`` as ``(kh, kw)``, or raise ShapeError."""
    if isinstance(ksize, list | tuple) and len(ksize) == 4 and all(is_integer(v) for v in ksize):
        return pair(tuple(ksize[:2]), name)
    return pair(ksize, name)


def image_size(in_size):
    """Read ``(N, H, W, C)`` or ``(H, W)`` as ``(H, W)``, or raise ShapeError."""
    if (
        isinstance(in_size, list | tuple)
        and len(in_size) in (2, 4)
        and all(is_integer(v) and v >= 0 for v in in_size)
    ):
        h, w = in_size if len(in_size) == 2 else in_size[1:3]
        return int(h), int(w)
    raise ShapeError(f"in_size must be (N, H, W, C) or (H, W), non-negative, got {in_size!r}")


def padding_pairs(in_hw, ksize, strides, padding):
    """Resolve "SAME", "VALID" or explicit padding to ``((top, bottom), (left, right))``."""
    if padding == "VALID":
        return (0, 0), (0, 0)
    if padding == "SAME":
        totals = [
            max((-(-n // s) - 1) * s + k - n, 0) if n else 0
            for n, k, s in zip(in_hw, ksize, strides, strict=True)
        ]
        return tuple((total // 2, total - total // 2) for total in totals)
    if isinstance(padding, list | tuple) and len(padding) == 2:
        return tuple(pair(axis, "padding", minimum=0) for axis in padding)
    raise ShapeError(
        f"padding must be 'SAME', 'VALID' or ((top, bottom), (left, right)), got {padding!r}"
    )


def output_size(in_hw, ksize, strides, padding):
    """Size ``(H', W')`` of the convolution's output; 0 where the kernel does not fit."""
    pads = padding_pairs(in_hw, ksize, strides, padding)
    return tuple(
        max((n + before + after - k) // s + 1, 0)
        for n, k, s, (before, after) in zip(in_hw, ksize, strides, pads, strict=True)
    )
