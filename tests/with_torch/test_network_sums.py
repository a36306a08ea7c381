"""Sums of several stacks, some of them enlarged, by one kernel: results, and how many kernels."""

import contextlib
import copy
import types

import pytest

torch = pytest.importorskip("torch")

from support import networks  # noqa: E402  (needs PyTorch)
from support.networks import assert_near  # noqa: E402

nn, F = torch.nn, torch.nn.functional
tree_leaves = torch.utils._pytree.tree_leaves
C, SIZE, BLOCK = 8, (56, 88), 16


def up(x, factor=2):
    return F.interpolate(x, scale_factor=factor, mode="nearest")


class Levels(nn.Module):
    """Stacks of four sizes, the smallest last, and a function of them and of a convolution."""

    def __init__(self, run, channels=C):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.run = nn.Conv2d(3, 16, 3, padding=1), run  # which reads the image
        self.stem = nn.Conv2d(16, channels, 3, padding=1)
        self.last = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        x = self.stem(self.first(x))
        return self.run([F.max_pool2d(x, 1), *(F.avg_pool2d(x, n) for n in (2, 4, 8))], self.last)


def fuse(x, last):
    """The largest of an HRNet's, whose names of sums are given up one after the other."""
    y = x[0]
    for k, one in enumerate(x[1:]):
        y = y + up(one, 2 << k)
    y = F.relu(y)
    return last(y)


def in_place(x, last):
    y = x[0] + up(x[1])
    y += up(x[2], 4)
    y += x[0]
    return last(F.relu(y, inplace=True))


def in_place_of_enlarged(x, last):
    y = up(x[1])
    y += x[0]
    y.add_(up(x[3], 8))
    return last(y)


def behind_a_convolution(x, last):
    """The convolution takes the first, which is none that is enlarged."""
    y = last(x[0]) + x[0]
    y = y + up(x[1])
    y = torch.relu(y + up(x[2], 4))
    return y


def into_a_convolution(x, last):
    """A lateral of a pyramid."""
    return torch.relu(last(x[0]) + up(x[1]))


def skip(x, last):
    return last(torch.relu(up(x[1]) + x[0]))


def of_five(x, last):
    return last(torch.relu(x[0] + up(x[1]) + up(x[2], 4) + up(x[3], 8) + x[0]))


def of_six(x, last):
    y = x[0] + up(x[1]) + up(x[2], 4) + up(x[3], 8)
    return last(torch.relu(y + x[0] + up(x[1])))


def as_they_are(x, last):
    return last(torch.relu(x[0] + F.max_pool2d(x[0], 3, 1, 1) + F.avg_pool2d(x[0], 3, 1, 1)))


def of_two(x, last):
    return last(torch.relu(x[0] + F.max_pool2d(x[0], 3, 1, 1)))


def by_one(x, last):
    return last(torch.relu(x[0] + up(x[0], 1) + up(x[1], 2)))


def both_by_one(x, last):
    return last(torch.relu(up(x[0], 1) + up(F.max_pool2d(x[0], 3, 1, 1), 1)))


def of_unlike_factors(x, last):
    y = F.interpolate(F.max_pool2d(x[0], (4, 2)), scale_factor=(4, 2))
    return last(y + x[0] + up(x[1]))


def inner_first(x, last):
    return last(x[0] + (up(x[1]) + up(x[2], 4)))


def two_sums(x, last):
    """The second is computed, as the kernel adds stacks alone."""
    return last((x[0] + up(x[1])) + (up(x[2], 4) + x[0]))


def two_with_names(x, last):
    """The first, too, which might be read after that."""
    y, z = x[0] + up(x[1]), up(x[2], 4) + x[0]
    return last(y + z)


def read_twice(x, last):
    y = x[0] + up(x[1])
    z = torch.relu(y + up(x[2], 4))
    return last(z) + last(y)


def read_first(x, last):
    y = x[0] + up(x[1])
    other = last(y)
    return other + last(torch.relu(y + up(x[2], 4)))


def returned_too(x, last):
    y = x[0] + up(x[1])
    z = y + up(x[2], 4)
    return y, z, torch.relu(z + x[0])


def enlarged_is_read(x, last):
    y = up(x[1])
    return last(torch.relu(x[0] + y)) + last(y)


def enlarged_was_read(x, last):
    y = up(x[1])
    other = last(y)
    return torch.relu(x[0] + y) + other


def two_activations(x, last):
    return last(torch.sigmoid(F.silu(x[0] + up(x[1]))))


def without_a_kernel(x, last):
    """An activation that kernels do not have."""
    return last(torch.tanh(x[0] + up(x[1]) + up(x[2], 4)))


