"""Depthwise convolutions of a stack: one output for each channel, and several."""

import numpy as np
import pytest

import sbnet_cupy as sb
from support import stack_cases, stack_oracles
from support.assertions import assert_close, to_numpy
from support.exhaustive import thinned_product

OPTIONS = [{}, {"strides": 2, "padding": 1}, {"dilation": 4}]


@pytest.mark.parametrize(
    "options, channels, many, dtype",
    thinned_product(5, OPTIONS, [3, 64], [1, 2], ["f2", "f4"]),
    ids=str,
)
def test_few_channels_and_many(xp, body, options, channels, many, dtype):
    """On NumPy arrays they are summed in different ways."""
    rng = np.random.default_rng(channels)
    blocks = stack_cases.Blocks(rng.random((2, 2, 3)) < 0.7, (4, 4), (7, 10), spare=1)
    table = blocks.table(xp.asarray)
    images = blocks.images(table, channels, rng, dtype)
    w = rng.standard_normal((3, 3, 1, many * channels)).astype(dtype)
    y = sb.stack_conv2d(
        xp.asarray(blocks.stack(images, table)), xp.asarray(w), table, groups=channels, **options
    )
    strides, dilation = ((options.get(name, 1),) * 2 for name in ("strides", "dilation"))
    extent = (1 + 2 * dilation[0],) * 2
    padding = ((1, 1), (1, 1)) if "padding" in options else "SAME"
    pads = stack_oracles.pads_of(padding, blocks.size, extent, strides)
    geometry = (strides, dilation, pads, channels)
    after = table.after_conv(3, strides, options.get("padding", "SAME"), dilation)
    wide = images.astype(np.float64), w.astype(np.float64)
    expected = stack_oracles.conv2d(*wide, *geometry)
    size = stack_oracles.conv2d(*map(abs, wide), *geometry)
    actual = blocks.unstack(to_numpy(y), after).astype(dtype)
    assert_close(actual, np.where(blocks.mask(after), expected, 0), terms=9, magnitude=size,
                 dtype=stack_cases.sum_dtype(dtype))  # fmt: skip
