"""What the network asks of the CUDA kernels, with the core's NumPy bodies in the kernels' place."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support import networks  # noqa: E402  (needs PyTorch)
from support.networks import assert_near  # noqa: E402


@pytest.mark.parametrize("name", networks.FAMILIES)
@torch.no_grad()
def test_what_is_asked_of_kernels(st, asked, name):
    """Values through the kernels' arguments, float32, with rows past the count."""
    size, block = (61, 84), 16
    if name == "csp":
        size = (60, 84)
    dense = networks.network(name)
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    on, mask = networks.blocks((2, *size), block, 0.4)
    sparse = st.sparsify(dense, block)
    sparse.break_even = 2.0
    expected = networks.oracle(dense, x, on, block)
    assert_near(sparse(x, mask), expected, "float32")
    assert ("layer norm" in asked) == (name == "convnext")
    assert "conv" in asked and ("depthwise" in asked) == (
        name in ("mobilenet", "efficientnet", "convnext", "shuffle")
    )


@torch.no_grad()
def test_groups_are_convolved_by_the_kernel(st, asked):
    dense = networks.network("resnext")
    x = torch.randn(2, 3, 61, 84, generator=torch.Generator().manual_seed(1))
    on, mask = networks.blocks((2, 61, 84), 16, 0.4)
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    assert_near(sparse(x, mask), networks.oracle(dense, x, on, 16), "float32")
    assert not any(name.startswith("halo") for name in asked)


resize = torch.nn.functional.interpolate
pool, mean = torch.nn.functional.max_pool2d, torch.nn.functional.avg_pool2d
POOLS = {
    "max 3": ("stack_max_pool", lambda x: pool(x, 3, 2, 1)),
    "max 2": ("stack_max_pool", lambda x: pool(x, 2)),
    "max 2 ceil": ("stack_max_pool", lambda x: pool(x, 2, ceil_mode=True)),
    "max 5": ("stack_max_pool", lambda x: pool(x, 5, 1, 2)),
    "max dilated": ("stack_max_pool", lambda x: pool(x, 3, 1, 1, 2)),
    "max padded": (
        "maxima with zeros around", lambda x: pool(torch.nn.functional.pad(x, (1, 1, 1, 1)), 3, 2)
    ),
    "max 2 padded before": (
        "maxima with zeros around", lambda x: pool(torch.nn.functional.pad(x, (1, 0, 1, 0)), 2, 1)
    ),
    "avg 2": ("stack_avg_pool", lambda x: mean(x, 2)),
    "avg 3": ("stack_avg_pool", lambda x: mean(x, 3, 2, 1)),
    "avg 3 ceil": ("stack_avg_pool", lambda x: mean(x, 3, 2, 0, True)),
    "avg 3 inside": ("stack_avg_pool", lambda x: mean(x, 3, 2, 1, False, False)),
    "avg divisor": ("stack_avg_pool", lambda x: mean(x, 3, 1, 1, divisor_override=5)),
    "global mean": (
        "stack_global_pool", lambda x: torch.nn.functional.adaptive_avg_pool2d(x, 1)
    ),
    "global maximum": (
        "stack_global_pool", lambda x: torch.nn.functional.adaptive_max_pool2d(x, 1)
    ),
    "mean": ("stack_global_pool", lambda x: x.mean((2, 3), keepdim=True)),
    "sum": ("stack_global_pool", lambda x: x.sum((-2, -1))),
    "mean of channels last": (
        "stack_global_pool", lambda x: x.permute(0, 2, 3, 1).mean((1, 2), keepdim=True)
    ),
    "bilinear 2": (
        "stack_interpolate", lambda x: resize(x, scale_factor=2, mode="bilinear")
    ),
    "bilinear corners": (
        "stack_interpolate",
        lambda x: resize(x, scale_factor=2, mode="bilinear", align_corners=True),
    ),
    "nearest 3": ("stack_concat", lambda x: resize(x, scale_factor=3)),  # whole pixels
    "bilinear to a size": (
        "stack_interpolate",
        lambda x: resize(pool(x, 2, ceil_mode=True), size=x.shape[2:], mode="bilinear"),
    ),
    "excitation": ("stack_global_pool", lambda x: x * x.mean((2, 3), keepdim=True).sigmoid()),
}  # fmt: skip


