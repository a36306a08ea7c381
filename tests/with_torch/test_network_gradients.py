"""Training on a GPU: gradients on the stack, and the same bits each time.

On a CPU the same functions run with what CUDA alone has, the operators of SyncBatchNorm, restated.
"""

import copy

import pytest

torch = pytest.importorskip("torch")


from support import networks  # noqa: E402  (needs PyTorch)
from support.networks import image  # noqa: E402
from support.torch_autograd import (  # noqa: E402
    assert_near_steps,
    check_second_derivatives,
    train_step,
)

nn = torch.nn
F = torch.nn.functional

SIZE, BLOCK = (61, 84), 16


def _stats(x, eps):
    variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    return mean, torch.rsqrt(variance + eps)


def _elemt(x, weight, bias, mean, deviation, eps):
    y = (x - mean[:, None, None]) * deviation[:, None, None]
    return y if weight is None else y * weight[:, None, None] + bias[:, None, None]


def _reduce(grad, x, mean, deviation, weight, *wanted):
    apart = (grad * (x - mean[:, None, None])).sum((0, 2, 3))
    sums = grad.sum((0, 2, 3))
    return sums, apart, apart * deviation, sums


def _backward(grad, x, mean, deviation, weight, sums, apart, number):
    scale = deviation if weight is None else deviation * weight
    apart = (x - mean[:, None, None]) * (apart / number * deviation.square())[:, None, None]
    return (grad - (sums / number)[:, None, None] - apart) * scale[:, None, None]


@pytest.fixture
def as_on_gpu(st, monkeypatch):
    """Take CPU tensors for those of a GPU."""
    from sbnet_cupy.torch.network import cuda, gradients, halos

    monkeypatch.setattr(gradients, "serves", lambda x, table: not (table.whole or table.static))
    monkeypatch.setattr(gradients, "normalizes", lambda x, table: not table.static)
    monkeypatch.setattr(halos, "sums_in_order", lambda x, table: cuda.records(x))
    for name, function in (
        ("batch_norm_stats", _stats), ("batch_norm_elemt", _elemt),
        ("batch_norm_backward_reduce", _reduce), ("batch_norm_backward_elemt", _backward),
    ):  # fmt: skip
        monkeypatch.setattr(torch, name, function)


@pytest.mark.parametrize("name", [n for n in networks.FAMILIES if n != "csp"])
@pytest.mark.parametrize(("capacity", "break_even"), [(None, 2.0), (1.0, 2.0), (None, 0.0)])
def test_gradients_are_those_of_pytorch(st, name, capacity, break_even, request):
    """Of convolutions of all kinds, and of batch norms of the active pixels."""
    dense = networks.network(name).double().train()
    _, mask = networks.blocks((2, *SIZE), BLOCK, 0.4)
    results = []
    for own in (False, True):
        if own:
            request.getfixturevalue("as_on_gpu")
        sparse = st.sparsify(copy.deepcopy(dense), BLOCK, capacity=capacity)
        sparse.break_even = break_even
        results.append(train_step(sparse, image(), mask))
    expected, actual = results
    assert_near_steps(actual, expected)


@pytest.mark.parametrize("last", [False, True])
def test_kernels_convolve_forward_and_back(st, as_on_gpu, asked, last):
    """With weights as they lie, also turned round, in whatever memory format."""
    from sbnet_cupy.torch.network import cuda

    dense = without_kinks(networks.network("resnet_basic")).train()
    if last:
        dense = dense.to(memory_format=torch.channels_last)
    _, mask = networks.blocks((2, *SIZE), BLOCK, 0.5)
    found = []
    for dtype in (torch.float64, torch.float32):
        sparse = st.sparsify(copy.deepcopy(dense).to(dtype), BLOCK)
        sparse.break_even = 2.0
        with pytest.MonkeyPatch.context() as patch:
            if dtype == torch.float64:
                patch.setattr(cuda, "serves", lambda x: False)
            found.append(train_step(sparse, image(dtype=dtype), mask))
    assert asked.count("conv") > sum(isinstance(m, nn.Conv2d) for m in dense.modules())
    for key, value in found[0].items():
        error = (found[1][key].double() - value).double().norm()
        assert error <= 2.0**-12 * (value.double().norm() + 1), key


