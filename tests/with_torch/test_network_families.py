"""sparsify on networks of many families: a full mask is the dense network, others the oracle's."""

import copy
import sys
import types

import pytest

torch = pytest.importorskip("torch")


from support import networks  # noqa: E402  (needs PyTorch)
from support.exhaustive import all_but  # noqa: E402
from support.networks import assert_near  # noqa: E402

tree_leaves = torch.utils._pytree.tree_leaves

BLOCK_SIZES = {(64, 96): 16, (60, 84): 16, (61, 83): 16, (20, 24): 32}
TORCHVISION = [
    "resnet18", "resnet50", "resnext50_32x4d", "vgg11_bn", "fcn_resnet50", "deeplabv3_resnet50",
    "mobilenet_v3_small", "efficientnet_b0", "convnext_tiny", "regnet_y_400mf", "densenet121",
    "shufflenet_v2_x0_5", "squeezenet1_1", "mnasnet0_5", "lraspp_mobilenet_v3_large",
]  # fmt: skip


@pytest.fixture
def sparsified(st, device):
    """Return a function that makes a network of double precision, dense and sparse."""

    def make(name, block, break_even=None):
        dense = networks.network(name).double().to(device)
        sparse = st.sparsify(dense, block)
        sparse.break_even = break_even
        return dense, sparse

    return make


@pytest.fixture(scope="module")
def torchvision(require):
    """Without its compiled operators, if these are for another build of PyTorch than this one.

    Those of PyPI need CUDA's libraries. No network of these tests calls one.
    """
    try:
        return require("torchvision")
    except RuntimeError:  # of the module that registers their shapes
        name = "torchvision._meta_registrations"
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, name, types.ModuleType(name))
            return require("torchvision")


@pytest.fixture(scope="module")
def timm(require, torchvision):
    """Its modules import torchvision."""
    return require("timm")


@pytest.mark.parametrize("name", networks.FAMILIES)
@pytest.mark.parametrize("size", BLOCK_SIZES, ids=str)
@torch.no_grad()
def test_families(sparsified, device, name, size):
    """On the stack and on whole images, batches of 2, sides that are no multiples of the block."""
    if name == "csp" and size[0] % 2:
        pytest.skip("the dense network, too, joins maps of unlike sizes")
    block = BLOCK_SIZES[size]
    dense, sparse = sparsified(name, block)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, *size, dtype=torch.float64, generator=generator).to(device)
    for share in (1.0, 0.4, 0.0):
        on, mask = (t.to(device) for t in networks.blocks((2, *size), block, share))
        expected = dense(x) if share == 1 else networks.oracle(dense, x, on, block)
        for break_even in (2.0, 0.0):  # never whole images, always
            sparse.break_even = break_even
            assert_near(sparse(x, mask), expected)
    named = {"vgg": {"6": "adaptive_avg_pool2d", "8": "linear"}}.get(name, {})
    assert sparse.dense_layers == named


@pytest.mark.parametrize("name", TORCHVISION)
@torch.no_grad()
def test_torchvision(torchvision, st, device, name):
    models = torchvision.models
    make = getattr(models, name, None) or getattr(models.segmentation, name)
    options = {} if hasattr(models, name) else {"weights_backbone": None}
    torch.manual_seed(0)
    dense = networks.random_statistics(make(weights=None, **options)).eval().double().to(device)
    sparse = st.sparsify(dense)
    x = torch.randn(1, 3, 130, 161, dtype=torch.float64, device=device)
    full = torch.ones(1, 130, 161, dtype=torch.bool, device=device)
    sparse.break_even = 2.0
    assert_near(sparse(x, full), dense(x))
    on, mask = (t.to(device) for t in networks.blocks((1, 130, 161), 32, 0.5))
    assert_near(sparse(x, mask), networks.oracle(dense, x, on, 32))


TIMM = [
    "convnextv2_atto", "eca_resnet33ts", "ghostnet_100", "hgnetv2_b0", "mambaout_femto",
    "mixnet_s", "mobileone_s0", "nf_regnet_b0", "rexnet_100", "seresnext26d_32x4d", "skresnet18",
    "tresnet_m",
]  # fmt: skip


