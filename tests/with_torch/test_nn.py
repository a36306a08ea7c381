"""SparseConv2d and SparseBottleneck: the dense modules' values, parameters, training."""

import copy
import pickle
import sys

import pytest

from sbnet_cupy import DTypeError, ShapeError
from support.assertions import assert_close, assert_same
from support.exhaustive import thinned
from support.torch_cases import draw

UNIT_TERMS = 3 * 3 * 6 + 12 + 6


@pytest.fixture(autouse=True)
def _weights_are_the_same(torch):
    torch.manual_seed(0)


def image(torch, n=2, c=5, h=20, w=18, device="cpu", last=False, **options):
    x = draw(torch, n, c, h, w, device=device, **options)
    return x.contiguous(memory_format=torch.channels_last) if last else x


def masked(torch, n=2, h=20, w=18, device="cpu"):
    mask = torch.zeros(n, h, w, dtype=torch.bool, device=device)
    mask[0, 3, 4] = mask[-1, h - 1, w - 1] = True
    return mask


def shown(torch, active, params, shape):
    """Return bool [N, 1, H', W']: the output pixels of the active blocks."""
    n, _, h, w = shape
    (bh, bw), counts = params.bsize_out, active.active_block_indices
    seen = torch.zeros(n, 1, h, w, dtype=torch.bool, device=counts.device)
    for image, i, j in counts.tolist():
        seen[image, :, i * bh : (i + 1) * bh, j * bw : (j + 1) * bw] = True
    return seen


CONVOLUTIONS = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "padding": "same", "bias": False},
    {"kernel_size": (2, 4), "padding": "same"},
    {"kernel_size": 3, "padding": "valid"},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (5, 3), "stride": (3, 1), "padding": (2, 0)},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": 7, "stride": 2, "padding": 3},
]


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("block_size", [1, 8, (9, 6)])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
def test_a_convolution_has_the_dense_values_in_active_blocks(
    st, torch, device, options, last, block_size
):
    dense = torch.nn.Conv2d(5, 7, **options, device=device)
    sparse = st.nn.SparseConv2d.from_dense(dense, block_size=block_size)
    x, mask = image(torch, device=device, last=last), masked(torch, device=device)
    expected, y = dense(x).detach(), sparse(x, mask).detach()
    active, params = sparse.active_blocks(x, mask)
    assert params == sparse.block_params(20, 18)
    seen = shown(torch, active, params, expected.shape)
    assert seen.any() and not seen.all()
    terms = dense.weight[0].numel() + 1
    assert_close(y, torch.where(seen, expected, 0), terms=2 * terms, dtype="float32")
    assert y.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    assert_same(sparse(x, mask[:, None].float()).detach(), y)
    assert_same(sparse(x, active, params).detach(), y)
    assert_same(sparse(x, tuple(active), params).detach(), y)


def test_a_channels_last_image_is_used_where_it_lies(st, torch, monkeypatch):
    module = sys.modules["sbnet_cupy.torch.modules.sparse_conv2d"]
    taken = []

    def spy(x, *arguments, **options):
        taken.append((x.data_ptr(), x.is_contiguous()))
        return original(x, *arguments, **options)

    original = module.sparse_conv2d
    monkeypatch.setattr(module, "sparse_conv2d", spy)
    conv = st.nn.SparseConv2d(5, 7, 3, padding=1, block_size=8)
    for last in (False, True):
        x = image(torch, last=last)
        conv(x, masked(torch))
        assert taken.pop() == (x.data_ptr(), True)


def test_base_activation_and_capacity(st, torch, device):
    conv = st.nn.SparseConv2d(
        5, 7, 3, padding=1, block_size=8, activation="relu", capacity=2, device=device
    )
    x, mask = image(torch, device=device, last=True), masked(torch, device=device)
    base = draw(torch, 2, 7, 20, 18, seed=3, device=device)
    y = conv(x, mask, base=base).detach()
    active, params = conv.active_blocks(x, mask)
    assert active.count() == active.capacity == 2
    seen = shown(torch, active, params, y.shape).expand_as(y)
    assert_same(y[~seen], base[~seen])
    assert (y[seen] >= 0).all() and (y[seen] > 0).any()
    conv.capacity = 1.0  # of the blocks of all images
    assert_same(conv(x, mask, base=base).detach(), y)
    active, _ = conv.active_blocks(x, mask)
    assert active.capacity == len(x) * params.bcount[0] * params.bcount[1]


