"""Stacks interpolated by whole lines on a GPU: as by NumPy, with the bits of the other kernel."""

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy.block_sparse.stack import stack_interpolate as module
from sbnet_cupy.block_sparse.stack.stack_pool_launch import StackPool

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("element, dtype", [("Half", "f2"), ("float", "f4")])
@pytest.mark.parametrize("channels, factor", [(21, 8), (3, 2), (2, 3), (1, 4)])
@pytest.mark.parametrize("mode", ["bilinear", "bilinear corners"])
def test_lines(require, monkeypatch, element, dtype, channels, factor, mode):
    require("gpu")
    import cupy as cp

    rng, block, size = np.random.default_rng(0), (4, 2), (27, 17)
    on = rng.random((2, 7, 9)) < 0.4
    mask = on.repeat(block[0], 1).repeat(block[1], 2)[:, : size[0], : size[1]]
    table = sb.block_table(cp.asarray(mask.astype("f4")), block, capacity=int(on.sum()) + 3)
    host = sb.block_table(mask.astype("f4"), block, capacity=int(on.sum()) + 3)
    x = rng.standard_normal((table.capacity, *block, channels)).astype(dtype)
    x[int(on.sum()) :] = np.nan
    after, corners = host.after_interpolate(factor), mode.endswith("corners")
    expected = sb.stack_interpolate(
        x.astype("f8"), host, scale_factor=factor, mode="bilinear", align_corners=corners
    )
    new = after.image_size
    steps = tuple(
        (a - 1) / (b - 1) if corners else a / b for a, b in zip(size, new, strict=True)
    )  # fmt: skip
    pool = StackPool(
        element, x.itemsize, table.capacity, 2, (7, 9), channels, block, size,
        block_out=after.block_size,
    )  # fmt: skip
    found, names, prepare = [], [], module.kernels.prepare

    def prepared(stem, kernel, *args, **kwargs):
        names.append(kernel)
        return prepare(stem, kernel, *args, **kwargs)

    monkeypatch.setattr(module.kernels, "prepare", prepared)
    for step in (module._MOST_STEP, 0):
        monkeypatch.setattr(module, "_MOST_STEP", step)
        run = module.prepare_stack_interpolate(pool, mode, steps)
        y = cp.full(expected.shape, 7, dtype)
        run(cp.asarray(x), table.bin_counts, table.active_block_indices, table.grid, y)
        found.append(sb.stack_to_image(cp.asnumpy(y), after))
    assert names == ["stack_interpolate_lines", "stack_interpolate"]
    assert np.array_equal(*found)
    expected = sb.stack_to_image(expected, after)
    # A share is a position of less than 64 pixels, rounded twice; numbers are below 5.
    bound = 4 * 64 * np.finfo("f4").eps * 5 + np.finfo(dtype).eps * np.abs(expected)
    assert (np.abs(found[0] - expected) <= bound).all()
