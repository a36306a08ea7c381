"""Masks: where a picture matters. Each function returns a fresh ``[N, H, W]`` array, True = active.

Drawn: ``top_left``, ``blobs``. From data: ``threshold`` of a picture, ``change`` between frames,
``birds_eye`` of a point cloud. From a mask: ``dilate``, ``downsample`` to a coarser stage.
"""

import math
import sys
from functools import partial
from numbers import Rational
from typing import Any

import numpy as np

from ...core.arrays import array_function, is_float, namespace
from ...core.byte_order import check_byte_orders
from ...core.checks import check_array
from ...core.point_cells import number
from ...core.scalars import generator_of
from ...core.sizes import is_integer, pair
from ...core.spec import spec_of
from ...errors import DTypeError, ShapeError
from ..checks import cut_blocks
from .birds_eye import birds_eye

__all__ = ["birds_eye", "blobs", "change", "dilate", "downsample", "threshold", "top_left"]


def top_left(shape, density, *, xp=np, dtype: Any = bool):
    """Activate the top-left rectangle that holds a given share of the image.

    Each side is ``sqrt(density)`` times the image's, rounded up, so the rectangle keeps its aspect.

    Parameters
    ----------
    shape : (N, H, W) or (H, W)
        Size of the mask; ``(H, W)`` means one image.
    density : float
        Share of active pixels, 0 to 1.
    xp : module, default numpy
        ``numpy`` or ``cupy``: the library of the result.
    dtype : data type, default bool
        Element type of the result; active pixels are 1.

    Returns
    -------
    mask : array, shape (N, H, W)

    Raises
    ------
    ShapeError, ValueError
        If ``shape`` is not two or three sizes, or ``density`` is not within 0 and 1.

    Source: Ren et al. 2018, arXiv:1801.02108: the synthetic masks of its speed benchmark.

    Examples
    --------
    >>> top_left((4, 6), 0.25, dtype=int)
    array([[[1, 1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0, 0],
            [0, 0, 0, 0, 0, 0],
            [0, 0, 0, 0, 0, 0]]])
    """
    n, h, w = _mask_shape(shape)
    edge = math.sqrt(_density(density))
    mask = _library(xp).zeros((n, h, w), dtype=dtype)
    # The tiny allowance keeps a product such as 0.1 * 30 = 3.0000000000000004 from rounding up.
    mask[:, : math.ceil(edge * h - 1e-9), : math.ceil(edge * w - 1e-9)] = 1
    return mask


def blobs(shape, density, *, sigma=8.0, seed=0, xp=np, dtype: Any = bool):
    """Activate random smooth blobs that cover a given share of each image.

    White noise is smoothed by a Gaussian (periodic at the borders); the highest pixels are active.

    Parameters
    ----------
    shape, xp, dtype
        As for :func:`top_left`. Each image has its own blobs.
    density : float
        Share of active pixels, 0 to 1. Exactly ``round(density * H * W)`` pixels are active.
    sigma : float, default 8
        Standard deviation of the Gaussian in pixels; a larger one gives fewer and larger blobs.
    seed : int, default 0
        The same seed gives the same mask, in NumPy and in CuPy.

    Returns
    -------
    mask : array, shape (N, H, W)

    Raises
    ------
    ShapeError, ValueError
        As for :func:`top_left`, or if ``sigma`` is negative or infinite.

    Source: an excursion set of a Gaussian random field; Adler 1981, The Geometry of Random Fields.

    Examples
    --------
    >>> mask = blobs((2, 64, 96), 0.1, seed=7)
    >>> mask.shape, mask.sum(axis=(1, 2)).tolist()
    ((2, 64, 96), [614, 614])
    """
    n, h, w = _mask_shape(shape)
    count = round(_density(density) * h * w)
    spread = number(sigma, "sigma")
    if not 0 <= spread < math.inf:
        raise ValueError(f"sigma must be a finite number of pixels, 0 or more, got {sigma!r}")
    mask = np.zeros((n, h * w), dtype=dtype)
    spread = min(spread, 1e100)  # which leaves the mean alone, and has a square
    if mask.size:
        noise = generator_of(seed).standard_normal((n, h, w))
        frequency = np.fft.fftfreq(h)[:, None] ** 2 + np.fft.rfftfreq(w) ** 2
        gaussian = np.exp(-2 * (math.pi * spread) ** 2 * frequency)
        noise = np.fft.irfft2(np.fft.rfft2(noise) * gaussian, s=(h, w))
        highest = np.argsort(noise.reshape(n, -1), axis=1, kind="stable")[:, h * w - count :]
        np.put_along_axis(mask, highest, 1, axis=1)
    return _library(xp).asarray(mask.reshape(n, h, w))