GROWTHS = {  # kernel, stride, padding, output padding, dilation
    "2 of 2": (2, 2, 0, 0, 1), "3 of 2": (3, 2, 1, 1, 1), "3 of 2 odd": (3, 2, 1, 0, 1),
    "2 of 2 odd": (2, 2, 0, 1, 1),
    "4 of 2": (4, 2, 1, 0, 1), "5 of 2": (5, 2, 2, 1, 1), "1 of 2": (1, 2, 0, 1, 1),
    "3 of 1": (3, 1, 1, 0, 1), "8 of 4": (8, 4, 2, 0, 1), "dilated": (3, 2, 2, 1, 2),
    "of two sizes": ((2, 4), (2, 2), (0, 1), 0, 1),
}  # fmt: skip


class Grown(torch.nn.Module):
    """A transposed convolution with what may follow it, after a convolution."""

    def __init__(self, sizes, after, channels=(6, 3)):
        super().__init__()
        torch.manual_seed(0)
        kernel, stride, padding, extra, dilation = sizes
        self.before = torch.nn.Conv2d(4, 4, 1)
        self.grow = torch.nn.ConvTranspose2d(
            4, channels[0], kernel, stride, padding, extra, dilation=dilation
        )
        self.other = torch.nn.ConvTranspose2d(
            4, channels[1], kernel, stride, padding, extra, dilation=dilation, bias=False
        )
        self.norm = networks.random_statistics(torch.nn.BatchNorm2d(channels[0]))
        self.after = after

    def forward(self, x):
        """Return what may be made of it."""
        x = self.before(x)
        y = self.grow(x)
        if self.after == "alone":
            return y
        if self.after == "norm and activation":
            return torch.relu(self.norm(y))
        if self.after == "sum":
            return torch.relu(self.norm(y) + torch.nn.functional.silu(self.grow(x)))
        if self.after == "used twice":
            return torch.cat([torch.relu(y), y], 1)
        return torch.cat([torch.relu(self.norm(y)), self.other(x)], 1)


@pytest.mark.parametrize("name", GROWTHS)
@pytest.mark.parametrize("after", ["alone", "norm and activation", "sum", "used twice", "joined"])
@pytest.mark.parametrize("vectors", [False, True])
@torch.no_grad()
def test_transposed_convolutions(st, asked, name, after, vectors):
    """By a convolution that writes channels as pixels, or by another kernel: of odd channels."""
    sizes, size, block = GROWTHS[name], (45, 51), 16
    channels = (8, 4) if vectors else (6, 3)
    dense = networks.random_statistics(Grown(sizes, after, channels)).eval()
    x = torch.randn(2, 4, *size)
    on, mask = networks.blocks((2, *size), block, 0.5, seed=3)
    times = sizes[1] if isinstance(sizes[1], int) else sizes[1][0]
    stages = networks.stages_of(size, block)
    for short in range(-2, 2):
        stages[tuple(times * n + short for n in size)] = times * block
    if sizes[1] == (2, 2):
        stages[(90, 102)] = 32
    sparse = st.sparsify(dense, block)
    sparse.break_even = 2.0
    expected = networks.oracle(dense, x, on, block, stages)
    asked.clear()
    result = sparse(x, mask)
    assert result.shape == expected.shape
    assert_near(result, expected, "float32")
    joins = int(after in ("used twice", "joined"))
    copies = 0 if vectors else 2 if after in ("sum", "joined") else 1
    assert asked.count("stack_concat") == joins + copies
    assert ("conv unfolded" in asked or "settled unfolded" in asked) == vectors
    assert not {"halo zero", "halo nearest"} & set(asked)


