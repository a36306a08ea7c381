"""Results that are joined along channels are written side by side from the second call on."""

import copy
import functools
import threading

import pytest

torch = pytest.importorskip("torch")

from support import networks  # noqa: E402  (needs PyTorch)
from support.networks import assert_near  # noqa: E402

nn = torch.nn
F = torch.nn.functional
C = 16


def conv(cin, cout=C, kernel=3, stride=1, groups=1):
    return nn.Conv2d(cin, cout, kernel, stride, kernel // 2, groups=groups)


class Of(nn.Module):
    """A first convolution, some modules, and a function of both that returns the result."""

    def __init__(self, forward, *modules, first=C):
        super().__init__()
        self.first, self.second = conv(3), conv(C, first)  # the first reads the image
        self.inner, self.run = nn.ModuleList(modules), forward

    def forward(self, x):
        return self.run(torch.relu(self.second(self.first(x))), *self.inner)


def parts_and_what_follows(x, a, b, last):
    """A C2f: both halves, and what convolutions make of the second in turn."""
    halves = list(x.chunk(2, 1))
    for one in (a, b):
        halves.append(torch.relu(one(halves[-1])) + halves[-1])
    return last(torch.cat(halves, 1))


def dense_block(x, a, b, c, last):
    """Each convolution reads all results before."""
    found = [x]
    for one in (a, b, c):
        found.append(torch.relu(one(torch.cat(found, 1))))
    return last(torch.cat(found, 1))


def joined_ahead(x, a, b, last):
    """What was joined is joined to others, behind them."""
    y = torch.cat([a(x), x], 1)
    return last(torch.cat([b(y), y], 1))


def unet(x, down, middle, up, last):
    """A result of the way down beside one of the way up, whose pixels are repeated."""
    y = middle(F.max_pool2d(torch.relu(down(x)), 2))
    return last(torch.cat([F.interpolate(up(y), scale_factor=2), down(x), x], 1))


def unet_transposed(x, down, middle, up, last):
    y = torch.relu(middle(down(x)))
    return last(torch.cat([x, torch.relu(up(y))], 1))


def twice(x, a, last):
    """The same result in two places: one of them is a copy."""
    y = a(x)
    return last(torch.cat([y, x, y], 1))


def in_other_order(x, a, last):
    first, second = a(x).chunk(2, 1)
    return last(torch.cat([second, first], 1))


def of_many(x, *convs):
    *convs, last = convs
    return last(torch.cat([one(x) for one in convs], 1))


def in_two(x, a, b, last, also):
    """A result that two stacks hold."""
    y, z = a(x), b(x)
    return last(torch.cat([y, z], 1)) + also(torch.cat([z, y, x], 1))


def odd(x, a, b, last):
    """Channels that are no whole vectors."""
    return last(torch.cat([a(x), b(x)], 1))


def by_depthwise(x, a, b, c, last):
    """What a depthwise convolution reads is copied if it is a part, so it stays whole."""
    y = a(x)
    return last(torch.cat([y, b(y) + c(y)], 1))


def by_layer_norm(x, a, b, last):
    """Likewise what a layer norm reads."""
    y = a(x)
    z = F.layer_norm(y.permute(0, 2, 3, 1), (C,)).permute(0, 3, 1, 2)
    return last(torch.cat([y, b(z)], 1))


def one_half(x, a, last):
    """A half alone is joined."""
    return last(torch.cat([a(x).chunk(2, 1)[1], x], 1))


SHAPES = {  # the network, and what is copied from the third call on: launches of the kernel
    "parts": (Of(parts_and_what_follows, conv(C), conv(C), conv(4 * C, 8), first=2 * C), 0),
    "dense block": (Of(dense_block, conv(C), conv(2 * C), conv(3 * C), conv(4 * C, 8)), 0),
    "joined ahead": (Of(joined_ahead, conv(C), conv(2 * C), conv(3 * C, 8)), 0),
    "unet": (Of(unet, conv(C), conv(C), conv(C), conv(3 * C, 8)), 1),
    "transposed": (
        Of(unet_transposed, conv(C, C, 3, 2), conv(C), nn.ConvTranspose2d(C, C, 2, 2),
           conv(2 * C, 8)), 0,
    ),
    "twice": (Of(twice, conv(C), conv(3 * C, 8)), 1),
    "other order": (Of(in_other_order, conv(C, 2 * C), conv(2 * C, 8)), 1),
    "many": (Of(of_many, *(conv(C) for _ in range(11)), conv(11 * C, 8)), 0),
    "two": (Of(in_two, conv(C), conv(C), conv(2 * C, 8), conv(3 * C, 8)), 1),
    "odd": (Of(odd, conv(C, 5), conv(C, 11), conv(C, 8)), 1),
    "depthwise": (Of(by_depthwise, conv(C), conv(C, C, 3, 1, C), conv(C), conv(2 * C, 8)), 1),
    "layer norm": (Of(by_layer_norm, conv(C), conv(C), conv(2 * C, 8)), 1),
    "half": (Of(one_half, conv(C, 2 * C), conv(2 * C, 8)), 1),
}  # fmt: skip


COPIED = "other order", "odd", "half", "depthwise", "layer norm", "twice"  # nothing has a place


def image(channels=3, seed=1):
    return torch.randn(2, channels, 60, 84, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_results_are_written_where_they_are_joined(st, asked, name):
    dense, copies = SHAPES[name]
    dense = copy.deepcopy(dense).eval()
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    for seed in range(4):
        x = image(seed=seed)
        on, mask = networks.blocks((2, 60, 84), 16, 0.4, seed)
        asked.clear()
        expected = networks.oracle(dense, x, on, 16)
        assert_near(sparse(x, mask), expected, "float32")
        if seed > 1:
            assert asked.count("stack_concat") == copies, asked
    assert sparse._joins.places or copies


def few_channels(x, a, b, c, last):
    """What reads channels that are no whole vectors copies them first, and writes a part."""
    return last(torch.cat([F.max_pool2d(x, 3, 1, 1), b(a(x)), torch.relu(c(x))], 1))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*SHAPES, "few channels", "norms", "bilinear"])
