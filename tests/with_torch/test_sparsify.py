"""sparsify: ResNets as torchvision writes them, on masks; what stays dense is named."""

import copy
import pickle
import sys

import pytest

import sbnet_cupy as sb
from sbnet_cupy import DTypeError, ShapeError
from support.assertions import assert_close, assert_same
from support.torch_cases import draw


@pytest.fixture(autouse=True)
def _weights_are_the_same(torch):
    torch.manual_seed(0)


def resnet(torch, bottleneck):
    """Return a small ResNet with the blocks, names and strides of torchvision's."""
    nn = torch.nn

    def conv(cin, cout, kernel, stride=1):
        return nn.Conv2d(cin, cout, kernel, stride, padding=kernel // 2, bias=False)

    class BasicBlock(nn.Module):
        expansion = 1

        def __init__(self, cin, planes, stride, downsample):
            super().__init__()
            self.conv1, self.bn1 = conv(cin, planes, 3, stride), nn.BatchNorm2d(planes)
            self.relu = nn.ReLU(inplace=True)
            self.conv2, self.bn2 = conv(planes, planes, 3), nn.BatchNorm2d(planes)
            self.downsample = downsample

        def forward(self, x):
            out = self.relu(self.bn1(self.conv1(x)))
            out = self.bn2(self.conv2(out))
            out += x if self.downsample is None else self.downsample(x)
            return self.relu(out)

    class Bottleneck(nn.Module):
        expansion = 4

        def __init__(self, cin, planes, stride, downsample):
            super().__init__()
            self.conv1, self.bn1 = conv(cin, planes, 1), nn.BatchNorm2d(planes)
            self.conv2, self.bn2 = conv(planes, planes, 3, stride), nn.BatchNorm2d(planes)
            self.conv3, self.bn3 = conv(planes, 4 * planes, 1), nn.BatchNorm2d(4 * planes)
            self.relu = nn.ReLU(inplace=True)
            self.downsample = downsample

        def forward(self, x):
            out = self.relu(self.bn1(self.conv1(x)))
            out = self.relu(self.bn2(self.conv2(out)))
            out = self.bn3(self.conv3(out))
            out += x if self.downsample is None else self.downsample(x)
            return self.relu(out)

    class ResNet(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.channels = 8
            self.conv1, self.bn1 = nn.Conv2d(3, 8, 7, 2, padding=3, bias=False), nn.BatchNorm2d(8)
            self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
            self.layer1 = self.stage(block, 4, 2, 1)
            self.layer2 = self.stage(block, 8, 1, 2)
            self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
            self.fc = nn.Linear(8 * block.expansion, 5)

        def stage(self, block, planes, count, stride):
            cout, blocks = planes * block.expansion, []
            for i in range(count):
                step, downsample = stride if i == 0 else 1, None
                if step != 1 or self.channels != cout:
                    downsample = nn.Sequential(
                        conv(self.channels, cout, 1, step), nn.BatchNorm2d(cout)
                    )
                blocks.append(block(self.channels, planes, step, downsample))
                self.channels = cout
            return nn.Sequential(*blocks)

        def forward(self, x):
            x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
            x = self.layer2(self.layer1(x))
            return self.fc(torch.flatten(self.avgpool(x), 1))

    return ResNet(Bottleneck if bottleneck else BasicBlock)


def close(actual, expected):
    """Networks of a dozen layers in float64: what rounding can do, with room for cancellation."""
    size = 1 + expected.abs().max().item()
    assert_close(actual, expected, terms=1 << 14, dtype="float64", magnitude=size)


@pytest.mark.parametrize("bottleneck", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("size", "last"), [((64, 64), True), ((45, 51), False)], ids=str)
def test_on_a_full_mask_it_is_the_dense_network(
    st, torch, device, bottleneck, training, size, last
):
    """Values, gradients of all parameters, and running statistics."""
    dense = resnet(torch, bottleneck).double().to(device).train(training)
    sparse = st.sparsify(copy.deepcopy(dense), block_size=9)
    x = draw(torch, 2, 3, *size, dtype=torch.float64, device=device)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    full = torch.ones(2, *size, dtype=torch.bool, device=device)
    results = []
    for network, call in ((dense, dense), (sparse.model, lambda x: sparse(x, full))):
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        y.square().sum().backward()
        gradients = {name: p.grad for name, p in network.named_parameters()}
        results.append(
            {"y": y.detach(), "x": leaf.grad} | gradients | dict(network.named_buffers())
        )
    assert results[0].keys() == results[1].keys()
    for name, expected in results[0].items():
        if expected.is_floating_point():
            close(results[1][name], expected)
        else:
            assert_same(results[1][name], expected)


def test_it_computes_only_active_blocks(st, torch, monkeypatch):
    """Count the blocks that convolutions are given, on a mask of one corner of one image."""
    module = sys.modules["sbnet_cupy.torch._conv_module"]
    taken = []

    def spy(x, w, active, params, **options):
        taken.append((tuple(active.active_block_indices.shape), active.grid))
        return original(x, w, active, params, **options)

    original = module.sparse_conv2d
    monkeypatch.setattr(module, "sparse_conv2d", spy)
    sparse = st.sparsify(resnet(torch, True).eval(), block_size=5)
    mask = torch.zeros(2, 64, 64)
    mask[1, :8, :8] = 1
    sparse(draw(torch, 2, 3, 64, 64), mask)
    assert len(taken) == len(sparse.sparse_layers) == 12
    for (rows, _), grid in taken:
        assert 1 <= rows <= max(9, grid[1] * grid[2] // 8)
    taken.clear()
    sparse(draw(torch, 2, 3, 64, 64), torch.zeros(2, 64, 64))
    assert {rows for (rows, _), _ in taken} == {0}


def test_it_says_what_a_call_computed(st, torch, device):
    """Of each sparse layer the share of its blocks; counts of the device, read when asked for."""
    nn = torch.nn
    shared = nn.Conv2d(4, 4, 3, padding=1)
    dense = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), shared, nn.MaxPool2d(2), shared, nn.Conv2d(4, 4, 1, groups=2)
    ).to(device)
    x, mask = draw(torch, 2, 3, 32, 32, device=device), torch.zeros(2, 32, 32, device=device)
    mask[1, 3:12, 3:6] = 1  # rows of two blocks of 10, one on each side of their halo
    sparse = st.sparsify(dense, block_size=10)
    assert sparse.computed() == {}
    sparse(x, mask)
    # 2 of 2 * 4 * 4 blocks; the shared one also 1 of 2 * 2 * 2
    assert sparse.computed() == {"0": 2 / 32, "1": 3 / 40, "3": 3 / 40}
    sparse(x, torch.ones_like(mask))
    assert set(sparse.computed().values()) == {1.0}
    sparse(x, torch.zeros_like(mask))
    assert set(sparse.computed().values()) == {0.0}
    sparse(x[:0], mask[:0])
    assert set(sparse.computed().values()) == {0.0}
    small = st.sparsify(dense, block_size=10, capacity=1)  # the others are left out
    small(x, mask)
    assert small.computed()["0"] == 1 / 32
    assert copy.deepcopy(small).computed() == small.computed()
    with pytest.raises(DTypeError):
        small(x, mask.cpu().numpy())


def test_active_pixels_far_from_the_edge_have_the_dense_values(st, torch, device):
    """Zeros outside active blocks reach as far as the receptive field, and no farther."""
    nn = torch.nn
    dense = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, padding=1), nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
    ).double().to(device)  # fmt: skip
    sparse = st.sparsify(dense, block_size=6)
    x = draw(torch, 1, 3, 64, 64, dtype=torch.float64, device=device)
    mask = torch.zeros(1, 64, 64, device=device)
    mask[:, 16:48, 20:60] = 1
    y, expected = sparse(x, mask).detach(), dense(x).detach()
    close(y[:, :, 10:22, 12:28], expected[:, :, 10:22, 12:28])
    assert not y[:, :, :4, :4].any()


