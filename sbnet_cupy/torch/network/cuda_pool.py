"""The CUDA kernels that pool or interpolate a stack, on tensors; cuda.py has those that convolve.

Each function returns None where no kernel serves the call; then PyTorch's operations do. Rows of a
result past the count are not written.
"""

import math

import torch

from ...core.torch_memory import allocate
from .._native import view
from . import cuda

_PLANS = {}  # (device, what, sizes, settled) -> what launches a kernel, or None


def max_pool(x, table, window):
    """Take the maximum of the pixels of the image in each window by one kernel, or return None."""
    if not _is_plain(window):
        return None
    return _pool_windows(x, table, window, _prepare_max_pool)


def chooses(x, table, window):
    """Whether kernels take the maximum of windows in training: with the pixels that they chose."""
    if not x.is_cuda or x.dtype not in cuda._ELEMENTS or table.whole or table.static:
        return False
    if not _is_plain(window) or min(window.pads) < 0:
        return False
    with cuda._at_home(x) as device:
        return _choices(device, cuda._rows(x), window) is not None


def max_pool_choice(x, window):
    """Take the maximum of each window; return it, and which pixel it is: bytes ``[M, b, b, C]``.

    Where it :func:`chooses`.
    """
    rows, table, block = cuda._rows(x), window.table, window.out_block
    y = cuda.new_stack(x, rows.shape[0], block, rows.shape[3])
    out = y.permute(0, 2, 3, 1)
    choice = torch.empty(out.shape, dtype=torch.uint8, device=x.device)
    with cuda._at_home(x) as device:
        launch = _choices(device, rows, window)[0]
        launch(*map(cuda._At, (rows, table.counts, table.indices, table.places, out, choice)))
        table.settled = True
    return y, choice


def max_pool_grad(grad, choice, window):
    """Return the gradient of the stack that was pooled."""
    rows, table = cuda._rows(grad), window.table
    dx = cuda.new_stack(grad, rows.shape[0], window.block, rows.shape[3])
    with cuda._at_home(grad) as device:
        lists = table.counts, table.indices, table.places
        launch = _choices(device, rows, window)[1]
        launch(*map(cuda._At, (rows, choice, *lists, dx.permute(0, 2, 3, 1))))
    return dx


def _choices(device, rows, window):
    """Return the launches of a max pooling that tells what it chose, and of its gradient."""
    facts = (
        *_facts(rows, window.table, window.block, window.size), window.out_block, window.kernel,
        window.stride, window.dilation, window.pads, window.out_size,
    )  # fmt: skip
    key = device, "choice", facts
    if key not in _PLANS:
        _PLANS[key] = _prepare_choice(*facts)
    return _PLANS[key]


def _prepare_choice(*facts):
    from ...block_sparse.stack import stack_pool_launch

    pool = _describe_windows(*facts[:-1])._replace(image_out=facts[-1])
    forward = stack_pool_launch.prepare_stack_max_pool_choice(pool)
    return forward and (forward, stack_pool_launch.prepare_stack_max_pool_grad(pool))


def _is_plain(window):
    """Whether every window has a pixel of the image, and no other number is at its border."""
    sizes = zip(window.size, window.kernel, window.dilation, strict=True)
    return window.fill is None and not any(d > 1 and n <= d * (k - 1) for n, k, d in sizes)


def avg_pool(x, table, window, count_include_pad, divisor):
    """Average the pixels of each window by one kernel, or return None."""
    return _pool_windows(x, table, window, _prepare_avg_pool, bool(count_include_pad), divisor)


def _pool_windows(x, table, window, prepare, *options):
    if not cuda.serves(x) or min(window.pads) < 0:
        return None
    rows = cuda._rows(x)
    facts = (*_facts(rows, table, window.block, window.size), window.out_block, *options)
    facts += (window.kernel, window.stride, window.dilation, window.pads)
    shape = (rows.shape[0], *window.out_block, rows.shape[3])
    out = _run(prepare, facts, rows, table, shape)
    return None if out is None else out.permute(0, 3, 1, 2)


