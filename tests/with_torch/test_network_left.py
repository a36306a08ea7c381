"""Results that have left the stack, and what is wanted outside active blocks."""

import warnings

import pytest

torch = pytest.importorskip("torch")

from support.networks import image  # noqa: E402  (needs PyTorch)

nn, F = torch.nn, torch.nn.functional

SIZE, BLOCK = (61, 84), 4
REFUSED = r"outside must be 0 .* not cut into blocks, got {} .* left the stack in {}"


def strided():
    """Return a network with a total stride of 8: blocks of 4 pixels end at the last layer."""
    layers = [nn.Conv2d(3 if i == 0 else 4, 4, 3, 2, 1) for i in range(3)]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]).double().eval()


class Function(nn.Module):
    """A convolution, and a function of its result."""

    def __init__(self, function):
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 4, 3, padding=1).double(), function

    def forward(self, x):
        """Return what the function makes of the convolution."""
        return self.function(self.conv(x))


@pytest.fixture
def mask():
    """Return a mask of some blocks."""
    mask = torch.zeros(2, *SIZE, dtype=torch.bool)
    mask[0, :10, :10] = True
    return mask


@pytest.mark.parametrize("break_even", [0.0, 2.0])  # whole images, and a stack
@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("outside", [9.0, "bias", torch.ones(2, 4, 8, 11)], ids=type)
def test_a_result_without_blocks_has_nothing_outside(st, mask, outside, records, break_even):
    """At each call, also those that would be recorded and replayed; and not after outside=0."""
    sparse, x = st.sparsify(strided(), BLOCK), image()
    sparse.break_even = break_even
    got = "a tensor" if isinstance(outside, torch.Tensor) else repr(outside)
    with torch.set_grad_enabled(records):
        for _ in range(3):
            sparse(x, mask)
        for _ in range(3):
            with pytest.raises(ValueError, match=REFUSED.format(got, "conv2d of '4'")):
                sparse(x, mask, outside=outside)
        whole = st.sparsify(sparse.model, 2 * BLOCK, outside=9.0)
        assert (whole(x, mask)[1] == 9).all()


def test_so_in_training_in_graphs_and_in_exports(st, mask):
    sparse, x = st.sparsify(strided().train(), BLOCK, capacity=1.0, outside=9.0), image()
    words = REFUSED.format(9.0, "conv2d of '4'")
    with pytest.raises(ValueError, match=words):
        sparse(x, mask)
    with pytest.raises(ValueError, match=words):
        sparse.eval().graphed(x, mask)(x, mask)
    with torch.no_grad():
        with pytest.raises(ValueError, match=words):
            torch.export.export(sparse, (x, mask))
        with pytest.raises(RuntimeError):  # Dynamo does not show the words of an error from inside
            torch.compile(sparse, fullgraph=True, backend="eager")(x, mask)


LEAVES = {
    "flatten": lambda y: y.flatten(2),
    "unfold": lambda y: F.unfold(y, 3),
    "chunk": lambda y: y.chunk(2, 2),
    "adaptive_avg_pool2d": lambda y: F.adaptive_avg_pool2d(y, 7),
    "stack": lambda y: {"a": torch.stack([y, y])},
    "__setitem__": lambda y: _written(y),
    "transpose, matmul": lambda y: y.transpose(2, 3) @ y,
}


def _written(y):
    canvas = torch.zeros(y.shape, dtype=y.dtype)
    canvas[:] = y
    return canvas


@pytest.mark.parametrize("name", LEAVES)
@torch.no_grad()
def test_the_function_is_named(st, mask, name):
    with pytest.raises(ValueError, match=REFUSED.format(1.5, name)):
        st.sparsify(Function(LEAVES[name]).eval(), BLOCK, outside=1.5)(image(), mask)


@pytest.mark.parametrize("function", [
    lambda y: F.adaptive_avg_pool2d(y, 1), lambda y: y.mean((2, 3)),
    lambda y: F.adaptive_avg_pool2d(y, 7).flatten(1),
])  # fmt: skip
@torch.no_grad()
def test_values_of_whole_images_have_nothing_outside(st, mask, function):
    dense, x = Function(function).eval(), image()
    expected = st.sparsify(dense, BLOCK, replay=False)(x, mask)
    sparse = st.sparsify(dense, BLOCK, outside=1.5)
    for _ in range(3):
        assert torch.equal(sparse(x, mask), expected)


@torch.no_grad()
def test_of_several_results_those_with_blocks_have_it(st, mask):
    sparse, x = st.sparsify(Function(lambda y: (y, y.flatten(2))).eval(), BLOCK), image()
    _, tokens = sparse(x, mask)
    with pytest.warns(RuntimeWarning, match=REFUSED.format(1.5, "flatten")) as seen:
        y, other = sparse(x, mask, outside=1.5)
    assert seen[0].filename == __file__
    assert (y[1] == 1.5).all() and torch.equal(other, tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparse(x, mask)


@pytest.mark.filterwarnings("ignore:.*quantize.* deprecated")
@torch.no_grad()
def test_quantized_layers_run_on_whole_images(st):
    quantized = pytest.importorskip("torch.ao.nn.quantized")
    product = quantized.Conv2d(4, 3, 1)
    weight = torch.arange(-6.0, 6.0).view(3, 4, 1, 1)
    weight = torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8)
    product.set_weight_bias(weight, torch.arange(3.0))

    def function(y):
        y = torch.quantize_per_tensor(y.float(), 0.02, 64, torch.quint8)
        return F.max_pool2d(product(y), 2).dequantize()

    network = Function(function).eval()
    network.product = product
    for break_even in (0.0, 2.0):
        sparse, x = st.sparsify(network, BLOCK), image()
        sparse.break_even = break_even
        for _ in range(3):
            assert torch.equal(sparse(x, torch.ones(2, *SIZE)), network(x))
        assert sparse.dense_layers == {"": "quantize_per_tensor", "product": "conv2d"}
