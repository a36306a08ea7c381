"""Pixels that are no whole vectors are padded where they are written, and not copied."""

import copy

import pytest

torch = pytest.importorskip("torch")

from support import networks  # noqa: E402  (needs PyTorch)
from support.networks import assert_near  # noqa: E402

nn = torch.nn
F = torch.nn.functional
C = 18


def conv(cin=C, cout=C, kernel=3, stride=1, groups=1):
    return nn.Conv2d(cin, cout, kernel, stride, kernel // 2, groups=groups)


class Of(nn.Module):
    """A first convolution, which reads the image, some modules, and a function of both."""

    def __init__(self, run, *modules):
        super().__init__()
        self.first, self.second = conv(3, 16), conv(16)
        self.inner, self.run = nn.ModuleList(modules), run

    def forward(self, x):
        return self.run(torch.relu(self.second(self.first(x))), *self.inner)


def chain(x, a, b):
    return b(torch.relu(a(x)))


def slow_activation(x, a, b):
    """It makes finite what is infinite, but not what pads that: it is not padded."""
    return b(torch.sigmoid(a(x)))


def residual(x, a, b, last):
    return last(torch.relu(b(torch.relu(a(x))) + x))


def pyramid(x, down, side, up, last):
    """Sums of two resolutions, each with an activation, as in an HRNet."""
    y = torch.relu(down(x))
    fine = torch.relu(side(x) + F.interpolate(up(y), scale_factor=2))
    coarse = torch.relu(down(fine) + y)
    return last(fine), last(coarse)


def fused(x, down, low, lower, last):
    """The sum of three resolutions, and one of two, each by one kernel."""
    y = torch.relu(down(x))
    z = torch.relu(low(y))
    fine = x + F.interpolate(y, scale_factor=2)
    fine = torch.relu(fine + F.interpolate(lower(z), scale_factor=4))
    return last(fine), last(torch.relu(x + F.interpolate(z, scale_factor=4)))


def bilinear(x, down, last):
    return last(F.interpolate(down(x), scale_factor=2, mode="bilinear"))


def pooled(x, a, last):
    return last(F.max_pool2d(a(x), 3, 1, 1)) + last(F.avg_pool2d(a(x), 3, 1, 1))


def joined(x, a, last, also):
    y = a(x)
    return last(torch.cat([x, y], 1)) + also(y)


def strided(x, a, last):
    return last(F.interpolate(a(x)[:, :9], scale_factor=2))


def depthwise(x, a, b, last):
    return last(torch.relu(b(a(x))))


def grouped(x, a, b, last):
    return last(torch.relu(b(a(x))) + x)


def layer_norm(x, a, last):
    y = F.layer_norm(a(x).permute(0, 2, 3, 1), (C,)).permute(0, 3, 1, 2)
    return last(y) + last(x)


def written(x, a, last):
    """What convolutions read is written in place, all of it and a part."""
    y = a(x)
    y.mul_(2)
    y[:, 3:7].mul_(3)
    return last(y.relu_())


def scaled_behind(x, a, norm, last):
    return last(norm(torch.relu(a(x))))


NORM = nn.BatchNorm2d(C)
NORM.running_mean.normal_()
SHAPES = {  # the network, convolutions that read or write padded pixels, and all of them
    "chain": (Of(chain, conv(), conv()), 3, 4),
    "sigmoid": (Of(slow_activation, conv(), conv()), 2, 4),
    "residual": (Of(residual, conv(), conv(), conv()), 4, 5),
    "pyramid": (Of(pyramid, conv(stride=2), conv(), conv(), conv()), 7, 8),
    "fused": (Of(fused, conv(stride=2), conv(stride=2), conv(), conv()), 6, 7),
    "bilinear": (Of(bilinear, conv(stride=2), conv()), 3, 4),
    "pooled": (Of(pooled, conv(), conv()), 5, 6),
    "joined": (Of(joined, conv(), conv(2 * C), conv()), 3, 5),
    "half": (Of(strided, conv(stride=2), conv(9)), 2, 4),
    "depthwise": (Of(depthwise, conv(), conv(groups=C), conv()), 2, 5),
    "grouped": (Of(grouped, conv(), conv(groups=2), conv()), 0, 5),
    "layer norm": (Of(layer_norm, conv(), conv()), 3, 5),
    "written": (Of(written, conv(), conv()), 2, 4),
    "scaled behind": (Of(scaled_behind, conv(), NORM, conv()), 2, 4),
}


def image(seed=1):
    return torch.randn(2, 3, 60, 84, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def unwritten(monkeypatch):
    """Fill the memory of new stacks with NaN: what is read of it before it is written shows."""
    from sbnet_cupy.torch.network import cuda, joins, layout, padding

    def new_stack(*given):
        return layout.new_stack(*given).fill_(torch.nan)

    for module in (cuda, joins, padding):
        monkeypatch.setattr(module, "new_stack", new_stack)


def results_of(sparse, x, mask):
    return torch.utils._pytree.tree_leaves(sparse(x, mask))


@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_odd_channels_are_padded_where_they_are_written(st, asked, unwritten, name):
    dense, padded, convolutions = SHAPES[name]
    dense = copy.deepcopy(dense).eval()
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    for seed in range(5):
        x = image(seed)
        on, mask = networks.blocks((2, 60, 84), 16, 0.5, seed)
        if name == "written":  # the oracle does not write in place
            mask, expected = torch.ones_like(mask), dense(x)
        else:
            expected = networks.oracle(dense, x, on, 16)
        asked.clear()
        results = results_of(sparse, x, mask)
        for got, right in zip(results, torch.utils._pytree.tree_leaves(expected), strict=True):
            assert_near(got, right, "float32")
    kinds = ("conv", "settled", "image", "depthwise")
    found = [n for n in asked if n.split()[0] in kinds]
    assert len(found) == convolutions, asked
    assert len([n for n in found if "padded" in n]) == padded, asked


def infinite(x):
    """Return an activation with an infinite number."""
    x = x.clone()
    x[:, 2, 8, 9] = torch.inf
    return x


def activated(function):
    return lambda x, a, b: b(function(a(infinite(x))))


def of_a_sum(x, a, b):
    y = F.max_pool2d(a(infinite(x)), 3, 1, 1)
    return b(F.relu6(y + F.avg_pool2d(y, 3, 1, 1)))


def of_a_sum_of_three(x, a, b):
    y = F.max_pool2d(a(infinite(x)), 3, 1, 1)
    low = F.interpolate(F.max_pool2d(y, 2), scale_factor=2)
    return b(F.relu6(y + F.avg_pool2d(y, 3, 1, 1) + low))


def of_what_was_computed(x, a, b):
    y = a(infinite(x))
    waits = F.relu(y)
    return b(F.hardsigmoid(y, inplace=True)) + waits.clamp(0, 1)


def bounded_in_place(x, a, b):
    return b(a(infinite(x)).clamp_(-1, 1))


def in_parts(x, a, b):
    y = a(infinite(x))
    for part in y.chunk(2, 1):
        part.clamp_(-1, 1)
    return b(y)


def filled(x, a, b):
    y = a(infinite(x))
    y[:, :, 5:12] = 1
    return b(y)


INFINITE = {
    "relu6": activated(F.relu6), "sigmoid": activated(torch.sigmoid),
    "hardsigmoid": activated(F.hardsigmoid), "sum": of_a_sum,
    "sum of three": of_a_sum_of_three, "computed": of_what_was_computed,
    "in place": bounded_in_place, "parts": in_parts, "filled": filled,
}  # fmt: skip


@pytest.mark.parametrize("name", INFINITE)
@torch.no_grad()
def test_padding_makes_nothing_else_infinite(st, asked, name):
    """Zeros times infinity are NaN: what is finite again must not meet them."""
    dense = Of(INFINITE[name], conv(), conv()).eval()
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    for seed in range(4):
        x = image(seed)
        assert_near(sparse(x, torch.ones(2, 60, 84)), dense(x), "float32")


def not_of_both(x, a, dw, b):
    """What is read is a sum of what may be padded and what may not."""
    return b(F.max_pool2d(a(x), 3, 1, 1) + F.avg_pool2d(dw(x), 3, 1, 1))


@torch.no_grad()
def test_what_nobody_reads_padded_is_padded_no_more(st, asked, monkeypatch):
    from sbnet_cupy.torch.network import joins

    made, padded = [], joins.padded
    monkeypatch.setattr(joins, "padded", lambda *given: made.append(1) or padded(*given))
    dense = Of(not_of_both, conv(), conv(groups=2), conv()).eval()
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    counts = []
    for seed in range(8):
        made.clear()
        sparse(image(seed), networks.blocks((2, 60, 84), 16, 0.5, seed)[1])
        counts.append(len(made))
    assert counts[1] > counts[-1] and len(set(counts[-4:])) == 1, counts


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_padded_pixels_give_the_same_bits_on_a_gpu(require, st, name):
    require("gpu")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        net = copy.deepcopy(SHAPES[name][0]).eval().to("cuda", dtype)
        sparse = st.sparsify(net, 16, capacity=30, replay=False)
        x, mask = image().to("cuda", dtype), networks.blocks((2, 60, 84), 16, 0.4)[1].cuda()
        first = results_of(sparse, x, mask)
        for _ in range(3):
            assert all(map(torch.equal, results_of(sparse, x, mask), first))
        other = networks.blocks((2, 60, 84), 16, 0.4, 5)[1].cuda()
        replayed, alone = sparse.graphed(x, mask), st.sparsify(net, 16, capacity=30, replay=False)
        assert all(map(torch.equal, results_of(replayed, x, other), results_of(alone, x, other)))
