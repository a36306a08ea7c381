"""What the network asks of kernels for values of channels: gates of pooled images, and scales."""

import pytest

torch = pytest.importorskip("torch")

from sbnet_cupy.torch.network import tensor as T  # noqa: E402  (needs PyTorch)
from support import networks  # noqa: E402
from support.networks import assert_near  # noqa: E402


class Excitation(torch.nn.Module):
    """A convolution, values of whole images through two products, and what is made of them."""

    def __init__(self, what):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.what = torch.nn.Conv2d(3, 8, 3, padding=1), what
        inner = torch.nn.ReLU(inplace=what == "in place")
        self.down, self.inner = torch.nn.Conv2d(8, 4, 1), inner
        self.up = torch.nn.Conv2d(4, 8, 1, bias=what != "no bias")
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        """Return what may be made of them."""
        x = torch.nn.functional.hardswish(self.conv(x))
        pooled = x.mean((2, 3), keepdim=True)
        if self.what == "linear":
            return x * torch.sigmoid(self.linear(x.mean((2, 3))))[:, :, None, None]
        few = self.down(pooled)
        if self.what == "written":
            pooled.zero_()
            return x * (self.up(torch.relu(few)) + pooled)
        if self.what == "read twice":
            return x * torch.nn.functional.hardsigmoid(self.up(self.inner(few) + few))
        gate = torch.nn.functional.hardsigmoid(self.up(self.inner(few)))
        if self.what == "first":
            return gate * x
        if self.what == "with a sum":
            y = x * gate
            y += x
            return torch.relu(y) + x
        if self.what == "written after":
            y = x * gate
            gate.zero_()  # y has been made of what it was
            return torch.relu(y + x)
        if self.what == "seen after":
            y = x * gate
            gate.view(-1)[0] = 1
            return torch.relu(y) + x * gate
        if self.what == "returned":
            return x * gate, gate, self.up(few)
        return x * gate


def called_twice(st, asked, dense):
    """Return an image, its active blocks, and what a network makes of them in a second call."""
    x = torch.randn(2, 3, 45, 51)
    on, mask = networks.blocks((2, 45, 51), 16, 0.5, seed=3)
    sparse = st.sparsify(dense, 16)
    sparse.break_even, sparse.replay = 2.0, False
    sparse(x, mask)
    asked.clear()
    return x, on, sparse(x, mask)


@pytest.mark.parametrize(
    "what",
    [
        "usual", "in place", "no bias", "linear", "written", "read twice", "first", "returned",
        "with a sum", "written after", "seen after",
    ],
)
@torch.no_grad()
def test_excitation_is_products_and_one_scale(st, asked, what):
    dense = Excitation(what).eval()
    x, on, result = called_twice(st, asked, dense)
    if what == "returned":
        result, gate, last = result
        assert type(gate) is type(last) is torch.Tensor
        inner = dense.conv(x * on_pixels(on, x))
        pooled = (torch.nn.functional.hardswish(inner) * on_pixels(on, x)).mean((2, 3), True)
        few = dense.down(pooled)
        expected = torch.nn.functional.hardsigmoid(dense.up(torch.relu(few)))
        assert_near(gate, expected, "float32")
        assert_near(last, dense.up(few), "float32")
        dense.what = "usual"
    assert_near(result, networks.oracle(dense, x, on, 16), "float32")
    products = 1 if what in ("linear", "read twice", "written") else 2
    if what == "with a sum":
        assert asked.count("affine") == 2  # the sum is part of the product
    if what == "written after":
        assert asked.count("affine") == 1
    assert asked.count("image linear") >= products and "affine" in asked


def on_pixels(on, x):
    """Return the active blocks of 16 pixels as an image."""
    wide = torch.as_tensor(on).repeat_interleave(16, 1).repeat_interleave(16, 2)
    return wide[:, None, : x.shape[2], : x.shape[3]].to(x.dtype)


