"""Products of the channels on a CPU: weights that oneDNN laid out once, an activation in the same
call.
"""

import pytest

torch = pytest.importorskip("torch")


from sbnet_cupy.torch.network import onednn  # noqa: E402  (needs PyTorch)
from support import networks  # noqa: E402
from support.networks import assert_near  # noqa: E402

nn, F = torch.nn, torch.nn.functional
SIZE, BLOCK = (61, 84), 16
NEEDS_ONEDNN = pytest.mark.skipif(not onednn._MULTIPLIES, reason="PyTorch without oneDNN")
ACTIVATIONS = {
    "relu": F.relu, "relu in place": F.relu_, "silu": F.silu, "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"), "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "relu6": F.relu6, "none": lambda x: x,
}  # fmt: skip


class Mixer(nn.Module):
    """Two products over the last dimension with an activation between, added to the input."""

    def __init__(self, activation, bias=True):
        super().__init__()
        self.first, self.second = nn.Linear(6, 12, bias), nn.Linear(12, 6, bias)
        self.stem, self.activation = nn.Conv2d(3, 6, 3, 2, 1), activation

    def forward(self, x):
        """Return the sum, and what the second product was made of."""
        x = self.stem(x).permute(0, 2, 3, 1)
        y = self.first(x)
        y = self.activation(y)
        return (x + self.second(y)).permute(0, 3, 1, 2), y


@pytest.fixture
def products(monkeypatch):
    """Return a list of the activations that were part of a product."""
    found, linear = [], onednn.linear

    def counted(x, packed, bias, residual, activation):
        found.append(activation)
        return linear(x, packed, bias, residual, activation)

    monkeypatch.setattr(onednn, "linear", counted)
    return found


def inputs(dtype=torch.float32):
    """Return images, active blocks and their mask."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 3, *SIZE, generator=generator).to(dtype)
    return x, *networks.blocks((2, *SIZE), BLOCK, 0.5)


@NEEDS_ONEDNN
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("break_even", [2.0, 0.0])
@torch.no_grad()
def test_a_product_and_its_activation_are_one_call(st, products, name, break_even):
    torch.manual_seed(0)
    dense, (x, on, mask) = Mixer(ACTIVATIONS[name], name != "tanh").eval(), inputs()
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = break_even
    for _ in range(2):
        assert_near(sparse(x, mask), networks.oracle(dense, x, on, BLOCK), "float32")
        dense.first.weight.mul_(0.5)  # is seen
    fused = None if name in ("gelu tanh", "none") else name.partition(" ")[0]
    assert products[2:] == [fused, None]  # the first call, which is traced, holds what lies between


@torch.no_grad()
def test_other_dtypes_are_multiplied_by_pytorch(st, products):
    dense, (x, on, mask) = Mixer(F.gelu).double().eval(), inputs(torch.float64)
    sparse = st.sparsify(dense, BLOCK)
    assert_near(sparse(x, mask), networks.oracle(dense, x, on, BLOCK))
    with torch.autocast("cpu", torch.bfloat16):
        y = st.sparsify(dense.float(), BLOCK)(x.float(), mask)[1]
    assert y.dtype == torch.bfloat16 and products == []


def test_gradients_are_those_of_pytorch(st, products):
    dense, (x, on, mask) = Mixer(F.gelu).eval(), inputs()
    sparse = st.sparsify(dense, BLOCK)
    ours = torch.autograd.grad(sparse(x, mask)[0].sum(), dense.first.weight)
    theirs = torch.autograd.grad(
        networks.oracle(dense, x, on, BLOCK)[0].sum(), dense.first.weight
    )
    assert_near(ours, theirs, "float32")
    assert products == []
