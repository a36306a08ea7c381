"""Any calls of sbnet_cupy.torch in any order, on tensors that change in between: always the core's.

A call on a GPU is done at once where an earlier one was like it; here all that may make it unlike
changes at random: shapes, dtypes, strides, alignment, memory, versions, gradients, modes, streams.
"""

import contextlib
import random

import pytest

import sbnet_cupy as sb
from support.assertions import assert_close, assert_same

CHANNELS, MIDDLE = 16, 8
CALLS = 400


class Sequence:
    """Calls drawn from a seed, on one device."""

    def __init__(self, st, torch, device, seed):
        self.st, self.torch, self.device = st, torch, device
        self.random, self.weights = random.Random(seed), {}
        torch.manual_seed(seed)

    def chance(self, probability):
        return self.random.random() < probability

    def numbers(self, *shape):
        return self.torch.randn(*shape, device=self.device)

    def image(self, dtype, size):
        shape = (2, size, size, CHANNELS)
        kind = self.random.randrange(4)
        x = self.numbers(*shape).to(dtype)
        if kind == 0:  # another alignment
            x = x.new_empty(x.numel() + 1)[1:].view(shape).copy_(x)
        elif kind == 1:  # another order in memory
            x = x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
        return x.requires_grad_(self.chance(0.3))

    def layer(self, dtype):
        """Return weights of one of a few layers, of which some have changed since."""
        torch, key = self.torch, (dtype, self.random.randrange(3))
        if key not in self.weights or self.chance(0.01):
            cin, mid = CHANNELS, MIDDLE
            kernels = ((3, 3, cin, cin), (1, 1, cin, mid), (3, 3, mid, mid), (1, 1, mid, cin))
            tables = [self.numbers(n).abs() for n in (cin, cin, mid, mid, mid, mid)]
            made = [(self.numbers(*shape) / 4).to(dtype) for shape in kernels]
            bias = self.numbers(cin) if self.chance(0.5) else None
            self.weights[key] = made[0], bias, made[1:] + tables
        w, bias, unit = self.weights[key]
        for group in ([w], unit):
            weight, change = self.random.choice(group), self.random.randrange(40)
            if change == 0:
                with torch.no_grad():
                    weight.mul_(0.9)
            elif change == 1:
                weight.data = weight.data * 1.1
            elif change < 10:
                learns, several = not weight.requires_grad, self.chance(0.8)
                for other in group if several else [weight]:
                    other.requires_grad_(learns)
            elif weight.requires_grad and change < 20:
                weight.data.mul_(0.95)  # as a fused optimizer writes: autograd sees nothing
        return w, bias, unit

    @contextlib.contextmanager
    def surroundings(self):
        """Draw a mode of autograd and, on a GPU, a stream."""
        torch = self.torch
        mode = self.random.choice((torch.enable_grad, torch.no_grad, torch.inference_mode))
        with contextlib.ExitStack() as stack:
            if self.device != "cpu":
                torch.cuda.synchronize()
                if self.chance(0.2):
                    stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
                    stack.callback(torch.cuda.synchronize)
            stack.enter_context(mode())
            yield

    def check_a_call(self):
        """Make a call, of the core too, and compare."""
        dtype = getattr(self.torch, self.random.choice(("float32", "float16")))
        size = self.random.choice((16, 24))
        x, layer = self.image(dtype, size), self.layer(dtype)
        density, capacity = self.random.choice((0, 0.02, 0.3)), self.random.choice((None, 5, 40))
        mask = self.torch.rand(2, size, size, device=self.device) < density
        make = self.random.choice((self.mask, self.gather, self.scatter, self.conv, self.unit))
        with self.surroundings():
            make(x, mask, layer, capacity)

    def blocks(self, params, mask, capacity):
        grid = {name: getattr(params, name) for name in ("bsize", "boffset", "bstride")}
        return grid, sb.reduce_mask(mask, params.bcount, **grid, capacity=capacity)

    def params(self, mask):
        return sb.calc_block_params(mask.shape[1:], self.random.choice((6, 10)), 3)

    def out(self, shape, dtype):
        given = self.chance(0.3)
        return self.torch.empty(shape, dtype=dtype, device=self.device) if given else None

    def mask(self, x, mask, layer, capacity):
        params = self.params(mask)
        grid, expected = self.blocks(params, mask, capacity)
        found = self.st.reduce_mask(mask, params.bcount, **grid, capacity=capacity)
        for actual, wanted in zip(found, expected, strict=True):
            assert_same(actual, wanted)

    def gather(self, x, mask, layer, capacity):
        grid, active = self.blocks(self.params(mask), mask, capacity)
        options = grid | {
            "transpose": self.chance(0.3),
            "activation": self.random.choice((None, "relu")),
            "scale": self.numbers(CHANNELS) if self.chance(0.5) else None,
        }
        expected = sb.sparse_gather(plain(x), *active, **options)
        out = self.out(expected.shape, x.dtype)
        y = self.st.sparse_gather(x, *active, **options, out=out)
        self.check(y, expected, out, x)

    def scatter(self, x, mask, layer, capacity):
        params = self.params(mask)
        _, active = self.blocks(params, mask, capacity)
        options = {"bsize": params.bsize_out, "add": self.chance(0.5)}
        blocks = self.numbers(len(active[1]), *params.bsize_out, CHANNELS).to(x.dtype)
        blocks = blocks.requires_grad_(self.chance(0.3) and not blocks.is_inference())
        expected = sb.sparse_scatter(plain(blocks), *active, plain(x), **options)
        out = self.out(x.shape, x.dtype)
        if self.chance(0.3):
            x = out = plain(x).clone()
        y = self.st.sparse_scatter(blocks, *active, x, **options, out=out)
        self.check(y, expected, out, x, blocks)

    def conv(self, x, mask, layer, capacity):
        w, bias, _ = layer
        options = self.layer_options(x) | {"activation": self.random.choice((None, "relu"))}
        params = self.params(mask)
        _, active = self.blocks(params, mask, capacity)
        expected = sb.sparse_conv2d(plain(x), plain(w), active, params, bias=bias, **options)
        out = self.out(x.shape, x.dtype)
        y = self.st.sparse_conv2d(x, w, active, params, bias=bias, **options, out=out)
        by_library = self.device == "cpu" and x.dtype == self.torch.float32
        self.check(y, expected, out, x, w, terms=9 * CHANNELS + 1 if by_library else None)

    def unit(self, x, mask, layer, capacity):
        weights, options = layer[2], self.layer_options(x)
        params = sb.calc_block_params_res_block(mask.shape[1:], 10, [1, 3, 1])
        _, active = self.blocks(params, mask, capacity)
        frozen, given = sb.BottleneckWeights(*map(plain, weights)), sb.BottleneckWeights(*weights)
        expected = sb.sparse_res_block_bottleneck(plain(x), frozen, active, params, **options)
        out = self.out(x.shape, x.dtype)
        y = self.st.sparse_res_block_bottleneck(x, given, active, params, **options, out=out)
        self.check(y, expected, out, x, *weights)

    def layer_options(self, x):
        base = self.numbers(*x.shape).to(x.dtype) if self.chance(0.5) else None
        method = self.random.choice(("auto", "auto", "auto", "gather"))
        return {"base": base, "method": method, "precision": "tf32"}

    def check(self, y, expected, out, *learning, terms=None):
        """Compare results to the bit, or as sums of ``terms`` that PyTorch's own library makes."""
        assert out is None or y is out
        recorded = self.torch.is_grad_enabled() and any(t.requires_grad for t in learning)
        assert y.requires_grad == recorded
        if terms is None:
            assert_same(y.detach(), expected)
        else:
            assert_close(y.detach(), expected, terms=terms, dtype="float32")


def plain(tensor):
    return tensor.detach().contiguous()


@pytest.mark.parametrize("seed", range(4))
def test_calls_in_any_order(st, torch, device, seed):
    sequence = Sequence(st, torch, device, seed)
    for _ in range(CALLS):
        sequence.check_a_call()
