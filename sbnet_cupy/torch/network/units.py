"""Residual units by one kernel: convolutions that wait for each other, and nothing else reads."""

import weakref

import torch

from . import bottlenecks, casts, cuda
from . import tensor as T

_PATTERNS = (((1, 1), (3, 3), (1, 1)), ((3, 3), (3, 3)))
_BEHIND_NORM = (None, *_PATTERNS[0])  # a pre-activation unit
_CODES = {None: 0, "relu": 1, "silu": 2, "gelu": 3}  # as ACTIVATIONS of dense/activation.py


class Ahead:
    """The convolution ahead of one that waits, which waits too.

    ``plan`` is that of the StackTensor ``of``. What else is to read that one holds it, so that it
    is still there when the value is wanted; then it is computed once, for all who read it.
    """

    def __init__(self, plan, of):
        self.plan, self.of, self.dtype = plan, weakref.ref(of), plan.dtype
        plan.readers += 1

    @property
    def device(self):
        """The device of the result."""
        return self.plan.device

    @property
    def is_shared(self):
        """Whether anything else reads the result, or has read it."""
        return self.plan.done is not None or self.of() is not None

    def value(self):
        """Return the result by itself."""
        if self.plan.done is not None:
            return self.plan.done
        held = self.of()
        return self.plan.run() if held is None else T.value_of(held)


def may_lead(x, kernel, options):
    """Whether what ``x`` waits for may be part of one kernel with the convolution that reads it.

    That is another convolution, or the norm ahead of a pre-activation unit, which one alone reads.
    """
    plan = T.plan_of(x)
    if plan is None or plan.residual is not None or plan.activation not in _CODES:
        return False
    if plan.last is not None:
        return False
    if plan.dtype not in bottlenecks.ELEMENTS:
        return False
    if casts.after(plan.dtype, casts.dtype_for(plan)) != plan.dtype:
        return False
    if plan.facts[0].whole or not _is_plain(kernel, options):
        return False
    chain = _chain(plan, shared=True)  # who reads a value now may be gone when it is wanted
    kernels = (*(one.kernel for one in chain), kernel)
    if kernels not in [pattern[: len(kernels)] for pattern in (*_PATTERNS, _BEHIND_NORM)]:
        apart = kernel == (1, 1) and plan.norm is not None and _set_apart(x)
        return apart and may_lead(x, kernel, options)
    source = chain[0].source
    if not isinstance(source, torch.Tensor) or not cuda.serves(source):
        return False
    if plan.kernel is None:
        return plan.is_norm and not plan.readers and bottlenecks.may_begin(plan)
    return _is_plain(plan.kernel, plan.options)


def _set_apart(x):
    """Leave a norm to do where what waits, ``x``, was made of a value that is wanted, too.

    Return whether there is one: then that value was computed.
    """
    own = object.__getattribute__(x, "__dict__")
    for ref, steps in own["_made_of"]:
        ahead = ref()
        if ahead is not None and ahead is not x:
            left = own["_plan"].apart(ahead, steps)
            if left is not None:
                own["_plan"], own["_made_of"] = left, ()
            return left is not None
    return False


def _is_plain(kernel, options):
    """Whether a convolution has stride 1, one group and a border of zeros that keeps the size."""
    r, s = (k // 2 for k in kernel)
    return (
        tuple(options.get("pads", ())) == (r, r, s, s)  # one that is transposed has none
        and options["stride"] == options["dilation"] == (1, 1) and options["groups"] == 1
        and options["mode"] == "zeros" and options["fill"] == 0
    )  # fmt: skip


def _chain(plan, shared=False):
    """Return the plans of the convolutions ahead that wait for this one, alone or not, and this."""
    chain = [plan]
    while isinstance(chain[0].source, Ahead) and (shared or not chain[0].source.is_shared):
        chain.insert(0, chain[0].source.plan)
    return chain


def source_of(plan):
    """Return what the first of the convolutions that wait for this one reads, or this one."""
    return _chain(plan, shared=True)[0].source


def run(plan):
    """Compute a chain of convolutions by one kernel, or return None where there is none."""
    chain = _chain(plan)
    if chain[0].is_norm:
        y = bottlenecks.run(chain) if _kernels(chain) == _BEHIND_NORM else None
        if y is not None:
            return y
        chain = chain[1:]
    if _kernels(chain) not in _PATTERNS or plan.activation not in _CODES or plan.last is not None:
        return None
    x, residual = chain[0].source, plan.residual
    like = x.plan.source if isinstance(x, Ahead) and x.plan.is_norm else x
    if not isinstance(like, torch.Tensor):
        return None
    if residual is not None and residual.dtype != like.dtype:
        return None
    if len({one.activation for one in chain[:-1]}) > 1:
        return None
    table = chain[0].facts[0]
    weights = [table.weights.folded(one.weight, one.bias, one.norm, to=one.to) for one in chain]
    if any(w.dtype != like.dtype or cuda.records(w, b) for w, b in weights):
        return None
    if cuda.records(like, None if isinstance(residual, Ahead) else residual):
        return None
    return _launch(x, like, weights, residual, chain)


def _kernels(chain):
    return tuple(one.kernel for one in chain)


def _launch(x, like, weights, residual, chain):
    """Launch the kernel, or return None where each layer is to have its own.

    ``x`` may be a norm that waits, whose result is of the sizes of ``like``.
    """
    table, block, size, _, _ = chain[0].facts
    settled = table.settled and all(cuda._is_packed(*one) for one in weights)
    facts = (
        like.dtype, like.shape[0], table.batch, table.grid, block, size, like.shape[1],
        tuple(one.weight.shape[0] for one in chain), len(chain) == 3,
        _CODES[chain[0].activation], _CODES[chain[-1].activation], settled,
    )  # fmt: skip
    found = cuda.prepared(cuda._PLANS, ("unit", facts), like, prepare, *facts)
    if found is None:
        return None
    launch, packs = found
    x = x.value() if isinstance(x, Ahead) else x
    residual = residual.value() if isinstance(residual, Ahead) else residual
    out = cuda.new_stack(x, x.shape[0], x.shape[2:], chain[-1].weight.shape[0])
    packed = [cuda._packed(x, *one, pack) for one, pack in zip(weights, packs, strict=True)]
    packed += [None] * (3 - len(packed))
    lists = table.counts, table.indices, table.places
    given = cuda.last(x), *packed, cuda.last(residual), *lists, out
    cuda.start(launch, *given, order=table.order, out=out)
    table.settled = True
    return out


def prepare(
    dtype, rows, images, grid, block, image, channels, widths, bottleneck, inner, activation,
    settled,
):  # fmt: skip
    """Return (launch, packs) for the current device, or None where one kernel is no faster."""
    from ...block_sparse.stack import stack_launch, stack_unit, stack_unit_plan
    from ...core.device import current_device

    if len(set(widths[:-1])) > 1:
        return None
    unit = stack_unit_plan.StackUnit(
        element=bottlenecks.ELEMENTS[dtype], rows=rows, images=images, grid=grid, block=block,
        image=image, channels=channels, width=widths[0], channels_out=widths[-1],
        bottleneck=bottleneck, inner=inner, activation=activation, expected=rows,
    )  # fmt: skip
    device = current_device()
    if stack_unit_plan.missing_unit(unit, device) or not stack_unit_plan.worth_it(unit, device):
        return None
    packs = [stack_launch.prepare_stack_pack(layer, "OIHW") for layer in unit.layers()]
    return stack_unit.prepare_stack_unit(unit, settled, clear_rows=False), packs
