"""The ends of a network: what a call must be, and the image that its result becomes."""

import copy
import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, ItemsView, Iterator, MappingView, ValuesView
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch.nn import functional as F

from ...errors import DeviceError, DTypeError, ShapeError
from .._native import no_tensor
from . import cuda_ends
from . import tensor as T
from .aliases import note_rest, own
from .image_values import plainly
from .left import is_zero, why_not_filled
from .piles import as_images
from .state import KEPT_DICTS
from .trees import tree_leaves, tree_map


class End(NamedTuple):
    """What is known of a StackTensor that a network returned."""

    block: tuple
    size: tuple
    hw: tuple
    border: tuple | None  # the padding that was put off
    rest: Callable | None  # what it holds where the input is 0, if that is known
    made_by: str | None  # the last function but for activations


def end_of(out):
    """Return the End of a StackTensor, None of others."""
    if not isinstance(out, T.StackTensor):
        return None
    _, block, size, hw, _ = T.facts(out)
    T.value_of(out)  # what was put off knows what it holds once it has run
    return End(block, size, hw, T.border_of(out), rest_of(out), own(out).get("_made_by"))


def finished_tree(result, outside, table, model):
    """Return what a network gave with images in place of activations, also in objects."""
    if not is_zero(outside):
        tensors = [leaf for part in tree_leaves(result) for leaf in tensors_in(part)]
        off = [leaf.shape for leaf in tensors if not isinstance(leaf, T.StackTensor)]
        check_filled(off, len(off) < len(tensors), table.left, model, outside)
    return _finished_tree(result, outside, {})


def check_filled(off, any_on, functions, model, outside):
    """Raise where results have left the stack, and something is wanted outside active blocks.

    ``off`` are their shapes, ``functions`` those by which they left. Where others, which have it,
    are on the stack, warn.
    """
    why = why_not_filled(off, functions, model, outside)
    if why is not None and not any_on:
        raise ValueError(why)
    if why is not None:
        warn(why)


def _finished_tree(result, outside, copies):
    return tree_map(lambda leaf: _finished_leaf(leaf, outside, copies), result)


def _finished_leaf(leaf, outside, copies):
    """Return a tensor as an image; or a copy of an object of which parts are images, as it is.

    ``copies`` are the objects that were copied before, with their copies, by their ids: an object
    may refer to itself.
    """
    if isinstance(leaf, torch.Tensor):
        return finished(as_images(plainly(leaf)), outside)
    if isinstance(leaf, Iterator) and not hasattr(leaf, "__dict__"):  # files have attributes
        kind = type(leaf).__name__
        raise TypeError(
            f"the network of sparsify must not return an iterator, got a {kind}, which would give "
            "activations after the call; return a list"
        )
    if id(leaf) in copies:
        return copies[id(leaf)][1]
    if not holds_activations(leaf):
        return leaf
    show = functools.partial(_finished_tree, outside=outside, copies=copies)
    if isinstance(leaf, MappingView):
        return _finished_view(leaf, show)
    if isinstance(leaf, MappingProxyType):
        return MappingProxyType({key: show(value) for key, value in leaf.items()})
    if isinstance(leaf, (tuple, set, frozenset)):
        return type(leaf)(map(show, leaf))
    other = _copy_of(leaf)
    copies[id(leaf)] = leaf, other
    for name in _names(leaf):
        object.__setattr__(other, name, show(getattr(leaf, name)))
    if isinstance(leaf, dict):
        other.update((key, show(value)) for key, value in leaf.items())
    elif isinstance(leaf, list):
        other[:] = map(show, leaf)
    return other


def _copy_of(leaf):
    """Return a copy of an object of which parts are to become images."""
    try:
        return copy.copy(leaf)
    except Exception as error:
        kind = type(leaf).__name__
        raise TypeError(
            f"the network of sparsify must return objects that can be copied, got a {kind} with "
            f"activations, of which copy.copy raised {error!r}; give {kind} a method __copy__, or "
            "return a list"
        ) from error


def _finished_view(view, show):
    """Return the keys, values or items of a dict of images."""
    parts = list(map(show, view))
    if isinstance(view, ValuesView):
        return dict(enumerate(parts)).values()
    return dict(parts).items() if isinstance(view, ItemsView) else dict.fromkeys(parts).keys()