class Enlarged(torch.nn.Module):
    """Pixels that are repeated, and what may be made of them."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.how, self.grow = how, torch.nn.ConvTranspose2d(8, 8, 2, 2)
        self.before, self.low = (torch.nn.Conv2d(c, 8, 3, padding=1) for c in (4, 8))
        self.after = torch.nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x):
        """Return what may be made of them."""
        x = self.before(x)
        y = torch.relu(self.low(pool(x, 2, ceil_mode=True)))
        to = {"size": x.shape[2:]} if self.how == "to a size" else {"scale_factor": 2}
        large = resize(y, **to)
        if self.how == "written":
            y.mul_(2)  # what was repeated is what it was
        if self.how == "in place":
            large.neg_()
        if self.how == "alone":
            return self.after(large)
        if self.how == "several":
            return torch.cat([large, self.grow(y), resize(y, scale_factor=2), x], 1)
        if self.how == "two factors":
            small = resize(pool(y, 2), scale_factor=4, mode="nearest-exact")
            return torch.cat([x, small, large], 1)
        joined = torch.cat([large, x], 1)
        return joined * torch.cat([x, large], 1) if self.how == "twice" else joined


@pytest.mark.parametrize(
    ("how", "joins"),
    [
        ("usual", 1), ("to a size", 1), ("written", 2), ("in place", 2), ("alone", 1),
        ("several", 1), ("two factors", 2), ("twice", 2),
    ],
)  # fmt: skip
@torch.no_grad()
def test_pixels_are_repeated_where_channels_are_joined(st, asked, how, joins):
    """By the kernel that joins, which reads them as they were."""
    dense, x = Enlarged(how).eval(), torch.randn(2, 4, 48, 64)
    on, mask = networks.blocks((2, 48, 64), 16, 0.5, seed=3)
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    expected = networks.oracle(dense, x, on, 16)
    asked.clear()
    assert_near(sparse(x, mask), expected, "float32")
    assert asked.count("stack_concat") == joins and "stack_interpolate" not in asked


@pytest.mark.parametrize("how", ["usual", "several", "twice"])
def test_repeated_pixels_pass_gradients(st, asked, how):
    dense, x = Enlarged(how), torch.randn(2, 4, 48, 64)
    on, mask = networks.blocks((2, 48, 64), 16, 0.5, seed=3)
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    own, given = (x.clone().requires_grad_() for _ in range(2))
    result, expected = sparse(own, mask), networks.oracle(dense, given, on, 16)
    (result * result).sum().backward()
    (expected * expected).sum().backward()
    assert_near(own.grad, given.grad, "float32")


class Pooled(torch.nn.Module):
    """A function after a convolution."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.function = torch.nn.Conv2d(4, 4, 1), function

    def forward(self, x):
        """Return what the function makes of the convolution's result."""
        return self.function(self.before(x))


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("size, block", [((48, 64), 16), ((45, 51), 16), ((21, 40), 32)], ids=str)
@torch.no_grad()
def test_poolings(st, asked, size, block, name):
    """By one kernel, of all sizes; where padding was put off, a rim is made."""
    kernel, function = POOLS[name]
    dense, x = Pooled(function).eval(), torch.randn(2, 4, *size)
    on, mask = networks.blocks((2, *size), block, 0.5, seed=3)
    sparse = st.sparsify(dense, block)
    sparse.break_even = 2.0
    stages = {tuple(n - 2 for n in size): block} | networks.stages_of(size, block)
    for times in (2, 3):
        stages[tuple(times * n for n in size)] = times * block
    expected = networks.oracle(dense, x, on, block, stages)
    asked.clear()
    assert_near(sparse(x, mask), expected, "float32")
    assert kernel in asked


class Parted(torch.nn.Module):
    """A function of half of the channels of a convolution."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.function = torch.nn.Conv2d(4, 16, 1), function
        self.norm = torch.nn.BatchNorm2d(8)
        torch.nn.init.uniform_(self.norm.weight, 0.5, 2)

    def forward(self, x):
        """Return what the function makes of the second half."""
        half = self.before(x).chunk(2, 1)[1]
        return self.norm(half) if self.function is None else self.function(half)


@pytest.mark.parametrize(
    "name", ["max 3", "max padded", "avg 3", "mean", "affine", "bilinear 2", "bilinear to a size"]
)
@torch.no_grad()
def test_parts_are_read_and_written_where_they_lie(st, asked, monkeypatch, name):
    """The convolution's other half is not copied, and what lies beside the result stays."""
    from sbnet_cupy.torch.network import cuda, joins

    kernel, function = POOLS.get(name, ("affine", None))
    read, written = [], []
    rows_and_pitch = cuda.rows_and_pitch

    def noted(x):
        found = rows_and_pitch(x)
        read.append(found[1])
        assert found[0].data_ptr() == x.data_ptr()
        return found

    def place(like, table, block, channels, *_):
        written.append(cuda.new_stack(like, like.shape[0], block, channels + 5).fill_(7))
        return written[-1][:, 2 : 2 + channels]

    monkeypatch.setattr(cuda, "rows_and_pitch", noted)
    monkeypatch.setattr(joins, "place", place)
    size, block = (48, 64), 16
    dense, x = Parted(function).eval(), torch.randn(2, 4, *size)
    on, mask = networks.blocks((2, *size), block, 0.5, seed=3)
    sparse = st.sparsify(dense, block)
    sparse.break_even = 2.0
    stages = networks.stages_of(size, block) | {(96, 128): 32, tuple(n - 2 for n in size): block}
    assert_near(sparse(x, mask), networks.oracle(dense, x, on, block, stages), "float32")
    assert kernel in asked and "stack_concat" not in asked and 16 in read
    assert bool(written) == (name != "mean")
    assert all((t[:, :2] == 7).all() and (t[:, -3:] == 7).all() for t in written)
    assert all((t[:, 2:-3] != 7).any() for t in written)