@partial(array_function, takes_strided=True)
def threshold(picture, level):
    """Activate the pixels of a picture that are brighter than a level.

    Parameters
    ----------
    picture : array, shape (H, W), (H, W, C) or (N, H, W, C)
        Bool, integer or float, channels last: of a PyTorch image pass ``x.permute(0, 2, 3, 1)``. A
        pixel is active when any of its channels exceeds the level; NaN does not.
    level : float
        Active pixels are strictly greater. The level is not rounded to the element type.

    Returns
    -------
    mask : array of bool, shape (N, H, W)
        On the device of ``picture``; N is 1 unless ``picture`` has four axes.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        If ``picture`` is not a picture, or ``level`` is not a number.

    Examples
    --------
    >>> threshold(np.array([[0, 3, 9], [200, 4, 0]], dtype=np.uint8), 3)
    array([[[False, False,  True],
            [ True,  True, False]]])
    """
    _check_picture("picture", picture)
    return _exceeds(picture, level)


@partial(array_function, takes_strided=True)
def change(previous, current, level):
    """Activate the pixels that differ between two frames by more than a level.

    Parameters
    ----------
    previous, current : array, shape (H, W), (H, W, C) or (N, H, W, C)
        Two frames of one shape and element type, channels last. Differences of integers do not wrap
        around.
    level : float
        Pixels with ``abs(current - previous) > level`` in any channel are active; NaN is not.

    Returns
    -------
    mask : array of bool, shape (N, H, W)

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ValueError
        If the frames do not match, or ``level`` is not a number.

    Source: frame differencing; for convolutions, Parger et al. 2022, DeltaCNN, arXiv:2203.03996.

    Examples
    --------
    >>> before, after = np.zeros((2, 3), np.uint8), np.array([[0, 2, 250], [1, 0, 0]], np.uint8)
    >>> change(before, after, 1)
    array([[[False,  True,  True],
            [False, False, False]]])
    """
    _check_picture("previous", previous)
    _check_picture("current", current)
    check_array("current", spec_of(current), shape=previous.shape, like=spec_of(previous))
    if current.dtype != previous.dtype:
        check_byte_orders({"previous": previous, "current": current})
        raise DTypeError(
            f"current must have the dtype of previous, {previous.dtype}, got {current.dtype}; "
            "convert one with .astype"
        )
    return _exceeds(_distance(previous, current), level)


@partial(array_function, takes_strided=True)
def dilate(mask, radius):
    """Grow a mask: a pixel becomes active if any pixel within ``radius`` along both axes is active.

    Parameters
    ----------
    mask : array of bool, shape (N, H, W), or (H, W) for one image
    radius : int or (int, int)
        Radius of the structuring element, which is ``2 * radius + 1`` pixels high and wide; 0
        copies the mask.

    Returns
    -------
    mask : array of bool, shape (N, H, W)

    Source: Serra 1982, Image Analysis and Mathematical Morphology (dilation; squares separate).

    Examples
    --------
    >>> dilate(np.array([[[0, 0, 0, 0, 1]]], dtype=bool), 2).astype(int)
    array([[[0, 0, 1, 1, 1]]])
    """
    mask = _mask(mask)
    xp = namespace(mask)
    for axis, reach in enumerate(pair(radius, "radius", minimum=0), start=1):
        reach = min(reach, mask.shape[axis])
        pads = [(0, 0)] * 3
        pads[axis] = (reach, reach)
        mask = xp.moveaxis(xp.pad(mask, pads), axis, 0)
        covered, width = 1, 2 * reach + 1
        while covered < width:  # mask[i] is the union over [i, i + covered): double it
            step = min(covered, width - covered)
            mask = mask[:-step] | mask[step:]
            covered += step
        mask = xp.moveaxis(mask, 0, axis)
    return xp.ascontiguousarray(mask)


