"""Values of images that wait for an activation: whoever reads them gets what they are."""

import pytest

torch = pytest.importorskip("torch")

from sbnet_cupy.torch.network import cuda_affine, image_values  # noqa: E402  (needs PyTorch)
from sbnet_cupy.torch.network.image_values import ImageValues  # noqa: E402
from sbnet_cupy.torch.network.weights import Weights  # noqa: E402  (needs PyTorch)

nn, F = torch.nn, torch.nn.functional


@pytest.fixture
def linear(monkeypatch):
    """Return a layer and an image; products are PyTorch's, and memory not written is NaN."""

    def product(x, weight, bias, activation, out):
        y = F.linear(x.flatten(1), weight.flatten(1), bias)
        out.copy_((getattr(F, activation)(y) if activation else y).view(out.shape))

    empty = torch.empty
    monkeypatch.setattr(cuda_affine, "image_linear", product)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    torch.manual_seed(0)
    with torch.no_grad():
        yield nn.Linear(4, 4), torch.randn(2, 4)


def twice(x):
    """Return a multiple."""
    return x * 2


READERS = {
    "scripted function": lambda x, _: torch.jit.script(twice)(x),
    "scripted module": lambda x, layer: torch.jit.script(layer)(x),
    "traced module": lambda x, layer: torch.jit.trace(layer, torch.ones(2, 4))(x),
    "tensor of a tensor": lambda x, _: x.new_tensor(x),
    "vmap": lambda x, _: torch.vmap(lambda row: row + 1)(x),
    "input by name": lambda x, layer: F.linear(input=x, weight=layer.weight, bias=layer.bias) + 0,
    "activation by name": lambda x, _: torch.sigmoid(input=x) + 0,
    "view by name": lambda x, _: torch.flatten(input=x, start_dim=1) + 0,
    "numbers": lambda x, _: torch.tensor(x.tolist()),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("how", READERS)
def test_every_reader_gets_the_numbers(linear, how):
    layer, x = linear
    waiting = layer(ImageValues(x.clone(), Weights()))
    assert waiting._product is not None
    torch.testing.assert_close(READERS[how](waiting, layer), READERS[how](layer(x), layer))


@pytest.mark.parametrize(
    "view", [lambda p: p[:, :, 0, 0], lambda p: p.chunk(2, 1)[0], lambda p: p.detach()]
)
@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
def test_a_view_is_written_while_a_product_waits(linear, view, first):
    layer, x = linear
    values = ImageValues(x.clone()[:, :, None, None], Weights())
    if first:
        seen, product = view(values), layer(values.flatten(1))
    else:
        product = layer(values.flatten(1))
        seen = view(values)
    seen.mul_(2)
    torch.testing.assert_close(product + 0, layer(x))


def test_nothing_waits_after_a_call(linear):
    layer, x = linear
    kept = layer(ImageValues(x, Weights()))
    F.relu(kept)
    expected = layer(x)
    image_values.flush()
    layer.weight.mul_(2)
    torch.testing.assert_close(kept + 0, expected)


def test_operators_are_the_functions_of_their_names(linear):
    layer, x = linear
    call = torch.ops.aten.linear.default
    waiting = call(ImageValues(x.clone(), Weights()), layer.weight, layer.bias)
    assert waiting._product is not None
    waiting = torch.ops.aten.sigmoid.default(waiting)
    assert waiting._product is not None
    torch.testing.assert_close(waiting + 0, layer(x).sigmoid())


@pytest.mark.parametrize("operator", ["relu_", "erfinv_"])
def test_an_operator_writes_after_what_waits(linear, operator):
    layer, x = linear
    values = ImageValues(x.clone(), Weights())
    waiting = layer(values)
    getattr(torch.ops.aten, operator).default(values)
    torch.testing.assert_close(waiting + 0, layer(x))
