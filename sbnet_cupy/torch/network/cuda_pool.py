"""The CUDA kernels that pool or interpolate a stack, on tensors; cuda.py has those that convolve.

Each function returns None where no kernel serves the call; then PyTorch's operations do. Rows of a
result past the count are not written.
"""

import functools
import math

import torch

from . import cuda, joins

_PLANS = {}  # (device, what, sizes, settled) -> what launches a kernel, or None
_CONTIGUOUS = None, None, 16  # the pitches of x and of the result as parts, and their alignment
_MOST_WINDOWS = 64  # of an image that thread blocks pool by themselves; more have few pixels


def max_pool(x, table, window):
    """Take the maximum of the pixels of each window by one kernel, or return None.

    Those around the image count where they were padded with zeros before.
    """
    if not _is_plain(window, (None, 0)):
        return None
    return _pool_windows(x, table, window, _prepare_max_pool, window.fill is not None)


def chooses(x, table, window):
    """Whether kernels take the maximum of windows in training: with the pixels that they chose."""
    if not x.is_cuda or x.dtype not in cuda._ELEMENTS or table.whole or table.static:
        return False
    if not _is_plain(window) or min(window.pads) < 0:
        return False
    return _choices(x, window) is not None


def max_pool_choice(x, window):
    """Take the maximum of each window; return it, and which pixel it is: bytes ``[M, b, b, C]``.

    Where it :func:`chooses`.
    """
    table, (rows, channels) = window.table, x.shape[:2]
    y = cuda.new_stack(x, rows, window.out_block, channels)
    choice = torch.empty(rows, *window.out_block, channels, dtype=torch.uint8, device=x.device)
    lists = table.counts, table.indices, table.places
    cuda.start(_choices(x, window)[0], cuda.last(x), *lists, y, choice)
    table.settled = True
    return y, choice


def max_pool_grad(grad, choice, window):
    """Return the gradient of the stack that was pooled."""
    table, (rows, channels) = window.table, grad.shape[:2]
    dx = cuda.new_stack(grad, rows, window.block, channels)
    lists = table.counts, table.indices, table.places
    cuda.start(_choices(grad, window)[1], cuda.last(grad), choice, *lists, dx)
    return dx


def _choices(x, window):
    """Return the launches of a max pooling that tells what it chose, and of its gradient."""
    facts = (
        *_facts(x, window.table, window.block, window.size), window.out_block, window.kernel,
        window.stride, window.dilation, window.pads, window.out_size,
    )  # fmt: skip
    return cuda.prepared(_PLANS, ("choice", facts), x, _prepare_choice, *facts)


def _prepare_choice(*facts):
    from ...block_sparse.stack import stack_pool_launch

    pool = _describe_windows(*facts[:-1])._replace(image_out=facts[-1])
    forward = stack_pool_launch.prepare_stack_max_pool_choice(pool)
    return forward and (forward, stack_pool_launch.prepare_stack_max_pool_grad(pool))


def _is_plain(window, fills=(None,)):
    """Whether every window has a pixel of the image, and around it is one of ``fills``."""
    sizes = zip(window.size, window.kernel, window.dilation, strict=True)
    return window.fill in fills and not any(d > 1 and n <= d * (k - 1) for n, k, d in sizes)


def avg_pool(x, table, window, count_include_pad, divisor):
    """Average the pixels of each window by one kernel, or return None."""
    return _pool_windows(x, table, window, _prepare_avg_pool, bool(count_include_pad), divisor)


def _pool_windows(x, table, window, prepare, *options):
    if not cuda.serves(x) or min(window.pads) < 0:
        return None
    more = *options, window.kernel, window.stride, window.dilation, window.pads
    return _run_to_stack(prepare, x, table, window.block, window.size, window.out_block, *more)


def global_pool(x, table, block, size, mode):
    """Reduce each image, ``[M, C, *block]`` to ``[N, C]``, or return None; mode is mean, sum, max.

    The sum of an image's pixels is rounded once; those in no active block are 0.
    """
    if not cuda.serves(x):
        return None
    return _run_to_images(x, table, block, size, (1, 1), mode, (table.batch, x.shape[1]))


def adaptive_pool(x, table, block, size, windows, mode):
    """Reduce windows of each image, ``[M, C, *block]`` to ``[N, C, *windows]``, or return None.

    As :func:`global_pool` does whole images; mode is mean or max.
    """
    if not cuda.serves(x) or math.prod(windows) > _MOST_WINDOWS:
        return None
    shape = (table.batch, *windows, x.shape[1])
    out = _run_to_images(x, table, block, size, windows, mode, shape)
    return None if out is None else out.permute(0, 3, 1, 2)


def _run_to_images(x, table, block, size, windows, mode, shape):
    """Launch the kernel whose result, of a shape, has pixels of images.

    A part of another stack is read where it lies, if in vectors as wide as those of a copy: sums
    have an order that depends on these.
    """
    rows, part_of = cuda.rows_and_pitch(x)
    if part_of is not None:
        itemsize = x.element_size()
        wide = math.gcd(16, x.shape[1] * itemsize)
        if part_of * itemsize % wide or x.data_ptr() % wide:
            rows, part_of = rows.contiguous(), None
    facts = (*_facts(x, table, block, size), windows, mode, part_of)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    return out if _run(_prepare_global_pool, facts, rows, table, out) else None


