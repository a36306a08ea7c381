"""sparsify of networks that cut pixels off, or join them, which makes other images than a stride.

Half of an image is as large as the image at half the scale, and lies elsewhere. It has no blocks:
what dense PyTorch makes of it is what is expected, of the activation that is 0 outside the blocks
of the mask.
"""

import copy

import pytest

torch = pytest.importorskip("torch")

from support import networks  # noqa: E402  (needs PyTorch)
from support.networks import assert_near  # noqa: E402

nn = torch.nn
F = torch.nn.functional
SIZE, BLOCK = (64, 96), 16


class Net(nn.Module):
    """A function of a module and of the convolution before it."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Conv2d(3, 4, 3, padding=1)
        self.inner = nn.Conv2d(4, 4, 3, padding=1)
        self.after = nn.Conv2d(4, 4, 3, padding=1)
        self.function = function
        self.double().eval()

    def forward(self, x):
        """Return what the function makes."""
        return self.function(self, self.before(x))


def halves(net, y):
    """Convolve the lower half, and both halves as one image."""
    top, bottom = y.chunk(2, 2)
    return net.after(torch.cat([top, net.inner(bottom)], 2))


def means(net, y):
    """Return the means of both halves."""
    return torch.stack([t.mean((2, 3)) for t in y.chunk(2, 2)], 2)


def differences(net, y):
    """Use parts of one size from both ends."""
    return y[:, :, :32] - y[:, :, 32:], y[:, :, :, :48] * y.narrow(3, 48, 48)


# Functions that leave the stack, and their names.
OTHER_IMAGES = {
    "rows": ("__getitem__", lambda net, y: y[:, :, 32:]),
    "rows from the top": ("__getitem__", lambda net, y: y[:, :, :32]),
    "a quarter": ("__getitem__", lambda net, y: y[:, :, 32:, :48]),
    "rows by number": ("__getitem__", lambda net, y: y[:, :, torch.arange(32, 64)]),
    "every other row of a half": ("__getitem__", lambda net, y: y[:, :, ::2][:, :, 16:]),
    "chunk": ("chunk", lambda net, y: y.chunk(2, 2)),
    "split": ("split", lambda net, y: y.split(48, 3)),
    "split in sizes": ("split", lambda net, y: torch.split(y, [32, 16, 16], 2)),
    "split by places": ("tensor_split", lambda net, y: y.tensor_split((32,), 2)),
    "narrow": ("narrow", lambda net, y: y.narrow(2, 32, 32)),
    "index_select": ("index_select", lambda net, y: y.index_select(2, torch.arange(32, 64))),
    "less padding": ("pad", lambda net, y: F.pad(y, (0, 0, -32, 0))),
    "more padding": ("relu", lambda net, y: F.pad(y, (0, 0, 64, 0)).relu()),
    "repeat": ("repeat", lambda net, y: y.repeat(1, 1, 1, 2)),
    "tile": ("tile", lambda net, y: y.tile(2, 1)),
    "cat": ("cat", lambda net, y: torch.cat([y, y], 2)),
    "channels of halves": ("reshape", lambda net, y: y.reshape(len(y), 8, 32, 96)),
    "sides": ("transpose", lambda net, y: F.pad(y, (0, 32, 0, 0)).transpose(2, 3)),
    "means": ("chunk", means),
    "differences": ("__getitem__, narrow", differences),
    "a convolution of a half": ("chunk", lambda net, y: net.inner(y.chunk(2, 2)[1])),
    "halves": ("chunk", halves),
    "in place": ("chunk", lambda net, y: [t.mul_(2) for t in y.chunk(2, 2)]),
}  # fmt: skip


def given(share=0.4):
    """Return images, their active blocks and their mask."""
    x = networks.image(2, SIZE)
    return x, *networks.blocks((2, *SIZE), BLOCK, share)


def zeroed_before(dense, x, on):
    """Return the first convolution, 0 outside the active blocks."""
    return networks.oracle(dense.before, x, on, BLOCK, {SIZE: BLOCK})


@pytest.mark.parametrize("name", OTHER_IMAGES)
@pytest.mark.parametrize("break_even", [2.0, 0.0], ids=["stack", "images"])
@torch.no_grad()
def test_what_is_cut_off_or_joined_has_no_blocks(st, name, break_even):
    function, call = OTHER_IMAGES[name]
    dense, (x, on, mask) = Net(call), given()
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = break_even
    wanted = dense.function(dense, zeroed_before(dense, x, on))
    for _ in range(3):  # the third from a tape
        assert_near(sparse(x, mask), wanted)
    assert sparse.dense_layers[""] == function


@pytest.mark.parametrize("break_even", [2.0, 0.0], ids=["stack", "images"])
@torch.no_grad()
def test_parts_of_the_size_of_a_stage_have_not_its_blocks(st, break_even):
    """Strides made the one, and a slice that stays on the stack the other."""
    dense = Net(lambda net, y: (
        F.avg_pool2d(y, 2), y[:, :, 32:, 48:], net.inner(y[:, :, :56]), y[:, :, 8:]
    ))  # fmt: skip
    x, on, mask = given()
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = break_even
    half, quarter, most, rest = sparse(x, mask)
    y = zeroed_before(dense, x, on)
    assert_near([half, quarter, rest], [F.avg_pool2d(y, 2), y[:, :, 32:, 48:], y[:, :, 8:]])
    inner = networks.oracle(dense.inner, y[:, :, :56], on, BLOCK, {(56, 96): BLOCK})
    assert_near(most, inner)


@pytest.mark.parametrize("break_even", [2.0, 0.0], ids=["stack", "images"])
@torch.no_grad()
def test_what_is_joined_again_can_be_added_to_a_stack(st, break_even):
    """There it has the blocks of the stack."""
    dense = Net(lambda net, y: net.after(net.inner(y) + torch.cat(y.chunk(2, 2)[::-1], 2)))
    x, on, mask = given()
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = break_even
    assert_near(sparse(x, mask), networks.oracle(dense, x, on, BLOCK, {SIZE: BLOCK}))
    assert sparse.dense_layers == {"": "chunk"}


@torch.no_grad()
def test_layers_of_such_images_are_named(st):
    dense, (x, _, mask) = Net(halves), given()
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = 2.0
    sparse(x, mask)
    assert sparse.dense_layers == {"": "chunk", "inner": "conv2d", "after": "conv2d"}
    rows = {line.split()[0]: line for line in str(sparse.table()).splitlines()}
    assert "stack" in rows["before"] and "100.0%" not in rows["before"]
    assert all("dense" in rows[name] and "100.0%" in rows[name] for name in ("inner", "after"))


@pytest.mark.parametrize("break_even", [2.0, 0.0], ids=["stack", "images"])
def test_gradients_of_such_images(st, break_even):
    dense, (x, _, mask) = Net(halves), given()
    twin = copy.deepcopy(dense)
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = break_even
    pixels = mask[:, None].to(x.dtype)
    ways = torch.randn(2, 4, *SIZE, generator=torch.Generator().manual_seed(3)).double()
    (sparse(x, mask) * ways).sum().backward()
    (halves(twin, twin.before(x * pixels) * pixels) * ways).sum().backward()
    for ours, theirs in zip(dense.parameters(), twin.parameters(), strict=True):
        assert_near(ours.grad, theirs.grad)


RESAMPLED = {
    "slices": lambda net, y: y[:, :, 1::2, ::2],
    "slices of padding": lambda net, y: F.pad(y, (0, 1, 0, 1))[:, :, :64, :96][:, :, ::2, ::2],
    "repeat_interleave": lambda net, y: y.repeat_interleave(2, 2).repeat_interleave(2, 3),
    "bicubic": lambda net, y: F.interpolate(y, scale_factor=0.5, mode="bicubic"),
    "area": lambda net, y: F.interpolate(y, size=(32, 48), mode="area"),
    "places of maxima": lambda net, y: F.max_pool2d(y, 2, return_indices=True)[0],
    "lp_pool2d": lambda net, y: F.lp_pool2d(y, 2, 2),
    "adaptive pool": lambda net, y: F.adaptive_avg_pool2d(y, (32, 48)),
    "adaptive maxima": lambda net, y: F.adaptive_max_pool2d(y, (32, 48)),
    "padded pool": lambda net, y: F.avg_pool2d(F.pad(y, (1, 1, 1, 1)), 3, 2),
    "pixel_unshuffle": lambda net, y: F.pixel_unshuffle(y, 2)[:, :4],
}


@pytest.mark.parametrize("name", RESAMPLED)
@pytest.mark.parametrize("break_even", [2.0, 0.0], ids=["stack", "images"])
@torch.no_grad()
def test_what_is_resampled_stays_on_the_stack(st, name, break_even):
    dense, (x, on, mask) = Net(lambda net, y: net.after(RESAMPLED[name](net, y))), given()
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = break_even
    stages = {(64 * a // 2, 96 * a // 2): BLOCK * a // 2 for a in (1, 2, 4)}
    assert_near(sparse(x, mask), networks.oracle(dense, x, on, BLOCK, stages))
    assert "after" not in sparse.dense_layers


@pytest.mark.parametrize("break_even", [2.0, 0.0], ids=["stack", "images"])
@torch.no_grad()
def test_a_row_less_makes_an_image_of_a_stage_again(st, break_even):
    """So PNASNet pads at the top and cuts the first row off; here of odd sizes."""
    size = (61, 83)
    dense = Net(lambda net, y: net.after(net.inner(F.pad(y, (1, 0, 1, 0)))[:, :, 1:, 1:]))
    x, (on, mask) = networks.image(2, size), networks.blocks((2, *size), BLOCK, 0.4)
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = break_even
    stages = {size: BLOCK, (62, 84): BLOCK}
    with networks.ZeroedOutside(on, stages) as mode:
        y = dense.before(mode.zeroed(x))
        with torch._C.DisableTorchFunction():
            padded = F.pad(y, (1, 0, 1, 0))
        wanted = dense.after(dense.inner(padded)[:, :, 1:, 1:])
    assert_near(sparse(x, mask), wanted)
    assert sparse.dense_layers == {"": "__getitem__"}
