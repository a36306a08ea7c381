"""Pre-activation units by one kernel: a norm and three convolutions that wait for each other."""

import torch

from . import casts, cuda

ELEMENTS = {torch.float16: "Half", torch.bfloat16: "BFloat16"}
_KEPT = "_stack_bottleneck"  # what is packed, by its form, beside weights that are kept


def may_begin(norm):
    """Whether a norm of its own, and the relu after it, may be part of one kernel with a unit."""
    return (
        norm.activation == "relu"
        and norm.residual is None
        and isinstance(norm.norm[2], torch.nn.Parameter)
        and norm.facts[0].weights is not None
        and norm.facts[0].weights.keeps
    )


def run(chain):
    """Compute a norm and three convolutions by one kernel, or return None where there is none.

    What is added to the last must be what the norm reads.
    """
    norm, *layers = chain
    x, (table, block, size, _, _) = norm.source, norm.facts
    last = layers[-1]
    if last.residual is not x or last.activation or last.norm or last.bias is not None:
        return None
    if any(one.activation != "relu" or one.norm is None for one in layers[:2]):
        return None
    if norm.activation != "relu" or x.dtype not in ELEMENTS:
        return None
    kernels = [one.weight for one in layers]
    dtypes = {casts.after(one.weight.dtype, one.to) for one in layers}
    if dtypes != {x.dtype} or cuda.records(x, *kernels):
        return None
    if kernels[0].shape[0] != kernels[1].shape[0] or kernels[2].shape[0] != x.shape[1]:
        return None
    weights = None
    for settled in (True, False) if table.settled else (False,):
        facts = (
            x.dtype, x.shape[0], table.batch, table.grid, block, size, x.shape[1],
            kernels[0].shape[0], settled,
        )  # fmt: skip
        found = cuda.prepared(cuda._PLANS, ("bottleneck", facts), x, prepare, *facts)
        if found is None:
            return None
        launch, pack, form = found
        weights = weights or table.weights.unit(norm.norm, layers)
        if settled and form in getattr(weights[0], _KEPT, {}):
            break
    out = cuda.new_stack(x, x.shape[0], block, x.shape[1])
    packed = _packed(x, weights, pack, form)
    lists = table.counts, table.indices, table.places
    cuda.start(launch, cuda.last(x), packed, *lists, out, order=table.order, out=out)
    table.settled = True
    return out


def _packed(x, weights, pack, form):
    """Return the weights of a unit as the kernel reads them, kept beside the first if that is."""
    found = getattr(weights[0], _KEPT, {})
    if form not in found:
        found = found | {form: cuda.pack_now(x, pack, *weights)}
        if getattr(weights[0], "is_kept", False):
            cuda.keep_packed(weights[0], _KEPT, found)
    return found[form]


def prepare(dtype, rows, images, grid, block, image, channels, width, settled):
    """Return (launch, pack, form of what is packed), or None where one kernel is no faster."""
    from ...block_sparse.stack import stack_bottleneck, stack_bottleneck_plan
    from ...core.device import current_device

    unit = stack_bottleneck_plan.StackBottleneck(
        element=ELEMENTS[dtype], rows=rows, images=images, grid=grid, block=block, image=image,
        channels=channels, width=width, expected=rows,
    )  # fmt: skip
    device = current_device()
    if stack_bottleneck_plan.missing_bottleneck(unit, device) is not None:
        return None
    if not stack_bottleneck_plan.worth_it(unit, device):
        return None
    launch = stack_bottleneck.prepare_stack_bottleneck(unit, settled, clear_rows=False)
    pack = stack_bottleneck.prepare_bottleneck_pack(unit)
    return launch, pack, stack_bottleneck.pack_form(unit)
