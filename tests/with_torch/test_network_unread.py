"""Training where functions are infinite at 0: pixels that nothing reads are in no gradient."""

import pytest

torch = pytest.importorskip("torch")

from support import networks  # noqa: E402  (needs PyTorch)
from support.networks import image  # noqa: E402
from support.torch_autograd import assert_near_steps, train_step  # noqa: E402

nn, F = torch.nn, torch.nn.functional

SIZES, BLOCK = [(48, 64), (41, 59)], 16


def _divided_in_place(net, x):
    y = x * 1
    y /= x.abs().sum(1, keepdim=True)
    return y


def _last(net, x):
    """Divide in channels_last order."""
    x = x.permute(0, 2, 3, 1)
    return (x / x.norm(dim=-1, keepdim=True)).permute(0, 3, 1, 2)


def _squares(x):
    return x.square() + x.flip(1).square()


def _far_from_0(x):
    """Return sizes of at least 1, and 0 at 0: near 0 roots make much of the last bits of sums."""
    return x.abs() + (x != 0)


FUNCTIONS = {
    "quotient": lambda net, x: x / x.norm(dim=1, keepdim=True),
    "in place": _divided_in_place,
    "by name": lambda net, x: torch.div(x, other=x.norm(dim=1, keepdim=True)),
    "channels last": _last,
    "square root": lambda net, x: x * torch.sqrt(x.square().sum(1, keepdim=True)),
    "square root in place": lambda net, x: _far_from_0(x).sqrt_(),
    "smooth ones": lambda net, x: (x / 2 / net.scale) ** 2,
    "power": lambda net, x: _far_from_0(x) ** 0.5,
    "standard deviation": lambda net, x: x / x.std(1, keepdim=True),
    "hypot": lambda net, x: torch.hypot(x, x.flip(1)),
    "parameter": lambda net, x: net.scale / x.norm(dim=1, keepdim=True),
    "chosen": lambda net, x: torch.where(_squares(x) > 1e-9, x / _squares(x), 0),
    "log and parameter": lambda net, x: torch.log(_squares(x)) * net.scale,
    "log and convolution": lambda net, x: net.mixed(torch.log(_squares(x))),
    "log and softmax": lambda net, x: torch.softmax(torch.log(_squares(x)), 1),
    "softmax of nothing": lambda net, x: x.masked_fill(x == 0, -torch.inf).softmax(1),
    "an unknown function": lambda net, x: torch.special.bessel_y0(x.detach().abs()) * net.scale * x,
}


class Singular(nn.Module):
    """A function of channels, infinite at 0, between convolutions without bias."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.mixed = nn.Conv2d(4, 4, 1)
        self.after = nn.Conv2d(4, 2, 3, padding=1)
        self.scale = nn.Parameter(torch.rand(4, 1, 1) + 0.5)
        self.function = function

    def forward(self, x):
        """Return the convolution of what the function makes."""
        return self.after(self.function(self, self.before(x)))

    def at(self, x, mask):
        """Return what it has to be: the function sees the pixels of the mask alone."""
        pixels = self.before(x * mask[:, None]).movedim(1, -1)[mask]
        made = self.function(self, pixels.t()[None, :, None]).expand(1, 4, 1, -1)
        h = torch.zeros(*mask.shape, 4, dtype=x.dtype)
        h[mask] = made[0, :, 0].t()
        return self.after(h.movedim(-1, 1)) * mask[:, None]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0.4, 1.0])
@pytest.mark.parametrize(("break_even", "capacity"), [(2.0, None), (2.0, 30), (0.0, None)])
def test_pixels_that_nothing_reads_are_in_no_gradient(st, name, size, share, break_even, capacity):
    """On stacks, with rows for more blocks, and on whole images that are 0 elsewhere."""
    net = Singular(FUNCTIONS[name]).double()
    sparse = st.sparsify(Singular(FUNCTIONS[name]).double(), BLOCK, capacity=capacity)
    sparse.break_even = break_even
    x = image(size=size)
    _, mask = networks.blocks((2, *size), BLOCK, share)
    expected = train_step(net, x, mask, call=net.at)
    assert all(value.isfinite().all() for value in expected.values())
    assert_near_steps(train_step(sparse.model, x, mask, call=sparse), expected)


@pytest.mark.parametrize("break_even", [2.0, 0.0])
@pytest.mark.parametrize("elsewhere", [float("inf"), float("nan")])
def test_what_another_image_holds_elsewhere_is_in_no_gradient(st, break_even, elsewhere):
    """A depth that is there where the mask is, say."""
    net = Singular(lambda net, x: x * net.depth).double()
    sparse = st.sparsify(Singular(lambda net, x: x * net.depth).double(), BLOCK)
    sparse.break_even = break_even
    size = SIZES[0]
    _, mask = networks.blocks((2, *size), BLOCK, 0.4)
    depth = torch.where(mask, torch.rand(2, *size, dtype=torch.float64) + 1, elsewhere)[:, None]
    x = image(size=size)
    sparse.model.depth = depth
    net.depth = torch.where(mask[:, None], depth, 0)
    found = train_step(sparse.model, x, mask, call=sparse)
    expected = train_step(net, x, mask, call=lambda x, mask: net(x * mask[:, None]) * mask[:, None])
    assert_near_steps(found, expected)


@pytest.mark.parametrize(("break_even", "capacity"), [(2.0, None), (2.0, 30), (0.0, None)])
def test_an_image_without_blocks_divides_by_its_mean(st, break_even, capacity):
    """The mean of the first image is 0; nothing reads its pixels, and so the mean."""
    steps = []
    for images in (slice(0, 2), slice(1, 2)):
        net = Singular(lambda net, x: x / net.mixed(x).mean((2, 3), keepdim=True)).double()
        nn.init.zeros_(net.mixed.bias)
        sparse = st.sparsify(net, BLOCK)
        sparse.break_even, sparse.capacity = break_even, capacity
        _, mask = networks.blocks((2, 48, 64), BLOCK, 0.4)
        mask[0] = False
        x = image(size=(48, 64))[images]
        step = train_step(sparse.model, x, mask[images], call=sparse)
        steps.append({name: step[f"{name}.weight"] for name in ("before", "mixed", "after")})
    assert_near_steps(*steps)


@pytest.mark.parametrize(
    "function", [lambda x: x / 2, lambda x: x**2, lambda x: x.div(x.new_ones(()))]
)
def test_smooth_functions_cost_nothing(st, function, monkeypatch):
    """Numbers that nothing reads are replaced for functions alone that may be infinite."""
    calls, where = [], torch.where
    monkeypatch.setattr(torch, "where", lambda *args: calls.append(args) or where(*args))
    sparse = st.sparsify(Singular(lambda net, x: function(x)).double(), BLOCK)
    sparse.break_even = 0.0
    _, mask = networks.blocks((2, 48, 64), BLOCK, 0.4)
    sparse(image(size=(48, 64)), mask)
    assert not calls
    sparse.model.function = lambda net, x: 1 / x
    sparse(image(size=(48, 64)), mask)
    assert calls
