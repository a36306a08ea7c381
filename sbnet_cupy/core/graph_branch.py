"""More branches of a CUDA graph, for work that may run beside other work.

Where a graph is being captured, what is put on the stream of a branch becomes nodes that depend on
what came before the branch, and on which depends what comes after it; the GPU runs them beside
those of the stream itself. Outside of a capture there is no branch: kernels that fill a GPU gain
nothing, and events would cost the calling thread more than they save.
"""

import contextlib

from .arrays import namespace
from .graph_memory import is_capturing
from .launch import joined

_SIDES = {}  # (device, address of a stream, name) -> CuPy's stream for branches beside it


def side_stream(device, stream, name="gradients"):
    """Return the stream, as CuPy's, of branches beside a stream that is given by its address."""
    import cupy

    key = device, stream, name
    side = _SIDES.get(key)
    if side is None:
        side = _SIDES.setdefault(key, cupy.cuda.Stream(non_blocking=True))
    return side


@contextlib.contextmanager
def branch(like):
    """Give a context for work that may run beside the rest of the block, on CuPy arrays.

    What it reads must be there before the block. After the block, all of its work is done before
    what follows. Without a capture, and on NumPy, it is an empty context.
    """
    if not is_capturing(like):
        yield contextlib.nullcontext()
        return
    cuda = namespace(like).cuda
    main = cuda.get_current_stream()
    side = side_stream(cuda.runtime.getDevice(), main.ptr)
    _wait(side, main.record(cuda.Event(disable_timing=True)))
    try:
        yield side
    finally:
        _wait(main, side.record(cuda.Event(disable_timing=True)))


def _wait(stream, event):
    stream.wait_event(event)
    joined(stream.ptr)
