"""Kernels for stacks of blocks that XLA calls back where it computes on a GPU.

Elsewhere, and where there is no kernel, the same is made of XLA's own operations. Nothing here is
differentiated: see ``_stack_conv.py``.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..block_sparse.stack.neighbours import Axis
from ..block_sparse.stack.stack_conv2d import STACK_CONV2D
from ..block_sparse.stack.stages import Window
from . import _namespace as ops
from ._derivatives import transposed
from ._kernel_calls import as_tables, called, kernel_plan, on_gpu
from ._kernel_memory import spec
from ._places import Places, table_of
from ._stack_halo import fetch
from .packed_weights import Reading, packed_form


class Form(NamedTuple):
    """A sum of products between the stages of a window: forwards to the coarse one, or back."""

    window: Window
    groups: int
    precision: str | None

    def stage(self, back):
        """Return the stage of the result."""
        return self.window.fine if back else self.window.coarse

    def source(self, back):
        """Return the stage of what is convolved."""
        return self.window.coarse if back else self.window.fine

    def options(self, back, activation=None):
        """Return those of a call of stack_conv2d that is this sum; None where there is none.

        Back from the coarse stage it is the convolution with the kernel turned round, if the stride
        is 1.
        """
        window, pads = self.window, self.window.pads
        if back:
            if window.strides != (1, 1):
                return None
            sizes = zip(
                window.kernel, window.dilation, window.before,
                window.coarse.image_size, window.fine.image_size, strict=True,
            )  # fmt: skip
            pads = tuple(((k - 1) * d - b, out - n + b) for k, d, b, n, out in sizes)
            if min(map(min, pads)) < 0:
                return None
        return (
            *self.source(back), window.strides, pads, window.dilation, self.groups, False, (0, 0),
            activation, "HWIO", self.precision,
        )  # fmt: skip


def has_kernel(form, x, w, table, back):
    """Whether a kernel computes this sum of products, or the one that is its gradient.

    All are specs; ``w`` is as a convolution of x reads it.
    """
    if not (x.size and w.size):
        return False
    y = x.new((x.shape[0], *form.stage(back).block_size, w.shape[3]))
    turned = w.new(_swapped_shape(w.shape, form.groups))
    return any(
        _planned(form, direction, None, (*read, *table, None, None, None))[1] is not None
        for direction, read in ((back, (x, w)), (not back, (y, turned)))
    )


def _planned(form, back, activation, specs):
    """Return the options of a call, and its plan; None for what there is none of."""
    options = form.options(back, activation)
    plan = None if options is None else kernel_plan(STACK_CONV2D, [*specs, None], options)
    return options, plan


def convolved(form, back, activation, x, w, scale, bias, residual, *table, packed=None):
    """Return a convolution; ``w`` is ``[R, S, C_fine / groups, C_coarse]`` in both directions.

    ``packed`` are the bytes of :func:`packed_weights`, if there are any.
    """
    scale, bias = as_tables(x, scale, bias)
    w = swap_channels(w, form.groups) if back else w
    arrays = (x, w, *table, scale, bias, residual)
    options, plan = _planned(form, back, activation, tuple(map(spec, arrays)))

    def by_xla(x, w, *others):
        table, epilogue = others[:3], others[3:6]
        return convolve_by_xla(form, back, activation, x, w, *epilogue, table)

    def by_kernel(x, w, *others):
        *others, packed = others
        w = _turned(w, back)
        if packed is None:
            return called(STACK_CONV2D, options)(x, w, *others)
        return called(STACK_CONV2D, options, how=plan.how)(x, w, *others, packed)

    return by_xla(*arrays) if plan is None else on_gpu(by_kernel, by_xla, *arrays, packed)


def packed_weights(weights, form, back, activation, x, w, scale, bias, residual, table):
    """Return the bytes that were packed of PackedWeights for a convolution; None if none were.

    ``w``, ``scale`` and ``bias`` are theirs, ``w`` as a convolution of x reads it.
    """
    specs = tuple(map(spec, (x, w, *table, *as_tables(x, scale, bias), residual)))
    options, plan = _planned(form, back, activation, specs)
    reading = Reading(_read, (weights.w_format, form.groups, back))
    return packed_form(weights, plan, reading, STACK_CONV2D, options, specs)


def _read(w_format, groups, back, w, scale, bias):
    """Return weights as a kernel packs them."""
    return _turned(as_hwio(w, w_format, groups), back), *as_tables(w, scale, bias)


def _turned(w, back):
    return w[::-1, ::-1] if back else w


def as_hwio(w, w_format, groups):
    """Return a kernel as ``[R, S, C / groups, K]``."""
    if w_format != "IOHW":
        return jnp.transpose(w, [w_format.index(letter) for letter in "HWIO"])
    channels, out, r, s = w.shape
    w = w.reshape(groups, channels // groups, out, r, s).transpose(3, 4, 1, 0, 2)
    return w.reshape(r, s, channels // groups, groups * out)


def sum_of_products(x, w, *table, how):
    """Return the sum of products, in the dtype of x: ``how`` is a Form and whether back."""
    return convolved(*how, None, x, w, None, None, None, *table)


def weight_gradient(fine, coarse, *table, how):
    """Return the gradient of the weights of a sum of products: as XLA convolves."""
    form = how
    shape = (*form.window.kernel, fine.shape[3] // form.groups, coarse.shape[3])

    def multiply(w):
        return convolve_by_xla(form, False, None, fine, w, None, None, None, table)

    return transposed(multiply, jax.ShapeDtypeStruct(shape, fine.dtype), coarse)


def convolve_by_xla(form, back, activation, x, w, scale, bias, residual, table):
    """Return a convolution in XLA's own operations, all of which are differentiable.

    ``w`` is ``[R, S, C / groups, K]``, as a convolution of x reads it.
    """
    convolve = _to_fine if back else _to_coarse
    y = convolve(x, w, table_of(table, form.source(back)), *form)
    y = ops.affine(y, scale, bias, None)
    own = Places(table_of(table, form.stage(back))).own()
    if residual is not None:
        # Not read where there is no pixel: a NaN there would be one in gradients of w and tables.
        y += jnp.where(own, residual.astype(y.dtype), 0)
    y = ops.cast(ops.affine(y, None, None, activation), x.dtype)
    return jnp.where(own, y, 0)


def _to_coarse(x, w, table, window, groups, precision):
    """Convolve blocks with the pixels around them that their outputs read."""
    axes = [
        Axis(-before, 1, b - s + (k - 1) * d + 1)
        for before, b, s, k, d in zip(
            window.before, window.fine.block_size, window.strides, window.kernel, window.dilation,
            strict=True,
        )
    ]  # fmt: skip
    options = {"window_strides": window.strides, "padding": "VALID"}
    options |= {"rhs_dilation": window.dilation, "feature_group_count": groups}
    return ops.convolve_wide(fetch(x, table, *axes), w, precision=precision, **options)


def _to_fine(x, w, table, window, groups, precision):
    """The transposed convolution: pixel p of the result reads i with ``p = i * s - top + r * d``.

    It is a convolution with the kernel turned round, of pixels that are s apart with zeros between.
    """
    axes, pads = [], []
    for before, b, s, k, d in zip(
        window.before, window.fine.block_size, window.strides, window.kernel, window.dilation,
        strict=True,
    ):  # fmt: skip
        start = before - (k - 1) * d  # in pixels of the result, of what the first one reads
        first, last = -(-start // s), (b - 1 + before) // s
        count = max(last - first + 1, 1)
        axes.append(Axis(first, 1, count))
        low = first * s - start
        pads.append((low, b + (k - 1) * d - low - (count - 1) * s - 1))
    options = {"window_strides": (1, 1), "padding": pads, "lhs_dilation": window.strides}
    options |= {"rhs_dilation": window.dilation, "feature_group_count": groups}
    halo = fetch(x, table, *axes)
    return ops.convolve_wide(halo, w[::-1, ::-1], precision=precision, **options)


def swap_channels(w, groups):
    """Return ``[R, S, C / groups, K]`` as the kernel of the transposed convolution."""
    *kernel, c, k = w.shape
    w = w.reshape(*kernel, c, groups, k // groups).transpose(0, 1, 4, 3, 2)
    return w.reshape(_swapped_shape((*kernel, c, k), groups))


def _swapped_shape(shape, groups):
    *kernel, c, k = shape
    return (*kernel, k // groups, groups * c)
