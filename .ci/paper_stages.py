"""The instantiations of the fused ops for the paper's four stages, as each GPU's planner has them.

They depend on the GPU: on its shared memory, its multiprocessors and its instructions.
"""

import itertools

from sbnet_cupy.block_sparse.bottleneck.config import UnitCase, configure_bottleneck
from sbnet_cupy.block_sparse.conv.config import Case, configure_conv
from sbnet_cupy.block_sparse.stack.stack_image_conv2d import blocks_of
from sbnet_cupy.core.device import Device

CONV = "block_sparse/conv/fused_conv"
UNIT = "block_sparse/bottleneck/fused_bottleneck"
_KIB = 1 << 10
DEVICES = {  # of each architecture the most common
    "sm_75": Device(40, 64 * _KIB, hopper=False, bulk_copy=False, tensor_floats=False),
    "sm_80": Device(108, 163 * _KIB, hopper=False, bulk_copy=False),
    "sm_86": Device(84, 99 * _KIB, hopper=False, bulk_copy=False),
    "sm_89": Device(128, 99 * _KIB, hopper=False, bulk_copy=False),
    "sm_90a": Device(132, 227 * _KIB, hopper=True, bulk_copy=True),
    "sm_100": Device(148, 227 * _KIB, hopper=False, bulk_copy=True),
    "sm_120": Device(170, 99 * _KIB, hopper=False, bulk_copy=True),
}
# Output pixels, block, channels of the 3x3 convolutions and of the units around them.
STAGES = (
    (400 * 700, (16, 16), 24, 96),
    (200 * 350, (8, 8), 48, 192),
    (100 * 175, (8, 8), 64, 256),
    (50 * 88, (6, 6), 96, 384),
)
OTHER_UNITS = ((8, 8), (40, 20), (64, 64), (64, 128), (200, 56), (512, 128))
NUMBERS = (("Half", 2, False), ("BFloat16", 2, False), ("float", 4, False), ("float", 4, True))
BLOCKS = (0, 100, 1 << 30)  # few, one for each multiprocessor, many


def instantiations(arch):
    """Return the distinct (stem, kernel, template) for an architecture."""
    found, device = {}, DEVICES[arch]
    for stage, number, blocks in itertools.product(STAGES, NUMBERS, BLOCKS):
        pixels, bsize, channels, _ = stage
        case = Case(*number, channels, channels, (3, 3), (1, 1), True, True, 0)
        plan = configure_conv(case, blocks, bsize, pixels, device)
        for key in (
            (CONV, "fused_conv", plan.template(case)),
            (CONV, "pack_weights", plan.pack_template(case)),
        ):
            if launched(arch, *key):
                found[key] = None
    return list(found) + _units(arch)


def _units(arch):
    """Those of fused_bottleneck, of channels whose weights fit the shared memory."""
    found, units = {}, [(wide, middle) for *_, middle, wide in STAGES]
    numbers = [number[:2] for number in NUMBERS if not number[2]]
    for channels, number, tight, blocks in itertools.product(
        (*units, *OTHER_UNITS), numbers, (False, True), BLOCKS
    ):
        case = UnitCase(*number, *channels, tight)
        plan = configure_bottleneck(case, blocks, (8, 8), DEVICES[arch])
        if plan is None or (tight and case.element_bytes != 2):
            continue
        for key in (
            (UNIT, "fused_bottleneck", plan.template(case)),
            (UNIT, "pack_bottleneck", plan.pack_template(case)),
        ):
            if launched(arch, *key):
                found[key] = None
    return list(found)


def launched(arch, stem, kernel, template):
    """Whether the ops would launch an instantiation on the GPUs of an architecture."""
    if kernel in ("stack_conv", "stack_conv_pipelined"):
        if (kernel == "stack_conv_pipelined") != DEVICES[arch].bulk_copy:
            return False
    elif kernel == "stack_image_conv2d":
        element, channels, pixels, columns, *_, blocks = template
        if blocks != blocks_of(64 * pixels, 8 * columns, channels, DEVICES[arch]):
            return False
        return DEVICES[arch].tensor_floats or element == "Half"
    elif kernel not in ("fused_conv", "fused_bottleneck"):
        return True
    if DEVICES[arch].tensor_floats:
        return True
    engine, element = template[:2]
    return engine == "Fma" or element == "Half"
