"""copy_image copies every bit, whatever the size and wherever the memory begins."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbnet_cupy.core.copy_image import copy_image
from support.assertions import assert_same, to_numpy


def bits(size, seed):
    return np.frombuffer(np.random.default_rng(seed).bytes(size), np.uint8)


@given(
    size=st.integers(0, 200) | st.integers((1 << 20) - 40, (1 << 20) + 40),
    skip=st.sampled_from([(0, 0), (16, 0), (0, 48), (1, 0), (0, 4), (8, 8)]),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_bit_is_copied(xp, size, skip, seed):
    array = bits(size, seed)
    source = xp.asarray(np.concatenate([bits(skip[0], 0), array]))[skip[0] :]
    guarded = xp.writable(np.full(size + skip[1] + 64, 77, np.uint8))
    out = guarded[skip[1] : skip[1] + size]
    assert copy_image(source, out) is out
    assert_same(to_numpy(out), array)
    around = to_numpy(guarded)
    assert (around[: skip[1]] == 77).all() and (around[skip[1] + size :] == 77).all()
    assert_same(to_numpy(copy_image(source)), array)


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex128"])
def test_images_of_some_size(xp, dtype):
    image = np.random.default_rng(1).standard_normal((2, 211, 307, 24)).astype(dtype)
    copy = copy_image(xp.asarray(image))
    assert copy.shape == image.shape
    assert_same(to_numpy(copy), image)
