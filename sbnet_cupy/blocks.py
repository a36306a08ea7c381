"""Block geometry under its public name: how a convolution's image is cut into blocks.

``BlockParams`` and the two functions that calculate it come from ``block_sparse/block_params.py``,
the arithmetic of sizes from ``core/sizes.py``.
"""

from .block_sparse.block_params import BlockParams, calc_block_params, calc_block_params_res_block
from .core.sizes import (
    image_size,
    is_integer,
    kernel_pair,
    output_size,
    padding_pairs,
    pair,
)

__all__ = [
    "BlockParams",
    "calc_block_params",
    "calc_block_params_res_block",
    "image_size",
    "is_integer",
    "kernel_pair",
    "output_size",
    "padding_pairs",
    "pair",
]
