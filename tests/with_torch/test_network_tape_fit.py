"""What a network may do to run from a tape, and what is on no tape."""

import copy

import pytest

torch = pytest.importorskip("torch")

from support.network_tapes import BLOCK, Using, image, masks, same  # noqa: E402

nn, F = torch.nn, torch.nn.functional


def _cached(self, y):
    self.cache[:] = self.cache or [torch.ones(())]
    return y * self.cache[0]


def _cached_and_written(self, y):
    return _cached(self, y) * self.cache[0].add_(1)


def _cached_anew(self, y):
    self.cache[:] = [y.mean()]
    return y * self.cache[0]


def _counted(self, y):
    self.count = self.count + 1
    self.calls += 1
    return y + self.count


def _left_behind(self, y):
    self.last = F.relu(y)
    return y + self.last


def _written(self, y):
    y = y * 1
    y[:, :, 2:5] = self.calls
    return y


def _tokens(self, y):
    """Mix the pixels of images, whatever blocks are active."""
    tokens = y.flatten(2).transpose(1, 2)
    mixed = (tokens @ self.conv.weight[:, :, 0, 0]).softmax(1).transpose(1, 2)
    return y[:, :3] + mixed.unflatten(2, y.shape[2:])


def _scores(self, y):
    """Multiply pixels of an image by each other: off the stack."""
    return torch.einsum("nchw,nchv->nhwv", y, y).sum(-1)[:, None] * y


def _in_half_precision(self, y):
    with torch.autocast("cpu", torch.bfloat16):
        return _scores(self, y).float()


class Doubled(torch.utils._python_dispatch.TorchDispatchMode):
    """Doubles what sigmoids return."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator."""
        result = func(*args, **kwargs or {})
        return 2 * result if func is torch.ops.aten.sigmoid.default else result


def _in_a_mode(self, y):
    with Doubled():
        return y * torch.sigmoid(y.mean((2, 3), keepdim=True)) + torch.sigmoid(y)


def _in_double_precision(self, y):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return y * (torch.ones(4, 1, 1) / 3)
    finally:
        torch.set_default_dtype(before)


def _seeded(self, y):
    torch.manual_seed(3)
    return y + torch.randn(4, 1, 1) + F.dropout(y, 0.5, True)


def _forked(self, y):
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        return y + torch.randn(4, 1, 1)


def _seeded_for_the_next_call(self, y):
    y = y + torch.randn(4, 1, 1)
    torch.manual_seed(3)
    return y


UNFIT = {
    "a region of autocast": _in_half_precision,
    "a mode that sees operators": _in_a_mode,
    "another default dtype": _in_double_precision,
    "a seed": _seeded,
    "a generator that is put back": _forked,
    "a seed for the next call": _seeded_for_the_next_call,
    "a number of a result": lambda self, y: y * y.mean((2, 3)).amax().item(),
    "a number of the image": lambda self, y: y if y.sum() > 0 else -y,
    "a tensor from elsewhere": lambda self, y: y * ELSEWHERE,
    "a tensor that it keeps and writes": _cached_and_written,
    "a tensor that it keeps for a call": _cached_anew,
    "a part of the image that is written": _written,
    "numpy": lambda self, y: y * torch.from_numpy(y.mean((2, 3), keepdim=True).numpy().copy()),
    "counts": _counted,
    "an activation that it leaves behind": _left_behind,
}
ELSEWHERE = torch.ones(())


@pytest.mark.parametrize("name", UNFIT)
@torch.no_grad()
def test_what_is_on_no_tape_is_called_each_time(st, name):
    torch.manual_seed(0)
    dense, (mask, other) = Using(UNFIT[name]).eval(), masks(0.4, 0.6)
    twin = copy.deepcopy(dense)
    sparse, plain = st.sparsify(dense, BLOCK), st.sparsify(twin, BLOCK, replay=False)
    torch.manual_seed(3)  # as the next calls find the generator of random numbers
    for seed in range(4):
        if name == "a tensor from elsewhere":
            ELSEWHERE.add_(1)
        x = image(seed) - 3 * (seed % 2)
        for m in (mask, other):
            assert same(sparse(x, m), plain(x, m))
    assert sparse._tapes.unfit and not sparse._tapes.kept


def _kept_mask(self, y):
    self.cache[:] = self.cache or [torch.tensor([True, False, True, True])]
    return y[:, self.cache[0]] * 2


