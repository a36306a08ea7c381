"""Evaluation under autocast: results as of the dense network there, weights converted once."""

import copy

import pytest

torch = pytest.importorskip("torch")

from sbnet_cupy.torch.network import bottlenecks, casts, units  # noqa: E402  (needs PyTorch)
from support import networks  # noqa: E402
from support.exhaustive import all_but  # noqa: E402
from support.networks import assert_near  # noqa: E402

nn, F = torch.nn, torch.nn.functional
tree_leaves = torch.utils._pytree.tree_leaves
SIZE, BLOCK = (60, 84), 16


def inputs(share, size=SIZE):
    """Return images of float32, active blocks, and the mask that is set in them."""
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    return x, *networks.blocks((2, *size), BLOCK, share)


def prepared(st, dense, device="cpu", break_even=2.0, **options):
    """Return a sparsified network, an image, a mask, and the exact result."""
    x, on, mask = inputs(0.4)
    exact = networks.oracle(copy.deepcopy(dense).double().cpu(), x.double(), on, BLOCK)
    sparse = st.sparsify(dense.to(device), BLOCK, **options)
    sparse.break_even = break_even
    return sparse, x.to(device), mask.to(device), exact


def narrow(device):
    """Return the dtype of autocast: bfloat16, which has less than float16, on a CPU."""
    return torch.bfloat16 if device == "cpu" else torch.float16


def check(actual, expected, like, depth, epsilon):
    """Compare results with exact ones: each layer rounds its result and weights by half a unit.

    They have the dtypes of ``like``.
    """
    each = zip(tree_leaves(actual), tree_leaves(expected), tree_leaves(like), strict=True)
    for a, e, one in each:
        assert a.dtype == one.dtype
        if a.is_floating_point():
            bound = 2 * depth * epsilon * (1 + e.abs().max())
            assert (a.cpu() - e).abs().max() <= bound


def depth_of(dense):
    """Return the number of layers that round."""
    kinds = nn.Conv2d | nn.ConvTranspose2d | nn.Linear | nn.GroupNorm | nn.InstanceNorm2d
    return sum(isinstance(m, kinds) for m in dense.modules())


@pytest.mark.parametrize("name", all_but(sorted(networks.FAMILIES), ["resnet_basic", "unet"]))
@torch.no_grad()
def test_families(st, device, name):
    """On the stack and on whole images, twice, and with new weights."""
    dense = networks.network(name).to(device)
    sparse, dtype = st.sparsify(dense, BLOCK), narrow(device)
    for share in (1.0, 0.4):
        x, on, mask = inputs(share)
        exact = networks.oracle(copy.deepcopy(dense).double().cpu(), x.double(), on, BLOCK)
        x, mask = x.to(device), mask.to(device)
        for break_even in (2.0, 0.0, 2.0):
            sparse.break_even = break_even
            with torch.autocast(device, dtype):
                like, actual = dense(x), sparse(x, mask)
            check(actual, exact, like, depth_of(dense), torch.finfo(dtype).eps)
        for parameter in dense.parameters():
            parameter.mul_(1.1)


@pytest.mark.parametrize("name", networks.FAMILIES)
@torch.no_grad()
def test_kernels_take_float16(st, asked, name, monkeypatch):
    """All convolutions of the stack, of weights that are kept in float16."""
    for module in (units, bottlenecks):  # each layer has a kernel of its own
        monkeypatch.setattr(module, "prepare", lambda *facts: None)
    dense = networks.network(name)
    sparse, x, mask, exact = prepared(st, dense, replay=False)
    for _ in range(2):
        del asked[:]
        with torch.autocast("cpu", torch.float16):
            like, actual = dense(x), sparse(x, mask)
        check(actual, exact, like, depth_of(dense), torch.finfo(torch.float16).eps)
        assert ("image" in asked) == (name != "csp")  # which begins with slices of the image
        assert not any(one.startswith("halo") for one in asked)
    made = [one for _, _, one in sparse._weights.kept.values()]
    convolved = [weight for weight, *_ in made if weight.dim() == 4]
    assert convolved and {weight.dtype for weight in convolved} == {torch.float16}


