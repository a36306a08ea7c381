"""What is wrong where PyTorch refuses what a network computes: its image, or what it calls."""

import re
import traceback

from ...errors import DTypeError, ShapeError

_CHANNELS = re.compile(r"to have (\d+) channels, but got (\d+) channels")


def misfit(model, x, error):
    """Return an error about x in place of PyTorch's, or None where x may not be to blame.

    It is known once PyTorch has raised: a network may convert an image before its first layer.
    """
    if type(error) is not RuntimeError:  # an error of this package, or a lack of memory
        return None
    text = str(error).strip().partition("\n")[0]
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if "type" in text and dtypes and x.dtype not in dtypes:
        wanted = next(iter(dtypes))
        return DTypeError(
            f"x must have the dtype of the network's weights, {wanted}, or one that the network "
            f"converts, got {x.dtype}; use x.to({wanted}). PyTorch says: {text}"
        )
    found = _CHANNELS.search(text)
    if found is None or int(found[2]) != x.shape[1]:
        return None
    n, _, h, w = x.shape
    return ShapeError(
        f"x must have shape (N, {found[1]}, H, W), with the channels that the network's layers "
        f"take, got {(n, x.shape[1], h, w)}; pass {found[1]} channels, second of all axes. PyTorch "
        f"says: {text}"
    )


def refused(table, error):
    """Return an error that says what takes no activations, in place of one that does not, or None.

    TorchScript drops what an error says that Python raised in it. What PyTorch traces, as it does
    the operands and branches of ``torch.cond``, has errors about how it is traced.
    """
    text = str(error).strip()
    if table.refusal is not None and "TorchScript" in text:
        return NotImplementedError(table.refusal)
    if not _is_of_tracing(error):
        return None
    return NotImplementedError(
        "torch.cond and other operators of control flow, and functions that torch.compile makes "
        "one graph of, cannot take activations of a sparsified network; use Python's if and for, "
        f"and no fullgraph=True. PyTorch says: {' '.join(text.split())[:200]}"
    )


def _is_of_tracing(error):
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    inside = any(module.startswith("torch._higher_order_ops") for module in modules)
    return inside or type(error).__module__.startswith("torch._dynamo")
