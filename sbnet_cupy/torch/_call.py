"""From a public function to the kernel, or to PyTorch's dispatcher.

A plain call (see ``_dispatch_state.py``) is made here: its plan is looked up in the core's cache by
the shapes, dtypes, device and alignment of the tensors; the result comes from torch's allocator,
and the kernel is launched on torch's current stream. PyTorch compares tensors with those of calls
before in less time than it takes to describe them, so the plans of a few such calls are kept with
what compares them. Every other call goes to the dispatcher, which ends in :func:`run`, too.

Weights that a kernel reads packed are packed at each call, by a kernel in front of it: no public or
private name of PyTorch shows every change of a tensor, and fused optimizers leave no trace. Those
of a ``PackedWeights`` or ``PackedBottleneck`` are packed once.
"""

import contextlib
import functools
import itertools
import operator

import torch

from ..core.arrays import address
from ..core.checks import check_contiguous, check_result
from ..core.packed import PackedPlan
from ..core.spec import SpecGroup
from ..core.torch_memory import to_tensor
from ..core.workspace import workspace
from ..dense.packed_weights import PackedWeights
from ..errors import ShapeError
from . import _dispatch_state as state
from ._native import DTYPES, Description, compute, describe, native_stream, spec_of

_MOST = 8  # calls that are known of the same options and shapes


def call(operation, tensors, options, packed=None):
    """Return the result of an operation on tensors, with None for those that are not given.

    Tensors and options come in the order in which the operator of the core names them. ``packed``
    is what :func:`native_weights` made of weights that are packed once; tensors have them, too.
    """
    place = operation.place
    out = None if place is None else tensors[place]
    described = None
    if state.thread_is_plain():
        given = tensors if packed is None else operation.described(tensors, packed)
        described = _describe_plain(operation, given, options, out, packed)
    records = torch.is_grad_enabled() and (described is None or described.requires_grad)
    copies = out is not None and (records or described is None)
    if copies or described is None:
        operation.check(tensors)
    if copies:
        y = call(operation, (*tensors[:place], None, *tensors[place + 1 :]), options, packed)
        check_result(spec_of(out, gaps=True), spec_of(y))
        return out.copy_(y)
    if described is None:
        return operation.dispatch(tensors, options)
    if records and operation.recorded is not None:
        return operation.recorded(options, described, *tensors)
    y = run(operation, tensors, options, described)
    if out is not None:
        torch.autograd.graph.increment_version(out)
    return y


def _describe_plain(operation, given, options, out, packed):
    """Describe tensors, or the specs of packed weights; return None if one is not plain.

    Of tensors like those of a call before, with the same options, only the addresses are looked at.
    """
    in_place = (False,) if operation.tells_in_place else ()
    tensors, key, calls = [t for t in given if not (t is None or type(t) is SpecGroup)], None, ()
    # Where the result may be in place, memory that is shared makes a difference.
    if not (in_place and out is not None) and state.may_match(tensors):
        key = [t if t is None or type(t) is SpecGroup else t.shape for t in given]
        calls = operation.operator.calls(key, options)
    for matches, places, known in calls:
        if matches(*tensors):
            addresses = [t.data_ptr() for t in tensors]
            if functools.reduce(operator.or_, addresses) & 15:
                break
            addresses.append(0)
            addresses = [addresses[i] for i in places]
            return Description(
                known.fields, addresses, False, known.requires_grad, packed, known.plan
            )
    described = describe(given, state.is_plain, packed)
    if described is None or described.gaps or key is None or len(calls) == _MOST:
        return described
    plan = operation.operator.find(described.fields, (*options, *in_place))
    if plan is None:
        return described
    described = described._replace(plan=plan)
    matches = state.matcher(tensors)
    if not any(a & 15 for a in described.addresses) and matches(*tensors):
        flat = [a for t in given for a in (t.specs if type(t) is SpecGroup else (t,))]
        numbers = itertools.count()
        places = [next(numbers) if isinstance(t, torch.Tensor) else -1 for t in flat]
        known = matches, places, described._replace(packed=None)
        operation.operator.calls(key, options, make=True).append(known)
    return described


def run(operation, tensors, options, described=None):
    """Compute a call on tensors with data; gradients are not its concern."""
    if tensors[0] is None:
        operation.check(tensors)
    device = tensors[0].get_device()
    if device >= 0 and device != state.current_device():
        with torch.cuda.device(device):
            return run(operation, tensors, options, described)
    place = operation.place
    out = None if place is None else tensors[place]
    if operation.tells_in_place:
        options = (*options, out is not None and _is_same_memory(out, tensors[0]))
    fields, addresses, gaps, learns, packed, plan = described or describe(tensors)
    plan = plan or operation.operator.near(fields, options)
    if plan is None:
        operation.check(tensors)
        fields = describe(operation.described(tensors, packed)).fields  # dtypes are known by now
        specs = [(tuple(f[0]), *f[1:]) if type(f) is tuple else f for f in fields]
        plan = operation.operator.plan_of(specs, options)
    if gaps:
        if out is not None:
            check_contiguous("out", spec_of(out, gaps=True))
        tensors = [t if t is None else t.contiguous() for t in tensors]
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
    if place is None:
        return _list_blocks(plan, *tensors, options[-1])
    if out is not None:
        _check_apart(operation, plan, tensors, addresses)
    if plan.launch is not None:
        owner, more = (None, ()) if operation.derived is None else operation.derived(plan, tensors)
        y = _launch(plan, tensors, addresses, place, packed, more)
        if packed is not None and operation.keep is not None and not learns:
            operation.keep(plan, tensors, options, packed, owner)
        del owner  # whose memory may be used again only after the launch
        return y
    given, body = list(tensors), plan.run
    if device < 0 and operation.on_cpu is not None:
        body = operation.on_cpu(tensors[0].dtype, options) or body
    if isinstance(packed, PackedWeights):
        body = _with_weights(body, operation.operator.arrays, packed)
    if out is None:
        given[place] = tensors[0].new_empty(plan.shape)
    with operation.around() if device < 0 else contextlib.nullcontext():
        compute(body, given)
    return given[place]


