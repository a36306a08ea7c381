"""Functions that move numbers about: joining and splitting channels, views, slices, shuffles."""

import functools
import math

import torch

from . import aliases, casts, cuda_resize
from . import tensor as T
from .handlers import handles
from .image_values import plainly
from .norms import own_dims
from .piles import Pile
from .plans import MatrixPlan, wider
from .pointwise import conform
from .resample import EnlargedPlan
from .windows import is_image, two


@handles("cat", "concat", "concatenate")
def cat(func, tensors, dim=0, **rest):
    """Join along channels."""
    dim = rest.pop("axis", dim)
    like = T.first_stack(tensors)
    if rest:
        return NotImplemented
    dims = T.dims(like)
    dim = dim % dims
    if dim not in own_dims(like):
        return NotImplemented
    table, reach = T.facts(like)[0], _reach(tensors)
    if dim == 1 and all(is_image(t) for t in tensors):
        narrow = _narrow(tensors, table)
        if narrow is not None:
            channels = sum(T.shape(t)[1] for t in tensors)
            tensors, make = list(tensors), functools.partial(_joined_as, tensors, like)
            return wider(like, make, (0, channels, 0, 0), narrow, tensors, reach=reach)
        joined = _join(tensors, like)
        if joined is not None:
            return _wrapped(*joined, like, reach)
    stacks = _stacks(tensors, like)
    if stacks is None:
        return NotImplemented
    joined = None
    if dim == 1 and dims == 4 and not table.whole:
        joined = cuda_resize.concat(stacks, table)
    if joined is None:
        joined = table.compute(torch.cat, stacks, dim), False
    return _wrapped(*joined, like, reach)


def _wrapped(joined, shares, like, reach):
    """Return a StackTensor of what was joined; if it shares memory, it is copied before writes."""
    out = T.wrap(joined, like, reach=reach)
    return aliases.lend(out, T.facts(like)[0]) if shares else out


def _reach(tensors):
    return max(T.facts(t)[4] for t in tensors if isinstance(t, T.StackTensor))


def _stacks(tensors, like):
    """Return images of one size, of any channels, as stacks; None if one cannot be."""
    kept = (0, *T.facts(like)[3])
    for t in tensors:
        if t.dim() != like.dim() or any(t.shape[i] != like.shape[i] for i in kept):
            return None
    stacks = [conform(t, like, broadcasts=False) for t in tensors]
    return None if any(value is None for value in stacks) else stacks


def _narrow(tensors, table):
    """Return autocast's dtype if images that are joined to float32 had better be joined in it, too.

    That is for a convolution that reads what they are joined to, and if one of them has the dtype
    already or can be computed in it; else None.
    """
    to, wide, dtypes = casts.for_waiting(table), torch.float32, {t.dtype for t in tensors}
    if to is None or table.whole or wide not in dtypes or not dtypes <= {wide, to}:
        return None
    if not _lie_alike(tensors):
        return None
    return to if to in dtypes or any(map(T.narrow_dtype, tensors)) else None


def _lie_alike(tensors):
    """Whether images have the same blocks, of the same size."""
    return all(T.facts(t)[:3] == T.facts(tensors[0])[:3] for t in tensors)


def _joined_as(tensors, like, dtype):
    """Join the channels of images in a dtype: float32, or that of autocast."""
    if dtype == torch.float32:
        return torch.cat([T.value_of(t) for t in tensors], 1)
    joined = _join(tensors, like, dtype)
    if joined is None:
        return torch.cat([T.value_as(t, dtype) for t in tensors], 1)
    return joined[0].clone() if joined[1] else joined[0]


def _join(tensors, like, to=None):
    """Join the channels of images as ``cuda_resize.concat`` does, or return None.

    They are converted as autocast does to a dtype, or not, None. What waits for its pixels to be
    repeated is read as it is.
    """
    table = T.facts(like)[0]
    if table.whole or not _lie_alike(tensors):
        return None
    stacks, enlarged, factors = [], [], None
    for t in tensors:
        plan = T.plan_of(t)
        if isinstance(plan, EnlargedPlan) and factors in (None, plan.factors):
            enlarged.append(len(stacks))
            factors = plan.factors
            stacks.append(casts.cast(plan.source, to))
        else:
            stacks.append(T.value_as(t, to))
    joined = cuda_resize.concat(stacks, table, enlarged, factors or (1, 1))
    if joined is None and factors:
        joined = torch.cat([T.value_as(t, to) for t in tensors], 1), False
    return joined


def _moved(x, hw, func, *args):
    """Return a StackTensor of what a function makes of a stack, with pixels at ``hw``."""
    return T.viewed(func, x, *args, hw=hw)


