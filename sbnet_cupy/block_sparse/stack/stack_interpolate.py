"""stack_interpolate: a stack with more, or fewer, pixels in each block.

Tensors of PyTorch are interpolated by cuda_src/block_sparse/stack/stack_interpolate.cu, whose
positions are PyTorch's: in float32.
"""

from ...core import launch as kernels
from ...core.arrays import array_function, compute_dtype, namespace, vector_bytes
from .checks import computing
from .fetch import fetch
from .interpolation import phases, resolve_resize
from .neighbours import Axis, Places
from .pooling import prepare_out, slices_of
from .taps import clear_unlisted


@array_function
def stack_interpolate(
    x, table, *, scale_factor, size=None, mode="nearest", align_corners=False, out=None
):
    """Resize the images that a stack is part of, as PyTorch's ``interpolate`` does.

    Pixel ``p`` of the result lies at ``s = (p + 0.5) * n / n' - 0.5`` of the ``n`` old pixels, or
    at ``s = p * (n - 1) / (n' - 1)`` with ``align_corners``. "bilinear" mixes the pixels
    ``floor(s)`` and ``floor(s) + 1`` in the shares of their nearness, along both axes, with ``s``
    clamped to the image; "nearest" takes pixel ``floor(p * n / n')``. Without ``size``, ``n / n'``
    is ``1 / scale_factor``; also on an axis whose size the factor leaves unchanged, as 3 pixels
    times 1.25, which PyTorch copies on a CPU. Pixels in no active block are 0. The mean is computed
    in float32 (float64 for float64) and rounded once.

    Parameters
    ----------
    x : array, shape (M, b_h, b_w, C)
        Stack; float16, bfloat16, float32 or float64. C-contiguous.
    table : BlockTable
        Of the stage of ``x``; ``table.after_interpolate(scale_factor, size)`` is the result's.
    scale_factor : number, or two
        How many times larger the blocks become; their new sizes must be whole. Also a
        ``fractions.Fraction``; a float is the fraction of a block that rounds to it, as ``1 / 3``.
    size : (int, int), optional
        Size ``(H', W')`` of the new images: ``floor(n * scale_factor)`` by default, multiplied in
        float64 where the factor is a float, as PyTorch does. One that is
        smaller, as that of an input whose stage was rounded up, is reached by a resize by a factor
        that is not whole. All its pixels must lie in blocks.
    mode : "nearest" or "bilinear"
        How pixels are made.
    align_corners : bool
        Whether the centres of the first and last pixels keep their places. Only for "bilinear".
    out : array, optional
        Receives the result; it is returned.

    Returns
    -------
    y : array, shape (M, b_h * scale_factor, b_w * scale_factor, C)
        In the dtype and library of ``x``. Rows that are no block are 0.

    Raises
    ------
    ShapeError
        If blocks would not be whole, or ``size`` is larger than the blocks.
    DTypeError
        If ``x`` is not of a floating dtype, or ``table`` no BlockTable.
    ValueError
        If ``mode`` or ``align_corners`` is none of those above.

    Source: the dense layer on masked images.

    Examples
    --------
    >>> import numpy as np
    >>> table = block_table(np.ones((1, 1, 2)), 1)
    >>> x = np.array([1.0, 3.0]).reshape(2, 1, 1, 1)
    >>> y = stack_interpolate(x, table, scale_factor=2, mode="bilinear")
    >>> stack_to_image(y, table.after_interpolate(2))[0, 0, :, 0]
    array([1. , 1.5, 2.5, 3. ])
    """
    resize = resolve_resize(x, table, scale_factor, size, mode, align_corners)
    out = prepare_out(out, (len(x), *resize.new.block_size, x.shape[3]), x, table)
    if not out.size:
        return out
    body = _by_position
    if resize.factors is not None:
        body = _repeat if mode == "nearest" else _by_phase
    row_bytes = 3 * out[0].size * compute_dtype(x.dtype).itemsize
    with computing(x):
        places = Places.of(table)
        for part in slices_of(places, x, row_bytes):
            body(x, places.part(part), resize, out[part])
        clear_unlisted(out, places)
    return out


def _repeat(x, places, resize, out):
    """Nearest, by whole factors: each pixel several times."""
    (m, *_, c), (bh, bw), (fh, fw) = out.shape, resize.old.block_size, resize.factors
    out.reshape(m, bh, fh, bw, fw, c)[...] = x[places.rows][:, :, None, :, None]


def _by_phase(x, places, resize, out):
    """Bilinear, by whole factors: the new pixels of an old one have the same shares everywhere."""
    xp, (bh, bw), (fh, fw) = namespace(x), resize.old.block_size, resize.factors
    total = compute_dtype(x.dtype)
    halo = xp.empty((len(out), bh + 2, bw + 2, x.shape[3]), total)
    fetch(x, places, Axis(-1, 1, bh + 2), Axis(-1, 1, bw + 2), halo, "edge")
    lines = xp.empty((len(out), bh * fh, bw + 2, x.shape[3]), total)
    for phase, line, share in phases(fh):
        lines[:, phase::fh] = _mix(halo[:, line : line + bh], halo[:, line + 1 :][:, :bh], share)
    for phase, line, share in phases(fw):
        first, second = lines[:, :, line : line + bw], lines[:, :, line + 1 :][:, :, :bw]
        out[:, :, phase::fw] = _mix(first, second, share)


def _mix(first, second, share):
    """Return the mean of two pixels; one that has no share does not count, whatever it holds."""
    return first if share == 0 else (1 - share) * first + share * second