def per_channel(x):
    """Return a parameter with a number for each channel."""
    return nn.Parameter(torch.linspace(-1, 1, x.shape[1], device=x.device, dtype=x.dtype))


def of_slopes(x, last):
    slopes = per_channel(x[0])
    return last(F.prelu(x[0] + up(x[1]), slopes)) + last(F.prelu(x[0] + up(x[2], 4), slopes))


def copied(x, last):
    """What waits is computed, and copied where the copy is written in place."""
    y = x[0] + up(x[1])
    z = y.contiguous(memory_format=torch.channels_last)
    z += up(x[2], 4)
    return last(torch.relu(z)) + last(y)


def written(x, last):
    """What a sum reads is written after it was called."""
    y = x[0] + up(x[1])
    z = up(x[2], 4)
    x[1].mul_(3)
    x[0].mul_(2)
    y = y + z
    x[2].mul_(4)
    return torch.relu(y) + x[0] + up(x[1]) + up(x[2], 4)


def written_twice(x, last):
    """What others wait for is written in place while it waits."""
    y = x[0] + up(x[1])
    z = y + up(x[2], 4)
    y += up(x[3], 8)
    w = y + x[0]
    y.relu_()
    return z, w, y


def to_itself(x, last):
    y = x[0] + up(x[1])
    y += y
    return last(y + y)


def other_is_made_of_it(x, last):
    y = x[0] + up(x[1])
    y += F.relu(y)
    return last(y)


def behind_an_activation(x, last):
    return last(torch.relu(x[0] + up(x[1])) + up(x[2], 4))


def behind_an_activation_of_two(x, last):
    return last(torch.relu(x[0] + F.max_pool2d(x[0], 3, 1, 1)) + up(x[2], 4))


def of_slices(x, last):
    """Channels that begin anywhere."""
    return torch.relu(x[0][:, 1:6] + up(x[1][:, 3:8])) + last(x[0])[:, :5]


def of_two_dtypes(x, last):
    """The sum is of float32, as in PyTorch."""
    return last(up(x[1]) + x[0].half())


def of_one_channel(x, last):
    """It is added to all."""
    return last(up(x[1]) + x[0].mean(1, keepdim=True))


