"""ActiveBlocks: made from a mask, and what it prints."""

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy import ActiveBlocks, DTypeError, ShapeError
from support.assertions import assert_same, to_numpy


def test_from_mask_is_reduce_mask_on_the_tiles_of_the_result(xp):
    mask = np.random.default_rng(0).random((2, 21, 30)) < 0.02
    for strides, tile in ((1, (8, 4)), (2, (16, 8)), ((1, 3), (8, 12))):
        options = {"bsize": (8, 4), "ksize": 5, "strides": strides}
        active = ActiveBlocks.from_mask(xp.asarray(mask), **options)
        down, across = pair(strides)
        block = (7 * down + 5, 3 * across + 5)
        params = sb.calc_block_params(mask.shape[1:], block, 5, strides)
        expected = sb.reduce_mask(xp.asarray(mask), params.bcount, bsize=tile)
        assert active.grid == expected.grid == (2, *params.bcount)
        assert_same(active.active_block_indices, expected.active_block_indices)
        roomy = ActiveBlocks.from_mask(xp.asarray(mask), **options, capacity=500)
        assert roomy.capacity == 500 and roomy.count() == active.count()


def pair(value):
    return value if isinstance(value, tuple) else (value, value)


def test_from_mask_of_one_image_and_of_frameworks(torch, tf):
    mask = np.eye(12, dtype=bool)
    expected = ActiveBlocks.from_mask(mask[None], bsize=4, ksize=3)
    for made in (mask, mask[None, ..., None], torch.from_numpy(mask), tf.constant(mask)):
        active = ActiveBlocks.from_mask(made, bsize=4, ksize=3)
        assert_same(to_numpy(active.active_block_indices), expected.active_block_indices)


def test_from_mask_refuses():
    mask = np.ones((1, 8, 8), bool)
    for error, name, changes in [
        (ShapeError, "bsize", {"bsize": 0}),
        (ShapeError, "ksize", {"ksize": None}),
        (ShapeError, "strides", {"strides": 0}),
        (ShapeError, "padding", {"padding": "FULL"}),
        (ShapeError, "capacity", {"capacity": -1}),
        (DTypeError, "mask", {"mask": mask.tolist()}),
        (DTypeError, "mask", {"mask": None}),
        (DTypeError, "mask", {"mask": mask.astype(complex)}),
        (ShapeError, "mask", {"mask": mask[0, 0]}),
        (ShapeError, "mask", {"mask": np.ones((1, 8, 8, 2))}),
    ]:
        with pytest.raises(error, match=rf"^{name}\b"):
            ActiveBlocks.from_mask(**{"mask": mask, "bsize": 4, "ksize": 3} | changes)


def drawn(mask, **options):
    return repr(ActiveBlocks.from_mask(mask, **{"bsize": 4, "ksize": 1} | options)).split("\n")


def test_the_picture_shows_each_block(xp):
    mask = np.zeros((8, 12), bool)
    mask[1, 5] = mask[4:, 8:] = True
    assert drawn(xp.asarray(mask)) == [
        "ActiveBlocks: 2 of 6 blocks active (33.3%), grid (1, 2, 3), capacity 2",
        ".#.",
        "..#",
    ]


def test_the_picture_of_a_batch_and_of_an_overflow(xp):
    mask = np.zeros((5, 4, 8), bool)
    mask[1, 0, 0] = mask[4] = True
    lines = drawn(xp.asarray(mask), capacity=2)
    head = "ActiveBlocks: 3 of 10 blocks active (30%), grid (5, 1, 2), capacity 2, which is too few"
    assert lines[0] == head
    assert lines[1:] == ["image 0:", "..", "image 1:", "#.", "image 2:", "..", "and 2 more images"]


def test_a_large_grid_is_drawn_small():
    mask = np.zeros((1, 1000, 3000), bool)
    mask[0, :500, :1500] = mask[0, 999, 2999] = True
    head, *lines = drawn(mask, bsize=5)
    assert len(lines) <= 16 and {len(line) for line in lines} == {60}
    assert lines[0] == "#" * 30 + "." * 30 and lines[-1] == "." * 59 + "+"
    assert "30001 of 120000" in head


def test_the_picture_of_nothing():
    assert drawn(np.zeros((1, 0, 8), bool)) == [
        "ActiveBlocks: 0 of 0 blocks active, grid (1, 0, 2), capacity 0"
    ]
    empty = drawn(np.zeros((0, 4, 8), bool))
    assert empty == ["ActiveBlocks: 0 of 0 blocks active, grid (0, 1, 2), capacity 0"]


def test_rows_out_of_the_grid_are_not_dense(xp):
    rows = np.array([[0, 0, 1], [-1, -1, -1], [0, 5, 0], [9, 0, 0], [0, 1, 0]], np.int32)
    for count, expected in ((4, [[0, 1], [0, 0]]), (5, [[0, 1], [1, 0]]), (7, [[0, 1], [1, 0]])):
        counts = xp.asarray(np.array([count], np.int32))
        dense = ActiveBlocks(counts, xp.asarray(rows), (1, 2, 2)).to_dense()
        assert_same(to_numpy(dense), np.array([expected], bool))


def test_rows_out_of_the_grid_are_not_drawn():
    rows = np.array([[0, 0, 1], [0, 7, 7], [9, 0, 0], [0, -1, 0]], np.int32)
    active = ActiveBlocks(np.array([4], np.int32), rows, (1, 1, 2))
    assert repr(active).split("\n")[1:] == [".#"]


@pytest.mark.parametrize("counts", [None, 3, np.zeros(0, np.int32), np.zeros((2, 2), np.int32)])
def test_what_is_no_list_is_not_read(counts):
    active = ActiveBlocks(counts, np.zeros((1, 3), np.int32), (1, 1, 1))
    assert repr(active).startswith("ActiveBlocks: not read, grid (1, 1, 1)")


def test_nothing_is_read_while_a_framework_traces(torch, st, jax, sbj, tf, sbt):
    seen = []

    def traced(mask, module, **options):
        active = module.reduce_mask(mask, (2, 2), bsize=4, **options)
        seen.append(repr(active))
        return active.bin_counts

    mask = np.ones((1, 8, 8), bool)
    jax.jit(lambda m: traced(m, sbj, capacity=4))(jax.numpy.asarray(mask))
    tf.function(lambda m: traced(m, sbt), autograph=False)(tf.constant(mask))
    assert len(seen) == 2 and all("not read" in text for text in seen)
    for module, array in ((st, torch.from_numpy), (sbj, jax.numpy.asarray), (sbt, tf.constant)):
        active = module.reduce_mask(array(mask), (2, 2), bsize=4)
        assert repr(active).split("\n")[1:] == ["##", "##"]


@pytest.mark.gpu
def test_nothing_is_read_while_a_graph_is_captured(require):
    cupy = require("gpu")
    mask = cupy.ones((1, 8, 8), bool)
    active = ActiveBlocks.from_mask(mask, bsize=4, ksize=3)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        text = repr(active)
        mask.fill(False)
        stream.end_capture()
    assert "not read" in text
