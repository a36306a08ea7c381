"""Read picture files of any size in bounded memory: large ones are reduced as they are read."""

import math
import warnings
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from .inputs import DemoError, check_file, size_text
from .reduction import block_max, block_mean

MOST_COMPUTED = 1 << 24  # pixels; a larger picture is reduced until it has no more
MOST_DECODED = 1 << 28  # pixels; Pillow takes 4 bytes for each
STRIP = 1 << 22  # pixels that are converted at a time

_LUMINANCE = np.array([0.2125, 0.7154, 0.0721], np.float32)  # of red, green, blue: ITU-R BT.709
_ORIENTATION = 0x0112  # the EXIF tag


@dataclass(frozen=True)
class Picture:
    """A picture as it is computed on."""

    pixels: np.ndarray  # [H, W] or [H, W, 3]: as in the file, or float32 means
    file_size: tuple[int, int]  # height and width of the picture in the file, upright
    factor: int = 1  # a pixel is the mean of factor x factor pixels of the file
    eight_bit: bool = False  # whether the file's values are 0 to 255

    def for_screen(self):
        """Return the pixels to draw: uint8 where the file's values are."""
        return self.pixels.round().astype(np.uint8) if self.eight_bit else self.pixels


def hubble_deep_field():
    """Read the picture that ships inside scikit-image's wheel; nothing is downloaded."""
    import skimage.data

    pixels = skimage.data.hubble_deep_field()
    return Picture(pixels, pixels.shape[:2], eight_bit=True)


def read_picture(path):
    """Read a picture file, upright, as a Picture of at most MOST_COMPUTED pixels."""
    with _opened(path) as image:
        size = image.size
        factor = reduction_of(size)
        if factor > 2:  # JPEG can be decoded at a reduced size; the last halving is a mean
            image.draft(None, tuple(max(n // (factor // 2), 1) for n in size))
        remaining = factor // round(max(size) / max(image.size))
        pixels = _upright(_in_strips(image, block_mean, remaining), _orientation(image))
        file_size = _upright_size(size, _orientation(image))
        eight_bit = image.mode not in ("1", "F") and not image.mode.startswith("I")
        return Picture(pixels, file_size, factor, eight_bit)


def read_mask(path, size, factor=1):
    """Read a mask picture as bool: True where a square of the file has a pixel that is not 0.

    Raise DemoError unless the picture in the file has ``size``.
    """
    with _opened(path) as image:
        found = _upright_size(image.size, _orientation(image))
        if found != tuple(size):
            raise DemoError(
                f"--mask must be as large as what it masks, {size_text(size)}, "
                f"got {size_text(found)} in {path}"
            )
        return _upright(_in_strips(image, _any_set, factor), _orientation(image))


def reduction_of(size):
    """Return the power of two by which both sides are reduced to leave at most MOST_COMPUTED."""
    factor = 1
    while math.prod(-(-n // factor) for n in size) > MOST_COMPUTED:
        factor *= 2
    return factor


def grey(pixels):
    """Reduce a picture to float32 [H, W]; what is not a finite number becomes the darkest value."""
    with np.errstate(over="ignore"):
        values = pixels.astype(np.float32)
    if values.ndim == 3:
        values = values @ _LUMINANCE
    finite = np.isfinite(values)
    return np.where(finite, values, values[finite].min() if finite.any() else 0)


@contextmanager
def _opened(path):
    """Open a picture file; whatever a decoder raises becomes a DemoError, and no warning shows."""
    from PIL import Image

    check_file(path)
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # MOST_DECODED is checked instead
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path) as image:
                _check_decodable(path, image.size)
                yield image
    except DemoError:
        raise
    except Exception as error:  # decoders raise anything at all for a broken file
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DemoError(f"cannot read {path} as a picture: {reason}") from error
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def _check_decodable(path, size):
    if math.prod(size) > MOST_DECODED:
        raise DemoError(
            f"{path} must have at most {MOST_DECODED / 1e6:.0f} million pixels, "
            f"got {size_text(size[::-1])}, {math.prod(size) / 1e6:,.0f} million; cut or reduce it"
        )


def _in_strips(image, reduce, factor):
    """Return the pixels as an array; each strip of rows is converted and reduced by itself."""
    plain = image.mode in ("1", "L", "F", "RGB") or image.mode.startswith("I")
    width, height = image.size
    rows = factor * max(STRIP // (factor * width), 1)
    strips = []
    for top in range(0, height, rows):
        strip = image.crop((0, top, width, min(top + rows, height)))
        strips.append(reduce(np.asarray(strip if plain else strip.convert("RGB")), factor))
    return np.concatenate(strips)


def _any_set(pixels, factor):
    return block_max(pixels.any(axis=2) if pixels.ndim == 3 else pixels != 0, factor)


def _orientation(image):
    return image.getexif().get(_ORIENTATION, 1)


def _upright_size(size, orientation):
    """Return height and width of an upright picture from the file's width and height."""
    return tuple(size) if orientation in (5, 6, 7, 8) else tuple(size[::-1])


def _upright(pixels, orientation):
    """Turn and mirror ``[H, W, ...]`` as the EXIF orientation, 1 to 8, says."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)
