"""The layer norm of the channels of a stack: the kernel on a GPU, and its sizes."""

import pytest

from sbnet_cupy.block_sparse.stack.stack_layer_norm import (
    StackLayerNorm,
    prepare_stack_layer_norm,
)
from support.stack_layer_norm_cases import CASES, check


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_formula(case, require):
    check(case, xp=require("gpu"))


@pytest.mark.parametrize(
    ("channels", "sizes"),
    [(96, (8, 16, 1)), (768, (8, 32, 3)), (27, (1, 32, 1)), (1, (1, 1, 1)), (6, (2, 4, 1))],
)
def test_lanes_hold_all_channels(channels, sizes):
    norm = StackLayerNorm("Half", 2, "float", "Half", 9, (4, 4), channels, 1e-5)
    assert (norm.vector, norm.lanes, norm.each) == sizes
    assert norm.vector * norm.lanes * norm.each >= channels


def test_there_is_none_for_too_many_channels():
    norm = StackLayerNorm("Half", 2, "Half", "Half", 9, (4, 4), 2048, 1e-5)
    assert prepare_stack_layer_norm(norm) is None
