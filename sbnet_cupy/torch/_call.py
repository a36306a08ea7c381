"""From a public function to the kernel, or to PyTorch's dispatcher.

A plain call (see ``_dispatch_state.py``) is made here: its plan is looked up in the core's cache by
the shapes, dtypes, device and alignment of the tensors; the result comes from torch's allocator,
and the kernel is launched on torch's current stream. Every other call goes to the dispatcher, which
ends in :func:`run`, too.
"""

import functools

import numpy as np
import torch

from ..core.copy_image import COPY_IMAGE
from ..core.spec import ArraySpec
from ..core.workspace import workspace
from ..errors import DTypeError, ShapeError
from . import _dispatch_state as state
from ._native import check_contiguous, compute, describe, native_stream, to_tensor
from ._packed import forget_learning, known_fields, packed


def call(operation, tensors, options):
    """Return the result of an operation on tensors, with None for those that are not given.

    Tensors and options come in the order in which the operator of the core names them.
    """
    place = operation.place
    out = None if place is None else tensors[place]
    described = None
    if state.thread_is_plain():
        known = known_fields(tensors, operation.weights) if operation.weights else {}
        described = describe(tensors, state.is_plain, known)
    if described is None:
        operation.check(tensors)
        records = _needs_gradient(tensors)
    else:
        records = described.requires_grad and torch.is_grad_enabled()
    if records and out is not None:
        operation.check(tensors)
        y = call(operation, (*tensors[:place], None, *tensors[place + 1 :]), options)
        _check_out(out, y)
        return out.copy_(y)
    if described is None:
        return operation.dispatch(tensors, options)
    if records and operation.gradient is not None:
        return operation.recorded(options, described, *tensors)
    y = run(operation, tensors, options, described)
    if out is not None:
        torch.autograd.graph.increment_version(out)
    return y


def _needs_gradient(tensors):
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _check_out(out, y):
    """Raise unless ``out`` can receive a copy of the result ``y``."""
    if tuple(out.shape) != tuple(y.shape):
        raise ShapeError(f"out must have shape {tuple(y.shape)}, got {tuple(out.shape)}")
    if out.dtype != y.dtype:
        raise DTypeError(f"out must have dtype {y.dtype}, got {out.dtype}")
    check_contiguous("out", out)


def run(operation, tensors, options, described=None):
    """Compute a call on tensors with data; gradients are not its concern."""
    if tensors[0] is None:
        operation.check(tensors)
    device = tensors[0].get_device()
    if device >= 0 and device != state.current_device():
        with torch.cuda.device(device):
            return run(operation, tensors, options, described)
    if operation.tells_in_place:
        options = (*options, _is_in_place(operation, tensors))
    fields, gaps, learns = described or describe(tensors)
    if learns and operation.packs:
        forget_learning([tensors[i] for i in operation.packs])
    plan = operation.operator.find(fields, options)
    if plan is None:
        operation.check(tensors)
        specs = [f and ArraySpec(tuple(f[0]), *f[1:]) for f in describe(tensors).fields]
        plan = operation.operator.plan_of(specs, options)
    if gaps:
        tensors = _without_gaps(operation, plan, tensors)
    if operation.place is None:
        return _list_blocks(plan, *tensors, options[-1])
    return _compute(operation, plan, tensors)


def _is_in_place(operation, tensors):
    """Whether the result comes to lie where the first tensor is."""
    x, out = tensors[0], tensors[operation.place]
    return out is not None and _is_same_memory(out, x)


def _is_same_memory(a, b):
    return a is b or (a.data_ptr() == b.data_ptr() and (a.shape, a.dtype) == (b.shape, b.dtype))


def _without_gaps(operation, plan, tensors):
    """Return the tensors with those that are not contiguous copied; weights that are packed stay.

    Those are known by their identity, and copied when they are packed.
    """
    if operation.place is not None and tensors[operation.place] is not None:
        check_contiguous("out", tensors[operation.place])
    packed_ones = getattr(plan, "weights", ())
    return tuple(
        t if t is None or number in packed_ones else t.contiguous()
        for number, t in enumerate(tensors)
    )


