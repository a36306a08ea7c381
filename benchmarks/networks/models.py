"""The networks that are timed, in plain PyTorch: layers and sizes are those of the papers.

ResNet-18 and -50 (He et al. 2015), FCN on a dilated ResNet-50 (Long et al. 2014), U-Net with four
levels (Ronneberger et al. 2015), also with the layers of nnU-Net (Isensee et al. 2021), ConvNeXt-T
(Liu et al. 2022), MobileNet v3 large (Howard et al. 2019), and the SBNet paper's backbone of
pre-activation units (Ren et al. 2018). Others are torchvision's own.
"""

import torch
from torch import nn
from torch.nn import functional as F


def conv_norm(cin, cout, kernel=3, stride=1, act=nn.ReLU, groups=1, dilation=1):
    """Return convolution, batch norm and activation."""
    padding = dilation * (kernel // 2)
    conv = nn.Conv2d(cin, cout, kernel, stride, padding, dilation, groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(cout), *([act(inplace=True)] if act else []))


class Residual(nn.Module):
    """A basic block, or a bottleneck where ``width`` is given."""

    def __init__(self, cin, cout, stride=1, width=None, dilation=1):
        super().__init__()
        if width is None:
            layers = [conv_norm(cin, cout, 3, stride), conv_norm(cout, cout, act=None)]
        else:
            layers = [
                conv_norm(cin, width, 1), conv_norm(width, width, 3, stride, dilation=dilation),
                conv_norm(width, cout, 1, act=None),
            ]  # fmt: skip
        self.body = nn.Sequential(*layers)
        same = stride == 1 and cin == cout
        self.downsample = None if same else conv_norm(cin, cout, 1, stride, act=None)

    def forward(self, x):
        """Add."""
        out = self.body(x)
        out += x if self.downsample is None else self.downsample(x)
        return F.relu(out, inplace=True)


def _stages(counts, bottleneck, dilated=False):
    cin, layers, dilation = 64, [], 1
    for i, (count, width) in enumerate(zip(counts, (64, 128, 256, 512), strict=True)):
        stride = 2 if i else 1
        if dilated and i > 1:
            stride, before, dilation = 1, dilation, dilation * 2
        for k in range(count):
            cout = width * (4 if bottleneck else 1)
            step = before if dilated and i > 1 and k == 0 else dilation
            layers.append(
                Residual(cin, cout, stride if k == 0 else 1, width if bottleneck else None, step)
            )
            cin = cout
    return nn.Sequential(conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1), *layers), cin


def resnet(counts, bottleneck):
    """Return a ResNet with its classifier."""
    features, channels = _stages(counts, bottleneck)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)
    return nn.Sequential(features, *head)


class FCN(nn.Module):
    """A fully convolutional head on a dilated ResNet-50."""

    def __init__(self):
        super().__init__()
        self.features, channels = _stages((3, 4, 6, 3), True, dilated=True)
        self.head = nn.Sequential(conv_norm(channels, 512), nn.Dropout(0.1), nn.Conv2d(512, 21, 1))

    def forward(self, x):
        """Return logits in the size of x."""
        y = self.head(self.features(x))
        return F.interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=False)


def conv_instance_norm(cin, cout):
    """Return convolution, instance norm and leaky relu, as nnU-Net has them."""
    norm = nn.InstanceNorm2d(cout, affine=True)
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), norm, nn.LeakyReLU(0.01, inplace=True))


class UNet(nn.Module):
    """Four levels of two convolutions, with skip connections."""

    def __init__(self, widths=(64, 128, 256, 512), layer=conv_norm):
        super().__init__()
        pairs = zip((3, *widths), widths, strict=False)
        self.down = nn.ModuleList(nn.Sequential(layer(a, b), layer(b, b)) for a, b in pairs)
        ups = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in ups)
        self.up = nn.ModuleList(nn.Sequential(layer(2 * b, b), layer(b, b)) for _, b in ups)
        self.head = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x):
        """Return logits in the size of x."""
        skips = []
        for i, layer in enumerate(self.down):
            x = layer(F.max_pool2d(x, 2) if i else x)
            skips.append(x)
        x = skips.pop()
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([skips.pop(), grow(x)], dim=1))
        return self.head(x)


class ConvNeXtBlock(nn.Module):
    """7x7 depthwise, layer norm, two products, a scale."""

    def __init__(self, channels):
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.body = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        )
        self.scale = nn.Parameter(torch.full((channels, 1, 1), 1e-6))

    def forward(self, x):
        """Add."""
        y = self.body(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))
        return x + self.scale * y.permute(0, 3, 1, 2)