class Shared(torch.nn.Module):
    """One scale and one shift for all channels, sums of what has been computed, leaky relus."""

    def __init__(self, inplace, slope=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.convs = torch.nn.ModuleList(torch.nn.Conv2d(c, 8, 3, padding=1) for c in (3, 8, 8))
        self.norm = networks.random_statistics(torch.nn.BatchNorm2d(8))
        self.leaky = torch.nn.LeakyReLU(slope, inplace)
        self.scale, self.shift = (torch.nn.Parameter(torch.randn(1)) for _ in range(2))

    def forward(self, x):
        """Return a sum, what is scaled and shifted, and one of both that a relu follows."""
        first = self.convs[0](x)
        x = self.leaky(self.norm(first))  # in place or not, it is part of the convolution
        both = self.scale * torch.relu(self.convs[1](x)) + self.shift
        third = torch.relu(self.convs[2](x))
        once = x + third
        return self.leaky(once), both, torch.relu(both + third), both + self.shift + x


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("slope", [0.1, 0.01, 0, 1.5, -0.5])
@torch.no_grad()
def test_sums_and_leaky_relus_wait(st, asked, inplace, slope):
    dense = Shared(inplace, slope).eval()
    x, on, results = called_twice(st, asked, dense)
    # What is scaled and shifted is part of a convolution; two sums of it, or of what follows, wait.
    assert asked.count("settled scaled last") == asked.count("image") == 1
    assert asked.count("affine") == 2
    assert_all_near(results, dense, x, on)


class SumBehind(torch.nn.Module):
    """Units that add what they were given behind the activation, as those of YOLO do."""

    def __init__(self, activation):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Conv2d(3, 8, 3, 2, 1)
        self.convs = torch.nn.ModuleList(torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.convs.append(torch.nn.Conv2d(8, 8, 3, padding=1, groups=8))
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(8) for _ in self.convs)
        self.norms.apply(networks.random_statistics)
        self.activation = activation

    def unit(self, x, i):
        """Return the activation of a convolution."""
        return self.activation(self.norms[i](self.convs[i](x)))

    def forward(self, x):
        """Return sums: of two layers and what they read, from either side, in place, and read."""
        x = self.first(x)
        x = x + self.unit(self.unit(x, 0), 1)
        x = self.unit(x, 4) + x
        y = self.unit(x, 2)
        y += x
        z = self.unit(y, 3)
        return y + z, z


BEHIND = {  # and whether it may come before a sum in a kernel
    "relu": (torch.relu, True), "silu": (torch.nn.functional.silu, True),
    "gelu": (torch.nn.GELU(), True), "hardswish": (torch.nn.functional.hardswish, True),
    "leaky relu": (torch.nn.LeakyReLU(0.1), True), "tanh": (torch.tanh, False),
}  # fmt: skip


class NormLast(torch.nn.Module):
    """Layers whose batch norm comes behind the activation, as it does in many networks."""

    def __init__(self, what, activation):
        super().__init__()
        torch.manual_seed(0)
        self.what, self.activation = what, activation
        shapes = [(3, 8, 1, 1), (8, 8, 1, 1), (8, 8, 8, 1), (8, 20, 1, 2), (20, 8, 1, 1)]
        self.convs = torch.nn.ModuleList(
            torch.nn.Conv2d(c, k, 3, stride, 1, groups=groups) for c, k, groups, stride in shapes
        )
        affine = what != "no parameters"
        self.norms = torch.nn.ModuleList(
            torch.nn.BatchNorm2d(k, affine=affine) for _, k, _, _ in shapes
        )
        self.norms.apply(networks.random_statistics)

    def layer(self, x, i):
        """Return the norm of what an activation makes of a convolution."""
        return self.norms[i](self.activation(self.convs[i](x)))

    def forward(self, x):
        """Return the last of them, and what else is read."""
        x = self.layer(x, 0)
        if self.what == "read before":  # the activation is a result, too
            y = self.activation(self.convs[1](x))
            return y + self.norms[1](y)
        y = self.layer(x, 1)
        if self.what == "a sum":
            return self.activation(self.layer(y, 2) + x)
        if self.what == "a sum before":
            y = self.norms[2](self.activation(self.convs[2](y) + x))
        if self.what == "two norms":
            y = self.norms[2](self.layer(y, 2))
        if self.what == "in place":
            y = self.layer(y, 2)
            y += x
            torch.relu_(y)
        return self.layer(self.layer(y, 3), 4)


@pytest.mark.parametrize(
    ("what", "last"),
    [
        ("usual", 4), ("no parameters", 4), ("read before", 1), ("a sum", 3), ("a sum before", 5),
        ("two norms", 5), ("in place", 5),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["relu", "silu", "leaky relu", "tanh"])
@torch.no_grad()
def test_a_norm_behind_an_activation_is_part_of_the_convolution(st, asked, what, last, name):
    activation, fits = BEHIND[name]
    dense = NormLast(what, activation).eval()
    x, on, results = called_twice(st, asked, dense)
    assert sum("scaled last" in one for one in asked) == (last if fits else 0)
    assert_near(results, networks.oracle(dense, x, on, 16), "float32")


@torch.no_grad()
def test_what_lies_outside_is_scaled_last_too(st, asked):
    torch.manual_seed(0)
    dense = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.BatchNorm2d(8)
    ).eval()  # fmt: skip
    networks.random_statistics(dense)
    sparse, x = st.sparsify(dense, 16, outside="bias"), torch.randn(2, 3, 45, 51)
    on, mask = networks.blocks((2, 45, 51), 16, 0.5, seed=3)
    sparse.break_even = 2.0
    result = sparse(x, mask)
    assert asked.count("image scaled last") == 1
    inside = on_pixels(on, x)
    assert_near(result * inside, networks.oracle(dense, x, on, 16) * inside, "float32")
    assert_near(result * (1 - inside), dense(0 * x) * (1 - inside), "float32")


@pytest.mark.parametrize("name", BEHIND)
@torch.no_grad()
def test_a_sum_behind_an_activation_is_part_of_the_convolution(st, asked, name):
    activation, fits = BEHIND[name]
    dense = SumBehind(activation).eval()
    x, on, results = called_twice(st, asked, dense)
    assert asked.count("affine") == (0 if fits else 3)  # one is in place
    assert_all_near(results, dense, x, on)


class Bounded(torch.nn.Module):
    """A convolution and what bounds its result."""

    def __init__(self, bound):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bound = torch.nn.Conv2d(3, 8, 3, padding=1), bound

    def forward(self, x):
        """Return the result, some of which is above 6."""
        return self.bound(self.conv(9 * x))


BOUNDS = {  # and what they are as an activation
    "ReLU6": (torch.nn.ReLU6(), "relu6"),
    "ReLU6 in place": (torch.nn.ReLU6(inplace=True), "relu6"),
    "hardtanh_": (lambda y: torch.nn.functional.hardtanh_(y, 0, 6.0), "relu6"),
    "clamp": (lambda y: y.clamp(0, 6), "relu6"),
    "clamp_ by name": (lambda y: y.clamp_(max=6, min=0), "relu6"),
    "clip from 0": (lambda y: torch.clip(y, min=0.0), "relu"),
    "Hardtanh": (torch.nn.Hardtanh(), None),
    "clamp to 0.1": (lambda y: y.clamp(0, 0.1), None),
    "clamp by tensors": (lambda y: y.clamp(torch.zeros(()), torch.full((), 0.2)), None),
}


@pytest.mark.parametrize("bound", BOUNDS)
@torch.no_grad()
def test_bounds_that_are_activations_are_part_of_convolutions(st, asked, bound):
    (function, activation), seen = BOUNDS[bound], []

    def bounded(y):
        y = function(y)
        seen.append(T.plan_of(y) and T.plan_of(y).activation)
        return y

    dense = Bounded(bounded).eval()
    x, on, results = called_twice(st, asked, dense)
    assert seen == [activation] * 2  # it waits with the convolution
    assert_near(results, networks.oracle(dense, x, on, 16), "float32")


@torch.no_grad()
def test_a_scale_of_all_channels_follows_its_parameter(st, asked):
    dense = Shared(False).eval()
    x = torch.randn(1, 3, 32, 32)
    on, mask = networks.blocks((1, 32, 32), 16, 0.7, seed=3)
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    for value in (2.0, -1.0):
        dense.scale.fill_(value)
        dense.shift.fill_(value)
        assert_near(sparse(x, mask)[1], networks.oracle(Nth(dense, 1), x, on, 16), "float32")


class Dropped(torch.nn.Module):
    """A residual unit with a dropout behind its norm."""

    def __init__(self, dropout):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.conv = (torch.nn.Conv2d(c, 8, 3, padding=1) for c in (3, 8))
        self.norm, self.dropout = torch.nn.BatchNorm2d(8), dropout
        networks.random_statistics(self)

    def forward(self, x):
        """Return the sum."""
        x = self.stem(x)
        return torch.relu(self.dropout(self.norm(self.conv(x))) + x)


DROPOUTS = {
    "usual": torch.nn.Dropout(0.3),
    "in place": torch.nn.Dropout(0.3, inplace=True),
    "alpha": torch.nn.AlphaDropout(0.3),
    "of channels": torch.nn.Dropout2d(0.3),
    "of none": lambda x: torch.nn.functional.dropout(x, 0.0),
    "of torch": lambda x: torch.dropout(x, 0.3, train=False),
}


@pytest.mark.parametrize("how", DROPOUTS)
@torch.no_grad()
def test_what_waits_goes_on_waiting_through_dropout(st, asked, how):
    dense = Dropped(DROPOUTS[how]).eval()
    x, on, result = called_twice(st, asked, dense)
    assert asked == ["image", "settled", "scatter"]  # the sum is part of a convolution
    assert_near(result, networks.oracle(dense, x, on, 16), "float32")


class OfImages(torch.nn.Module):
    """Norms of whole images, as of nnU-Net, with what may follow them."""

    def __init__(self, affine):
        super().__init__()
        torch.manual_seed(0)
        nn = torch.nn
        self.first = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=affine),
            nn.LeakyReLU(0.01, inplace=True),
        )  # fmt: skip
        self.norms = nn.ModuleList(nn.GroupNorm(n, 8, affine=affine) for n in (4, 1))
        for norm in (self.first[1], *self.norms) if affine else ():
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))

    def forward(self, x):
        """Return a residual unit of them, and a norm of the whole image by itself."""
        x = self.first(x)
        y = torch.relu(self.norms[0](self.convs[0](x)) + x)
        return y, self.norms[1](self.convs[1](y)), torch.nn.functional.instance_norm(y)


