"""Picture files: reduced when they are large, upright, without warnings, and never too large."""

import struct
import warnings
import zlib

import numpy as np
import pytest

from sbnet_cupy.demo import picture_file
from sbnet_cupy.demo.inputs import DemoError
from sbnet_cupy.demo.picture_file import read_mask, read_picture, reduction_of
from support.assertions import assert_same
from support.demo_files import sky, write_png

MODES = ["1", "L", "P", "RGB", "RGBA", "LA", "CMYK", "I", "I;16", "F"]


@pytest.fixture(autouse=True, scope="module")
def _extra(require):
    require("demo")


def save(path, pixels, **options):
    from PIL import Image

    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(path, **options)
    return str(path)


def picture_of(mode):
    """A picture of a mode, 50 x 70, and the pixels that it is read as."""
    from PIL import Image

    rgb = np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8)
    if mode == "I;16":
        image = Image.fromarray(rgb[:, :, 0].astype(np.uint16) * 200)
    elif mode == "F":
        image = Image.fromarray(rgb[:, :, 0].astype(np.float32) / 7)
    else:
        image = Image.fromarray(rgb).convert("RGB").convert("L" if mode == "I" else mode)
        image = image.convert(mode)
    plain = mode in ("1", "L", "F", "RGB") or mode.startswith("I")
    return image, np.asarray(image if plain else image.convert("RGB"))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_as_it_is(mode, tmp_path):
    image, pixels = picture_of(mode)
    picture = read_picture(save(tmp_path / "p.tif", image))
    assert_same(picture.pixels, pixels)
    assert (picture.file_size, picture.factor) == ((50, 70), 1)


@pytest.mark.parametrize("strip", [1, 300, 1 << 22])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_reduced(mode, strip, tmp_path, monkeypatch):
    monkeypatch.setattr(picture_file, "MOST_COMPUTED", 13 * 18)
    monkeypatch.setattr(picture_file, "STRIP", strip)
    image, pixels = picture_of(mode)
    picture = read_picture(save(tmp_path / "p.tif", image))
    assert (picture.file_size, picture.factor) == ((50, 70), 4)
    assert_same(picture.pixels, picture_file.block_mean(pixels, 4))
    assert picture.pixels.shape[:2] == (13, 18)
    assert (picture.for_screen().dtype == np.uint8) == (mode not in ("1", "I", "I;16", "F"))


@pytest.mark.parametrize("orientation", range(9))
def test_pictures_are_turned_upright(orientation, tmp_path):
    from PIL import Image, ImageOps

    path = tmp_path / "p.png"
    exif = Image.Exif()
    exif[0x0112] = orientation
    save(path, np.arange(24, dtype=np.uint8).reshape(4, 6), exif=exif)
    with Image.open(path) as image:
        expected = np.asarray(ImageOps.exif_transpose(image))
    picture = read_picture(path)
    assert_same(picture.pixels, expected)
    assert picture.file_size == expected.shape
    assert_same(read_mask(path, expected.shape), expected != 0)


def test_a_large_jpeg_is_decoded_at_a_reduced_size(tmp_path, monkeypatch):
    from PIL import JpegImagePlugin

    asked = []
    draft = JpegImagePlugin.JpegImageFile.draft
    monkeypatch.setattr(
        JpegImagePlugin.JpegImageFile,
        "draft",
        lambda self, mode, size: asked.append(draft(self, mode, size)) or asked[-1],
    )
    monkeypatch.setattr(picture_file, "MOST_COMPUTED", 100 * 100)
    pixels = np.repeat(np.repeat(sky((97, 89)), 8, axis=0), 8, axis=1)[:-3, :-2]
    picture = read_picture(save(tmp_path / "p.jpg", pixels, quality=98))
    assert asked
    assert (picture.file_size, picture.factor) == (pixels.shape, 8)
    # Each square of 8 x 8 is constant; what remains is JPEG's quantisation, of steps of 1 or 2.
    assert np.mean(abs(picture.pixels - sky((97, 89)))) < 1


@pytest.mark.parametrize(
    ("size", "factor"),
    [((12000, 9000), 4), ((4096, 4096), 1), ((4097, 4096), 2), ((1, 1 << 26), 4), ((1, 1), 1)],
)
def test_both_sides_are_reduced_alike(size, factor):
    assert reduction_of(size) == factor


def test_a_mask_keeps_its_smallest_spots(tmp_path):
    mask = np.zeros((50, 70, 3), np.uint8)
    mask[49, 69, 2] = 1
    reduced = read_mask(write_png(tmp_path / "m.png", mask), (50, 70), 4)
    assert np.argwhere(reduced).tolist() == [[12, 17]]


# --- what is too large, or broken ---------------------------------------------------------------


def png_header(width, height):
    """The start of a PNG file of any size, as far as its pixels."""
    parts = b"\x89PNG\r\n\x1a\n"
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    for name, content in ((b"IHDR", size), (b"IDAT", b"")):
        checksum = struct.pack(">I", zlib.crc32(name + content))
        parts += struct.pack(">I", len(content)) + name + content + checksum
    return parts


def test_absurd_sizes_are_refused_before_anything_is_decoded(tmp_path):
    (tmp_path / "p.png").write_bytes(png_header(100_000, 200_000))
    message = r"p\.png must have at most 268 million pixels, got 200000 x 100000, 20,000 million"
    with pytest.raises(DemoError, match=message):
        read_picture(tmp_path / "p.png")


@pytest.mark.parametrize("right", [True, False])
def test_pillow_neither_warns_nor_keeps_our_limit(right, tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    path = write_png(tmp_path / "p.png", sky())
    if not right:
        path = tmp_path / "p.png"
        path.write_bytes(path.read_bytes()[:200])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if right:
            assert_same(read_picture(path).pixels, sky())
        else:
            with pytest.raises(DemoError, match=r"cannot read .*p\.png as a picture: "):
                read_picture(path)
    assert not caught
    assert Image.MAX_IMAGE_PIXELS == 100
