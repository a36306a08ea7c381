"""What only PyTorch has, in the table of output_hashes: modules, sparsify, autocast."""

from . import output_convolutions  # noqa: F401 - it adds its calls to the table
from .output_calls import calls, options_of

MODULES = []


def fill(module, draw, lib):
    """Give a module's parameters and buffers values that depend on nothing but the draw."""
    for name, tensor in sorted(module.state_dict().items()):
        if tensor.is_floating_point():
            low = 0.5 if name.endswith(("running_var", "weight")) and tensor.dim() == 1 else -0.4
            tensor.copy_(lib.array(draw(*tensor.shape, low=low, high=low + 0.8)))
    return module.to(lib.device)


def picture(lib, draw, channels, channels_last=False, dtype="float32"):
    x = lib.array(draw(2, channels, 33, 38, dtype=dtype))
    if channels_last:
        x = x.contiguous(memory_format=lib.torch.channels_last)
    return x, lib.array(draw(2, 33, 38, dtype="bool"))


@calls(
    {"capacity": None},
    *options_of("dtype", ("float16", "bfloat16"), capacity=1.0),
    {"stride": 2, "activation": "relu", "channels_last": True},
    {"method": "gather", "channels_last": True},
    {"gradients": True, "activation": "silu"},
    {"gradients": True, "channels_last": True, "capacity": 30},
    modules=True,
    core=False,
    table=MODULES,
)
def SparseConv2d(lib, draw, dtype="float32", gradients=False, channels_last=False, stride=1, **kw):
    conv = lib.ops.nn.SparseConv2d(8, 16, 3, stride, 1, block_size=9, **kw)
    conv = fill(conv, draw, lib).to(getattr(lib.torch, dtype))
    x, mask = picture(lib, draw, 8, channels_last, dtype)
    if not gradients:
        with lib.torch.no_grad():
            return conv.eval()(x, mask)
    y = conv(x.requires_grad_(), mask)
    return y, lib.torch.autograd.grad(y.square().sum(), [x, conv.weight, conv.bias])


@calls(
    {},
    {"dtype": "float16"},
    {"channels_out": 32, "stride": 2},
    {"train": True},
    {"train": True, "channels_last": True, "channels_out": 24},
    modules=True,
    core=False,
    table=MODULES,
)
def SparseBottleneck(
    lib, draw, dtype="float32", train=False, channels_last=False, channels_out=None, stride=1
):
    unit = lib.ops.nn.SparseBottleneck(16, 8, channels_out, stride, block_size=11)
    unit = fill(unit, draw, lib).to(getattr(lib.torch, dtype)).train(train)
    x, mask = picture(lib, draw, 16, channels_last, dtype)
    if not train:
        with lib.torch.no_grad():
            return unit(x, mask)
    y = unit(x.requires_grad_(), mask)
    gradients = lib.torch.autograd.grad(y.square().sum(), [x, *unit.parameters()])
    return y, gradients, [value for _, value in sorted(unit.state_dict().items())]


@calls({}, {"capacity": 1.0}, modules=True, core=False, table=MODULES)
def sparsify(lib, draw, **options):
    nn = lib.torch.nn
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1),
    )  # fmt: skip
    sparse = lib.ops.sparsify(fill(net, draw, lib).eval(), block_size=9, **options)
    with lib.torch.no_grad():
        return sparse(*picture(lib, draw, 3))


@calls({}, modules=True, core=False, table=MODULES)
def autocast(lib, draw):
    conv = fill(lib.ops.nn.SparseConv2d(8, 8, 3, 1, 1, block_size=9), draw, lib)
    x, mask = picture(lib, draw, 8)
    with lib.torch.autocast(lib.device, dtype=lib.torch.bfloat16):
        y = conv(x, mask)
    return y, lib.torch.autograd.grad(y.float().square().sum(), [conv.weight, conv.bias])


@calls({}, modules=True, core=False, table=MODULES)
def second_derivative(lib, draw):
    conv = fill(lib.ops.nn.SparseConv2d(4, 4, 3, 1, 1, block_size=9), draw, lib).double()
    x, mask = picture(lib, draw, 4, dtype="float64")
    grad = lib.torch.autograd.grad
    (first,) = grad(conv(x, mask).pow(3).sum(), conv.weight, create_graph=True)
    return first, grad(first.square().sum(), conv.weight)
