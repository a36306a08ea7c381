"""sparsify of networks that write in place: views see it, copies do not, or it is refused."""

import pytest

torch = pytest.importorskip("torch")


from support import networks  # noqa: E402  (needs PyTorch)
from support.networks import assert_near  # noqa: E402

nn = torch.nn
F = torch.nn.functional


class Net(nn.Module):
    """A function between two convolutions."""

    def __init__(self, function, channels):
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Conv2d(3, 4, 3, padding=1).double()
        self.pad, self.relu = nn.ReflectionPad2d(1), nn.ReLU(inplace=True)
        self.function = function
        self.after = nn.Conv2d(channels, 2, 3, padding=1).double()

    def forward(self, x):
        """Return the convolution of what the function makes of one."""
        return self.after(self.function(self, self.before(x)))


def written(x, y):
    """Write to y; return both, channels on top of each other."""
    y.mul_(3)
    return torch.cat([x, y], 1)


def last(x):
    """Return channels last, as a copy."""
    return x.permute(0, 2, 3, 1).contiguous()


def first(x):
    """Return channels as the second dimension."""
    return x.permute(0, 3, 1, 2)


def cut(net, x):
    """Write to parts of images that nothing reads afterwards."""
    top, bottom = x[:, :, :20], x[:, :, 25:]
    return net.relu(top.sub_(0.1)) + bottom.mul_(2)


# name: (function, channels of its result)
RIGHT = {
    "padding": (lambda net, x: net.relu(net.pad(x)), 4),
    "padding by hand": (lambda net, x: F.pad(x, (1, 1, 2, 0)).add_(1).clamp_(max=2), 4),
    "padded before": (lambda net, x: (lambda y: net.relu(x)[:, :, 1:] + y[:, :, 2:-1, 1:-1])(
        net.pad(x)
    ), 4),
    "a view of channels": (lambda net, x: written(x, x[:, 1:3]), 6),
    "a copy of channels": (lambda net, x: written(x, x[:, 1:3].contiguous()), 6),
    "a copy in another order": (lambda net, x: written(x, first(last(x)) * 1), 8),
    "a view of a copy": (lambda net, x: written(x, first(last(x))), 8),
    "a part of a view of a copy": (lambda net, x: written(x, first(last(x))[:, 1:3]), 6),
    "what was copied": (lambda net, x: written(first(last(x)), x), 8),
    "another layout": (
        lambda net, x: written(x, x.contiguous(memory_format=torch.channels_last)), 8
    ),
    "itself": (lambda net, x: (x.contiguous().mul_(3), x)[1], 4),
    "no padding": (lambda net, x: written(x, F.pad(x, (0, 0, 0, 0))), 8),
    "a shuffle": (lambda net, x: written(x, F.channel_shuffle(x, 2)), 8),
    "parts that are read": (cut, 4),
    "rows of a copy": (lambda net, x: (x.clone()[:, :, 3:9].mul_(2), x)[1], 4),
    "an operator": (lambda net, x: (torch.ops.aten.add_.Tensor(x, x), x)[1], 4),
}  # fmt: skip

REFUSED = {
    "rows": (lambda x: x[:, :, 3:9].mul_(2), "__getitem__"),
    "cut off": (lambda x: x[:, :, :-4].mul_(2), "a slice"),
    "channels, cut off": (lambda x: x[:, :, :-4][:, :2].mul_(2), "a slice"),
    "one image": (lambda x: x[0].mul_(2), "__getitem__"),
    "narrow": (lambda x: x.narrow(2, 0, 5).zero_(), "narrow"),
    "chunk": (lambda x: x.chunk(2, 3)[1].zero_(), "chunk"),
    "tokens": (lambda x: x.flatten(2).mul_(2), "flatten"),
    "a list": (lambda x: torch._foreach_mul_([x], 2.0), "_foreach_mul_ cannot write to a list"),
}


@pytest.fixture
def image():
    return torch.randn(2, 3, 45, 51, generator=torch.Generator().manual_seed(2)).double()


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("records", [False, True])
def test_views_see_what_is_written_and_copies_do_not(st, image, name, records):
    dense = Net(*RIGHT[name])
    full = torch.ones(2, 45, 51, dtype=torch.bool)
    with torch.set_grad_enabled(records):
        for break_even in (2.0, 0.0):
            sparse = st.sparsify(dense, 16)
            sparse.break_even = break_even
            for _ in range(3):  # the third from a tape, where nothing is recorded
                assert_near(sparse(image, full).detach(), dense(image).detach())


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_would_not_be_seen_is_refused(st, image, name, mode):
    write, words = REFUSED[name]
    sparse = st.sparsify(Net(lambda net, x: (write(x), x)[1], 4), 16)
    _, mask = networks.blocks((2, 45, 51), 16, 0.5)
    for break_even in (2.0, 0.0):
        sparse.break_even = break_even
        with mode(), pytest.raises(NotImplementedError, match=words):
            sparse(image, mask)


@torch.no_grad()
def test_padding_that_was_written_to_is_not_read_again(st, image):
    def function(net, x):
        padded = net.pad(x)
        padded[:, 0] = 1.0
        return padded

    sparse = st.sparsify(Net(function, 4), 16)
    with pytest.raises(NotImplementedError, match="__setitem__ wrote in place to a padded"):
        sparse(image, torch.ones(2, 45, 51))
