"""Layers of a network on whole images, as plain loops in float64, and stacks of their blocks.

Images are NHWC, already 0 outside of the active blocks; kernels [R, S, C / groups, K]. Imports
nothing of the library under test.
"""

import math

import numpy as np


def block_mask(rows, block, size, batch):
    """Return bool [N, H, W]: pixels of the blocks ``rows`` (n, hi, wi)."""
    mask = np.zeros((batch, *size), bool)
    for n, hi, wi in rows:
        mask[n, hi * block[0] : (hi + 1) * block[0], wi * block[1] : (wi + 1) * block[1]] = True
    return mask


def to_stack(image, rows, block, capacity, outside=0.0):
    """Cut blocks out of images; ``outside`` where there is no pixel, and in spare rows."""
    stack = np.full((capacity, *block, image.shape[3]), outside, np.float64).astype(image.dtype)
    for row, (n, hi, wi) in enumerate(rows):
        for i, j in np.ndindex(*block):
            h, w = hi * block[0] + i, wi * block[1] + j
            if h < image.shape[1] and w < image.shape[2]:
                stack[row, i, j] = image[n, h, w]
    return stack


def to_image(stack, rows, block, size, batch):
    """Put blocks at their places in images of 0."""
    image = np.zeros((batch, *size, stack.shape[3]), stack.dtype)
    for row, (n, hi, wi) in enumerate(rows):
        for i, j in np.ndindex(*block):
            h, w = hi * block[0] + i, wi * block[1] + j
            if h < size[0] and w < size[1]:
                image[n, h, w] = stack[row, i, j]
    return image


