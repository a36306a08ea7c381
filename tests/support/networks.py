"""Small networks of many families for the tests of sparsify, and what they have to compute.

The oracle is the dense network in which every activation outside the active blocks is 0.
"""

import pytest

from support.assertions import assert_close

torch = pytest.importorskip("torch")
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


def conv_bn(cin, cout, kernel=3, stride=1, act=nn.ReLU, **options):
    """Return convolution, batch norm and activation."""
    padding = options.pop("padding", kernel // 2)
    conv = nn.Conv2d(cin, cout, kernel, stride, padding, bias=False, **options)
    return nn.Sequential(conv, nn.BatchNorm2d(cout), *([act(inplace=True)] if act else []))


class Residual(nn.Module):
    """A basic block (``width`` None) or a bottleneck of ResNet or ResNeXt."""

    def __init__(self, cin, cout, stride=1, width=None, groups=1, dilation=1):
        super().__init__()
        if width is None:
            self.body = nn.Sequential(conv_bn(cin, cout, 3, stride), conv_bn(cout, cout, act=None))
        else:
            middle = {"groups": groups, "dilation": dilation, "padding": dilation}
            self.body = nn.Sequential(
                conv_bn(cin, width, 1), conv_bn(width, width, 3, stride, **middle),
                conv_bn(width, cout, 1, act=None),
            )  # fmt: skip
        same = stride == 1 and cin == cout
        self.downsample = None if same else conv_bn(cin, cout, 1, stride, act=None)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        """Add the body to its input."""
        out = self.body(x)
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


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


class Inverted(nn.Module):
    """MobileNet's unit: depthwise convolution, squeeze and excitation."""

    def __init__(self, channels, kernel, stride):
        super().__init__()
        wide = 2 * channels
        self.expand = conv_bn(channels, wide, 1, act=nn.Hardswish)
        self.depthwise = conv_bn(wide, wide, kernel, stride, act=nn.SiLU, groups=wide)
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, 4, 1), nn.ReLU(), nn.Conv2d(4, wide, 1),
            nn.Hardsigmoid(),
        )  # fmt: skip
        self.project = conv_bn(wide, channels, 1, act=None)
        self.stride = stride

    def forward(self, x):
        """Add the body where sizes are kept."""
        y = self.depthwise(self.expand(x))
        y = self.project(y * self.squeeze(y))
        return x + y if self.stride == 1 else y


class ConvNeXtBlock(nn.Module):
    """7x7 depthwise, layer norm and products over the last dimension, a scale for each channel."""

    def __init__(self, channels):
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.body = nn.Sequential(
            nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels)
        )
        self.scale = nn.Parameter(torch.rand(channels, 1, 1))

    def forward(self, x):
        """Add the body."""
        y = self.body(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))
        return x + self.scale * y.permute(0, 3, 1, 2)


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


class Fire(nn.Module):
    """Squeeze and expand, as SqueezeNet does."""

    def __init__(self, cin, squeezed, expanded):
        super().__init__()
        self.squeeze = conv_bn(cin, squeezed, 1)
        self.expand = nn.ModuleList(conv_bn(squeezed, expanded, size) for size in (1, 3))

    def forward(self, x):
        """Concatenate the 1x1 and the 3x3 convolution."""
        x = self.squeeze(x)
        return torch.cat([expand(x) for expand in self.expand], 1)


class Shuffle(nn.Module):
    """ShuffleNet's unit: half of the channels pass by, then all are mixed."""

    def __init__(self, channels):
        super().__init__()
        half = channels // 2
        self.body = nn.Sequential(
            conv_bn(half, half, 1), conv_bn(half, half, 3, act=None, groups=half)
        )

    def forward(self, x):
        """Shuffle by views in five dimensions."""
        a, b = x.chunk(2, dim=1)
        x = torch.cat((a, self.body(b)), dim=1)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)


def norm_conv(cin, cout, kernel=3, stride=1):
    """Return batch norm, ReLU and convolution: in pre-activation order."""
    conv = nn.Conv2d(cin, cout, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(nn.BatchNorm2d(cin), nn.ReLU(), conv)


class PreActivation(nn.Module):
    """A bottleneck whose shortcut reads its input, or the activated one where sizes change."""

    def __init__(self, cin, cout, stride=1):
        super().__init__()
        width = cout // 2
        self.norm = nn.BatchNorm2d(cin)
        self.first = nn.Conv2d(cin, width, 1)
        self.rest = nn.Sequential(norm_conv(width, width, 3, stride), norm_conv(width, cout, 1))
        same = stride == 1 and cin == cout
        self.downsample = None if same else nn.Conv2d(cin, cout, 1, stride)

    def forward(self, x):
        """Add the body to its input."""
        y = F.relu(self.norm(x))
        short = x if self.downsample is None else self.downsample(y)
        return self.rest(self.first(y)) + short


def preactivation():
    """Return a small pre-activation ResNet with a classifier."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), PreActivation(8, 8), PreActivation(8, 12, 2),
        PreActivation(12, 12), nn.BatchNorm2d(12), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(12, 5),
    )  # fmt: skip


class DenseUnit(nn.Module):
    """DenseNet's layer: its result is joined to its input."""

    def __init__(self, cin, grown):
        super().__init__()
        self.body = nn.Sequential(norm_conv(cin, 2 * grown, 1), norm_conv(2 * grown, grown, 3))

    def forward(self, x):
        """Join."""
        return torch.cat([x, self.body(x)], 1)


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
    "vgg": _vgg,
    "fcn": FCN,
    "unet": UNet,
    "mobilenet": lambda: nn.Sequential(
        conv_bn(3, 6, 3, 2, act=nn.Hardswish), Inverted(6, 3, 1), Inverted(6, 5, 2),
        Inverted(6, 5, 1), nn.Conv2d(6, 3, 1),
    ),
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
