"""Convolution of images at their active blocks, by its kernel on the host shim.

Whole numbers small enough that every sum is exact, so that results are compared bit for bit. Pixels
in no active block are NaN: they are never read for a result.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest

from sbnet_cupy.block_sparse.stack.stack_image_conv2d import (
    ImageConv,
    candidates,
    missing_image_kernel,
    plan_image_conv,
    prepare_image_conv,
    prepare_image_pack,
    reads_words,
)
from sbnet_cupy.core.device import Device
from support.exhaustive import all_but, thinned
from support.stack_on_host import (
    ACTIVATIONS,
    AMPERE,
    HALVED,
    LAST,
    UNWRITTEN,
    Blocks,
    last_scales,
    loaded,
    stored,
    use_shim,
)

HOPPER = Device(multiprocessors=132, shared_bytes=227 << 10, hopper=True, bulk_copy=True)
TURING = Device(68, 64 << 10, hopper=False, bulk_copy=False, tensor_floats=False)


@dataclass(frozen=True)
class Case:
    """A convolution of images."""

    element: str = "Half"
    blocks: Blocks = field(default_factory=lambda: Blocks(block=(8, 8)))
    channels: int = 3
    channels_out: int = 24
    kernel: tuple = (3, 3)
    strides: tuple = (1, 1)
    dilation: tuple = (1, 1)
    pads: tuple | None = None
    activation: int = 1
    layout: str = "NHWC"
    image_out: tuple | None = None  # ceil(n / stride) pixels by default

    def sizes(self, rows):
        """Return the ImageConv."""
        block, image = self.blocks.block, self.blocks.image
        kept = tuple(-(-n // s) for n, s in zip(image, self.strides, strict=True))
        pads = tuple((k - 1) * d // 2 for k, d in zip(self.kernel, self.dilation, strict=True))
        return ImageConv(
            element=self.element,
            rows=rows,
            images=self.blocks.images,
            grid=self.blocks.grid_size,
            block=block,
            block_out=tuple(b // s for b, s in zip(block, self.strides, strict=True)),
            image=image,
            image_out=self.image_out or kept,
            channels=self.channels,
            channels_out=self.channels_out,
            kernel=self.kernel,
            strides=self.strides,
            dilation=self.dilation,
            pads=self.pads or pads,
            activation=self.activation,
            vectors_out=self.channels_out % (4 if self.element == "float" else 8) == 0,
        )

    def arrays(self):
        """Return images, w, scale and bias."""
        rng = np.random.default_rng(self.blocks.seed + 1)
        x = rng.integers(-3, 4, (self.blocks.images, *self.blocks.image, self.channels))
        w = rng.integers(-2, 3, (*self.kernel, self.channels, self.channels_out))
        scale = rng.choice([0.5, 1, 2], self.channels_out).astype(np.float32)
        bias = rng.integers(-4, 5, self.channels_out).astype(np.float32)
        return x.astype(np.float64), w.astype(np.float64), scale, bias

    def last(self):
        """Return what channels are scaled and shifted by last: one array, or none."""
        return last_scales(self.activation, self.channels_out)

    def active_pixels(self, listed):
        """Return which pixels lie in active blocks."""
        down, across = self.blocks.block
        active = np.zeros((self.blocks.images, *self.blocks.image), bool)
        for n, hi, wi in listed:
            active[n, hi * down : (hi + 1) * down, wi * across : (wi + 1) * across] = True
        return active

    def expected(self, x, listed):
        """Return the result by the definition, tap by tap."""
        _, w, scale, bias = self.arrays()
        conv = self.sizes(1)
        image = np.where(self.active_pixels(listed)[..., None], x, 0)
        pad = sum(conv.block) + max(np.multiply(self.kernel, self.dilation)) + max(conv.pads)
        padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        result = np.zeros((len(image), *conv.image_out, self.channels_out))
        for r, s in np.ndindex(self.kernel):
            top = pad - conv.pads[0] + r * self.dilation[0]
            left = pad - conv.pads[1] + s * self.dilation[1]
            rows = slice(top, top + conv.image_out[0] * self.strides[0], self.strides[0])
            columns = slice(left, left + conv.image_out[1] * self.strides[1], self.strides[1])
            result += padded[:, rows, columns] @ w[r, s]
        result = ACTIVATIONS[self.activation & (LAST - 1)](result * scale + bias)
        for table in self.last():
            scale, shift = table[:, : self.channels_out]
            result = result * scale + shift
        down, across = conv.block_out
        expected = np.zeros((len(listed), down, across, self.channels_out))
        for row, (n, hi, wi) in enumerate(listed):
            block = result[n, hi * down :, wi * across :][:down, :across]
            expected[row, : block.shape[0], : block.shape[1]] = block
        return loaded(stored(expected, self.element), self.element)

    def run(self, device, plan=None, w_format="HWIO", settled=False, clear_rows=True, alignment=4):
        """Run the kernel, and compare its result."""
        bin_counts, indices, _ = table = self.blocks.table()
        listed = indices[: int(bin_counts[0])]
        conv = self.sizes(len(indices))
        x, w, scale, bias = self.arrays()
        expected = self.expected(x, listed)
        x = stored(np.where(self.active_pixels(listed)[..., None], x, np.nan), self.element)
        w = stored(w, self.element)
        if w_format == "OIHW":
            w = np.ascontiguousarray(w.transpose(3, 2, 0, 1))
        order = (0, 3, 1, 2) if self.layout == "NCHW" else (0, 1, 2, 3)
        x = np.ascontiguousarray(x.transpose(order))
        steps = tuple(x.strides[order.index(axis)] // x.itemsize for axis in range(4))
        assert missing_image_kernel(conv, steps, device) is None
        packed = prepare_image_pack(conv, w_format)(w, scale, bias)
        out = stored(
            np.full((len(indices), *conv.block_out, self.channels_out), UNWRITTEN), self.element
        )
        before = out.copy()
        run = prepare_image_conv(conv, steps, settled, clear_rows, plan, alignment)
        run(x, packed, *table, out, *self.last())
        count = len(listed)
        np.testing.assert_array_equal(loaded(out[:count], self.element), expected)
        rest = np.zeros_like(before[count:]) if clear_rows else before[count:]
        np.testing.assert_array_equal(out[count:], rest)


STEM = {"kernel": (7, 7), "strides": (2, 2)}
CASES = [
    Case(**STEM, channels_out=64),
    Case(**STEM, layout="NCHW", blocks=Blocks(image=(40, 33), block=(16, 8))),
    Case(channels_out=64, blocks=Blocks(image=(70, 50), block=(32, 32), images=1)),
    Case(kernel=(3, 3), strides=(2, 2), channels_out=32, blocks=Blocks(block=(6, 10))),
    Case(kernel=(4, 4), strides=(4, 4), pads=(0, 0), channels_out=96),
    Case(kernel=(5, 5), channels=1, channels_out=13),
    Case(kernel=(1, 1), channels=8, channels_out=40),
    Case(kernel=(2, 3), dilation=(3, 2), channels=5, layout="NCHW"),
    Case("BFloat16", **STEM, channels_out=70),
    Case("float", **STEM, channels_out=64),
    Case("float", kernel=(3, 3), channels=5, channels_out=7, layout="NCHW"),
    Case("float", kernel=(3, 3), channels=8, dilation=(2, 2), activation=0),
    Case(blocks=Blocks(block=(1, 1), image=(9, 7))),
    Case(blocks=Blocks(block=(8, 8), share=0.0)),
    Case(blocks=Blocks(block=(9, 9), share=1.0, spare=0), kernel=(7, 7)),
    Case(**STEM, channels_out=64, blocks=Blocks(image=(20, 18), block=(6, 6))),
    Case(kernel=(3, 3), channels=5, blocks=Blocks(image=(17, 16), block=(4, 4))),
    Case(kernel=(3, 3), channels=4, channels_out=64),
    Case(kernel=(5, 5), channels=1, blocks=Blocks(image=(21, 18), block=(8, 8))),
    Case("BFloat16", kernel=(3, 3), channels=7, blocks=Blocks(image=(21, 18), block=(8, 8))),
    Case(blocks=Blocks(image=(12, 16), block=(4, 4)), pads=(0, 0), image_out=(8, 12)),
    Case(**STEM, channels_out=70, activation=LAST + 1),
    Case("float", kernel=(3, 3), channels_out=13, activation=LAST + HALVED),
]


@pytest.fixture(autouse=True)
def _on_shim(require, monkeypatch):
    require("g++")
    use_shim(monkeypatch, AMPERE, thread_blocks=3)
    monkeypatch.setattr(
        "sbnet_cupy.block_sparse.stack.stack_image_conv2d.current_device", lambda: AMPERE
    )


@pytest.mark.parametrize("number", all_but(range(len(CASES)), (0, 7, 8, 9, 10, 13, 20, 21)))
def test_convolution_of_whole_numbers_is_exact(number, monkeypatch):
    """On GPUs of two kinds, by turns."""
    device = (HOPPER, AMPERE)[number % 2]
    monkeypatch.setattr(
        "sbnet_cupy.block_sparse.stack.stack_image_conv2d.current_device", lambda: device
    )
    CASES[number].run(device)


@pytest.mark.parametrize("number", thinned(range(5), 4))
def test_every_instance_is_right(number):
    """Tiles of 64 to 256 pixels, of 32 and 64 channels; and what is left as it was."""
    case = Case(**STEM, channels_out=40, blocks=Blocks(image=(40, 50), block=(32, 32)))
    plans = list(candidates(case.sizes(9), HOPPER))
    assert len(plans) == 5
    case.run(HOPPER, plans[number], "OIHW", settled=number % 2 == 1, clear_rows=False)


def test_infinities_reach_only_the_windows_that_hold_them():
    """Zeros that pad K, and pixels with no eighth byte, are no products with a pixel."""
    case = Case(blocks=Blocks(1, (8, 8), (8, 8), share=1.0, spare=0), channels_out=8)
    conv, table = case.sizes(1), case.blocks.table()
    x, w = np.zeros((1, 8, 8, 3), np.float16), np.ones((3, 3, 3, 8), np.float16)
    x[0, 3, 4] = np.inf
    out = np.empty((1, 8, 8, 8), np.float16)
    packed = prepare_image_pack(conv, "HWIO")(w, None, None)
    prepare_image_conv(conv, (192, 24, 3, 1), alignment=4)(x, packed, *table, out)
    wanted = np.zeros((8, 8), np.float16)
    wanted[2:5, 3:6] = np.inf
    np.testing.assert_array_equal(out[0, :, :, 0], wanted)


def test_pixels_are_read_by_words_where_rows_are_whole_words():
    conv, packed = Case(**STEM).sizes(5)._replace(image=(20, 18), channels=3), (1080, 54, 3, 1)
    assert reads_words(conv, packed, 4) and not reads_words(conv, packed, 2)
    assert not reads_words(conv, (1080, 18, 1, 360), 4)  # NCHW
    assert not reads_words(conv._replace(image=(20, 17)), (1080, 54, 3, 1), 4)  # past the last one
    assert not reads_words(conv._replace(image=(20, 17)), (1020, 51, 3, 1), 4)
    assert reads_words(conv._replace(element="float", image=(20, 17)), (1020, 51, 3, 1), 4)


def test_what_no_kernel_serves_is_named():
    conv, steps = Case(**STEM).sizes(5), (1458, 54, 3, 1)

    def missing(device, steps=steps, **changes):
        return missing_image_kernel(conv._replace(**changes), steps, device)

    assert missing(TURING) is None
    assert "BFloat16" in missing(TURING, element="BFloat16")
    assert "channels" in missing(HOPPER, channels=9)
    assert "window" in missing(HOPPER, kernel=(99, 99))
    assert "as large as" in missing(HOPPER, image=(2**30, 8))
    assert "apart" in missing(HOPPER, (1, 1, 1, 2**31))


def test_tiles_are_no_larger_than_blocks():
    conv = Case(**STEM, channels_out=64).sizes(110)._replace(block=(32, 32), block_out=(16, 16))
    assert plan_image_conv(conv, HOPPER)[:3] == (128, 64, (8, 16))
    assert plan_image_conv(conv._replace(block_out=(8, 8)), HOPPER)[:3] == (64, 64, (8, 8))
    assert plan_image_conv(conv._replace(channels_out=32), HOPPER)[:3] == (256, 32, (16, 16))
    assert plan_image_conv(conv._replace(kernel=(16, 16)), AMPERE)[:2] == (256, 32)