def test_from_dense_shares_parameters_and_mode(st, torch):
    dense = torch.nn.Conv2d(5, 7, 3, padding=1).eval()
    sparse = st.nn.SparseConv2d.from_dense(dense, block_size=8)
    assert sparse.weight is dense.weight and sparse.bias is dense.bias and not sparse.training
    assert sparse.state_dict().keys() == dense.state_dict().keys()
    own = st.nn.SparseConv2d.from_dense(copy.deepcopy(dense), block_size=8)
    assert own.weight is not dense.weight
    own.load_state_dict(dense.state_dict())
    for module in (own, copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse))):
        x, mask = image(torch), masked(torch)
        assert_same(module(x, mask).detach(), sparse(x, mask).detach())
    assert "block_size=(8, 8)" in repr(sparse)


def test_modules_refuse_what_they_cannot_do(st, torch):
    conv = torch.nn.Conv2d
    make = st.nn.SparseConv2d.from_dense
    for options, word in [
        ({"groups": 2}, "groups"),
        ({"dilation": 2}, "dilation"),
        ({"padding_mode": "reflect", "padding": 1}, "reflect"),
    ]:
        with pytest.raises(NotImplementedError, match=word):
            make(conv(4, 4, 3, **options), block_size=8)
        with pytest.raises(NotImplementedError, match=word):
            st.nn.SparseConv2d(4, 4, 3, **options, block_size=8)

    class Halved(conv):
        def forward(self, x):
            return super().forward(x) / 2

    hooked, normed = conv(5, 7, 3), torch.nn.utils.parametrizations.weight_norm(conv(5, 7, 3))
    hooked.register_forward_hook(lambda module, inputs, y: y / 2)
    sparse, x, mask = make(conv(5, 7, 3, padding=1), block_size=8), image(torch), masked(torch)
    active, params = sparse.active_blocks(x, mask)
    for error, word, call in [
        (TypeError, "conv must be", lambda: make(torch.nn.Linear(3, 3), block_size=8)),
        (TypeError, "forward of its own", lambda: make(Halved(5, 7, 3), block_size=8)),
        (TypeError, "conv must have no hooks", lambda: make(hooked, block_size=8)),
        (TypeError, "got a parametrization", lambda: make(normed, block_size=8)),
        (ShapeError, "block_size", lambda: make(conv(5, 7, 3), block_size=0)),
        (ShapeError, "stride must be a positive integer or a pair of them, got .0, 0",
         lambda: make(conv(5, 7, 3, stride=0), block_size=8)),
        (ValueError, "capacity", lambda: make(conv(5, 7, 3), block_size=8, capacity=1.5)),
        (ShapeError, r"x must have shape \(N, 5", lambda: sparse(x[:, :4], mask)),
        (ShapeError, r"; use x.permute\(0, 3, 1, 2\)", lambda: sparse(x.permute(0, 2, 3, 1), mask)),
        (ShapeError, r"; use x\[None\]", lambda: sparse(x[0], mask)),
        (DTypeError, r"weights, torch.float32, got torch.float64; use x.to\(torch.float32\)",
         lambda: sparse(x.double(), mask)),
        (DTypeError, r"weights, torch.float32, got torch.uint8; use x.to\(torch.float32\)",
         lambda: st.nn.SparseBottleneck(5, 3, 5, block_size=8)(x.byte(), mask)),
        (DTypeError, "x must be a torch", lambda: sparse(x.numpy(), mask)),
        (DTypeError, "mask must be a torch", lambda: sparse(x, mask.numpy())),
        (DTypeError, "mask must be a torch.Tensor, or a list", lambda: sparse(x, None)),
        (ShapeError, r"mask must have shape .* or \(\d+, 1, ", lambda: sparse(x, mask[:, 1:])),
        (TypeError, "params must be given", lambda: sparse(x, active)),
        (ShapeError, "block_params must be", lambda: sparse(x[..., :9], active, params)),
    ]:
        with pytest.raises(error, match=word):
            call()


# ------------------------------------------------------------------------------ the residual unit


