"""sparse_conv2d on a CPU, on NumPy arrays and on tensors, against PyTorch's dense convolution.

    python -m benchmarks.block_sparse.bench_sparse_conv2d [--threads N] [--out FOLDER]

A 3x3 convolution of an image of 400 x 700 pixels with 24 channels in float32, from image and mask
to the result, in the same rounds as PyTorch's on a channels_last tensor. A tenth of the blocks is
active, in the top-left corner or anywhere, or the mask is set in a tenth of the pixels, which makes
more blocks active; each row says how many. Rows are our time over PyTorch's. Results are compared
with the dense ones first.
"""

import argparse
from pathlib import Path

import numpy as np

import sbnet_cupy as sb
from benchmarks.harness import machine
from benchmarks.harness.rows import Ratio, Writer, times_sign
from benchmarks.harness.timing import Contender, WallClock

FILE = "sparse_conv2d.csv"
SIZE, CHANNELS, BLOCKS, SHARE = (400, 700), 24, (16, 32), 0.1
DENSE = "torch conv2d, channels_last"


def masks_of(size, block):
    """Return masks by name: of whole blocks, and of pixels."""
    counts = tuple(-(-n // block) for n in size)
    rng = np.random.default_rng(0)
    strewn = np.zeros(counts[0] * counts[1], bool)
    strewn[rng.permutation(strewn.size)[: round(SHARE * strewn.size)]] = True
    blocks = {
        "top-left, 10% of the blocks": sb.masks.top_left(counts, SHARE)[0],
        "random, 10% of the blocks": strewn.reshape(counts),
    }
    found = {
        name: np.kron(active, np.ones((block, block), bool))[None, : size[0], : size[1]]
        for name, active in blocks.items()
    }
    pixels = {
        "top-left, 10% of the pixels": sb.masks.top_left((1, *size), SHARE),
        "blobs, 10% of the pixels": sb.masks.blobs((1, *size), SHARE),
    }
    return found | pixels


class Case:
    """The arrays of a convolution with one mask."""

    def __init__(self, torch, size, block, mask):
        from sbnet_cupy import torch as tensors

        rng = np.random.default_rng(1)
        self.x = rng.standard_normal((1, *size, CHANNELS), np.float32)
        self.w = rng.standard_normal((3, 3, CHANNELS, CHANNELS), np.float32) / 15
        self.mask, self.block = mask.astype(np.float32), block
        self.torch, self.tensors = torch, tensors
        self.given = tuple(map(torch.from_numpy, (self.x, self.w, self.mask)))
        last = torch.channels_last
        self.dense_given = (
            self.given[0].permute(0, 3, 1, 2),
            self.given[1].permute(3, 2, 0, 1).contiguous(memory_format=last),
        )

    def on_arrays(self):
        """Return the result of NumPy arrays."""
        return sb.sparse_conv2d(self.x, self.w, self.mask, bsize=self.block)

    def on_tensors(self):
        """Return the result of tensors."""
        return self.tensors.sparse_conv2d(*self.given, bsize=self.block)

    def dense(self):
        """Return PyTorch's dense result."""
        return self.torch.nn.functional.conv2d(*self.dense_given, padding=1)

    def active(self):
        """Return which blocks are active."""
        return sb.ActiveBlocks.from_mask(self.mask, bsize=self.block, ksize=3).to_dense()

    def check(self):
        """Raise unless results are the dense ones in the active blocks, up to rounding, else 0."""
        active = self.active()
        inside = active.repeat(self.block, axis=1).repeat(self.block, axis=2)
        inside = inside[:, : self.x.shape[1], : self.x.shape[2], None]
        dense = self.dense().permute(0, 2, 3, 1).numpy()
        size = self.torch.nn.functional.conv2d(*map(abs, self.dense_given), padding=1)
        bound = 2 * (9 * CHANNELS + 1) * np.finfo(np.float32).eps / 2
        bound = bound * size.permute(0, 2, 3, 1).numpy()
        for found in (self.on_arrays(), self.on_tensors().numpy()):
            if not (abs(found - np.where(inside, dense, 0)) <= bound).all():
                raise AssertionError("sparse_conv2d: beyond rounding")


def main(arguments=None):
    """Time all cases; print and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small image, few rounds")
    parser.add_argument("--threads", type=int, help="of PyTorch [one for each core]")
    parser.add_argument("--out", type=Path, help=f"folder of {FILE}")
    options = parser.parse_args(arguments)
    torch = machine.import_torch(True)
    if torch is None:
        raise SystemExit("this compares with PyTorch: install torch")
    if options.threads:
        torch.set_num_threads(options.threads)
    columns = machine.describe(None, torch)
    folder = machine.results_folder(columns, True, options.out)
    size = (80, 100) if options.quick else SIZE
    with Writer(folder / FILE, Ratio) as writer, torch.no_grad():
        for block in BLOCKS:
            for name, mask in masks_of(size, block).items():
                for row in _rows(torch, size, block, name, mask, columns, options.quick):
                    writer.write(row)
    return 0


def _rows(torch, size, block, name, mask, columns, quick):
    """Yield the rows of a mask: of NumPy arrays and of tensors."""
    case = Case(torch, size, block, mask)
    case.check()
    name = f"{name}, {case.active().mean():.0%}"
    shown = {key: columns[key] for key in ("torch", "numpy", "commit")}
    for variant, call in (("NumPy arrays", case.on_arrays), ("tensors", case.on_tensors)):
        contenders = [Contender(variant, [call]), Contender(DENSE, [case.dense])]
        ratio = WallClock(quick).time_all(contenders)[1]
        print(f"{name:>32}, blocks of {block}, {variant:>12}: {1 / ratio.ratio:4.1f}x", flush=True)
        yield Ratio(
            cpu=columns["gpu"], **shown, op="sparse_conv2d", suite="cpu",
            shape=times_sign((1, *size, CHANNELS)), dtype="float32", block=f"{block}x{block}",
            mask=f"{name} of the blocks", variant=variant, implementation=DENSE,
            note=f"{torch.get_num_threads()} threads", ratio=ratio.ratio, ratio_p90=ratio.ratio_p90,
        )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
