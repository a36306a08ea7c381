"""Units that the networks of ``networks.py`` are made of."""

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional


def conv_bn(cin, cout, kernel=3, stride=1, act=nn.ReLU, **options):
    """Return convolution, batch norm and activation."""
    padding = options.pop("padding", kernel // 2)
    conv = nn.Conv2d(cin, cout, kernel, stride, padding, bias=False, **options)
    return nn.Sequential(conv, nn.BatchNorm2d(cout), *([act(inplace=True)] if act else []))


class Excitation(nn.Module):
    """Multiply each channel by a number that follows from the means of all."""

    def __init__(self, channels, act=nn.ReLU, gate=nn.Sigmoid):
        super().__init__()
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, 4, 1), act(), nn.Conv2d(4, channels, 1),
            gate(),
        )  # fmt: skip

    def forward(self, x):
        """Return the channels, scaled."""
        return x * self.squeeze(x)


class Residual(nn.Module):
    """A basic block (``width`` None) or a bottleneck of ResNet, ResNeXt or RegNet (``excited``)."""

    def __init__(self, cin, cout, stride=1, width=None, groups=1, dilation=1, excited=False):
        super().__init__()
        if width is None:
            self.body = nn.Sequential(conv_bn(cin, cout, 3, stride), conv_bn(cout, cout, act=None))
        else:
            middle = {"groups": groups, "dilation": dilation, "padding": dilation}
            self.body = nn.Sequential(
                conv_bn(cin, width, 1), conv_bn(width, width, 3, stride, **middle),
                *([Excitation(width)] if excited else []), conv_bn(width, cout, 1, act=None),
            )  # fmt: skip
        same = stride == 1 and cin == cout
        self.downsample = None if same else conv_bn(cin, cout, 1, stride, act=None)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        """Add the body to its input."""
        out = self.body(x)
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Inverted(nn.Module):
    """MobileNet's unit, or EfficientNet's: depthwise convolution, squeeze and excitation."""

    def __init__(
        self, channels, kernel, stride, act=nn.Hardswish, squeeze=(nn.ReLU, nn.Hardsigmoid)
    ):
        super().__init__()
        wide = 2 * channels
        self.expand = conv_bn(channels, wide, 1, act=act)
        self.depthwise = conv_bn(wide, wide, kernel, stride, act=nn.SiLU, groups=wide)
        self.excite = Excitation(wide, *squeeze)
        self.project = conv_bn(wide, channels, 1, act=None)
        self.stride = stride

    def forward(self, x):
        """Add the body where sizes are kept."""
        y = self.project(self.excite(self.depthwise(self.expand(x))))
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


class DenseUnit(nn.Module):
    """DenseNet's layer: its result is joined to its input."""

    def __init__(self, cin, grown):
        super().__init__()
        self.body = nn.Sequential(norm_conv(cin, 2 * grown, 1), norm_conv(2 * grown, grown, 3))

    def forward(self, x):
        """Join."""
        return torch.cat([x, self.body(x)], 1)
