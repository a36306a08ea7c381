"""The CUDA kernels of a stack of blocks, on tensors: what ops.py asks for where there is one.

Each function returns None where no kernel serves the call; then PyTorch's operations do. What is
decided once for all calls alike is kept under the sizes of the call. Rows of a stack past the count
may hold anything: nothing reads them, and reductions and the scatter leave them out. In training
they are 0, as products with them are summed up.
"""

import contextlib
import functools
import math
import struct

import torch

from ...core.device import current_device
from ...core.torch_memory import allocate, to_tensor
from ...dense.activation import SCALED_LAST
from .. import _dispatch_state as state
from .._graph_branch import moment
from .._native import compute, native_stream, view
from . import joins
from .epilogue import finish, in_turn, slope_of
from .layout import new_stack, pitch_of
from .padding import whole_of

_ELEMENTS = {torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "float"}
_CODES = {  # as in cuda_src/dense/activation.cuh
    None: 0, "relu": 1, "silu": 2, "gelu": 3, "hardswish": 4, "relu6": 5, "hardsigmoid": 6,
    "sigmoid": 7,
}  # fmt: skip
_MASKS = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip
_PLANS = {}  # (device, sizes) -> what launches a kernel, or None
_BOUNDED = {"relu6", "hardsigmoid", "sigmoid"}  # which make finite what is infinite
_LEAST_SLOPE, _SLOPES_END = 2.0**-126, 2.0  # of leaky relu: an ordinary float, less than 2
_DEEP = 64  # times fewer pixels of a block than in the input: products take longer than memory


def serves(x):
    """Whether a stack may go to kernels: on a GPU, of a dtype they have, with no gradient."""
    return x.is_cuda and x.dtype in _ELEMENTS and not records(x) and not is_tracing()


def is_tracing():
    """Whether PyTorch makes a graph of the call, with tensors that stand for no numbers."""
    return torch.compiler.is_compiling()


def convolves(dtype):
    """Whether kernels convolve stacks of a dtype: float32 where tf32 is allowed."""
    return dtype in _ELEMENTS and (dtype != torch.float32 or torch.backends.cudnn.allow_tf32)


def multiplies(dtype):
    """Whether kernels multiply stacks of a dtype by matrices: not float32, unlike convolutions."""
    return dtype in (torch.float16, torch.bfloat16)


