"""How the weights of a fused convolution are packed."""

from ...core import launch as kernels
from ...core.compile import cpp_name
from ...core.packed import Pack, dtype_of_tables
from ...dense.packed_weights import steps_of_weights
from ..background import with_background


def prepare_pack(case, plan, w_format, weights, image_bytes):
    """Return what packs w, scale and bias, which are specs; see pack_weights in fused_conv.cu.

    On the way it can write so many bytes of a result.
    """
    w, *tables = weights
    dtype = dtype_of_tables(w.dtype, tables)
    slices = plan.slices(case)
    units = plan.chunks * plan.steps(case.kernel) * 2 * plan.slice
    steps = steps_of_weights(w_format, *case.kernel, case.channels, case.channels_out)
    launch = kernels.prepare(
        "block_sparse/conv/fused_conv",
        "pack_weights",
        (*plan.pack_template(case), cpp_name(dtype, "bias")),
        with_background((-(-units // 256), slices), image_bytes),
        256,
        6,
        (
            slices, plan.chunks, case.channels, case.channels_out, *steps,
            image_bytes,
        ),
    )  # fmt: skip
    return Pack(launch, plan.packed_bytes(case), 1, 2, dtype, background=True)
