"""How the weights of a fused convolution are packed."""

import math

from ...core import launch as kernels
from ...core.compile import cpp_name
from ...core.packed import Pack, dtype_of_tables


def prepare_pack(case, plan, w_format, weights):
    """Return what packs w, scale and bias, which are specs; see pack_weights in fused_conv.cu."""
    w, *tables = weights
    dtype = dtype_of_tables(w.dtype, tables)
    slices = plan.slices(case)
    units = plan.chunks * plan.steps(case.kernel) * 2 * plan.slice
    sizes = dict(zip("HWIO", (*case.kernel, case.channels, case.channels_out), strict=True))
    steps = {
        letter: math.prod(sizes[inner] for inner in w_format[i + 1 :])
        for i, letter in enumerate(w_format)
    }
    launch = kernels.prepare(
        "block_sparse/conv/fused_conv",
        "pack_weights",
        (*plan.pack_template(case), cpp_name(dtype, "bias")),
        (-(-units // 256), slices),
        256,
        4,
        (slices, plan.chunks, case.channels, case.channels_out, *map(steps.get, "HWIO")),
    )
    return Pack(launch, plan.packed_bytes(case), 1, 2, dtype)
