"""Small networks of many families for the tests of sparsify, and what they have to compute.

The oracle is the dense network in which every activation outside the active blocks is 0.
"""

import functools

import pytest

from support.assertions import assert_close

torch = pytest.importorskip("torch")

from support.network_units import (  # noqa: E402  (needs PyTorch)
    ConvNeXtBlock,
    DenseUnit,
    Fire,
    Inverted,
    PreActivation,
    Residual,
    Shuffle,
    conv_bn,
    norm_conv,
)

nn, F = torch.nn, torch.nn.functional
tree_leaves, tree_map = torch.utils._pytree.tree_leaves, torch.utils._pytree.tree_map


class ZeroedOutside(torch.overrides.TorchFunctionMode):
    """Zero what every function of PyTorch returns outside active blocks.

    ``stages`` maps the sizes of images that occur, (h, w), to the block of that stage.
    """

    def __init__(self, on, stages):
        super().__init__()
        self.on, self.stages = on, stages

    def zeroed(self, t):
        """Return an image times the block mask of its stage; others as they are."""
        if not isinstance(t, torch.Tensor) or t.dim() != 4 or not t.is_floating_point():
            return t
        with torch._C.DisableTorchFunction():
            for a, b in ((2, 3), (1, 2)):
                block = self.stages.get((t.shape[a], t.shape[b]))
                if block is not None and t.shape[0] == self.on.shape[0]:
                    pixels = self.on.repeat_interleave(block, 1).repeat_interleave(block, 2)
                    pixels = pixels[:, : t.shape[a], : t.shape[b]].to(t.dtype)
                    if pixels.shape[1:] != (t.shape[a], t.shape[b]):
                        continue  # larger than the blocks cover
                    return t * (pixels[:, None] if a == 2 else pixels[..., None])
        return t

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.__name__ == "__get__" or "detach" in func.__name__:
            return result
        if args and result is args[0]:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                result.copy_(self.zeroed(result.clone()))
            return result
        return tree_map(self.zeroed, result)


def stages_of(size, block, halvings=5):
    """Return the stages of a network that halves its image: size to block.

    A layer rounds up or down, or loses a pixel where it has no padding.
    """
    stages, last = {}, {tuple(size)}
    for _ in range(halvings + 1):
        for found in last:
            stages.setdefault(found, block)
        if block % 2:
            break
        block //= 2
        last = {((h + more) // 2, (w + more) // 2) for h, w in last for more in (1, 0, -1)}
    return stages


def oracle(model, x, on, block, stages=None):
    """Return the dense network's result in which all is 0 outside active blocks."""
    mode = ZeroedOutside(on, stages_of(x.shape[2:], block) if stages is None else stages)
    with mode:
        return model(mode.zeroed(x))


def random_statistics(model, seed=0):
    """Give batch norms statistics and weights that are not those of a new network."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.2, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)
            with torch.no_grad():
                if not module.affine:
                    continue
                module.weight.uniform_(0.5, 1.5, generator=generator)
                module.bias.normal_(0, 0.2, generator=generator)
    return model


def resnet(**options):
    """Return a small ResNet with a classifier."""
    return nn.Sequential(
        conv_bn(3, 8, 7, 2), nn.MaxPool2d(3, 2, 1), Residual(8, 8, **options),
        Residual(8, 12, 2, **options), Residual(12, 12, **options), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(12, 5),
    )  # fmt: skip


class FCN(nn.Module):
    """A dilated backbone, pooled features beside it as in DeepLab, and a result in full size."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            conv_bn(3, 8, 3, 2), nn.MaxPool2d(2, ceil_mode=True), Residual(8, 8, width=4),
            Residual(8, 8, width=4, dilation=2),
        )  # fmt: skip
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), conv_bn(8, 4, 1))
        self.head = nn.Conv2d(12, 2, 3, padding=1)

    def forward(self, x):
        """Return a dict, as torchvision's do."""
        y = self.backbone(x)
        pooled = F.interpolate(self.pooled(y), size=y.shape[-2:], mode="bilinear")
        y = self.head(torch.cat([y, pooled], dim=1))
        y = F.interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=False)
        return {"out": y, "classes": y.argmax(1)}


