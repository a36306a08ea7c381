"""Small networks on a stack, layer after layer: the dense network, masked after each layer.

Sides are no multiples of the block, biases make what lies outside the image anything but 0, and
what sticks out is poisoned between the layers.
"""

import numpy as np
import pytest

import sbnet_cupy as sb
from support import stack_cases


class Both:
    """A network twice: on a stack, and dense with PyTorch in float64, masked after each layer."""

    def __init__(self, torch, blocks, channels, seed):
        self.F, self.torch, self.blocks = torch.nn.functional, torch, blocks
        self.rng = np.random.default_rng(seed)
        self.table = blocks.table()
        images = blocks.images(self.table, channels, self.rng)
        self.stack = blocks.stack(images, self.table)
        self.dense = torch.tensor(images).permute(0, 3, 1, 2)

    def copy(self):
        """A branch that begins here."""
        other = object.__new__(Both)
        other.__dict__.update(self.__dict__)
        return other

    def _after(self, table, stack, dense):
        assert table.image_size == tuple(dense.shape[2:])
        self.table = table
        mask = self.blocks.mask(table).transpose(0, 3, 1, 2)
        self.dense = self.torch.where(self.torch.tensor(mask), dense, 0.0)
        outside = ~sb.stack_pixel_mask(table)
        assert not stack[len(self.blocks.rows) :].any()
        self.stack = np.where(outside[..., None], np.nan, stack)
        return self

    def conv(self, k, size, stride=1, padding=0, dilation=1, groups=1, add=None, activation="relu"):
        c = self.stack.shape[3]
        w = self.rng.standard_normal((k, c // groups, size, size)) / size / (c // groups) ** 0.5
        bias = self.rng.standard_normal(k)
        options = {"strides": stride, "padding": padding, "dilation": dilation}
        y = sb.stack_conv2d(
            self.stack, w, self.table, bias=bias, groups=groups, activation=activation,
            residual=None if add is None else add.stack, w_format="OIHW", **options,
        )  # fmt: skip
        dense = self.F.conv2d(self.dense, self.torch.tensor(w), self.torch.tensor(bias), stride,
                              padding, dilation, groups)  # fmt: skip
        dense = dense if add is None else dense + add.dense
        dense = dense if activation is None else getattr(self.F, activation)(dense)
        return self._after(self.table.after_conv(size, stride, padding, dilation), y, dense)

    def up_conv(self, k, size=2, stride=2, padding=0, more=0):
        w = self.rng.standard_normal((self.stack.shape[3], k, size, size)) / size
        bias = self.rng.standard_normal(k)
        y = sb.stack_conv2d(
            self.stack, w, self.table, strides=stride, padding=padding, transposed=True, bias=bias,
            output_padding=more, w_format="IOHW",
        )  # fmt: skip
        dense = self.F.conv_transpose2d(self.dense, self.torch.tensor(w), self.torch.tensor(bias),
                                        stride, padding, more)  # fmt: skip
        after = self.table.after_transposed(size, stride, padding, output_padding=more)
        return self._after(after, y, dense)

    def max_pool(self, size, stride, padding):
        options = {"kernel": size, "strides": stride, "padding": padding}
        y = sb.stack_max_pool(self.stack, self.table, **options)
        dense = self.F.max_pool2d(self.dense, size, stride, padding)
        return self._after(self.table.after_conv(size, stride, padding), y, dense)

    def avg_pool(self, size, stride, padding, include):
        options = {"kernel": size, "strides": stride, "padding": padding}
        y = sb.stack_avg_pool(self.stack, self.table, count_include_pad=include, **options)
        dense = self.F.avg_pool2d(self.dense, size, stride, padding, count_include_pad=include)
        return self._after(self.table.after_conv(size, stride, padding), y, dense)

    def squeeze(self):
        mean = sb.stack_global_pool(self.stack, self.table)
        factor = sb.stack_per_block(1 / (1 + np.exp(-mean)), self.table)
        dense = self.dense * self.torch.sigmoid(self.dense.mean((2, 3), keepdim=True))
        return self._after(self.table, np.nan_to_num(self.stack) * factor, dense)

    def resize(self, factor, size, align=False):
        options = {"scale_factor": factor, "size": size, "mode": "bilinear", "align_corners": align}
        y = sb.stack_interpolate(self.stack, self.table, **options)
        dense = self.F.interpolate(self.dense, size=size, mode="bilinear", align_corners=align)
        return self._after(self.table.after_interpolate(factor, size), y, dense)

    def concatenate(self, other):
        stack = np.concatenate([self.stack, other.stack], axis=3)
        return self._after(
            self.table, np.nan_to_num(stack), self.torch.cat([self.dense, other.dense], 1)
        )

    def check(self):
        dense = self.dense.permute(0, 2, 3, 1).numpy()
        image = sb.stack_to_image(self.stack, self.table)
        assert np.isfinite(image).all()
        assert abs(image - dense).max() <= 1e-12 * abs(dense).max()


def residual_network(net):
    """ResNet's stem, a basic block, one with a stride and a projection, dilation at the end."""
    net.conv(8, 7, 2, 3).max_pool(3, 2, 1)
    start = net.copy()
    net.conv(8, 3, padding=1).conv(8, 3, padding=1, add=start)
    short = net.copy().conv(16, 1, 2, activation=None)
    net.conv(16, 3, 2, 1).conv(16, 3, padding=1, groups=4, add=short)
    net.conv(16, 3, padding=2, dilation=2).conv(16, 3, padding=12, dilation=12)
    return net.resize(8, net.blocks.size)


def u_net(net):
    """Down by pooling, up by transposed convolutions, with what was there on the way."""
    net.conv(4, 3, padding=1)
    top = net.copy()
    net.max_pool(2, 2, 0).conv(8, 3, padding=1)
    middle = net.copy()
    net.max_pool(2, 2, 0).conv(8, 3, padding=1)
    net.resize(2, middle.table.image_size, align=True).concatenate(middle).conv(8, 3, padding=1)
    return net.resize(2, top.table.image_size).concatenate(top).conv(4, 3, padding=1)


def mobile_network(net):
    """Depthwise convolutions of 3 and 5 pixels, squeeze and excitation, averages."""
    net.conv(8, 3, 2, 1).conv(8, 3, padding=1, groups=8, activation="silu").squeeze()
    net.conv(8, 1).conv(8, 5, 2, 2, groups=8).avg_pool(3, 1, 1, False)
    return net.avg_pool(3, 2, 1, True).conv(4, 1, activation=None)


def patches(net):
    """ConvNeXt's stem of patches and its wide depthwise convolutions, and back to the pixels."""
    net.conv(8, 4, 4)
    start = net.copy()
    net.conv(8, 7, padding=3, groups=8, activation=None).conv(16, 1, activation="gelu")
    return net.conv(8, 1, add=start, activation=None).conv(6, 2, 2).up_conv(4).up_conv(3, 4, 4, 0)


@pytest.mark.parametrize("density", [1.0, 0.4])
@pytest.mark.parametrize("size", [(64, 48), (61, 39), (33, 17), (9, 70)], ids=str)
@pytest.mark.parametrize("block", [8, 16])
@pytest.mark.parametrize("network", [residual_network, u_net, mobile_network, patches])
def test_equals_the_dense_network(torch, network, block, size, density):
    shape = (2, *(-(-n // block) for n in size))
    active = np.random.default_rng(block + size[0]).random(shape) < density
    blocks = stack_cases.Blocks(active, (block, block), size, spare=2)
    network(Both(torch, blocks, 3, seed=size[1])).check()