def global_pool(x, table, block, size, mode):
    """Reduce each image, ``[M, C, *block]`` to ``[N, C]``, or return None; mode is mean, sum, max.

    The sum of an image's pixels is rounded once; those in no active block are 0.
    """
    if not cuda.serves(x):
        return None
    rows = cuda._rows(x)
    facts = (*_facts(rows, table, block, size), mode)
    return _run(_prepare_global_pool, facts, rows, table, (table.batch, rows.shape[3]))


def interpolate(x, table, block, size, to, mode, steps):
    """Interpolate by one kernel, to blocks of ``to`` pixels, or return None.

    ``steps`` are the pixels of x for each of the result, as PyTorch computes them in float32.
    """
    if not cuda.serves(x):
        return None
    rows = cuda._rows(x)
    facts = (*_facts(rows, table, block, size), to, mode, steps)
    out = _run(_prepare_interpolate, facts, rows, table, (rows.shape[0], *to, rows.shape[3]))
    return None if out is None else out.permute(0, 3, 1, 2)


def _facts(rows, table, block, size):
    return rows.dtype, rows.shape[0], table.batch, table.grid, rows.shape[3], block, size


def _run(prepare, facts, rows, table, shape):
    """Launch the kernel for these sizes, made once; return its result, or None without one."""
    out = torch.empty(shape, dtype=rows.dtype, device=rows.device)
    with cuda._at_home(rows) as device:
        key = (device, prepare.__name__, facts, table.settled)
        if key not in _PLANS:
            _PLANS[key] = prepare(*facts, settled=table.settled)
        if _PLANS[key] is None:
            return None
        run, plain = _PLANS[key]
        given = (rows, table.counts, table.indices, table.places, out)
        if plain:
            run(*map(cuda._At, given))
        else:
            with_memory(run, given)
        table.settled = True
    return out


def with_memory(launch, tensors):
    """Launch kernels that take memory of their own beside tensors, of which some may be None."""
    from cupy.cuda import using_allocator

    with using_allocator(allocate):
        launch(*(view(t) if isinstance(t, torch.Tensor) else t for t in tensors))


def _plain(launch):
    """Return a launch that needs addresses alone, and that it does; None if there is none."""
    return launch and (launch, True)


def _describe(dtype, rows, images, grid, channels, block, size, **window):
    from ...block_sparse.stack.stack_pool_launch import StackPool

    itemsize = torch.empty(0, dtype=dtype).element_size()
    return StackPool(
        cuda._ELEMENTS[dtype], itemsize, rows, images, grid, channels, block, size,
        alignment=math.gcd(16, channels * itemsize), **window,
    )  # fmt: skip


def _describe_windows(*facts):
    *facts, out_block, kernel, strides, dilation, pads = facts
    pads = (pads[:2], pads[2:])
    return _describe(
        *facts, block_out=out_block, kernel=kernel, strides=strides, dilation=dilation, pads=pads
    )


def _prepare_max_pool(*facts, settled):
    from ...block_sparse.stack.stack_pool_launch import prepare_stack_max_pool

    return _plain(prepare_stack_max_pool(_describe_windows(*facts), settled, clear_rows=False))


def _prepare_avg_pool(*facts, settled):
    from ...block_sparse.stack.stack_pool_launch import prepare_stack_avg_pool

    *sizes, count_include_pad, divisor, kernel, strides, dilation, pads = facts
    pool = _describe_windows(*sizes, kernel, strides, dilation, pads)
    return _plain(
        prepare_stack_avg_pool(pool, count_include_pad, divisor, settled, clear_rows=False)
    )


def _prepare_global_pool(*facts, settled):
    from ...block_sparse.stack.stack_pool_launch import pools_at_once, prepare_stack_global_pool

    *sizes, mode = facts
    pool = _describe(*sizes)
    launch = prepare_stack_global_pool(pool, mode, settled)
    return launch and (launch, pools_at_once(pool))


def _prepare_interpolate(*facts, settled):
    from ...block_sparse.stack.stack_interpolate import prepare_stack_interpolate

    *sizes, to, mode, steps = facts
    pool = _describe(*sizes, block_out=to)
    return _plain(prepare_stack_interpolate(pool, mode, steps, settled, clear_rows=False))
