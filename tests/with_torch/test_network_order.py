"""Kernels of a network in a CUDA graph: any order that the graph allows gives the same bits.

Here a graph is a list of functions, and what each one comes behind; they are run again in other
orders, in memory that is given out again as soon as it is free.
"""

import contextlib
import functools
import itertools
import random
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sbnet_cupy.core import graph_order  # noqa: E402  (needs PyTorch)
from sbnet_cupy.core import launch as kernels  # noqa: E402
from support import networks  # noqa: E402
from support.network_units import DenseUnit, Excitation, Residual, conv_bn  # noqa: E402

nn, F = torch.nn, torch.nn.functional
tree_leaves, tree_map = torch.utils._pytree.tree_leaves, torch.utils._pytree.tree_map
STREAM = 0x1000
NO_WORK = "empty", "empty_like", "new_empty", "empty_strided", "set_", "_local_scalar_dense"


class Graph(torch.utils._python_dispatch.TorchDispatchMode):
    """What a stream records, in place of a Recording; functions of PyTorch are nodes as well.

    ``nodes`` are (function that does its work again, those that it comes behind, whether it was
    launched in the order of a call).
    """

    def __init__(self):
        super().__init__()
        self.nodes, self._last, self.pool, self.made = [], [], Pool(), []
        self._quiet = False

    def last(self):
        return list(self._last)

    def follow(self, nodes):
        assert len(set(nodes)) == len(nodes)
        self._last = list(nodes)

    def add(self, again, in_order=False):
        self.nodes.append((again, self.last(), in_order))
        self._last = [len(self.nodes) - 1]

    @contextlib.contextmanager
    def quiet(self):
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if self._quiet or func.is_view or func._schema.name.split("::")[1] in NO_WORK:
            return result
        given = tree_map(self.pool.place, (args, kwargs or {}))
        places = [] if func._schema.is_mutable else list(map(self.pool.place, tree_leaves(result)))
        self.made += [t for t in places if isinstance(t, torch.Tensor) and t.is_floating_point()]

        def again():
            args, kwargs = tree_map(self.pool.at, given)
            found = tree_leaves(func(*args, **kwargs))
            for place, value in zip(places, found, strict=False):
                if isinstance(value, torch.Tensor):  # others are numbers
                    self.pool.at(place).copy_(value)

        self.add(again)
        return result

    def start(self, launch, *tensors, order=None, out=()):
        """Launch a kernel in place of ``cuda.start``."""
        places = tree_map(self.pool.place, tensors)
        outs = map(self.pool.place, out if isinstance(out, tuple) else (out,))
        self.made += [t for t in outs if isinstance(t, torch.Tensor)]

        def run():
            with self.quiet():
                launch(*tensors)
            self.add(lambda: launch(*tree_map(self.pool.at, places)), order is not None)

        if order is None:
            run()
        else:
            order.launch(run, STREAM, [t for t in tensors if not isinstance(t, tuple)], out)

    def run(self, sequence):
        """Do all of the work again, with nothing left of what was there."""
        self.pool.memory[:] = 0xFF  # NaN
        for t in self.made:
            t.fill_(torch.nan)
        for k in sequence:
            self.nodes[k][0]()

    def sequences(self, count=8):
        """Return orders in which the graph may run: late nodes first, and others at random."""
        found = [self._sequence(max)]
        for seed in range(count):
            found.append(self._sequence(random.Random(seed).choice))
        return found

    def _sequence(self, choose):
        left = {k: set(behind) for k, (_, behind, _) in enumerate(self.nodes)}
        order = []
        while left:
            ready = [k for k in left if not left[k]]
            order.append(choose(ready))
            del left[order[-1]]
            for behind in left.values():
                behind.discard(order[-1])
        return order

    def are_chain(self):
        """Whether each node comes behind the one before it."""
        return all(behind == [k - 1] for k, (_, behind, _) in enumerate(self.nodes) if k)


