"""Convolutions of a stack as matrix products: forward, transposed, and the weights' gradient.

All three are sums over the taps of a :class:`~.stages.Window` between a fine stage and a coarse
one, with a kernel ``[R, S, C_fine / groups, C_coarse]``:

- ``to_coarse``: ``coarse[p] = sum over r of fine[p * stride - before + r * dilation] * w[r]``,
- ``to_fine``, its transpose: pixels of one residue modulo the stride form a convolution of stride
  1 with the taps that reach them,
- ``weight_gradient``: the sum over ``p`` of ``fine[...] * coarse[p]``, for each tap.

The pixels come from the blocks around (``neighbours.py``), a chunk of blocks at a time. Runs on
NumPy (BLAS) and CuPy (cuBLAS), with the same sums in the same order in every call.
"""

from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import compute_dtype, is_cupy, namespace
from ...dense import im2col
from ...dense.activation import apply_activation, apply_affine
from .fetch import fetch
from .neighbours import Axis


class Taps(NamedTuple):
    """Along one axis: output ``p`` reads pixels ``first + stride * p + dilation * tap``."""

    first: int
    stride: int
    dilation: int
    count: int
    outputs: int

    def lines(self, start, stop):
        """Keep the outputs ``start <= p < stop``."""
        return self._replace(first=self.first + self.stride * start, outputs=stop - start)

    def tap(self, number):
        """Return the pixels that one tap reads."""
        return Axis(self.first + self.dilation * number, self.stride, self.outputs)

    def halo(self):
        """Return all pixels from the first that is read to the last."""
        reach = (self.outputs - 1) * self.stride + (self.count - 1) * self.dilation + 1
        return Axis(self.first, 1, reach)


class Epilogue(NamedTuple):
    """What follows the sums: ``activation(scale * sum + bias + residual)``."""

    scale: Any = None
    bias: Any = None
    residual: Any = None
    activation: str | None = None

    def apply(self, product, residual):
        """Apply it to ``product`` [pixels, K] in place."""
        if residual is None:
            apply_affine(product, self.scale, self.bias, self.activation)
            return
        apply_affine(product, self.scale, self.bias, None)
        product += residual.reshape(product.shape)
        apply_activation(product, self.activation)


class _Call(NamedTuple):
    """What the convolutions of a call have in common."""

    groups: int
    tf32: bool
    epilogue: Epilogue
    clean: bool  # outputs in the image read pixels outside of it, also with a kernel of one pixel


def to_coarse(fine, w, places, window, groups, tf32, epilogue, out):
    """Write the convolution of the stack ``fine`` to ``out``, all of its rows."""
    taps = tuple(
        Taps(-before, s, d, k, b)
        for before, s, d, k, b in zip(
            window.before, window.strides, window.dilation, window.kernel,
            window.coarse.block_size, strict=True,
        )
    )  # fmt: skip
    sizes = zip(window.coarse.image_size, window.fine.image_size, strict=True)
    call = _Call(groups, tf32, epilogue, clean=any(p > i for p, i in sizes))
    _convolve(fine, w, places, taps, call, out)
    clear_unlisted(out, places)


