"""What every function must compute, as plain loops written from its definition alone.

Slow on purpose, on NumPy arrays only, and importing nothing of the library under test.
"""

import math

import numpy as np


def reduce_mask(
    mask, block_count, *, bsize, boffset=(0, 0), bstride=None, tol=0.0, avgpool=False, capacity=None
):
    """Return (true count, int32 rows (n, hi, wi)): one loop over blocks, one over their pixels."""
    if mask.ndim == 4:
        mask = mask[..., 0]
    bstride = bsize if bstride is None else bstride
    if mask.dtype.kind not in "biu":  # a float mask is compared in its own dtype
        with np.errstate(over="ignore"):
            tol = float(np.asarray(tol).astype(mask.dtype))
    rows = []
    for n in range(mask.shape[0]):
        for hi in range(block_count[0]):
            for wi in range(block_count[1]):
                pixels = list(_block_pixels(mask, n, hi, wi, bsize, boffset, bstride))
                if avgpool:
                    with np.errstate(invalid="ignore"):  # inf - inf
                        total = sum((np.float64(p) for p in pixels), np.float64(0))
                    active = bool(total / (bsize[0] * bsize[1]) > tol)
                else:
                    active = any(_number(p) > tol for p in pixels)
                if active:
                    rows.append((n, hi, wi))
    count = len(rows)
    if capacity is not None:
        rows = rows[:capacity] + [(-1, -1, -1)] * (capacity - count)
    return count, np.array(rows, np.int32).reshape(-1, 3)


def _number(pixel):
    """A Python number, whose comparisons are exact for integers of every size."""
    return int(pixel) if pixel.dtype.kind in "iu" else float(pixel)


def _block_pixels(mask, n, hi, wi, bsize, boffset, bstride):
    for i in range(bsize[0]):
        for j in range(bsize[1]):
            h, w = boffset[0] + bstride[0] * hi + i, boffset[1] + bstride[1] * wi + j
            if 0 <= h < mask.shape[1] and 0 <= w < mask.shape[2]:
                yield mask[n, h, w]


def sparse_gather(
    x,
    bin_counts,
    active_block_indices,
    *,
    bsize,
    boffset=(0, 0),
    bstride=None,
    transpose=False,
    data_format="NHWC",
    scale=None,
    shift=None,
    activation=None,
    rounded=True,
):
    """Return the block stack, copied (and mapped) pixel by pixel; in float64 if not rounded."""
    if data_format == "NCHW":
        x = x.transpose(0, 2, 3, 1)
    bstride = bsize if bstride is None else bstride
    dtype = x.dtype if rounded else np.float64
    blocks = np.zeros((len(active_block_indices), *bsize, x.shape[3]), dtype)
    fused = not (scale is None and shift is None and activation is None)
    for b, n, i, j, h, w in _stack_pixels(
        x.shape, bin_counts, active_block_indices, bsize, boffset, bstride
    ):
        pixel = x[n, h, w]
        blocks[b, i, j] = fused_map(pixel, scale, shift, activation) if fused else pixel
    nchw = transpose != (data_format == "NCHW")
    return np.ascontiguousarray(blocks.transpose(0, 3, 1, 2)) if nchw else blocks


def sparse_scatter(
    blocks,
    bin_counts,
    active_block_indices,
    x,
    *,
    bsize,
    boffset=(0, 0),
    bstride=None,
    add=False,
    transpose=False,
    data_format="NHWC",
):
    """Return a copy of x with the blocks written or added, pixel by pixel, row after row."""
    y = np.array(x, order="C")
    image = y.transpose(0, 2, 3, 1) if data_format == "NCHW" else y
    if transpose != (data_format == "NCHW"):
        blocks = blocks.transpose(0, 2, 3, 1)
    bstride = bsize if bstride is None else bstride
    for b, n, i, j, h, w in _stack_pixels(
        image.shape, bin_counts, active_block_indices, bsize, boffset, bstride
    ):
        image[n, h, w] = image[n, h, w] + blocks[b, i, j] if add else blocks[b, i, j]
    return y


