"""Small calls by SparseConvNet's names, which its own code and ours compute alike.

    python -m support.scn_cases FILE      in tests/, with SparseConvNet: record its numbers

with_torch/sparseconvnet.npz was recorded from facebookresearch/SparseConvNet, commit cf251d05 of
2024-01-09, built for the CPU. Inputs and parameters are made again from their names, and a gradient
from the place it belongs to, so that only results are in the file: rows in the order of their
places.
"""

import sys
import zlib

import numpy as np

POINTS = 40


def numbers(name, *shape):
    """Return multiples of 1/4 from -2 to 2: sums of their products are exact in float32."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return (rng.integers(-8, 9, shape) / 4).astype(np.float32)


def places(name, size, batches=2, repeated=False):
    """Return rows of coordinates, the sample last; distinct ones but where ``repeated``."""
    rng = np.random.default_rng(zlib.crc32(name.encode()) + 1)
    cells = rng.choice(batches * int(np.prod(size)), POINTS, replace=repeated)
    batch, *axes = np.unravel_index(cells, (batches, *size))
    return np.stack([*axes, batch], 1).astype(np.int64)


class Case:
    """A network on points: ``make(scn)`` of SparseConvNet's package, or of ours."""

    def __init__(
        self, make, size, channels=3, mode=3, *, repeated=False, batched=False, training=True,
        exact=True,
    ):  # fmt: skip
        self.make, self.size, self.channels, self.mode = make, size, channels, mode
        self.repeated, self.batched = repeated, batched
        self.training, self.exact = training, exact

    def run(self, name, torch, scn, device="cpu"):
        """Return {part: array}: places and features of the result, all gradients, statistics."""
        model = self.make(scn).to(device)
        self.fill(name, torch, model)
        model.train(self.training)
        x = torch.from_numpy(numbers(name, POINTS, self.channels)).to(device).requires_grad_()
        y = model(self.sites(name, torch, scn, x))
        if isinstance(y, torch.Tensor):  # dense, or a row for each point
            where, found = None, y
        else:
            where, found = y.get_spatial_locations().cpu().numpy(), y.features
        order = slice(None) if where is None else np.lexsort(where.T)
        parts = {} if where is None else {"places": where[order].astype(np.int16)}
        parts["features"] = found.detach().cpu().numpy()[order]
        if self.training:  # SparseConvNet's batch norms have no gradient in evaluation
            grad = numbers(name + " gradient", *found.shape)
            grad[order] = grad.copy()  # which belongs to a place, in whatever row that is
            found.backward(torch.from_numpy(grad).to(device))
            parts["input gradient"] = x.grad.cpu().numpy()
            for key, parameter in model.named_parameters():
                parts[f"gradient {key}"] = parameter.grad.cpu().numpy()
        for key, buffer in model.named_buffers():
            parts[f"buffer {key}"] = buffer.cpu().numpy()
        return parts

    def sites(self, name, torch, scn, x):
        """Return the points at their sites: a list, or one for each sample with room left."""
        rows, d = places(name, self.size, repeated=self.repeated), len(self.size)
        size = torch.LongTensor(self.size)
        if not self.batched:
            return scn.InputLayer(d, size, mode=self.mode)([torch.from_numpy(rows), x])
        rows = np.array(rows[:, :d]).reshape(2, POINTS // 2, d)  # (it reads raw memory)
        if self.mode:
            rows[1, -3:] = -1  # no points
        given = torch.from_numpy(rows), x.view(2, POINTS // 2, -1)
        return scn.BLInputLayer(d, size, mode=self.mode)(list(given))

    @staticmethod
    def fill(name, torch, model):
        """Give parameters and running statistics the numbers of their names."""
        with torch.no_grad():
            for key, tensor in model.state_dict().items():
                made = numbers(f"{name} {key}", *tensor.shape)
                if key.endswith("running_var") or (key.endswith("weight") and tensor.dim() == 1):
                    made = abs(made) + 0.5
                tensor.copy_(torch.from_numpy(made))


def _chain(*layers):
    """Return what makes a Sequential of layers, each given as (name, arguments...)."""

    def make(scn):
        model = scn.Sequential()
        for name, *arguments in layers:
            model.add(getattr(scn, name)(*arguments))
        return model

    return make


def _tables(scn):
    """Join and add: a layer beside the identity."""
    both = scn.ConcatTable().add(scn.Identity()).add(scn.SubmanifoldConvolution(2, 3, 5, 3, False))
    more = scn.ConcatTable().add(scn.NetworkInNetwork(8, 4, True)).add(
        scn.SubmanifoldConvolution(2, 8, 4, 3, True)
    )  # fmt: skip
    return scn.Sequential().add(both).add(scn.JoinTable()).add(more).add(scn.AddTable())


def _network(name, *arguments, **options):
    return lambda scn: getattr(scn, name)(*arguments, **options)


LINE, PLANE, SPACE, FOUR = (19,), (9, 9), (7, 7, 7), (3, 3, 3, 3)
CASES = {
    **{
        f"input, mode {mode}": Case(
            _chain(("OutputLayer", 2)), PLANE, mode=mode, repeated=mode > 0
        )
        for mode in range(5)
    },
    **{
        f"batched input, mode {mode}": Case(
            _chain(("BLOutputLayer", 2)), PLANE, mode=mode, repeated=mode > 0, batched=True
        )
        for mode in range(1, 5)
    },
    **{
        f"input, mode {mode}, convolution": Case(
            _chain(("SubmanifoldConvolution", 2, 3, 4, 3, True)), PLANE, mode=mode,
            repeated=True,
        )
        for mode in (1, 2, 3)
    },
    "submanifold 1-D": Case(_chain(("SubmanifoldConvolution", 1, 3, 4, 5, True)), (40,)),
    "submanifold 2-D, even": Case(_chain(("SubmanifoldConvolution", 2, 3, 4, 2, False)), PLANE),
    "submanifold 2-D, even, groups": Case(
        _chain(("SubmanifoldConvolution", 2, 4, 6, 4, True, 2)), PLANE, 4
    ),
    "submanifold 3-D": Case(_chain(("SubmanifoldConvolution", 3, 3, 4, 3, False)), SPACE),
    "submanifold 4-D": Case(_chain(("SubmanifoldConvolution", 4, 3, 4, 3, True)), FOUR),
    "convolution 1-D": Case(_chain(("Convolution", 1, 3, 4, 3, 2, True)), (41,)),
    "convolution 2-D, overlap": Case(_chain(("Convolution", 2, 3, 4, 3, 2, False)), PLANE),
    "convolution 2-D, stride 1": Case(_chain(("Convolution", 2, 3, 4, 3, 1, True)), PLANE),
    "convolution 2-D, gaps": Case(_chain(("Convolution", 2, 3, 4, 1, 2, True)), PLANE),
    "convolution 2-D, groups": Case(_chain(("Convolution", 2, 4, 6, 3, 2, False, 2)), PLANE, 4),
    "convolution 3-D": Case(_chain(("Convolution", 3, 3, 4, 3, 2, True)), SPACE),
    "deconvolution": Case(
        _chain(("Convolution", 2, 3, 4, 3, 2, False), ("Deconvolution", 2, 4, 5, 3, 2, True)), PLANE
    ),
    "full convolution": Case(_chain(("FullConvolution", 2, 3, 4, 3, 2, True)), PLANE),
    "max pooling": Case(_chain(("MaxPooling", 2, 3, 2)), PLANE),
    "max pooling 3-D": Case(_chain(("MaxPooling", 3, 3, 2)), SPACE),
    "average pooling": Case(_chain(("AveragePooling", 2, 3, 2)), PLANE, exact=False),
    "unpooling": Case(
        _chain(("AveragePooling", 2, 3, 2), ("UnPooling", 2, 3, 2)), PLANE, exact=False
    ),
    "sparse to dense": Case(_chain(("SparseToDense", 2, 3)), PLANE),
    "network in network": Case(_chain(("NetworkInNetwork", 3, 5, True)), PLANE),
    "tables": Case(_tables, PLANE),
    "leaky relu": Case(_chain(("LeakyReLU", 0.25)), PLANE),
    "batch norm": Case(_chain(("BatchNormalization", 3)), PLANE, exact=False),
    "batch norm, evaluation": Case(
        _chain(("BatchNormReLU", 3)), PLANE, training=False, exact=False
    ),
    "batch norm, relu": Case(_chain(("BatchNormReLU", 3)), PLANE, exact=False),
    "batch norm, leaky relu": Case(_chain(("BatchNormLeakyReLU", 3)), PLANE, exact=False),
    "VGG": Case(
        _network("SparseVggNet", 2, 3, [["C", 4], ["MP", 3, 2], ["C", 5], ["C3/2", 6]]), (15, 15),
        exact=False,
    ),
    "ResNet": Case(
        _network("SparseResNet", 2, 3, [["basic", 4, 2, 1], ["basic", 6, 2, 2]]), (15, 15),
        exact=False,
    ),
    "U-Net": Case(_network("UNet", 2, 1, [3, 4, 5]), (16, 16), exact=False),
    "U-Net of residual blocks": Case(
        _network("UNet", 2, 1, [3, 4, 5], residual_blocks=True), (16, 16),
        exact=False,
    ),
    "U-Net, evaluation": Case(
        _network("UNet", 2, 1, [3, 4, 5]), (16, 16), training=False, exact=False
    ),
    "fully convolutional": Case(
        _network("FullyConvolutionalNet", 2, 1, [3, 4, 5]), (16, 16), training=False, exact=False
    ),
}  # fmt: skip


def main(path):
    """Record what SparseConvNet computes."""
    import sparseconvnet
    import torch

    found = {}
    for name, case in CASES.items():
        for part, array in case.run(name, torch, sparseconvnet).items():
            found[f"{name}/{part}"] = array
    np.savez_compressed(path, **found)


if __name__ == "__main__":
    main(sys.argv[1])
