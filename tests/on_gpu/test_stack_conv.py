"""The convolutions of a stack on a GPU: with wgmma and clusters."""

import numpy as np
import pytest

from sbnet_cupy.block_sparse.stack.stack_conv_plan import candidates
from sbnet_cupy.block_sparse.stack.stack_launch import prepare_stack_conv, prepare_stack_pack
from sbnet_cupy.block_sparse.stack.stack_patch_plan import patch_candidates
from sbnet_cupy.core.device import current_device
from support.stack_on_host import FIRST, HALVED, LAST, Blocks, ConvCase

pytestmark = pytest.mark.gpu

CASES = [
    ConvCase(blocks=Blocks(image=(40, 33), block=(8, 8)), channels=64, channels_out=128),
    ConvCase(blocks=Blocks(image=(16, 17), block=(2, 2)), channels=512, channels_out=136),
    ConvCase("BFloat16", Blocks(image=(13, 11), block=(1, 1)), 256, 64, dilation=(2, 2)),
    ConvCase(blocks=Blocks(block=(4, 4)), channels=1024, channels_out=64, kernel=(1, 1)),
    ConvCase(blocks=Blocks(block=(4, 4)), channels=72, channels_out=72, strides=(2, 2)),
    ConvCase("Half", Blocks(block=(8, 8)), 64, 256, (1, 1), (2, 2), residual=False),
    ConvCase("float", Blocks(block=(2, 2)), 132, 64, (2, 3)),
    ConvCase("float", Blocks(block=(4, 4)), 128, 200, (1, 1), activation=0),
    ConvCase(blocks=Blocks(block=(4, 4)), channels=128, channels_out=64, activation=HALVED),
    # The activation, then the sum: of whole blocks, of K that is split, and in patches.
    ConvCase(blocks=Blocks(block=(4, 4)), channels=256, channels_out=64, activation=FIRST + HALVED),
    ConvCase(blocks=Blocks(image=(40, 33), block=(8, 8)), channels=64, activation=FIRST + 5),
    ConvCase(
        "Half", Blocks(block=(4, 4)), 256, 200, (1, 1), residual=False, shortcut=(512, (2, 2))
    ),
    ConvCase(
        "BFloat16", Blocks(block=(2, 2)), 512, 136, residual=False, shortcut=(192, (2, 2))
    ),
    ConvCase(blocks=Blocks(block=(4, 4)), channels=240, channels_out=240, groups=10),
    ConvCase("BFloat16", Blocks(block=(8, 8)), 512, 256, strides=(2, 2), groups=32),
    # Patches of 4 units of channels, and of a chunk and 2 more.
    ConvCase(blocks=Blocks(image=(40, 33), block=(16, 8)), channels=32, channels_out=40),
    ConvCase("BFloat16", Blocks(image=(40, 33), block=(8, 16)), 80, 64, (5, 3), dilation=(1, 2)),
    # Few output channels, in half of a panel: in patches of one and of several blocks.
    ConvCase(blocks=Blocks(image=(40, 45), block=(16, 16)), channels=32, channels_out=24),
    ConvCase(
        "BFloat16", Blocks(image=(40, 33), block=(8, 8)), 64, 3, (5, 3), dilation=(5, 9),
        residual=False,
    ),
    ConvCase(blocks=Blocks(image=(200, 200), block=(16, 8)), channels=80, channels_out=32),
    # Parts of other stacks: by tables, by tensor maps, in patches.
    ConvCase(blocks=Blocks(block=(4, 4)), channels=72, channels_out=136, beside=(8, 72)),
    ConvCase("BFloat16", Blocks(block=(4, 4)), 136, 64, (1, 1), beside=(64, 8)),
    ConvCase(blocks=Blocks(image=(40, 33), block=(8, 8)), channels=64, beside=(64, 0)),
    ConvCase("float", Blocks(block=(4, 4)), 256, 64, beside=(4, 12)),
    ConvCase(
        "BFloat16", Blocks(block=(4, 4)), 256, 136, (1, 1), residual=False,
        shortcut=(192, (2, 2)), beside=(8, 24),
    ),
    ConvCase(blocks=Blocks(block=(4, 4)), channels=64, channels_out=72, beside=(8, 64),
             residual=False, shortcut=(128, (2, 2))),
    # Channels that become pixels: by tables, tensor maps, patches.
    ConvCase(blocks=Blocks(block=(4, 4)), channels=72, channels_out=160, residual=False,
             unfolded=(2, 2)),
    ConvCase("BFloat16", Blocks(block=(4, 4)), 512, 128, (1, 1), residual=False, unfolded=(2, 2),
             beside=(32, 8)),
    ConvCase(blocks=Blocks(image=(40, 33), block=(8, 8)), channels=64, channels_out=144,
             residual=False, unfolded=(2, 3), beside=(0, 24), activation=LAST + 1),
    ConvCase("float", Blocks(block=(2, 4)), 256, 64, (2, 2), residual=False, unfolded=(4, 2)),
    # Channels that are scaled and shifted behind all else.
    ConvCase(blocks=Blocks(block=(4, 4)), channels=72, channels_out=136, activation=LAST + 1),
    ConvCase(
        "BFloat16", Blocks(image=(40, 33), block=(8, 8)), 64, 40, activation=LAST + FIRST + 5
    ),
    ConvCase("float", Blocks(block=(4, 4)), 256, 72, (1, 1), activation=LAST + HALVED),
    # Tiles of several rounds, on the GPUs of today: those of the last one are cut.
    ConvCase(blocks=Blocks(image=(200, 200)), channels=64, channels_out=136, dilation=(2, 2)),
]


