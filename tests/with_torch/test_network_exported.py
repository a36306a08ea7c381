"""sparsify on modules that torch.export made: graphs of ATen operators."""

import operator

import pytest

torch = pytest.importorskip("torch")


from support import networks  # noqa: E402  (needs PyTorch)
from support.exhaustive import all_but  # noqa: E402
from support.networks import assert_near  # noqa: E402

nn = torch.nn
F = torch.nn.functional
aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore")  # export warns in words that change

BLOCK, SIZE = 16, (60, 84)
UP = networks.image(8, (2, 2))


class Run(nn.Module):
    """A function as a network: of a convolution's result."""

    def __init__(self, run):
        super().__init__()
        self.run = run
        self.conv = nn.Conv2d(3, 8, 3, 2, 1).double()

    def forward(self, x):
        """Return what the function makes of 8 channels."""
        return self.run(self.conv(x))


def exported(network, x):
    """Return the module of an exported network."""
    return torch.export.export(network, (x,)).module()


def given(seed=0, share=0.4):
    """Return images, active blocks and the mask that is set in them."""
    return networks.image(size=SIZE), *networks.blocks((2, *SIZE), BLOCK, share, seed)


@pytest.mark.parametrize(
    "name", all_but(networks.FAMILIES, ("resnet_basic", "mobilenet", "unet", "csp"))
)
def test_exported_networks_stay_on_the_stack(st, name):
    dense = networks.network(name).double()
    plain, sparse = st.sparsify(dense, BLOCK), None
    for seed in range(3):
        x, on, mask = given(seed)
        if sparse is None:
            sparse = st.sparsify(exported(dense, x), BLOCK)
            plain.break_even = sparse.break_even = 2.0
            sparse.training = False
        with torch.no_grad():
            assert_near(sparse(x, mask), plain(x, mask))
            assert_near(sparse(x, mask), networks.oracle(dense, x, on, BLOCK))
    left = ", ".join(plain.dense_layers.values())  # a graph knows no modules by names
    assert sparse.dense_layers == ({"": left} if left else {})


FUNCTIONS = {
    "instance norm": lambda x: F.instance_norm(x, eps=1e-3),
    "batch norm without statistics": lambda x: F.batch_norm(x, None, None, training=True),
    "group norm": lambda x: F.group_norm(x, 2),
    "layer norm": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (8,), eps=1e-3),
    "activations": lambda x: F.elu(F.selu(F.celu(F.gelu(F.silu(F.mish(x)))))),
    "bounds": lambda x: F.hardtanh(x, 0, 6) + F.relu6(x) + x.clamp(-1, 1) + F.leaky_relu(x, 0.2),
    "in place": lambda x: F.elu(F.hardtanh(F.silu(x, True), -0.2, 2, True), 0.5, True) + x,
    "more in place": lambda x: F.hardswish(F.leaky_relu(F.relu(x * 2, True), 0.1, True), True),
    "log sigmoid": F.logsigmoid,
    "dropout": lambda x: F.dropout(F.dropout2d(F.dropout(x, 0.5, False), 0.5, False), 0.5, False),
    "dropout in place": lambda x: F.dropout(F.dropout2d(x, 0.5, False, True), 0.5, False, True),
    "pools": lambda x: F.avg_pool2d(F.max_pool2d(x, 3, 2, 1), 3, 1, 1),
    "padded": lambda x: F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 1),
    "gate": lambda x: x * x.mean((2, 3), keepdim=True).sigmoid() * F.adaptive_avg_pool2d(x, 1),
    "sums": lambda x: x.sum(1, keepdim=True) + x.amax(1, True) + x.std(1, keepdim=True),
    "norm": lambda x: x / torch.linalg.vector_norm(x, 2, 1, keepdim=True).clamp(min=1),
    "softmax": lambda x: F.softmax(x, 1) + F.log_softmax(x, dim=1),
    "numbers": lambda x: (1 - x) * 2.0**x / 3 + torch.where(x > 0, x, 0.5) ** 2,
    "enlarged": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "resized": lambda x: F.interpolate(x[:, :4], size=SIZE, mode="nearest"),
    "corners": lambda x: F.interpolate(x, size=SIZE, mode="bilinear", align_corners=True),
    "transposed": lambda x: F.conv_transpose2d(x, UP, None, 2),
    "slices": lambda x: torch.cat([x[:, :3], x[:, -2:], x[:, 1::2]], 1) + x[:, 4:5],
    "all": lambda x: x[:, :8, :, :] * 2,
    "halves": lambda x: x[..., ::2, ::2] + x[..., 1::2, 1::2],
    "indices": lambda x: x[:, [3, 0, 0]],
    "parts": lambda x: operator.mul(*x.chunk(2, 1)) + x.split([4, 3, 1], 1)[0] + x.split(4, 1)[1],
    "shuffle": lambda x: x.view(2, 2, 4, 30, 42).transpose(1, 2).reshape(x.shape),
    "order": lambda x: x.permute(0, 2, 3, 1).contiguous().movedim(3, 1).flatten(0, 0),
    "channels": lambda x: F.linear(x.permute(0, 2, 3, 1), UP[:2, :2].flatten(1)),
    "pixels": lambda x: F.pixel_shuffle(F.pixel_unshuffle(x, 2), 4),
    "piles": lambda x: torch.stack([x, x.relu()]).sum(0),
    "dtype": lambda x: x.to(torch.float32),
    "device and dtype": lambda x: x.to(x.device, torch.float64) + x.to("cpu", torch.float64) * 2,
    "memory format": lambda x: x.to(memory_format=torch.channels_last) * x.new_ones(1),
    "likes": lambda x: x * torch.ones_like(x) + torch.zeros_like(x, dtype=torch.float64),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators_run_as_the_functions_of_their_names(st, name):
    network = Run(FUNCTIONS[name]).eval()
    x, _, mask = given()
    plain, sparse = st.sparsify(network, BLOCK), st.sparsify(exported(network, x), BLOCK)
    plain.break_even = sparse.break_even = 2.0
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            terms = {"dtype": "float32"} if name == "dtype" else {}
            assert_near(sparse(x, mask).detach(), plain(x, mask).detach(), **terms)
    assert sparse.dense_layers == plain.dense_layers