def records(*tensors):
    """Whether gradients of any of them are recorded; some may be None."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def list_blocks(mask, block, capacity):
    """Return (count, rows, grid) of a mask on a GPU, as int32 tensors: one kernel.

    A block is active where the mask is over 0, or True.
    """
    from ...block_sparse.stack import block_table

    mask = (mask if mask.dtype in _MASKS else mask > 0).contiguous()
    listed = []

    def run(array):
        listed.extend(block_table.list_blocks(array, block, capacity=capacity))

    compute(run, (mask,))
    return tuple(map(to_tensor, listed))


@functools.cache
def code_of(activation):
    """Return the number by which kernels know an activation, None of one that they do not have.

    A leaky relu has the bits of its slope, a float: more than any other number. What comes before
    the sum with a residual has the sign bit, too.
    """
    before, activation = in_turn(activation)
    if before is not None:
        code = code_of(before)
        return None if code is None else code - 2**31
    slope = slope_of(activation)
    if slope is None:
        return _CODES.get(activation)
    if not _LEAST_SLOPE <= slope < _SLOPES_END:
        return None
    return struct.unpack("i", struct.pack("f", slope))[0]


@functools.cache
def may_pad(activation):
    """Whether channels may pad the pixels of what has such an activation, or none.

    An infinite number times a weight of 0 is NaN, and so is the padding there. That does no harm
    where what reads it gets numbers that are not finite from the other channels, too.
    """
    return code_of(activation) is not None and not _BOUNDED.intersection(in_turn(activation))


def _at_home(x):
    """Return a context in which CuPy has the device and stream of a tensor; it gives the device."""
    import cupy

    device = x.get_device()
    stream = state.current_stream(device)
    if device == state.current_device() and stream == cupy.cuda.get_current_stream(device).ptr:
        return contextlib.nullcontext(device)
    return _moved(device)


@contextlib.contextmanager
def _moved(device):
    from cupy import cuda

    with cuda.Device(device), native_stream(device):
        yield device


def prepared(plans, key, x, prepare, *facts):
    """Return what is kept for a key on the device of x; ``prepare(*facts)`` makes it there."""
    key = x.get_device(), key
    if key not in plans:
        with _at_home(x):
            plans[key] = prepare(*facts)
    return plans[key]


def start(launch, *tensors, order=None, out=()):
    """Launch a kernel with tensors of one GPU, on its current stream; None is a null pointer.

    In a call with an ``order`` it waits for those kernels alone that it has to wait for, by its
    tensors: ``out`` are those that it writes, one or several.
    """
    device = tensors[0].get_device()
    addresses = [0 if t is None else t.data_ptr() for t in tensors]
    if device != state.current_device():
        with torch.cuda.device(device):
            launch.on(state.current_stream(device), addresses)
    elif order is None:
        launch.on(state.current_stream(device), addresses)
    else:
        stream = state.current_stream(device)
        order.launch(lambda: launch.on(stream, addresses), stream, tensors, out)


def start_with_memory(launch, *tensors, order=None, out=()):
    """Launch kernels that take memory of their own, as :func:`start` does.

    The first tensor is on the device.
    """
    from cupy.cuda import using_allocator

    def run():
        launch(*(view(t) if isinstance(t, torch.Tensor) else t for t in tensors))

    with _at_home(tensors[0]), using_allocator(allocate if order is None else order.allocate):
        if order is None:
            run()
        else:
            order.launch(run, state.current_stream(tensors[0].get_device()), tensors, out)


def last(x):
    """Return a stack with its channels last in memory, as kernels read it; None stays None."""
    if x is None or x.is_contiguous(memory_format=torch.channels_last):
        return x
    joins.note_copy(x)
    return x.contiguous(memory_format=torch.channels_last)


def _flat(x):
    """Return the memory of a stack from its first number to its last one, as one dimension.

    A view of NumPy or CuPy would be a copy, where the stack is a part of another.
    """
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((last + 1,), (1,))


def part_pitch(x):
    """Return :func:`pitch_of` a part of another stack that convolutions read where it lies.

    None of others: of no part, or where pixels are no whole vectors of 16 bytes.
    """
    if x is None or x.is_contiguous(memory_format=torch.channels_last):
        return None
    pitch, channels = pitch_of(x), x.shape[1]
    aligned = (n * x.element_size() % 16 == 0 for n in (pitch or 1, channels))
    return pitch if all(aligned) and x.data_ptr() % 16 == 0 else None


def _rows(x):
    """Return the memory of a stack as ``[M, h, w, C]``, contiguous."""
    return last(x).permute(0, 2, 3, 1)


def rows_and_pitch(x):
    """Return a stack as ``[M, h, w, C]``, and :func:`pitch_of` a part of another stack.

    The part is where it lies. The pitch of all others is None, and they are contiguous.
    """
    rows = x.permute(0, 2, 3, 1)
    if rows.is_contiguous():
        return rows, None
    pitch = pitch_of(x)
    return (rows.contiguous() if pitch is None else rows), pitch


@functools.lru_cache(maxsize=4096)
def sizes_after(block, size, kernel, stride, pads, dilation):
    """Return the block and the image that a convolution makes."""
    block_out = tuple(b // s for b, s in zip(block, stride, strict=True))
    each = zip(size, (pads[:2], pads[2:]), kernel, stride, dilation, strict=True)
    return block_out, tuple((n + sum(p) - d * (k - 1) - 1) // s + 1 for n, p, k, s, d in each)


def is_depthwise(x, weight, groups):
    """Whether a convolution goes to the depthwise kernel."""
    return groups == x.shape[1] == weight.shape[0] > 1


def number_of(activation, scaled):
    """Return the number of what follows a convolution's sum, as kernels know it."""
    code = code_of(activation) or 0
    return code if scaled is None else code + SCALED_LAST


