"""The launch that packs the weights of a residual unit, of images and of stacks."""

from ...core import launch as kernels
from ...core.compile import cpp_name
from ...core.packed import Pack
from ..background import with_background


def prepare_unit_pack(case, config, dtype, image_bytes=0):
    """Return what packs the arrays of a BottleneckWeights, with tables of a dtype.

    On the way it can write so many bytes of a result.
    """
    each = config.packed_bytes(case)
    grid = (-(-each // 4096), config.cluster)
    launch = kernels.prepare(
        "block_sparse/bottleneck/fused_bottleneck",
        "pack_bottleneck",
        (*config.pack_template(case), cpp_name(dtype, "weights.scale1")),
        with_background(grid, image_bytes) if image_bytes else grid,
        256,
        12,
        (case.channels, case.channels_mid, image_bytes),
    )
    return Pack(launch, each * config.cluster, 3, 6, dtype, background=True)