def test_kernels_take_no_part_where_gradients_are_recorded(st, asked):
    """Not even for the first convolution, whose input has none."""
    dense = networks.network("resnet_basic").train()
    sparse = st.sparsify(dense, 16)
    _, mask = networks.blocks((2, 61, 84), 16, 0.4)
    sparse(torch.randn(2, 3, 61, 84), mask).sum().backward()
    assert "conv" not in asked and all(p.grad is not None for p in sparse.parameters())


@torch.no_grad()
def test_rows_past_the_count(st, asked):
    """A list with room to spare, as a capacity leaves it on a GPU."""
    from sbnet_cupy.torch.network.table import BlockTable

    dense = networks.network("mobilenet")
    x = torch.randn(2, 3, 61, 84, generator=torch.Generator().manual_seed(1))
    on, _ = networks.blocks((2, 61, 84), 16, 0.4)
    sparse = st.sparsify(dense, 16)
    exact = BlockTable.of_blocks(on, 48, int(on.sum()), (16, 16), (61, 84))
    spare = torch.full((7, 3), -1, dtype=torch.int32)
    wide = BlockTable(
        exact.counts, torch.cat([exact.indices, spare]), exact.places, (16, 16), (61, 84)
    )
    assert_near(sparse._run(wide, x), networks.oracle(dense, x, on, 16), "float32")


@torch.no_grad()
def test_which_convolutions_may_read_ahead(st, asked):
    """Those of packed weights, after a kernel that waited for the table: not a call's first."""
    dense = networks.network("resnet_basic")
    x = torch.randn(2, 3, 61, 84, generator=torch.Generator().manual_seed(1))
    _, mask = networks.blocks((2, 61, 84), 16, 0.4)
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    first = sparse(x, mask)
    assert "conv" in asked and "settled" not in asked  # each is packed ahead of its convolution
    asked.clear()
    assert torch.equal(sparse(x, mask), first)
    kernels = [name for name in asked if name in ("image", "conv", "settled")]
    assert kernels == ["image"] + ["settled"] * (len(kernels) - 1)
    assert len(kernels) > 2


@pytest.mark.parametrize(
    ("channels", "dtype", "kernels"),
    [
        (3, "float16", ["image", "scatter"]), (8, "float32", ["image", "scatter"]),
        (9, "float16", ["conv", "scatter"]),
    ],
)  # fmt: skip
@torch.no_grad()
def test_first_layers_of_few_channels(st, asked, channels, dtype, kernels):
    """They read the image, and no stack of it is made."""
    dtype = getattr(torch, dtype)
    dense = torch.nn.Conv2d(channels, 8, 7, 2, padding=3).to(dtype).eval()
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    x = torch.randn(2, channels, 64, 96).to(dtype)
    y = sparse(x, torch.ones(2, 64, 96))
    assert asked == kernels
    assert_near(y.float(), dense(x).float(), "float16" if dtype == torch.float16 else "float32")


def test_bits_of_the_lowest_value():
    from sbnet_cupy.block_sparse.stack.stack_launch import lowest_bits
    from sbnet_cupy.torch.network.cuda import _lowest

    for name in ("float16", "float32"):
        assert _lowest(name) == lowest_bits(np.dtype(name))