def test_each_stage_has_the_mask_max_pooled(st, torch):
    pool = sys.modules["sbnet_cupy.torch.sparsify"]._pool
    mask = (draw(torch, 2, 1, 21, 30) > 1.5).float()
    for factor in (1, 2, (4, 3), 8):
        expected = sb.masks.downsample(mask[:, 0] > 0, factor)
        assert_same(pool(mask, tuple(expected.shape[1:]))[:, 0] > 0, expected)
    for size in ((10, 15), (20, 28), (5, 1), (42, 60), (1, 1)):  # of no stride: none is lost
        pooled = pool(mask, size)
        assert pooled.shape == (2, 1, *size)
        for n, _, i, j in mask.nonzero().tolist():
            assert pooled[n, 0, i * size[0] // 21, j * size[1] // 30]


def test_layers_that_it_does_not_know_stay_dense_and_are_named(st, torch):
    nn = torch.nn
    shared = nn.Conv2d(4, 4, 3, padding=1)
    dense = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), shared, nn.BatchNorm2d(4), nn.ReLU(), shared,
        nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.Conv2d(4, 4, 3, padding=2, dilation=2),
        nn.MaxPool2d(2), nn.ConvTranspose2d(4, 4, 2, 2), nn.GroupNorm(2, 4), nn.Dropout(0.5),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), nn.Flatten(), nn.Linear(4 * 256, 2),
    ).eval()  # fmt: skip
    sparse = st.sparsify(dense, block_size=8)
    assert sparse.sparse_layers == ["0", "1", "4"]
    assert sparse.dense_layers == {
        "5": "Conv2d groups, got groups=2",
        "6": "Conv2d dilation, got dilation=(2, 2)",
        "7": "MaxPool2d has no block-sparse form",
        "8": "ConvTranspose2d has no block-sparse form",
        "9": "GroupNorm has no block-sparse form",
        "11": "Conv2d padding but zeros, got padding_mode='reflect'",
        "12": "Flatten has no block-sparse form",
        "13": "Linear has no block-sparse form",
    }
    lines = sparse.table().splitlines()
    assert lines[0].split() == ["layer", "kind", "runs"] and len(lines) == 1 + len(dense)
    assert "sparse: blocks of 8x8" in lines[1] and "dense: elementwise" in lines[3]
    assert sparse.model[1] is sparse.model[4]
    x = draw(torch, 2, 3, 16, 16)
    y, expected = sparse(x, torch.ones(2, 16, 16)).detach(), dense(x).detach()
    assert_close(y, expected, terms=1 << 10, dtype="float32")


