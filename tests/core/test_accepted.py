"""Spellings and layouts that are clear: paddings, masks of one image, strided NumPy arrays."""

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy import DeviceError, ShapeError
from support.assertions import assert_same, to_numpy
from support.bad_calls import VALID

SAME_PADDINGS = [("SAME", "same"), ("VALID", "valid"), (1, ((1, 1), (1, 1))), (0, "VALID")]
SAME_PADDINGS += [((2, 1), ((2, 2), (1, 1))), ([0, 1], ((0, 0), (1, 1))), (np.int64(1), 1)]


@pytest.mark.parametrize(("one", "other"), SAME_PADDINGS, ids=str)
def test_paddings(xp, one, other):
    assert sb.calc_block_params((20, 20), 8, 3, 1, one) == sb.calc_block_params(
        (20, 20), 8, 3, 1, other
    )
    for name in ("conv2d", "mask_conv2d", "fused_conv"):
        arrays = {k: v for k, v in VALID[name].items() if isinstance(v, np.ndarray)}
        given = VALID[name] | {k: xp.asarray(v) for k, v in arrays.items()}
        results = [getattr(sb, name)(**given | {"padding": p}) for p in (one, other)]
        assert_same(*results)


def test_paddings_of_adapters(torch, st, jax, sbj, tf, sbt):
    x, w = VALID["conv2d"]["x"], VALID["conv2d"]["w"]
    mask = np.ones((1, 8, 8), bool)
    for module, array in ((st, torch.from_numpy), (sbj, jax.numpy.asarray), (sbt, tf.constant)):
        arrays = [array(a) for a in (x, w, mask)]
        for one, other in (("same", "SAME"), (1, ((1, 1), (1, 1))), ("valid", 0)):
            results = [module.sparse_conv2d(*arrays, bsize=4, padding=p) for p in (one, other)]
            assert_same(*map(to_numpy, results))


@pytest.mark.parametrize("padding", ["Same", "FULL", -1, 1.0, True, None, (1, -1), (1, 2, 3), {}])
def test_other_paddings_are_refused(padding):
    with pytest.raises(ShapeError, match=r"^padding must be"):
        sb.calc_block_params((20, 20), 8, 3, 1, padding)


def test_masks_of_one_image(xp):
    mask = np.random.default_rng(0).random((8, 8)) < 0.2
    one, batch = xp.asarray(mask), xp.asarray(mask[None])
    for capacity in (None, 3):
        found, expected = (
            sb.reduce_mask(m, (2, 2), bsize=4, capacity=capacity) for m in (one, batch)
        )
        assert found.grid == expected.grid == (1, 2, 2)
        for a, e in zip(found, expected, strict=True):
            assert_same(a, e)
    assert_same(sb.masks.dilate(one, 1), sb.masks.dilate(batch, 1))
    assert_same(sb.masks.downsample(one, 3), sb.masks.downsample(batch, 3))
    x, w = (xp.asarray(VALID["mask_conv2d"][name]) for name in "xw")
    assert_same(sb.mask_conv2d(x, w, one), sb.mask_conv2d(x, w, batch))


def test_masks_of_one_image_in_adapters(torch, st, jax, sbj, tf, sbt):
    mask = np.eye(8, dtype=np.float32)
    for module, array in ((st, torch.from_numpy), (sbj, jax.numpy.asarray), (sbt, tf.constant)):
        active = module.reduce_mask(array(mask), (4, 2), bsize=(2, 4))
        assert active.grid == (1, 4, 2) and active.count() == 4
    x, conv = torch.ones(1, 2, 8, 8), st.nn.SparseConv2d(2, 3, 3, padding=1, block_size=6)
    one, batch = (conv(x, m) for m in (torch.from_numpy(mask), torch.from_numpy(mask)[None]))
    assert torch.equal(one, batch)
    with pytest.raises(ShapeError, match=r"^mask must have shape"):
        conv(torch.ones(2, 2, 8, 8), torch.from_numpy(mask))


# ------------------------------------------------------------------------- strided NumPy arrays

STRIDED = [
    ("reduce_mask", "mask"),
    ("sparse_gather", "x"),
    ("sparse_gather", "active_block_indices"),
    ("sparse_scatter", "x"),
    ("sparse_scatter", "blocks"),
    ("sparse_gather_grad", "x"),
    ("sparse_gather_grad", "grad_blocks"),
    ("sparse_scatter_grad", "grad_y"),
    ("conv2d", "x"),
    ("conv2d", "w"),
    ("conv2d_grad", "x"),
    ("conv2d_grad", "grad_y"),
    ("fused_conv", "x"),
    ("fused_conv", "active_block_indices"),
    ("fused_bottleneck", "x"),
    ("sparse_conv2d", "x"),
    ("sparse_conv2d_grad", "grad_y"),
    ("mask_conv2d", "mask"),
    ("sparse_res_block_bottleneck", "x"),
    ("sparse_res_block_bottleneck_grad", "x"),
]