FIT = {
    "channels of a mask that it keeps": _kept_mask,
    "of whole images": lambda self, y: y * torch.sigmoid(
        F.conv2d(y.mean((2, 3), keepdim=True)[:, :3], self.conv.weight[:, :, :1, :1])),
    "written in place": lambda self, y: y.mul_(2).add_(y.mean((2, 3), keepdim=True).neg_()),
    "on the image": lambda self, y: F.unfold(y, 2).sum(1),
    "from the image to the stack": lambda self, y: y + F.conv2d(
        y.roll(1, 3)[:, :3], self.conv.weight, padding=1),
    "parts of the image": lambda self, y: y.cumsum(2).chunk(2, 3)[1].mT,
    "pixels as tokens": _tokens,
    "read twice": lambda self, y: F.relu(y) + y,
    "weights of its own": lambda self, y: F.conv2d(
        y[:, :3], self.conv.weight - self.conv.weight.mean()),
    "a tensor that it keeps": _cached,
    "in a dict": lambda self, y: {"a": [F.relu(y), y.mean((2, 3))], "b": (self.conv.bias, 3, None)},
    "views": lambda self, y: torch.cat(
        y.permute(0, 2, 3, 1).chunk(2, -1)[::-1], -1).permute(0, 3, 1, 2),
}  # fmt: skip


@pytest.mark.parametrize("break_even", [2.0, 0.0])
@pytest.mark.parametrize("name", FIT)
@torch.no_grad()
def test_what_a_network_may_do(st, name, break_even):
    torch.manual_seed(0)
    dense = Using(FIT[name]).eval()
    sparse, plain = (st.sparsify(dense, BLOCK, replay=how) for how in ("auto", False))
    sparse.break_even = plain.break_even = break_even
    for seed in range(3):
        for mask in masks(0.4, 0.6):
            assert same(sparse(image(seed), mask), plain(image(seed), mask))
    assert sparse._tapes.kept and not sparse._tapes.unfit


def _channels_of_a_mask(self, y):
    y = y[:, y.mean((0, 2, 3)) > 0]
    return y.sum(1, keepdim=True) * y.shape[1]


def _count(y, least=1):
    """Return a number of channels, as a tensor."""
    return (y.mean((0, 2, 3)) > 0).sum().clamp(min=least, max=2 * least)


def _written_slice(self, y):
    gate = y.mean((2, 3), keepdim=True) + 0
    gate[:, : _count(y)] = 5.0
    return y * gate


def _padded_by_what_was_read(self, y):
    """Pad by a number that a function before has read, which made no size of it."""
    value = y.mean()
    twice = 2 * value
    return F.pad(y, (1, 1, 1, 1), value=value) + twice


SHAPES = {
    "channels of a mask": _channels_of_a_mask,
    "a slice": lambda self, y: y[:, : _count(y)].sum(1, keepdim=True),
    "a slice of pixels": lambda self, y: y[:, :, : 58 + _count(y)].sum((1, 2, 3)),
    "a slice of values": lambda self, y: y * y.mean((2, 3))[:, : _count(y)].sum(),
    "a slice that is written": _written_slice,
    "a window": lambda self, y: F.max_pool2d(y, _count(y, 2)).mean((2, 3)),
    "parts": lambda self, y: y.chunk(_count(y, 2), 1)[0].sum(1),
    "a dimension": lambda self, y: y.sum(1 + _count(y)).sum((1, 2)) * _count(y),
    "padding": lambda self, y: F.pad(y, (1, 1, 1, 1), value=y.mean()),
    "padding by a number that was read": _padded_by_what_was_read,
    "nonzero": lambda self, y: y * len(torch.nonzero(y.mean((2, 3)) > 0)),
    "a mask": lambda self, y: y * y.mean((2, 3))[y.mean((2, 3)) > 0].numel(),
    "unique": lambda self, y: y * torch.unique((10 * y.mean((2, 3))).round()).shape[0],
    "unique, with counts": lambda self, y: y * len(
        torch.unique((10 * y.mean((2, 3))).round(), return_counts=True)[1]),
    "masked_select": lambda self, y: y + y.mean((2, 3)).masked_select(y.mean((2, 3)) > 0).size(0),
    "repeats": lambda self, y: y * torch.repeat_interleave(
        y.mean((2, 3)).flatten(), (y.mean((2, 3)).flatten() > 0).long()).shape[0],
    "tolist": lambda self, y: y * len(torch.nonzero(y.mean((2, 3)) > 0).tolist()),
}  # fmt: skip


@pytest.mark.parametrize("break_even", [2.0, 0.0])
@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_a_size_that_depends_on_numbers_is_not_frozen(st, name, break_even):
    torch.manual_seed(0)
    dense, some = Using(SHAPES[name]).eval(), masks(0.4, 0.6, 1.0)
    sparse, plain = (st.sparsify(dense, BLOCK, replay=how) for how in ("auto", False))
    sparse.break_even = plain.break_even = break_even
    factors = set()
    for seed in range(8):
        x = image(seed) + (seed % 4 - 2)
        for mask in some:
            expected = plain(x, mask)
            assert same(sparse(x, mask), expected)
            factors.add(float(expected.abs().sum()))
    assert len(factors) > 8 and sparse._tapes.unfit