def _by_position(x, places, resize, out):
    """In general: each line of each block has its own two old lines."""
    xp, total = namespace(x), compute_dtype(x.dtype)
    lattices = [resize.lattice(axis) for axis in (0, 1)]
    halo = xp.empty((len(out), lattices[0].count, lattices[1].count, x.shape[3]), total)
    fetch(x, places, *lattices, halo)
    rows = xp.arange(len(out))[:, None]
    low, high, share = resize.positions(places, 0, lattices[0], total)
    lines = _mix_some(halo[rows, low], lambda: halo[rows, high], share[:, :, None, None], resize)
    low, high, share = resize.positions(places, 1, lattices[1], total)
    lines = lines.swapaxes(1, 2)
    mixed = _mix_some(lines[rows, low], lambda: lines[rows, high], share[:, :, None, None], resize)
    out[...] = mixed.swapaxes(1, 2)


def _mix_some(first, second, share, resize):
    if resize.mode == "nearest":
        return first
    mixed = (1 - share) * first + share * second()
    return namespace(first).where(share == 0, first, mixed)


# What is added to a position before it is scaled, and taken off after.
_OFFSETS = {"nearest": (0.0, 0.0), "nearest-exact": (0.5, 0.0), "bilinear": (0.5, 0.5),
            "bilinear corners": (0.0, 0.0)}  # fmt: skip
_ENOUGH = 512  # thread blocks that keep a large GPU busy
_COLUMNS = 32  # of a tile, at most: eight lines of them are a pixel for each thread
_WIDE = 16  # bytes of channels that a thread moves well
_MOST_STEP = 0.5  # old lines for a new one: more are mixed across more often than they are used
_LEAST_LINES = 4  # of a tile: with fewer, most of it are old lines
_MOST_SHARED = 48 * 1024  # bytes of a tile, so that a multiprocessor holds four


def prepare_stack_interpolate(
    pool, mode, steps, settled=False, clear_rows=True, of_images=False
):
    """Return the launch that interpolates, in float32, or None where sizes are too large.

    Parameters
    ----------
    pool : StackPool
        ``block`` and ``image`` of x, ``block_out`` of out; its window is not used. Both stacks may
        be parts of others.
    mode : str
        "nearest", "nearest-exact", "bilinear", or "bilinear corners", which keeps the centres of
        the first and last pixels.
    steps : (float, float)
        How many pixels of x there are for each of out, along both axes.
    clear_rows : bool
        Whether rows past the count become 0: of an out that is no part of another stack.
    of_images : bool
        Whether x is not a stack, but images ``[N, H, W, C]``, and neither it nor out is a part.

    The launch takes x, bin_counts, active_block_indices, grid and out.
    """
    if not pool.fits:
        return None
    assert not (clear_rows and pool.out_part_of), "rows of a part are not cleared"
    numbers = (*map(float, steps), *_OFFSETS[mode])
    if mode.startswith("bilinear") and not of_images:
        launch = _prepare_lines(pool, numbers, settled, clear_rows)
        if launch is not None:
            return launch
    height, width = pool.block_out
    # How many pixels a thread block takes at a time: one for each thread, fewer where that would
    # leave most of a GPU idle, but a vector for each thread.
    each = -(-pool.rows * height * width // _ENOUGH)
    each = min(max(each, kernels.THREADS // pool.vectors, 1), kernels.THREADS)
    columns = min(width, _COLUMNS, each)
    lines = min(height, each // columns)
    return kernels.prepare(
        "block_sparse/stack/stack_interpolate",
        "stack_interpolate",
        (
            pool.element, f"Bytes<{pool.vector}>::type", mode.startswith("bilinear"), of_images,
            pool.is_pitched,
        ),
        pool.rows * -(-height // lines) * -(-width // columns),
        kernels.THREADS,
        5,
        (
            pool.rows, pool.images, *pool.grid, pool.vectors, *pool.block, *pool.image,
            *pool.block_out, *numbers, lines, columns, int(settled), int(clear_rows),
            *pool.steps,
        ),
        persistent=True,
        dependent=True,
    )  # fmt: skip


def _prepare_lines(pool, numbers, settled, clear_rows):
    """Return the launch with tiles of whole lines, or None where vectors of channels are better."""
    (height, width), steps = pool.block_out, numbers[:2]
    if pool.vector >= _WIDE or steps[0] > _MOST_STEP:
        return None
    lines = max(-(-height // max(_ENOUGH // pool.rows, 1)), min(height, _LEAST_LINES))
    # From the first to the last, one of two on each side, and one for what is rounded.
    old_lines, old_columns = (
        int((n - 1) * step) + 4 for n, step in zip((lines, width), steps, strict=True)
    )
    line = width * pool.channels
    means = -(-old_lines * line // 4) * 4  # vectors of four follow
    shared = 4 * (means + 3 * (lines + width) + old_lines * old_columns)
    if shared > _MOST_SHARED:
        return None
    # The vectors that lie side by side in out: those of a line, or of a pixel of a part.
    width, pitch_out = (pool.channels, pool.out_part_of) if pool.out_part_of else (line, line)
    sizes = (c * pool.element_bytes for c in (width, pitch_out))
    vector = max(vector_bytes(pool.alignment, *sizes), pool.element_bytes)
    each = vector // pool.element_bytes
    return kernels.prepare(
        "block_sparse/stack/stack_interpolate",
        "stack_interpolate_lines",
        (pool.element, f"Bytes<{vector}>::type", pool.is_pitched),
        pool.rows * -(-height // lines),
        kernels.THREADS,
        5,
        (
            pool.rows, pool.images, *pool.grid, pool.channels, *pool.block, *pool.image,
            *pool.block_out, *numbers, lines, old_lines, old_columns, int(settled),
            int(clear_rows), pool.pitches[0], pitch_out // each, width // each,
        ),
        shared=shared,
        persistent=True,
        dependent=True,
    )  # fmt: skip