def test_a_first_convolution_reads_an_image_without_a_gradient(st, as_on_gpu, asked):
    """Its blocks are gathered for the gradient of the weights alone, which has one of its own."""
    from sbnet_cupy.torch.network import cuda

    dense = nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3), nn.Conv2d(8, 4, 3, padding=1))
    _, mask = networks.blocks((2, *SIZE), BLOCK, 0.5)
    found = []
    for dtype in (torch.float64, torch.float32):
        sparse = st.sparsify(copy.deepcopy(dense).to(dtype), BLOCK)
        sparse.break_even = 2.0
        weights = list(sparse.parameters())
        with pytest.MonkeyPatch.context() as patch:
            if dtype == torch.float64:
                patch.setattr(cuda, "serves", lambda x: False)
            y = sparse(image(dtype=dtype), mask)
            plain = torch.autograd.grad(y.sin().sum(), weights, retain_graph=True)
            again = torch.autograd.grad(y.sin().sum(), weights, create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in again), weights)
        found.append([t.detach().double() for t in (y, *plain, *again, *second)])
    assert asked.count("image") == 1
    for exact, actual in zip(*found, strict=True):
        assert (actual - exact).norm() <= 2.0**-12 * (exact.norm() + 1)


CONVOLUTIONS = {
    "strided": {"stride": 2, "padding": 1},
    "without padding": {},
    "wide padding": {"padding": 4},
    "dilated": {"padding": 2, "dilation": 2},
    "grouped": {"padding": 1, "groups": 2},
    "depthwise": {"padding": 1, "groups": 4},
    "depthwise, strided": {"padding": 1, "groups": 4, "stride": 2},
    "one pixel, strided": {"kernel_size": 1, "stride": 2},
    "reflect": {"padding": 1, "padding_mode": "reflect"},
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_gradients_of_a_convolution(st, as_on_gpu, kind):
    """On a full mask those of the dense convolution; second derivatives too."""
    torch.manual_seed(0)
    options = {"kernel_size": 3} | CONVOLUTIONS[kind]
    dense = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, **options)).double()
    check_second_derivatives(st, dense, image(), BLOCK)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_a_convolution_makes_is_written_in_place(st, as_on_gpu, size):
    """As by the activations of networks without norms: SqueezeNet's, those of VGG."""
    torch.manual_seed(0)
    options = {"stride": 2} if size == 2 else {"padding": size // 2}
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, size, **options), nn.SiLU(inplace=True)
    check_second_derivatives(st, nn.Sequential(*layers).double(), image(), BLOCK)


@pytest.mark.parametrize(
    "kernel, stride, padding",
    [
        ((7, 7), (2, 2), (3, 3)), ((3, 3), (2, 2), (1, 1)), ((3, 5), (2, 1), (0, 4)),
        ((4, 3), (4, 1), (1, 0)), ((5, 6), (1, 2), (2, 3)), ((2, 2), (2, 2), (0, 0)),
    ],
)  # fmt: skip
def test_few_channels_that_are_strided_over(st, as_on_gpu, monkeypatch, kernel, stride, padding):
    """The gradient of the weights, by folded pixels and as that of any other convolution."""
    from sbnet_cupy.torch.network import gradients

    torch.manual_seed(0)
    conv = nn.Conv2d(3, 5, kernel, stride, padding).double()
    sparse = st.sparsify(conv, BLOCK)
    sparse.break_even = 2.0
    _, mask = networks.blocks((2, *SIZE), BLOCK, 0.5)
    fold, folded, found = gradients._grad_weight_folded, [], []
    monkeypatch.setattr(
        gradients, "_grad_weight_folded", lambda *args: folded.append(fold(*args)) or folded[-1]
    )
    for most in (16, 0):
        monkeypatch.setattr(gradients, "_MOST_FOLDED", most)
        loss = sparse(image(), mask).sin().sum()
        found.append(torch.autograd.grad(loss, conv.weight)[0])
    assert len(folded) == 1
    assert (found[0] - found[1]).abs().max() <= 2.0**-40 * found[1].abs().max()