def _compute(operation, plan, tensors):
    """Compute a call that has one result; return it."""
    out = tensors[operation.place]
    if out is not None:
        _check_apart(operation, plan, tensors, out)
    if plan.launch is not None:
        return _launch(plan, tensors, operation.place)
    if out is None:
        out = tensors[0].new_empty(plan.shape)
    given = list(tensors)
    given[operation.place] = out
    compute(plan.run, given)
    return out


def _check_apart(operation, plan, tensors, out):
    """Raise if ``out`` shares memory with a tensor, but for the one below the result."""
    start, bases = out.data_ptr(), plan.base or ()
    end = start + out.nbytes
    for number, t in enumerate(tensors):
        if t is None or number == operation.place or not t.nbytes:
            continue
        low = t.data_ptr()
        shares = low < end and start < low + t.nbytes
        if shares and not (number in bases and _is_same_memory(out, t)):
            name = operation.names[number].partition(".")[0]
            raise ShapeError(f"out must not share memory with {name}; pass a separate array")


def _launch(plan, tensors, place):
    """Launch the kernel of a call on torch's current stream; return the result."""
    stream = state.current_stream(tensors[0].get_device())
    given = [*tensors, None]
    if plan.base is not None:
        given[place] = _started(plan, tensors, tensors[place], stream)
    elif tensors[place] is None:
        given[place] = tensors[0].new_empty(plan.shape)
    addresses = []
    for position in plan.operands:
        t = None if position is None else given[position]
        if t is not None:
            addresses.append(t.data_ptr())
        elif position == len(tensors):
            weights = packed(plan, [tensors[number] for number in plan.weights], stream)
            is_tensor = isinstance(weights, torch.Tensor)
            addresses.append(weights.data_ptr() if is_tensor else weights.data.ptr)
        else:
            addresses.append(0)
    plan.launch.on(stream, addresses)
    return given[place]


def _started(plan, tensors, out, stream):
    """Return what receives the result, with what the kernel leaves as it is: a tensor, or zeros."""
    for position in plan.base:
        if tensors[position] is not None:
            if out is None:
                out = tensors[0].new_empty(plan.shape)
            _copy(tensors[position], out, stream)
            return out
    return tensors[0].new_zeros(plan.shape) if out is None else out.zero_()


def _copy(source, out, stream):
    """Copy contiguous memory, as ``copy_image`` does; nothing if it is the same."""
    addresses = source.data_ptr(), out.data_ptr()
    if addresses[0] == addresses[1]:
        return
    fields = (source.nbytes,), _BYTE, out.get_device(), None, (addresses[0] | addresses[1]) & 15
    plan = COPY_IMAGE.find((fields, fields), ())
    if plan is None:
        plan = COPY_IMAGE.plan_of((ArraySpec(*fields),) * 2, ())
    launch = plan.launch
    if launch is None:
        out.copy_(source)
    else:
        launch.on(stream, addresses)


_BYTE = np.dtype(np.uint8)


def _list_blocks(plan, mask, capacity):
    """Return the count and the list of active blocks. Without a capacity this waits for the count.

    On a CPU the core allocates both.
    """
    if plan.launch is None:
        return tuple(map(to_tensor, compute(plan.run, (mask,))))
    device = mask.get_device()
    counts = mask.new_empty((1,), dtype=torch.int32)
    indices = mask.new_empty(plan.results[1].shape, dtype=torch.int32)
    scratch = counts.data_ptr()
    if plan.workspace:
        with native_stream(device):
            scratch = workspace(_cupy(), plan.workspace).data.ptr
    addresses = (mask.data_ptr(), counts.data_ptr(), indices.data_ptr(), scratch)
    plan.launch.on(state.current_stream(device), addresses)
    return counts, indices if capacity is not None else indices[: int(counts)]


@functools.cache
def _cupy():
    import cupy

    return cupy