def interpolate(x, table, block, size, to, mode, steps):
    """Interpolate by one kernel, to blocks of ``to`` pixels, or return None.

    ``steps`` are the pixels of x for each of the result, as PyTorch computes them in float32.
    """
    if not cuda.serves(x):
        return None
    return _run_to_stack(_prepare_interpolate, x, table, block, size, to, mode, steps, False)


def interpolate_images(x, table, to, mode, steps):
    """Interpolate images ``[N, C, h, w]`` at the active blocks by one kernel, or return None.

    To blocks of ``to`` pixels; ``steps`` as of :func:`interpolate`.
    """
    if not cuda.serves(x) or x.data_ptr() % 16:
        return None
    rows, size = cuda._rows(x), tuple(x.shape[2:])
    facts = (x.dtype, table.rows, table.batch, table.grid, x.shape[1], size, size)
    facts += (to, mode, steps, True, _CONTIGUOUS)
    out = torch.empty(table.rows, *to, x.shape[1], dtype=x.dtype, device=x.device)
    found = _run(_prepare_interpolate, facts, rows, table, out)
    return out.permute(0, 3, 1, 2) if found else None


def step(old, new, scale=None, corners=False):
    """Return the old pixels for each new one along an axis; ``scale`` may be what was asked for."""
    if corners:
        return (old - 1) / (new - 1) if new > 1 else 0.0
    return 1 / scale if scale else old / new


def _facts(x, table, block, size):
    return x.dtype, x.shape[0], table.batch, table.grid, x.shape[1], block, size


def _run_to_stack(prepare, x, table, block, size, to, *more):
    """Launch the kernel whose result has blocks of ``to`` pixels, written where it is to lie."""
    y, (x,), out = joins.place_like((x,), table, to, x.shape[1])
    (rows, part_of), (out, out_part_of) = map(cuda.rows_and_pitch, (x, out))
    lie = _CONTIGUOUS
    if part_of or out_part_of:
        lie = part_of, out_part_of, math.gcd(16, x.data_ptr(), y.data_ptr())
    if _run(prepare, (*_facts(x, table, block, size), to, *more, lie), rows, table, out):
        return y
    joins.take_back(y, table)
    return None


def _run(prepare, facts, rows, table, out):
    """Launch the kernel for these sizes, made once; return whether there is one."""
    settled = table.settled
    key = prepare.__name__, facts, settled
    found = cuda.prepared(_PLANS, key, rows, functools.partial(prepare, settled=settled), *facts)
    if found is None:
        return False
    launch, plain = found
    begin = cuda.start if plain else cuda.start_with_memory
    given = rows, table.counts, table.indices, table.places, out
    begin(launch, *given, order=table.order, out=out)
    table.settled = True
    return True


def _plain(launch):
    """Return a launch that needs addresses alone, and that it does; None if there is none."""
    return launch and (launch, True)


def _describe(dtype, rows, images, grid, channels, block, size, **window):
    from ...block_sparse.stack.stack_pool_launch import StackPool

    itemsize = torch.empty(0, dtype=dtype).element_size()
    return StackPool(
        cuda._ELEMENTS[dtype], itemsize, rows, images, grid, channels, block, size, **window
    )


def _lying(pool, part_of, out_part_of, alignment):
    return pool._replace(part_of=part_of, out_part_of=out_part_of, alignment=alignment)


def _describe_windows(*facts):
    *facts, out_block, kernel, strides, dilation, pads = facts
    pads = (pads[:2], pads[2:])
    return _describe(
        *facts, block_out=out_block, kernel=kernel, strides=strides, dilation=dilation, pads=pads
    )


def _prepare_max_pool(*facts, settled):
    from ...block_sparse.stack.stack_pool_launch import prepare_stack_max_pool

    *sizes, zeros_around, kernel, strides, dilation, pads, lie = facts
    pool = _lying(_describe_windows(*sizes, kernel, strides, dilation, pads), *lie)
    return _plain(prepare_stack_max_pool(pool, settled, False, zeros_around))


def _prepare_avg_pool(*facts, settled):
    from ...block_sparse.stack.stack_pool_launch import prepare_stack_avg_pool

    *sizes, count_include_pad, divisor, kernel, strides, dilation, pads, lie = facts
    pool = _lying(_describe_windows(*sizes, kernel, strides, dilation, pads), *lie)
    return _plain(
        prepare_stack_avg_pool(pool, count_include_pad, divisor, settled, clear_rows=False)
    )


def _prepare_global_pool(*facts, settled):
    from ...block_sparse.stack.stack_pool_launch import pools_at_once, prepare_stack_global_pool

    *sizes, windows, mode, part_of = facts
    pool = _describe(*sizes, windows=windows)
    plain = pools_at_once(pool)
    pool = pool._replace(part_of=part_of if plain else None)  # others are given a copy
    launch = prepare_stack_global_pool(pool, mode, settled)
    return launch and (launch, plain)


def _prepare_interpolate(*facts, settled):
    from ...block_sparse.stack.stack_interpolate import prepare_stack_interpolate

    *sizes, to, mode, steps, of_images, lie = facts
    pool = _lying(_describe(*sizes, block_out=to), *lie)
    options = {"clear_rows": False, "of_images": of_images}
    return _plain(prepare_stack_interpolate(pool, mode, steps, settled, **options))