def test_second_derivatives_of_a_batch_norm(st, as_on_gpu):
    dense = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
    dense = dense.double().train()  # no bias: its gradient is 0, and rounding
    check_second_derivatives(st, dense, image(), BLOCK, capacity=1.0)


def steps(st, name, device, capacity, dtype=None, count=2):
    """Return all parameters, buffers and losses of some training steps from one seed."""
    model = networks.network(name, seed=3).to(device).train()
    sparse = st.sparsify(model, BLOCK, capacity=capacity)
    optimizer = torch.optim.SGD(sparse.parameters(), 0.01, momentum=0.9)
    x, losses = image(dtype=torch.float32).to(device), []
    mask = networks.blocks((2, *SIZE), BLOCK, 0.5)[1].to(device)
    for _ in range(count):
        with torch.autocast(device, dtype, enabled=dtype is not None):
            y = torch.utils._pytree.tree_leaves(sparse(x, mask))[0]
            loss = y.float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *sparse.state_dict().values()]


@pytest.mark.parametrize("name", ["resnet_bottleneck", "unet", "mobilenet", "convnext", "fcn"])
@pytest.mark.parametrize("capacity", [None, 0.8])
def test_two_steps_from_one_seed_have_the_same_bits(st, device, name, capacity, monkeypatch):
    """Where PyTorch is asked for deterministic algorithms; none of ours is refused then."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    dtype = torch.bfloat16 if name == "resnet_bottleneck" else None
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (steps(st, name, device, capacity, dtype) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(t.isfinite().all() for t in first)


def without_kinks(network):
    """Replace relu and max pooling, whose gradients jump where rounding changes a sign."""
    for name, child in network.named_children():
        if isinstance(child, nn.ReLU):
            setattr(network, name, nn.SiLU())
        elif isinstance(child, nn.MaxPool2d):
            options = {"ceil_mode": child.ceil_mode}
            pool = nn.AvgPool2d(child.kernel_size, child.stride, child.padding, **options)
            setattr(network, name, pool)
        else:
            without_kinks(child)
    return network


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["resnet_basic", "resnet_bottleneck", "mobilenet"])
def test_on_a_gpu_they_are_those_of_a_cpu(st, name):
    """In float64 on the CPU against tf32 or plain float32 kernels on the GPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs gpu")
    dense = without_kinks(networks.network(name)).train()
    _, mask = networks.blocks((2, *SIZE), BLOCK, 0.5)
    wide = st.sparsify(copy.deepcopy(dense).double(), BLOCK)
    expected = train_step(wide, image(), mask)
    for capacity in (None, 0.8):
        sparse = st.sparsify(copy.deepcopy(dense).cuda(), BLOCK, capacity=capacity)
        actual = train_step(sparse, image(dtype=torch.float32).cuda(), mask.cuda())
        depth = sum(isinstance(m, nn.Conv2d) for m in sparse.modules())
        for key, value in expected.items():
            error = (actual[key].cpu().double() - value).double().norm()
            assert error <= 4 * depth * 2.0**-11 * (value.double().norm() + 1), key


@pytest.mark.gpu
@pytest.mark.parametrize("window", [(3, 2, 1), (2, 2, 0), (3, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_max_pooling_on_a_gpu_chooses_as_on_a_cpu(st, window, dtype):
    """The first of several largest pixels."""
    if not torch.cuda.is_available():
        pytest.skip("needs gpu")
    dense = nn.Sequential(nn.Identity(), nn.MaxPool2d(*window))
    _, mask = networks.blocks((2, *SIZE), BLOCK, 0.5)
    found = []
    for device in ("cpu", "cuda"):
        sparse = st.sparsify(copy.deepcopy(dense), BLOCK)
        sparse.break_even = 2.0
        x = image().mul(4).round().to(device, dtype).requires_grad_()
        y = sparse(x, mask.to(device))
        weights = torch.arange(y.numel(), device=device).view(y.shape).remainder(5).to(dtype)
        (y * weights).sum().backward()
        found.append((y.detach().cpu(), x.grad.cpu()))
    for actual, expected in zip(*reversed(found), strict=True):
        assert torch.equal(actual, expected)
