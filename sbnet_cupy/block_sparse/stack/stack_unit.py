"""A residual unit on a stack of blocks by one kernel, where its layers would be two or three.

For what launches convolutions of a stack itself. Kernel: cuda_src/block_sparse/stack/stack_unit.cu

    unit = StackUnit(...)                             sizes, see stack_unit_plan.py
    missing_unit(unit, current_device())              None, or why there is no kernel
    run = prepare_stack_unit(unit)                    keep it: it costs more than a call
    run(x, packed1, packed2, packed3, residual, bin_counts, active_block_indices, grid, out)

``packed`` are weights, scale and bias of each layer as ``prepare_stack_pack`` packs them; packed3
and the residual may be None. The rest is as in stack_launch.py.
"""

from ...core import launch as kernels
from ...core.device import current_device
from .stack_unit_plan import THREADS, plan_unit


def prepare_stack_unit(unit, settled=False, clear_rows=True, plan=None):
    """Return the launch of a residual unit; options as for ``prepare_stack_conv``."""
    plan = plan or plan_unit(unit, current_device())
    return kernels.prepare(
        "block_sparse/stack/stack_unit",
        "stack_unit",
        plan.template(unit),
        plan.tiles(unit, unit.rows),
        THREADS,
        9,
        (
            unit.rows, unit.images, *unit.grid, unit.channels, unit.channels_out, *unit.block,
            *unit.image, int(settled), int(clear_rows),
        ),
        shared=plan.shared_bytes(unit),
        persistent=True,
        dependent=True,
    )  # fmt: skip
