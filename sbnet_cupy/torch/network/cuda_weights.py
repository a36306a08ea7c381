"""Convolutions in training: weights are packed as they lie, for one convolution, by one kernel."""

import torch

from ...core.launch import Series
from . import cuda

_PLANS = {}  # (device, sizes) -> (launch, bytes of packed weights), or None


def conv(x, table, block, size, weight, bias, stride, pads, dilation, turned=False):
    """Convolve a stack with weights that change from step to step, or return None.

    Parameters
    ----------
    weight : tensor, shape (Cout, Cin, kh, kw)
        In any layout; of the dtype of x, or float32, which is rounded.
    turned : bool
        Whether the kernel is turned round and its channels change places, as the gradient of a
        convolution takes it.
    """
    dtype, shape = x.dtype, weight.shape
    if not cuda.convolves(dtype) or weight.dtype not in (dtype, torch.float32):
        return None
    facts = (
        dtype, x.shape[0], table.batch, table.grid, block, size, tuple(shape), weight.stride(),
        weight.dtype, stride, pads, dilation, turned, cuda._clears(table),
    )  # fmt: skip
    found = cuda.prepared(_PLANS, facts, x, _prepare, *facts)
    if found is None:
        return None
    launch, packed_bytes, plain, block_out = found
    y = cuda.new_stack(x, x.shape[0], block_out, shape[1] if turned else shape[0])
    packed = torch.empty(packed_bytes, dtype=torch.uint8, device=x.device)
    wide = None if bias is None else bias.detach().float().contiguous()
    lists = table.counts, table.indices, table.places
    if plain:
        cuda.start(launch, cuda.last(x), weight, wide, packed, *lists, y)
    else:
        pack, run = launch
        cuda.start(pack, weight, None, wide, packed)
        x, out = (t.permute(0, 2, 3, 1) for t in (x, y))
        cuda.start_with_memory(run, x, packed, None, *lists, out)
    table.settled = True
    return y


def _prepare(
    dtype, rows, images, grid, block, size, shape, steps, source, stride, pads, dilation, turned,
    clear_rows,
):  # fmt: skip
    """Return (launch, bytes of packed weights, whether addresses are enough, block), or None.

    The launch takes x, weight, bias, packed weights, the table and y; or it is two of them.
    """
    (out, channels, *kernel), (step_k, step_c, *steps) = shape, steps
    kernel, offset = tuple(kernel), 0
    if turned:  # from the last tap on
        last = sum(s * (n - 1) for s, n in zip(steps, kernel, strict=True))
        offset = last * source.itemsize
        steps, step_k, step_c = [-s for s in steps], step_c, step_k
        out, channels = channels, out
    if cuda._is_mostly_padding(channels, dtype.itemsize, kernel):
        return None
    block_out, size_out = cuda.sizes_after(block, size, kernel, stride, pads, dilation)
    found = cuda._prepare_conv(
        dtype, rows, images, grid, block, block_out, size, size_out, channels, out, kernel, stride,
        dilation, (pads[0], pads[2]), 0, False, None, (None,) * 3, None, False, clear_rows,
        (channels, out),
    )  # fmt: skip
    if found is None:
        return None
    run, packs, plain = found
    pack = packs.strided((*steps, step_c, step_k), cuda._ELEMENTS[source])
    pack = _Shifted(pack, offset) if offset else pack
    if plain:
        launch = Series((pack, (1, None, 2, 3)), (run, (0, 3, None, 4, 5, 6, 7)))
    else:
        launch = pack, run
    return launch, packs.conv.packed_bytes, plain, block_out


class _Shifted:
    """A launch whose first array begins so many bytes behind the address that it is given."""

    def __init__(self, launch, offset):
        self._launch, self._offset = launch, offset

    def on(self, stream, addresses):
        """Launch as a kernel's launch does."""
        first, *rest = addresses
        self._launch.on(stream, (first + self._offset, *rest))
