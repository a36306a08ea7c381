"""The kernels of a call in a CUDA graph, each behind those alone that it has to wait for.

See :mod:`sbnet_cupy.core.graph_order`; here is what tensors are to it.
"""

import math

from ...core.graph_memory import capture_on
from ...core.graph_order import GraphOrder, Span, knows_order
from ...core.torch_memory import allocate, capturing_stream


class CallOrder:
    """The order of a call's kernels on the stream that is captured.

    ``stream`` is its address, ``recording`` as of :class:`~sbnet_cupy.core.graph_order.GraphOrder`.
    """

    def __init__(self, stream, recording=None):
        self.stream, self._order = stream, GraphOrder(stream, recording)

    def launch(self, run, stream, tensors, out):
        """Launch kernels, ``run()``, on a stream.

        They read ``tensors``, some of which may be None, and write those of ``out``, one or
        several.
        """
        if stream != self.stream:  # a branch's
            run()
            return
        outs = [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]
        writes = [span_of(t) for t in outs if t.numel()]
        reads = [span_of(t) for t in tensors if t is not None and t.numel()]
        ends = {span[:2] for span in writes}  # of results, which are among the tensors, too
        reads = [span for span in reads if span[:2] not in ends]
        results = [(t.untyped_storage(), t.numel() * t.element_size()) for t in outs]
        self._order.launch(run, reads, writes, results)

    def allocate(self, nbytes):
        """Allocate device memory for CuPy, for kernels that are being launched."""
        memory = allocate(nbytes)
        span = Span(memory.ptr, memory.ptr + nbytes, memory.ptr, nbytes, nbytes)
        self._order.take(span, memory.mem)
        return memory


def order_of(x):
    """Return the order of a call on a tensor; None where no CUDA graph is captured.

    Nor where one is of another device alone.
    """
    stream = capturing_stream(x)
    if stream is None or not knows_order() or not capture_on(stream):
        return None
    return CallOrder(stream)


def span_of(x):
    """Return the memory of a tensor, one number of it or more."""
    size, begin = x.element_size(), x.data_ptr()
    steps = [(step, n) for step, n in zip(x.stride(), x.shape, strict=True) if n > 1]
    end = begin + (sum((n - 1) * step for step, n in steps) + 1) * size
    width = sum(n - 1 for step, n in steps if step == 1) + 1
    pitch = math.gcd(*(step for step, _ in steps if step != 1)) or width
    if pitch < width:  # rows that have numbers in common
        width = pitch = end - begin
        return Span(begin, end, begin, width, width)
    return Span(begin, end, x.untyped_storage().data_ptr(), pitch * size, width * size)
