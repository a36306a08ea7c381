"""Pools, interpolation and affine maps of some channels of stacks, on a GPU."""

import numpy as np
import pytest

from support import stack_parts

pytestmark = pytest.mark.gpu
CHECKS = {
    stack_parts.check_pool: stack_parts.POOLS,
    stack_parts.check_interpolation: stack_parts.INTERPOLATIONS,
    stack_parts.check_global_pool: stack_parts.GLOBAL_POOLS,
    stack_parts.check_affine: stack_parts.AFFINES,
}
CASES = [  # each with the values of its parameters
    (check, getattr(case, "values", case)) for check, cases in CHECKS.items() for case in cases
]


@pytest.mark.parametrize("check, case", CASES, ids=lambda value: getattr(value, "__name__", None))
def test_parts(require, check, case):
    cupy = require("gpu")

    def run_by(launch):
        def run(*arrays):
            """Run with copies on the GPU, as bytes; copy what it wrote back."""
            given = [None if a is None else cupy.asarray(a.view(np.uint8)) for a in arrays]
            launch(*given)
            for array, copy in zip(arrays, given, strict=True):
                if array is not None:
                    array.view(np.uint8)[...] = cupy.asnumpy(copy)

        return run

    check(run_by, *case)
