"""Products of the channels where kernels run: those of convolutions, with what follows them."""

import pytest

torch = pytest.importorskip("torch")

from support import networks  # noqa: E402  (needs PyTorch)
from support.networks import assert_near  # noqa: E402

nn, F = torch.nn, torch.nn.functional
SIZE, BLOCK = (61, 84), 16


class Unit(nn.Module):
    """Two products with an activation between, scaled and added to what they are made of."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.how, bias = how, how != "no bias"
        self.stem = nn.Conv2d(3, 6, 3, 2, 1)
        self.first, self.second = nn.Linear(6, 12, bias), nn.Linear(12, 6, bias)
        shape = (6,) if how == "scaled last" else (6, 1, 1)
        self.scale = nn.Parameter(torch.randn(shape))

    def forward(self, x):
        """Return the sum."""
        x = self.stem(x)
        last = x.permute(0, 2, 3, 1)
        y = self.first(last)
        if self.how == "read twice":
            return torch.cat([F.gelu(y), y], 3).permute(0, 3, 1, 2)
        y = self.second(F.gelu(y))
        if self.how == "channels last":
            return F.relu(last + y).permute(0, 3, 1, 2)
        if self.how == "scaled last":
            return x + (self.scale * y).permute(0, 3, 1, 2)
        kept = y
        y = y.permute(0, 3, 1, 2)
        if self.how == "scaled by a number":
            return x + 0.5 * y
        if self.how == "scaled by a result":
            return x + (self.scale * 2.0) * y
        if self.how == "kept":
            return x + self.scale * y, kept.permute(0, 3, 1, 2)
        if self.how == "scaled after":
            return self.scale * torch.relu(y)
        if self.how == "in place":
            y = self.scale * y
            y += x
            return y
        return torch.relu(x + y * self.scale)


# how: products, and kernels for a scale or a sum and what follows it
CASES = {
    "usual": (3, 0), "no bias": (3, 0), "scaled last": (3, 0), "channels last": (3, 0),
    "in place": (3, 0), "read twice": (2, 0), "scaled by a number": (3, 1),
    "scaled by a result": (3, 2), "scaled after": (3, 1), "kept": (4, 0),
}  # fmt: skip


@pytest.mark.parametrize("how", CASES)
@torch.no_grad()
def test_products_with_what_follows(st, asked, how):
    """A bias, an activation, a scale of each channel and a sum are part of the product's kernel."""
    dense = Unit(how).eval()
    x = torch.randn(2, 3, *SIZE, generator=torch.Generator().manual_seed(5))
    on, mask = networks.blocks((2, *SIZE), BLOCK, 0.5)
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = 2.0
    expected = networks.oracle(dense, x, on, BLOCK)
    for _ in range(2):  # then with packed weights that are kept
        asked.clear()
        result = sparse(x, mask)
        each = zip(result, expected, strict=True) if how == "kept" else [(result, expected)]
        for got, wanted in each:
            assert_near(got, wanted, "float32")
    products, affine = CASES[how]
    assert len([name for name in asked if name in ("conv", "settled", "image")]) == products
    assert asked.count("affine") == affine
    assert not sparse.dense_layers


@torch.no_grad()
def test_small_scales(st, asked):
    """A scale is no part of the weights, where it would become 0 in half precision."""
    dense = Unit("usual").eval()
    dense.scale.fill_(1e-6)
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = 2.0
    sparse(torch.zeros(1, 3, *SIZE), torch.ones(1, *SIZE, dtype=torch.bool))
    kept = [found[2][0] for found in sparse._weights.kept.values()]
    scaled = [weight for weight in kept if getattr(weight, "_stack_scale", None) is not None]
    (weight,) = scaled
    assert torch.equal(weight[:, :, 0, 0], dense.second.weight)
    assert torch.equal(weight._stack_scale, dense.scale.flatten())


@torch.no_grad()
def test_weights_that_change(st, asked):
    """A changed scale is that of the next call."""
    dense = Unit("usual").eval()
    x = torch.randn(1, 3, *SIZE)
    on, mask = networks.blocks((1, *SIZE), BLOCK, 0.5)
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = 2.0
    for _ in range(3):
        dense.scale.mul_(-1.5)
        assert_near(sparse(x, mask), networks.oracle(dense, x, on, BLOCK), "float32")


