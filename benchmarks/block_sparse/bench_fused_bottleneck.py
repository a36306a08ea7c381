"""fused_bottleneck: residual units at the active blocks, against PyTorch and torch.compile."""

from dataclasses import replace
from functools import partial

import numpy as np

import sbnet_cupy as sb
from benchmarks.harness.exact import residual_unit
from benchmarks.harness.fused import as_tensor, compile_kernels, fused_works
from benchmarks.harness.fused_cases import fused_cases
from benchmarks.harness.timing import Contender

OP = "fused_bottleneck"
DTYPES = ("float16", "bfloat16", "tf32")
EPSILON = 2.0**-8  # of the dense unit's batch norms: 1 - EPSILON is exact in every dtype


def cases(session):
    """Return what is measured."""
    return fused_cases(OP, session, DTYPES)


def prepare(session, cases):
    """Compile the kernels of all cases."""
    compile_kernels(session, cases, Bottleneck)


def works(case, session):
    """Yield (density, active blocks, workload) of a case."""
    return fused_works(case, session, Bottleneck)


class Bottleneck:
    """A residual unit: batch norm, ReLU and convolution, of 1x1, 3x3 and 1x1, plus its input.

    Scales and shifts are of the images' dtype, as those of a PyTorch module after ``half()``.
    """

    def __init__(self, session, case):
        self.session, self.xp, self.precision = session, session.xp, case.precision
        cin, cmid = case.shape[3], case.middle
        dtype = case.array_dtype
        drawn = sb.BottleneckWeights.random(cin, cmid, xp=self.xp, dtype=dtype.name, seed=501)
        self.weights = with_tables(drawn, lambda table: table.astype(dtype))
        # The same numbers, as the route through a stack takes them without converting.
        self.weights_of_stack = with_tables(self.weights, lambda table: table.astype(np.float32))
        self.packed = sb.PackedBottleneck(self.weights, precision=self.precision)
        self.note = f"unit {cin}-{cmid}-{cin}"

    def call(self, x, *, blocks, active, out=None):
        """Apply the unit at the active blocks."""
        bsize, expected = blocks.params.bsize_out, blocks.count
        return sb.fused_bottleneck(
            x, self.packed, *active, bsize=bsize, precision=self.precision, expected=expected,
            out=out,
        )  # fmt: skip

    def gather(self, x, *, blocks, out):
        """Do the same through a stack of blocks."""
        return sb.sparse_res_block_bottleneck(
            x, self.weights_of_stack, blocks.active, blocks.params,
            precision=self.precision, method="gather", out=out,
        )  # fmt: skip

    def exact(self, x, arithmetic):
        """Return the exact result, with bounds."""
        return residual_unit(x, self.weights, arithmetic, self.xp)

    def dense(self, images):
        """Return contenders for the whole image: eager in both layouts, and compiled.

        ``torch.compile`` in its default mode, on NHWC arrays, which it keeps as they are.
        """
        torch = self.session.torch
        torch.compiler.reset()  # or the third stage would meet the limit of recompilations
        nhwc = [as_tensor(self.session, image).permute(0, 3, 1, 2) for image in images]
        nchw = [x.contiguous() for x in nhwc]
        unit = dense_unit(torch)
        return [
            self._contender("torch eager, channels_last", unit, nhwc, torch.channels_last),
            self._contender("torch eager, NCHW", unit, nchw, torch.contiguous_format),
            self._contender(
                "torch.compile, channels_last",
                torch.compile(unit, dynamic=False), nhwc, torch.channels_last,
            ),
        ]  # fmt: skip

    def _contender(self, name, unit, images, layout):
        kernels = [
            as_tensor(self.session, w).permute(3, 2, 0, 1).contiguous(memory_format=layout)
            for w in (self.weights.w1, self.weights.w2, self.weights.w3)
        ]
        norms = [self._norm(step) for step in "123"]

        def call(x):
            with self.session.torch.no_grad():  # checked as it is timed: one compilation
                return unit(x, kernels, norms)

        return Contender(name, [partial(call, x) for x in images], "torch", note=self.note)

    def _norm(self, step):
        """Return mean, variance, weight and bias that amount to scale and shift."""
        torch = self.session.torch
        scale, shift = (
            as_tensor(self.session, getattr(self.weights, f"{name}{step}"))
            for name in ("scale", "shift")
        )
        return torch.zeros_like(scale), torch.full_like(scale, 1 - EPSILON), scale, shift


def with_tables(weights, convert):
    """Return the weights with each scale and shift converted."""
    names = [f"{name}{step}" for step in "123" for name in ("scale", "shift")]
    return replace(weights, **{name: convert(getattr(weights, name)) for name in names})


def dense_unit(torch):
    """Return the residual unit as PyTorch's users write it, on images [N, C, H, W]."""
    functional = torch.nn.functional

    def unit(x, kernels, norms):
        t = x
        for kernel, norm in zip(kernels, norms, strict=True):
            t = torch.relu(functional.batch_norm(t, *norm, eps=EPSILON))
            t = functional.conv2d(t, kernel, padding=kernel.shape[2] // 2)
        return x + t

    return unit