def to_fine(coarse, w, places, window, groups, tf32, epilogue, out):
    """Write the transposed convolution of the stack ``coarse`` to ``out``, all of its rows."""
    w = swap_channels(w, groups)
    sizes = zip(window.fine.image_size, window.strides, window.coarse.image_size, strict=True)
    call = _Call(groups, tf32, epilogue, clean=any(-(-i // s) > p for i, s, p in sizes))
    phases = [list(_phases(window, axis)) for axis in (0, 1)]
    for lines, taps_h, chosen_h in phases[0]:
        for columns, taps_w, chosen_w in phases[1]:
            kernel, taps = w[chosen_h, chosen_w], (taps_h, taps_w)
            residual = epilogue.residual
            if residual is not None:
                residual = residual[:, lines, columns]
            part = call._replace(epilogue=epilogue._replace(residual=residual))
            _convolve(coarse, kernel, places, taps, part, out[:, lines, columns])
    clear_unlisted(out, places)


def _phases(window, axis):
    """For each residue of fine pixels: (slice of them, the taps that reach them, slice of w)."""
    stride, dilation = window.strides[axis], window.dilation[axis]
    block = window.coarse.block_size[axis]
    for phase in range(stride):
        from_start = phase + window.before[axis]
        kernel = range(window.kernel[axis])
        numbers = [r for r in kernel if (from_start - r * dilation) % stride == 0][::-1]
        pixels = slice(phase, None, stride)
        if not numbers:
            yield pixels, Taps(0, 1, 1, 0, block), slice(0, 0)
            continue
        step = numbers[0] - numbers[1] if len(numbers) > 1 else stride
        taps = Taps((from_start - numbers[0] * dilation) // stride, 1, step * dilation // stride,
                    len(numbers), block)  # fmt: skip
        stop = numbers[-1] - 1
        yield pixels, taps, slice(numbers[0], None if stop < 0 else stop, -step)


def weight_gradient(fine, coarse, places, window, groups, tf32):
    """Return the gradient of the kernel, ``[R, S, C_fine / groups, C_coarse]``, not yet rounded."""
    xp, total = namespace(fine), compute_dtype(fine.dtype)
    c, k = fine.shape[3] // groups, coarse.shape[3]
    if not c * k:
        return xp.zeros((*window.kernel, c, k), total)
    dw = xp.zeros((groups, *window.kernel, c, k // groups), total)
    rows, cols = window.coarse.block_size
    taps = [
        Taps(-before, s, d, r, b)
        for before, s, d, r, b in zip(
            window.before, window.strides, window.dilation, window.kernel, (rows, cols), strict=True
        )
    ]
    depthwise = _is_depthwise(c, k, groups)
    operand = _operand(fine, depthwise)
    scratch = im2col.Scratch(xp)
    terms = window.kernel[0] * window.kernel[1] * fine.shape[3]
    coarse_places = places.at(places.table.at(*window.coarse))
    product = xp.empty((groups, dw[0].size // (k // groups), k // groups), total)
    row_bytes = cols * (terms + k) * operand.itemsize
    for part, lines in _chunks(places, rows, row_bytes, fine):
        here = (taps[0].lines(lines.start, lines.stop), taps[1])
        grad = scratch.array("grad", (part.stop - part.start, here[0].outputs, cols, k), operand)
        lattice = (Axis(lines.start, 1, here[0].outputs), Axis(0, 1, cols))
        fetch(coarse, coarse_places.part(part), *lattice, grad)
        reader = _Reader(fine, places.part(part), here, operand, scratch)
        if depthwise:
            for r, s, values in reader.taps():
                dw[:, r, s, 0, :] += _sum_of_products(values, grad, groups)
            continue
        columns = reader.columns(groups, clean=True)
        by_group = grad.reshape(-1, groups, k // groups).transpose(1, 0, 2)
        for group in range(groups):
            im2col.multiply(columns[group].T, by_group[group], product[group], tf32)
        dw += product.reshape(dw.shape)
    return dw.transpose(1, 2, 3, 0, 4).reshape(*window.kernel, c, k)


def clear_unlisted(out, places):
    """Make rows of a result 0 that are no block: past the count, or corrupt."""
    xp = namespace(out)
    known = len(places)
    if known < len(out):
        out[known:] = xp.zeros((), out.dtype)
    if is_cupy(out) or not places.valid.all():
        xp.copyto(out[:known], xp.zeros((), out.dtype), where=~places.valid[:, None, None, None])


def _convolve(source, w, places, taps, call, out):
    """Write one convolution to ``out``, a view of some pixels of each block."""
    if not out.size:
        return
    (groups, tf32, epilogue, clean), xp = call, namespace(source)
    total = compute_dtype(source.dtype)
    c, channels = w.shape[2], w.shape[3]
    depthwise = _is_depthwise(c, channels, groups)
    operand = _operand(source, depthwise)
    weights = w.astype(operand, copy=False)
    weights = weights if depthwise else _weight_matrices(weights, groups)
    scratch, residual = im2col.Scratch(xp), epilogue.residual
    rows, cols = taps[0].outputs, taps[1].outputs
    terms = 3 if depthwise else w.shape[0] * w.shape[1]  # eight times less fits a nearer cache
    row_bytes = cols * (terms * source.shape[3] * operand.itemsize + channels * total.itemsize)
    for part, lines in _chunks(places, rows, row_bytes * (8 if depthwise else 1), source):
        here = (taps[0].lines(lines.start, lines.stop), taps[1])
        goal = out[part, lines]
        shape = (goal.size // channels, channels)
        direct = goal.dtype == total and goal.flags.c_contiguous
        product = goal.reshape(shape) if direct else scratch.array("product", shape, total)
        reader = _Reader(source, places.part(part), here, operand, scratch)
        if depthwise:
            _add_taps(reader, weights, product, groups, scratch)
        else:
            _multiply_groups(reader.columns(groups, clean), weights, product, tf32, scratch)
        epilogue.apply(product, None if residual is None else residual[part, lines])
        if not direct:
            goal[...] = product.reshape(goal.shape)


def _chunks(places, rows, row_bytes, like):
    limit = im2col.CUPY_CHUNK_BYTES if is_cupy(like) else im2col.NUMPY_CHUNK_BYTES
    return im2col.chunks(len(places), rows, max(row_bytes, 1), limit)


def _operand(source, depthwise):
    """Dtype of the factors: halves as they are for cuBLAS, else the dtype of the sums."""
    return source.dtype if is_cupy(source) and not depthwise else compute_dtype(source.dtype)


def _is_depthwise(c, channels, groups):
    """Whether each input channel has outputs of its own, which elementwise products do best."""
    return c == 1 and groups > 1


class _Reader:
    """The pixels that some outputs read, of a few blocks."""

    def __init__(self, source, places, taps, dtype, scratch):
        self._source, self._places, self._taps = source, places, taps
        self._dtype, self._scratch = dtype, scratch
        halo = [axis.halo() for axis in taps]
        reads = [axis.count * axis.outputs for axis in taps]
        # One read of the block with its rim, unless the taps read fewer pixels one by one.
        self._halo = halo if halo[0].count * halo[1].count < reads[0] * reads[1] else None

    @property
    def shape(self):
        """Sizes of the outputs: blocks, lines, columns."""
        return len(self._places), self._taps[0].outputs, self._taps[1].outputs

    def _read(self, name, down, across):
        shape = (len(self._places), down.count, across.count, self._source.shape[3])
        pixels = self._scratch.array(name, shape, self._dtype)
        fetch(self._source, self._places, down, across, pixels)
        return pixels

    def columns(self, groups, clean=False):
        """Return the pixels as matrices ``[groups, outputs, R * S * C / groups]``.

        A kernel of one pixel may read what lies outside the image, for outputs that do: not if
        ``clean``.
        """
        kernel, c = (self._taps[0].count, self._taps[1].count), self._source.shape[3]
        pixels = int(np.prod(self.shape))
        if kernel == (1, 1) and groups == 1:
            return self._pointwise(clean).reshape(1, pixels, c)
        shape = (groups, *self.shape, *kernel, c // groups)
        columns = self._scratch.array("columns", shape, self._dtype)
        by_pixel = columns.transpose(1, 2, 3, 4, 5, 0, 6)
        if self._halo is None:
            for r, s, values in self.taps():
                by_pixel[:, :, :, r, s] = values.reshape(*self.shape, groups, c // groups)
        else:
            by_pixel[...] = self._windows(groups)
        return columns.reshape(groups, pixels, kernel[0] * kernel[1] * (c // groups))

    def _pointwise(self, clean):
        """Return what a kernel of one pixel reads: the stack itself, where that is possible."""
        down, across = (axis.tap(0) for axis in self._taps)
        block = self._places.table.block_size
        own = across == Axis(0, 1, block[1]) and down.first >= 0 and down.step == 1
        own = own and down.first + down.count <= block[0]
        if own and not clean and self._source.dtype == self._dtype:
            return self._source[self._places.rows, down.first : down.first + down.count]
        return self._read("read", down, across)

    def _windows(self, groups):
        """View the block with its rim as windows ``[m, P, Q, R, S, groups, C / groups]``."""
        pixels = self._read("halo", *self._halo)
        (h, w), c = self._taps, pixels.shape[3] // groups
        m_step, h_step, w_step, c_step = pixels.strides
        return namespace(pixels).lib.stride_tricks.as_strided(
            pixels,
            (*self.shape, h.count, w.count, groups, c),
            (m_step, h_step * h.stride, w_step * w.stride, h_step * h.dilation,
             w_step * w.dilation, c_step * c, c_step),
        )  # fmt: skip

    def windows(self):
        """View the pixels as windows [m, P, Q, R, S, C]; None where taps are read one by one."""
        return None if self._halo is None else self._windows(1)[:, :, :, :, :, 0]

    def taps(self):
        """Yield (r, s, what that tap reads ``[m, P, Q, C]``)."""
        (h, w), whole = self._taps, self.windows()
        for r in range(h.count):
            for s in range(w.count):
                if whole is None:
                    yield r, s, self._read("read", h.tap(r), w.tap(s))
                else:
                    yield r, s, whole[:, :, :, r, s]


_MANY_CHANNELS = 64  # from which NumPy's einsum beats a pass for each tap


def _add_taps(reader, w, product, groups, scratch):
    """Sum the products of a depthwise convolution, in the order of the taps."""
    xp, many = namespace(product), product.shape[1] // groups
    if many == 1 and not is_cupy(product):
        _add_taps_numpy(reader, w[:, :, 0], product, scratch)
        return
    product[...] = 0
    total = product.reshape(*reader.shape, groups, many)
    term = scratch.array("term", total.shape, product.dtype)
    for r, s, values in reader.taps():
        xp.multiply(values[..., None], w[r, s, 0].reshape(groups, many), out=term)
        total += term


def _add_taps_numpy(reader, w, product, scratch):
    """The same where each channel has one output; ``w`` is [R, S, C]."""
    total = product.reshape(*reader.shape, -1)
    windows = reader.windows()
    if windows is not None and w.size and product.shape[1] >= _MANY_CHANNELS:
        np.einsum("mpqrsc,rsc->mpqc", windows, w, out=total)
        return
    product[...] = 0
    term = scratch.array("term", total.shape, product.dtype)
    # Whole lines of factors, so that loops are as long as a line of pixels.
    lines = np.broadcast_to(w[:, :, None], (*w.shape[:2], total.shape[2], w.shape[2])).copy()
    for r, s, values in reader.taps():
        np.multiply(values, lines[r, s], out=term)
        total += term


def _sum_of_products(values, grad, groups):
    """Sum ``values * grad`` over pixels: ``[groups, K / groups]``."""
    apart = grad.reshape(*values.shape, -1)
    return (values[..., None] * apart).sum(axis=(0, 1, 2)).reshape(groups, -1)


def _multiply_groups(columns, weights, product, tf32, scratch):
    """Multiply each group's columns by its weights into its channels of ``product``."""
    groups = len(weights)
    if groups == 1:
        im2col.multiply(columns[0], weights[0], product, tf32)
        return
    apart = scratch.array("groups", (groups, len(product), weights.shape[2]), product.dtype)
    for group in range(groups):
        im2col.multiply(columns[group], weights[group], apart[group], tf32)
    product.reshape(len(product), groups, -1)[...] = apart.transpose(1, 0, 2)


def _weight_matrices(w, groups):
    """Return ``[R, S, C / groups, K]`` as ``[groups, R * S * C / groups, K / groups]``."""
    terms, k = w.shape[0] * w.shape[1] * w.shape[2], w.shape[3] // groups
    by_group = w.reshape(terms, groups, k).transpose(1, 0, 2)
    return namespace(w).ascontiguousarray(by_group)


def swap_channels(w, groups):
    """Return ``[R, S, C / groups, K]`` as ``[R, S, K / groups, C]``."""
    r, s, c, k = w.shape
    apart = w.reshape(r, s, c, groups, k // groups)
    return apart.transpose(0, 1, 4, 3, 2).reshape(r, s, k // groups, groups * c)
