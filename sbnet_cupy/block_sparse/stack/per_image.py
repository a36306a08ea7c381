"""Values of blocks to values of images, and back: what global pooling is made of."""

import numpy as np

from ...core.arrays import is_cupy, namespace

_MOST_BYTES = 256 << 20  # of values laid out by place, on a GPU


def reduce_rows(values, places, how, identity):
    """Reduce values [m, C] of blocks to [N, C] of images, in a fixed order.

    ``how`` is "add", "maximum" or "minimum". Rows that are no block do not count; an image without
    blocks gets ``identity``.
    """
    xp, table = namespace(values), places.table
    result = xp.empty((table.batch, values.shape[1]), values.dtype)
    result[...] = identity
    if not result.size or not table.grid.size or not len(values):
        return result
    if not is_cupy(values):
        rows = np.flatnonzero(places.valid)
        if len(rows):
            rows = rows[np.argsort(places.n[rows], kind="stable")]
            images, starts = np.unique(places.n[rows], return_index=True)
            result[images] = getattr(np, how).reduceat(values[rows], starts, axis=0)
        return result
    grid = table.grid.reshape(table.batch, -1)
    active = ((grid >= 0) & (grid < places.limit))[..., None]
    reduce = {"add": xp.sum, "maximum": xp.max, "minimum": xp.min}[how]
    row = xp.where(active[..., 0], grid, 0)
    step = max(1, _MOST_BYTES // (grid.size * values.dtype.itemsize))
    for start in range(0, values.shape[1], step):
        channels = slice(start, start + step)
        laid_out = xp.where(active, values[:, channels][row], values.dtype.type(identity))
        result[:, channels] = reduce(laid_out, axis=1)
    return result


def rows_of(values, places):
    """Return each row's value of its image: [N, C] to [m, C]; 0 for rows that are no block."""
    xp = namespace(values)
    if not len(values):
        return xp.zeros((len(places), values.shape[1]), values.dtype)
    taken = values[places.n]
    return xp.where(places.valid[:, None], taken, xp.zeros((), values.dtype))