def as_on_a_gpu(monkeypatch):
    """Compute in float32 what autocast does on a GPU, at least in some versions of PyTorch."""
    wide = {F.group_norm, F.instance_norm, F.layer_norm, F.interpolate}
    monkeypatch.setattr(
        casts, "dtype_in", lambda x, func, *_: torch.float32 if func in wide else x.dtype
    )


class Norms(nn.Module):
    """Norms of images, leaky relus and skips, as in networks for medical images."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(16, 4, 3, padding=1)
        self.norms = nn.ModuleList(norm() for _ in range(2))

    def forward(self, x):
        x = F.leaky_relu(self.norms[0](self.first(x)), inplace=True)
        y = F.leaky_relu(self.norms[1](self.second(F.max_pool2d(x, 2))), inplace=True)
        return self.last(torch.cat([self.up(y), x], 1)), x, y


NORMS = {
    "group": lambda: nn.GroupNorm(4, 8), "instance": lambda: nn.InstanceNorm2d(8, affine=True),
    "plain": lambda: nn.InstanceNorm2d(8), "none": nn.Identity,
}  # fmt: skip


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("break_even", [2.0, 0.0])
@torch.no_grad()
def test_norms_of_images(st, device, norm, break_even):
    dense, dtype = Norms(NORMS[norm]).eval(), narrow(device)
    sparse, x, mask, exact = prepared(st, dense, device, break_even)
    for _ in range(2):
        with torch.autocast(device, dtype):
            like, actual = dense(x), sparse(x, mask)
        check(actual, exact, like, depth_of(dense), torch.finfo(dtype).eps)


@pytest.mark.parametrize("norm", NORMS)
@torch.no_grad()
def test_norms_by_kernels(st, asked, norm, monkeypatch):
    """Where autocast computes norms in float32, convolutions read them rounded once."""
    as_on_a_gpu(monkeypatch)
    dense = Norms(NORMS[norm]).eval()
    sparse, x, mask, exact = prepared(st, dense, replay=False)
    with torch.autocast("cpu", torch.float16):
        y, *skips = sparse(x, mask)
    expected = [torch.float16] if norm == "none" else [torch.float32]
    assert [one.dtype for one in skips] == expected * 2
    like = [y, *skips]
    check(like, exact, like, depth_of(dense), torch.finfo(torch.float16).eps)
    assert ("image norm" in asked) == (norm != "none")
    assert asked.count("stack_max_pool") == asked.count("stack_concat") == 1  # rounded already


class Wide(nn.Module):
    """Functions that autocast computes in float32, read by convolutions, products and sums."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)
        self.norm, self.mix, self.mixed = nn.LayerNorm(8), nn.Linear(8, 8), nn.Conv2d(8, 8, 1)
        self.gamma = nn.Parameter(torch.full((8, 1, 1), 0.5))

    def forward(self, x):
        x = self.first(x)
        y = F.interpolate(F.avg_pool2d(x, 2), scale_factor=2, mode="bilinear")
        both = torch.cat([x, y], 1)
        z = self.second(both)
        mixed = self.mix(self.norm(z.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        summed = mixed * self.gamma + y
        z = self.mixed(summed)
        y.mul_(2.0)  # which what was joined and summed does not see
        return z + summed, self.second(both), both, y


@pytest.mark.parametrize("by_kernels", [False, True])
@torch.no_grad()
def test_what_is_computed_in_float32(st, request, by_kernels, monkeypatch):
    """It is rounded once where a convolution reads it, and has its dtype for all others."""
    asked = request.getfixturevalue("asked") if by_kernels else []
    if by_kernels:
        as_on_a_gpu(monkeypatch)
    sparse, x, mask, exact = prepared(st, Wide().eval(), replay=False)
    for _ in range(2):
        del asked[:]
        with torch.autocast("cpu", torch.float16):
            actual = sparse(x, mask)
        wide = torch.float32 if by_kernels else torch.float16
        dtypes = torch.float32, torch.float16, wide, wide
        like = [torch.empty(0, dtype=dtype) for dtype in dtypes]
        check(actual, exact, like, 6, torch.finfo(torch.float16).eps)
    if by_kernels:
        assert asked.count("layer norm") == 1 and asked.count("stack_interpolate") >= 1
        assert asked.count("affine of both") == 1


class Apart(nn.Module):
    """A layer without autocast, between layers with it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            y = self.layers[0](x)
        z = self.layers[1](F.relu(y))
        with torch.autocast(x.device.type, enabled=False):
            return F.relu(y), self.layers[2](z.to(x.dtype)), z


@torch.no_grad()
def test_a_layer_without_autocast(st, device):
    """It waits for the activation, and is computed in float32 where autocast is on again."""
    dense, dtype = Apart(), narrow(device)
    sparse, x, mask, exact = prepared(st, dense, device, None)
    for _ in range(3):
        with torch.autocast(device, dtype):
            like, actual = dense(x), sparse(x, mask)
        check(actual, exact, like, 3, torch.finfo(dtype).eps)
        if device == "cpu":  # a GPU may take TF32
            assert_near(actual[0], exact[0], "float32", terms=27)
    assert [one.dtype for one in actual] == [torch.float32, torch.float32, dtype]


FUNCTIONS = {
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "sum": lambda x: x.sum((2, 3)), "mean": lambda x: x.mean((2, 3)),
    "layer norm": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (6,)),
    "group norm": lambda x: F.group_norm(x, 2), "instance norm": F.instance_norm,
    "max pool": lambda x: F.max_pool2d(x, 2), "avg pool": lambda x: F.avg_pool2d(x, 2),
    "softmax": lambda x: x.softmax(1), "exp": torch.exp, "gelu": F.gelu,
    "scale": lambda x: x * torch.ones(6, 1, 1, device=x.device),
}  # fmt: skip


class Behind(nn.Module):
    """A function behind a convolution."""

    def __init__(self, function):
        super().__init__()
        self.first, self.function = nn.Conv2d(3, 6, 3, padding=1), function

    def forward(self, x):
        return self.function(self.first(x))


@pytest.mark.parametrize("name", FUNCTIONS)
@torch.no_grad()
def test_results_have_the_dtype_of_the_dense_ones(st, device, name):
    dense, dtype = Behind(FUNCTIONS[name]).to(device), narrow(device)
    sparse, (x, _, mask) = st.sparsify(dense, BLOCK, capacity=1.0), inputs(1.0)
    x, mask = x.to(device), mask.to(device)
    for break_even in (2.0, 0.0):
        sparse.break_even = break_even
        with torch.autocast(device, dtype):
            like, actual = dense(x), sparse(x, mask)
        exact = copy.deepcopy(dense).double()(x.double()).cpu()
        if name == "sum" and device != "cpu":
            assert like.dtype == torch.float32  # which does not overflow
        check(actual, exact, like, 2 * (60 * 84 if name == "sum" else 1), torch.finfo(dtype).eps)


@pytest.mark.gpu
@torch.no_grad()
def test_a_graph_outlives_autocast(st, require):
    """What it converted is its own: not the weights that autocast keeps until it ends."""
    require("gpu")
    dense = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), Mixed(64)).eval()
    sparse, x, mask, exact = prepared(st, dense, "cuda", None, capacity=1.0)
    with torch.autocast("cuda", torch.float16):
        like = dense(x)
        run = sparse.graphed(x, mask)
        called = sparse(x, mask)  # whose weights must not be those of a graph that has not run
    junk = [torch.full((64, 64), torch.nan, device="cuda", dtype=torch.float16) for _ in range(256)]
    for actual in (called, run(x, mask)):
        check(actual, exact, like, 3, torch.finfo(torch.float16).eps)
    del junk


class Mixed(nn.Module):
    """Mixes channels by matrices that autocast converts, in a region of its own, too."""

    def __init__(self, channels):
        super().__init__()
        self.first, self.second = nn.Linear(channels, channels), nn.Linear(channels, channels)

    def forward(self, x):
        x = F.relu(self.first(x.permute(0, 2, 3, 1)) @ self.second.weight.sin())
        with torch.autocast("cuda", torch.float16):
            return F.linear(x, self.second.weight)