class UNet(nn.Module):
    """Skip connections over max pools and transposed convolutions; odd sizes are padded."""

    def __init__(self, widths=(4, 6, 8)):
        super().__init__()
        pairs = list(zip((3, *widths), widths, strict=False))
        self.down = nn.ModuleList(nn.Sequential(conv_bn(a, b), conv_bn(b, b)) for a, b in pairs)
        ups = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in ups)
        self.up = nn.ModuleList(conv_bn(2 * b, b) for _, b in ups)
        self.head = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x):
        """Return logits in the size of x."""
        skips = []
        for i, layer in enumerate(self.down):
            x = layer(F.max_pool2d(x, 2) if i else x)
            skips.append(x)
        x = skips.pop()
        for grow, up in zip(self.grow, self.up, strict=True):
            x, skip = grow(x), skips.pop()
            h, w = skip.shape[2] - x.shape[2], skip.shape[3] - x.shape[3]
            x = up(torch.cat([skip, F.pad(x, [0, w, 0, h])], dim=1))
        return self.head(x)


class CSP(nn.Module):
    """A stem of slices, a split and a join of channels, pools of 5, and a neck, as YOLO's."""

    def __init__(self):
        super().__init__()
        self.stem = conv_bn(12, 8, 3, act=nn.SiLU)
        self.down = conv_bn(8, 8, 3, 2, act=nn.SiLU)
        self.inner = nn.Sequential(conv_bn(4, 4, 1, act=nn.SiLU), conv_bn(4, 4, 3, act=nn.SiLU))
        self.join = conv_bn(8, 8, 1, act=nn.SiLU)
        self.pool = nn.MaxPool2d(5, 1, 2)
        self.spp = conv_bn(32, 8, 1, act=nn.SiLU)
        self.detect = nn.Conv2d(16, 3, 1)

    def forward(self, x):
        """Return maps of two sizes."""
        x = torch.cat(
            [x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1
        )
        high = self.stem(x)
        low = self.down(high)
        a, b = low.chunk(2, 1)
        low = self.join(torch.cat((a, b + self.inner(b)), 1))
        pools = [low]
        for _ in range(3):
            pools.append(self.pool(pools[-1]))
        low = self.spp(torch.cat(pools, 1))
        up = nn.functional.interpolate(low, scale_factor=2.0, mode="nearest")
        return [self.detect(torch.cat([up, high], 1)), low]


class HRNet(nn.Module):
    """Two resolutions side by side that add to each other."""

    def __init__(self):
        super().__init__()
        self.stem = conv_bn(3, 4, 3, 2)
        self.halve = conv_bn(4, 6, 3, 2)
        self.high, self.low = Residual(4, 4), Residual(6, 6)
        self.rise, self.fall = conv_bn(6, 4, 1, act=None), conv_bn(4, 6, 3, 2, act=None)

    def forward(self, x):
        """Return both."""
        x = self.stem(x)
        high, low = self.high(x), self.low(self.halve(x))
        risen = F.interpolate(self.rise(low), size=high.shape[2:], mode="bilinear")
        return F.relu(high + risen), F.relu(low + self.fall(high))


class DeepLab(nn.Module):
    """Convolutions of several dilations side by side, and a pooled image beside them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(conv_bn(3, 8, 3, 2), nn.Conv2d(8, 8, 3, 2, 1))
        self.branches = nn.ModuleList(
            [conv_bn(8, 4, 1), *(conv_bn(8, 4, 3, dilation=d, padding=d) for d in (2, 3, 6))]
        )
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), conv_bn(8, 4, 1))
        self.head = nn.Sequential(conv_bn(20, 8, 1), nn.Dropout(0.0), nn.Conv2d(8, 3, 1))

    def forward(self, x):
        """Return logits in the size of x."""
        y = self.stem(x)
        found = [branch(y) for branch in self.branches]
        found.append(F.interpolate(self.pooled(y), size=y.shape[-2:], mode="bilinear"))
        y = self.head(torch.cat(found, 1))
        return F.interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=False)


def efficientnet():
    """Return a small EfficientNet with a classifier."""
    unit = functools.partial(Inverted, act=nn.SiLU, squeeze=(nn.SiLU, nn.Sigmoid))
    return nn.Sequential(
        conv_bn(3, 8, 3, 2, act=nn.SiLU), unit(8, 3, 1), unit(8, 5, 2), unit(8, 5, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.0), nn.Linear(8, 5),
    )  # fmt: skip


def preactivation():
    """Return a small pre-activation ResNet with a classifier."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), PreActivation(8, 8), PreActivation(8, 12, 2),
        PreActivation(12, 12), nn.BatchNorm2d(12), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(12, 5),
    )  # fmt: skip