class Head(nn.Module):
    """What may follow a pooled image: a classifier, and products that others read too."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.how, self.stem = how, nn.Conv2d(3, 8, 3, 2, 1)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 5)
        self.gate = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        """Return the classes, or other values of the image."""
        x = F.relu(self.stem(x))
        pooled = F.adaptive_avg_pool2d(x, 1)
        if self.how == "flatten":
            return self.last(F.dropout(F.hardswish(self.first(pooled.flatten(1))), training=False))
        if self.how == "view":
            assert pooled.size(0) == x.shape[0] and pooled.dim() == 4
            return self.last(torch.relu(self.first(pooled.view(pooled.shape[0], -1))))
        if self.how == "in place":
            return self.last(F.relu(self.first(torch.flatten(pooled, 1)), inplace=True))
        if self.how == "written":  # after a product was asked for that reads it
            y = self.first(torch.flatten(pooled, 1))
            pooled.mul_(2.0)
            return self.last(torch.relu(y)) + self.last(self.first(pooled.flatten(1)))
        y = self.gate(pooled)
        if self.how == "two activations":
            return torch.sigmoid(torch.relu(y)).flatten(1)
        if self.how == "read before":
            return torch.cat([torch.relu(y), y, F.gelu(y, approximate="tanh")], 1).flatten(1)
        return (F.hardsigmoid(y) * pooled).flatten(1)


def half_active(st, dense, batch):
    """Return a call of a network by kernels, with half of the blocks, and what it is to return."""
    x = torch.randn(batch, 3, *SIZE, generator=torch.Generator().manual_seed(7))
    on, mask = networks.blocks((batch, *SIZE), BLOCK, 0.5)
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even, sparse.replay = 2.0, False
    return lambda: sparse(x, mask), networks.oracle(dense, x, on, BLOCK)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "how",
    [
        "flatten", "view", "in place", "written", "two activations", "read before", "multiplied",
    ],
)  # fmt: skip
@torch.no_grad()
def test_values_of_images(st, asked, how, batch):
    """Products of pooled images wait for an activation, and are right for all who read them."""
    dense = Head(how).eval()
    call, expected = half_active(st, dense, batch)
    for _ in range(2):
        asked.clear()
        result = call()
        assert type(result) is torch.Tensor
        assert_near(result, expected, "float32")
    products = {"flatten": 2, "view": 2, "in place": 2, "written": 4, "read before": 2}
    assert asked.count("image linear") == products.get(how, 1)


class Pyramid(nn.Module):
    """A pooled image that is convolved, normed and interpolated to the size of its map."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.how, self.stem = how, nn.Conv2d(3, 8, 3, 2, 1)
        self.pooled, self.norm = nn.Conv2d(8, 8, 1, bias=how == "bias"), nn.BatchNorm2d(8)
        self.last = nn.Conv2d(16, 4, 3, padding=1)
        networks.random_statistics(self)

    def forward(self, x):
        """Return what a convolution makes of both."""
        x = F.relu(self.stem(x))
        y = self.pooled(F.adaptive_avg_pool2d(x, 1))
        seen = y.flatten(1) if self.how == "read before" else None
        y = F.relu(self.norm(y))
        mode, corners = ("nearest", None) if self.how == "nearest" else ("bilinear", False)
        z = F.interpolate(y, x.shape[-2:], mode=mode, align_corners=corners)
        if self.how == "written before":
            y.mul_(2.0)
        if self.how == "written":
            z += x.mean((2, 3), keepdim=True)
        if self.how == "added":
            x, z = x + z, x
        if self.how == "kept":
            return self.last(torch.cat([x, z], 1)), z
        if seen is not None:
            return seen.mean() + self.last(torch.cat([z, x], 1))
        return self.last(torch.cat([x, z], 1))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "how",
    [
        "usual", "bias", "nearest", "written before", "written", "added", "kept", "read before",
    ],
)  # fmt: skip
@torch.no_grad()
def test_pooled_images_that_are_interpolated(st, asked, how, batch):
    """A norm becomes part of the product, and the image is not made before it is read."""
    dense = Pyramid(how).eval()
    call, expected = half_active(st, dense, batch)
    for _ in range(2):
        asked.clear()
        got, wanted = call(), expected
        if how == "kept":  # the oracle's has zeros in inactive blocks
            (got, image), wanted = got, expected[0]
            assert type(image) is torch.Tensor and image.shape[2:] == expected[1].shape[2:]
            assert torch.equal(image, image[:, :, :1, :1].expand_as(image).contiguous())
        assert type(got) is torch.Tensor
        assert_near(got, wanted, "float32")
    assert asked.count("image linear") == 1
    assert asked.count("stack_concat") == 1