@torch.no_grad()
def test_bits_are_those_of_copies_on_a_gpu(require, st, name):
    """The first call copies; the others write side by side."""
    require("gpu")
    more = {
        "few channels": Of(few_channels, conv(C, 12), conv(12), conv(C, 24), conv(56, 8)),
        "norms": Of(
            unet, conv(C), conv(C), nn.Sequential(conv(C), nn.InstanceNorm2d(C)), conv(3 * C, 8)
        ),
        "bilinear": Of(
            lambda x, a, last: last(torch.cat([F.interpolate(
                F.avg_pool2d(a(x), 2), scale_factor=2, mode="bilinear"), a(x), x], 1)),
            conv(C), conv(3 * C, 8),
        ),
    }  # fmt: skip
    dense = SHAPES[name][0] if name in SHAPES else more[name]
    for dtype in (torch.float16, torch.bfloat16):
        net = copy.deepcopy(dense).eval().to("cuda", dtype)
        sparse = st.sparsify(net, 16, capacity=30, replay=False)
        x, mask = image().to("cuda", dtype), networks.blocks((2, 60, 84), 16, 0.4)[1].cuda()
        first = sparse(x, mask)
        for _ in range(3):
            assert torch.equal(sparse(x, mask), first)
        assert sparse._joins.places or name in COPIED
        other = networks.blocks((2, 60, 84), 16, 0.4, 5)[1].cuda()
        replayed, alone = sparse.graphed(x, mask), st.sparsify(net, 16, capacity=30, replay=False)
        assert torch.equal(replayed(x, other), alone(x, other))


def writes_to_a_result(x, a, last):
    y = a(x)
    joined = torch.cat([y, x], 1)
    y.relu_()
    x.mul_(3)
    return last(joined) + y + x


def writes_to_what_was_joined(x, a, last, part=None):
    """All of it, or a part."""
    y = a(x)
    joined = torch.cat([y, x], 1)
    _ = joined.sum(1)
    (joined if part is None else joined[:, part]).mul_(2)
    return last(joined) + y + x


def writes_before(x, a, last):
    y = a(x)
    y = y + 0 * y.mean()
    x.mul_(3)
    return last(torch.cat([y, x], 1)) + x


@pytest.mark.parametrize(
    "forward",
    [
        writes_to_a_result, writes_to_what_was_joined, writes_before,
        functools.partial(writes_to_what_was_joined, part=slice(C)),
    ],
)  # fmt: skip
@torch.no_grad()
def test_what_is_written_in_place_is_that_alone(st, asked, forward):
    """On a full mask: the oracle zeroes what a view sees, too."""
    dense = Of(forward, conv(C), conv(2 * C, C)).eval()
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    for seed in range(3):
        x = image(seed=seed)
        assert_near(sparse(x, torch.ones(2, 60, 84)), dense(x), "float32")