def views(array):
    """Return equal arrays that are not C-contiguous."""
    yield np.repeat(array, 2, axis=-1)[..., ::2]
    yield np.ascontiguousarray(array[..., ::-1])[..., ::-1]
    yield np.asfortranarray(array)


def call_of(name):
    arguments = dict(VALID[name])
    if isinstance(arguments.get("weights"), list):
        arguments["weights"] = sb.BottleneckWeights(*arguments["weights"])
    return arguments


def flat(result):
    """Return the arrays of a result."""
    if isinstance(result, np.ndarray):
        return [result]
    items = result._arrays() if isinstance(result, sb.BottleneckWeights) else result or ()
    return [array for item in items for array in flat(item)]


@pytest.mark.parametrize(("function", "argument"), STRIDED)
def test_strided_arrays_are_copied(function, argument):
    arguments = call_of(function)
    expected = flat(getattr(sb, function)(**arguments))
    for view in views(arguments[argument]):
        assert not view.flags.c_contiguous
        before = view.copy()
        found = flat(getattr(sb, function)(**arguments | {argument: view}))
        for a, e in zip(found, expected, strict=True):
            assert_same(a, e)
        assert_same(view, before)


def test_strided_lists_are_copied():
    """In a pair, and in an ActiveBlocks."""
    arguments = call_of("sparse_conv2d")
    counts, rows = arguments["indices"]
    expected = sb.sparse_conv2d(**arguments)
    strided = np.repeat(rows, 2, axis=-1)[..., ::2]
    grid = (1, *arguments["block_params"].bcount)
    for indices in ((counts, strided), sb.ActiveBlocks(counts, strided, grid)):
        assert_same(sb.sparse_conv2d(**arguments | {"indices": indices}), expected)
    assert_same(sb.sparse_gather_grad(**call_of("sparse_gather_grad")).x,
                sb.sparse_gather_grad(**call_of("sparse_gather_grad")
                                      | {"active_block_indices": strided}).x)  # fmt: skip


def test_what_is_written_is_not_copied():
    """A strided ``out`` is refused, and so is what shares its memory."""
    arguments = call_of("sparse_scatter")
    strided = np.zeros((1, 8, 8, 4), np.float32)[..., ::2]
    with pytest.raises(ShapeError, match="out must be C-contiguous"):
        sb.sparse_scatter(**arguments, out=strided)
    with pytest.raises(ShapeError, match="C-contiguous"):
        sb.sparse_scatter_var(**arguments | {"x": strided})
    assert not strided.any()
    memory = np.zeros(2 * 8 * 8 * 2, np.float32)
    out, inside = memory[:128].reshape(1, 8, 8, 2), memory.reshape(1, 8, 8, 4)[..., ::2]
    with pytest.raises(ShapeError, match="C-contiguous"):
        sb.sparse_scatter(**arguments | {"x": inside}, out=out)
    assert not memory.any()


class Named(np.ndarray):
    """As numpy.memmap: an array of a class of its own."""


@pytest.mark.parametrize("dtype", ["bfloat16", "datetime64[s]", "float32"])
def test_subclasses_of_arrays_of_dtypes_that_are_no_buffers(dtype):
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    x = np.arange(32).astype(dtype).reshape(1, 4, 4, 2)
    active = sb.reduce_mask(np.eye(4, dtype=bool), 2, bsize=2)
    expected = sb.sparse_gather(x, *active, bsize=2)
    assert_same(sb.sparse_gather(x.view(Named), *active, bsize=2), expected)
    assert_same(sb.sparse_scatter(expected.view(Named), *active, x.view(Named), bsize=2), x)


def test_numbers_of_numpy_are_told_apart_by_more_than_their_bytes(xp):
    x, active = VALID["sparse_gather"]["x"], sb.reduce_mask(np.ones((1, 8, 8)), (2, 2), bsize=4)
    x, *active = map(xp.asarray, (x, *active))

    def gathered(boffset):
        return sb.sparse_gather(x, *active, bsize=4, boffset=boffset)

    for given, same in ((np.int8(-1), -1), (np.uint8(255), 255), (np.int64(1), 1)):
        assert_same(gathered(given), gathered(same))
    error, said = (
        (ShapeError, "^boffset must be an integer or a pair")
        if isinstance(x, np.ndarray)
        else (DeviceError, "^all arrays must belong to one library.*boffset is numpy on cpu")
    )
    with pytest.raises(error, match=said):
        gathered(np.array([1, 0], np.int32))  # has the bytes of np.int64(1)
