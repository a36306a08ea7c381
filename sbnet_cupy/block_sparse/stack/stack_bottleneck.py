"""A pre-activation residual unit on a stack of blocks by one kernel, where it would be four.

For what launches layers of a stack itself. Kernel: cuda_src/block_sparse/stack/stack_bottleneck.cu

    unit = StackBottleneck(...)                       sizes, see stack_bottleneck_plan.py
    missing_bottleneck(unit, current_device())        None, or why there is no kernel
    pack = prepare_bottleneck_pack(unit)              packed = pack(*weights): bytes
    run = prepare_stack_bottleneck(unit)              keep it: it costs more than a call
    run(x, packed, bin_counts, active_block_indices, grid, out)

``weights`` are the arrays of a BottleneckWeights in their order, scales and shifts in float32. How
they are packed depends on the plan: ``pack_form`` names it. x and out are stacks, as in
stack_launch.py, and must share no memory.
"""

import numpy as np

from ...core import launch as kernels
from ...core.device import current_device
from ..bottleneck.packing import prepare_unit_pack
from .stack_bottleneck_plan import plan_bottleneck


def prepare_bottleneck_pack(unit, plan=None):
    """Return what packs the weights of a unit."""
    plan = plan or plan_bottleneck(unit, current_device())
    return prepare_unit_pack(unit.case, plan.config, np.dtype(np.float32))


def pack_form(unit, plan=None):
    """Return what names the form of the packed weights: plans of the same form share them."""
    plan = plan or plan_bottleneck(unit, current_device())
    return plan.config.pack_template(unit.case)


def prepare_stack_bottleneck(unit, settled=False, clear_rows=True, plan=None):
    """Return the launch of a residual unit; options as for ``prepare_stack_conv``."""
    plan = plan or plan_bottleneck(unit, current_device())
    return kernels.prepare(
        "block_sparse/stack/stack_bottleneck",
        "stack_bottleneck",
        plan.template(unit),
        plan.tiles(unit, unit.rows) * plan.config.cluster,
        plan.config.threads,
        6,
        (
            unit.rows, unit.images, *unit.grid, unit.channels, *unit.block, *unit.image,
            int(settled), int(clear_rows),
        ),
        shared=plan.shared_bytes(unit),
        persistent=True,
        dependent=True,
        cluster=plan.config.cluster,
    )  # fmt: skip