def _with_weights(body, names, packed):
    """Return a body that computes with the values that weights had when they were packed."""
    places = [names.index(name) for name in ("w", "scale", "bias")]

    def run(*arrays):
        given = dict(zip(places, packed.copied(), strict=True))
        return body(*(given.get(place, array) for place, array in enumerate(arrays)))

    return run


def _is_same_memory(a, b):
    return a is b or (a.data_ptr() == b.data_ptr() and (a.shape, a.dtype) == (b.shape, b.dtype))


def _check_apart(operation, plan, tensors, addresses):
    """Raise if ``out`` shares memory with a tensor, but for the one below the result."""
    out, start, bases = tensors[operation.place], addresses[operation.place], plan.base or ()
    for number, (t, low) in enumerate(zip(tensors, addresses, strict=True)):
        if t is None or number == operation.place or not t.nbytes:
            continue
        shares = low < start + out.nbytes and start < low + t.nbytes
        if shares and not (number in bases and _is_same_memory(out, t)):
            name = operation.names[number].partition(".")[0]
            raise ShapeError(f"out must not share memory with {name}; pass a separate array")


def _launch(plan, tensors, addresses, place, packed, more):
    """Launch the kernel of a call on torch's current stream; return the result.

    ``more`` are the addresses of operands that follow the packed weights.
    """
    stream, out = state.current_stream(tensors[0].get_device()), tensors[place]
    packs = packed is None and isinstance(plan, PackedPlan)
    below = None  # what the kernel that packs writes to the result: 0 for zeros
    if plan.base is not None:
        at = next((i for i in plan.base if addresses[i]), None)
        if packs and plan.background and (at is None or addresses[at] != addresses[place]):
            below = 0 if at is None else addresses[at]
        else:
            out = _started(plan, None if at is None else tensors[at], tensors, out)
    if out is None:
        out = tensors[0].new_empty_strided(plan.shape, plan.strides)  # sooner than new_empty
    addresses = [*addresses, 0]  # the last is that of packed weights, or scratch
    addresses[place], launch = out.data_ptr(), plan.launch
    if packs:
        background = (0, 0) if plan.pack.background else ()
        if below is not None:
            background = below, addresses[place]
        weights = _packed(plan, tensors, addresses, stream, background)
        addresses[-1], launch = weights.data_ptr(), plan.early_launch or launch
    elif packed is not None:
        weights = packed.kept(plan.how)
        if weights is None:  # the first call of its form packs
            weights = compute(lambda _: packed.packed(plan.how, plan.pack), tensors[:1])
        addresses[-1] = address(weights)
    elif plan.scratch:
        scratch = tensors[0].new_empty_strided((plan.scratch,), (1,), dtype=torch.uint8)
        addresses[-1] = scratch.data_ptr()
    addresses += more
    launch.on(stream, [0 if i is None else addresses[i] for i in plan.operands])
    return out


def _packed(plan, tensors, addresses, stream, background):
    """Pack the weights of a call; tables are converted unless the kernel reads them as they are."""
    pack = plan.pack
    memory = tensors[0].new_empty_strided((pack.nbytes,), (1,), dtype=torch.uint8)
    read = [addresses[i] for i in plan.weights]
    kept = []  # until the kernel is launched
    for number, i in enumerate(plan.weights[pack.kernels :], pack.kernels):
        if tensors[i] is not None and DTYPES[tensors[i].dtype] != pack.dtype:
            kept.append(tensors[i].float())
            read[number] = kept[-1].data_ptr()
    pack.launch.on(stream, (*read, memory.data_ptr(), *background))
    return memory


def _started(plan, base, tensors, out):
    """Return what receives the result, with what the kernel leaves as it is: a tensor, or zeros."""
    if base is None:
        return tensors[0].new_zeros(plan.shape) if out is None else out.zero_()
    out = base.new_empty(plan.shape) if out is None else out
    return out if out.data_ptr() == base.data_ptr() else out.copy_(base)


def _list_blocks(plan, mask, capacity):
    """Return the count and the list of active blocks. Without a capacity this waits for the count.

    Without a kernel, on a CPU or for a grid of no blocks, the core allocates both.
    """
    if plan.launch is None:
        return tuple(map(to_tensor, compute(plan.run, (mask,))))
    device = mask.get_device()
    counts, indices = (mask.new_empty(r.shape, dtype=torch.int32) for r in plan.results)
    scratch = counts.data_ptr()
    if plan.workspace:
        import cupy

        with native_stream(device):
            scratch = workspace(cupy, plan.workspace).data.ptr
    addresses = (mask.data_ptr(), counts.data_ptr(), indices.data_ptr(), scratch)
    plan.launch.on(state.current_stream(device), addresses)
    return counts, indices if capacity is not None else indices[: int(counts)]