def is_chosen(plan):
    """Whether a plan is one of those that differ most: they take seconds to compile."""
    small = plan.tile == (64, 64) and plan.split in (1, 2, 8)
    large = plan.tile in ((64, 256), (128, 128), (192, 64), (192, 128), (256, 128))
    large = large and plan.split == 1 and not plan.results
    return small or large or (plan.tile, plan.split) == ((64, 128), 4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plans_are_exact(case, require):
    """Sums of whole numbers, with pixels outside the image and rows past the count poisoned."""
    require("gpu")
    import cupy

    device, rows = current_device(), len(case.blocks.table()[1])
    conv = case.sizes(rows)
    plans = [p for p in candidates(conv, device) if is_chosen(p) and p.blocks in (1, p.teams)]
    if not case.shortcut:
        patches = list(patch_candidates(conv, device))
        plans += patches[:2] + [p for p in patches if p.columns == 32]
    assert plans  # each is compared by case.run
    for settled, plan in ((s, p) for p in plans for s in (False, True)):

        def launch(x, w, scale, bias, residual, table, out, settled=settled, plan=plan):
            given = [None if a is None else cupy.asarray(a) for a in (w, scale, bias)]
            x, residual = (case.part(a, cupy.asarray) for a in (x, residual))
            packed = prepare_stack_pack(conv, "HWIO")(*given)
            y, lists = cupy.asarray(out), map(cupy.asarray, table)
            run = prepare_stack_conv(conv, settled, case.clears(settled), plan)
            if case.shortcut:
                also, kernel, its_bias = map(cupy.asarray, case.stored_shortcut())
                pointwise = conv._replace(channels=also.shape[3], kernel=(1, 1), shortcut=None)
                pack = prepare_stack_pack(pointwise, "HWIO")
                also = case.part(cupy.asnumpy(also), cupy.asarray)
                run(x, packed, also, pack(kernel, None, its_bias), *lists, y)
            else:
                run(x, packed, residual, *lists, y, *map(cupy.asarray, case.last()))
            np.copyto(out, cupy.asnumpy(y))

        case.run(launch, settled)
