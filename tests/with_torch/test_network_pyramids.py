"""Pyramids: windows of images that are pooled, convolved, enlarged and joined to the image."""

import pytest

torch = pytest.importorskip("torch")

from support import networks  # noqa: E402  (needs PyTorch)
from support.networks import assert_near  # noqa: E402

nn, F = torch.nn, torch.nn.functional


class Pyramid(nn.Module):
    """The head of a PSPNet or UPerNet: ``use`` says what is made of the pooled windows."""

    def __init__(
        self, use=None, sizes=(1, 2, 3, 6), corners=True, pool=F.adaptive_avg_pool2d, last=False
    ):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 16, 3, 2, 1)
        self.convs = nn.ModuleList(nn.Conv2d(16, 8, 1, bias=False) for _ in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in sizes)
        self.norms.apply(networks.random_statistics)
        self.last = nn.Conv2d(16 + 8 * len(sizes), 4, 3, padding=1)
        self.sizes, self.pool, self.use = sizes, pool, use
        self.how, self.is_last = {"mode": "bilinear", "align_corners": corners}, last

    def forward(self, x):
        """Return the convolution of what has been joined."""
        x = F.relu(self.first(x))
        parts = []
        for n, conv, norm in zip(self.sizes, self.convs, self.norms, strict=True):
            y = F.relu(norm(conv(self.pool(x, n))))
            if self.use:
                y = self.use(y)
            parts.append(F.interpolate(y, x.shape[2:], **self.how))
        return self.last(torch.cat([*parts, x] if self.is_last else [x, *parts], 1))


def called(st, dense, size=(45, 51)):
    """Compare a second call with the oracle."""
    x = torch.randn(2, 3, *size)
    on, mask = networks.blocks((2, *size), 16, 0.5, seed=3)
    sparse = st.sparsify(dense.eval(), 16)
    sparse.break_even, sparse.replay = 2.0, False
    sparse(x, mask)
    result = sparse(x, mask)
    stages = {size: 16, tuple(-(-n // 2) for n in size): 8}  # pooled windows are none
    assert_near(result, networks.oracle(dense, x, on, 16, stages), "float32")


@pytest.mark.parametrize("last", [False, True], ids=["image first", "image last"])
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("pool", [F.adaptive_avg_pool2d, F.adaptive_max_pool2d])
@torch.no_grad()
def test_windows_are_read_from_the_blocks(st, asked, corners, pool, last):
    called(st, Pyramid(corners=corners, pool=pool, last=last))
    each = asked[len(asked) // 2 :]
    average = pool is F.adaptive_avg_pool2d
    # One value of an image takes the way of a global pooling; 36 of each of two images are many.
    assert each.count("windows of images") == 3
    assert each.count("images interpolated") == 2
    assert each.count("image linear") == 2 + average


USES = {
    "as they are": lambda y: y + 1,
    "in place": lambda y: y.mul_(2),
    "a view in place": lambda y: (y[:, :2].mul_(2), y)[1],
    "twice": lambda y: y * y.mean((2, 3), True),
    "enlarged twice": lambda y: F.interpolate(y, (5, 7), mode="bilinear"),
    "nearest": lambda y: F.interpolate(y, scale_factor=2),
    "one line": lambda y: y[:, :, :1],
    "convolved": lambda y: F.conv2d(y, torch.full((8, 8, 3, 3), 0.1), padding=1),
    "with a stride": lambda y: F.conv2d(y, torch.full((8, 8, 1, 1), 0.1), stride=2),
    "flat": lambda y: y.flatten(2).cumsum(2).view(y.shape),
    "dropped": lambda y: F.dropout(y, training=False),
    "half and back": lambda y: y.bfloat16().float(),
}


@pytest.mark.parametrize("use", USES)
@torch.no_grad()
def test_whoever_reads_pooled_windows_gets_the_numbers(st, asked, use):
    called(st, Pyramid(USES[use], sizes=(1, 2, (3, 1))))


class Gate(nn.Module):
    """An attention of few windows, which is returned, too."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.function = nn.Conv2d(3, 8, 3, padding=1), function
        self.gate = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        """Return what the function makes of the activations and the enlarged gate."""
        x = self.first(x)
        few = torch.sigmoid(self.gate(F.adaptive_avg_pool2d(x, (2, 3))))
        return self.function(x, F.interpolate(few, x.shape[2:], mode="bilinear"))


GATES = {
    "product": lambda x, y: x * y,
    "sum": lambda x, y: y + x,
    "both": lambda x, y: (x * y, y),
    "written": lambda x, y: x + y.add_(1),
    "multiplied in place": lambda x, y: y.mul_(x),
    "largest": lambda x, y: torch.maximum(y, x) * x,
    "of both sides": lambda x, y: torch.cat([y, x, y], 1),
    "of parts": lambda x, y: x[:, :4] * y[:, 4:],
}


@pytest.mark.parametrize("function", GATES)
@torch.no_grad()
def test_enlarged_windows_are_images(st, asked, function):
    dense = Gate(GATES[function]).eval()
    x = torch.randn(2, 3, 48, 48)
    on, mask = networks.blocks((2, 48, 48), 16, 0.5, seed=3)
    sparse = st.sparsify(dense, 16)
    sparse.break_even, sparse.replay = 2.0, False
    results, expected = sparse(x, mask), networks.oracle(dense, x, on, 16)
    if function == "both":  # the gate is an image of its own, which is not 0 anywhere
        results = results[0], results[1] * mask[:, None]
    assert_near(results, expected, "float32")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dense",
    [
        Pyramid(), Pyramid(corners=False, last=True), Pyramid(pool=F.adaptive_max_pool2d),
        Gate(GATES["sum"]), Gate(GATES["product"]),
    ],
    ids=["corners", "image last", "maxima", "sum", "product"],
)  # fmt: skip
@torch.no_grad()
def test_pyramids_on_a_gpu(st, require, dense):
    """In float32, products in tf32 off: as the oracle is."""
    require("gpu")
    dense = dense.cuda().eval()
    x = torch.randn(1, 3, 48, 80, device="cuda")
    on, mask = (t.cuda() for t in networks.blocks((1, 48, 80), 16, 0.5, seed=3))
    sparse, stages = st.sparsify(dense, 16), {(48, 80): 16, (24, 40): 8}
    with torch.backends.cudnn.flags(allow_tf32=False):
        expected = networks.oracle(dense, x, on, 16, stages)
        for _ in range(3):
            assert_near(sparse(x, mask), expected, "float32")
