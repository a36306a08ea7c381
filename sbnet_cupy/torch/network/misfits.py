"""What is wrong with an image, where PyTorch refuses what a network computes of it."""

import re

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
