"""The CUDA kernels that join stacks and make blocks larger, on tensors.

Each function returns None where no kernel serves the call; then PyTorch's operations do. Rows of a
result past the count are not written.
"""

import math

import torch

from ...block_sparse.stack.stack_concat import MOST_INPUTS, prepare_stack_concat, side_by_side
from . import cuda, joins
from .padding import whole_of

_PLANS = {}  # (device, what, sizes) -> what launches a kernel, or None


def concat(stacks, table, enlarged=(), factors=(1, 1)):
    """Join stacks along channels; return (the result, whether it shares memory), or None.

    It shares memory with stacks that were written to their place in it: see ``joins``.

    Parameters
    ----------
    stacks : list of tensor
        Each ``[M, C_k, b, b]``; some channels of another stack are read where they are.
    enlarged : sequence of int
        Which stacks are ``[M, C_k, b / f, b / f]``: each pixel becomes ``f`` by ``f``.
    factors : (int, int)
        By how much their blocks grow.
    """
    like = stacks[0]
    if any(s.dtype != like.dtype or not cuda.serves(s) for s in stacks):
        return None
    channels = [s.shape[1] for s in stacks]
    block = _grown(like, factors if 0 in enlarged else (1, 1))
    as_they_are = [None if k in enlarged else s for k, s in enumerate(stacks)]
    out, left = joins.join(as_they_are, channels, like, table, block)
    firsts = side_by_side(channels)
    for i in range(0, len(left), MOST_INPUTS):
        ks = left[i : i + MOST_INPUTS]
        given = ([each[k] for k in ks] for each in (stacks, channels, firsts))
        grown = [j for j, k in enumerate(ks) if k in enlarged]
        if not _copy(*given, table, (), grown, factors, out):
            return None
    return out, len(left) < len(stacks)


def enlarge(x, table, factors):
    """Return a stack whose pixels are repeated, or None."""
    if not cuda.serves(x):
        return None
    y, (x,), out = joins.place_like((x,), table, _grown(x, factors), x.shape[1])
    return _written(y, x, table, (), (0,), factors, out)


def _unfold(x, table, factors):
    """Return a stack whose channels, which are ordered by pixel, become pixels, or None."""
    y = joins.place(x, table, _grown(x, factors), x.shape[1] // math.prod(factors))
    return _written(y, x, table, (0,), (), factors, y)


def _grown(x, factors):
    """Return the block of a stack whose pixels become so many."""
    return tuple(n * f for n, f in zip(x.shape[2:], factors, strict=True))


def _written(y, x, table, unfolded, enlarged, factors, out):
    """Return y once a kernel has written its memory, ``out``; or None, and take its place back."""
    if _copy([x], [out.shape[1]], [0], table, unfolded, enlarged, factors, out):
        return y
    joins.take_back(y, table)
    return None


def _copy(stacks, channels, firsts, table, unfolded, enlarged, factors, out):
    """Write stacks to channels of another, ``out``, from the first of each on, if a kernel does."""
    pitches = [None if k in unfolded else cuda.pitch_of(s) for k, s in enumerate(stacks)]
    inputs = [
        s.permute(0, 2, 3, 1) if pitch else cuda._rows(s)
        for s, pitch in zip(stacks, pitches, strict=True)
    ]
    pitches = tuple(pitch or c for pitch, c in zip(pitches, channels, strict=True))
    aligned = math.gcd(16, out.data_ptr(), *(x.data_ptr() for x in inputs))
    facts = (
        out.shape[0], tuple(out.shape[2:]), tuple(channels), out.element_size(), tuple(unfolded),
        tuple(enlarged), factors, pitches, aligned, cuda.pitch_of(out), tuple(firsts),
    )  # fmt: skip
    launch = cuda.prepared(_PLANS, ("concat", facts), out, _prepare_concat, *facts)
    if launch is None:
        return False
    given = *inputs, table.counts, out.permute(0, 2, 3, 1)
    cuda.start(launch, *given, order=table.order, out=out)
    table.settled = True
    return True


def readable(x, weight, groups, table):
    """Return a stack as a convolution with these weights reads it.

    Some channels of another stack are copied by the kernel, where it cannot read them as they lie.
    """
    if x.is_contiguous(memory_format=torch.channels_last) or cuda.pitch_of(x) is None:
        return x
    if not cuda.is_depthwise(x, weight, groups) and cuda.part_pitch(x) is not None:
        return x
    if groups == 1 and whole_of(x) is not None:
        return x
    joins.note_copy(x)
    y = cuda.new_stack(x, x.shape[0], x.shape[2:], x.shape[1])
    return y if cuda.serves(x) and _copy([x], [x.shape[1]], [0], table, (), (), (1, 1), y) else x


def _prepare_concat(*facts):
    *facts, pitch, firsts = facts
    return prepare_stack_concat(*facts, clear_rows=False, part_of=pitch, firsts=firsts)


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

    def grow(self, x, table, block, size, weight, bias, out_size, activation):
        """Convolve by a kernel that writes channels as pixels, or by two; or return None."""
        if min(self.before) < 0:
            return None
        pads = []
        for n, o, s, before, k in zip(
            size, out_size, self.stride, self.before, self.kernel, strict=True
        ):
            pads += [before, -(-o // s) - n - before + k - 1]
        options = (1, 1), tuple(pads), (1, 1), 1
        call = x, table, block, size, weight, bias, *options, None, activation
        y = cuda.conv(*call, unfolded=self.stride)
        if y is None:  # where channels are no whole vectors
            y = cuda.conv(*call)
            y = y if y is None else _unfold(y, table, self.stride)
        return y


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