class _Shared(torch.nn.Module):
    """A bottleneck of which something else reads what lies between the layers."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.first, self.second = networks.conv_bn(8, 4, 1), networks.conv_bn(4, 4)
        self.third = networks.conv_bn(4, 8, 1, act=None)

    def forward(self, x):
        first = self.first(x)
        second = self.second(first)
        if self.how == "add":
            return self.third(second) + torch.cat([first, second], 1)
        third = self.third(second)
        if self.how == "in place":
            second.mul_(2)
            first.relu_()
            return third + torch.cat([first, second], 1)
        if self.how == "activation in place":
            pre = self.third[0](second)
            after = self.first(pre)
            pre.relu_()
            return torch.cat([pre, after], 1)
        del first, second
        return torch.relu_(third.add_(x))


def _body(name):
    if name in ("bottleneck", "basic"):
        width = 4 if name == "bottleneck" else None
        return torch.nn.Sequential(*(networks.Residual(8, 8, width=width) for _ in range(3)))
    if name == "projection":
        return torch.nn.Sequential(networks.Residual(8, 12, width=4), networks.Residual(12, 12))
    if name == "plain":
        return torch.nn.Sequential(*(networks.conv_bn(8, 8) for _ in range(3)))
    return _Shared(name)


def checked_calls(st, dense):
    """Return a call of a sparsified network on some of its blocks, which compares its values."""
    x = torch.randn(2, 3, 61, 84)
    on, mask = networks.blocks((2, 61, 84), 16, 0.4)
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    return lambda: assert_near(sparse(x, mask), networks.oracle(dense, x, on, 16), "float32")


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("bottleneck", 3),
        ("basic", 3),
        ("projection", 2),
        ("plain", 1),
        ("alone", 1),
        ("add", 0),
        ("in place", 0),
        ("activation in place", 0),
    ],
)
@torch.no_grad()
def test_residual_units_are_one_kernel(st, units_asked, name, units):
    """Where nothing else reads what lies between the layers; values as without."""
    torch.manual_seed(3)
    dense = networks.random_statistics(
        torch.nn.Sequential(networks.conv_bn(3, 8, 3, 2), torch.nn.MaxPool2d(2), _body(name))
    ).eval()
    call = checked_calls(st, dense)
    for _ in range(2):
        units_asked.clear()
        call()
        assert units_asked.count("unit") == units


class Before(torch.nn.Module):
    """A pre-activation unit, with what may be read of it besides its result."""

    def __init__(self, kind, channels=8, width=4):
        super().__init__()
        sizes = ((channels, width, 1), (width, width, 3), (width, channels, 1))
        self.layers = torch.nn.ModuleList(networks.norm_conv(*one) for one in sizes)
        self.side = torch.nn.Conv2d(channels, channels, 1)
        self.kind = kind
        if kind == "bias":
            self.layers[2][2].bias = torch.nn.Parameter(torch.randn(channels))

    def forward(self, x):
        """Return the unit of ``x``."""
        norm, relu, conv = self.layers[0]
        y = relu(norm(x))
        z = self.layers[2](self.layers[1](conv(y)))
        if self.kind == "activated":  # the shortcut of the network that changes channels
            return z + self.side(y)
        if self.kind == "two":
            return z + x + y
        if self.kind == "other":
            return z + self.side(x)
        if self.kind == "in place":
            x += 1
        return x + z


@pytest.mark.parametrize(
    ("kind", "fused"),
    [
        ("plain", True),
        ("bias", False),
        ("activated", False),
        ("two", False),
        ("other", False),
        ("in place", False),
    ],
)
@torch.no_grad()
def test_preactivation_units_are_one_kernel(st, units_asked, kind, fused):
    """From the norm to the sum, that of the first unit included, which reads a convolution.

    Elsewhere a norm is computed once, whoever reads it, and the convolutions are one kernel; a sum
    that is no part of it is one by itself.
    """
    torch.manual_seed(3)
    body = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 2, 1), *(Before(kind) for _ in range(3)))
    dense = networks.random_statistics(body).eval()
    call = checked_calls(st, dense)
    for _ in range(2):
        units_asked.clear()
        call()
        assert units_asked.count("bottleneck") == (3 if fused else 0)
        assert units_asked.count("unit") == (0 if fused else 3)
        sums = 3 if kind in ("two", "in place") else 0
        assert units_asked.count("affine") == units_asked.count("unit") + sums
    weight = body[1].layers[0][2].weight
    weight *= 2
    body[2].layers[0][0].running_mean += 1
    call()


class BasicBefore(torch.nn.Module):
    """A pre-activation unit of two 3x3 layers."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(networks.norm_conv(8, 8), networks.norm_conv(8, 8))

    def forward(self, x):
        """Add the layers to their input."""
        return x + self.layers(x)


