"""Kernels of a CUDA graph come behind those alone whose memory they share, and all that must."""

import ctypes
import itertools
import random
import weakref
from types import SimpleNamespace

import pytest

from sbnet_cupy.core import graph_memory, graph_order
from sbnet_cupy.core import launch as kernels
from sbnet_cupy.core.graph_order import GraphOrder, Span

STREAM, SIZE = 0x1000, 51  # bytes of memory, in areas that have a pitch each


class Recording:
    """A graph whose nodes are numbers, as a stream records it.

    ``before`` holds all the nodes that each one comes behind, ``given`` those that it was told of,
    and ``waits`` the nodes that do not begin early.
    """

    def __init__(self):
        self.before, self.given, self.waits, self._last = [], [], set(), []

    def last(self):
        return list(self._last)

    def follow(self, nodes):
        assert len(set(nodes)) == len(nodes)  # the driver takes none twice
        self._last = list(nodes)

    def add(self, last=None):
        """Add a node behind the last ones, or behind others; it is the last one then."""
        last = self._last if last is None else last
        node = len(self.before)
        self.given.append(list(last))
        self.before.append(frozenset(last).union(*(self.before[k] for k in last)))
        if STREAM in kernels._JOINED:
            self.waits.add(node)
            kernels._JOINED.discard(STREAM)
        self._last = [node]
        return node

    def branch(self):
        """Add two nodes beside each other; both are the last ones then."""
        last = self.last()
        pair = [self.add(last), self.add(last)]
        self._last = pair
        return pair


@pytest.fixture(autouse=True)
def nothing_joined(monkeypatch):
    monkeypatch.setattr(kernels, "_JOINED", set())


def whole(begin, end):
    return Span(begin, end, begin, end - begin, end - begin)


def rows(base, pitch, first, last, at, width):
    """Return a span of rows of a wider memory."""
    return Span(
        base + first * pitch + at, base + (last - 1) * pitch + at + width, base, pitch, width
    )


def bytes_of(span):
    steps = range(span.begin, span.end, span.pitch)
    found = (range(k, min(k + span.width, span.end)) for k in steps)
    return frozenset(itertools.chain.from_iterable(found))


def any_span(rng):
    if rng.random() < 0.3:
        return whole(*sorted(rng.sample(range(SIZE), 2)))
    base, pitch = rng.choice((0, 3, 7)), rng.choice((4, 6, 11))
    width, at = rng.randint(1, pitch), rng.randrange(pitch)  # which may go beyond the pitch
    if rng.random() < 0.8:
        at = min(at, pitch - width)
    first = rng.randrange(3)
    return rows(base, pitch, first, first + rng.randint(1, 3), at, width)


def span_of_areas(rng):
    """Draw a span that meets just those with which it has a byte in common."""
    base, pitch, count = rng.choice([(0, 16, 1), (17, 8, 2), (35, 4, 4)])
    first, width = rng.randrange(count), rng.randint(1, pitch)
    at = rng.randint(0, pitch - width)
    return rows(base, pitch, first, rng.randint(first + 1, count), at, width)


def test_spans_meet_where_they_share_a_byte():
    rng, found = random.Random(1), set()
    for _ in range(20000):
        one, other = any_span(rng), any_span(rng)
        shared = bool(bytes_of(one) & bytes_of(other))
        assert one.meets(other) == other.meets(one) >= shared, (one, other)
        found.add((one.meets(other), shared))
    assert found == {(True, True), (True, False), (False, False)}


def test_spans_of_one_memory_meet_only_where_they_share_a_byte():
    rng, found = random.Random(2), set()
    for _ in range(5000):
        one, other = span_of_areas(rng), span_of_areas(rng)
        shared = bool(bytes_of(one) & bytes_of(other))
        assert one.meets(other) == shared, (one, other)
        found.add(shared)
    assert len(found) == 2