def dense_unit(torch, cin, cmid, cout, stride, device="cpu", project=None):
    """Return a pre-activation unit of ordinary modules, its batch norms not trivial."""
    nn = torch.nn

    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn1, self.conv1 = nn.BatchNorm2d(cin), nn.Conv2d(cin, cmid, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(cmid)
            self.conv2 = nn.Conv2d(cmid, cmid, 3, stride, padding=1, bias=False)
            self.bn3, self.conv3 = nn.BatchNorm2d(cmid), nn.Conv2d(cmid, cout, 1, bias=False)
            self.downsample = None
            if cin != cout or stride != 1:
                self.downsample = nn.Conv2d(cin, cout, 1, stride, bias=False)

        def forward(self, x):
            y = self.conv1(torch.relu(self.bn1(x)))
            y = self.conv2(torch.relu(self.bn2(y)))
            y = self.conv3(torch.relu(self.bn3(y)))
            return y + (x if self.downsample is None else self.downsample(x))

    unit = Unit()
    for bn in (unit.bn1, unit.bn2, unit.bn3):
        for tensor, low in ((bn.weight, 0.5), (bn.bias, 0.1), (bn.running_var, 0.5)):
            torch.nn.init.uniform_(tensor, low, low + 1)
        torch.nn.init.normal_(bn.running_mean)
    return unit.to(device)


UNITS = [(6, 4, 6, 1), (6, 4, 8, 1), (6, 4, 8, 2)]


@pytest.mark.parametrize("sizes", UNITS, ids=str)
@pytest.mark.parametrize("size", thinned([(20, 18), (19, 17)], 2), ids=str)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_a_unit_on_a_full_mask_is_the_dense_unit(st, torch, device, sizes, size, training, last):
    """Values, gradients and running statistics, in evaluation and in training."""
    dense = dense_unit(torch, *sizes, device=device).double().train(training)
    sparse = st.nn.SparseBottleneck.from_dense(copy.deepcopy(dense), block_size=9)
    assert sparse.training is training
    full = torch.ones(2, *size, dtype=torch.bool, device=device)
    x = image(torch, 2, 6, *size, device=device, last=last, dtype=torch.float64)
    results = []
    for call in (dense, lambda x: sparse(x, full)):
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        y.square().sum().backward()
        results.append([y.detach(), leaf.grad])
    assert results[1][0].is_contiguous() != last  # the layout of x, whatever the dense unit has
    pairs = list(zip(results[1], results[0], strict=True))
    for (name, a), (_, e) in zip(sparse.named_parameters(), dense.named_parameters(), strict=True):
        assert a.grad is not None, name
        pairs.append((a.grad, e.grad))
    pairs += zip(sparse.buffers(), dense.buffers(), strict=True)
    for actual, expected in pairs:
        if not expected.is_floating_point():
            assert_same(actual, expected)
            continue
        size = 64 * (1 + expected.abs().max().item())  # what is added up before it cancels
        terms = 2 * 20 * 18 + UNIT_TERMS
        assert_close(actual, expected, terms=terms, dtype="float64", magnitude=size)


@pytest.mark.parametrize("sizes", UNITS, ids=str)
@pytest.mark.parametrize("size", [(20, 18), (19, 17)], ids=str)
def test_a_unit_has_the_dense_values_in_active_blocks(st, torch, device, sizes, size):
    dense = dense_unit(torch, *sizes, device=device).eval()
    sparse = st.nn.SparseBottleneck.from_dense(dense, block_size=9)
    x, mask = image(torch, 2, 6, *size, device=device), masked(torch, 2, *size, device)
    with torch.no_grad():
        expected, y = dense(x), sparse(x, mask)
        shortcut = x if dense.downsample is None else dense.downsample(x)
    active, params = sparse.active_blocks(x, mask)
    seen = shown(torch, active, params, expected.shape)
    assert seen.any() and not seen.all()
    assert_close(y, torch.where(seen, expected, shortcut), terms=4 * UNIT_TERMS, dtype="float32")
    assert_same(sparse(x, active, params).detach(), y)


def test_training_statistics_are_those_of_the_active_pixels_each_counted_once(st, torch, device):
    """The first batch norm sees x itself: what it must count can be picked by hand."""
    sparse = st.nn.SparseBottleneck(6, 4, block_size=6, device=device)  # 4x4 tiles
    x, mask = image(torch, 2, 6, device=device), masked(torch, device=device)
    active, params = sparse.active_blocks(x, mask)
    seen = shown(torch, active, params, x.shape)[:, 0]
    sparse(x, mask)
    picked = x.permute(0, 2, 3, 1)[seen]
    for kept, new, start in [
        (sparse.bn1.running_mean, picked.mean(0), 0),
        (sparse.bn1.running_var, picked.var(0), 1),
    ]:
        expected = 0.9 * start + 0.1 * new
        assert_close(kept, expected, terms=len(picked) + 4, dtype="float32", magnitude=2.0)
    assert sparse.bn1.num_batches_tracked == 1


def test_an_empty_mask_changes_no_statistics(st, torch, device):
    sparse = st.nn.SparseBottleneck(6, 4, block_size=6, device=device)
    before = copy.deepcopy(sparse.state_dict())
    x = image(torch, 2, 6, device=device).requires_grad_()
    y = sparse(x, torch.zeros(2, 20, 18, device=device))
    y.sum().backward()
    assert_same(y.detach(), x.detach())
    assert_same(x.grad, torch.ones_like(x))
    for name, value in sparse.state_dict().items():
        assert_same(value, before[name])
    assert not any(p.grad.any() for p in sparse.parameters())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("names", [("bn1",), ("bn1", "bn2", "bn3")], ids=str)
def test_each_batch_norm_is_in_the_mode_that_it_was_set_to(st, torch, training, names):
    """Frozen batch norms in training keep to their running statistics."""
    dense = dense_unit(torch, 6, 4, 6, 1).double().train(training)
    sparse = st.nn.SparseBottleneck.from_dense(copy.deepcopy(dense), block_size=9)
    x, results = image(torch, 2, 6, dtype=torch.float64), []
    for unit, call in ((dense, dense), (sparse, lambda x: sparse(x, torch.ones(2, 20, 18)))):
        for name in names:
            getattr(unit, name).train(not training)
        y = call(x)
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad for p in unit.parameters()), *unit.buffers()])
    for expected, actual in zip(*results, strict=True):
        if expected.is_floating_point():
            size = 64 * (1 + expected.abs().max().item())  # what is added up before it cancels
            terms = 2 * 20 * 18 + UNIT_TERMS
            assert_close(actual, expected, terms=terms, dtype="float64", magnitude=size)
        else:
            assert_same(actual, expected)