@pytest.mark.parametrize("affine", [False, True])
@torch.no_grad()
def test_norms_of_images_are_two_passes(st, asked, affine):
    """Statistics, and one kernel for the norm and what follows it."""
    dense = OfImages(affine).eval()
    x, on, results = called_twice(st, asked, dense)
    assert asked.count("image norm") == asked.count("affine") == 4
    assert_all_near(results, dense, x, on)


class Slopes(torch.nn.Module):
    """Norms of images with a PReLU behind them, one of a sum, and one that another reads first."""

    def __init__(self, count):
        super().__init__()
        torch.manual_seed(0)
        nn = torch.nn
        self.convs = nn.ModuleList(nn.Conv2d(c, 8, 3, padding=1) for c in (3, 8, 8, 8))
        self.norm = nn.InstanceNorm2d(8, affine=True)
        self.slopes = nn.ModuleList(nn.PReLU(count) for _ in range(4))
        for slope in self.slopes:  # each a part of a larger buffer, at an odd address
            slope.weight = nn.Parameter(torch.empty(count + 1).uniform_(-0.5, 1.5)[1:])

    def forward(self, x):
        """Return what may be made of them."""
        x = self.slopes[0](torch.nn.functional.dropout(self.norm(self.convs[0](x)), training=False))
        y = self.slopes[1](self.norm(self.convs[1](x)) + x)  # a sum after the norm
        z = self.norm(self.convs[2](y))
        once = self.slopes[2](z)
        return once, z + once, self.slopes[3](self.convs[3](y)), torch.relu(self.slopes[1](z))


