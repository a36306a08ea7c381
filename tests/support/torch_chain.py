"""A chain of the operations of sbnet_cupy.torch, to compile and to capture."""

import numpy as np

import sbnet_cupy as sb
from support.assertions import assert_same
from support.torch_cases import draw, grid

PARAMS = sb.calc_block_params((16, 16), 8, 3)
GRID = grid(PARAMS)
TERMS = 3 * 3 * 4


def inputs(torch, device="cpu", seed=0, size=16):
    """Return an image, a mask with a few pixels set, and a kernel."""
    rng = np.random.default_rng(seed)
    mask = torch.from_numpy(rng.random((1, size, size)) < 0.01 * (1 + seed % 3)).to(device)
    x = draw(torch, 1, size, size, 4, seed=seed, device=device)
    return x, mask, draw(torch, 3, 3, 4, 4, seed=9, device=device)


def chain(st, x, mask, w, capacity=9):
    """Every operator after another; returns tensors."""
    active = st.reduce_mask(mask, PARAMS.bcount, **GRID, capacity=capacity)
    pair = active.bin_counts, active.active_block_indices  # PyTorch 2.11 cannot compile *active
    blocks = st.sparse_gather(x, *pair, **GRID, transpose=True)
    added = st.sparse_scatter(blocks * 2, *pair, x, **GRID, add=True, atomic=True, transpose=True)
    st.sparse_scatter_var(blocks, *pair, added, **GRID, transpose=True)
    return active, blocks, added, st.sparse_conv2d(x, w, active, PARAMS, activation="relu")


def assert_chain(results, expected):
    for a, e in zip(results[0], expected[0], strict=True):
        assert_same(a, e)
    for a, e in zip(results[1:], expected[1:], strict=True):
        assert_same(a, e)