def conv(
    x, table, block, size, weight, bias, stride, pads, dilation, groups, residual, activation,
    scaled=None, unfolded=None,
):  # fmt: skip
    """Convolve by one kernel: ``activation(conv(x) + bias + residual)``, or return None.

    ``scaled`` is a table of :meth:`~.weights.Weights.behind`, if channels are scaled last. With
    ``unfolded``, a pair, channels that are ordered by pixel become so many pixels down and across.
    """
    channels, out_channels = x.shape[1], weight.shape[0]
    depthwise = is_depthwise(x, weight, groups)
    group = (channels // groups, out_channels // groups) if groups > 1 and not depthwise else None
    code = code_of(activation)
    if x.dtype != weight.dtype or records(weight, bias, residual):
        return None
    if x.dtype == torch.float32 and not depthwise and not torch.backends.cudnn.allow_tf32:
        return None
    if residual is not None and residual.dtype != x.dtype:
        return None
    if not depthwise and _is_mostly_padding(channels, x.element_size(), weight.shape[2:]):
        return None
    kernel = tuple(weight.shape[2:])
    block_out, size_out = sizes_after(block, size, kernel, stride, pads, dilation)
    kept = "_stack_depthwise" if depthwise else "_stack_packed"
    if depthwise:
        parts, y = (None, None, None), new_stack(x, x.shape[0], block_out, out_channels)
    else:
        y_block, y_channels = _unfolded(block_out, out_channels, unfolded)
        padded = group is scaled is unfolded is None and may_pad(activation)
        padded = padded and (residual is None or whole_of(residual) is not None)
        added = () if residual is None else (residual,)
        y = joins.place(x, table, y_block, y_channels, padded, added)
        parts = part_pitch(x), part_pitch(residual), part_pitch(y)
    out = y
    if group is None and not depthwise:
        x = joins.in_vectors(x, table)
        if whole_of(y) is not None:
            out = whole_of(y)
            residual = None if residual is None else joins.in_vectors(residual, table)
    facts = (
        x.dtype, x.shape[0], table.batch, table.grid, block, block_out, size, size_out,
        x.shape[1], out.shape[1] if unfolded is None else out_channels, kernel, stride, dilation,
        (pads[0], pads[2]), number_of(activation, scaled), depthwise, group, parts, unfolded,
        is_known(scaled) and table.settled and _is_packed(weight, bias, kept), _clears(table),
        (channels, out_channels),
    )  # fmt: skip
    run = prepared(_PLANS, facts, x, _prepare_conv, *facts)
    if run is None:
        if not depthwise:
            joins.take_back(y, table)
        return None
    launch, pack, plain = run
    if depthwise:
        values, wide = _depthwise_weights(weight, bias)
        weights = values, None, wide
    else:
        weights = (_packed(x, weight, bias, pack),)
    behind = () if scaled is None else (scaled,)
    stacks = x if parts[0] else last(x), residual if parts[1] else last(residual)
    given = stacks[0], *weights, stacks[1], table.counts, table.indices, table.places, out, *behind
    if plain:
        start(launch, *given, order=table.order, out=out)
    else:  # which takes memory for sums, or for padded channels
        given = [t if t is None or t.dim() < 4 else _flat(t) for t in given]
        start_with_memory(launch, *given, order=table.order, out=out)
    table.settled = True  # what wrote the table lies behind a kernel that waited for it
    if table.deep is None and math.prod(block_out) * _DEEP <= math.prod(table.block):
        table.deep = moment(y) or False  # asked once
    return finish(y, None, activation) if code is None else y


def _unfolded(block, channels, pixels):
    if pixels is None:
        return block, channels
    grown = tuple(n * f for n, f in zip(block, pixels, strict=True))
    return grown, channels // math.prod(pixels)


def _clears(table):
    """Whether rows past the count must be 0: in training, where sums of products take them in."""
    return table.weights is None and not table.known_live


def _is_mostly_padding(channels, itemsize, kernel):
    """Whether a kernel would multiply zeros for the most part: it pads pixels to 16 bytes.

    So the first layer of a network on images in half precision; cuDNN does it faster after a halo.
    """
    lanes = 16 // itemsize
    return math.prod(kernel) > 1 and -(-channels // lanes) * lanes > 2 * channels


def _prepare_conv(
    dtype, rows, images, grid, block, block_out, image, image_out, channels, channels_out, kernel,
    strides, dilation, pads, activation, depthwise, group, parts, unfolded, settled, clear_rows,
    of_weights,
):  # fmt: skip
    """Return (launch, pack, whether addresses are enough) for the current device, or None.

    ``parts`` are the pitches of x, the residual and y where they are parts of other stacks, and
    None elsewhere. ``unfolded`` as in :func:`conv`, ``settled`` and ``clear_rows`` as in
    ``prepare_stack_conv``. ``of_weights`` are the channels of x and y that are no padding.
    """
    from ...block_sparse.stack import stack_launch
    from ...block_sparse.stack.stack_conv_plan import (
        StackConv,
        missing_kernel,
        plan_stack_conv,
    )

    itemsize, (part_of, added_part_of, out_part_of) = dtype.itemsize, parts
    conv = StackConv(
        element=_ELEMENTS[dtype], rows=rows, images=images, grid=grid, block=block,
        block_out=block_out, image=image, image_out=image_out, channels=channels,
        channels_out=channels_out, kernel=kernel, strides=strides, dilation=dilation, pads=pads,
        activation=activation, vectors_in=channels * itemsize % 16 == 0,
        vectors_out=channels_out * itemsize % 16 == 0, expected=rows, group=group, part_of=part_of,
        added_part_of=added_part_of, out_part_of=out_part_of, unfolded=unfolded,
    )  # fmt: skip
    if depthwise:
        width = math.gcd(16, channels * itemsize)
        launch = stack_launch.prepare_stack_depthwise(conv, "OIHW", width, clear_rows, settled)
        return None if launch is None else (launch, None, True)
    device = current_device()
    if missing_kernel(conv, device) is not None:
        return None
    plain = conv.vectors_in and not plan_stack_conv(conv, device).partials
    packs = Packs(conv._replace(channels=of_weights[0], channels_out=of_weights[1]))
    return stack_launch.prepare_stack_conv(conv, settled, clear_rows), packs, plain


class Packs:
    """What packs the weights of a convolution of these sizes."""

    def __init__(self, conv):
        from ...block_sparse.stack import stack_launch

        self.conv, self._launches = conv, {}
        self._usual = stack_launch.prepare_stack_pack(conv, "OIHW")

    def __call__(self, *arrays):
        """Pack contiguous weights, scale and bias; they are kept."""
        return self._usual(*arrays)

    def strided(self, steps, element):
        """Return the launch that packs weights as they lie."""
        from ...block_sparse.stack import stack_launch

        if (steps, element) not in self._launches:
            launch = stack_launch.prepare_stack_pack_strided(self.conv, steps, element)
            self._launches[steps, element] = launch
        return self._launches[steps, element]


def _is_packed(weight, bias, kept="_stack_packed"):
    """Whether weights lie packed already, so that no kernel of this call writes them."""
    found = getattr(weight, kept, None)
    return found is not None and found[0] is bias


def is_known(scaled):
    """Whether a call before this one was given such a table, if there is one, and notes that."""
    if scaled is None:
        return True
    known = getattr(scaled, "_stack_known", False)
    scaled._stack_known = True
    return known


def _packed(x, weight, bias, pack, kept="_stack_packed"):
    """Return weights as the kernel reads them, kept beside a weight that is kept."""
    found = getattr(weight, kept, None)
    if found is None or found[0] is not bias:
        scale = getattr(weight, "_stack_scale", None)
        tables = [t if t is None else t.float() for t in (scale, bias)]
        found = bias, pack_now(x, pack, weight, *tables)
        if getattr(weight, "is_kept", False):
            keep_packed(weight, kept, found)
    return found[1]


def pack_now(x, pack, *weights):
    """Return what ``pack`` makes of weights, some of them None, on the device of x."""
    from cupy.cuda import using_allocator

    with _at_home(x), using_allocator(allocate):
        return to_tensor(pack(*(t if t is None else view(t) for t in weights)))


def keep_packed(weight, name, packed):
    """Keep what was packed beside a weight, for calls on other streams too."""
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream().synchronize()  # once
    setattr(weight, name, packed)


def _depthwise_weights(weight, bias):
    """Return contiguous weights and float32 biases, kept beside a weight that is kept."""
    found = getattr(weight, "_stack_depthwise", None)
    if found is None or found[0] is not bias:
        wide = None if bias is None else bias.float().contiguous()
        found = (bias, weight.contiguous(), wide)
        if getattr(weight, "is_kept", False):
            weight._stack_depthwise = found
    return found[1:]


_FILLS = {"replicate": "nearest", "reflect": "mirror", "circular": "repeat"}


def halo(x, table, block, size, pads, fill, mode):
    """Give each block its rim by one kernel, or return None."""
    if min(pads) < 0 or fill not in (0, -math.inf):
        return None
    kind = _FILLS.get(mode) or ("zero" if fill == 0 else "lowest")
    rows, channels = x.shape[:2]
    facts = (
        x.dtype, rows, channels, table.batch, table.grid, block, size, pads, kind, _clears(table),
    )  # fmt: skip
    launch = prepared(_PLANS, facts, x, _prepare_halo, *facts)
    out = new_stack(x, rows, (block[0] + pads[0] + pads[1], block[1] + pads[2] + pads[3]), channels)
    given = last(x), table.counts, table.indices, table.places, out
    start(launch, *given, order=table.order, out=out)
    table.settled = True
    return out


def _prepare_halo(
    dtype, rows, channels, images, grid, block, image, pads, kind, clear_rows
):  # fmt: skip
    from ...block_sparse.stack import stack_launch

    names = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
    pixel = channels * dtype.itemsize
    sizes = stack_launch.StackHalo(
        rows=rows, images=images, grid=grid, block=block, image=image,
        before=(pads[0], pads[2]), after=(pads[1], pads[3]), fill=kind,
        lowest=_lowest(names[dtype]),
    )  # fmt: skip
    return stack_launch.prepare_stack_halo(sizes, pixel, math.gcd(16, pixel), clear_rows)


def _lowest(name):
    """Return the bits of minus infinity of a dtype, repeated up to 8 bytes, as an int64."""
    bits = {
        "float16": 0xFC00FC00FC00FC00,
        "bfloat16": 0xFF80FF80FF80FF80,
        "float32": 0xFF800000FF800000,
    }
    return bits[name] - (1 << 64)