class Program:
    """Calls at random, and what must be so in the graph.

    ``kernels`` are (node, bytes read, bytes written), ``units`` are those of a call each: (last
    node, spans read, spans written, section), and ``fences`` nodes behind all before them and ahead
    of all behind.
    """

    def __init__(self, seed, draw):
        self.rng, self.draw = random.Random(seed), draw
        self.recording = Recording()
        self.order = GraphOrder(STREAM, self.recording)
        self.kernels, self.units, self.fences, self.section = [], [], [], 0
        self.early, self.late = [], []  # first kernels of calls, by whether they may begin early

    def spans(self, most):
        return [self.draw(self.rng) for _ in range(self.rng.randint(0, most))]

    def run(self, count=25):
        kinds = [self.kernel] * 12 + [self.other, self.nothing, self.branched, self.broken]
        for _ in range(count):
            self.rng.choice(kinds)()
        return self

    def other(self):
        self.fences.append(self.recording.add())
        self.section += 1

    def kernel(self, more=None):
        """Launch one or two kernels, some of which take memory before one of them."""
        reads, writes = self.spans(2), [self.draw(self.rng), *self.spans(1)]
        taken, number = list(writes), self.rng.choice((1, 1, 2))
        takes = [self.spans(1) if self.rng.random() < 0.3 else [] for _ in range(number)]
        made = []

        def run():
            for its in takes:
                for span in its:
                    self.order.take(span, None)
                taken.extend(its)
                made.append(self.recording.add())
                self.kernels.append((made[-1], reads, list(taken)))
            if more:
                more()

        ahead = [
            unit for unit in self.units
            if unit[3] == self.section and conflict(unit[1:3], (reads, writes), meets=Span.meets)
        ]  # fmt: skip
        is_first = not any(unit[3] == self.section for unit in self.units)
        self.order.launch(run, reads, writes)
        if more is None:
            self.units.append((made[-1], reads, taken, self.section))
            (self.late if not (is_first or ahead) else self.early).append(made[0])
        else:
            self.section += 1

    def nothing(self):
        """Launch nothing, though memory was taken."""
        takes = self.spans(1)
        self.order.launch(lambda: [self.order.take(s, None) for s in takes], self.spans(2), [])
        kernels._JOINED.clear()  # else the next one waits, which it need not
        self.section += 1

    def branched(self):
        def more():
            self.recording.branch()

        self.kernel(more)

    def broken(self):
        def more():
            raise KeyError

        with pytest.raises(KeyError):
            self.kernel(more)
        self.section += 1


def share_bytes(a, b):
    return bool(bytes_of(a) & bytes_of(b))


def conflict(one, other, meets=share_bytes):
    (reads, writes), (its_reads, its_writes) = one, other
    pairs = itertools.chain(
        itertools.product(writes, its_writes), itertools.product(writes, its_reads),
        itertools.product(reads, its_writes),
    )  # fmt: skip
    return any(meets(a, b) for a, b in pairs)


@pytest.mark.parametrize("draw", [any_span, span_of_areas])
def test_kernels_come_behind_all_that_they_must_wait_for(draw):
    seen = 0
    for seed in range(200):
        program = Program(seed, draw).run()
        before = program.recording.before
        for (one, *its), (two, *others) in itertools.combinations(program.kernels, 2):
            if conflict(its, others):
                assert one in before[two], (seed, one, two)
                seen += 1
    assert seen > 1000


def test_other_nodes_come_behind_all_and_ahead_of_all():
    for seed in range(200):
        program = Program(seed, span_of_areas).run()
        nodes, before = range(len(program.recording.before)), program.recording.before
        for fence in program.fences:
            assert before[fence] == frozenset(range(fence)), seed
            assert all(fence in before[k] for k in nodes[fence + 1 :]), seed


def test_what_follows_comes_behind_all():
    """Also where others put nothing on the stream in between, but record an event."""
    for seed in range(50):
        program = Program(seed, span_of_areas).run()
        last = program.recording.add()
        assert program.recording.before[last] == frozenset(range(last))


def test_no_kernel_waits_for_others():
    """Two calls between the same nodes of others are in order only by a chain of conflicts."""
    seen = 0
    for seed in range(200):
        program = Program(seed, span_of_areas).run()
        units, chains = program.units, {}
        for k, (node, *spans, section) in enumerate(units):
            direct = [
                n for n in range(k)
                if units[n][3] == section and conflict(units[n][1:3], spans, meets=Span.meets)
            ]  # fmt: skip
            chains[k] = set(direct).union(*(chains[n] for n in direct))
            for n in range(k):
                if units[n][3] == section and n not in chains[k]:
                    assert units[n][0] not in program.recording.before[node], (seed, n, k)
                    seen += 1
    assert seen > 1000


def test_kernels_behind_no_other_one_do_not_begin_early():
    early, late = 0, 0
    for seed in range(200):
        program = Program(seed, span_of_areas).run()
        waits = program.recording.waits
        assert waits.issuperset(program.late), seed
        assert not waits.intersection(program.early), seed
        early, late = early + len(program.early), late + len(program.late)
    assert early > 100 and late > 100