class Chooses(nn.Module):
    """Joins other results in each call, in another order, of other channels, or none."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(conv(3 if k == 0 else C) for k in range(4))
        self.wide, self.last, self.kind = conv(C, 2 * C), conv(4 * C, 8), 0

    def forward(self, x):
        a = torch.relu(self.convs[0](x))
        b = self.wide(a)[:, :C] if self.kind == 4 else self.convs[1](a)
        c, d = self.convs[2](b), self.convs[3](b)
        order = ([a, b, c, d], [d, c, b, a], [a, a, d, b], [c, c + d, b, a], [b, d, c, a])
        if self.kind == 5:
            return a + b + c + d
        return self.last(torch.cat(order[self.kind], 1))


@torch.no_grad()
def test_calls_that_join_others_are_right(st, asked):
    """What was learned of one call is but a hint in the next one."""
    dense = Chooses().eval()
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    x = image()
    for number, kind in enumerate([0, 0, 1, 0, 2, 3, 3, 0, 4, 1, 4, 4, 5, 0, 5, 5, 2, 0]):
        dense.kind = kind
        on, mask = networks.blocks((2, 60, 84), 16, 0.4, number)
        assert_near(sparse(x, mask), networks.oracle(dense, x, on, 16), "float32")


@torch.no_grad()
def test_sizes_and_threads_share_what_was_learned(st, asked):
    dense = copy.deepcopy(SHAPES["dense block"][0]).eval()
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    results = {}

    def call(seed):
        size = (60, 84) if seed % 2 else (32, 48)
        x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(seed))
        on, mask = networks.blocks((2, *size), 16, 0.4, seed)
        with torch.no_grad():
            results[seed] = sparse(x, mask), networks.oracle(dense, x, on, 16)

    for seed in range(4):
        call(seed)
    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 10
    for result, expected in results.values():
        assert_near(result, expected, "float32")


@torch.no_grad()
def test_what_was_learned_is_forgotten_in_training_and_not_copied(st, asked):
    sparse = st.sparsify(copy.deepcopy(SHAPES["parts"][0]).eval(), 16)
    sparse.break_even = 2.0
    x, mask = image(), networks.blocks((2, 60, 84), 16, 0.4)[1]
    before = sparse(x, mask)
    assert sparse._joins.places and not copy.deepcopy(sparse)._joins.places
    sparse.train()
    assert not sparse._joins.places
    assert torch.equal(sparse.eval()(x, mask), before)


def test_gradients_are_recorded_of_whole_stacks(st, asked):
    dense = copy.deepcopy(SHAPES["parts"][0]).eval()
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    x, (on, mask) = image(), networks.blocks((2, 60, 84), 16, 0.4)
    with torch.no_grad():
        for _ in range(2):
            sparse(x, mask)
    result = sparse(x, mask)
    assert result.requires_grad and not sparse._joins.places
    assert_near(result.detach(), networks.oracle(dense, x, on, 16).detach(), "float32")


class Keeps(nn.Module):
    """Keeps a result that is joined, and joins an image of it in the next call."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = conv(3), conv(C), conv(3 * C, 8)
        self.kept = None

    def forward(self, x):
        a = torch.relu(self.first(x))
        b = torch.relu(self.second(a))
        before = torch.zeros_like(a) if self.kept is None else self.kept
        self.kept = b
        return self.last(torch.cat([b, a + before, self.second(b)], 1))


@torch.no_grad()
def test_results_that_a_network_keeps(st, asked):
    dense, sparse = Keeps().eval(), st.sparsify(Keeps().eval(), 16)
    sparse.load_state_dict({f"model.{k}": v for k, v in dense.state_dict().items()})
    sparse.break_even = 2.0
    for seed in range(4):
        x = image(seed=seed)
        assert_near(sparse(x, torch.ones(2, 60, 84)), dense(x), "float32")


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_modes_and_hooks(st, asked, mode):
    """A hook reads what is part of a joined stack, before it is joined and after."""
    dense = copy.deepcopy(SHAPES["dense block"][0]).eval()
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    seen = []
    for one in dense.inner:
        one.register_forward_hook(lambda _, given, result: seen.append((given[0], result)))
    for seed in range(4):
        x, (on, mask) = image(seed=seed), networks.blocks((2, 60, 84), 16, 0.4, seed)
        with mode():
            seen.clear()
            expected, its = networks.oracle(dense, x, on, 16), list(seen)
            seen.clear()
            assert_near(sparse(x, mask), expected, "float32")
            on = on.repeat_interleave(16, 1).repeat_interleave(16, 2)[:, None, :60, :84]
            for pair, dense_pair in zip(seen, its, strict=True):
                for ours, theirs in zip(pair, dense_pair, strict=True):
                    assert_near((ours + 0).flatten(2), (theirs * on).flatten(2), "float32")


def of_few_channels(x, a, b, c, last):
    """Whole vectors in float32, and not in float16."""
    return last(torch.cat([a(x), b(x), c(x)], 1))