@pytest.mark.parametrize("momentum", [None, 0.3])
@pytest.mark.parametrize("tracked", [True, False])
def test_batch_norm_options(st, torch, momentum, tracked):
    dense = dense_unit(torch, 6, 4, 6, 1)
    for bn in (dense.bn1, dense.bn2, dense.bn3):
        bn.momentum = momentum
        if not tracked:
            bn.track_running_stats = False
            bn.running_mean = bn.running_var = bn.num_batches_tracked = None
    dense = dense.double()
    sparse = st.nn.SparseBottleneck.from_dense(copy.deepcopy(dense), block_size=9)
    full = torch.ones(2, 20, 18)
    for seed in range(3):
        x = image(torch, 2, 6, seed=seed, dtype=torch.float64)
        y, expected = sparse(x, full), dense(x)
    for module in (sparse, dense):
        module.eval()
    for a, e in [
        (y, expected),
        (sparse(x, full), dense(x)),
        *zip(sparse.buffers(), dense.buffers(), strict=True),
    ]:
        if e.is_floating_point():
            assert_close(a.detach(), e.detach(), terms=1000, dtype="float64", magnitude=32.0)
        else:
            assert_same(a, e)


def test_dense_units_of_many_kinds_are_understood(st, torch):
    unit = dense_unit(torch, 6, 4, 8, 2).eval()
    parts = [unit.bn1, unit.conv1, unit.bn2, unit.conv2, unit.bn3, unit.conv3, unit.downsample]
    relu = torch.nn.ReLU()
    forms = [
        unit,
        parts,
        torch.nn.Sequential(*parts),
        [parts[0], relu, parts[1], parts[2], relu, parts[3], parts[4], relu, *parts[5:]],
    ]
    wrapped = copy.deepcopy(unit)
    wrapped.downsample = torch.nn.Sequential(wrapped.downsample)
    x, mask = image(torch, 2, 6), masked(torch)
    results = []
    for form in [*forms, wrapped]:
        sparse = st.nn.SparseBottleneck.from_dense(form, block_size=9)
        results.append(sparse(x, mask).detach())
    for result in results[1:]:
        assert_same(result, results[0])
    assert sparse.state_dict().keys() == wrapped.state_dict().keys()
    fresh = st.nn.SparseBottleneck(6, 4, 8, 2, block_size=9)
    fresh.load_state_dict(unit.state_dict())
    assert_same(fresh.eval()(x, mask).detach(), results[0])


