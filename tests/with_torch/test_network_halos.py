"""halo="exact": results at the mask's pixels are the dense network's, or it says why not."""

import types

import pytest

torch = pytest.importorskip("torch")

from support.networks import assert_near, image  # noqa: E402  (needs PyTorch)

nn = torch.nn
F = torch.nn.functional
SIZE, BLOCK = (64, 96), 8


class Net(nn.Module):
    """A function of a module and of the convolution before it."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Conv2d(3, 4, 3, padding=1)
        self.wide = nn.Conv2d(4, 4, 7, padding=3)
        self.function = function
        self.double().eval()

    def forward(self, x):
        """Return what the function makes."""
        return self.function(self, self.before(x))


def added(net, y):
    """Add in place."""
    y += net.wide(y)
    return y


def residual(net, y):
    """Add what is computed of each sum to it."""
    for _ in range(3):
        y += net.wide(y).tanh_()
    return y


def seen_by_views(net, y):
    """Write to what was viewed, in another order of dimensions too."""
    part, last = y[:, 1:3], y.permute(0, 2, 3, 1)
    y.copy_(net.wide(y))
    return part * 1, last[..., :2] + 1


def seen_by_the_whole(net, y):
    """Write to a part, of which the whole and another part know."""
    other = y.view(len(y), 2, 2, *SIZE)
    y[:, 1:3].mul_(net.wide(y)[:, :2])
    return y * 2, other.sum(1)


def not_seen(net, y):
    """Write to what was copied."""
    copy = y[:, 1:3].contiguous()
    y.copy_(net.wide(y))
    return copy


# What a network does after a convolution that looks 1 pixel far, and how far the result looks.
LOCAL = {
    "added": (added, 4),
    "add_": (lambda net, y: y.mul(2).add_(net.wide(y), alpha=3), 4),
    "residual units": (residual, 10),
    "mul_": (lambda net, y: y.mul(2).mul_(net.wide(y)), 4),
    "copy_": (lambda net, y: torch.zeros_like(y).copy_(net.wide(y)), 4),
    "masked_fill_": (lambda net, y: y.mul(2).masked_fill_(net.wide(y) > 0, 0.5), 4),
    "addcmul_": (lambda net, y: y.mul(2).addcmul_(y, net.wide(y)), 4),
    "views": (seen_by_views, 4),
    "the whole": (seen_by_the_whole, 4),
    "copies": (not_seen, 1),
    "an object": (lambda net, y: types.SimpleNamespace(result=[net.wide(y)]), 4),
}


def given():
    """Return images, and a mask of a part of one of them that no block ends with."""
    mask = torch.zeros(2, *SIZE, dtype=torch.bool)
    mask[0, 20:30, 33:41] = mask[1, 3, 5] = True
    return image(2, SIZE), mask


def leaves(result):
    """Return the images of a result, channels last."""
    result = getattr(result, "result", result)
    found = []
    for y in result if isinstance(result, (tuple, list)) else [result]:
        found.append(y if y.shape[1:3] == SIZE else y.movedim(1, -1))
    return found


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("break_even", [2.0, 0.0], ids=["stack", "images"])
@torch.no_grad()
def test_results_at_the_mask_are_the_dense_ones(st, name, break_even):
    function, reach = LOCAL[name]
    dense, (x, mask) = Net(function), given()
    sparse = st.sparsify(dense, BLOCK, halo="exact")
    sparse.break_even = break_even
    for _ in range(3):  # the third from a tape
        for ours, theirs in zip(leaves(sparse(x, mask)), leaves(dense(x)), strict=True):
            assert_near(ours[mask], theirs[mask])
    ((_, measured),) = sparse._reaches.values()
    assert measured == reach


def views(x):
    """Turn pixels into channels by views."""
    n, c, h, w = x.shape
    x = x.view(n, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4)
    return x.reshape(n, 4 * c, h // 2, w // 2)


def slices(x):
    """Turn pixels into channels by slices."""
    return torch.cat([x[..., i::2, j::2] for i in range(2) for j in range(2)], 1)


def seen_by_larger_pixels(x):
    """Write to what was viewed as fewer pixels with more channels."""
    larger = x.view(len(x), x.shape[1], x.shape[2] // 2, 2, *x.shape[3:])
    x.add_(F.avg_pool2d(x, 9, 1, 4))
    return larger.sum(3)[..., ::2]


class Resampling(nn.Module):
    """A convolution, functions that make fewer pixels and a convolution, and more pixels again."""

    def __init__(self, down, up, channels=4):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(channels, 16, 3, padding=1)
        self.down, self.up = down, up
        self.double().eval()

    def forward(self, x):
        """Return as many pixels as there were, or fewer."""
        y = self.last(self.down(self.first(x)))
        return self.up(y, x.shape[2:])


def strided(count, kernel=3):
    """Return convolutions with a stride of 2."""
    return nn.Sequential(*(nn.Conv2d(4, 4, kernel, 2, kernel // 2) for _ in range(count)))


def resized(mode, **options):
    """Return a function that interpolates to a size."""
    return lambda y, size: F.interpolate(y, size=size, mode=mode, **options)


def shuffled(y, size):
    """Turn channels into pixels."""
    return F.pixel_shuffle(y, 2)


def kept(y, size):
    """Return fewer pixels."""
    return y


def transposed(*options):
    """Return a transposed convolution."""
    kernel = torch.randn(16, 2, *options[:1] * 2, generator=torch.Generator().manual_seed(1))
    return lambda y, size: F.conv_transpose2d(y, kernel.double(), None, *options[1:])


POOLS = nn.Sequential(*(nn.MaxPool2d(2) for _ in range(3)))
CORNERS = {"mode": "bilinear", "align_corners": True}
# Fewer pixels, channels then, more pixels, and the sizes of images.
RESAMPLED = {
    "pixel_unshuffle": (nn.PixelUnshuffle(2), 16, shuffled, (48, 48)),
    "views": (views, 16, shuffled, (48, 48)),
    "slices": (slices, 16, shuffled, (48, 48)),
    "written later": (seen_by_larger_pixels, 4, shuffled, (48, 48)),
    "stride": (strided(1, 5), 4, shuffled, (48, 48)),
    "stride alone": (strided(2), 4, kept, (48, 48)),
    "pools to odd sizes": (POOLS, 4, resized("bilinear"), (199, 55)),
    "pools and corners": (POOLS, 4, resized(**CORNERS), (199, 55)),
    "pools and nearest": (POOLS, 4, resized("nearest"), (199, 55)),
    "pools and nearest-exact": (POOLS, 4, resized("nearest-exact"), (199, 55)),
    "strides to odd sizes": (strided(3), 4, resized("bilinear"), (161, 65)),
    "even sizes": (strided(3), 4, resized("bilinear"), (64, 64)),
    "a quarter": (lambda x: F.interpolate(x, scale_factor=0.25), 4, kept, (64, 64)),
    "a quarter, bilinear": (
        lambda x: F.interpolate(x, scale_factor=0.25, mode="bilinear"), 4, resized("nearest"),
        (64, 64),
    ),
    "transposed": (strided(1), 4, transposed(4, 2, 1), (48, 48)),
    "transposed, dilated": (strided(1), 4, transposed(5, 2, 4, 1, 1, 2), (48, 48)),
    "transposed, cropped": (nn.Identity(), 4, transposed(1, 1, 3), (48, 48)),
}  # fmt: skip


@pytest.mark.parametrize("name", RESAMPLED)
@pytest.mark.parametrize("block", [8, 16])
@torch.no_grad()
def test_single_pixels_are_the_dense_ones(st, name, block):
    """Wherever they lie in a block, and in a pixel of fewer."""
    down, channels, up, size = RESAMPLED[name]
    dense = Resampling(down, up, channels)
    sparse = st.sparsify(dense, block, halo="exact")
    sparse.break_even = 2.0
    x = image(1, size)
    expected = dense(x)
    times = max(size[0] // expected.shape[2], 1)
    for p in range(size[0] - size[0] % times):
        q = p * size[1] // size[0]
        if max(p // times - expected.shape[2], q // times - expected.shape[3]) >= 0:
            continue  # cropped
        mask = torch.zeros(1, *size, dtype=torch.bool)
        mask[0, p, q] = True
        at = slice(None), slice(None), p // times, q // times
        assert_near(sparse(x, mask)[at], expected[at])


class InTraining(nn.Module):
    """A network that looks further in training, and draws random numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.near = nn.Conv2d(3, 3, 3, padding=1).double()
        self.far = nn.Conv2d(3, 3, 9, padding=4).double()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        """Return one convolution in evaluation, and others in training."""
        if not self.training:
            return self.near(x)
        self.drop(x)
        return self.far(x)


