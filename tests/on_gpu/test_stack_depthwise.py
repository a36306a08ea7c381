"""The kernel of depthwise convolutions on a GPU: whole numbers, bit for bit."""

import numpy as np
import pytest

from sbnet_cupy.block_sparse.stack.stack_launch import prepare_stack_depthwise
from support.stack_on_host import LAST, Blocks, ConvCase

pytestmark = pytest.mark.gpu

CASES = [
    ConvCase("Half", Blocks(image=(250, 201), block=(8, 8)), 96, 96, (7, 7), depthwise=True),
    ConvCase("Half", Blocks(image=(100, 81)), 192, 192, (7, 7), depthwise=True),
    ConvCase("Half", Blocks(block=(2, 2)), 384, 384, (7, 7), depthwise=True),
    ConvCase("Half", Blocks(block=(1, 1)), 768, 768, (7, 7), depthwise=True),
    ConvCase("Half", Blocks(block=(16, 16)), 72, 72, (5, 5), (2, 2), depthwise=True),
    ConvCase("BFloat16", Blocks(block=(8, 8)), 120, 120, activation=5, depthwise=True),
    ConvCase("BFloat16", Blocks(block=(6, 6)), 12, 12, (2, 4), (3, 3), depthwise=True),
    ConvCase("float", Blocks(block=(2, 2)), 8, 8, dilation=(12, 9), depthwise=True),
    ConvCase("float", Blocks(block=(8, 4)), 70, 70, (3, 5), residual=False, depthwise=True),
    ConvCase("Half", Blocks(block=(8, 4)), 13, 13, (5, 5), (2, 2), depthwise=True),
    ConvCase("Half", Blocks(image=(99, 70), block=(32, 32)), 8, 8, (31, 31), depthwise=True),
    ConvCase("Half", Blocks(block=(8, 8)), 72, 72, activation=LAST + 1, depthwise=True),
    # More tiles at once than a slice has weights.
    ConvCase(
        "Half", Blocks(image=(250, 201), block=(2, 2)), 232, 232, strides=(2, 2), depthwise=True
    ),
]


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_whole_numbers_are_exact(case, settled, require):
    check(case, settled, require("gpu"))


def check(case, settled, cupy):
    """Run a case on the GPU, and compare its result."""

    def launch(x, w, scale, bias, residual, table, out):
        conv = case.sizes(len(x))
        run = prepare_stack_depthwise(conv, "OIHW", clear_rows=not settled, settled=settled)
        w = np.ascontiguousarray(w.transpose(3, 2, 0, 1))
        given = [None if a is None else cupy.asarray(a) for a in (x, w, scale, bias, residual)]
        result = cupy.asarray(out)
        run(*given, *map(cupy.asarray, table), result, *map(cupy.asarray, case.last()))
        out[...] = cupy.asnumpy(result)

    case.run(launch, clear_rows=not settled)
