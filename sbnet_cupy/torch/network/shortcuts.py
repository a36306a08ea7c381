"""Projection shortcuts: the 1x1 convolution that a sum adds, in the kernel of the one before it."""

import torch

from . import cuda, joins, units
from . import tensor as T


def waiting(plan, other):
    """Return the 1x1 convolution ``other`` waits for, which may be computed with ``plan``; or None.

    It is a :class:`~.units.Ahead`: something else may read it still.
    """
    shortcut = T.plan_of(other)
    if shortcut is None or not (_is_plain(plan) and _is_plain(shortcut)):
        return None
    source, dtype = shortcut.source, plan.dtype
    if shortcut.kernel != (1, 1) or any(shortcut.options["pads"]) or plan.facts[0].whole:
        return None
    if not isinstance(source, torch.Tensor) or not cuda.serves(source):
        return None
    if not dtype == shortcut.dtype == source.dtype or plan.to != shortcut.to:
        return None
    return units.Ahead(shortcut, other)


def _is_plain(plan):
    """Whether it is a convolution alone, with a border of zeros."""
    options = plan.options or {}
    return (
        "pads" in options  # a transposed one has none
        and plan.residual is None and plan.activation is None
        and options["groups"] == 1 and options["mode"] == "zeros" and options["fill"] == 0
    )  # fmt: skip


def run(plan, x, weight, bias):
    """Compute a convolution of ``x`` and its shortcut by one kernel, or return None."""
    shortcut, (table, block, size, _, _) = plan.residual.plan, plan.facts
    if plan.residual.is_shared or cuda.code_of(plan.activation) is None or plan.last is not None:
        return None
    if not isinstance(x, torch.Tensor) or x.dtype != plan.dtype or not cuda.serves(x):
        return None
    also = shortcut.source
    weights = (weight, bias), shortcut._folded(table.weights)
    if any(w.dtype != x.dtype or cuda.records(w, b) for w, b in weights):
        return None
    blocks = tuple(b // s for b, s in zip(block, plan.options["stride"], strict=True))
    y = joins.place(x, table, blocks, weight.shape[0])
    parts = tuple(map(cuda.part_pitch, (x, also, y)))
    facts = (
        x.dtype, x.shape[0], table.batch, table.grid, block, size, x.shape[1], weight.shape[0],
        plan.kernel, *(plan.options[name] for name in ("stride", "pads", "dilation")),
        also.shape[1], shortcut.options["stride"], cuda.code_of(plan.activation), parts,
    )  # fmt: skip
    settled = table.settled and all(cuda._is_packed(*one) for one in weights)
    facts += settled, cuda._clears(table)
    found = cuda.prepared(cuda._PLANS, ("shortcut", facts), x, prepare, *facts)
    if found is None:
        joins.take_back(y, table)
        return None
    launch, packs = found
    first, second = (
        cuda._packed(x, *one, pack) for one, pack in zip(weights, packs, strict=True)
    )
    lists = table.counts, table.indices, table.places
    x, also = (t if part else cuda.last(t) for t, part in zip((x, also), parts, strict=False))
    cuda.start(launch, x, first, also, second, *lists, y, order=table.order, out=y)
    table.settled = True
    return y


def prepare(
    dtype, rows, images, grid, block, image, channels, channels_out, kernel, strides, pads,
    dilation, channels_also, strides_also, activation, parts, settled, clear_rows,
):  # fmt: skip
    """Return (launch, packs) for the current device, or None where two kernels are faster."""
    from ...block_sparse.stack import stack_launch
    from ...block_sparse.stack.stack_conv_plan import (
        Shortcut,
        StackConv,
        missing_kernel,
        plan_cost,
        plan_stack_conv,
    )
    from ...core.device import current_device

    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    totals = (pads[0] + pads[1], pads[2] + pads[3])
    image_out = tuple(
        (n + p - span) // s + 1 for n, p, span, s in zip(image, totals, spans, strides, strict=True)
    )
    block_out = tuple(b // s for b, s in zip(block, strides, strict=True))
    itemsize, (part_of, also_part_of, out_part_of) = dtype.itemsize, parts
    both = StackConv(
        element=cuda._ELEMENTS[dtype], rows=rows, images=images, grid=grid, block=block,
        block_out=block_out, image=image, image_out=image_out, channels=channels,
        channels_out=channels_out, kernel=kernel, strides=strides, dilation=dilation,
        pads=(pads[0], pads[2]), activation=activation, vectors_in=channels * itemsize % 16 == 0,
        vectors_out=channels_out * itemsize % 16 == 0, expected=rows,
        shortcut=Shortcut(channels_also, strides_also, also_part_of), part_of=part_of,
        out_part_of=out_part_of,
    )  # fmt: skip
    device = current_device()
    if missing_kernel(both, device) is not None:
        return None
    apart = (
        both._replace(shortcut=None, residual=True),
        both._replace(
            shortcut=None, channels=channels_also, kernel=(1, 1), strides=strides_also,
            dilation=(1, 1), pads=(0, 0), activation=0,
            block=tuple(b * s for b, s in zip(block_out, strides_also, strict=True)),
        ),
    )  # fmt: skip
    if any(missing_kernel(conv, device) is not None for conv in apart):
        return None
    costs = [plan_cost(plan_stack_conv(conv, device), conv, device) for conv in (both, *apart)]
    if costs[0] >= sum(costs[1:]):
        return None
    packs = [stack_launch.prepare_stack_pack(conv, "OIHW") for conv in apart]
    return stack_launch.prepare_stack_conv(both, settled, clear_rows), packs
