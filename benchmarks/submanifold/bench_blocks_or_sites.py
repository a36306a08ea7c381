"""One convolution in two dimensions at blocks and at sites, over how full the active blocks are.

    python -m benchmarks.submanifold.bench_blocks_or_sites [--out FOLDER]

A tenth of the blocks of 16 x 16 pixels are active, and a share of the pixels of each is occupied:
the pixels nearest to a point ("clustered") or any ("scattered"). A 3x3 convolution of float16
features with bias and relu is timed as stack_conv2d, on whole blocks that stay cut out, and as
submanifold_conv, on the occupied pixels. Block tables and kernel maps are made beforehand, as
between the layers of a network. Both results agree at the sites before either is timed.
"""

import argparse
import itertools
from pathlib import Path

import numpy as np

import sbnet_cupy as sb
from benchmarks.harness import machine
from benchmarks.harness.rows import OURS, Row, Writer, times_sign
from benchmarks.harness.timing import Contender, CupyClock

FILE = "blocks_or_sites.csv"
BLOCK, SHARE = 16, 0.1
SIZES, CHANNELS = (512, 1024), (32, 64, 128)
OCCUPANCIES = (0.03, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
LAYOUTS = ("clustered", "scattered")


def mask_of(size, occupancy, layout, seed=0):
    """Return a mask, bool ``[size, size]``: the given share of the pixels of some blocks."""
    rng = np.random.default_rng(seed)
    blocks, pixels = (size // BLOCK) ** 2, BLOCK**2
    active = rng.permutation(blocks)[: max(1, round(SHARE * blocks))]
    rank = rng.random((len(active), pixels))
    if layout == "clustered":
        places = np.indices((BLOCK, BLOCK)).reshape(2, 1, pixels)
        centres = rng.random((2, len(active), 1)) * BLOCK
        rank = ((places - centres) ** 2).sum(axis=0)
    taken = rank.argsort(axis=1)[:, : max(1, round(occupancy * pixels))]
    mask = np.zeros((blocks, pixels), bool)
    np.put_along_axis(whole := np.zeros(rank.shape, bool), taken, True, axis=1)
    mask[active] = whole
    return mask.reshape(size // BLOCK, -1, BLOCK, BLOCK).swapaxes(1, 2).reshape(size, size)


class Case:
    """A masked image as blocks and as sites, with the weights of one layer."""

    def __init__(self, xp, size, channels, occupancy, layout):
        rng = np.random.default_rng(channels)
        mask = mask_of(size, occupancy, layout)[None]
        strip = rng.standard_normal((1, BLOCK, size, channels), np.float32).astype(np.float16)
        mask = xp.asarray(mask)
        self.image = xp.tile(xp.asarray(strip), (1, size // BLOCK, 1, 1)) * mask[..., None]
        self.mask = mask[..., None].astype(np.float16)
        w = rng.standard_normal((3, 3, channels, channels), np.float32) / (3 * channels**0.5)
        bias = rng.standard_normal(channels, np.float32)
        self.weights = sb.PackedWeights(xp.asarray(w.astype(np.float16)), bias=xp.asarray(bias))
        self.w, self.bias = xp.asarray(w.astype(np.float16)), xp.asarray(bias)
        self.table = sb.block_table(mask, BLOCK)
        self.stack = sb.stack_from_image(self.image, self.table)
        self.sites = sb.dense_to_sparse(self.image, mask=mask)
        self.blocks, self.number = len(self.stack), self.sites.coordinates.number()

    def at_blocks(self):
        """Return the stack of the convolution."""
        return sb.stack_conv2d(self.stack, self.weights, self.table, padding=1, activation="relu")

    def at_sites(self):
        """Return the features of the convolution."""
        return sb.submanifold_conv(self.sites, self.weights, activation="relu").features

    def check(self):
        """Raise unless both results agree at the sites, up to the rounding of their sums."""
        after = self.table.after_conv(3, 1, 1)
        wide = [abs(a).astype(np.float32) for a in (self.image, self.w, self.bias)]
        terms = int(np.prod(self.w.shape[:3])) + 1
        bound = sb.conv2d(*wide[:2], padding="SAME", bias=wide[2], precision="ieee")
        bound *= 2 * terms * np.finfo(np.float32).eps + float(np.finfo(np.float16).eps)
        bound += float(np.finfo(np.float16).tiny)
        there = sb.stack_from_image(self.mask, after).astype(bool)
        result = self.sites.replace(self.at_sites()).dense()
        error = abs(
            self.at_blocks().astype(np.float32)
            - sb.stack_from_image(result, after).astype(np.float32)
        )
        error, bound = error * there, sb.stack_from_image(bound, after)
        if not (error <= bound).all():
            raise AssertionError("blocks and sites differ beyond rounding")


def main(arguments=None):
    """Time all cases; print and write their rows."""
    import cupy

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help=f"folder of {FILE}")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    options = parser.parse_args(arguments)
    columns = machine.describe(cupy, None)
    folder = machine.results_folder(columns, False, options.out)
    stream = cupy.cuda.Stream(non_blocking=True)
    clock = CupyClock(cupy, stream, options.quick)
    with stream, Writer(folder / FILE) as writer:
        for channels, size in itertools.product(CHANNELS, SIZES):
            blocks = None
            for layout, occupancy in itertools.product(LAYOUTS, OCCUPANCIES):
                case = Case(cupy, size, channels, occupancy, layout)
                case.check()
                if blocks is None:  # takes as long, however full the blocks are
                    blocks = clock.time(Contender(OURS, [case.at_blocks]), case.stack.nbytes)
                sites = clock.time(Contender(OURS, [case.at_sites]), case.stack.nbytes)
                for row in rows_of(columns, case, layout, occupancy, blocks, sites):
                    writer.write(row)
    return 0


def rows_of(columns, case, layout, occupancy, blocks, sites):
    """Yield the rows of a case, and print it."""
    _, size, _, channels = case.image.shape
    print(f"{size:5} pixels {channels:4} channels {layout:>10} {occupancy:5.0%}: blocks "
          f"{blocks.us:7.2f} us, {case.number:7} sites {sites.us:7.2f} us", flush=True)  # fmt: skip
    for variant, timing, count in (
        ("stack_conv2d", blocks, case.blocks), ("submanifold_conv", sites, case.number)
    ):  # fmt: skip
        yield Row(
            **columns, op="blocks_or_sites", suite=layout, shape=times_sign(case.image.shape),
            dtype="float16", block=times_sign((BLOCK, BLOCK)), mask=layout, density=occupancy,
            blocks=count, variant=variant, implementation=OURS, timed_by=timing.timed_by,
            us=timing.us, us_p10=timing.p10, us_p90=timing.p90, bytes=None, gb_per_s=None,
            percent_of_copy=None, original_us=None, ratio_to_original=None, note="",
        )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