@handles("chunk", "split", "split_with_sizes", "tensor_split", "unsafe_chunk", "unsafe_split")
def split(func, input, sections=None, dim=0, *, chunks=None):
    """Split along channels."""
    sections = chunks if sections is None else sections
    if not isinstance(input, T.StackTensor) or dim % T.dims(input) not in own_dims(input):
        return NotImplemented
    return T.viewed(func, input, sections, dim=dim)


@handles("unbind")
def unbind(func, input, dim=0):
    """Take channels apart."""
    if dim % T.dims(input) not in own_dims(input):
        return NotImplemented
    return tuple(select(func, input, dim, i) for i in range(T.shape(input)[dim]))


@handles("select")
def select(func, input, dim, index):
    """Take one channel."""
    dim = dim % T.dims(input)
    if dim not in own_dims(input):
        return NotImplemented
    hw = tuple(i - (dim < i) for i in T.facts(input)[3])
    return _moved(input, hw, torch.select, dim, index)


@handles("narrow")
def narrow(func, input, dim, start, length):
    """Take some channels."""
    if dim % T.dims(input) not in own_dims(input):
        return NotImplemented
    return _moved(input, None, torch.narrow, dim, start, length)


@handles("index_select")
def index_select(func, input, dim, index):
    """Take listed channels."""
    if isinstance(index, T.StackTensor) or dim % T.dims(input) not in own_dims(input):
        return NotImplemented
    return _moved(input, None, torch.index_select, dim, index)


@handles("permute")
def permute(func, input, *order, dims=None):
    """Reorder dimensions; images stay first."""
    order = order or (dims,)
    order = order[0] if len(order) == 1 and not isinstance(order[0], int) else order
    count = T.dims(input)
    order = tuple(i % count for i in order)
    if not order or order[0] != 0:
        return NotImplemented
    hw = tuple(order.index(i) for i in T.facts(input)[3])
    if hw[0] > hw[1]:
        return NotImplemented
    if order != tuple(range(count)):
        T.facts(input)[0].in_order = False  # what is made of the result lies as it does
    plan = T.plan_of(input)
    if isinstance(plan, MatrixPlan) and not plan.moved and order == (0, 3, 1, 2):
        table, block, size, _, reach = T.facts(input)
        then = (torch.permute, order)
        return T.postpone(table, plan.as_image(), block, size, reach, input, then, hw)
    return _moved(input, hw, torch.permute, order)