def pads_of(padding, size, extent, strides):
    """Resolve padding to ((top, bottom), (left, right))."""
    if padding == "VALID":
        return (0, 0), (0, 0)
    if padding == "SAME":
        totals = [
            max((math.ceil(n / s) - 1) * s + e - n, 0) if n else 0
            for n, e, s in zip(size, extent, strides, strict=True)
        ]
        return tuple((t // 2, t - t // 2) for t in totals)
    return tuple((p, p) if isinstance(p, int) else tuple(p) for p in padding)


def taps(out_size, kernel, strides, dilation, pads, in_size):
    """Yield (p, q, r, s, h, w): output, tap, and the pixel read, for those in the image."""
    for p, q in np.ndindex(*out_size):
        for r, s in np.ndindex(*kernel):
            h = p * strides[0] - pads[0][0] + r * dilation[0]
            w = q * strides[1] - pads[1][0] + s * dilation[1]
            if 0 <= h < in_size[0] and 0 <= w < in_size[1]:
                yield p, q, r, s, h, w


def conv_size(size, kernel, strides, dilation, pads):
    """Size of a convolution's result."""
    return tuple(
        max((n + sum(p) - (k - 1) * d - 1) // s + 1, 0)
        for n, k, s, d, p in zip(size, kernel, strides, dilation, pads, strict=True)
    )


def conv2d(x, w, strides, dilation, pads, groups):
    """``y[p, q, k] = sum x[p * sh - top + r * dh, ...] * w[r, s, c, k]`` over k's group."""
    out_size = conv_size(x.shape[1:3], w.shape[:2], strides, dilation, pads)
    y = np.zeros((len(x), *out_size, w.shape[3]))
    for p, q, r, s, h, v in taps(out_size, w.shape[:2], strides, dilation, pads, x.shape[1:3]):
        y[:, p, q] += _product(x[:, h, v], w[r, s], groups)
    return y


def transposed_size(size, kernel, strides, dilation, pads, more):
    """Size of a transposed convolution's result."""
    return tuple(
        (n - 1) * s - sum(p) + (k - 1) * d + 1 + m
        for n, k, s, d, p, m in zip(size, kernel, strides, dilation, pads, more, strict=True)
    )


def transposed_conv2d(x, w, strides, dilation, pads, groups, out_size):
    """``y[i * sh - top + r * dh, ..., k] += x[i, ..., c] * w[r, s, c, k]``."""
    y = np.zeros((len(x), *out_size, w.shape[3]))
    for p, q, r, s, h, v in taps(x.shape[1:3], w.shape[:2], strides, dilation, pads, out_size):
        y[:, h, v] += _product(x[:, p, q], w[r, s], groups)
    return y


def _product(pixels, w, groups):
    """Multiply channels ``[N, C]`` by ``[C / groups, K]``, each group by its own columns."""
    c, k = w.shape[0], w.shape[1] // groups
    parts = [pixels[:, g * c : (g + 1) * c] @ w[:, g * k : (g + 1) * k] for g in range(groups)]
    return np.concatenate(parts, axis=1)


def conv2d_gradients(grad, x, w, strides, dilation, pads, groups):
    """Return (dx, dw) of ``conv2d``."""
    dx, dw = np.zeros(x.shape), np.zeros(w.shape)
    c, k = w.shape[2], w.shape[3] // groups
    out_size = grad.shape[1:3]
    for p, q, r, s, h, v in taps(out_size, w.shape[:2], strides, dilation, pads, x.shape[1:3]):
        for g in range(groups):
            ins, outs = slice(g * c, (g + 1) * c), slice(g * k, (g + 1) * k)
            dx[:, h, v, ins] += grad[:, p, q, outs] @ w[r, s, :, outs].T
            dw[r, s, :, outs] += x[:, h, v, ins].T @ grad[:, p, q, outs]
    return dx, dw


def transposed_gradients(grad, x, w, strides, dilation, pads, groups):
    """Return (dx, dw) of ``transposed_conv2d``."""
    dx, dw = np.zeros(x.shape), np.zeros(w.shape)
    c, k = w.shape[2], w.shape[3] // groups
    in_size = x.shape[1:3]
    for p, q, r, s, h, v in taps(in_size, w.shape[:2], strides, dilation, pads, grad.shape[1:3]):
        for g in range(groups):
            ins, outs = slice(g * c, (g + 1) * c), slice(g * k, (g + 1) * k)
            dx[:, p, q, ins] += grad[:, h, v, outs] @ w[r, s, :, outs].T
            dw[r, s, :, outs] += x[:, p, q, ins].T @ grad[:, h, v, outs]
    return dx, dw


def pool_size(size, kernel, strides, dilation, pads, ceil_mode):
    """Size of a pooling's result, with PyTorch's rule for ``ceil_mode``."""
    result = []
    for n, k, s, d, (before, after) in zip(size, kernel, strides, dilation, pads, strict=True):
        span = n + before + after - (k - 1) * d - 1
        outputs = (math.ceil(span / s) if ceil_mode else span // s) + 1
        if ceil_mode and (outputs - 1) * s >= n + before:
            outputs -= 1
        result.append(max(outputs, 0))
    return tuple(result)


def windows(p, size, kernel, strides, dilation, pads):
    """Pixels in the image of the window of output ``p`` (a pair), in the order of rows."""
    return [
        (h, w)
        for h in range(p[0] * strides[0] - pads[0][0], 2**30, dilation[0])[: kernel[0]]
        for w in range(p[1] * strides[1] - pads[1][0], 2**30, dilation[1])[: kernel[1]]
        if 0 <= h < size[0] and 0 <= w < size[1]
    ]


def max_pool(x, kernel, strides, dilation, pads, ceil_mode=False):
    """Largest pixel of each window, and 0 where it has none."""
    size = x.shape[1:3]
    out_size = pool_size(size, kernel, strides, dilation, pads, ceil_mode)
    y = np.zeros((len(x), *out_size, x.shape[3]), x.dtype)
    for p in np.ndindex(*out_size):
        pixels = windows(p, size, kernel, strides, dilation, pads)
        if pixels:
            y[:, p[0], p[1]] = np.max([x[:, h, w] for h, w in pixels], axis=0)
    return y


def max_pool_gradient(grad, x, kernel, strides, dilation, pads):
    """The gradient of each window goes to the first of its largest pixels."""
    dx = np.zeros(x.shape)
    for p in np.ndindex(*grad.shape[1:3]):
        pixels = windows(p, x.shape[1:3], kernel, strides, dilation, pads)
        if not pixels:
            continue
        values = np.array([x[:, h, w] for h, w in pixels])
        for n, c in np.ndindex(len(x), x.shape[3]):
            h, w = pixels[int(values[:, n, c].argmax())]
            dx[n, h, w, c] += grad[n, p[0], p[1], c]
    return dx


def avg_pool(x, kernel, strides, pads, ceil_mode=False, count_include_pad=True, divisor=None):
    """Mean of each window, with PyTorch's divisors."""
    size, ones = x.shape[1:3], (1, 1)
    out_size = pool_size(size, kernel, strides, ones, pads, ceil_mode)
    y = np.zeros((len(x), *out_size, x.shape[3]))
    for p in np.ndindex(*out_size):
        pixels = windows(p, size, kernel, strides, ones, pads)
        count = len(pixels)
        if count_include_pad:
            count = 1
            for axis in (0, 1):
                start = p[axis] * strides[axis] - pads[axis][0]
                count *= min(start + kernel[axis], size[axis] + pads[axis][1]) - start
        if pixels:
            total = np.sum([x[:, h, w] for h, w in pixels], axis=0)
            y[:, p[0], p[1]] = total / (count if divisor is None else divisor)
    return y


def interpolate(x, out_size, ratios, mode, align_corners):
    """Resize images; ``ratios`` are old pixels for each new one (Fraction), if not aligned."""
    y = np.zeros((len(x), *out_size, x.shape[3]))
    mixes = [
        [_mix(p, n, m, ratio, mode, align_corners) for p in range(m)]
        for n, m, ratio in zip(x.shape[1:3], out_size, ratios, strict=True)
    ]
    for p, q in np.ndindex(*out_size):
        for h, share_h in mixes[0][p]:
            for w, share_w in mixes[1][q]:
                y[:, p, q] += share_h * share_w * x[:, h, w]
    return y


def _mix(p, old, new, ratio, mode, align_corners):
    """Old lines and their shares for one new line."""
    if mode == "nearest":
        return [(min(math.floor(p * ratio), old - 1), 1.0)]
    if align_corners:
        at = p * (old - 1) / (new - 1) if new > 1 else 0.0
    else:
        at = float((2 * p + 1) * ratio / 2) - 0.5
    at = min(max(at, 0.0), old - 1.0)
    low = math.floor(at)
    return [(low, 1 - (at - low)), (min(low + 1, old - 1), at - low)]


def transpose_of(function, shape):
    """Return the transpose of a linear function of images, the same for every channel.

    ``function`` takes [1, H, W, C] and its result too; ``shape`` is (H, W).
    """
    area = shape[0] * shape[1]
    columns = function(np.eye(area).reshape(area, *shape).transpose(1, 2, 0)[None])
    matrix = columns.reshape(-1, area)  # [P * Q, H * W]

    def transpose(grad):
        n, p, q, c = grad.shape
        return np.einsum("oi,noc->nic", matrix, grad.reshape(n, p * q, c)).reshape(n, *shape, c)

    return transpose