def test_an_export_in_training_trains(st):
    def made():
        return networks.network("resnet_basic").double().train()

    x, _, mask = given()
    dense, other = made(), made()
    plain, sparse = st.sparsify(dense, BLOCK), st.sparsify(exported(other, x), BLOCK)
    for one in (plain, sparse):
        one(x, mask).square().mean().backward()
    assert sparse.dense_layers == {}
    parameters = dict(sparse.model.named_parameters())
    for name, p in dense.named_parameters():
        assert_near(parameters[name].grad, p.grad)
    buffers = dict(sparse.model.named_buffers())
    for name, b in dense.named_buffers():
        assert_near(buffers[name], b)


@pytest.mark.parametrize("grad", [False, True])
def test_dynamic_batches(st, grad):
    network = networks.network("mobilenet").double()
    batch = torch.export.Dim("batch", min=1, max=8)
    x, on, mask = given()
    module = torch.export.export(network, (x,), dynamic_shapes=({0: batch},)).module()
    sparse = st.sparsify(module, BLOCK)
    for part in (slice(2), slice(1, 2)):
        with torch.set_grad_enabled(grad):
            expected = networks.oracle(network, x[part], on[part], BLOCK)
            assert_near(sparse(x[part], mask[part]).detach(), expected.detach())
        assert sparse.dense_layers == {}


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (lambda x: aten.frac.default(x) + aten._softmax.default(x, 1, False), "_softmax.default"),
        (lambda x: aten.adaptive_max_pool2d.default(x, [1, 1])[0], "adaptive_max_pool2d.default"),
        (lambda x: aten.relu.default(self=x), "relu.default"),
        (lambda x: aten.elu.default(x, 0.5, 2.0), "elu.default"),
    ],
)
def test_other_operators_are_dense_and_named(st, run, name):
    network = Run(run)
    x, _, mask = given()
    sparse = st.sparsify(network, BLOCK)
    full = torch.ones_like(mask)
    with torch.no_grad():
        assert_near(sparse(x, full), network(x))
        sparse(x, mask)
    assert sparse.dense_layers == {"": name}


@pytest.mark.parametrize("name", ["transpose_", "squeeze_", "as_strided", "resize_"])
def test_operators_are_refused_as_the_functions_of_their_names(st, name):
    arguments = {"transpose_": (2, 3), "squeeze_": (), "as_strided": ([1], [1]), "resize_": ([3],)}
    call = getattr(aten, name).default
    x, _, mask = given()
    with pytest.raises(NotImplementedError, match=f"^{name} cannot be used on an activation"):
        st.sparsify(Run(lambda x: call(x, *arguments[name])), BLOCK)(x, mask)


@pytest.mark.parametrize("training", [False, True])
def test_functions_of_torch_with_weights_before_statistics(st, training):
    w, b, mean = (networks.image(1, (2, 8))[0, 0, 0] for _ in range(3))
    statistics = (None, None) if training else (mean, w.square() + 1)
    for run in (
        lambda x: torch.batch_norm(x, w, b, *statistics, training, 0.1, 1e-3, True),
        lambda x: torch.instance_norm(x, w, b, None, None, True, 0.1, 1e-3, True),
    ):
        network = Run(run)
        x, _, mask = given()
        sparse = st.sparsify(network, BLOCK)
        with torch.no_grad():
            assert_near(sparse(x, torch.ones_like(mask)), network(x))
            sparse(x, mask)
        assert sparse.dense_layers == {}


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_mode_of_an_exported_module_stays(st, mode):
    network = networks.network("mobilenet").double()
    sparse = st.sparsify(exported(network, networks.image(size=SIZE)), BLOCK)
    for training in (True, False):
        sparse.training = training
        with pytest.raises(NotImplementedError, match=r"made by torch.export.* export it after"):
            getattr(sparse, mode)()
        assert sparse.training == training


def test_what_a_graph_asserts_of_an_activation_is_checked(st):
    def checked(x, dtype):
        places = {"device": x.device, "layout": torch.strided}
        aten._assert_tensor_metadata.default(x, None, None, dtype, **places)
        return x * 2

    x, _, mask = given()
    sparse = st.sparsify(Run(lambda x: checked(x, torch.float64)), BLOCK)
    sparse(x, mask)
    assert sparse.dense_layers == {}
    with pytest.raises(RuntimeError, match="dtype"):
        st.sparsify(Run(lambda x: checked(x, torch.float32)), BLOCK)(x, mask)


def test_a_graph_without_the_hooks_of_its_export_is_recorded(st):
    network = networks.network("resnet_basic").double()
    x, on, mask = given()
    module = exported(network, x)
    sparse = st.sparsify(torch.fx.GraphModule(module, module.graph), BLOCK).eval()
    sparse.break_even = 2.0
    expected = networks.oracle(network, x, on, BLOCK)
    with torch.no_grad():
        for _ in range(4):
            assert_near(sparse(x, mask), expected.detach())
    assert sparse._tapes.kept
