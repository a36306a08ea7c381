"""Launch convolutions of a stack one behind the other, thousands of times: a program of its own.

    python -m on_gpu.launch_chain LAUNCHES

The plans are those in which a warp asks the copy engine for what others multiply, in a ring with
fewer stages than a tile has chunks. Each launch begins while the one ahead still runs.
"""

import functools
import importlib
import itertools
import sys

import numpy as np

from sbnet_cupy import fused_conv
from sbnet_cupy.block_sparse.conv import wide
from sbnet_cupy.block_sparse.stack.stack_conv_plan import candidates
from sbnet_cupy.block_sparse.stack.stack_launch import prepare_stack_conv, prepare_stack_pack
from sbnet_cupy.block_sparse.stack.stack_patch_plan import patch_candidates
from sbnet_cupy.core.device import current_device
from sbnet_cupy.core.operator import clear_plans
from support.fused_cases import Case
from support.stack_on_host import Blocks, ConvCase

TOGETHER = 100  # launches between two waits for the device
POINTWISE = ConvCase(
    blocks=Blocks(1, (100, 176), (4, 4), share=0.11), channels=128, channels_out=512,
    kernel=(1, 1), residual=False, shortcut=(256, (2, 2)),
)  # fmt: skip
WINDOWS = ConvCase(
    blocks=Blocks(1, (200, 352), (8, 8), share=0.11), channels=128, channels_out=64, residual=False
)  # fmt: skip


def chains(cupy):
    """Yield what launches each plan, the stack that it writes, and what is expected of it."""
    device = current_device()
    for case in (POINTWISE, WINDOWS):
        table = case.blocks.table()
        conv = case.sizes(len(table[1]))
        lists, expected = [cupy.asarray(array) for array in table], cupy.asarray(case.expected())
        x, w, scale, bias, _ = case.arrays()
        x, w = (cupy.asarray(array.astype(np.float16)) for array in (x, w))
        packed = prepare_stack_pack(conv, "HWIO")(w, cupy.asarray(scale), cupy.asarray(bias))
        also = (None,)
        if case.shortcut:
            second, kernel, its_bias = map(cupy.asarray, case.stored_shortcut())
            alone = conv._replace(channels=second.shape[3], kernel=(1, 1), shortcut=None)
            also = second, prepare_stack_pack(alone, "HWIO")(kernel, None, its_bias)
            plans = [p for p in candidates(conv, device) if p.split == 1 < p.blocks]
            plans = [p for p in plans if p.stages < conv.chunks]
        else:
            plans = list(patch_candidates(conv, device))[:2]
        assert plans
        cupy.cuda.Device().synchronize()  # what is packed may be read without a wait
        for plan in plans:
            run = prepare_stack_conv(conv, True, False, plan)
            y = cupy.empty((conv.rows, *conv.block_out, conv.channels_out), x.dtype)
            yield functools.partial(run, x, packed, *also, *lists, y), y[: len(expected)], expected


IMAGES = (  # one warp that asks for boxes, and three
    Case(image=(1, 100, 176, 512), channels=64, kernel=(1, 1), bsize=(8, 8), dtype="float16",
         packed=True),
    Case(image=(1, 100, 176, 512), channels=64, kernel=(1, 1), bsize=(2, 2), dtype="float16",
         packed=True),
)  # fmt: skip


def image_chains(cupy):
    """Yield the same of fused_conv, whose blocks are looked up."""
    module = importlib.import_module("sbnet_cupy.block_sparse.conv.fused_conv")
    module.is_for_wide = lambda *given: True
    for case in IMAGES:
        arguments, keywords = case.arguments(case.arrays(), cupy.asarray)
        expected = cupy.asarray(np.where(case.active()[..., None], case.exact(), 0))
        plans = {}

        def choose(conv, device, plans=plans):
            for plan in candidates(conv, device):
                if (plan.bulk or plan.direct) and plan.tile in ((64, 64), (128, 64)):
                    plans[plan.bulk, plan.tile] = plan
            return next(iter(plans.values()))

        wide.plan_stack_conv = choose
        clear_plans()
        fused_conv(*arguments, **keywords)
        for plan in plans.values():
            wide.plan_stack_conv = lambda *given, plan=plan: plan
            clear_plans()
            y = cupy.zeros(case.shape, case.type)
            yield functools.partial(fused_conv, *arguments, **keywords, out=y), y, expected


def main(launches):
    """Launch all plans; raise AssertionError if a result is not what is expected."""
    import cupy

    for launch, y, expected in itertools.chain(chains(cupy), image_chains(cupy)):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for i in range(launches):
                launch()
                if i % TOGETHER == 0:
                    stream.synchronize()
            stream.synchronize()
        assert (y == expected).all()
    print("done")


if __name__ == "__main__":
    main(int(sys.argv[1]))