@torch.no_grad()
def test_of_basic_preactivation_units_the_convolutions_are_one_kernel(st, units_asked):
    """The norm ahead of them is one by itself."""
    torch.manual_seed(3)
    body = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 2, 1), *(BasicBefore() for _ in range(3)))
    call = checked_calls(st, networks.random_statistics(body).eval())
    for _ in range(2):
        units_asked.clear()
        call()
        asked = [name for name in units_asked if name in ("affine", "unit", "bottleneck", "conv")]
        assert asked == ["affine", "unit"] * 3


class Projected(torch.nn.Module):
    """A convolution and the 1x1 convolution that is added to it, with what may follow."""

    def __init__(self, after):
        super().__init__()
        torch.manual_seed(5)
        self.head = networks.conv_bn(3, 8, 3, 1)
        self.body = networks.conv_bn(8, 6, 3, 2, act=None)
        self.down = networks.conv_bn(8, 6, 1, 2, act=None)
        self.after = after

    def forward(self, x):
        """Return what may be made of it."""
        x = self.head(x)
        y, d = self.body(x), self.down(x)
        if self.after == "relu":
            y += d
            return torch.relu_(y)
        if self.after == "sum alone":
            return y + d
        if self.after == "tanh":
            return torch.tanh(y + d)
        if self.after == "turned round":
            return torch.relu(d + y)
        if self.after == "both read":
            return torch.relu(y + d) - d
        if self.after == "one changed":
            s = y + d
            d.relu_()
            return s + d
        if self.after == "source changed":
            s = y + d
            x.mul_(2)
            return s
        s = y + d  # the convolution before the sum is read too
        return torch.relu(s) + y


SHORTCUTS = {  # how often one kernel computes both
    "relu": 1, "sum alone": 1, "tanh": 0, "turned round": 0, "both read": 0, "one changed": 0,
    "source changed": 0, "first read": 0,
}  # fmt: skip


@pytest.mark.parametrize("after", SHORTCUTS)
@torch.no_grad()
def test_shortcuts_are_part_of_a_kernel(st, shortcuts_asked, after):
    """Where the sum alone reads them; values as without."""
    dense = networks.random_statistics(Projected(after)).eval()
    x = torch.randn(2, 3, 61, 84)
    on, mask = networks.blocks((2, 61, 84), 16, 0.4)
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    for _ in range(2):
        shortcuts_asked.clear()
        assert_near(sparse(x, mask), networks.oracle(dense, x, on, 16), "float32")
        assert shortcuts_asked.count("shortcut") == SHORTCUTS[after]


@pytest.mark.parametrize("name", ["resnet_basic", "resnet_bottleneck"])
@torch.no_grad()
def test_networks_with_shortcuts(st, shortcuts_asked, name):
    dense = networks.network(name)
    x = torch.randn(2, 3, 61, 84)
    on, mask = networks.blocks((2, 61, 84), 16, 0.4)
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    assert_near(sparse(x, mask), networks.oracle(dense, x, on, 16), "float32")
    assert "shortcut" in shortcuts_asked


class Refined(torch.nn.Module):
    """A convolution added to the image itself."""

    def __init__(self, turned):
        super().__init__()
        self.conv, self.turned = torch.nn.Conv2d(3, 3, 3, padding=1), turned

    def forward(self, x):
        """Add."""
        return x + self.conv(x) if self.turned else self.conv(x) + x


@pytest.mark.parametrize("turned", [False, True])
@torch.no_grad()
def test_a_sum_with_the_image(st, shortcuts_asked, turned):
    dense, x = Refined(turned).eval(), torch.randn(2, 3, 61, 84)
    on, mask = networks.blocks((2, 61, 84), 16, 0.4)
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    for _ in range(2):
        assert_near(sparse(x, mask), networks.oracle(dense, x, on, 16), "float32")
