"""On NumPy arrays an op takes memory for its result and, at most, for one row of blocks.

Temporaries are kept to ``CHUNK_BYTES`` at a time, so that the bound holds for images of any size.
"""

import itertools
import tracemalloc

import numpy as np
import pytest

from sbnet_cupy import calc_block_params, reduce_mask, sparse_gather, sparse_scatter
from sbnet_cupy.block_sparse.corners import CHUNK_BYTES
from support.exhaustive import thinned_product

SIZE, CHANNELS = (440, 632), 24  # no multiples of the tiles: some are cut
DTYPES = [np.dtype("f4"), pytest.param(np.dtype("f2"), marks=pytest.mark.exhaustive)]
LAYOUTS = list(itertools.product(("NHWC", "NCHW"), (False, True)))
MOST = 6 * CHUNK_BYTES  # a call has several chunks at a time
P = calc_block_params(SIZE, 18, 3)
GRID = {"bsize": P.bsize, "boffset": P.boffset, "bstride": P.bstride}
TILES = {"bsize": P.bsize_out, "bstride": P.bstride}


def extra_bytes(call):
    """Return the most memory that a call took at a time beyond its result's.

    It is not the first such call: what is kept from that one on is not its result's.
    """
    tracemalloc.start()
    try:
        result = call()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return peak - sum(array.nbytes for array in result)


def assert_bounded(call, dtype, given):
    """Assert that a call takes a row of blocks besides its result, or in all if that is given."""
    row_bytes = P.bsize[0] * SIZE[1] * CHANNELS * dtype.itemsize
    result = call()
    extra = extra_bytes(lambda: (call(),)) + (result.nbytes if given else 0)
    assert extra < row_bytes + MOST < result.nbytes


def image(dtype, data_format):
    shape = (1, *SIZE, CHANNELS) if data_format == "NHWC" else (1, CHANNELS, *SIZE)
    return np.ones(shape, dtype)


@pytest.fixture(scope="module")
def active():
    return tuple(reduce_mask(np.ones((1, *SIZE), bool), P.bcount, **GRID))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestCopies:
    """A row of blocks is 1/25 of these images."""

    @pytest.mark.parametrize(
        "layout, activation, given",
        thinned_product(5, LAYOUTS, ["none", "relu", "gelu"], [False, True]),
        ids=str,
    )
    def test_gather(self, active, dtype, layout, activation, given):
        data_format, transpose = layout
        options = {"transpose": transpose, "data_format": data_format} | GRID
        if activation != "none":
            options |= {"scale": np.ones(CHANNELS, np.float32), "activation": activation}
        x = image(dtype, data_format)
        out = {"out": sparse_gather(x, *active, **options)} if given else {}
        assert_bounded(lambda: sparse_gather(x, *active, **options, **out), dtype, given)

    @pytest.mark.parametrize(
        "layout, overlap, add, given", thinned_product(5, LAYOUTS, *[[False, True]] * 3), ids=str
    )
    def test_scatter(self, active, dtype, layout, overlap, add, given):
        data_format, transpose = layout
        options = {"transpose": transpose, "data_format": data_format}
        grid = GRID if overlap else TILES
        x = image(dtype, data_format)
        stack = sparse_gather(x, *active, **grid, **options)
        out = {"out": x} if given else {}
        options |= {"add": add, "atomic": overlap} | grid | out
        assert_bounded(lambda: sparse_scatter(stack, *active, x, **options), dtype, given)


@pytest.mark.parametrize("avgpool", [False, True], ids=["max", "mean"])
@pytest.mark.parametrize("dtype", [np.dtype(bool), *DTYPES], ids=str)
@pytest.mark.parametrize("bsize", [8, 32])
def test_reduce_mask(dtype, avgpool, bsize):
    mask = np.ones((2, 2048, 2048), dtype)
    options = {"bsize": bsize, "avgpool": avgpool}
    reduce_mask(mask, 2048 // bsize, **options)
    for value in (1, 0):
        mask[...] = value
        extra = extra_bytes(lambda: tuple(reduce_mask(mask, 2048 // bsize, **options)))
        assert extra < bsize * mask[0, 0].nbytes + MOST