def holds_activations(value):
    """Whether an object, or what it holds, is an activation."""
    return any(isinstance(tensor, T.StackTensor) for tensor in tensors_in(value))


def tensors_in(value, seen=()):
    """Give the tensors of a result, also those in objects."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, (torch.nn.Module, type)) or inspect.isroutine(value) or id(value) in seen:
        return
    inner = [getattr(value, name) for name in _names(value)]
    if isinstance(value, (dict, MappingProxyType)):
        inner += value.values()
    elif isinstance(value, (list, tuple, set, frozenset, MappingView)):
        inner += value
    for part in inner:
        yield from tensors_in(part, (*seen, id(value)))


def _names(value):
    """Return the names of an object's attributes, also of those in slots."""
    state = object.__getstate__(value)  # a dict of attributes, or a pair: of those in slots, too
    parts = state if isinstance(state, tuple) else (state,)
    return [name for names in parts for name in names or ()]


def finished(out, outside):
    """Return what a network gave as an image, with what is wanted outside active blocks."""
    end = end_of(out)
    if end is None:
        return out
    table, (block, size, hw, *_) = T.facts(out)[0], end
    if not table.whole and not end.border:
        if isinstance(outside, torch.Tensor):
            _check_image(outside, T.shape(out), table.device)
        wanted = resting(end) if isinstance(outside, str) else outside
        image = cuda_ends.scatter(T.value_of(out), table, block, size, hw, wanted)
        if image is not None:
            return image
    return shown(T.dense(out), table, end, outside)


def shown(image, table, end, outside):
    """Return an image with what is wanted outside active blocks; one with no end as it is."""
    if end is None:
        return image
    if isinstance(outside, str):
        outside = resting(end).to(image.dtype)
        if table.tape is not None:
            table.tape.keep_rest(outside)
    elif isinstance(outside, torch.Tensor):
        _check_image(outside, image.shape, image.device)
        if image.is_floating_point() and outside.is_floating_point():
            outside = table.compute(torch.Tensor.to, outside, image.dtype)
    elif outside == 0:
        return image
    return table.compute(_filled, image, table, *end[:4], outside)


def _filled(image, table, block, size, hw, border, outside):
    active = table.active_map(block, size)
    if border:  # which is in no block
        top, bottom, left, right, *_ = border
        active = F.pad(active, (left, right, top, bottom), value=True)
    shape = [table.batch] + [1] * (image.dim() - 1)
    shape[hw[0]], shape[hw[1]] = active.shape[1:]
    return torch.where(active.view(shape), image, outside)


def resting(end):
    """Return what a convolution's result holds where its input is 0: its bias, as an image."""
    if end.rest is None:
        raise ValueError(
            "outside='bias' needs a network that returns the result of a convolution, with no more "
            "than a batch norm in evaluation, an activation, a softmax of the channels or an "
            "interpolation after it, and nothing written to it, got what "
            f"{end.made_by or 'another function'} made; give a number, or a tensor like the result"
        )
    return end.rest()[:, None, None]


def rest_of(x):
    """Return the function that makes what :func:`resting` shows, or None."""
    return own(x).get("_rest")


def with_rest(x, rest):
    """Note what a result holds where its input is 0."""
    return note_rest(x, T.facts(x)[0], rest)


def _check_image(outside, shape, device):
    """Raise if an image of what is wanted outside is not like the result."""
    if outside.shape != shape:
        raise ShapeError(
            f"outside must have the shape of the result, {tuple(shape)}, got {tuple(outside.shape)}"
        )
    if outside.device != device:
        raise DeviceError(
            f"outside must be on the device of the result, {device}, got {outside.device}; use "
            f".to({str(device)!r})"
        )


def check_call(x, mask):
    """Return the mask as bool ``[N, H, W]``, or raise what is wrong with the call."""
    check_image(x)
    n, _, h, w = x.shape
    if mask is None:
        raise DTypeError(
            "mask must be a torch.Tensor, got None; to compute everything use "
            f"torch.ones({n}, {h}, {w})"
        )
    check_tensor("mask", mask)
    if tuple(mask.shape) not in ((n, h, w), (n, 1, h, w)):
        raise ShapeError(
            f"mask must have shape ({n}, {h}, {w}) or ({n}, 1, {h}, {w}), the size of x, got "
            f"{tuple(mask.shape)}{_hint(x, mask)}"
        )
    if mask.device != x.device:
        raise DeviceError(f"mask must be on the device of x, {x.device}, got {mask.device}")
    return as_bool("mask", mask).reshape(n, h, w)