def densenet():
    """Return a small DenseNet: two dense blocks with a transition between."""
    return nn.Sequential(
        conv_bn(3, 8, 3, 2), DenseUnit(8, 4), DenseUnit(12, 4), norm_conv(16, 8, 1),
        nn.AvgPool2d(2), DenseUnit(8, 4), nn.BatchNorm2d(12), nn.Conv2d(12, 3, 1),
    )  # fmt: skip


def _vgg():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2, 2), conv_bn(6, 6),
        nn.MaxPool2d(2, 2), nn.Conv2d(6, 4, 3, padding=1), nn.AdaptiveAvgPool2d((3, 3)),
        nn.Flatten(), nn.Linear(36, 4),
    )  # fmt: skip


FAMILIES = {
    "resnet_basic": resnet,
    "resnet_bottleneck": lambda: resnet(width=6),
    "preactivation": preactivation,
    "densenet": densenet,
    "resnext": lambda: resnet(width=8, groups=4),
    "regnet": lambda: resnet(width=8, groups=2, excited=True),
    "vgg": _vgg,
    "fcn": FCN,
    "deeplab": DeepLab,
    "unet": UNet,
    "mobilenet": lambda: nn.Sequential(
        conv_bn(3, 6, 3, 2, act=nn.Hardswish), Inverted(6, 3, 1), Inverted(6, 5, 2),
        Inverted(6, 5, 1), nn.Conv2d(6, 3, 1),
    ),
    "efficientnet": efficientnet,
    "convnext": lambda: nn.Sequential(
        nn.Conv2d(3, 6, 4, 4), ConvNeXtBlock(6), nn.Conv2d(6, 8, 2, 2), ConvNeXtBlock(8)
    ),
    "csp": CSP,
    "hrnet": HRNet,
    "squeeze": lambda: nn.Sequential(
        conv_bn(3, 8, 3, 2, padding=0), nn.MaxPool2d(3, 2, ceil_mode=True), Fire(8, 4, 6),
        nn.MaxPool2d(3, 2, ceil_mode=True), Fire(12, 4, 8), nn.Conv2d(16, 5, 1),
        nn.AdaptiveAvgPool2d(1),
    ),
    "shuffle": lambda: nn.Sequential(conv_bn(3, 8, 3, 2), Shuffle(8), Shuffle(8)),
}  # fmt: skip


def network(name, seed=0):
    """Return a network of a family with random weights and statistics, in evaluation."""
    torch.manual_seed(seed)
    return random_statistics(FAMILIES[name]()).eval()


def image(n=2, size=(61, 84), dtype=torch.float64):
    """Return random images, the same each time."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(n, 3, *size, dtype=torch.float64, generator=generator).to(dtype)


def blocks(shape, block, share, seed=0):
    """Return random active blocks of images ``(N, H, W)``, and the mask that is set in them."""
    n, h, w = shape
    generator = torch.Generator().manual_seed(seed)
    on = torch.rand(n, -(-h // block), -(-w // block), generator=generator) < share
    mask = on.repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :h, :w]
    return on, mask


def assert_near(actual, expected, dtype="float64", terms=1 << 14):
    """Compare results of many layers: what rounding can do, with room for cancellation."""
    for a, e in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        size = 1 + e.abs().max().item()
        if a.is_floating_point():
            assert_close(a, e, terms=terms, dtype=dtype, magnitude=size)
        else:
            assert torch.equal(a, e)