def test_nothing_is_waited_for_twice():
    """What the kernel ahead has waited for is not named again."""
    recording = Recording()
    order = GraphOrder(STREAM, recording)
    a, b, c = (whole(k, k + 4) for k in (0, 4, 8))
    order.launch(recording.add, [], [a])
    order.launch(recording.add, [a], [b])
    order.launch(recording.add, [a, b], [c])
    order.launch(recording.add, [a, b, c], [whole(12, 16)])
    assert recording.given == [[], [0], [1], [2]]


def test_two_orders_on_a_stream_are_behind_each_other():
    """As of a sparsified network in another one."""
    recording = Recording()
    outer = GraphOrder(STREAM, recording)
    outer.launch(recording.add, [], [whole(0, 4)])
    outer.launch(recording.add, [], [whole(4, 8)])
    inner = GraphOrder(STREAM, recording)
    for begin in (8, 12):
        inner.launch(recording.add, [], [whole(begin, begin + 4)])
    outer.launch(recording.add, [whole(20, 24)], [whole(16, 20)])
    before = recording.before
    assert before == [set(), set(), {0, 1}, {0, 1}, {0, 1, 2, 3}]


def test_an_error_is_not_hidden_by_that_of_a_spoilt_graph():
    recording = Recording()
    order = GraphOrder(STREAM, recording)

    def spoil():
        def last():
            raise RuntimeError

        recording.last = last
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        order.launch(spoil, [], [whole(0, 4)])


class Result:
    """Something that is kept, or not."""


def kept_of(order, recording, count, nbytes, reads_the_last):
    """Launch kernels with results of so many bytes; return references to these."""
    found, last = [], []
    for number in range(count):
        result = Result()
        span = whole(100 * number, 100 * number + 100)
        order.launch(recording.add, last, [span], [(result, nbytes)])
        found.append(weakref.ref(result))
        last = [span] if reads_the_last else []
    return found


def test_results_are_kept_up_to_a_limit():
    recording = Recording()
    order = GraphOrder(STREAM, recording)
    found = kept_of(order, recording, 10, graph_order._KEPT // 4, True)
    assert [ref() is not None for ref in found] == [False] * 6 + [True] * 4


def test_more_results_are_kept_of_branches():
    recording = Recording()
    order = GraphOrder(STREAM, recording)
    count = graph_order._KEPT_OF_BRANCHES // graph_order._KEPT
    found = kept_of(order, recording, count + 3, graph_order._KEPT, False)
    assert [ref() is not None for ref in found] == [False] * 3 + [True] * count


def test_memory_that_is_taken_is_kept():
    recording, memory = Recording(), Result()
    order, kept = GraphOrder(STREAM, recording), weakref.ref(memory)
    order.take(whole(0, 100), memory)  # by kernels of another stream: nothing is under way
    del memory
    assert kept() is not None
    order.launch(recording.add, [], [whole(0, 4)], [(None, graph_order._KEPT)])
    assert kept() is None
    order.launch(recording.add, [whole(0, 4)], [whole(4, 8)])
    order.launch(recording.add, [whole(0, 4)], [whole(8, 12)])
    last = recording.last()
    order.take(whole(4, 8), None)
    assert recording.last() == last


def test_the_driver_is_asked(monkeypatch):
    """Of the stream by its address, and with the nodes by theirs."""
    nodes, given = (ctypes.c_void_p * 2)(7, 9), []

    def info(stream, status, number, graph, found, count):
        found._obj.contents = ctypes.c_void_p.from_buffer(nodes)
        count._obj.value = 2
        return 0 if stream.value == STREAM else 1

    def update(stream, array, count, flags):
        given.append((stream.value, list(array), count.value, flags.value))
        return 0

    driver = SimpleNamespace(
        cuStreamGetCaptureInfo_v2=info, cuStreamUpdateCaptureDependencies=update
    )
    for module in (graph_memory, graph_order):
        monkeypatch.setattr(module, "driver", lambda: driver)
    recording = graph_order.Recording(STREAM)
    assert recording.last() == [7, 9]
    recording.follow([9])
    recording.follow([])
    assert given == [(STREAM, [9], 1, 1), (STREAM, [], 0, 1)]
    with pytest.raises(RuntimeError, match="cuStreamGetCaptureInfo failed with CUresult 1"):
        graph_order.Recording(STREAM + 1).last()