def _hint(x, mask):
    """Return what an error adds where channels of x are last, or a mask has no batch."""
    size = tuple(mask.shape[1:] if mask.dim() == 3 else mask.shape[2:])
    if size == tuple(x.shape[1:3]):
        return "; x is (N, C, H, W): use x.permute(0, 3, 1, 2) where its channels are last"
    return "; use mask[None]" if (1, *mask.shape) == (len(x), *x.shape[2:]) else ""


def as_bool(name, mask):
    """Return where a mask is set, True or over 0, or raise."""
    if mask.dtype == torch.bool:
        return mask
    if mask.dtype in _UNSIGNED:
        return mask.to(torch.bool)
    if mask.dtype not in _COMPARED:
        raise DTypeError(
            f"{name} must be of bool, of integers of 8 bits or more or of real numbers of 16 bits "
            f"or more, got {mask.dtype}; convert it"
        )
    return mask > 0


_UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}  # PyTorch converts them, and compares none
_COMPARED = {
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64,
}  # fmt: skip


def check_image(x):
    """Raise unless a network can be called with it."""
    check_tensor("x", x)
    if isinstance(x, T.StackTensor):
        raise TypeError(
            "x must be an image, got an activation of a sparsified network; a network in which one "
            "part is sparsified already must be called with images there"
        )
    if x.dim() != 4 or min(x.shape[2:]) < 1:
        raise ShapeError(
            f"x must have shape (N, C, H, W) with a pixel at least, got {tuple(x.shape)}"
        )
    if not x.is_floating_point():
        parts = "torch.cat([x.real, x.imag], 1), for a network of twice as many channels"
        instead = parts if x.is_complex() else "x.float()"
        raise DTypeError(f"x must be of floating point, got {x.dtype}; use {instead}")
    if x.is_meta:
        raise DeviceError(
            "x must be on a device with memory, got one on meta, where a mask says nothing; trace "
            "a sparsified network by torch.export, on a CPU and with a capacity"
        )


def check_tensor(name, value):
    """Raise unless an argument is a dense tensor."""
    if not isinstance(value, torch.Tensor):
        raise no_tensor(name, value)
    if value.is_nested:
        raise DTypeError(
            f"{name} must be dense, got a nested tensor; use {name}.to_padded_tensor(0), or call "
            "the network for each of its images"
        )
    if value.layout != torch.strided:
        raise DTypeError(f"{name} must be dense, got {value.layout}; use {name}.to_dense()")


def check_device(model, x):
    """Raise unless the parameters and buffers of a network are on the device of x."""
    if _is_on(model, x.device):  # which is asked in each call
        return
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device != x.device:
            raise DeviceError(
                f"the network must be on the device of x, {x.device}, got {name} on "
                f"{tensor.device}; use .to({str(x.device)!r})"
            )


def _is_on(model, device):
    """Whether a network is on a device; no where modules keep their tensors elsewhere.

    It takes half the time of ``parameters`` and ``buffers``, some 0.7 us for each module.
    """
    modules, seen = [model], set()
    for module in modules:
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        try:
            own, buffers, inner = map(vars(module).__getitem__, KEPT_DICTS)
        except KeyError:  # of TorchScript
            return False
        for tensors in (own, buffers):
            for tensor in tensors.values():
                if tensor is not None and tensor.device != device:
                    return False
        modules += inner.values()
    return True


def warn_left_out(count, capacity):
    """Warn of blocks that there was no room for, where the host knows their number."""
    if isinstance(count, int) and count > capacity:
        warn(
            f"{count} blocks are active, and capacity has room for {capacity}: the result lacks "
            "the others"
        )


def warn(message):
    """Give a RuntimeWarning of the line that called, outside of this package and PyTorch."""
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level)


# Folders whose code stands between a line that calls a network and the network.
_INSIDE = (
    f"{Path(__file__).parents[2]}{os.sep}",
    f"{Path(torch.__file__).parent}{os.sep}",
)