def test_the_model_is_not_changed_and_parameters_are_shared(st, torch):
    dense = resnet(torch, False)
    kinds = [type(module) for module in dense.modules()]
    sparse = st.sparsify(dense, block_size=8)
    assert [type(module) for module in dense.modules()] == kinds
    for a, e in zip(sparse.parameters(), dense.parameters(), strict=True):
        assert a is e
    for a, e in zip(sparse.buffers(), dense.buffers(), strict=True):
        assert a is e
    assert sparse.model.state_dict().keys() == dense.state_dict().keys()
    other = resnet(torch, False)
    other.load_state_dict(sparse.model.state_dict())
    x, mask = draw(torch, 1, 3, 32, 32), torch.ones(1, 32, 32)
    sparse.eval()
    for twin in (copy.deepcopy(sparse), st.sparsify(other.eval(), block_size=8)):
        assert_same(twin(x, mask).detach(), sparse(x, mask).detach())


def test_one_convolution_alone_and_pickling(st, torch):
    conv = torch.nn.Conv2d(3, 4, 3, padding=1)
    sparse = st.sparsify(conv, block_size=8)
    x, mask = draw(torch, 1, 3, 16, 16), torch.ones(1, 16, 16)
    assert_close(sparse(x, mask).detach(), conv(x).detach(), terms=27, dtype="float32")
    again = pickle.loads(pickle.dumps(sparse))
    assert_same(again(x, mask[:, None]).detach(), sparse(x, mask).detach())
    assert sparse.sparse_layers == [""]


def test_it_learns(st, torch, device):
    """A few steps on a mask lower the loss, and every parameter moves."""
    sparse = st.sparsify(resnet(torch, False).to(device), block_size=8, capacity=1.0)
    x, mask = draw(torch, 4, 3, 32, 32, device=device), torch.zeros(4, 32, 32, device=device)
    mask[:, 4:20, 6:25] = 1
    labels = torch.tensor([0, 1, 2, 3], device=device)
    before = [p.detach().clone() for p in sparse.parameters()]
    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.05)
    losses = []
    for _ in range(6):
        loss = torch.nn.functional.cross_entropy(sparse(x, mask), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert not any(torch.equal(p, b) for p, b in zip(sparse.parameters(), before, strict=True))


def test_bad_calls(st, torch):
    sparse = st.sparsify(resnet(torch, False).eval(), block_size=8)
    x, mask = draw(torch, 1, 3, 32, 32), torch.ones(1, 32, 32)
    for error, word, call in [
        (TypeError, "model must be", lambda: st.sparsify(len, block_size=8)),
        (ValueError, "model must hold", lambda: st.sparsify(torch.nn.ReLU(), block_size=8)),
        (ValueError, "model must hold", lambda: st.sparsify(sparse.model, block_size=8)),
        (ShapeError, "block_size", lambda: st.sparsify(torch.nn.Conv2d(3, 4, 3), block_size=0)),
        (ShapeError, "mask must have shape", lambda: sparse(x, mask[:, 1:])),
        (DTypeError, "mask must be", lambda: sparse(x, mask.numpy())),
        (DTypeError, "x must be", lambda: sparse(x.numpy(), mask)),
        (RuntimeError, "called on its own", lambda: sparse.model(x)),
    ]:
        with pytest.raises(error, match=word):
            call()
    with pytest.raises(DTypeError, match="w must have the dtype of x"):
        sparse(x.double(), mask)
    sparse(x, mask)  # the failed call left nothing behind
