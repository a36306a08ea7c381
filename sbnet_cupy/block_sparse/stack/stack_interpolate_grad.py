"""stack_interpolate_grad: from the gradient of a resized stack to that of the stack."""

from ...core.arrays import array_function, compute_dtype, empty, namespace
from .checks import check_like, check_stack, computing
from .interpolation import phases, resolve_resize
from .neighbours import Axis, Places, add_back
from .stack_pixel_mask import inside


@array_function
def stack_interpolate_grad(
    grad_y, x, table, *, scale_factor, size=None, mode="nearest", align_corners=False
):
    """Compute the gradient of stack_interpolate from the gradient of its result.

    ``dx`` of a pixel is the sum of ``grad_y`` times its share, over the new pixels that it has a
    share in, in float32 (float64 for float64), in a fixed order, rounded once.

    Parameters
    ----------
    grad_y : array, shape (M, b_h * scale_factor, b_w * scale_factor, C)
        Gradient of the result, in the dtype of ``x``. What it holds outside the image and in rows
        that are no block is not read.
    x, table, scale_factor, size, mode, align_corners
        As they were given to :func:`stack_interpolate`. Of ``x`` only shape and dtype matter.

    Returns
    -------
    grad_x : array, shape (M, b_h, b_w, C)
        0 outside the image and in rows that are no block.

    Raises
    ------
    ShapeError
        If sizes do not fit together.
    DTypeError
        If ``x`` is not of a floating dtype, or ``grad_y`` is of another one.
    ValueError
        If ``mode`` or ``align_corners`` is none of those of :func:`stack_interpolate`.

    Source: the transpose of stack_interpolate as a linear function.

    Examples
    --------
    >>> import numpy as np
    >>> table = block_table(np.ones((1, 1, 2)), 1)
    >>> x, grad_y = np.ones((2, 1, 1, 1)), np.ones((2, 2, 2, 1))
    >>> stack_interpolate_grad(grad_y, x, table, scale_factor=2)[:, 0, 0, 0]
    array([4., 4.])
    """
    resize = resolve_resize(x, table, scale_factor, size, mode, align_corners)
    after = table.at(*resize.new)
    check_stack("grad_y", grad_y, after, channels=x.shape[3])
    check_like("grad_y", grad_y, x)
    xp, total = namespace(x), compute_dtype(x.dtype)
    dx = empty(x.shape, x.dtype, x)
    dx[...] = xp.zeros((), x.dtype)
    if not x.size or not grad_y.size:
        return dx
    with computing(x):
        places = Places.of(table)
        grad = grad_y[places.rows].astype(total, copy=False)
        grad = xp.where(inside(places.at(after)), grad, total.type(0))
        sums = xp.zeros((len(places), *x.shape[1:]), total)
        if resize.factors is None:
            _by_position(grad, places, resize, sums)
        elif mode == "nearest":
            (bh, bw), (fh, fw) = resize.old.block_size, resize.factors
            sums += grad.reshape(len(grad), bh, fh, bw, fw, x.shape[3]).sum(axis=(2, 4))
        else:
            _by_phase(grad, places, resize, sums)
        dx[: len(places)] = sums
    return dx


def _by_phase(grad, places, resize, sums):
    """The transpose of the forward pass, one axis after the other."""
    xp, (bh, bw), (fh, fw) = namespace(grad), resize.old.block_size, resize.factors
    columns = xp.zeros((*grad.shape[:2], bw + 2, grad.shape[3]), grad.dtype)
    for phase, line, share in phases(fw):
        some = grad[:, :, phase::fw]
        columns[:, :, line : line + bw] += (1 - share) * some
        columns[:, :, line + 1 :][:, :, :bw] += share * some if share else 0
    halo = xp.zeros((len(grad), bh + 2, bw + 2, grad.shape[3]), grad.dtype)
    for phase, line, share in phases(fh):
        some = columns[:, phase::fh]
        halo[:, line : line + bh] += (1 - share) * some
        halo[:, line + 1 :][:, :bh] += share * some if share else 0
    add_back(halo, places, Axis(-1, 1, bh + 2), Axis(-1, 1, bw + 2), sums, "edge")


def _by_position(grad, places, resize, sums):
    lattices = [resize.lattice(axis) for axis in (0, 1)]
    columns = _add_lines(grad.swapaxes(1, 2), places, resize, 1, lattices[1]).swapaxes(1, 2)
    halo = _add_lines(columns, places, resize, 0, lattices[0])
    add_back(halo, places, *lattices, sums)


def _add_lines(grad, places, resize, axis, lattice):
    """Add each line of the new blocks [m, P, ...] to the two old lines that it was mixed of."""
    xp = namespace(grad)
    low, high, share = resize.positions(places, axis, lattice, grad.dtype)
    total = xp.zeros((len(grad), lattice.count, *grad.shape[2:]), grad.dtype)
    rows = xp.arange(len(grad))
    for line in range(grad.shape[1]):
        second = share[:, line, None, None]
        total[rows, low[:, line]] += (1 - second) * grad[:, line]
        if resize.mode != "nearest":
            total[rows, high[:, line]] += second * grad[:, line]
    return total
