"""stack_conv2d and fused_conv: the layers of ResNet-50 at active blocks, against dense ones.

    python -m benchmarks.block_sparse.bench_stack_conv2d [--out FOLDER]

Images of 800 x 1408 pixels in blocks of 32, float16, with bias and relu: every block active, and a
tenth of them. One CUDA graph holds CALLS calls, all on the same arrays, as between the layers of a
network. The dense layer runs through PyTorch on channels_last tensors, with neither bias nor relu:
the better of cuDNN's convolution and, for 1x1 kernels, cuBLAS's product of matrices.
"""

import argparse
import functools
import statistics
from pathlib import Path

import numpy as np

import sbnet_cupy as sb
from benchmarks.harness import machine
from benchmarks.harness.rows import OURS, Row, Writer, times_sign

SIZE, BLOCK, CALLS = (800, 1408), 32, 20
SHARES = (1.0, 0.1)
KEPT = 1 << 30  # bytes, more than CALLS calls allocate
# Kernel, stride, channels in and out, and how many times smaller than the image the input is.
LAYERS = (
    (7, 2, 3, 64, 1),
    (3, 1, 64, 64, 4), (1, 1, 64, 256, 4), (1, 1, 256, 64, 4), (3, 2, 128, 128, 4),
    (3, 1, 128, 128, 8), (1, 1, 128, 512, 8), (1, 1, 512, 128, 8),
    (3, 1, 256, 256, 16), (1, 1, 1024, 256, 16), (1, 1, 256, 1024, 16),
    (3, 1, 512, 512, 32), (1, 1, 2048, 512, 32), (1, 1, 512, 2048, 32),
)  # fmt: skip


