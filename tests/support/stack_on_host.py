"""Kernels on a stack of blocks, on the host shim: tables, the stack as an image, and runs.

Whole numbers small enough that every sum is exact, so that results are compared bit for bit. What
must not be read is NaN: rows past the count, and pixels of blocks that lie outside their image.
"""

from dataclasses import dataclass, replace

import numpy as np

import host_cuda
from sbnet_cupy.block_sparse.stack import stack_launch
from sbnet_cupy.block_sparse.stack.stack_conv_plan import Shortcut, StackConv, last_channels
from sbnet_cupy.core import launch as kernels
from sbnet_cupy.core.device import Device

# With the bulk copy engine, whose kernel the shim runs too, and without.
BLACKWELL = Device(multiprocessors=4, shared_bytes=227 << 10, hopper=False, bulk_copy=True)
AMPERE = Device(multiprocessors=4, shared_bytes=99 << 10, hopper=False, bulk_copy=False)
UNWRITTEN = 777.0
# Exact for whole numbers; numbered as in activation.cuh.
HALVED = int(np.float32(0.5).view(np.int32))  # leaky relu of this slope
ACTIVATIONS = {
    0: lambda t: t, 1: lambda t: np.maximum(t, 0), 5: lambda t: np.clip(t, 0, 6),
    HALVED: lambda t: np.where(t < 0, t / 2, t),
}  # fmt: skip
FIRST = -(2**31)  # added to the number of an activation that comes before the residual's sum
LAST = 1 << 30  # the same where channels are scaled and shifted behind it


