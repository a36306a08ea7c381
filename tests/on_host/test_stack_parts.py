"""Pools, interpolation and affine maps of some channels of stacks, on the shim."""

import pytest

from sbnet_cupy.block_sparse.stack import stack_pool_launch
from sbnet_cupy.block_sparse.stack.stack_interpolate import prepare_stack_interpolate
from support import stack_parts
from support.stack_cases import drawn


def as_it_is(launch):
    return launch


@pytest.mark.parametrize("name, window, dtype, layout", stack_parts.POOLS, ids=str)
def test_pools(on_shim, name, window, dtype, layout):
    stack_parts.check_pool(as_it_is, name, window, dtype, layout)
    assert [kernel for _, kernel in on_shim] == [f"stack_{name}_pool"] * 2


@pytest.mark.parametrize("mode, factor, dtype, layout", stack_parts.INTERPOLATIONS, ids=str)
def test_interpolation(on_shim, mode, factor, dtype, layout):
    """By whole lines, too, where vectors are narrow: those of copies may be wide."""
    lines = stack_parts.check_interpolation(as_it_is, mode, factor, dtype, layout)
    assert on_shim[-1][1] == "stack_interpolate" + "_lines" * lines


@pytest.mark.parametrize("make", ["max", "avg", "interpolate"])
def test_rows_of_a_part_are_not_cleared(on_shim, make):
    _, table, x, _ = drawn(stack_parts.FLOAT16, 8, (4, 2), (13, 9))
    pool = stack_parts.sizes(x, table, (4, 2))._replace(out_part_of=16)
    with pytest.raises(AssertionError, match="not cleared"):
        if make == "interpolate":
            prepare_stack_interpolate(pool, "nearest", (1, 1))
        elif make == "max":
            stack_pool_launch.prepare_stack_max_pool(pool)
        else:
            stack_pool_launch.prepare_stack_avg_pool(pool, False, None)


@pytest.mark.parametrize("mode, dtype, beside", stack_parts.GLOBAL_POOLS, ids=str)
def test_global_pools(on_shim, mode, dtype, beside):
    stack_parts.check_global_pool(as_it_is, mode, dtype, beside)


@pytest.mark.parametrize("dtypes, layout, per_image, activation", stack_parts.AFFINES, ids=str)
def test_affine(on_shim, dtypes, layout, per_image, activation):
    stack_parts.check_affine(as_it_is, dtypes, layout, per_image, activation)
