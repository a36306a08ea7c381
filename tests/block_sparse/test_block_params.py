"""Block geometry, as theorems: the blocks produce every output pixel, and no fewer blocks would."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import sbnet_cupy
from sbnet_cupy import BlockParams, ShapeError, calc_block_params, calc_block_params_res_block
from sbnet_cupy.core.sizes import kernel_pair, output_size, padding_pairs, pair
from support import oracles
from support.exhaustive import thinned

PADDINGS = ["SAME", "VALID", (0, 1), (3, 2)]


def both(padding):
    """The same padding on both axes, as the library spells it."""
    return padding if isinstance(padding, str) else (padding, padding)


def check_axis(n, b, k, s, padding, params, axis):
    """One axis: every output produced, none by a wrong window, and one block fewer misses some."""
    offset, count, stride = (getattr(params, f)[axis] for f in ("boffset", "bcount", "bstride"))
    wanted = oracles.output_positions(n, k, s, padding)
    windows = oracles.block_positions(b, k, s, offset, stride, count)
    produced = list(itertools.chain.from_iterable(windows))
    case = (n, b, k, s, padding, params)
    assert all(len(block) == params.bsize_out[axis] for block in windows), case
    assert produced[: len(wanted)] == wanted, case  # every output, in order, exactly once
    assert len(produced) - len(wanted) < params.bsize_out[axis], case  # the smallest count
    assert params.bsize[axis] == b and stride == b - k + s, case


@pytest.mark.parametrize("padding", thinned(PADDINGS, 4), ids=str)
def test_every_output_pixel_is_covered_for_every_small_size(padding):
    """All of n 1..70, k 1..7, s 1..4 and blocks to 40: 38,000 cases a padding, none left out."""
    kernels = itertools.product(range(1, 8), range(1, 5))
    cases = [(b, k, s) for k, s in kernels for b in range(k, 41, s)]
    for (b, k, s), n in itertools.product(cases, range(1, 71)):
        params = calc_block_params((n, n), b, k, s, both(padding))
        check_axis(n, b, k, s, padding, params, 0)


@st.composite
def axes(draw):
    n, k, s = draw(st.integers(0, 300)), draw(st.integers(1, 11)), draw(st.integers(1, 5))
    return n, k + s * draw(st.integers(0, 40)), k, s


pads = st.sampled_from(["SAME", "VALID"]) | st.tuples(*[st.integers(0, 6)] * 4)


@given(axes(), axes(), pads)
@example((18, 18, 3, 1), (18, 18, 3, 1), "SAME")  # the original covers 16 of 18 rows
@example((2, 40, 7, 3), (70, 4, 4, 1), "SAME")  # image smaller than the block
@example((0, 3, 3, 1), (5, 3, 3, 1), "SAME")
@example((2, 3, 3, 1), (5, 3, 3, 1), "VALID")  # no output at all
def test_axes_are_independent(rows, columns, padding):
    explicit = None if isinstance(padding, str) else (padding[:2], padding[2:])
    sizes = tuple(zip(rows, columns, strict=True))
    params = calc_block_params(*sizes, explicit or padding)
    for axis, case in enumerate([rows, columns]):
        check_axis(*case, padding if explicit is None else explicit[axis], params, axis)


@given(axes(), pads)
def test_output_size_and_padding_are_those_of_the_definition(axis, padding):
    n, _, k, s = axis
    explicit = padding if isinstance(padding, str) else (padding[:2], padding[2:])
    for at, one in enumerate([padding] * 2 if isinstance(padding, str) else explicit):
        starts = oracles.output_positions(n, k, s, one)
        assert output_size((n, n), (k, k), (s, s), explicit)[at] == len(starts)
        if starts:
            assert padding_pairs((n, n), (k, k), (s, s), explicit)[at][0] == -starts[0]


def test_the_paper_s_own_numbers():
    params = calc_block_params((1, 400, 700, 24), [1, 18, 18, 1], [3, 3, 24, 24])
    assert params == BlockParams((18, 18), (16, 16), (-1, -1), (25, 44), (16, 16))
    strided = calc_block_params((1, 400, 700, 24), (33, 33), (3, 3), (2, 2))
    assert strided == BlockParams((33, 33), (16, 16), (0, 0), (13, 22), (32, 32))


def test_every_spelling_means_the_same():
    expected = calc_block_params((90, 70), (18, 18), (3, 3))
    for sizes in itertools.product(
        [(2, 90, 70, 24), [2, 90, 70, 24], (90, 70), [90, 70]],
        [18, (18, 18), [18, 18], (1, 18, 18, 1), [1, 18, 18, 1]],
        [3, (3, 3), [3, 3], (3, 3, 24, 32), [3, 3, 1, 1]],
        [1, (1, 1), [1, 1], (1, 1, 1, 1)],
    ):
        assert calc_block_params(*sizes) == expected, sizes


def test_numpy_integers_are_integers():
    params = calc_block_params(tuple(np.array([90, 70])), np.int64(18), np.int32(3), np.uint8(1))
    assert params == calc_block_params((90, 70), 18, 3)
    assert all(type(v) is int for field in vars(params).values() for v in field)


def test_arrays_are_no_sizes():
    with pytest.raises(ShapeError, match=r"got array\(\[6, 6\]\); give Python integers"):
        calc_block_params((12, 12), bsize=np.array([6, 6]), ksize=3)


def test_a_square_pair_of_ones_is_not_read_as_tensorflow_s():
    assert pair((1, 1), "bsize") == (1, 1)
    assert pair([1, 2, 3, 1], "bsize") == (2, 3)
    assert kernel_pair([1, 1, 24, 32]) == (1, 1)
    assert kernel_pair([1, 2, 3, 1]) == (1, 2)  # a kernel's four are [kh, kw, cin, cout]


@given(axes(), st.lists(st.sampled_from([1, 3, 1, 5, 2]), min_size=1, max_size=5))
def test_a_residual_unit_is_one_large_kernel(axis, kernels):
    n, _, _, s = axis
    k = 1 + sum(kernel - 1 for kernel in kernels)
    expected = calc_block_params((n, n), k + 4 * s, k, s)
    assert calc_block_params_res_block((n, n), k + 4 * s, kernels, s) == expected


def test_a_residual_unit_may_be_rectangular():
    kernels = [(1, 1, 8, 4), [3, 5, 4, 4], 1]
    params = calc_block_params_res_block((1, 20, 30, 8), (7, 9), kernels)
    assert params == calc_block_params((20, 30), (7, 9), (3, 5))


def test_block_params_are_frozen_pairs_of_int():
    params = calc_block_params((20, 20), 8, 3)
    with pytest.raises(AttributeError):
        params.bsize = (9, 9)
    assert [f for f in BlockParams.__dataclass_fields__] == [
        "bsize", "bsize_out", "boffset", "bcount", "bstride",
    ]  # fmt: skip
    assert params == calc_block_params((20, 20), 8, 3) and hash(params)


@pytest.mark.parametrize("strides", [(2, 1), (1, 3)], ids=str)
def test_a_block_that_does_not_line_up_says_which_would(strides):
    with pytest.raises(ShapeError, match=r"bsize .*strides") as error:
        calc_block_params((20, 20), (6, 7), (3, 3), strides)
    size = int(str(error.value).rpartition(" ")[2])
    axis = strides.index(max(strides))
    fixed = [6, 7]
    fixed[axis] = size
    assert calc_block_params((20, 20), fixed, (3, 3), strides)


def test_the_package_exports_them():
    assert sbnet_cupy.blocks.calc_block_params is calc_block_params
