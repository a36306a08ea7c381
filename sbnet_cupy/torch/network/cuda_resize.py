"""The CUDA kernels that join stacks and make blocks larger, on tensors.

Each function returns None where no kernel serves the call; then PyTorch's operations do. Rows of a
result past the count are not written.
"""

import math

import torch

from . import cuda

_PLANS = {}  # (device, what, sizes) -> what launches a kernel, or None


def concat(stacks, table, unfolded=(), enlarged=(), factors=(1, 1)):
    """Join stacks along channels by one kernel, or return None.

    Parameters
    ----------
    stacks : list of tensor
        Up to eight, ``[M, C_k, b, b]``; some channels of another stack are read where they are.
    unfolded : sequence of int
        Which stacks are ``[M, f * f * C_k, b / f, b / f]``: their channels, ordered by pixel,
        become pixels.
    enlarged : sequence of int
        Which stacks are ``[M, C_k, b / f, b / f]``: each pixel becomes ``f`` by ``f``.
    factors : (int, int)
        By how much the blocks of both grow.
    """
    dtype, device = stacks[0].dtype, stacks[0].device
    if any(s.dtype != dtype or not cuda.serves(s) for s in stacks):
        return None
    area = math.prod(factors)
    pitches = [None if k in unfolded else cuda.pitch_of(s) for k, s in enumerate(stacks)]
    inputs = [
        s.permute(0, 2, 3, 1) if pitch else cuda._rows(s)
        for s, pitch in zip(stacks, pitches, strict=True)
    ]
    grown = [area if k in unfolded else 1 for k in range(len(inputs))]
    channels = tuple(x.shape[3] // a for x, a in zip(inputs, grown, strict=True))
    growing = (*unfolded, *enlarged)
    sizes = [factors if k in growing else (1, 1) for k in range(len(inputs))]
    block = tuple(n * f for n, f in zip(inputs[0].shape[1:3], sizes[0], strict=True))
    pitches = tuple(pitch or c for pitch, c in zip(pitches, channels, strict=True))
    aligned = math.gcd(16, *(x.data_ptr() for x in inputs))
    facts = (inputs[0].shape[0], block, channels, dtype.itemsize, tuple(unfolded), tuple(enlarged))
    facts += factors, pitches, aligned
    out = torch.empty(facts[0], *block, sum(channels), dtype=dtype, device=device)
    launch = cuda.prepared(_PLANS, ("concat", facts), out, _prepare_concat, *facts)
    if launch is None:
        return None
    cuda.start(launch, *inputs, table.counts, out)
    table.settled = True
    return out.permute(0, 3, 1, 2)


def readable(x, weight, groups, table):
    """Return a stack as a convolution with these weights reads it.

    Some channels of another stack are copied by the kernel, where it cannot read them as they lie.
    """
    if x.is_contiguous(memory_format=torch.channels_last) or cuda.pitch_of(x) is None:
        return x
    if not cuda.is_depthwise(x, weight, groups) and cuda.part_pitch(x) is not None:
        return x
    y = concat([x], table)
    return x if y is None else y


def _prepare_concat(*facts):
    from ...block_sparse.stack.stack_concat import prepare_stack_concat

    return prepare_stack_concat(*facts, clear_rows=False)


class Growth:
    """A transposed convolution as a convolution that makes the pixels of a block channels.

    Pixel ``i * s + a`` of the result is a sum of pixels ``i + d`` of the input, which ones depends
    on ``a`` alone. So a convolution with ``s_h * s_w * Cout`` output channels, ordered by pixel,
    computes it, and its channels are unfolded.

    Parameters
    ----------
    kernel, stride, padding, dilation : (int, int)
        As of ``conv_transpose2d``.
    """

    def __init__(self, kernel, stride, padding, dilation):
        self.stride, self.key = stride, (kernel, stride, padding, dilation)
        axes = [_phases(*each) for each in zip(kernel, stride, padding, dilation, strict=True)]
        self.before, self.kernel, self.taps = zip(*axes, strict=True)

    def weights(self, weight):
        """Return ``(Cout, Cin, kh, kw)`` as the convolution's kernel, channels_last."""
        out, channels = weight.shape[:2]
        (sh, sw), (h, w) = self.stride, self.kernel
        phases = weight.new_zeros(sh, sw, out, channels, h, w)
        for a, i, r in self.taps[0]:
            for b, j, s in self.taps[1]:
                phases[a, b, :, :, i, j] = weight[:, :, r, s]
        phases = phases.view(-1, channels, h, w)
        return phases.contiguous(memory_format=torch.channels_last)

    def product(self, x, table, block, size, weight, bias, out_size, activation):
        """Convolve by a kernel: ``[M, s_h * s_w * Cout, *block]``, or return None."""
        if min(self.before) < 0:
            return None
        pads = []
        for n, o, s, before, k in zip(
            size, out_size, self.stride, self.before, self.kernel, strict=True
        ):
            pads += [before, -(-o // s) - n - before + k - 1]
        options = (1, 1), tuple(pads), (1, 1), 1
        return cuda.conv(x, table, block, size, weight, bias, *options, None, activation)


def _phases(kernel, stride, padding, dilation):
    """Return (pixels before, taps, which tap of which phase is which of the kernel's)."""
    found = []
    for phase in range(stride):
        for tap in range(kernel):
            step, rest = divmod(phase + padding - tap * dilation, stride)
            if not rest:
                found.append((phase, step, tap))
    first = min(step for _, step, _ in found)
    taps = max(step for _, step, _ in found) - first + 1
    return -first, taps, [(phase, step - first, tap) for phase, step, tap in found]
