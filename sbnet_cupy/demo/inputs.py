"""What the demo reads and where it writes; whatever is wrong with a file becomes one DemoError."""

import importlib.util
import os
from pathlib import Path

import numpy as np

_MODULES = {"skimage": "scikit-image", "matplotlib": "matplotlib", "rich": "rich"}
_LUMINANCE = np.array([0.2125, 0.7154, 0.0721], np.float32)  # of red, green, blue: ITU-R BT.709


class DemoError(Exception):
    """Something the user can put right; the command line prints it as one line."""


def check_extras():
    """Raise DemoError unless everything of the extra ``demo`` is installed."""
    missing = [dist for name, dist in _MODULES.items() if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(
            f'the demo needs {", ".join(missing)}; install with: pip install "sbnet-cupy[demo]"'
        )


def output_folder(path):
    """Create the folder to write to, or raise DemoError."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"--out: cannot create {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise DemoError(f"--out: cannot write to {folder}; name a folder of your own")
    return folder


def hubble_deep_field():
    """Read the picture that ships inside scikit-image's wheel; nothing is downloaded."""
    import skimage.data

    return skimage.data.hubble_deep_field()


def read_picture(path):
    """Read a picture file as [H, W] or [H, W, 3], upright, or raise DemoError."""
    from PIL import Image, ImageOps

    _check_file(path)
    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image)
            plain = upright.mode in ("1", "L", "F", "RGB") or upright.mode.startswith("I")
            return np.asarray(upright if plain else upright.convert("RGB"))
    except Exception as error:  # decoders raise anything at all for a broken file
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DemoError(f"cannot read {path} as a picture: {reason}") from error


def grey(pixels):
    """Reduce a picture to float32 [H, W]; what is not a finite number becomes the darkest value."""
    with np.errstate(over="ignore"):
        values = pixels.astype(np.float32)
    if values.ndim == 3:
        values = values @ _LUMINANCE
    finite = np.isfinite(values)
    return np.where(finite, values, values[finite].min() if finite.any() else 0)


def read_mask(path, shape):
    """Read a mask picture as bool [H, W], non-zero is active; raise DemoError unless it fits."""
    pixels = read_picture(path)
    if pixels.shape[:2] != shape:
        raise DemoError(
            f"--mask must be as large as what it masks, {_size(shape)}, "
            f"got {_size(pixels.shape)} in {path}"
        )
    return pixels.any(axis=2) if pixels.ndim == 3 else pixels != 0


def read_points(path):
    """Read a KITTI scan as float32 [P, 4]: x, y, z, intensity; finite points only."""
    _check_file(path)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DemoError(f"cannot read {path}: {error.strerror}") from error
    if not data or len(data) % 16:
        raise DemoError(
            f"{path} must hold whole points of 16 bytes (float32 x, y, z, intensity), "
            f"got {len(data)} bytes"
        )
    points = np.frombuffer(data, "<f4").reshape(-1, 4).astype(np.float32)
    return points[np.isfinite(points).all(axis=1)]


def check_size(name, shape, minimum):
    """Raise DemoError when an image is smaller than one block."""
    if min(shape[:2]) < minimum:
        raise DemoError(
            f"{name} must be at least {minimum} x {minimum} pixels, the size of one block, "
            f"got {_size(shape)}; give a larger one or a smaller --block-size"
        )


def _check_file(path):
    if not Path(path).is_file():
        reason = "is not a file" if Path(path).exists() else "does not exist"
        raise DemoError(f"{path} {reason}")


def _size(shape):
    return f"{shape[0]} x {shape[1]}"
