"""Formulas by which ``torch.utils.flop_counter`` counts the work of operators of the package.

A product and a sum are two operations, as in PyTorch's own formulas. The number of active blocks,
or of pairs of sites, is read from the device; where it cannot be read it is the most there may be.
"""

import math

import torch
from torch.utils.flop_counter import register_flop_formula

from ..core.readable import can_be_read
from . import layers, submanifold  # noqa: F401  (which define the operators)

_OPERATORS = torch.ops.sbnet_cupy


def _counts(*names):
    """Register a function of an operator's arguments and its result as the formula of these."""
    return register_flop_formula([getattr(_OPERATORS, name) for name in names], get_raw=True)


def _pixels(block, bin_counts, indices):
    """Return the number of pixels of the active blocks."""
    listed = indices.shape[0]
    active = min(max(int(bin_counts), 0), listed) if can_be_read(bin_counts) else listed
    return active * math.prod(block)


def _pairs(rows, sites):
    """Return the number of pairs of rows of a table."""
    return int(((rows >= 0) & (rows < sites)).sum()) if can_be_read(rows) else rows.numel()


@_counts("sparse_conv2d")
def _conv(x, w, bin_counts, indices, bias, base, block_params, *options, out_val=None):
    return 2 * _pixels(block_params[2:4], bin_counts, indices) * w.numel()


@_counts("sparse_res_block_bottleneck")
def _unit(x, w1, w2, w3, *arguments, out_val=None):
    w_project, bin_counts, indices, base, block_params = arguments[-8:-3]
    wide, shown = (_pixels(block_params[i : i + 2], bin_counts, indices) for i in (0, 2))
    products = wide * w1.numel() + shown * (w2.numel() + w3.numel())
    if w_project is not None:  # without a base it is computed in the whole image
        pixels = math.prod(out_val.shape[:3]) if base is None else shown
        products += pixels * w_project.numel()
    return 2 * products


@_counts("convolve")
def _stack(x, w, *options, out_val=None):
    return 2 * math.prod(out_val.shape[:3]) * w.numel()


@_counts("convolve_backward")
def _stack_backward(grad, x, w, strides, precision, for_x, for_w, *, out_val=None):
    return 2 * math.prod(grad.shape[:3]) * w.numel() * (for_x + for_w)


@_counts("site_conv")
def _sites(features, rows, valid, w, *arguments, out_val=None):
    return 2 * _pairs(rows, features.shape[0]) * w.shape[-2] * w.shape[-1]


@_counts("site_features_grad")
def _sites_features(grad_y, w, back, *options, out_val=None):
    return 2 * _pairs(back, grad_y.shape[0]) * w.shape[-2] * w.shape[-1]


@_counts("site_weight_grad")
def _sites_weights(features, grad_y, rows, groups, precision, *, out_val=None):
    products = features.shape[1] * grad_y.shape[1] // groups
    return 2 * _pairs(rows, features.shape[0]) * products