def sparse_gather_grad(
    grad_blocks,
    bin_counts,
    active_block_indices,
    x,
    *,
    bsize,
    boffset=(0, 0),
    bstride=None,
    transpose=False,
    data_format="NHWC",
    scale=None,
    shift=None,
    activation=None,
):
    """Return {"x", "scale", "shift"}: each the exact sum, and the sum of its terms' magnitudes."""
    channels_last = data_format == "NHWC"
    if not channels_last:
        x = x.transpose(0, 2, 3, 1)
    if transpose == channels_last:
        grad_blocks = grad_blocks.transpose(0, 2, 3, 1)
    bstride = bsize if bstride is None else bstride
    c = x.shape[3]
    sums = {name: np.zeros((2, *shape)) for name, shape in
            (("x", x.shape), ("scale", (c,)), ("shift", (c,)))}  # fmt: skip
    for b, n, i, j, h, w in _stack_pixels(
        x.shape, bin_counts, active_block_indices, bsize, boffset, bstride
    ):
        before = fused_map(x[n, h, w], scale, shift, None)  # rounded as the forward pass does
        slope = np.array([SLOPES[activation](float(v)) for v in before])
        g, steepest = grad_blocks[b, i, j].astype(np.float64), max(activation is None, 1.13)
        pixel, factor = x[n, h, w].astype(np.float64), 1.0 if scale is None else scale.astype("f8")
        for name, where, times in (
            ("x", (n, h, w), factor), ("scale", (), pixel), ("shift", (), np.ones(c))
        ):  # fmt: skip
            sums[name][(0, *where)] += g * slope * times
            sums[name][(1, *where)] += abs(g * steepest * times)
    if not channels_last:
        sums["x"] = sums["x"].transpose(0, 1, 4, 2, 3)
    return sums


def sparse_scatter_grad(
    grad_y,
    bin_counts,
    active_block_indices,
    *,
    bsize,
    boffset=(0, 0),
    bstride=None,
    add=False,
    transpose=False,
    data_format="NHWC",
):
    """Return the gradients of the blocks and of x: each pixel goes to whoever wrote it last."""
    channels_last = data_format == "NHWC"
    if not channels_last:
        grad_y = grad_y.transpose(0, 2, 3, 1)
    bstride = bsize if bstride is None else bstride
    blocks = np.zeros((len(active_block_indices), *bsize, grad_y.shape[3]), grad_y.dtype)
    x = grad_y.copy()
    last = {}
    for b, n, i, j, h, w in _stack_pixels(
        grad_y.shape, bin_counts, active_block_indices, bsize, boffset, bstride
    ):
        blocks[b, i, j] = grad_y[n, h, w]
        if not add:
            x[n, h, w] = 0
            if (n, h, w) in last:
                blocks[last[n, h, w]] = 0
            last[n, h, w] = b, i, j
    if transpose == channels_last:
        blocks = blocks.transpose(0, 3, 1, 2)
    if not channels_last:
        x = x.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(blocks), np.ascontiguousarray(x)


def _stack_pixels(shape, bin_counts, rows, bsize, boffset, bstride):
    """Yield (b, n, i, j, h, w) for every pixel of the stack that lies inside the image."""
    count = min(int(bin_counts[0]), len(rows))
    for b in range(count):
        n, hi, wi = (int(v) for v in rows[b])  # Python's integers: nothing can overflow
        if not 0 <= n < shape[0]:
            continue
        for i in range(bsize[0]):
            for j in range(bsize[1]):
                h, w = boffset[0] + bstride[0] * hi + i, boffset[1] + bstride[1] * wi + j
                if 0 <= h < shape[1] and 0 <= w < shape[2]:
                    yield b, n, i, j, h, w


def fused_map(pixel, scale, shift, activation):
    """act(x * scale + shift): one multiply, one add, in float32 or float64; not yet rounded."""
    wide = np.float64 if pixel.dtype == np.float64 else np.float32
    value = pixel.astype(wide)
    if scale is not None:
        value = value * scale.astype(wide)
    if shift is not None:
        value = value + shift.astype(wide)
    return ACTIVATIONS[activation](value)


def _relu(value):
    return np.where(value > 0, value, np.zeros_like(value))