def use_shim(monkeypatch, device, thread_blocks=5):
    """Send launches to the shim; a persistent grid gets few thread blocks, which take turns.

    Whole clusters of them, and at least one.
    """

    def prepare(stem, kernel, template, grid, block, pointers, scalars, shared=0,
                persistent=False, dependent=False, cluster=1, maps=()):  # fmt: skip
        grid = grid if isinstance(grid, tuple) else (grid,)
        if persistent:
            grid = (min(grid[0], max(thread_blocks // cluster, 1) * cluster), *grid[1:])

        def run(*arrays):
            assert len(arrays) == pointers
            args = (*arrays, *scalars, *host_cuda.describe(maps, arrays))
            host_cuda.launch(stem, kernel, template, grid, block, args, shared, cluster=cluster)

        return run

    monkeypatch.setattr(kernels, "prepare", prepare)
    monkeypatch.setattr(stack_launch, "current_device", lambda: device)


def stored(values, element):
    """Return float64 values as the kernel's elements; bfloat16 as the bits of uint16."""
    if element == "Half":
        return values.astype(np.float16)
    if element == "float":
        return values.astype(np.float32)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def loaded(array, element):
    """Return elements as float64."""
    if element == "BFloat16":
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def last_scales(activation, channels):
    """Return what channels are scaled and shifted by last: one array, or none, in a list.

    NaN where it has more channels.
    """
    if not activation & LAST:
        return []
    rng = np.random.default_rng(channels)
    table = np.full((2, last_channels(channels)), np.nan, np.float32)
    table[0, :channels] = rng.choice([-1, 0.5, 2], channels)
    table[1, :channels] = rng.integers(-4, 5, channels)
    return [table]


@dataclass(frozen=True)
class Blocks:
    """Some active blocks of images, with more rows than are active."""

    images: int = 2
    image: tuple = (27, 18)
    block: tuple = (4, 4)
    share: float = 0.5
    spare: int = 3
    seed: int = 0

    @property
    def grid_size(self):
        """Blocks of an image."""
        return tuple(-(-n // b) for n, b in zip(self.image, self.block, strict=True))

    def table(self):
        """Return bin_counts, indices and grid."""
        rng = np.random.default_rng(self.seed)
        active = rng.random((self.images, *self.grid_size)) < self.share
        listed = np.argwhere(active).astype(np.int32)
        indices = np.full((len(listed) + self.spare, 3), -1, np.int32)
        indices[: len(listed)] = listed
        grid = np.full(active.shape, -1, np.int32)
        grid[tuple(listed.T)] = np.arange(len(listed))
        return np.array([len(listed)], np.int32), indices, grid

    def to_image(self, stack, listed):
        """Lay the active blocks into images of zeros."""
        down, across = self.block
        whole = np.zeros((self.images, *np.multiply(self.grid_size, self.block), stack.shape[3]))
        for (n, hi, wi), block in zip(listed, stack, strict=False):
            rows, columns = slice(hi * down, (hi + 1) * down), slice(wi * across, (wi + 1) * across)
            whole[n, rows, columns] = block
        return whole[:, : self.image[0], : self.image[1]]

    def spoil(self, stack, listed, value):
        """Write ``value`` where nobody may read: past the count, and outside the image."""
        stack[len(listed) :] = value
        for (_, hi, wi), block in zip(listed, stack, strict=False):
            block[max(self.image[0] - hi * self.block[0], 0) :] = value
            block[:, max(self.image[1] - wi * self.block[1], 0) :] = value


@dataclass(frozen=True)
class ConvCase:
    """A convolution of a stack."""

    element: str = "Half"
    blocks: Blocks = Blocks()
    channels: int = 16
    channels_out: int = 24
    kernel: tuple = (3, 3)
    strides: tuple = (1, 1)
    dilation: tuple = (1, 1)
    activation: int = 1
    residual: bool = True
    depthwise: bool = False
    groups: int = 1
    shortcut: tuple | None = None  # channels and strides; its scale is 1
    image_out: tuple | None = None  # ceil(n / stride) pixels by default
    beside: tuple | None = None  # channels ahead of those of x and of the result, and behind them
    unfolded: tuple | None = None  # pixels down and across that channels of the result become

    def sizes(self, rows):
        """Return the StackConv."""
        per_vector = 4 if self.element == "float" else 8
        block, image = self.blocks.block, self.blocks.image
        kept = tuple(-(-n // s) for n, s in zip(image, self.strides, strict=True))
        return StackConv(
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
            pads=tuple((k - 1) * d // 2 for k, d in zip(self.kernel, self.dilation, strict=True)),
            activation=self.activation,
            vectors_in=self.channels % per_vector == 0,
            vectors_out=self.channels_out % per_vector == 0,
            expected=rows,
            shortcut=self.shortcut and Shortcut(
                *self.shortcut, self.beside and self.shortcut[0] + sum(self.beside)
            ),
            group=self.group if self.groups > 1 else None,
            part_of=self.beside and self.channels + sum(self.beside),
            added_part_of=self.beside and self.channels_out + sum(self.beside),
            out_part_of=self.beside and self.own_channels + sum(self.beside),
            unfolded=self.unfolded,
        )

    def part(self, array, asarray=np.asarray):
        """Return stored x, or a residual, as a part of another stack: memory from there on.

        NaN where nobody may read.
        """
        if array is None or self.beside is None:
            return None if array is None else asarray(array)
        channels, (ahead, behind) = array.shape[3], self.beside
        whole = np.full((*array.shape[:3], ahead + channels + behind), np.nan)
        whole = stored(whole, self.element)
        whole[..., ahead : ahead + channels] = array
        return asarray(whole).reshape(-1)[ahead:]

    @property
    def group(self):
        """Channels of x and of the result of a group."""
        return self.channels // self.groups, self.channels_out // self.groups

    def second(self):
        """Return x, w and bias of the shortcut, as float64 and float32."""
        channels, strides = self.shortcut
        rng = np.random.default_rng(self.blocks.seed + 2)
        rows = len(self.blocks.table()[1])
        block = np.multiply(self.sizes(rows).block_out, strides)
        x = rng.integers(-3, 4, (rows, *block, channels)).astype(np.float64)
        w = rng.integers(-2, 3, (1, 1, channels, self.channels_out)).astype(np.float64)
        return x, w, rng.integers(-4, 5, self.channels_out).astype(np.float32)

    def stored_shortcut(self):
        """Return the stack of the shortcut, NaN where nobody may read, its kernel and bias."""
        counts, indices, _ = self.blocks.table()
        x, w, bias = self.second()
        size = np.multiply(self.sizes(len(indices)).image_out, self.shortcut[1])
        blocks = replace(self.blocks, image=tuple(size), block=x.shape[1:3])
        blocks.spoil(x, indices[: counts[0]], np.nan)
        return stored(x, self.element), stored(w, self.element), bias

    def last(self):
        """Return what channels are scaled and shifted by last: one array, or none."""
        return last_scales(self.activation, self.channels_out)

    def arrays(self):
        """Return x, w, scale, bias and the residual, as float64 and float32."""
        rng = np.random.default_rng(self.blocks.seed + 1)
        rows = len(self.blocks.table()[1])
        conv = self.sizes(rows)
        inner = 1 if self.depthwise else self.group[0]
        x = rng.integers(-3, 4, (rows, *conv.block, self.channels)).astype(np.float64)
        w = rng.integers(-2, 3, (*self.kernel, inner, self.channels_out)).astype(np.float64)
        scale = rng.choice([0.5, 1, 2], self.channels_out).astype(np.float32)
        if self.shortcut:
            scale[:] = 1
        bias = rng.integers(-4, 5, self.channels_out).astype(np.float32)
        residual = rng.integers(-4, 5, (rows, *conv.block_out, self.channels_out)).astype(float)
        return x, w, scale, bias, residual

    def expected(self):
        """Return the result by the definition, as the elements of the listed rows."""
        _, indices, _ = self.blocks.table()
        listed = indices[indices[:, 0] >= 0]
        conv, (x, w, scale, bias, residual) = self.sizes(len(indices)), self.arrays()
        image = self.blocks.to_image(x, listed)
        pad = 2 * sum(conv.block) + max(np.multiply(self.kernel, self.dilation))
        padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        result = np.zeros((len(image), *conv.image_out, self.channels_out))
        for r, s in np.ndindex(self.kernel):
            top = pad - conv.pads[0] + r * self.dilation[0]
            left = pad - conv.pads[1] + s * self.dilation[1]
            rows = slice(top, top + conv.image_out[0] * self.strides[0], self.strides[0])
            columns = slice(left, left + conv.image_out[1] * self.strides[1], self.strides[1])
            window = padded[:, rows, columns]
            if self.depthwise:
                result += window * w[r, s, 0]
                continue
            for of_x, of_y in zip(*(np.split(np.arange(n), self.groups)
                                    for n in (self.channels, self.channels_out)), strict=True):
                result[..., of_y] += window[..., of_x] @ w[r, s][:, of_y]
        result = result * scale + bias
        down, across = conv.block_out
        expected = np.zeros((len(listed), down, across, self.channels_out))
        for row, (n, hi, wi) in enumerate(listed):
            block = result[n, hi * down :, wi * across :][:down, :across]
            height, width = block.shape[:2]
            if self.shortcut:
                x, w, bias = self.second()
                (one_down, one_across), pixels = self.shortcut[1], x[row]
                pixels = pixels[::one_down, ::one_across][:height, :width]
                block = block + pixels @ w[0, 0] + bias
            is_first, activated = self.activation < 0, ACTIVATIONS[self.activation & (LAST - 1)]
            block = activated(block) if is_first else block
            if self.residual:
                block = block + residual[row, :height, :width]
            block = block if is_first else activated(block)
            for table in self.last():
                scale, shift = table[:, : self.channels_out]
                block = block * scale + shift
            expected[row, :height, :width] = block
        return loaded(stored(expected, self.element), self.element)

    @property
    def own_channels(self):
        """Channels of a pixel of the result."""
        return self.channels_out // int(np.prod(self.unfolded or (1, 1)))

    def unfold(self, stack):
        """Return a stack with its channels as pixels, if they become pixels."""
        if self.unfolded is None:
            return stack
        rows, height, width, _ = stack.shape
        down, across = self.unfolded
        apart = stack.reshape(rows, height, width, down, across, -1).transpose(0, 1, 3, 2, 4, 5)
        return apart.reshape(rows, height * down, width * across, -1)

    def clears(self, clear_rows):
        """Whether rows past the count become 0, if they are to: those of a part do not."""
        return clear_rows and self.beside is None and self.unfolded is None

    def run(self, launch, clear_rows):
        """Run ``launch(x, w, scale, bias, residual, table, out)``; compare its result."""
        bin_counts, indices, _ = table = self.blocks.table()
        count = int(bin_counts[0])
        x, w, scale, bias, residual = self.arrays()
        conv = self.sizes(len(indices))
        self.blocks.spoil(x, indices[:count], np.nan)
        residual[count:] = np.nan
        ahead, behind = self.beside or (0, 0)
        block = np.multiply(conv.block_out, self.unfolded or (1, 1))
        shape = len(indices), *block, ahead + self.own_channels + behind
        whole = stored(np.full(shape, UNWRITTEN), self.element)
        own = slice(ahead, ahead + self.own_channels)
        out, before = whole[..., own], whole.copy()
        given_out = out if self.beside is None else whole.reshape(-1)[ahead:]
        clear_rows = self.clears(clear_rows)
        given = [stored(array, self.element) for array in (x, w, residual)]
        added = given[2] if self.residual else None
        launch(given[0], given[1], scale, bias, added, table, given_out)
        expected = self.unfold(self.expected())
        np.testing.assert_array_equal(loaded(out[:count], self.element), expected)
        before[:count, ..., own] = out[:count]
        before[count:] = 0 if clear_rows else before[count:]
        np.testing.assert_array_equal(whole, before)  # other channels, and rows past the count
