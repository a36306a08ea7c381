"""Kernels of a CUDA graph in the order that their memory asks for, and not in that of their calls.

While a stream records a graph, each kernel comes behind the one before it. A network has branches
that do not read each other, though, and a kernel for few active blocks leaves most of a GPU idle.
So kernels that are launched through a :class:`GraphOrder` come behind those alone that wrote what
they read or write, or read what they write; the others run beside them.

Memory alone decides: what was freed and is given out again is no exception. All else that is put on
the stream comes behind every kernel before it, and ahead of every one after it.
"""

import collections
import contextlib
import ctypes
import functools
from typing import NamedTuple

from .device import driver
from .graph_memory import capture_on
from .launch import joined

_KEPT, _KEPT_OF_BRANCHES = 1 << 22, 1 << 26  # bytes of results; the L2 cache has not much more
_SET = 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES


class Span(NamedTuple):
    """Memory that a kernel reads or writes: ``width`` bytes of every ``pitch``, from one on.

    Attributes
    ----------
    begin, end : int
        The addresses of the first byte, and of the one behind the last.
    base : int
        The address from which pitches are counted: where the memory begins that this is a part of.
    pitch, width : int
        In bytes.
    """

    begin: int
    end: int
    base: int
    pitch: int
    width: int

    def meets(self, other):
        """Whether any byte is one of another span, too; never False if one is."""
        if self.end <= other.begin or other.end <= self.begin:
            return False
        if (self.base, self.pitch) != (other.base, other.pitch):
            return True
        mine, its = ((s.begin - s.base) % s.pitch for s in (self, other))
        if max(mine + self.width, its + other.width) > self.pitch:
            return True
        return mine < its + other.width and its < mine + self.width


class GraphOrder:
    """The order of kernels on a stream that records a CUDA graph.

    Parameters
    ----------
    stream : int
        The stream's address.
    recording : object
        Gives and sets what the stream's next kernel comes behind, as a :class:`Recording` does.
    """

    def __init__(self, stream, recording=None):
        self.stream = stream
        self._recording = recording or Recording(stream)
        self._most = _KEPT
        self._running = None  # while kernels are launched: what is ahead, and what they write
        self._begin(self._recording.last())

    def launch(self, run, reads, writes, results=()):
        """Launch kernels, ``run()``, behind those that they have to wait for.

        Parameters
        ----------
        reads, writes : sequence of Span
            All that they read and write, but for memory that nobody writes in this graph, and for
            what :meth:`take` is told of.
        results : sequence of (object, int)
            What to keep for a while, and of how many bytes: kernels that wrote to its memory, given
            out again, would have to wait for these.
        """
        if set(self._recording.last()) != self._last:  # others put something on the stream
            self._begin(self._recording.last())
        self._running = ahead, writes = self._ahead(reads, writes), list(writes)
        nodes = [self._nodes[k] for k in ahead] or self._base
        if self._nodes and not ahead:
            # No kernel ahead of it has waited yet for what the first of them waited for. Behind
            # those that have, it may begin early.
            joined(self.stream)
        self._recording.follow(nodes)
        made = None
        try:
            run()
            made = self._recording.last()
        finally:
            self._running = None
            if made is None:
                with contextlib.suppress(RuntimeError):  # of a capture that is spoilt
                    self._begin([*self._last, *self._recording.last()])
        if len(made) == 1 and made[0] not in (*nodes, *(self._nodes[k] for k in ahead)):
            self._note(made[0], ahead, reads, writes)
            self._keep(results)
        else:  # nothing was launched, or what has branches of its own
            self._begin([*self._last, *made])

    def take(self, span, memory):
        """Note memory that the kernels under way take for themselves, ahead of the next of them.

        ``memory`` is the object to keep for a while, as results are.
        """
        self._keep([(memory, span.end - span.begin)])
        if self._running is None:
            return
        ahead, writes = self._running
        more = [k for k in self._ahead((), (span,)) if k not in ahead]
        writes.append(span)
        if more:
            ahead += more
            self._recording.follow([*self._recording.last(), *(self._nodes[k] for k in more)])

    def _begin(self, nodes):
        """Have all that follows come behind these nodes, and behind no kernel before them."""
        self._base, self._nodes, self._spans, self._before = list(dict.fromkeys(nodes)), [], [], []
        self._ends, self._kept, self._kept_bytes = set(), collections.deque(), 0
        self._show()

    def _ahead(self, reads, writes):
        """Return the numbers of the kernels to wait for, none of which waits for another one."""
        found, known = [], 0
        for k in reversed(range(len(self._nodes))):
            if known >> k & 1:
                continue
            its_reads, its_writes = self._spans[k]
            if _meet(its_writes, (*reads, *writes)) or _meet(its_reads, writes):
                found.append(k)
                known |= self._before[k] | 1 << k
        return found

    def _note(self, node, ahead, reads, writes):
        if self._spans and not _meet(self._spans[-1][1], reads):
            self._most = _KEPT_OF_BRANCHES  # it does not read what the last one wrote
        before = functools.reduce(int.__or__, (self._before[k] | 1 << k for k in ahead), 0)
        self._ends = {*self._ends.difference(ahead), len(self._nodes)}
        self._nodes.append(node)
        self._spans.append((tuple(reads), tuple(writes)))
        self._before.append(before)
        self._show()

    def _show(self):
        """Have what others put on the stream come behind all kernels so far."""
        last = [self._nodes[k] for k in sorted(self._ends)] or self._base
        self._recording.follow(last)
        self._last = set(last)

    def _keep(self, results):
        for result in results:
            self._kept.append(result)
            self._kept_bytes += result[1]
        while self._kept_bytes > self._most:
            self._kept_bytes -= self._kept.popleft()[1]


def _meet(some, others):
    return any(a.meets(b) for a in some for b in others)


@functools.cache
def knows_order():
    """Whether the driver lets a stream that records a graph say what its next kernel waits for."""
    return hasattr(driver(), "cuStreamUpdateCaptureDependencies")


class Recording:
    """What a stream's next kernel comes behind, in the CUDA graph that the stream records."""

    def __init__(self, stream):
        self._stream = stream

    def last(self):
        """Return the nodes of the graph that the next one comes behind."""
        graph, nodes = ctypes.c_void_p(), ctypes.POINTER(ctypes.c_void_p)()
        count = ctypes.c_size_t()
        capture_on(self._stream, graph, nodes, count)
        return [nodes[k] for k in range(count.value)]

    def follow(self, nodes):
        """Have the next one come behind these nodes alone."""
        array = (ctypes.c_void_p * len(nodes))(*nodes)
        given = ctypes.c_void_p(self._stream), array, ctypes.c_size_t(len(nodes))
        error = driver().cuStreamUpdateCaptureDependencies(*given, ctypes.c_uint(_SET))
        if error:
            raise RuntimeError(f"cuStreamUpdateCaptureDependencies failed with CUresult {error}")
