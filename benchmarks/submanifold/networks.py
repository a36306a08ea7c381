"""Two networks at sites, written once, and how libraries compute their layers.

``second`` is the backbone of SECOND (Yan, Mao, Li 2018): two submanifold convolutions on each of
four levels, with convolutions of stride 2 between them. ``unet`` has residual units on four levels,
and goes up by inverse convolutions. Each convolution has a bias and a relu; batch norms are folded.
A library is a class with ``begin``, ``convolve``, ``join`` and ``end``: from points to features.
"""

import math
from typing import Any, NamedTuple

import torch

import sbnet_cupy.torch as st
from benchmarks.submanifold.torch_sites import Cells, convolve, pairs_of
from sbnet_cupy import PackedWeights

INPUT = 4  # channels of the points


class Layer(NamedTuple):
    """A convolution of a network."""

    kind: str  # same, down, up, or point: a product at each site
    size: int
    padding: int
    before: int
    planes: int


def second(net, x, planes=(16, 32, 64, 64)):
    """Run the encoder; return the features of the coarsest level."""
    before = INPUT
    for level, width in enumerate(planes):
        if level:
            x = net.run(Layer("down", 3, 1, before, width), x)
            before = width
        for _ in range(2):
            x = net.run(Layer("same", 3, 1, before, width), x)
            before = width
    return x


def unet(net, x, planes=(32, 64, 96, 128)):
    """Run the U-Net; return features at the sites of the input."""
    return _level(net, net.run(Layer("same", 3, 1, INPUT, planes[0]), x), planes)


def _level(net, x, planes):
    first, *rest = planes
    x = _residual(net, x, first, first)
    if not rest:
        return x
    y = _level(net, net.run(Layer("down", 2, 0, first, rest[0]), x), rest)
    y = net.run(Layer("up", 2, 0, rest[0], first), y, onto=x)
    return _residual(net, net.join(x, y), 2 * first, first)


def _residual(net, x, before, planes):
    y = net.run(Layer("same", 3, 1, before, planes), x)
    shortcut = x if before == planes else net.run(Layer("point", 1, 0, before, planes), x)
    return net.run(Layer("same", 3, 1, planes, planes), y, residual=shortcut)


NETWORKS = {"second": second, "unet": unet}


class Network:
    """A network with its weights, as a library computes it; called with rows and features."""

    def __init__(self, torch, name, weights, shape):
        self.torch, self.network, self.weights = torch, NETWORKS[name], weights
        self.shape = shape  # (batch, *spatial)

    def __call__(self, rows, features):
        """Return the sites as rows, and their features."""
        self.number = 0
        return self.end(self.network(self, self.begin(rows, features)))

    def run(self, layer, x, onto=None, residual=None):
        """Run the next layer."""
        number = self.number
        self.number += 1
        return self.convolve(number, layer, x, *self.weights[number], onto, residual)

    def ended(self, y, b, residual):
        """Add bias and residual, then relu."""
        y = y + b
        return self.torch.relu(y if residual is None else y + residual)


def weights_of(torch, name, dimensions, dtype, device, seed=0):
    """Return ``[*kernel, C, K]`` and a bias ``[K]`` for each layer of a network."""
    generator, found = torch.Generator().manual_seed(seed), []

    class Listed(Network):
        def run(self, layer, x, onto=None, residual=None):
            kernel = () if layer.kind == "point" else (layer.size,) * dimensions
            std = (2 / (layer.before * max(1, layer.size**dimensions / 2))) ** 0.5
            w = torch.randn(*kernel, layer.before, layer.planes, generator=generator) * std
            b = torch.randn(layer.planes, generator=generator) / 10
            found.append([t.to(device, dtype) for t in (w, b)])

        def join(self, x, y):
            return None

    NETWORKS[name](Listed(torch, name, None, None), None)
    return found


