"""fused_conv: 3x3 convolutions at the active blocks, against cuDNN and the stack of blocks."""

from functools import partial

import numpy as np

import sbnet_cupy as sb
from benchmarks.harness.exact import convolution
from benchmarks.harness.fused import as_tensor, compile_kernels, fused_works
from benchmarks.harness.fused_cases import fused_cases
from benchmarks.harness.inputs import fill
from benchmarks.harness.timing import Contender

OP = "fused_conv"
DTYPES = ("float16", "bfloat16", "tf32", "float32")


def cases(session):
    """Return what is measured."""
    return fused_cases(OP, session, DTYPES)


def prepare(session, cases):
    """Compile the kernels of all cases."""
    compile_kernels(session, cases, Conv)


def works(case, session):
    """Yield (density, active blocks, workload) of a case."""
    return fused_works(case, session, Conv)


class Conv:
    """A 3x3 convolution of as many channels as its images have."""

    def __init__(self, session, case):
        self.session, self.xp, self.precision = session, session.xp, case.precision
        channels = case.shape[3]
        shape = (3, 3, channels, channels)
        self.w = fill(self.xp.empty(shape, case.array_dtype), self.xp, seed=500)
        if self.w.dtype == np.float32:
            self.w *= np.float32(0.7310586)
        self.packed = sb.PackedWeights(self.w, precision=self.precision)
        self.note = f"{channels} to {channels}"

    def call(self, x, *, blocks, active, out=None):
        """Convolve at the active blocks."""
        bsize, expected = blocks.params.bsize_out, blocks.count
        return sb.fused_conv(x, self.packed, *active, bsize=bsize, expected=expected, out=out)

    def gather(self, x, *, blocks, out):
        """Do the same through a stack of blocks."""
        return sb.sparse_conv2d(
            x, self.w, blocks.active, blocks.params,
            precision=self.precision, method="gather", out=out,
        )  # fmt: skip

    def exact(self, x, arithmetic):
        """Return the exact result, with bounds."""
        return convolution(x, self.w, arithmetic, self.xp)

    def dense(self, images):
        """Return contenders for the whole image, in both layouts of cuDNN."""
        torch = self.session.torch
        w = as_tensor(self.session, self.w).permute(3, 2, 0, 1)
        found = []
        for layout in (torch.channels_last, torch.contiguous_format):
            kernel = w.contiguous(memory_format=layout)
            calls = []
            for image in images:
                x = as_tensor(self.session, image).permute(0, 3, 1, 2)
                x = x.contiguous(memory_format=layout)  # a view of NHWC, a copy for NCHW
                calls.append(partial(torch.nn.functional.conv2d, x, kernel, padding=1))
            name = "channels_last" if layout == torch.channels_last else "NCHW"
            found.append(Contender(f"torch cuDNN, {name}", calls, "torch", note=self.note))
        return found