def _sigmoid(v):
    return 1 / (1 + math.exp(-v)) if v > 0 else math.exp(v) / (1 + math.exp(v))


def _silu(value):
    return np.array([float(v) * _sigmoid(float(v)) for v in value])


def _gelu(value):
    return np.array([float(v) * 0.5 * (1 + math.erf(float(v) / math.sqrt(2))) for v in value])


ACTIVATIONS = {None: lambda value: value, "relu": _relu, "silu": _silu, "gelu": _gelu}


def affine_grad(grad, x, scale, shift, activation, channels_last=True, inside=None):
    """Return {"x", "scale", "shift"}: each the exact sum, and the sum of its terms' magnitudes."""
    if not channels_last:
        grad, x = grad.transpose(0, 2, 3, 1), x.transpose(0, 2, 3, 1)
        inside = None if inside is None else inside.transpose(0, 2, 3, 1)
    slope = np.vectorize(SLOPES[activation], otypes=[np.float64])
    slopes = slope(fused_map(x, scale, shift, None)) if x.size else np.zeros(x.shape)
    grad, x = grad.astype(np.float64), x.astype(np.float64)
    if inside is not None:
        grad = np.where(inside, grad, 0)
    factor = 1.0 if scale is None else scale.astype(np.float64)
    steepest = 1.0 if activation in (None, "relu") else 1.13
    g = np.stack([grad * slopes, abs(grad) * steepest])  # values, sizes
    terms = {"x": g * factor, "scale": g * x, "shift": g}
    terms = {name: np.stack([t[0], abs(t[1])]) for name, t in terms.items()}
    if not channels_last:
        terms["x"] = terms["x"].transpose(0, 1, 4, 2, 3)
    sums = {name: terms[name].sum(axis=(1, 2, 3)) for name in ("scale", "shift")}
    return {"x": terms["x"]} | sums


def _silu_slope(v):
    s = _sigmoid(v)
    return s * (1 + v * _sigmoid(-v))


def _gelu_slope(v):
    return 0.5 * math.erfc(-v / math.sqrt(2)) + v * math.exp(-v * v / 2) / math.sqrt(2 * math.pi)


SLOPES = {
    None: lambda v: 1.0, "relu": lambda v: float(v > 0), "silu": _silu_slope, "gelu": _gelu_slope,
}  # fmt: skip


def output_positions(n, k, s, padding):
    """Return the first input row that each output row of a convolution reads, along one axis.

    ``padding`` is "SAME" (TensorFlow's: ceil(n / s) outputs, the odd pixel at the end), "VALID", or
    an explicit (before, after).
    """
    if padding == "SAME":
        count = math.ceil(n / s)
        total = max((count - 1) * s + k - n, 0) if count else 0
        padding = (total // 2, total - total // 2)
    before, after = (0, 0) if padding == "VALID" else padding
    starts, start = [], -before
    while start + k <= n + after:
        starts.append(start)
        start += s
    return starts


def block_positions(b, k, s, boffset, bstride, bcount):
    """Return, per block, the first input row of every window that fits in it, along one axis."""
    starts = []
    for hi in range(bcount):
        first = boffset + hi * bstride
        starts.append([first + r for r in range(0, b - k + 1, s)])
    return starts


def conv2d(x, w, *, strides=(1, 1), padding="SAME"):
    """Return the dense convolution of an NHWC image with HWIO weights, in float64."""
    pads = (padding, padding) if isinstance(padding, str) else padding
    rows = output_positions(x.shape[1], w.shape[0], strides[0], pads[0])
    columns = output_positions(x.shape[2], w.shape[1], strides[1], pads[1])
    y = np.zeros((x.shape[0], len(rows), len(columns), w.shape[3]))
    for p, h0 in enumerate(rows):
        for q, w0 in enumerate(columns):
            for r in range(w.shape[0]):
                for s in range(w.shape[1]):
                    if 0 <= h0 + r < x.shape[1] and 0 <= w0 + s < x.shape[2]:
                        pixel = x[:, h0 + r, w0 + s, :].astype(np.float64)
                        y[:, p, q] += pixel @ w[r, s].astype(np.float64)
    return y