def of_pixels_elsewhere(x, last):
    return last((up(x[1]).permute(0, 2, 3, 1) + x[0].permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


def joined(x, last):
    return torch.cat([last(x[0]), torch.relu(x[0] + up(x[1]))], 1)


def scaled(x, last):
    """What waits with a scale of its channels takes one stack, and what is behind it another."""
    y = x[0] * nn.Parameter(per_channel(x[0])[:, None, None].detach())
    return torch.relu(y + up(x[1]) + up(x[2], 4))


ENLARGE = "stack_concat"
CASES = {  # what is asked for, but for convolutions and pools
    fuse: ["sum 1x1 2x2 4x4 8x8 relu"],
    in_place: ["sum 1x1 2x2 4x4 1x1 relu"],
    in_place_of_enlarged: ["sum 2x2 1x1 8x8"],
    behind_a_convolution: ["sum 1x1 2x2 4x4 relu"],
    into_a_convolution: [ENLARGE],
    skip: ["sum 2x2 1x1 relu"],
    of_five: ["sum 1x1 2x2 4x4 8x8", "affine"],
    of_six: ["sum 1x1 2x2 4x4 8x8", "sum 1x1 1x1 2x2 relu"],
    as_they_are: ["sum 1x1 1x1 1x1 relu"],
    of_two: ["affine"],
    by_one: ["sum 1x1 1x1 2x2 relu"],
    both_by_one: ["affine"],
    of_unlike_factors: ["sum 4x2 1x1 2x2"],
    inner_first: ["sum 2x2 4x4 1x1"],
    two_sums: ["sum 4x4 1x1", "sum 1x1 2x2 1x1"],
    two_with_names: ["sum 4x4 1x1", "sum 1x1 2x2", "affine"],
    read_twice: ["sum 1x1 2x2", "sum 1x1 4x4 relu"],
    read_first: ["sum 1x1 2x2", "sum 1x1 4x4 relu"],
    returned_too: ["sum 1x1 2x2", "sum 1x1 4x4", "affine"],
    enlarged_is_read: ["sum 1x1 2x2 relu", ENLARGE],
    enlarged_was_read: [ENLARGE, "affine"],
    two_activations: ["sum 1x1 2x2 silu"],
    without_a_kernel: ["sum 1x1 2x2 4x4"],
    of_slopes: ["sum 1x1 2x2", "sum 1x1 4x4"],
    copied: ["sum 1x1 2x2", ENLARGE],
    written: None,
    written_twice: None,
    to_itself: ["sum 1x1 2x2"],
    other_is_made_of_it: ["sum 1x1 2x2"],
    behind_an_activation: ["sum 1x1 2x2 relu", "sum 1x1 4x4"],
    behind_an_activation_of_two: ["affine", "sum 1x1 4x4"],
    of_slices: ["sum 1x1 2x2 relu", "affine"],
    of_two_dtypes: [ENLARGE],
    of_one_channel: [ENLARGE],
    of_pixels_elsewhere: [ENLARGE],
    joined: ["sum 1x1 2x2 relu"],
    scaled: [ENLARGE, "affine", "sum 1x1 4x4 relu"],
}
OTHERS = "conv", "settled", "image", "stack_max_pool", "stack_avg_pool", "scatter"


def image(seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, *SIZE, generator=generator).to(dtype)


@pytest.mark.parametrize("run", CASES, ids=lambda run: run.__name__)
@torch.no_grad()
def test_sums_wait_for_each_other(st, asked, run):
    dense = Levels(run).eval()
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = 2.0
    for seed in range(3):
        x = image(seed)
        on, mask = networks.blocks((2, *SIZE), BLOCK, 0.5, seed)
        asked.clear()
        actual = sparse(x, mask)
        if seed == 2:  # the oracle does not write in place
            mask = torch.ones_like(mask)
            assert_near(sparse(x, mask), dense(x), "float32")
        elif run not in (in_place, in_place_of_enlarged, written, written_twice, to_itself):
            assert_near(actual, networks.oracle(dense, x, on, BLOCK), "float32")
        if seed == 1 and CASES[run] is not None:
            found = [name for name in asked if name.split()[0] not in OTHERS]
            assert found == CASES[run]
    assert not sparse.dense_layers


def exact(x):
    """Sums of what is no sum itself, so that a dense network has the same bits."""
    x = [F.max_pool2d(x, n) for n in (1, 2, 4, 8)]
    y = x[0] + up(x[1])
    a = F.relu((y + up(x[2], 4)) + up(x[3], 8))
    b = up(x[3], 8) + up(x[2], 4)
    b += x[0]
    b += up(x[1])
    c = (x[0] + (up(x[1]) + up(x[2], 4))) + x[0]
    d = x[0] + F.max_pool2d(x[0], 3, 1, 1) + up(x[1])
    return a, b, c, F.silu(d), y


class Exact(nn.Module):
    """Its names of sums are gone when these are read."""

    def forward(self, x):
        return exact(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@torch.no_grad()
def test_sums_are_in_the_order_of_the_network(st, asked, dtype):
    """Each is rounded, so that another order has other bits."""
    x = image(dtype=dtype) * torch.logspace(-3, 3, 88).to(dtype)
    sparse = st.sparsify(Exact().eval(), BLOCK)
    sparse.break_even = 2.0
    result, expected = sparse(x, torch.ones(2, *SIZE)), Exact()(x)
    for k, (got, wanted) in enumerate(zip(result, expected, strict=True)):
        assert torch.equal(got, wanted), k
    found = [name for name in asked if name.startswith(("sum", "affine", ENLARGE))]
    assert found == [
        "sum 1x1 2x2", "sum 1x1 4x4 8x8 relu", "sum 8x8 4x4 1x1 2x2", "sum 2x2 4x4 1x1 1x1",
        "sum 1x1 1x1 2x2 silu",
    ]  # fmt: skip
    assert not torch.equal(expected[1], torch.relu(expected[0])) or dtype == torch.float32


def with_a_name(x, last):
    y = last(x[0])
    y = F.silu(y)
    y = last(y) + up(last(x[1]))
    y = F.gelu(y)
    return last(y)


@pytest.mark.parametrize("run", [fuse, in_place, with_a_name])
@torch.no_grad()
def test_the_first_call_has_the_kernels_of_others(st, asked, run, monkeypatch):
    """It looks for the names of modules, and nothing is read later for that."""
    from sbnet_cupy.torch.network import cuda

    activations, prepare = [], cuda._prepare_conv
    monkeypatch.setattr(
        cuda, "_prepare_conv", lambda *facts: activations.append(facts[14]) or prepare(*facts)
    )
    sparse, calls = st.sparsify(Levels(run).eval(), BLOCK), []
    sparse.break_even = 2.0
    for _ in range(3):
        asked.clear(), activations.clear(), cuda._PLANS.clear()
        sparse(image(), torch.ones(2, *SIZE))
        calls.append(([name.replace("settled", "conv") for name in asked], activations.copy()))
    assert calls[0] == calls[1] == calls[2]


@pytest.mark.parametrize("run", [fuse, in_place, read_twice, as_they_are])
def test_nothing_waits_where_gradients_are_recorded(st, asked, run):
    dense = Levels(run)
    sparse, x = st.sparsify(copy.deepcopy(dense), BLOCK), image()
    sparse.break_even = 2.0
    result, expected = sparse(x, torch.ones(2, *SIZE)), dense(x)
    assert_near(result, expected, "float32")
    result.square().sum().backward(), expected.square().sum().backward()
    for got, wanted in zip(sparse.parameters(), dense.parameters(), strict=True):
        assert_near(got.grad, wanted.grad, "float32")
    assert not [name for name in asked if name.startswith(("sum", "affine"))]


@torch.no_grad()
def test_a_stack_that_needs_a_gradient_has_it(st, asked):
    """It is added to what waits, where a network takes gradients itself, and not by a kernel."""

    def forward(x, last):
        y = x[0] + up(x[1])
        with torch.enable_grad():
            scale = torch.ones(1, C, 1, 1, requires_grad=True)
            z = y + x[0] * scale
            (grad,) = torch.autograd.grad(z.square().mean(), scale)
        return last(x[0]) * grad

    dense = Levels(forward).eval().requires_grad_(False)
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = 2.0
    assert_near(sparse(image(), torch.ones(2, *SIZE)), dense(image()), "float32")
    found = [name for name in asked if name.startswith(("sum", "affine"))]
    assert found == ["sum 1x1 2x2", "affine"]  # the last scales channels


@pytest.mark.parametrize("run", [fuse, in_place, skip, read_twice])
@torch.no_grad()
def test_how_far_a_sum_looks(st, asked, run, monkeypatch):
    """As far as the one of its stacks that looks furthest."""
    from sbnet_cupy.torch.network import sums

    dense, found = Levels(run).eval(), []
    for summed in (sums.summed, lambda *given: None):
        monkeypatch.setattr(sums, "summed", summed)
        sparse = st.sparsify(dense, BLOCK, halo="exact")
        sparse.break_even = 2.0
        sparse(image(), networks.blocks((2, *SIZE), BLOCK, 0.2)[1])
        ((_, reach),) = sparse._reaches.values()
        found.append(reach)
    assert found[0] == found[1] > 3


@torch.no_grad()
def test_images_of_one_shape_whose_pixels_lie_otherwise(st, asked):
    """Channels are added to rows: that takes whole images."""
    dense = Levels(lambda x, last: up(x[1]) + x[0].permute(0, 2, 1, 3), SIZE[0]).eval()
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = 2.0
    assert_near(sparse(image(), torch.ones(2, *SIZE)), dense(image()), "float32")
    assert not [name for name in asked if name.startswith(("sum", "affine"))]


def of_float32(x, last):
    """A sum of three, which convolutions read in a narrower dtype, and others as it is."""
    y = x[0].float() + F.max_pool2d(x[0].float(), 3, 1, 1)
    y = y + F.avg_pool2d(x[0].float(), 3, 1, 1)
    return last(y) + y


@pytest.mark.parametrize("run", [fuse, in_place, as_they_are, of_float32])
@torch.no_grad()
def test_autocast(st, asked, run, monkeypatch):
    """Enlarged stacks keep their dtype on a GPU. Sums of float32 are left to another kernel."""
    from sbnet_cupy.torch.network import casts

    monkeypatch.setattr(casts, "dtype_in", lambda x, func, *_: x.dtype)
    dense = Levels(run).eval()
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = 2.0
    on, mask = networks.blocks((2, *SIZE), BLOCK, 0.5)
    expected = networks.oracle(dense, image(), on, BLOCK)
    if run is in_place:  # which the oracle is not
        mask, expected = torch.ones_like(mask), dense(image())
    with torch.autocast("cpu", torch.float16):
        actual = sparse(image(), mask)
    epsilon = torch.finfo(torch.float16).eps
    assert (actual - expected).abs().max() <= 20 * epsilon * (1 + expected.abs().max())
    found = [name for name in asked if name.startswith(("sum", "affine"))]
    own = ["affine", "affine of both"]
    assert found == (own if run is of_float32 else CASES[run])


@torch.no_grad()
def test_a_sum_is_written_where_it_is_joined(st, asked):
    dense = Levels(joined).eval()
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = 2.0
    for call in range(3):
        on, mask = networks.blocks((2, *SIZE), BLOCK, 0.5, call)
        asked.clear()
        assert_near(sparse(image(call), mask), networks.oracle(dense, image(call), on, BLOCK),
                    "float32")  # fmt: skip
        assert asked.count("sum 1x1 2x2 relu") == 1
    assert ENLARGE not in asked


@pytest.mark.parametrize("channels", [18, 22])
@pytest.mark.parametrize("run", [fuse, in_place, behind_a_convolution, skip, read_twice])
@torch.no_grad()
def test_odd_channels_are_padded(st, asked, run, channels, monkeypatch):
    """What convolutions read has whole vectors in the end, and no kernel copies it for that."""
    from sbnet_cupy.torch.network import cuda_sum, joins, layout, padding

    for module in (joins, padding):  # what is read of memory before it is written shows
        monkeypatch.setattr(module, "new_stack", lambda *a: layout.new_stack(*a).fill_(torch.nan))
    widths, prepare = [], cuda_sum._prepare
    monkeypatch.setattr(cuda_sum, "_prepare", lambda *f: widths.append(f[4]) or prepare(*f))
    dense = Levels(run, channels).eval()
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = 2.0
    for call in range(5):
        on, mask = networks.blocks((2, *SIZE), BLOCK, 0.5, call)
        expected = networks.oracle(dense, image(call), on, BLOCK)
        if run is in_place:
            mask, expected = torch.ones_like(mask), dense(image(call))
        cuda_sum._PLANS.clear(), widths.clear()
        assert_near(sparse(image(call), mask), expected, "float32")
    is_read = run is not behind_a_convolution  # by a convolution
    assert set(widths) == {-(-channels // 4) * 4 if is_read else channels}


def test_the_kernel_that_is_prepared(require, st, monkeypatch):
    """By the kernel itself, on a CPU, of stacks and of some channels of them."""
    require("g++")
    from sbnet_cupy.torch.network import cuda, cuda_sum
    from support.stack_on_host import BLACKWELL, use_shim

    def start(launch, *tensors, order, out):
        launch(*(t if t is None else cuda._flat(t).numpy() for t in tensors))

    use_shim(monkeypatch, BLACKWELL)
    monkeypatch.setattr(cuda, "_at_home", lambda x: contextlib.nullcontext(-1))
    monkeypatch.setattr(cuda, "start", start)
    monkeypatch.setattr(cuda_sum, "_PLANS", {})
    counts = torch.tensor([3], dtype=torch.int32)
    table = types.SimpleNamespace(counts=counts, order=None, joins=None, settled=False)
    factors = (1, 1), (2, 2), (8, 8)
    stacks = [
        torch.randn(4, 24, 8 // f, 8 // f).half().contiguous(memory_format=torch.channels_last)
        for f, _ in factors
    ]
    for channels in (slice(24), slice(3, 11), slice(8, 24)):
        x = [stack[:, channels] for stack in stacks]
        for activation, function in (("relu", torch.relu), ("tanh", torch.tanh)):
            y = cuda_sum.total(x, factors, table, activation)
            expected = function((x[0] + up(x[1])) + up(x[2], 8))
            assert torch.equal(y[:3], expected[:3])


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [16, 18])
@pytest.mark.parametrize("run", CASES, ids=lambda run: run.__name__)
@torch.no_grad()
def test_sums_have_the_bits_of_kernels_of_two_stacks_on_a_gpu(
    require, st, run, channels, monkeypatch
):
    """In calls that run as they are, and in graphs."""
    require("gpu")
    from sbnet_cupy.torch.network import sums

    dtypes = torch.float16, torch.bfloat16, torch.float32
    if run is of_two_dtypes:  # of which one is float16
        dtypes = torch.float16, torch.float32
    if run is of_slopes:  # which are part of the kernel for two stacks, before the sum is rounded
        dtypes = (torch.float32,)
    for dtype in dtypes:
        net = Levels(run, channels).eval().to("cuda", dtype)
        x, mask = image(dtype=dtype).cuda(), networks.blocks((2, *SIZE), BLOCK, 0.5)[1].cuda()
        with monkeypatch.context() as without:
            without.setattr(sums, "summed", lambda *given: None)
            apart = tree_leaves(st.sparsify(net, BLOCK, capacity=30, replay=False)(x, mask))
        sparse = st.sparsify(net, BLOCK, capacity=30, replay=False)
        for _ in range(4):
            assert all(map(torch.equal, tree_leaves(sparse(x, mask)), apart))
        assert all(map(torch.equal, tree_leaves(sparse.graphed(x, mask)(x, mask)), apart))