@handles("transpose", "swapaxes", "swapdims")
def transpose(func, input, dim0, dim1):
    """Swap two dimensions."""
    order = list(range(T.dims(input)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute(func, input, order)


@handles("movedim", "moveaxis")
def movedim(func, input, source, destination):
    """Move a dimension."""
    if not isinstance(source, int) or not isinstance(destination, int):
        return NotImplemented
    count = T.dims(input)
    order = [i for i in range(count) if i != source % count]
    order.insert(destination % count, source % count)
    return permute(func, input, order)


@handles("stack")
def stack(func, tensors, dim=0):
    """Join along a new dimension."""
    like = T.first_stack(tensors)
    dim = dim % (T.dims(like) + 1)
    stacks = _stacks(tensors, like)
    if stacks is None:
        return NotImplemented
    table, _, _, hw, _ = T.facts(like)
    joined = table.compute(torch.stack, stacks, dim)
    if dim == 0:
        return Pile(joined, like, _reach(tensors))
    moved = tuple(i + (dim <= i) for i in hw)
    return T.wrap(joined, like, hw=moved, reach=_reach(tensors))


@handles("unsqueeze")
def unsqueeze(func, input, dim):
    """Add a dimension of 1 after the first."""
    dim = dim % (T.dims(input) + 1)
    if dim == 0:
        return NotImplemented
    hw = tuple(i + (dim <= i) for i in T.facts(input)[3])
    return _moved(input, hw, torch.unsqueeze, dim)


@handles("squeeze")
def squeeze(func, input, dim=None):
    """Drop a dimension of 1."""
    if not isinstance(dim, int) or dim % T.dims(input) not in own_dims(input):
        return NotImplemented
    dim = dim % T.dims(input)
    if T.shape(input)[dim] != 1:
        return input
    hw = tuple(i - (dim < i) for i in T.facts(input)[3])
    return _moved(input, hw, torch.squeeze, dim)


@handles("view", "reshape")
def view(func, input, *sizes, **rest):
    """Split or join dimensions of channels, and heights and widths with some that follow them.

    So space goes to depth: (N, C, H, W) is viewed as (N, C, H/4, 4, W/4, 4), with smaller blocks.
    """
    sizes = rest.pop("shape", rest.pop("size", sizes))
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        sizes = sizes[0]
    if rest or isinstance(sizes, torch.dtype) or not all(isinstance(s, int) for s in sizes):
        return NotImplemented
    shape, sizes = T.shape(input), list(sizes)
    if -1 in sizes:
        known = -math.prod(sizes)
        if not known:
            return NotImplemented
        sizes[sizes.index(-1)] = math.prod(shape) // known
    if math.prod(sizes) != math.prod(shape) or sizes[:1] != [shape[0]]:
        return NotImplemented
    if tuple(sizes) == shape:
        return input
    table, block, size, hw, _ = T.facts(input)
    groups = _groups(shape, sizes)
    if groups is None:
        return NotImplemented
    moved, inner = {}, [-1, *sizes[1:]]
    for old, new in groups:
        pixels = [i for i in old if i in hw]
        if pixels:
            axis = hw.index(pixels[0])
            place = next((i for i in new if sizes[i] != 1), new[-1])
            length = _resized(block[axis], size[axis], sizes[place])
            before = [shape[i] for i in old if i < pixels[0]]
            if len(pixels) > 1 or length is None or math.prod(before) != 1:
                return NotImplemented
            moved[axis] = place, length
            inner[place] = sizes[place] if table.whole else length
    hw, block = zip(moved[0], moved[1], strict=True)
    if not math.prod(inner[1:]):  # of nothing, no length can be told from the others
        return NotImplemented
    value = aliases.viewed(input, table, torch.reshape, T.value_of(input), inner)
    out = T.wrap(value, input, block=block, size=tuple(sizes[i] for i in hw), hw=hw)
    return aliases.inherit(out, input, lambda image: image.reshape(sizes))


def _groups(old, new):
    """Return pairs of lists: which dimensions after the first become which of another shape."""
    if len(old) == 1 or len(new) == 1 or not math.prod(old[1:]):
        return None
    groups, i, j = [], 1, 1
    while i < len(old) and j < len(new):
        a, b, before, after = [i], [j], old[i], new[j]
        while before != after:
            if before < after:
                a.append(a[-1] + 1)
                before *= old[a[-1]]
            else:
                b.append(b[-1] + 1)
                after *= new[b[-1]]
        groups.append((a, b))
        i, j = a[-1] + 1, b[-1] + 1
    groups[-1][0].extend(range(i, len(old)))  # of length 1
    groups[-1][1].extend(range(j, len(new)))
    return groups


def _resized(block, length, new):
    """Return the block of an image's side that becomes longer or shorter, or None."""
    if new % length == 0:
        return block * (new // length)
    parts = length // new
    return block // parts if length % new == 0 and block % parts == 0 else None


@handles("expand_as")
def expand_as(func, input, other):
    """Expand what there is for each channel or image to an image's size: a view of its memory."""
    if not isinstance(other, T.StackTensor):
        return NotImplemented
    if isinstance(input, T.StackTensor):
        return input if T.shape(input) == T.shape(other) else NotImplemented
    return T.facts(other)[0].compute(torch.Tensor.expand, plainly(input), T.shape(other))


@handles("unflatten")
def unflatten(func, input, dim, sizes):
    """Split a dimension of channels."""
    dim = dim % T.dims(input)
    if dim not in own_dims(input):
        return NotImplemented
    hw = tuple(i + (len(sizes) - 1) * (dim < i) for i in T.facts(input)[3])
    return _moved(input, hw, torch.unflatten, dim, sizes)


@handles("flatten")
def flatten(func, input, start_dim=0, end_dim=-1):
    """Join dimensions of channels."""
    count = T.dims(input)
    joined = set(range(start_dim % count, end_dim % count + 1))
    if len(joined) == 1:
        return input
    if not joined <= set(own_dims(input)):
        return NotImplemented
    gone = len(joined) - 1
    hw = tuple(i - gone * (start_dim % count < i) for i in T.facts(input)[3])
    return _moved(input, hw, torch.flatten, start_dim, end_dim)


_MASKS = torch.bool, torch.uint8


@handles("__getitem__")
def getitem(func, input, index):
    """Slice channels; take every so many pixels; cut less than a block off at the far ends."""
    if not isinstance(input, T.StackTensor):
        return NotImplemented
    index = list(index) if isinstance(index, tuple) else [index]
    count = T.dims(input)
    if any(i is None or isinstance(i, (bool, T.StackTensor)) for i in index):
        return NotImplemented
    if any(i is Ellipsis for i in index):
        at = next(k for k, i in enumerate(index) if i is Ellipsis)
        index[at : at + 1] = [slice(None)] * (count - len(index) + 1)
    index += [slice(None)] * (count - len(index))
    if len(index) != count or any(i is Ellipsis for i in index) or index[0] != slice(None):
        return NotImplemented
    table, block, size, hw, _ = T.facts(input)
    found = _cut(index, table, block, size, hw)
    if found is None:
        return NotImplemented
    seen = tuple(index)
    is_cut = any(index[at].stop not in (None, s) for at, s in zip(hw, size, strict=True))
    pixels, block, size = found
    for at, taken in zip(hw, pixels, strict=True):
        index[at] = taken
    others = [index[i] for i in own_dims(input)]
    if sum(not isinstance(i, (int, slice)) for i in others) > 1:
        return NotImplemented
    if any(not isinstance(i, (int, slice, list, torch.Tensor)) for i in others):
        return NotImplemented
    if any(isinstance(i, torch.Tensor) and i.dim() != 1 for i in others):
        return NotImplemented
    if any(isinstance(i, (list, torch.Tensor)) for i in others) and any(
        isinstance(i, int) for i in others
    ):
        return NotImplemented
    masks = [i for i in others if isinstance(i, torch.Tensor) and i.dtype in _MASKS]
    if table.tape is not None and not table.tape.holds(masks):
        table.tape.stop("channels of which a mask that is made in the call says how many they are")
    gone = [i for i in own_dims(input) if isinstance(index[i], int)]
    moved = tuple(i - sum(g < i for g in gone) for i in hw)
    take, value = torch.Tensor.__getitem__, T.value_of(input)
    value = aliases.viewed(input, table, take, value, tuple(index))
    out = T.wrap(value, input, block=block, size=size, hw=moved)
    if is_cut:
        return aliases.note_part(out, input, "a slice", lambda image: image[seen])
    table.block_of.setdefault(size, block)
    return aliases.inherit(out, input, lambda image: image[seen])


def _cut(index, table, block, size, hw):
    """Return (indices of height and width, the new block and size) of an index, or None.

    Where whole blocks are cut off, what is left has none, as the part that was cut off: both can be
    added and joined. It has those of a stage of its size.
    """
    each = zip((index[at] for at in hw), block, size, strict=True)
    found = [_pixels(*one, table.whole) for one in each]
    if None in found:
        return None
    pixels, after, new = zip(*found, strict=True)
    lost = (s - n * (i.step or 1) for s, n, i in zip(size, new, pixels, strict=True))
    trimmed = all(n < b for n, b in zip(lost, block, strict=True))
    return (pixels, after, new) if trimmed or table.block_of.get(new) == after else None


def _pixels(item, block, size, whole):
    """Return (index of the block, its new length, the image's) for a slice of pixels, or None."""
    if item == slice(None):
        return item, block, size
    if not isinstance(item, slice):
        return None
    start, stop, step = item.start or 0, item.stop, item.step or 1
    if start < 0 or step < 1 or start >= step or block % step:
        return None
    end = size if stop is None else min(stop + size if stop < 0 else stop, size)
    if end <= start or (end < size and step > 1):
        return None
    length = -(-(end - start) // step)
    if whole:
        return slice(start, end, step), block // step, length
    return slice(start, None, step), block // step, length


@handles("pixel_shuffle")
def pixel_shuffle(func, input, upscale_factor):
    """Turn channels into pixels: blocks grow."""
    if not is_image(input):
        return NotImplemented
    table, block, size, _, reach = T.facts(input)
    value = table.compute(func, T.value_of(input), upscale_factor)
    times = two(upscale_factor)
    block, size = (tuple(n * f for n, f in zip(v, times, strict=True)) for v in (block, size))
    table.block_of.setdefault(size, block)
    return T.StackTensor(value, table, block, size, (2, 3), reach)


@handles("pixel_unshuffle")
def pixel_unshuffle(func, input, downscale_factor):
    """Turn pixels into channels: blocks shrink."""
    if not is_image(input):
        return NotImplemented
    table, block, size, _, _ = T.facts(input)
    f = downscale_factor
    if any(n % f for n in (*block, *size)):
        return NotImplemented
    value = table.compute(func, T.value_of(input), f)
    block, size = (tuple(n // f for n in v) for v in (block, size))
    table.block_of.setdefault(size, block)
    return T.wrap(value, input, block=block, size=size)


@handles("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(func, input, groups):
    """Reorder channels."""
    if not is_image(input):
        return NotImplemented
    out = _moved(input, None, func, groups)
    aliases.own(out)["_views"] = None  # a new tensor, but for one group
    return out


@handles("new", "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")
def new(func, input, *args, **kwargs):
    """Make a tensor of the same dtype and device."""
    if T.first_stack(args, kwargs) is not None:
        return NotImplemented
    return func(torch.empty(0, dtype=input.dtype, device=input.device), *args, **kwargs)