@torch.no_grad()
def test_other_dtypes_have_other_vectors(st, asked):
    dense = Of(of_few_channels, conv(C, 4), conv(C, 8), conv(C, 4), conv(C, 8)).eval()
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    for seed, narrow in enumerate([False, False, True, True, False, True]):
        x, (on, mask) = image(seed=seed), networks.blocks((2, 60, 84), 16, 0.4, seed)
        with torch.autocast("cpu", torch.float16, enabled=narrow):
            expected = networks.oracle(dense, x, on, 16)
            result = sparse(x, mask)
        assert_near(result.float(), expected.float(), "float16" if narrow else "float32")
    assert sparse._joins.places


class Changes(nn.Module):
    """Makes results of the same numbers in another way in each kind of call."""

    def __init__(self, *kinds):
        super().__init__()
        self.convs, self.small = nn.ModuleList(conv(C) for _ in range(3)), conv(C, 8)
        self.first, self.last, self.kinds, self.kind = conv(3), conv(2 * C, 8), kinds, 0

    def forward(self, x):
        x = torch.relu(self.first(x))
        a, b = (one(x) for one in self.convs[:2])
        _ = a.mean(), b.mean()
        return self.kinds[self.kind](self, a, b)


def joined_late(net, a, b):
    _ = net.convs[2](a).mean()
    return net.last(torch.cat([a, b], 1))


def joined_again(net, a, b):
    return net.last(torch.cat([torch.cat([a, b], 1)], 1))


def joined_twice(net, a, b):
    return torch.cat([torch.cat([a, b], 1), net.convs[2](a)], 1) * 2


def others_joined(net, a, b):
    """A narrow result has the number that what was joined had."""
    narrow = net.small(b)
    _ = narrow.mean()
    return torch.cat([narrow, net.convs[2](a)], 1) * 2


@pytest.mark.parametrize("kinds", [(joined_late, joined_again), (joined_twice, others_joined)])
@torch.no_grad()
def test_numbers_of_other_calls(st, asked, kinds):
    dense = Changes(*kinds).eval()
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    for seed, dense.kind in enumerate([0, 0, 1, 1, 1, 0, 1, 0, 0, 1]):
        x, (on, mask) = image(seed=seed), networks.blocks((2, 60, 84), 16, 0.4, seed)
        assert_near(sparse(x, mask), networks.oracle(dense, x, on, 16), "float32")


@torch.no_grad()
def test_streams_have_memory_of_their_own(st, asked, monkeypatch):
    """Memory that one stream gives back may still be read there."""
    from sbnet_cupy.torch.network import joins

    stream = [0]
    monkeypatch.setattr(joins, "_stream_of", lambda stack: stream[0])

    def on_two(x, a, b, last):
        y = a(x)
        _ = y.mean()
        stream[0] = other
        z = b(x)
        _ = z.mean()
        stream[0] = 0
        return last(torch.cat([y, z], 1))

    dense = Of(on_two, conv(C), conv(C), conv(2 * C, 8)).eval()
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    for seed in range(7):
        other = 1 if seed in (2, 3, 4) else 0
        x, (on, mask) = image(seed=seed), networks.blocks((2, 60, 84), 16, 0.4, seed)
        expected = networks.oracle(dense, x, on, 16)
        asked.clear()
        assert_near(sparse(x, mask), expected, "float32")
        assert asked.count("stack_concat") == (0 if seed in (1, 6) else 1)


@torch.no_grad()
def test_every_second_pixel_is_no_result(st, asked):
    """A result of which pixels are joined is written to no larger stack."""

    def halves(x, a, last):
        y = a(x)
        return last(torch.cat([y[..., ::2], y[..., 1::2]], 1))

    dense = Of(halves, conv(C), conv(2 * C, 8)).eval()
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    for seed in range(3):
        x = image(seed=seed)
        assert_near(sparse(x, torch.ones(2, 60, 84)), dense(x), "float32")
        assert not sparse._joins.places


@torch.no_grad()
def test_what_is_joined_is_copied_before_its_own_memory_is_written_to(st, asked, monkeypatch):
    """And not before others are."""
    from sbnet_cupy.torch.network import aliases

    copied = []

    def settle(x, table, before=aliases.settle):
        copied.extend([1] if aliases.own(x)["_is_lent"] else [])
        before(x, table)

    def writes(x, a, b, last):
        y, z = a(x), torch.relu(b(x))
        joined = torch.cat([y, x], 1)
        other = z + 1
        other.mul_(2)
        z.add_(other)
        if own:
            y.mul_(2)
        return last(joined) + y + z

    monkeypatch.setattr(aliases, "settle", settle)
    dense = Of(writes, conv(C), conv(C), conv(2 * C, C)).eval()
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    for seed, own in enumerate([False, False, False, True]):
        x = image(seed=seed)
        expected = dense(x)
        copied.clear()
        assert_near(sparse(x, torch.ones(2, 60, 84)), expected, "float32")
        assert len(copied) == own