class Place:
    """Where a tensor lies in the pool; unlike a tensor it does not keep its memory."""

    def __init__(self, at, t):
        self.at, self.facts = at, (t.dtype, tuple(t.shape), t.stride())


class Pool:
    """Memory that is given out again, first of all what was freed last."""

    def __init__(self, nbytes=1 << 23):
        self.memory, self.free, self.end, self.again = np.empty(nbytes, np.uint8), {}, 0, 0

    def stack(self, like, rows, block, channels):
        """Return memory for a stack in place of ``new_stack``."""
        shape = (rows, channels, *block)
        nbytes = -(-rows * channels * block[0] * block[1] * like.element_size() // 16) * 16
        freed = self.free.setdefault(nbytes, [])
        if freed:
            begin, self.again = freed.pop(), self.again + 1
        else:
            begin, self.end = self.end, self.end + nbytes
            assert self.end <= self.memory.size
        own = self.memory[begin : begin + nbytes]
        weakref.finalize(own, freed.append, begin)
        storage = torch.from_numpy(own).untyped_storage()
        del own
        stride = (block[0] * block[1] * channels, 1, block[1] * channels, channels)
        t = torch.empty(0, dtype=like.dtype).set_(storage, 0, shape, stride)
        assert t.is_contiguous(memory_format=torch.channels_last)
        return t

    def place(self, value):
        """Return the Place of a tensor in the pool; anything else as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        at = value.data_ptr() - self.memory.__array_interface__["data"][0]
        return Place(at, value) if 0 <= at < self.memory.size else value

    def at(self, place):
        """Return a tensor at a Place; anything else as it is."""
        if not isinstance(place, Place):
            return place
        dtype, shape, stride = place.facts
        values = torch.from_numpy(self.memory[place.at :])
        size = dtype.itemsize
        values = values[: values.numel() // size * size].view(dtype)
        return values.as_strided(shape, stride, 0)


class Branches(nn.Module):
    """Three resolutions that add to each other, as HRNet's; some are enlarged."""

    def __init__(self):
        super().__init__()
        self.stem = conv_bn(3, 8)
        self.halve, self.quarter = conv_bn(8, 16, 3, 2), conv_bn(16, 16, 3, 2)
        self.high, self.middle, self.low = Residual(8, 8), Residual(16, 16), Residual(16, 16)
        self.rise = nn.ModuleList(conv_bn(16, 8, 1, act=None) for _ in range(2))
        self.fall = nn.ModuleList([conv_bn(8, 16, 3, 2, act=None), conv_bn(16, 16, 3, 2, act=None)])
        self.level = conv_bn(16, 16, 1, act=None)

    def forward(self, x):
        high = self.stem(x)
        middle = self.halve(high)
        low = self.quarter(middle)
        for _ in range(2):
            high, middle, low = self.high(high), self.middle(middle), self.low(low)
            risen = [
                F.interpolate(rise(y), scale_factor=f, mode="nearest")
                for rise, y, f in zip(self.rise, (middle, low), (2, 4), strict=True)
            ]
            level = F.interpolate(self.level(low), scale_factor=2)
            high, middle, low = (
                F.relu(high + risen[0] + risen[1]),
                F.relu(middle + self.fall[0](high) + level),
                F.relu(low + self.fall[1](middle)),
            )
        return high, middle, low


class Inception(nn.Module):
    """Branches that are joined, twice."""

    def __init__(self):
        super().__init__()
        self.stem = conv_bn(3, 16)
        self.units = nn.ModuleList(self._unit(16 + 32 * k) for k in range(2))
        self.last = nn.Conv2d(48, 4, 1)

    def _unit(self, channels):
        return nn.ModuleList([
            conv_bn(channels, 16, 1), nn.Sequential(conv_bn(channels, 8, 1), conv_bn(8, 16)),
            nn.Sequential(conv_bn(channels, 8, 1), conv_bn(8, 8), conv_bn(8, 8)),
            nn.Sequential(nn.MaxPool2d(3, 1, 1), conv_bn(channels, 8, 1)),
        ])  # fmt: skip

    def forward(self, x):
        x = self.stem(x)
        for unit in self.units:
            x = torch.cat([branch(x) for branch in unit], 1)
        return self.last(x)


class Heads(nn.Module):
    """Boxes and classes at two sizes, below a neck, as YOLO's."""

    def __init__(self):
        super().__init__()
        self.stem, self.down = conv_bn(3, 16, act=nn.SiLU), conv_bn(16, 16, 3, 2, act=nn.SiLU)
        self.inner = nn.ModuleList(conv_bn(8, 8, act=nn.SiLU) for _ in range(2))
        self.join = conv_bn(32, 16, 1, act=nn.SiLU)
        self.boxes, self.classes = (
            nn.ModuleList(
                nn.Sequential(conv_bn(c, 8, act=nn.SiLU), nn.Conv2d(8, n, 1)) for c in (32, 16)
            )
            for n in (4, 8)
        )

    def forward(self, x):
        high = self.stem(x)
        parts = list(self.down(high).chunk(2, 1))
        for one in self.inner:
            parts.append(one(parts[-1]) + parts[-1])
        low = self.join(torch.cat(parts, 1))
        high = torch.cat([F.interpolate(low, scale_factor=2.0), high], 1)
        each = zip((high, low), self.boxes, self.classes, strict=True)
        return [(boxes(y), classes(y)) for y, boxes, classes in each]


class Splits(nn.Module):
    """Parts of a joined stack are split, changed in place and joined again."""

    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b = conv_bn(3, 16), conv_bn(16, 16), conv_bn(16, 16)
        self.each = nn.ModuleList(conv_bn(8, 8) for _ in range(4))
        self.last = nn.Conv2d(32, 4, 1)

    def forward(self, x):
        x = self.stem(x)
        y = torch.cat([self.a(x), self.b(x)], 1)
        parts = [one(part) for one, part in zip(self.each, y.split(8, 1), strict=True)]
        parts[1].relu_()
        y = torch.cat([parts[1], parts[0] + parts[3], parts[2], parts[3]], 1)
        return self.last(F.relu(y, inplace=True))


class Shared(nn.Module):
    """One module for three sizes, and twice for one of them; channels are gated by their means."""

    def __init__(self):
        super().__init__()
        self.stem, self.down = conv_bn(3, 16), nn.MaxPool2d(2)
        self.shared = nn.Sequential(conv_bn(16, 16), Excitation(16), conv_bn(16, 16))
        self.heads = nn.ModuleList(nn.Conv2d(16, 4, 1) for _ in range(3))

    def forward(self, x):
        x = self.stem(x)
        half = self.down(x)
        sizes = [x + self.shared(x), half, self.down(half)]
        return [head(self.shared(y)) for head, y in zip(self.heads, sizes, strict=True)]


class UNet(nn.Module):
    """Skips that are joined to what is enlarged, and a head on every level."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([conv_bn(3, 16), conv_bn(16, 16), conv_bn(16, 16)])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(16, 16, 2, 2) for _ in range(2))
        self.up = nn.ModuleList(conv_bn(32, 16) for _ in range(2))
        self.heads = nn.ModuleList(nn.Conv2d(16, 4, 1) for _ in range(3))

    def forward(self, x):
        skips = []
        for k, layer in enumerate(self.down):
            skips.append(layer(F.max_pool2d(skips[-1], 2) if k else x))
        x = skips.pop()
        found = [self.heads[2](x)]
        for k, (grow, up) in enumerate(zip(self.grow, self.up, strict=True)):
            x = up(torch.cat([grow(x), skips.pop()], 1))
            found.append(self.heads[k](x))
        return found


def dense():
    return nn.Sequential(
        conv_bn(3, 16), DenseUnit(16, 8), DenseUnit(24, 8), DenseUnit(32, 8), nn.Conv2d(40, 4, 1)
    )


def addresses(x):
    """Return the addresses of all bytes of a tensor."""
    at = torch.tensor(x.data_ptr())
    for step, n in zip(x.stride(), x.shape, strict=True):
        at = at[..., None] + torch.arange(n) * (step * x.element_size())
    return {int(n) + k for n in at.flatten() for k in range(x.element_size())}


def bytes_of(span):
    """Return the addresses of a span."""
    steps = range(span.begin, span.end, span.pitch)
    return {n for k in steps for n in range(k, min(k + span.width, span.end))}


def stack(rows=3, channels=8, height=4, width=5, dtype=torch.float32):
    shape = rows, channels, height, width
    return torch.zeros(shape, dtype=dtype).contiguous(memory_format=torch.channels_last)


def lain(shape, stride, offset=0, dtype=torch.float32):
    return torch.zeros(4000, dtype=dtype).as_strided(shape, stride, offset)


LYING = {  # each with whether its span has no other bytes
    "contiguous": (lambda: torch.zeros(3, 4, 5, 6), True),
    "a part of it": (lambda: torch.zeros(9, 4, 5, 6)[3:7], True),
    "number": (lambda: torch.zeros(()), True),
    "one of many": (lambda: torch.zeros(5)[3], True),
    "vector": (lambda: torch.zeros(7, dtype=torch.int32)[2:], True),
    "stack": (stack, True),
    "rows of a stack": (lambda: stack()[1:], True),
    "as pixels": (lambda: stack().permute(0, 2, 3, 1), True),
    "permuted": (lambda: torch.zeros(3, 4, 5).permute(2, 0, 1), True),
    "part": (lambda: stack()[:, 2:5], True),
    "last part": (lambda: stack(dtype=torch.float16)[:, 4:], True),
    "part of rows": (lambda: stack()[1:3, 2:5].permute(0, 2, 3, 1), True),
    "part of a part": (lambda: stack(channels=12)[:, 4:][:, 1:3], True),
    "one channel": (lambda: stack()[:, 3:4], True),
    "one pixel": (lambda: stack(1, 8, 1, 1)[:, 2:5], True),
    "one pixel of rows": (lambda: stack(3, 8, 1, 1)[:, 2:5], True),
    "channels of a pixel": (lambda: stack()[:, :, 1, 2], True),
    "some pixels": (lambda: stack()[:, :, 1:3, 2:4], False),
    "every second pixel": (lambda: stack()[:, :, ::2, ::2], False),
    "every second channel": (lambda: stack()[:, ::2], True),
    "every third number": (lambda: torch.zeros(20)[1::3], True),
    "columns": (lambda: torch.zeros(6, 8)[:, 3:5], True),
    "one column": (lambda: torch.zeros(6, 8)[:, 3], True),
    "expanded": (lambda: torch.zeros(1, 4, 1, 1).expand(3, 4, 5, 6), True),
    "number for all": (lambda: torch.zeros(()).expand(4, 5), True),
    "expanded part": (lambda: stack()[:, 2:5, :1].expand(-1, -1, 4, -1), False),
    "overlapping": (lambda: lain((5, 4), (2, 1), 3), True),
    "overlapping all ways": (lambda: lain((5, 4, 6), (2, 1, 3), 3), True),
    "twice from number to number": (lambda: lain((3, 4), (1, 1), 3), True),
    "and further apart": (lambda: lain((5, 3, 4), (8, 1, 1), 3), True),
    "and further apart, overlapping": (lambda: lain((5, 3, 4), (5, 1, 1), 3), True),
    "no common step": (lambda: lain((3, 4), (7, 3), 5), False),
    "parts, no common step": (lambda: lain((3, 4, 2), (9, 6, 1), 5), False),
}


@pytest.mark.parametrize("name", LYING)
def test_the_memory_of_a_tensor_is_all_of_it(name):
    from sbnet_cupy.torch.network.order import span_of

    make, is_exact = LYING[name]
    x = make()
    span, expected = span_of(x), addresses(x)
    assert span.begin == min(expected) and span.end == max(expected) + 1
    assert bytes_of(span) >= expected
    assert (bytes_of(span) == expected) == is_exact


def test_parts_meet_where_they_have_a_byte_in_common():
    """Also with the whole, with rows of it, and with tensors that lie otherwise."""
    from sbnet_cupy.torch.network.order import span_of

    whole, other = stack(3, 12, 2, 2), stack(3, 12, 2, 2)
    channels = itertools.combinations(range(0, 13, 2), 2)
    parts = [whole[:, a:b] for a, b in channels] + [whole[1:, 3:7], whole[:2, 7:], whole[2]]
    for one, two in itertools.product(parts, parts):
        shared = bool(addresses(one) & addresses(two))
        assert span_of(one).meets(span_of(two)) == shared
    for one in parts:
        assert not span_of(one).meets(span_of(other)) and span_of(one).meets(span_of(whole))
        for flat in (whole.permute(0, 2, 3, 1).flatten(), whole[0].flatten(), whole[1, :, 0, 0]):
            if addresses(flat) & addresses(one):
                assert span_of(flat).meets(span_of(one)) and span_of(one).meets(span_of(flat))


@torch.no_grad()
def test_tensors_at_random_meet_where_they_have_a_byte_in_common():
    """Views of one memory, also of shapes and strides that no network has."""
    from sbnet_cupy.torch.network.order import span_of

    rng, memory = random.Random(1), torch.zeros(400, dtype=torch.float16)
    found = set()
    for _ in range(3000):
        views = []
        for _ in range(2):
            dims = rng.randint(1, 4)
            shape = [rng.randint(1, 4) for _ in range(dims)]
            stride = [rng.choice((0, 1, 1, 2, 3, 4, 8, 8, 16, 24)) for _ in range(dims)]
            views.append(memory.as_strided(shape, stride, rng.randrange(60)))
        spans, (one, two) = list(map(span_of, views)), map(addresses, views)
        assert bytes_of(spans[0]) >= one, views[0].stride()
        shared = bool(one & two)
        assert spans[0].meets(spans[1]) >= shared
        found.add((spans[0].meets(spans[1]), shared))
    assert len(found) == 3


NETWORKS = {  # and whether some of its kernels may run beside each other
    "branches": (Branches, True),
    "inception": (Inception, True),
    "heads": (Heads, True),
    "splits": (Splits, True),
    "shared": (Shared, True),
    "unet": (UNet, True),
    "dense": (dense, False),
    "csp": (networks.CSP, True),
    "hrnet": (networks.HRNet, True),
    "efficientnet": (networks.efficientnet, False),
}


@pytest.fixture
def record(asked, st, monkeypatch):
    """Return what records a call of a network: the graph and its result.

    Without ``run`` it gives the sparsified network, whose next calls the graph records.
    """
    from sbnet_cupy.torch.network import cuda, joins, model, order, padding

    monkeypatch.setattr(kernels, "_JOINED", set())

    def record(dense, x, mask, run=True):
        sparse = st.sparsify(dense, 16)
        sparse.break_even = 2.0
        for _ in range(2):  # which learn what is joined
            sparse._call(x, mask)
        graph = Graph()
        monkeypatch.setattr(model, "order_of", lambda x: order.CallOrder(STREAM, graph))
        monkeypatch.setattr(cuda, "start", graph.start)
        for module in (cuda, joins, padding):
            monkeypatch.setattr(module, "new_stack", graph.pool.stack)
        if not run:
            return sparse, graph
        with graph:
            result = sparse._call(x, mask)
        return graph, result

    return record


def images_and_mask(size=(64, 96)):
    x = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(3))
    return x, networks.blocks((1, *size), 16, 0.4, 1)[1]


@pytest.mark.parametrize("kept", [0, 1 << 22])
@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_other_orders_give_the_same_bits(record, monkeypatch, name, kept):
    """Whether memory is given out again at once, or not."""
    for limit in ("_KEPT", "_KEPT_OF_BRANCHES"):
        monkeypatch.setattr(graph_order, limit, kept)
    make, has_branches = NETWORKS[name]
    torch.manual_seed(1)
    network = networks.random_statistics(make()).eval()
    graph, result = record(network, *images_and_mask())
    expected = [t.clone() for t in tree_leaves(result)]
    assert sum(in_order for *_, in_order in graph.nodes) > 5
    assert graph.pool.again or kept
    for sequence in graph.sequences():
        graph.run(sequence)
        for got, e in zip(tree_leaves(result), expected, strict=True):
            assert torch.equal(got, e)
    assert not (graph.are_chain() and has_branches and kept)


@torch.no_grad()
def test_branches_that_add_to_each_other_are_launched_in_their_order(record):
    """All kernels behind those that make the mask a table."""
    graph, _ = record(Branches().eval(), *images_and_mask())
    launched = [in_order for *_, in_order in graph.nodes]
    assert all(launched[launched.index(True) :])


@pytest.fixture
def order(monkeypatch):
    """Return an order on a Graph that has no functions of PyTorch, and the graph."""
    from sbnet_cupy.torch.network.order import CallOrder

    monkeypatch.setattr(kernels, "_JOINED", set())
    graph = Graph()
    return CallOrder(STREAM, graph), graph


def behind(graph):
    return [nodes for _, nodes, _ in graph.nodes]


def test_a_kernel_may_read_more_than_it_writes_from_the_same_address_on(order):
    (order, graph), whole = order, stack()
    add = functools.partial(graph.add, None)
    order.launch(add, STREAM, (whole[:, 4:],), whole[:, 4:])
    order.launch(add, STREAM, (whole[:, :4],), whole[:, :4])
    order.launch(add, STREAM, (None, whole, torch.zeros(0)), (whole[:, :4], None, torch.zeros(0)))
    assert [set(nodes) for nodes in behind(graph)] == [set(), set(), {0, 1}]


def test_a_result_is_not_read_where_it_is_given_as_it_lies_in_memory(order):
    """As one dimension, which has all between its pixels."""
    from sbnet_cupy.torch.network.cuda import _flat

    (order, graph), whole = order, stack()
    add = functools.partial(graph.add, None)
    order.launch(add, STREAM, (whole[:, 4:],), whole[:, 4:])
    order.launch(add, STREAM, (_flat(whole[:, :4]),), whole[:, :4])
    order.launch(add, STREAM, (whole[:, 4:].permute(0, 2, 3, 1),), whole[:, 4:])
    assert behind(graph) == [[], [], [0]]


def test_kernels_of_other_streams_are_launched_as_they_are(order):
    (order, graph), x = order, torch.zeros(8)
    add = functools.partial(graph.add, None)
    order.launch(add, STREAM, (), x[:4])
    order.launch(add, STREAM, (), x[4:])
    order.launch(add, STREAM + 1, (), torch.zeros(8))  # on the same Graph, as there is but one
    assert behind(graph) == [[], [], [0, 1]]


def test_memory_that_kernels_take_is_waited_for(order, monkeypatch):
    """Where kernels before them read or wrote it."""
    from sbnet_cupy.torch.network import order as orders

    (order, graph), x, y = order, torch.zeros(8), torch.zeros(8)
    add = functools.partial(graph.add, None)
    memory = SimpleNamespace(ptr=x.data_ptr() + 16, mem=object())
    monkeypatch.setattr(orders, "allocate", lambda nbytes: memory)
    order.launch(add, STREAM, (x[:4],), y[:2])
    order.launch(add, STREAM, (x[4:],), y[2:4])

    def run():
        add()
        assert order.allocate(16) is memory
        add()

    order.launch(run, STREAM, (), y[4:])
    assert behind(graph) == [[], [], [], [2, 1]]


def test_no_order_where_a_graph_of_another_device_is_captured(monkeypatch):
    """PyTorch tells of the current device, and the driver changes nothing on other streams."""
    from sbnet_cupy.core import graph_memory
    from sbnet_cupy.torch.network import order as orders

    status = 0

    def info(stream, status_of, number, *_):
        status_of._obj.value, number._obj.value = status, 7
        return 0

    driver = SimpleNamespace(
        cuStreamGetCaptureInfo_v2=info,
        cuStreamUpdateCaptureDependencies=lambda *_: 0 if status else 401,
    )
    for module in (graph_memory, graph_order):
        monkeypatch.setattr(module, "driver", lambda: driver)
    monkeypatch.setattr(orders, "knows_order", lambda: True)
    monkeypatch.setattr(orders, "capturing_stream", lambda x: STREAM)
    assert orders.order_of(torch.zeros(1)) is None
    status = 1
    assert orders.order_of(torch.zeros(1)).stream == STREAM


class Keeps(nn.Module):
    """Keeps an activation, and may raise."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.error = conv_bn(3, 16), conv_bn(16, 8), None

    def forward(self, x):
        self.kept = self.first(x)
        y = self.second(self.kept)
        if self.error is not None:
            _ = y.sum()
            raise self.error
        return y


@pytest.mark.parametrize("error", [None, KeyError("mine")])
@torch.no_grad()
def test_what_is_kept_beyond_a_call_has_no_order(record, error):
    """It may be used when no graph is captured: also after a call that failed."""
    network, (x, mask) = networks.random_statistics(Keeps()).eval(), images_and_mask()
    sparse, graph = record(network, x, mask, run=False)
    network.error = error
    with contextlib.nullcontext() if error is None else pytest.raises(KeyError, match="mine"):
        sparse._call(x, mask)
    launched = [in_order for *_, in_order in graph.nodes]
    assert any(launched)
    network.second[0](network.kept).sum()
    after = [in_order for *_, in_order in graph.nodes[len(launched) :]]
    assert after and not any(after)


@torch.no_grad()
def test_networks_in_networks_have_orders_of_their_own(record, st):
    """The kernels of one come behind all of the other that came before."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.a, self.b = conv_bn(3, 8), conv_bn(8, 8), conv_bn(8, 8)
            self.held = (st.sparsify(Inception().eval(), 16),)  # which no module is told of
            self.held[0].break_even = 2.0
            self.last = nn.Conv2d(16, 4, 1)

        def forward(self, x):
            y = self.stem(x)
            a, found = self.a(y), self.held[0]._call(self.image, self.mask)
            return self.last(torch.cat([a, self.b(y)], 1)), found

    torch.manual_seed(1)
    x, mask = images_and_mask()
    network = networks.random_statistics(Outer()).eval()
    network.image, network.mask = x * 2, torch.ones_like(mask)
    graph, result = record(network, x, mask)
    expected = [t.clone() for t in tree_leaves(result)]
    for sequence in graph.sequences(4):
        graph.run(sequence)
        assert all(map(torch.equal, tree_leaves(result), expected))
    assert not graph.are_chain()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_replays_have_the_bits_of_calls_on_a_gpu(require, st, name, dtype):
    """With two calls in a graph, and what the user does before, between and after them."""
    require("gpu")
    torch.manual_seed(1)
    network = networks.random_statistics(NETWORKS[name][0]()).eval().to("cuda", dtype)
    sparse = st.sparsify(network, 16, capacity=24, replay=False)
    x, mask = (t.to("cuda") for t in images_and_mask())
    x = x.to(dtype)

    def run():
        first = tree_leaves(sparse(x.flip(3), mask))
        again = sparse(x * 2 + first[0].amax(), mask.flip(2))
        return [*first, *(t * 2 for t in tree_leaves(again))]

    for _ in range(3):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for seed in range(5):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        mask.copy_(networks.blocks((1, 64, 96), 16, 0.2 * seed, seed)[1])
        expected = [t.clone() for t in run()]
        for t in results:
            t.fill_(torch.nan)
        for _ in range(3):
            graph.replay()
        for got, e in zip(results, expected, strict=True):
            assert torch.equal(got.nan_to_num(7), e.nan_to_num(7)) and not e.isnan().all()
