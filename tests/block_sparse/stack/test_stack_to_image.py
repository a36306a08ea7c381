"""stack_to_image by its kernel, on the host shim: every byte of the images, and none beside them.

That its values are right on every library is in test_stack_images.py.
"""

import itertools

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy.block_sparse.stack import stack_to_image as module
from sbnet_cupy.core import launch as kernels
from sbnet_cupy.core import operator
from support import stack_cases, stack_oracles
from support.assertions import assert_same
from support.exhaustive import thinned_product
from support.host_memory import Memory, plan_some_as_on_a_gpu
from support.stack_on_host import AMPERE, use_shim

SIZES = [  # block, image, channels: with blocks that stick out, and vectors across pixels
    ((8, 8), (29, 20), 8), ((4, 2), (13, 9), 3), ((32, 32), (70, 100), 21), ((1, 1), (5, 6), 1),
    ((6, 10), (12, 20), 5), ((4, 4), (9, 1030), 2),
]  # fmt: skip
DTYPES = ["f2", "f4", "f8", "u1", "?", "c16"]


@pytest.fixture
def on_shim(require, monkeypatch):
    """Send calls with NumPy arrays to the kernel; return the instances that ran."""
    require("g++")
    use_shim(monkeypatch, AMPERE, thread_blocks=3)
    memory, launched, prepare = Memory(0xFF), [], kernels.prepare

    def noted(stem, kernel, template, *sizes, **options):
        launched.append((kernel, template))
        return prepare(stem, kernel, template, *sizes, **options)

    monkeypatch.setattr(kernels, "prepare", noted)
    monkeypatch.setattr(operator, "_PLANS", operator._Plans())
    plan_some_as_on_a_gpu(monkeypatch, module)
    monkeypatch.setattr(module, "is_cupy", lambda array: True)
    monkeypatch.setattr(module, "empty", memory.poisoned)
    yield launched
    memory.check()


def drawn(dtype, block, size, channels, seed=0):
    """Return blocks of two images, their table, and a stack of any bytes."""
    rng = np.random.default_rng(seed)
    shape = (2, *(-(-n // b) for n, b in zip(size, block, strict=True)))
    blocks = stack_cases.Blocks(rng.random(shape) < 0.5, block, size, 2)
    stack = numbers(rng, dtype, (blocks.capacity, *block, channels))
    return blocks, blocks.table(), stack, rng


def numbers(rng, dtype, shape):
    """Draw an array of any dtype."""
    if dtype == "c16":
        return rng.standard_normal((*shape, 2)).view(dtype)[..., 0]
    return rng.integers(0, 2 if dtype == "?" else 100, shape).astype(dtype)


@pytest.mark.parametrize("sizes, dtype", thinned_product(7, SIZES, DTYPES), ids=str)
def test_images(on_shim, sizes, dtype):
    block, size, channels = sizes
    blocks, table, stack, rng = drawn(dtype, block, size, channels)
    mask = blocks.mask(table)
    image = stack_oracles.to_image(stack, blocks.rows, block, size, blocks.batch)
    per_channel = numbers(rng, dtype, (channels,))
    whole = numbers(rng, dtype, (blocks.batch, *size, channels))
    backgrounds = [0, 1, per_channel, whole][2 * (dtype == "c16") :]
    for background in backgrounds:
        y = sb.stack_to_image(stack, table, background=background)
        assert_same(y, np.where(mask, image, np.asarray(background, dtype)))
    assert {kernel for kernel, _ in on_shim} == {"stack_to_image"}
    assert len(on_shim) == len(backgrounds)


@pytest.mark.parametrize("skipped", list(itertools.product((0, 1, 2), repeat=2)), ids=str)
def test_arrays_at_odd_addresses(on_shim, skipped):
    """Vectors are as wide as all of the addresses allow."""
    memory = Memory()
    blocks, table, stack, _ = drawn("f2", (8, 8), (29, 24), 8)
    given = memory.read_only(stack, skipped[0])
    out = memory.poisoned((2, 29, 24, 8), "f2", offset=skipped[1])
    y = sb.stack_to_image(given, table, background=3, out=out)
    image = stack_oracles.to_image(stack, blocks.rows, (8, 8), (29, 24), 2)
    assert y is out
    assert_same(y, np.where(blocks.mask(table), image, np.float16(3)))
    wanted = {(0, 0): "uint4", 1: "u16"}.get(1 if 1 in skipped else skipped, "u32")
    assert [template[0] for _, template in on_shim] == [wanted]
    memory.check()


def test_a_count_below_the_rows_of_the_grid(on_shim):
    """Rows past the count are no blocks, whatever the grid says."""
    _, table, stack, _ = drawn("f4", (4, 4), (12, 12), 3)
    counts = np.array([2], np.int32)
    fewer = sb.BlockTable(counts, table.active_block_indices, table.grid, (4, 4), (12, 12))
    y = sb.stack_to_image(stack, fewer, background=-1)
    n, hi, wi = table.active_block_indices[2]
    assert (y[n, 4 * hi : 4 * hi + 4, 4 * wi : 4 * wi + 4] == -1).all()


@pytest.mark.parametrize("sizes, dtype", thinned_product(7, SIZES, DTYPES[:-1]), ids=str)
def test_a_background_without_blocks(on_shim, sizes, dtype):
    """It is the same by fewer thread blocks than the device holds."""
    block, size, channels = sizes
    memory = Memory(0xFF)
    blocks, table, _, rng = drawn(dtype, block, size, channels)
    per_channel = numbers(rng, dtype, (channels,))
    for background in (1, per_channel):
        constant = np.ndim(background) == 0
        y = memory.poisoned((blocks.batch, *size, channels), dtype)
        fill = module.ImageFill(
            0, table.grid.shape, block, size, channels, y.itemsize,
            background="constant" if constant else "channels", blocks=False,
        )  # fmt: skip
        bits = module.constant_bits(np.asarray(background, dtype).tobytes()) if constant else 0
        launch = module.prepare_stack_to_image(fill, bits, most=2)
        launch(None, None, None, None if constant else background, y)
        assert_same(y, np.broadcast_to(np.asarray(background, dtype), y.shape))
    memory.check()