class ChannelNorm(nn.LayerNorm):
    """Layer norm over channels of an image."""

    def forward(self, x):
        """Normalize."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convnext_tiny():
    """Return ConvNeXt-T with its classifier."""
    layers, cin = [], 3
    for i, (count, cout) in enumerate(zip((3, 3, 9, 3), (96, 192, 384, 768), strict=True)):
        if i:
            layers += [ChannelNorm(cin, eps=1e-6), nn.Conv2d(cin, cout, 2, 2)]
        else:
            layers += [nn.Conv2d(cin, cout, 4, 4), ChannelNorm(cout, eps=1e-6)]
        layers += [ConvNeXtBlock(cout) for _ in range(count)]
        cin = cout
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(cin), nn.Linear(cin, 1000)
    return nn.Sequential(*layers, *head)


class Inverted(nn.Module):
    """An inverted residual with squeeze and excitation."""

    def __init__(self, cin, kernel, wide, cout, squeeze, act, stride):
        super().__init__()
        self.expand = conv_norm(cin, wide, 1, act=act) if wide != cin else nn.Identity()
        self.depthwise = conv_norm(wide, wide, kernel, stride, act, groups=wide)
        few = (wide // 4 + 4) // 8 * 8
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, few, 1), nn.ReLU(), nn.Conv2d(few, wide, 1),
            nn.Hardsigmoid(),
        ) if squeeze else None  # fmt: skip
        self.project = conv_norm(wide, cout, 1, act=None)
        self.same = stride == 1 and cin == cout

    def forward(self, x):
        """Add where sizes are kept."""
        y = self.depthwise(self.expand(x))
        y = y if self.squeeze is None else y * self.squeeze(y)
        y = self.project(y)
        return x + y if self.same else y


# kernel, expanded channels, channels, squeeze, hardswish, stride
_LARGE = (
    (3, 16, 16, 0, 0, 1), (3, 64, 24, 0, 0, 2), (3, 72, 24, 0, 0, 1), (5, 72, 40, 1, 0, 2),
    (5, 120, 40, 1, 0, 1), (5, 120, 40, 1, 0, 1), (3, 240, 80, 0, 1, 2), (3, 200, 80, 0, 1, 1),
    (3, 184, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1), (3, 480, 112, 1, 1, 1), (3, 672, 112, 1, 1, 1),
    (5, 672, 160, 1, 1, 2), (5, 960, 160, 1, 1, 1), (5, 960, 160, 1, 1, 1),
)  # fmt: skip
_SMALL = (
    (3, 16, 16, 1, 0, 2), (3, 72, 24, 0, 0, 2), (3, 88, 24, 0, 0, 1), (5, 96, 40, 1, 1, 2),
    (5, 240, 40, 1, 1, 1), (5, 240, 40, 1, 1, 1), (5, 120, 48, 1, 1, 1), (5, 144, 48, 1, 1, 1),
    (5, 288, 96, 1, 1, 2), (5, 576, 96, 1, 1, 1), (5, 576, 96, 1, 1, 1),
)  # fmt: skip


def mobilenet(units, last):
    """Return MobileNet v3 with its classifier."""
    layers, cin = [conv_norm(3, 16, 3, 2, nn.Hardswish)], 16
    for kernel, wide, cout, squeeze, hard, stride in units:
        act = nn.Hardswish if hard else nn.ReLU
        layers.append(Inverted(cin, kernel, wide, cout, squeeze, act, stride))
        cin = cout
    layers += [conv_norm(cin, 6 * cin, 1, act=nn.Hardswish), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(6 * cin, last), nn.Hardswish(), nn.Linear(last, 1000))


class PreActivation(nn.Module):
    """A residual unit of the SBNet paper: norm and ReLU ahead of each convolution."""

    def __init__(self, cin, cout, stride):
        super().__init__()
        quarter = cout // 4
        sizes = ((cin, quarter, 1, 1), (quarter, quarter, 3, stride), (quarter, cout, 1, 1))
        self.body = nn.Sequential()
        for a, b, k, s in sizes:
            self.body.extend(
                [nn.BatchNorm2d(a), nn.ReLU(), nn.Conv2d(a, b, k, s, k // 2, bias=False)]
            )
        same = stride == 1 and cin == cout
        self.downsample = None if same else nn.Conv2d(cin, cout, 1, stride, bias=False)

    def forward(self, x):
        """Add."""
        return self.body(x) + (x if self.downsample is None else self.downsample(x))


def paper():
    """Return the backbone of 3, 4, 6 and 3 units."""
    layers, cin = [nn.Conv2d(3, 96, 3, 2, 1, bias=False)], 96
    for i, (count, cout) in enumerate(zip((3, 4, 6, 3), (96, 192, 256, 384), strict=True)):
        for k in range(count):
            layers.append(PreActivation(cin, cout, 2 if i and k == 0 else 1))
            cin = cout
    return nn.Sequential(*layers)


# name: (how it is made, height and width on a GPU)
NETWORKS = {
    "resnet50": (lambda: resnet((3, 4, 6, 3), True), (800, 1408)),
    "resnet18": (lambda: resnet((2, 2, 2, 2), False), (800, 1408)),
    "fcn_resnet50": (FCN, (800, 1408)),
    "unet": (UNet, (1024, 1024)),
    "unet_instance": (lambda: UNet(layer=conv_instance_norm), (1024, 1024)),
    "convnext_tiny": (convnext_tiny, (800, 1408)),
    "mobilenet_v3_large": (lambda: mobilenet(_LARGE, 1280), (800, 1408)),
    "mobilenet_v3_small": (lambda: mobilenet(_SMALL, 1024), (800, 1408)),
    "paper": (paper, (400, 704)),
}


IMAGE = (800, 1408)  # height and width for the networks of torchvision


def image_size(name):
    """Return height and width of a network's images on a GPU."""
    return NETWORKS[name][1] if name in NETWORKS else IMAGE


def find(name):
    """Return what makes a network: of ours, or of torchvision, where it is installed; else None."""
    if name in NETWORKS:
        return NETWORKS[name][0]
    try:
        from torchvision import models as others
    except ImportError:
        return None
    if name not in others.list_models():
        return None
    given = {"weights_backbone": None} if hasattr(others.segmentation, name) else {}
    given |= {"init_weights": False} if name in ("inception_v3", "googlenet") else {}
    return lambda: others.get_model(name, weights=None, **given)


def make(name, seed=0, widths=None):
    """Return a network in evaluation, its batch norms with statistics of their own."""
    torch.manual_seed(seed)
    model = UNet(widths) if widths else find(name)()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.8, 1.2)
    return model.eval()


def picture(result):
    """Return the tensor that counts of a network's result: segmentation networks return a dict."""
    return result["out"] if isinstance(result, dict) else result