@pytest.mark.parametrize("count", [1, 8])
@torch.no_grad()
def test_a_prelu_is_part_of_what_waits(st, asked, count):
    """But of a convolution, which reads no slopes; changed weights are those of the next call."""
    dense = Slopes(count).eval()
    for _ in range(2):
        x, on, results = called_twice(st, asked, dense)
        assert asked.count("image norm") == 3
        assert asked.count("affine") == 4  # two norms with a PReLU, one without, and a sum
        assert_all_near(results, dense, x, on)
        for slope in dense.slopes:
            slope.weight.mul_(-0.5)


class Halves(torch.nn.Module):
    """Channels that are split, convolved and joined with all that came before, as of YOLO."""

    def __init__(self, kernel, groups):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Conv2d(3, 16, 3, 2, 1)
        options = {"padding": kernel // 2, "groups": groups}
        convs = (torch.nn.Conv2d(8, 8, kernel, **options) for _ in range(3))
        self.convs, self.last = torch.nn.ModuleList(convs), torch.nn.Conv2d(40, 8, 1)

    def forward(self, x):
        """Return what is made of all parts."""
        parts = list(torch.relu(self.first(x)).chunk(2, 1))
        for conv in self.convs:
            parts.append(torch.relu(conv(parts[-1])))
        return self.last(torch.cat(parts, 1))


@pytest.mark.parametrize("kernel, groups", [(3, 1), (1, 1), (3, 8), (3, 2)])
@torch.no_grad()
def test_parts_of_channels_are_read_where_they_are(st, asked, kernel, groups):
    dense = Halves(kernel, groups).eval()
    x, on, result = called_twice(st, asked, dense)
    # All that is joined; the half that is convolved lies as it is where channels are multiplied.
    assert asked.count("stack_concat") == (2 if groups == 8 else 1)
    assert_near(result, networks.oracle(dense, x, on, 16), "float32")


class Preactivated(torch.nn.Module):
    """A norm that no convolution is before, a parameter for each channel, and a sum."""

    def __init__(self, affine=True):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Conv2d(3, 8, 1), torch.nn.Conv2d(8, 8, 3, padding=1)
        self.norm = networks.random_statistics(torch.nn.BatchNorm2d(8, affine=affine))
        self.scale = torch.nn.Parameter(torch.randn(8, 1, 1))

    def forward(self, x):
        """Add what a pre-activation unit makes."""
        x = torch.relu(self.first(x))
        y = self.last(torch.relu(self.norm(x)))
        least = torch.nn.functional.relu6(self.scale * y)
        return x + self.scale * y, least, y * self.scale * self.scale


@pytest.mark.parametrize("affine", [True, False])
@torch.no_grad()
def test_scales_of_channels_take_what_follows(st, asked, affine):
    dense = Preactivated(affine).eval()
    x = torch.randn(2, 3, 45, 51)
    on, mask = networks.blocks((2, 45, 51), 16, 0.5, seed=3)
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    results = sparse(x, mask)
    asked.clear()
    assert_near(sparse(x, mask)[0], results[0], "float32")
    assert asked.count("affine") == 5
    assert_all_near(results, dense, x, on)


def assert_all_near(results, dense, x, on):
    """Compare all results of a network with the dense one's."""
    for i, result in enumerate(results):
        assert_near(result, networks.oracle(Nth(dense, i), x, on, 16), "float32")


class Nth(torch.nn.Module):
    """One of the results of a network."""

    def __init__(self, network, number):
        super().__init__()
        self.network, self.number = network, number

    def forward(self, x):
        """Return it."""
        return self.network(x)[self.number]