@partial(array_function, takes_strided=True)
def downsample(mask, factor):
    """Shrink a mask to a coarser stage: a coarse pixel is active if any pixel that it covers is.

    Coarse pixel ``(i, j)`` covers ``mask[:, fh*i : fh*(i+1), fw*j : fw*(j+1)]``. Sizes round up, as
    they do for a convolution with strides ``(fh, fw)`` and SAME padding.

    Parameters
    ----------
    mask : array of bool, shape (N, H, W), or (H, W) for one image
    factor : int or (int, int)
        Stride of the coarser stage along rows and columns.

    Returns
    -------
    mask : array of bool, shape (N, ceil(H / factor), ceil(W / factor))

    Source: Ren et al. 2018, arXiv:1801.02108: the mask of each stage is max-pooled.

    Examples
    --------
    >>> downsample(np.array([[[0, 0, 0, 0, 1]]], dtype=bool), (1, 2)).astype(int)
    array([[[0, 0, 1]]])
    """
    mask = _mask(mask)
    n, h, w = mask.shape
    fh, fw = cut_blocks(pair(factor, "factor"), (h, w))  # there is no memory for pixels beyond
    out_h, out_w = -(-h // fh), -(-w // fw)
    mask = namespace(mask).pad(mask, ((0, 0), (0, out_h * fh - h), (0, out_w * fw - w)))
    return mask.reshape(n, out_h, fh, out_w, fw).any(axis=(2, 4))


def _exceeds(picture, level):
    """Return ``picture > level`` in any channel, as [N, H, W] for any number of axes."""
    level = _level(level)
    if picture.dtype.itemsize == 2 and is_float(picture.dtype):
        picture = picture.astype(np.float32)  # exact
    mask = picture > _rounded_down(level, picture.dtype)
    if mask.ndim > 2:
        mask = mask.any(axis=-1)
    return mask if mask.ndim == 3 else mask[None]


def _level(level):
    """Return a level as an int or a float that the same values of any dtype exceed, or raise."""
    rounded = number(level, "level")
    if math.isinf(rounded) and isinstance(level, Rational):  # finite, beyond all other floats
        return sys.float_info.max if rounded > 0 else rounded
    return int(level) if is_integer(level) else rounded


def _rounded_down(level, dtype):
    """Return a number that the same values of a dtype exceed as the level, and that it holds.

    Comparisons round a Python number to float32 or, with integers, both to float64.
    """
    if dtype.kind in "iu":
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        if level < least:
            return float("-inf")
        return most if level >= most else math.floor(level)
    if not is_float(dtype):
        return float(level)
    with np.errstate(over="ignore"):
        rounded = dtype.type(level)
    if float(rounded) > level:
        rounded = np.nextafter(rounded, dtype.type(-np.inf))
    return float(rounded)


def _distance(a, b):
    """Return ``abs(a - b)`` without wrap-around, overflow of half floats, or warnings."""
    xp = namespace(a)
    if a.dtype == bool:
        return a ^ b
    if a.dtype.kind in "iu":  # the difference fits the unsigned type and wraps to the right value
        return (xp.maximum(a, b) - xp.minimum(a, b)).view(f"u{a.dtype.itemsize}")
    wide = np.float64 if a.dtype == np.float64 else np.float32
    with np.errstate(invalid="ignore", over="ignore"):
        return xp.abs(a.astype(wide) - b.astype(wide))


def _check_picture(name, value):
    check_array(name, spec_of(value), ndim=(2, 3, 4), kinds="biuf")


def _mask(value):
    """Return a checked mask as that of a batch."""
    check_array("mask", spec_of(value), ndim=(2, 3), kinds="b")
    return value if value.ndim == 3 else value[None]


def _mask_shape(shape):
    sizes = tuple(shape) if isinstance(shape, list | tuple) else ()
    if len(sizes) not in (2, 3) or not all(is_integer(n) and n >= 0 for n in sizes):
        raise ShapeError(f"shape must be (N, H, W) or (H, W), non-negative integers, got {shape!r}")
    return (1, *map(int, sizes))[-3:]


def _density(density):
    if not 0 <= number(density, "density") <= 1:
        raise ValueError(f"density must be a number from 0 to 1, got {density!r}")
    return float(density)


def _library(xp):
    if getattr(xp, "__name__", None) not in ("numpy", "cupy"):
        raise ValueError(f"xp must be the module numpy or cupy, got {xp!r}")
    return xp