class Ours(Network):
    """By sbnet_cupy.torch; after :meth:`fix` with capacities, so that nothing waits for counts.

    Where no gradients are recorded weights are packed once.
    """

    packs = True

    def __init__(self, *args):
        super().__init__(*args)
        self.capacities, self.counts = {}, {}  # by the number of the layer, -1 for the points
        self.packed = {}

    def fix(self, rows, features):
        """Run once; from then on lists of sites have room for a tenth more than they have now."""
        self(rows, features)
        self.capacities = {number: n + n // 10 + 8 for number, n in self.counts.items()}

    def begin(self, rows, features):
        """Find the sites of the points; return the mean of their features."""
        batch, *spatial = self.shape
        x = st.sparse_tensor(
            features, rows, spatial_shape=tuple(spatial), batch_size=batch, mode="mean",
            capacity=self.capacities.get(-1),
        )  # fmt: skip
        self.counts[-1] = x.coordinates.capacity
        return x

    def convolve(self, number, layer, x, w, b, onto, residual):
        """Run a layer, with bias, residual and relu as part of it."""
        how = {"activation": "relu"}
        if layer.kind == "point":
            return x.replace(self.torch.relu(self.torch.addmm(b, x.features, w)))
        if self.packs and not self.torch.is_grad_enabled():
            w = self._packed(number, w, b)
        else:
            how["bias"] = b
        if layer.kind == "same":
            return st.submanifold_conv(x, w, residual=residual, **how)
        if layer.kind == "up":
            return st.inverse_conv(x, w, onto=onto, **how)
        how["capacity"] = self.capacities.get(number)
        y = st.strided_conv(x, w, stride=2, padding=layer.padding, **how)
        self.counts[number] = y.coordinates.capacity
        return y

    def _packed(self, number, w, b):
        packed = self.packed.get(number)
        if packed is None or packed.w is not w:
            packed = self.packed[number] = PackedWeights(w, bias=b)
        return packed

    def join(self, x, y):
        """Return the channels of both side by side."""
        return x.replace(self.torch.cat([x.features, y.features], 1))

    def end(self, x):
        """Return the rows and features of the result."""
        return x.indices, x.features


class Module(torch.nn.Module):
    """The same as users write it: a module with parameters, without capacities."""

    def __init__(self, name, weights, shape):
        super().__init__()
        self.name, self.shape = name, shape
        self.weights = torch.nn.ParameterList(t.detach() for pair in weights for t in pair)

    def forward(self, rows, features):
        """Return a SparseTensor."""
        listed = iter(self.weights)
        pairs = list(zip(listed, listed, strict=True))
        return Unpacked(torch, self.name, pairs, self.shape)(rows, features)


class Unpacked(Ours):
    """A call of such a module."""

    packs = False

    def end(self, x):
        """Return the result."""
        return x


class Graphed:
    """That module by sbnet_cupy.torch.graphed; the first call must be the largest one."""

    def __init__(self, torch, name, weights, shape):
        self.net, self.runs = Module(name, weights, shape), {}

    def __call__(self, rows, features):
        """Return the sites as rows, and their features."""
        training = torch.is_grad_enabled()
        self.net.train(training)
        if training not in self.runs:
            self.runs[training] = st.graphed(self.net, [(rows, features)], 0.1)
        y = self.runs[training](rows, features)
        return y.indices, y.features


class Plain(Network):
    """By plain PyTorch: maps by sorted cells, rows selected, multiplied and added up."""

    def begin(self, rows, features):
        """Find the sites of the points; return the mean of their features."""
        cells, inverse = Cells.of_rows(self.torch, rows, self.shape)
        total = features.new_zeros(len(cells), features.shape[1]).index_add(0, inverse, features)
        number = self.torch.bincount(inverse, minlength=len(cells)).to(features.dtype)
        self.maps = {}
        return cells, total / number[:, None]

    def convolve(self, number, layer, x, w, b, onto, residual):
        """Run a layer; its map is found where no layer before had it."""
        cells, features = x
        if layer.kind == "point":
            return cells, self.torch.relu(features @ w + b)
        if layer.kind == "up":
            cells = onto[0]
            pairs = [pair[::-1] for pair in self.maps[cells, "down", layer.size][1]]
        else:
            target, pairs = self._map(cells, layer)
            cells = target
        y = convolve(self.torch, features, w, pairs, len(cells))
        return cells, self.ended(y, b, None if residual is None else residual[1])

    def _map(self, cells, layer):
        key = cells, layer.kind, layer.size
        if key not in self.maps:
            if layer.kind == "same":
                self.maps[key] = cells, pairs_of(cells.same_map(layer.size))
            else:
                target, table = cells.strided_map(layer.size, layer.padding)
                self.maps[key] = target, pairs_of(table)
        return self.maps[key]

    def join(self, x, y):
        """Return the channels of both side by side."""
        return x[0], self.torch.cat([x[1], y[1]], 1)

    def end(self, x):
        """Return the rows and features of the result."""
        return x[0].rows(), x[1]


class Dense(Network):
    """By dense convolutions of whole grids, 0 outside of the sites, as an oracle and a rival."""

    def begin(self, rows, features):
        """Put the mean of the points' features on a grid; its sites are a mask."""
        cells, x = Plain.begin(self, rows, features)
        image = x.new_zeros(math.prod(self.shape), INPUT)
        image = image.index_copy(0, cells.numbers, x).view(*self.shape, INPUT).movedim(-1, 1)
        mask = self.torch.zeros(self.shape, dtype=x.dtype, device=x.device)
        mask.view(-1)[cells.numbers] = 1
        return image.contiguous(), mask[:, None]

    def convolve(self, number, layer, x, w, b, onto, residual):
        """Run a layer on the whole grid, then put 0 outside of its sites."""
        image, mask = x
        functional, d = self.torch.nn.functional, len(self.shape) - 1
        w = w.reshape((1,) * d + w.shape) if layer.kind == "point" else w
        if layer.kind == "up":
            transposed = getattr(functional, f"conv_transpose{d}d")
            y, mask = transposed(image, w.permute(d, d + 1, *range(d)), stride=2), onto[1]
        else:
            stride = 2 if layer.kind == "down" else 1
            plain = getattr(functional, f"conv{d}d")
            how = {"stride": stride, "padding": layer.padding}
            y = plain(image, w.permute(d + 1, d, *range(d)), **how)
            if stride == 2:
                mask = getattr(functional, f"max_pool{d}d")(mask, layer.size, **how)
        y = self.ended(y, b.view(-1, *[1] * d), None if residual is None else residual[0])
        return y * mask, mask

    def join(self, x, y):
        """Return the channels of both side by side."""
        return self.torch.cat([x[0], y[0]], 1), x[1]

    def end(self, x):
        """Return the rows and features of the result."""
        rows = x[1][:, 0].nonzero()
        return rows, x[0].movedim(1, -1)[tuple(rows.unbind(1))]


class Spconv(Network):
    """By spconv's layers, at distinct sites that were found beforehand."""

    layers: Any = None

    def begin(self, rows, features):
        """Wrap the sites; the first call makes the layers."""
        import spconv.pytorch as spconv

        self.spconv = spconv
        self.layers = {} if self.layers is None else self.layers
        batch, *spatial = self.shape
        return spconv.SparseConvTensor(features, rows.int(), spatial, batch), "0"

    def convolve(self, number, layer, x, w, b, onto, residual):
        """Run a layer."""
        x, level = x
        if layer.kind == "point":
            return x.replace_feature(self.torch.relu(x.features @ w + b)), level
        if number not in self.layers:
            self.layers[number] = self._made(layer, w, b, level if onto is None else onto[1])
        y = self.layers[number](x)
        features = y.features if residual is None else y.features + residual[0].features
        after = {"same": level, "down": level + "0", "up": level[:-1]}[layer.kind]
        return y.replace_feature(self.torch.relu(features)), after

    def _made(self, layer, w, b, level):
        """Return spconv's layer with given weights, which it has as [K, *kernel, C]."""
        d = len(self.shape) - 1
        kind = {"same": "SubMConv", "down": "SparseConv", "up": "SparseInverseConv"}[layer.kind]
        how = {"indice_key": f"{'same' if layer.kind == 'same' else 'down'}{level}"}
        if layer.kind == "down":
            how |= {"stride": 2, "padding": layer.padding}
        made = getattr(self.spconv, f"{kind}{d}d")(layer.before, layer.planes, layer.size, **how)
        made.weight = self.torch.nn.Parameter(w.detach().movedim(-1, 0).contiguous())
        made.bias = self.torch.nn.Parameter(b.detach().clone())
        return made.to(w.device, w.dtype)

    def join(self, x, y):
        """Return the channels of both side by side."""
        features = self.torch.cat([x[0].features, y[0].features], 1)
        return x[0].replace_feature(features), x[1]

    def end(self, x):
        """Return the rows and features of the result."""
        return x[0].indices, x[0].features