def test_units_of_other_kinds_are_refused(st, torch):
    make = st.nn.SparseBottleneck.from_dense
    nn = torch.nn

    def changed(**parts):
        unit = dense_unit(torch, 6, 4, 6, 1)
        for name, module in parts.items():
            setattr(unit, name, module)
        return unit

    class Halved(nn.Conv2d):
        def _conv_forward(self, x, w, bias):
            return super()._conv_forward(x, w, bias) / 2

    hooked = nn.BatchNorm2d(4)
    hooked.register_forward_pre_hook(lambda module, inputs: inputs[0] / 2)
    after = [nn.Conv2d(16, 4, 1, bias=False), nn.BatchNorm2d(4),
             nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4),
             nn.Conv2d(4, 16, 1, bias=False), nn.BatchNorm2d(16)]  # fmt: skip
    names = ("conv1", "bn1", "conv2", "bn2", "conv3", "bn3")
    for error, word, unit in [
        (TypeError, "unit must have the attributes", nn.Linear(3, 3)),
        (TypeError, "unit.conv1 .*forward of its own", changed(conv1=Halved(6, 4, 1, bias=False))),
        (TypeError, "unit.bn2 must have no hooks", changed(bn2=hooked)),
        (ShapeError, "unit.bn1 must have the channels that unit.conv1 reads",
         nn.ModuleDict(zip(names, after, strict=True))),
        (ShapeError, "unit.bn2 .* got 4 for 4 after 5",
         changed(conv1=nn.Conv2d(6, 5, 1, bias=False))),
        (TypeError, "got 2 modules", [nn.BatchNorm2d(6), nn.Conv2d(6, 4, 1)]),
        (TypeError, "unit.bn2 must be a BatchNorm2d", changed(bn2=nn.Identity())),
        (TypeError, "unit.conv1 must be a torch.nn.Conv2d", changed(conv1=nn.Identity())),
        (NotImplementedError, "unit.conv2", changed(conv2=nn.Conv2d(4, 4, 3, bias=False))),
        (NotImplementedError, "unit.conv3", changed(conv3=nn.Conv2d(4, 6, 1))),
        (NotImplementedError, "shortcut",
         changed(downsample=nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6)))),
        (ShapeError, "unit.downsample must be given",
         changed(conv3=nn.Conv2d(4, 8, 1, bias=False))),
    ]:  # fmt: skip
        with pytest.raises(error, match=word):
            make(unit, block_size=9)


# -------------------------------------------------------------------------------------- training


def test_autocast_in_modules(st, torch, device):
    x, mask = image(torch, 2, 6, device=device), masked(torch, device=device)
    conv = st.nn.SparseConv2d(6, 7, 3, padding=1, block_size=8, device=device)
    unit = st.nn.SparseBottleneck(6, 4, block_size=8, device=device)
    for training in (True, False):
        unit.train(training)
        with torch.autocast(device, dtype=torch.bfloat16):
            for module in (conv, unit):
                y = module(x, mask)
                assert y.dtype == torch.bfloat16
                y.float().sum().backward()
                assert all(p.grad.dtype == torch.float32 for p in module.parameters())


def test_weights_that_are_new_at_each_call_are_not_kept(st, torch):
    """As of a parametrization: what a unit keeps is that of its last weights."""
    unit = st.nn.SparseBottleneck(8, 4, block_size=8).eval()
    torch.nn.utils.parametrizations.weight_norm(unit.conv2)
    x, mask = torch.randn(1, 8, 16, 16), torch.ones(1, 16, 16, dtype=torch.bool)
    with torch.no_grad():
        first = unit(x, mask)
        for _ in range(4):
            assert_same(unit(x, mask), first)
    assert len(unit._kept.kept) == 1