def test_networks_in_training_are_measured_as_they_are(st):
    """The call that measures draws as many random numbers as others. Also if a part alone is."""
    dense, (x, mask) = InTraining(), given()
    sparse = st.sparsify(dense, BLOCK, halo="exact")
    for whole, part in ((False, False), (False, True), (True, True)):
        sparse.train(whole)
        dense.train(part)
        states = []
        for _ in range(2):
            torch.manual_seed(1)
            ours = sparse(x, mask).movedim(1, -1)[mask]
            states.append(torch.get_rng_state())
        assert torch.equal(*states)
        assert_near(ours.detach(), dense(x).movedim(1, -1)[mask].detach())


BATCH = {
    "in training": lambda: nn.BatchNorm2d(4).train(),
    "no running statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False).eval(),
    "as a function": lambda: Batch(),
}


class Batch(nn.Module):
    """A batch norm without a module."""

    def forward(self, x):
        """Normalize."""
        return F.batch_norm(x, None, None, training=True)


@pytest.mark.parametrize("kind", BATCH)
@pytest.mark.parametrize("records", [False, True])
def test_batch_statistics_are_refused(st, kind, records):
    """All active pixels are in them."""
    dense = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), BATCH[kind]()).double()
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    sparse = st.sparsify(dense, BLOCK, halo="exact")
    words = "halo='exact' needs batch norms with running statistics.*got a batch norm by.*call eval"
    with torch.set_grad_enabled(records), pytest.raises(ValueError, match=words):
        sparse(*given())
    assert all(torch.equal(tensor, before[n]) for n, tensor in dense.state_dict().items())


@torch.no_grad()
def test_a_norm_in_training_is_taken_once_it_is_in_evaluation(st):
    dense = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)).double().train()
    sparse, (x, mask) = st.sparsify(dense, BLOCK, halo="exact"), given()
    with pytest.raises(ValueError, match="batch norm"):
        sparse(x, mask)
    sparse.eval()
    assert_near(sparse(x, mask).movedim(1, -1)[mask], dense(x).movedim(1, -1)[mask])
    sparse.train()
    with pytest.raises(ValueError, match="batch norm"):
        sparse(x, mask)


@torch.no_grad()
def test_refusals_say_what_to_do(st):
    sparse = st.sparsify(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).double(), halo="exact")
    with pytest.raises(ValueError, match=r"got one with flatten.*; use halo='zero', or sparsify"):
        sparse(*given())
