"""What is measured of the fused ops: stages of the paper, masks, dtypes, a sweep of densities."""

import dataclasses
import importlib.util
from functools import partial
from typing import NamedTuple

import numpy as np

from benchmarks.harness.cases import Case
from benchmarks.harness.exact import Arithmetic
from benchmarks.harness.rows import DENSE
from sbnet_cupy.core import libraries


class Stage(NamedTuple):
    """A stage of the paper's network."""

    height: int
    width: int
    channels: int  # of a 3x3 convolution, in and out
    unit: tuple[int, int]  # of a residual unit: in and out, and between
    tile: int  # rows and columns of output pixels in a block


STAGES = (
    Stage(400, 700, 24, (96, 24), 16),
    Stage(200, 350, 48, (192, 48), 8),
    Stage(100, 175, 64, (256, 64), 8),
    Stage(50, 88, 96, (384, 96), 8),
)
MASKS = (("top-left", 0.1), ("top-left", 0.25), ("top-left", 0.5), ("all", 1.0), ("blobs", 0.1))
FEW_MASKS = (("top-left", 0.1), ("all", 1.0))
SWEPT = (0, 2)  # stages of the density sweep
SWEEP = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SWEEP_GATHERED = (0.1, 0.5, 1.0)  # where the route through a stack is timed as well
# Sets of inputs and results in rotation: large images come from memory, small ones from the L2
# cache, as they do between the layers of a network. The dense baselines rotate the same sets.
MOST_SETS = 6


@dataclasses.dataclass(frozen=True)
class FusedCase(Case):
    """A case of a fused op; its dtype is also "tf32": float32 arrays, products of 11 bits."""

    middle: int = 0  # channels inside a residual unit

    @property
    def array_dtype(self):
        """Dtype of the arrays."""
        if self.dtype == "bfloat16":
            return libraries.bfloat16("dtype")
        return np.dtype("float32" if self.dtype == "tf32" else self.dtype)

    @property
    def precision(self):
        """The ``precision`` that the op takes."""
        return {"tf32": "tf32", "float32": "ieee"}.get(self.dtype)

    @property
    def arithmetic(self):
        """How the op rounds."""
        return Arithmetic(self.array_dtype.name, tf32=self.dtype == "tf32")

    @property
    def shared(self):
        """What this case has in common with all of its stage and dtype."""
        return dataclasses.replace(self, suite="", mask="", density=0.0, peers=False)


def fused_cases(op, session, dtypes):
    """Return the cases of a fused op: none on a CPU, where NumPy arrays take another route."""
    if session.cpu:
        return []
    if session.quick:
        dtypes = dtypes[:1]
    if "bfloat16" in dtypes and importlib.util.find_spec("ml_dtypes") is None:
        session.warnings.append(f"{op}: no ml_dtypes, so nothing in bfloat16")
        dtypes = [dtype for dtype in dtypes if dtype != "bfloat16"]
    found = []
    for number, stage in enumerate(STAGES):
        if session.quick and stage is not STAGES[-1]:
            continue
        for dtype in dtypes:
            case = partial(stage_case, op, stage, dtype)
            found.append(case("stages", DENSE, 1.0))
            for mask in _masks(session):
                peers = mask == ("top-left", 0.1) or (mask[0], dtype) == ("all", "float16")
                found.append(case("stages", *mask, peers=peers))
            if number in SWEPT and dtype == "float16":
                found += [
                    case("density", "top-left", share, peers=share in SWEEP_GATHERED)
                    for share in SWEEP
                ]
    return found


def stage_case(op, stage, dtype, suite, mask, density, peers=False):
    """Return the case of one mask."""
    channels, middle = (stage.channels, 0) if op == "fused_conv" else stage.unit
    shape, block = (1, stage.height, stage.width, channels), (stage.tile + 2,) * 2
    return FusedCase(op, suite, shape, dtype, block, mask, density, peers=peers, middle=middle)


def _masks(session):
    if session.quick:
        return FEW_MASKS
    return MASKS + ((("scan", 0.0),) if session.points is not None else ())