@pytest.mark.parametrize("name", TIMM)
@torch.no_grad()
def test_timm(timm, st, device, name):
    torch.manual_seed(0)
    dense = networks.random_statistics(timm.create_model(name))
    dense = dense.eval().double().to(device)
    sparse, size = st.sparsify(dense), (160, 192)
    x = torch.randn(1, 3, *size, dtype=torch.float64, device=device)
    full = torch.ones(1, *size, dtype=torch.bool, device=device)
    sparse.break_even = 2.0
    assert_near(sparse(x, full), dense(x))
    on, mask = (t.to(device) for t in networks.blocks((1, *size), 32, 0.5))
    assert_near(sparse(x, mask), networks.oracle(dense, x, on, 32))
    assert not sparse.dense_layers


@pytest.mark.parametrize("name", networks.FAMILIES)
@torch.no_grad()
def test_single_precision(st, name):
    """On a CPU oneDNN's convolutions, with weights that are laid out once, again after changes."""
    size = (60, 84) if name == "csp" else (61, 84)
    dense = networks.network(name)
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    on, mask = networks.blocks((2, *size), 16, 0.4)
    sparse = st.sparsify(dense, 16)
    for _ in range(2):
        expected = networks.oracle(dense, x, on, 16)
        for break_even in (2.0, 0.0):
            sparse.break_even = break_even
            assert_near(sparse(x, mask), expected, "float32")
        for parameter in dense.parameters():
            parameter.mul_(1.1)


@pytest.mark.parametrize("number", ["half", "tf32"])
@pytest.mark.parametrize("name", all_but(sorted(networks.FAMILIES), ["resnet_basic", "mobilenet"]))
@torch.no_grad()
def test_low_precision(st, device, name, number, monkeypatch):
    """Each layer rounds its result, and its weights, by half a unit; errors grow with the depth.

    On full masks and on others, against double precision on a CPU. bfloat16 has less than float16,
    and so it stands for both on a CPU.
    """
    dtype, epsilon = torch.float32, 2.0**-10
    if number == "half":
        dtype = torch.bfloat16 if device == "cpu" else torch.float16
        epsilon = torch.finfo(dtype).eps
    elif device == "cpu":
        pytest.skip("a CPU has no tf32")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    dense = networks.network(name).to(dtype)
    exact = copy.deepcopy(dense).double()
    depth = sum(isinstance(m, torch.nn.Conv2d | torch.nn.Linear) for m in dense.modules())
    sparse = st.sparsify(dense.to(device), 16)
    x = torch.randn(2, 3, 60, 84, generator=torch.Generator().manual_seed(1)).to(dtype)
    for share in (1.0, 0.4):
        on, mask = networks.blocks((2, 60, 84), 16, share)
        expected = networks.oracle(exact, x.double(), on, 16)
        for break_even in (2.0, 0.0):
            sparse.break_even = break_even
            actual = sparse(x.to(device), mask.to(device))
            for a, e in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
                if a.is_floating_point():  # others are places of a maximum
                    bound = 2 * depth * epsilon * (1 + e.abs().max())
                    assert a.dtype == dtype and (a.cpu() - e).abs().max() <= bound


@torch.no_grad()
def test_nothing_is_read_where_nothing_may_be(sparsified, device):
    """NaN in inactive blocks of the image, and in rows past the count, reach no result."""
    _, sparse = sparsified("fcn", 16, 2.0)
    on, mask = (t.to(device) for t in networks.blocks((2, 61, 83), 16, 0.4))
    x = torch.randn(2, 3, 61, 83, dtype=torch.float64, device=device)
    expected = sparse(x, mask)["out"]
    poisoned = torch.where(mask[:, None], x, float("nan"))
    for capacity in (None, 1.0, int(on.sum()) + 5):
        sparse.capacity = capacity
        assert_near(sparse(poisoned, mask)["out"], expected)


@torch.no_grad()
def test_same_input_same_bits(sparsified, device):
    _, sparse = sparsified("mobilenet", 16)
    _, mask = (t.to(device) for t in networks.blocks((2, 61, 83), 16, 0.3))
    x = torch.randn(2, 3, 61, 83, dtype=torch.float64, device=device)
    first = sparse(x, mask)
    for _ in range(3):
        assert torch.equal(sparse(x, mask), first)