class Layer:
    """A layer's arrays: an image that is 0 outside of the active blocks, and its stack."""

    def __init__(self, xp, layer, share, size=SIZE):
        kernel, stride, channels, channels_out, smaller = layer
        rng = np.random.default_rng(1)
        grid = tuple(-(-n // BLOCK) for n in size)
        count = max(1, round(share * grid[0] * grid[1]))
        active = np.zeros(grid[0] * grid[1], bool)
        active[rng.permutation(len(active))[:count]] = True
        mask = np.kron(active.reshape(grid), np.ones((BLOCK, BLOCK), bool))[: size[0], : size[1]]
        table = sb.block_table(xp.asarray(mask[None]), BLOCK, capacity=count)
        block, self.size = (BLOCK // smaller,) * 2, tuple(n // smaller for n in size)
        arrays = table.bin_counts, table.active_block_indices, table.grid
        self.table = sb.BlockTable(*arrays, block, self.size)
        self.after = self.table.after_conv(kernel, stride, kernel // 2)
        self.count, self.stride, self.padding = count, stride, kernel // 2
        values = rng.standard_normal((1, *self.size, channels)).astype(np.float16)
        self.image = xp.asarray(values * mask[None, ::smaller, ::smaller, None])
        self.x = sb.stack_from_image(self.image, self.table)
        shape = (kernel, kernel, channels, channels_out)
        self.w = rng.standard_normal(shape).astype(np.float32) / (kernel * channels**0.5)
        self.w = xp.asarray(self.w.astype(np.float16))
        self.bias = xp.asarray(rng.standard_normal(channels_out).astype(np.float32))
        self.weights = sb.PackedWeights(self.w, bias=self.bias)
        rows = (len(self.x), *self.after.block_size, channels_out)
        self.out = xp.empty(rows, np.float16)
        self.image_out = xp.zeros((1, *self.after.image_size, channels_out), np.float16)

    def calls(self):
        """Return the operations that are timed, by name."""
        return {"stack_conv2d": self.convolve_stack, "fused_conv": self.convolve_image}

    def convolve_stack(self):
        """Convolve the stack; return the stack."""
        sb.stack_conv2d(
            self.x, self.weights, self.table, strides=self.stride, padding=self.padding,
            activation="relu", out=self.out,
        )  # fmt: skip
        return self.out

    def convolve_image(self):
        """Convolve the image at the same blocks; return the blocks of the result."""
        sb.fused_conv(
            self.image, self.weights, self.after.bin_counts, self.after.active_block_indices,
            bsize=self.after.block_size, strides=self.stride, padding=(self.padding,) * 2,
            activation="relu", out=self.image_out,
        )  # fmt: skip
        return self.image_out

    def check(self):
        """Raise unless both hold what conv2d gives at the active blocks.

        Sums of as many terms as a window has, in float32 in any order, are rounded to float16.
        """
        options = {"strides": self.stride, "padding": self.padding}
        wide = [a.astype(np.float32) for a in (self.image, self.w)]
        exact = sb.conv2d(*wide, **options, bias=self.bias, precision="ieee")
        bound = sb.conv2d(*map(abs, wide), **options, bias=abs(self.bias), precision="ieee")
        terms = int(np.prod(self.w.shape[:3])) + 1
        epsilon = terms * np.finfo(np.float32).eps + np.finfo(np.float16).eps
        least = float(np.finfo(np.float16).tiny)
        exact, bound = (sb.stack_from_image(a, self.after) for a in (exact * (exact > 0), bound))
        for name, call in self.calls().items():
            found = call()
            if found is self.image_out:
                found = sb.stack_from_image(found, self.after)
            worst = (abs(found - exact) - epsilon * bound).max()
            if not float(worst) <= least:
                raise AssertionError(f"{name} has an error of {float(worst):.2e} beyond rounding")


def main(arguments=None):
    """Time all layers; write and print their rows."""
    import cupy
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of stack_conv2d.csv")
    options = parser.parse_args(arguments)
    columns = machine.describe(cupy, torch)
    folder = machine.results_folder(columns, False, options.out)
    torch.backends.cudnn.benchmark = True
    print(f"{columns['gpu']}, torch {columns['torch']}, commit {columns['commit']}", flush=True)
    with torch.no_grad(), Writer(folder / "stack_conv2d.csv") as writer:
        for layer in LAYERS:
            for row in measure(cupy, torch, layer, columns):
                writer.write(row)


def measure(cupy, torch, layer, columns):
    """Yield a layer's rows, and print them."""
    from benchmarks.networks.timing import captured, graph_times

    def on_torch_stream(call):
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            if not torch.cuda.is_current_stream_capturing():
                cupy.empty(KEPT, np.uint8)  # room in the pool for what captured calls keep
            for _ in range(CALLS):
                call()

    def times(call):
        graph = captured(functools.partial(on_torch_stream, call))
        return [us / CALLS for us in graph_times(graph)]

    kernel, stride, channels, channels_out, smaller = layer
    name = f"{kernel}x{kernel}/{stride} {channels}-{channels_out}"
    size = tuple(n // smaller for n in SIZE)
    x = torch.randn(1, channels, *size, device="cuda").half()
    w = torch.randn(channels_out, channels, kernel, kernel, device="cuda").half()
    x, w = (t.to(memory_format=torch.channels_last) for t in (x, w))
    convolve, multiply = torch.nn.functional.conv2d, torch.nn.functional.linear
    dense = {"cuDNN": lambda: convolve(x, w, stride=stride, padding=kernel // 2)}
    if kernel == stride == 1:
        pixels, matrix = x.permute(0, 2, 3, 1).reshape(-1, channels), w[:, :, 0, 0].contiguous()
        dense["cuBLAS"] = lambda: multiply(pixels, matrix)
    dense = {by: statistics.median(times(call)) for by, call in dense.items()}
    by = min(dense, key=dense.get)
    best = dense[by]
    for share in SHARES:
        work = Layer(cupy, layer, share)
        work.check()
        for op, call in work.calls().items():
            us = times(call)
            middle = statistics.median(us)
            print(
                f"{op:>12} {name:>16} {times_sign(size):>9} {share:4.0%}: {middle:6.1f} us, dense "
                f"{best:6.1f} us, {best / middle:5.2f}x",
                flush=True,
            )
            yield Row(
                **columns, op=op, suite="resnet50", shape=times_sign((1, *size, channels)),
                dtype="float16", block=times_sign(work.table.block_size), mask="random blocks",
                density=share, blocks=work.count, variant=name, implementation=OURS,
                timed_by="graph", us=middle, us_p10=us[len(us) // 10],
                us_p90=us[-1 - len(us) // 10], bytes=None, gb_per_s=None, percent_of_copy=None,
                original_us=None, ratio_to_original=None,
                note=f"{CALLS} calls in a graph; dense by {by}",
                dense_us=best, ratio_to_dense=best / middle,
            )  # fmt: skip


if __name__ == "__main__":
    main()
