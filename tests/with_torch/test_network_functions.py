"""Every function that a StackTensor knows, and some that it does not, against the oracle."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")


from support import networks  # noqa: E402  (needs PyTorch)
from support.networks import assert_near  # noqa: E402

nn = torch.nn
F = torch.nn.functional
tree_leaves = torch.utils._pytree.tree_leaves

conv, pool, grow, resize = F.conv2d, F.max_pool2d, F.conv_transpose2d, F.interpolate


def weights(*shape):
    """Return random numbers, the same for a shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


W1, W2, W3, W5 = (weights(4, 4, k, k) for k in (1, 2, 3, 5))
DEPTHWISE, GROUPS, BIAS = weights(4, 1, 3, 3), weights(8, 2, 3, 3), weights(4)


def set_item(x):
    """Write into a copy."""
    y = x * 1
    y[:, :, 3:5, 2:30] = 7.0
    return y


def half(x):
    """Return an image of half the size, rounded up."""
    return pool(x, 2, ceil_mode=True)


def unpool(x, *window):
    """Return the largest pixels of windows where they were, and 0 elsewhere."""
    y, places = pool(x, *window, return_indices=True)
    return F.max_unpool2d(y.exp(), places, *window, output_size=x.shape[2:])


def space_to_depth(x):
    """Return the pixels of squares of 4 as channels, by views."""
    n, c, h, w = x.shape
    x = x[:, :, : h // 4 * 4, : w // 4 * 4].view(n, c, h // 4, 4, w // 4, 4)
    return x.permute(0, 3, 5, 1, 2, 4).reshape(n, -1, h // 4, w // 4)


def depth_to_space(x):
    """Return channels as the pixels of squares of 2, by views."""
    n, c, h, w = x.shape
    x = x.view(n, 2, 2, c // 4, h, w).permute(0, 3, 4, 1, 5, 2)
    return x.reshape(n, c // 4, 2 * h, 2 * w)


def response_norm(x):
    """Return a part of ConvNeXt V2 (arXiv:2301.00808), with channels last."""
    x = x.permute(0, 2, 3, 1)
    norms = x.norm(p=2, dim=(1, 2), keepdim=True)
    return (x * (norms / (norms.mean(-1, keepdim=True) + 1e-6))).permute(0, 3, 1, 2)


def unequal_parts(x):
    """Return channels that are last and joined in another order, one part convolved on the way."""
    one, three = x.movedim(1, -1).split([1, 3], -1)
    three = conv(three.permute(0, 3, 1, 2), W3[:3, :3], padding=1).permute(0, 2, 3, 1)
    return torch.cat([three, one], -1).movedim(-1, 1)


# What runs on the stack alone.
STACK = {
    "conv": lambda x: conv(x, W3, BIAS, 1, 1),
    "conv stride 2": lambda x: conv(x, W3, BIAS, 2, 1),
    "conv valid": lambda x: conv(x, W3),
    "conv same": lambda x: conv(x, W3, padding="same"),
    "conv same even": lambda x: conv(x, W2, None, 1, "same", 2),
    "conv dilated": lambda x: conv(x, W3, BIAS, 1, 2, 2),
    "conv dilated over blocks": lambda x: conv(x, W3, None, 1, 18, 18),
    "conv 5x5 stride 4": lambda x: conv(x, W5, BIAS, 4, 2),
    "conv 2x2 stride 4": lambda x: conv(x, W2, None, 4),
    "conv 1x1 stride 2": lambda x: conv(x, W1, BIAS, 2),
    "conv depthwise": lambda x: conv(x, DEPTHWISE, BIAS, 1, 1, 1, 4),
    "conv depthwise stride 2": lambda x: conv(x, DEPTHWISE, BIAS, 2, 1, 1, 4),
    "conv groups": lambda x: conv(x, GROUPS, None, 1, 1, 1, 2),
    "conv 1x7": lambda x: conv(x, weights(4, 4, 1, 7), None, 1, (0, 3)),
    "sum by name": lambda x: torch.add(x, other=conv(x, W3, padding=1)),
    "product by name": lambda x: torch.mul(x.mul(other=0.5), other=BIAS[:, None, None]),
    "max pool 2": lambda x: pool(x, 2),
    "max pool 3": lambda x: pool(x, 3, 2, 1),
    "max pool 3 ceil": lambda x: pool(x, 3, 2, ceil_mode=True),
    "max pool 2 ceil": half,
    "max pool 5": lambda x: pool(x, 5, 1, 2),
    "max pool dilated": lambda x: pool(x, 3, 1, 1, 2),
    "avg pool 2": lambda x: F.avg_pool2d(x, 2),
    "avg pool 3": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "avg pool 3 inside": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "avg pool 3 ceil": lambda x: F.avg_pool2d(x, 3, 2, 0, True),
    "avg pool divisor": lambda x: F.avg_pool2d(x, 3, 1, 1, divisor_override=5),
    "avg pool valid": lambda x: F.avg_pool2d(x, 3, 1),
    "global mean": lambda x: F.adaptive_avg_pool2d(x, 1),
    "global maximum": lambda x: F.adaptive_max_pool2d(x, 1),
    "global maximum of negative numbers": lambda x: F.adaptive_max_pool2d(-x.exp(), 1),
    "global maximum of a valid convolution": lambda x: F.adaptive_max_pool2d(conv(x, W3), 1),
    "mean by a window": lambda x: F.avg_pool2d(x, x.shape[2:]),
    "mean by a window in steps": lambda x: F.avg_pool2d(x, x.shape[2:], 1, ceil_mode=True),
    "maximum by a window": lambda x: pool(-x.exp(), x.shape[2:]),
    "amax of images": lambda x: x * x.detach().amax((3, 2), keepdim=True),
    "amax of images, flat": lambda x: (-x.detach().exp()).amax((2, 3)),
    "amax of channels": lambda x: x * x.amax(1, True) * x.amax((1,), keepdim=True),
    "norm of images": lambda x: x.norm(2, (2, 3)),
    "norm of images, kept": lambda x: x * torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True),
    "norm of images, channels last": response_norm,
    "norm of all channels": lambda x: x * torch.linalg.vector_norm(x, 2, (1, 2, 3), True),
    "mean of all channels": lambda x: x.mean((1, 2, 3)),
    "sum of all channels": lambda x: x.permute(0, 2, 3, 1).sum((-1, 1, 2), keepdim=True),
    "standard deviation": lambda x: x.std((2, 3)),
    "variance": lambda x: (x - x.mean((2, 3), True)) / x.var((2, 3), False, True).add(1e-5).sqrt(),
    "variance of groups": lambda x: torch.var_mean(
        x.view(x.shape[0], 2, 2, *x.shape[2:]), (2, 3, 4), correction=0
    ),
    "deviation, channels last": lambda x: torch.std_mean(x.movedim(1, -1), (1, 2), keepdim=True),
    "variance of channels": lambda x: x.var(1, keepdim=True) * x.std(1, False).unsqueeze(1),
    "norm of channels": lambda x: x * x.norm(dim=1, keepdim=True),
    "mean": lambda x: x.mean((2, 3)),
    "mean kept": lambda x: x.mean((-1, -2), keepdim=True),
    "sum": lambda x: x.sum((2, 3)),
    "nearest": lambda x: resize(x, scale_factor=2),
    "nearest exact": lambda x: resize(x, scale_factor=2, mode="nearest-exact"),
    "bilinear 2": lambda x: resize(x, scale_factor=2, mode="bilinear"),
    "bilinear 3": lambda x: resize(x, scale_factor=3, mode="bilinear"),
    "bilinear corners": lambda x: resize(x, scale_factor=2, mode="bilinear", align_corners=True),
    "bilinear down": lambda x: resize(x, scale_factor=0.5, mode="bilinear"),
    "bilinear to a size": lambda x: resize(half(x), size=x.shape[2:], mode="bilinear"),
    "nearest to a size": lambda x: resize(half(half(x)), size=x.shape[2:]),
    "bilinear of a mean": lambda x: (
        resize(F.adaptive_avg_pool2d(x, 1), size=x.shape[2:], mode="bilinear") + x
    ),
    "transposed 2": lambda x: grow(x, W2, BIAS, 2),
    "transposed 3": lambda x: grow(x, W3, BIAS, 2, 1, 1),
    "transposed 4": lambda x: grow(x, weights(4, 4, 4, 4), BIAS, 2, 1),
    "transposed stride 1": lambda x: grow(x, W3, BIAS, 1, 1),
    "transposed 5": lambda x: grow(x, W5, None, 2, 2, 1),
    "transposed 1 stride 2": lambda x: grow(x, W1, None, 2),
    "transposed dilated": lambda x: grow(x, W3, BIAS, 1, 2, 0, 1, 2),
    "transposed depthwise": lambda x: grow(x, DEPTHWISE, BIAS, 2, 1, 1, 4),
    "pad": lambda x: conv(F.pad(x, (1, 1, 1, 1)), W3),
    "pad one side": lambda x: conv(F.pad(x, (0, 1, 0, 1)), W3, None, 2),
    "pad reflect": lambda x: conv(F.pad(x, (1, 1, 1, 1), mode="reflect"), W3),
    "pad replicate": lambda x: conv(F.pad(x, (2, 2, 2, 2), mode="replicate"), W3, None, 1, 0, 2),
    "pad circular": lambda x: conv(F.pad(x, (1, 1, 1, 1), mode="circular"), W3),
    "pad a value": lambda x: conv(F.pad(x, (1, 1, 1, 1), value=0.7), W3, BIAS),
    "pad and pool 2 ceil": lambda x: pool(F.pad(x, (0, 1, 0, 1)), 2, 1, ceil_mode=True),
    "pad and pool": lambda x: pool(F.pad(x, (0, 1, 0, 1), value=-float("inf")), 3, 2),
    "group norm": lambda x: F.group_norm(x, 2, BIAS, BIAS),
    "instance norm": lambda x: F.instance_norm(x),
    "layer norm": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (4,), BIAS, BIAS).permute(
        0, 3, 1, 2
    ),
    "local response norm": lambda x: F.local_response_norm(x, 3),
    "flip of channels": lambda x: x.flip(1) * x.flip(dims=(-3,)) + torch.flip(x, [1]),
    "dimensions by name": lambda x: torch.permute(x, dims=(0, 2, 3, 1)).transpose(
        dim0=1, dim1=1
    ).permute(dims=(0, 3, 1, 2)),
    "parts by name": lambda x: torch.cat(torch.chunk(x, chunks=2, dim=1)[::-1], 1),
    "sort by name": lambda x: torch.sort(x, stable=True, dim=1).values * x.sort(1, True)[0],
    "factors of NumPy": lambda x: pool(resize(x, scale_factor=np.int64(2)), torch.tensor(2)),
    "factors of NumPy, bilinear": lambda x: resize(
        x, scale_factor=(np.float32(2), np.float64(2)), mode="bilinear"),
    "sizes of NumPy": lambda x: resize(pool(x, np.int64(2)), size=tuple(np.array(x.shape[2:]))),
    "batch norm": lambda x: F.batch_norm(x, BIAS, BIAS.abs() + 1, BIAS, BIAS),
    "normalize": lambda x: F.normalize(x),
    "softmax": lambda x: x.softmax(1),
    "max of channels": lambda x: x.max(1, keepdim=True).values * x,
    "channel statistics": lambda x: torch.cat([x.mean(1, True), x.max(1, True)[0]], 1).sigmoid(),
    "number": lambda x: 1 - x,
    "bounds": lambda x: x.clamp(-1, 1) + x.clip(min=0.5) * torch.clamp(x, max=0.5),
    "row of an image": lambda x: x + torch.arange(x.shape[3], dtype=torch.float64),
    "number for each image": lambda x: x * BIAS[:2].view(2, 1, 1, 1),
    "prelu": lambda x: F.prelu(x, weights(1)),
    "prelu of channels": lambda x: F.prelu(
        conv(x, weights(x.shape[3], 4, 1, 1)), weights(x.shape[3])
    ),
    "numbers of the same type": lambda x: x * torch.meshgrid(
        torch.arange(x.shape[2]).type_as(x), torch.arange(x.shape[3]).to(x), indexing="ij"
    )[1].add(1),
    "the type of numbers": lambda x: x.to(BIAS).type_as(BIAS.float()).double(),
    "where": lambda x: torch.where(x > 0, x, x * 0.1),
    "in place": lambda x: (x * 1).add_(x).mul_(2),
    "x and its activation": lambda x: x * x.sigmoid(),
    "used again after an activation": lambda x: conv(F.relu(x), W1) + x,
    "in place after it was read": lambda x: (lambda y: conv(y, W1) + y.relu_())(x * 1),
    "rank": lambda x: x * x.mean(1).unsqueeze(1),
    "slice of channels": lambda x: x[:, 1:3],
    "list of channels": lambda x: x[:, [2, 0]],
    "crop": lambda x: x[:, :, :-3, :-15],
    "crop after growing": lambda x: (
        conv(resize(half(x), scale_factor=2)[:, :, : x.shape[2] - 1, : x.shape[3] - 1], W1)
    ),
    "every other pixel": lambda x: x[..., 1::2, ::2],
    "pixel shuffle": lambda x: F.pixel_shuffle(x, 2),
    "channel shuffle": lambda x: F.channel_shuffle(x, 2),
    "five dimensions": lambda x: x.view(x.shape[0], 2, 2, *x.shape[2:]).sum(1),
    "stack": lambda x: (torch.stack([x, x + 1], 1) * BIAS[:2].view(1, 2, 1, 1, 1)).sum(1),
    "space to depth": space_to_depth,
    "depth to space": depth_to_space,
    "expand as": lambda x: x * x.mean((2, 3), keepdim=True).expand_as(x),
    "expanded and joined": lambda x: torch.cat(
        [x, x.mean((2, 3), keepdim=True).expand(-1, -1, *x.shape[2:])], 1
    ),
    "unequal parts": unequal_parts,
    "split": lambda x: torch.cat(x.split([1, 3], 1)[::-1], 1),
    "matrix": lambda x: (x.permute(0, 2, 3, 1) @ W1[:, :, 0, 0]).permute(0, 3, 1, 2),
    "linear": lambda x: F.linear(x.movedim(1, -1), W1[:, :, 0, 0]).movedim(-1, 1),
    "new": lambda x: x.new_ones(1) * x + torch.zeros_like(x),
    "new of a size": lambda x: x * x.new(torch.Size((4, 1, 1))).fill_(2) + x.new(4, 1, 1).zero_(),
    "new of numbers": lambda x: x * x.new([1, 2, 3, 4]).view(4, 1, 1) * x.new_ones(1, dtype=None),
    "dtype": lambda x: x.float().double(),
}

# What is computed on the whole image, and named so.
IMAGE = {
    "conv padded beyond the blocks": lambda x: conv(x, W3, BIAS, 1, 20),
    "conv stride 3": lambda x: conv(x, W3, BIAS, 3, 1),
    "max unpool": lambda x: unpool(x, 2),
    "max unpool of rectangles": lambda x: unpool(x, (4, 2)),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, (7, 2)).sum((2, 3)),
    "adaptive max pool": lambda x: F.adaptive_max_pool2d(x, (7, 2)).sum((2, 3)),
    "place of a maximum": lambda x: F.adaptive_max_pool2d(x, 1, return_indices=True)[0],
    "mean by a window, divided": lambda x: F.avg_pool2d(x, x.shape[2:], divisor_override=5),
    "mean of one side": lambda x: x.mean(3).mean(2),
    "pool of one side": lambda x: F.adaptive_avg_pool2d(x, (None, 1)).sum((2, 3)),
    "mean of all": lambda x: x.mean(),
    "crop of blocks": lambda x: x[:, :, :-3, :20],
    "roll": lambda x: conv(torch.roll(x, 2, 3), W3, BIAS, 1, 1),
    "flip": lambda x: x.flip(3),
    "flip of channels and rows": lambda x: conv(x.flip(1, 2), W3, BIAS, 1, 1),
    "activations by name": lambda x: torch.relu(input=torch.add(input=x, other=x)),
    "norm across rows": lambda x: F.local_response_norm(x.permute(0, 2, 3, 1), 3),
    "places": lambda x: x * len(torch.where(x > 0)[0]) * (x.type() == "torch.DoubleTensor"),
    "sparse": lambda x: x.to_sparse().to_dense(),
    "variance of all": lambda x: x * x.var(True),
    "pad and pool 3 ceil": lambda x: pool(F.pad(x, (0, 1, 0, 1)), 3, 2, ceil_mode=True),
    "einsum": lambda x: torch.einsum("nchw,cd->ndhw", x, W1[:, :, 0, 0]),
    "new of an image": lambda x: x.roll(1, 1) * (lambda y: y.new(y.shape).fill_(2))(x.cumsum(2)),
    "flat": lambda x: x.view(x.shape[0], -1).sum(1),
    "tokens": lambda x: x.flatten(2).transpose(1, 2).softmax(1).sum(1),
    "gram": lambda x: x.flatten(2) @ x.flatten(2).transpose(1, 2),
    "cumsum": lambda x: x.cumsum(2),
    "set item": set_item,
    "boolean index": lambda x: x[x > 0].sum(),
    "unfold": lambda x: F.unfold(x, 3, padding=1).sum(2),
    "one image": lambda x: x[:1].sum((2, 3)),
    "double batch": lambda x: torch.cat([x, x], 0).sum((2, 3)),
    "grid sample": lambda x: F.grid_sample(
        x,
        torch.linspace(-1, 1, 2 * 64, dtype=x.dtype).view(1, 8, 8, 2).expand(2, -1, -1, -1),
        align_corners=False,
    ),
    "lp pool": lambda x: F.lp_pool2d(x, 2, 2),
    "indices of a pool": lambda x: pool(x, 2, return_indices=True)[0],
    "bicubic": lambda x: resize(x, scale_factor=2, mode="bicubic"),
}


class Call(nn.Module):
    """A function as a module, after a convolution."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.function = nn.Conv2d(4, 4, 1).double(), function

    def forward(self, x):
        """Return what the function makes of the convolution's result."""
        return self.function(self.before(x))


def stages(size, block):
    """Return the sizes that functions here make, and the blocks they are cut into."""
    h, w = size
    found = networks.stages_of(size, block)
    for (a, b), cut in list(found.items()):
        for d in (-2, -1, 1):
            found.setdefault((a + d, b + d), cut)
    for times in (2, 3):
        for d in (0, -1, 1):
            found.setdefault((times * h + d, times * w + d), times * block)
    found.setdefault((h - 3, 20), block)
    return found


@pytest.mark.parametrize("name", [*STACK, *IMAGE])
@torch.no_grad()
def test_functions(st, name):
    """On a full mask the dense function; on others the oracle; on the stack and on whole images.

    In evaluation the last call has the tape, where there can be one, of a call with more blocks.
    """
    dense = Call(STACK.get(name) or IMAGE[name])
    for size, block in (((48, 64), 16), ((45, 51), 16), ((21, 40), 32)):
        x, on_images = weights(2, 4, *size), st.sparsify(dense, block)
        on_images.break_even = 0.0
        in_training, in_evaluation = (st.sparsify(copy.deepcopy(dense), block) for _ in range(2))
        in_training.break_even = in_evaluation.break_even = 2.0
        in_evaluation.eval()
        for share in (1.0, 0.75, 0.5):
            on, mask = networks.blocks((2, *size), block, share, seed=3)
            expected = networks.oracle(dense, x, on, block, stages(size, block))
            if share == 1:
                expected = dense(x)
            for sparse in (on_images, in_training, in_evaluation):
                result = sparse(x, mask)
                assert all(
                    r.shape == e.shape
                    for r, e in zip(*map(tree_leaves, (result, expected)), strict=True)
                )
                assert_near(result, expected)
                if size == (48, 64):
                    assert bool(sparse.dense_layers) == (name in IMAGE)


@pytest.mark.parametrize("break_even", [2.0, 0.0])
def test_places_without_pixels_have_no_maximum(st, break_even):
    """Of 33 pixels a block of 16 cuts a third row, which a smaller result does not have."""
    dense = Call(lambda x: F.adaptive_max_pool2d(-conv(x, W3).exp(), 1))
    sparse = st.sparsify(dense, 16)
    sparse.break_even = break_even
    x = weights(2, 4, 33, 33)
    mask = torch.ones(2, 33, 33, dtype=torch.bool)
    mask[:, 32], mask[:, :, 32] = False, False
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    expected = dense.function(dense.before(leaves[0]) * mask[:, None])
    assert (expected < 0).all()
    actual = sparse(leaves[1], mask)
    assert_near(actual.detach(), expected.detach())
    for y in (expected, actual):
        y.square().sum().backward()
    assert_near(leaves[1].grad, leaves[0].grad, terms=1 << 10)
    assert leaves[0].grad.any()


@pytest.mark.parametrize("sizes", [(W2, BIAS, 2, 0, 1), (W1, BIAS, 1, 0, 1, 1, 2)], ids=["2", "1"])
@torch.no_grad()
def test_an_output_padding_holds_the_bias_alone(st, sizes):
    """It lies past the image, where blocks may hold anything."""
    dense = Call(lambda x: grow(x, *sizes))
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    x = weights(2, 4, 45, 51)
    assert_near(sparse(x, torch.ones(2, 45, 51)), dense(x))
    assert not sparse.dense_layers


def test_the_norm_of_no_pixels_has_a_gradient(st):
    """It is 0, as that of a norm of zeros, and NaN nowhere."""
    dense = Call(response_norm)
    sparse, x = st.sparsify(dense, 16), weights(2, 4, 32, 48)
    sparse.break_even = 2.0
    _, mask = networks.blocks((2, 32, 48), 16, 0.5)
    mask[1] = False
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    before = dense.before(leaves[0])[:1] * mask[:1, None]
    results = [dense.function(before), sparse(leaves[1], mask)]
    assert_near(results[1][:1].detach(), (results[0] * mask[:1, None]).detach())
    for y in results:
        (y * y.detach().cos()).sum().backward()
    assert_near(leaves[1].grad, leaves[0].grad, terms=1 << 10)
    assert leaves[0].grad.any() and not leaves[1].grad[1].any()


@pytest.mark.parametrize("break_even", [0.0, 2.0], ids=["images", "stack"])
@torch.no_grad()
def test_means_of_many_halves_do_not_overflow(st, break_even):
    """A sum of more than 65504 is no number in float16; the mean is one, as in PyTorch."""
    x = 30 + torch.randn(2, 4, 64, 96, generator=torch.Generator().manual_seed(1)).half()
    mask = torch.zeros(2, 64, 96, dtype=torch.bool)
    mask[:, :, :64] = True
    sparse = st.sparsify(Mean(), 16)
    sparse.break_even = break_even
    actual, expected = sparse(x, mask), (x.double() * mask[:, None]).mean((2, 3))
    assert actual.dtype == torch.float16
    # The mean is rounded once, after sums in float32, whose error is smaller by far.
    assert ((actual - expected).abs() <= torch.finfo(torch.float16).eps * expected.abs()).all()


class Mean(nn.Module):
    """The mean of each image."""

    def forward(self, x):
        """Return ``[N, C]``."""
        return x.mean((2, 3))


GUARDS = {
    "finite": lambda x: torch.isfinite(x).all(),
    "no nan": lambda x: torch.all(x == x),
    "not zero": lambda x: (x != 0).all(),
    "of channels first": lambda x: x.isfinite().all(1, keepdim=True).all(),
    "of images": lambda x: x.isfinite().all(dim=(-2, -1)).all(dim=1),
    "of images, all dimensions": lambda x: torch.all((x > -9), dim=(1, 2, 3), keepdim=True),
    "of columns": lambda x: x.isfinite().permute(0, 2, 3, 1).all(1),
    "of rows": lambda x: x.isfinite().all(axis=3, keepdim=True),
}


@pytest.mark.parametrize("name", GUARDS)
@pytest.mark.parametrize("break_even", [2.0, 0.0])
@torch.no_grad()
def test_all_of_a_boolean_activation_is_of_active_blocks(st, name, break_even):
    """Also in a replay; pixels beyond the edges of the image, which are 0, are not asked either."""
    seen = []

    class Guarded(nn.Module):
        def forward(self, x):
            seen.append(GUARDS[name](x))
            return x.relu(), seen[-1]

    sparse = st.sparsify(Guarded().eval(), 16)
    sparse.break_even = break_even
    x = weights(2, 4, 45, 51)
    for seed in range(4):
        mask = networks.blocks((2, 45, 51), 16, 0.5, seed=seed)[1]
        expected = GUARDS[name](x)
        for value, wanted in ((1.0, True), (float("nan"), False)):
            inner = mask[1].nonzero()[0].tolist()
            given = x.clone()
            given[1, 0, inner[0], inner[1]] = value
            guard = sparse(given, mask)[1]
            assert type(guard) is torch.Tensor and guard.dtype == torch.bool
            assert guard.shape == expected.shape
            assert bool(guard.all()) == (wanted or name == "not zero")
    assert not mask.all() and len(seen) == 2  # all other calls were replayed


@pytest.mark.parametrize("break_even", [2.0, 0.0])
@torch.no_grad()
def test_what_a_mask_chooses_is_zero_outside(st, break_even):
    """And ``all`` of numbers counts the zeros there, as in the zeroed network."""
    choices = [
        lambda x: torch.where(x.isfinite(), 3.0, 3.0).double(),
        lambda x: x.masked_fill(x == x, 3.0),
        lambda x: (x == x) * 3.0,
        lambda x: (x == x).all(1, keepdim=True) * 3.0,
    ]
    x, mask = weights(2, 4, 45, 51), networks.blocks((2, 45, 51), 16, 0.5, seed=3)[1]
    for choose in choices:
        sparse = st.sparsify(Call(choose), 16)
        sparse.break_even = break_even
        assert_near(sparse(x, mask), (mask[:, None] * 3.0).double().expand_as(sparse(x, mask)))
    sparse = st.sparsify(Call(lambda x: (x.exp().all(), (x.exp() > 0).all())), 16)
    assert [t.item() for t in sparse(x, mask)] == [False, True]
