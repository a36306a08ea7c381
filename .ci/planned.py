"""The instantiations that each GPU's planners choose: for the paper's stages, and for ResNet-50.

They depend on the GPU: on its shared memory, its multiprocessors and its instructions. Of those by
wgmma the tests on a CPU run a few.
"""

import itertools

from sbnet_cupy.block_sparse.bottleneck.config import UnitCase, configure_bottleneck
from sbnet_cupy.block_sparse.conv.config import Case, configure_conv
from sbnet_cupy.block_sparse.stack.stack_bottleneck_plan import (
    StackBottleneck,
    missing_bottleneck,
    plan_bottleneck,
)
from sbnet_cupy.block_sparse.stack.stack_conv_plan import StackConv, plan_stack_conv
from sbnet_cupy.block_sparse.stack.stack_image_conv2d import ImageConv, blocks_of, candidates
from sbnet_cupy.core.arrays import vector_bytes
from sbnet_cupy.core.device import Device
from sbnet_cupy.dense.activation import ACTIVATIONS, scales_last
from sbnet_cupy.submanifold.site_conv_grad_plan import PIPELINED, WeightGradSizes
from sbnet_cupy.submanifold.site_conv_instances import (
    ELEMENT_BYTES,
    FmaPlan,
    SiteConvSizes,
    TilesPlan,
)
from sbnet_cupy.submanifold.site_conv_plan import (
    _SHARED_TILES,
    _TILINGS,
    alone,
    overlaps,
    plan_site_conv,
)

CONV = "block_sparse/conv/fused_conv"
UNIT = "block_sparse/bottleneck/fused_bottleneck"
STACK = "block_sparse/stack/stack_conv2d"
STEM = "block_sparse/stack/stack_image_conv2d"
STACK_UNIT = "block_sparse/stack/stack_bottleneck"
SITES = "submanifold/site_conv"
_KIB = 1 << 10
FOUR_WARPS = {"TileWgmma", "SplitWgmma", "WarpGroup"}  # that multiply together, by wgmma
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
ONE_OF_ALIKE = ("BFloat16",)  # which is compiled for one stage: elsewhere its code is Half's
BLOCKS = (0, 100, 1 << 30)  # few, one for each multiprocessor, many
# ResNet-50 on 800 x 1408 pixels: kernel, stride, channels in (of whole vectors) and out, and how
# many times smaller than the image the layer's input is.
RESNET_50 = (
    (7, 2, 8, 64, 1),
    (3, 1, 64, 64, 4), (1, 1, 64, 256, 4), (1, 1, 256, 64, 4), (3, 2, 128, 128, 4),
    (3, 1, 128, 128, 8), (1, 1, 128, 512, 8), (1, 1, 512, 128, 8),
    (3, 1, 256, 256, 16), (1, 1, 1024, 256, 16), (1, 1, 256, 1024, 16),
    (3, 1, 512, 512, 32), (1, 1, 2048, 512, 32), (1, 1, 512, 2048, 32),
)  # fmt: skip
IN_GROUPS = (3, 1, 128, 128, 4, 4)  # of ResNeXt-50: kernel, stride, channels, those of a group
RELU, GELU, MANY = 1, 3, 100_000  # numbers of activations, the last with most registers; sites
GRID, ROWS = (25, 44), (110, 1100)  # of blocks of 32 pixels; a tenth and all are active


def instantiations(arch):
    """Return the distinct (stem, kernel, template) for an architecture."""
    found, device = {}, DEVICES[arch]
    for stage, number, blocks in itertools.product(STAGES, NUMBERS, BLOCKS):
        pixels, bsize, channels, _ = stage
        if number[0] in ONE_OF_ALIKE and stage != STAGES[1]:
            continue
        case = Case(*number, channels, channels, (3, 3), (1, 1), True, True, 0)
        plan = configure_conv(case, blocks, bsize, pixels, device)
        for key in (
            (CONV, "fused_conv", plan.template(case)),
            (CONV, "pack_weights", (*plan.pack_template(case), case.element)),
        ):
            if launched(arch, *key):
                found[key] = None
    found = [*found, *_units(arch), *_stack_units(arch), *_stems(arch)]
    return found + _layers(arch) + _sites(arch)


def _units(arch):
    """Those of fused_bottleneck, of channels whose weights fit the shared memory."""
    found, units = {}, [(wide, middle) for *_, middle, wide in STAGES]
    numbers = [number[:2] for number in NUMBERS if not number[2]]
    for channels, number, tight, blocks in itertools.product(
        (*units, *OTHER_UNITS), numbers, (False, True), BLOCKS
    ):
        if number[0] in ONE_OF_ALIKE and channels != units[1]:
            continue
        case = UnitCase(*number, *channels, tight)
        plan = configure_bottleneck(case, blocks, (8, 8), DEVICES[arch])
        if plan is None or (tight and case.element_bytes != 2):
            continue
        tables = case.element if tight else "float"
        for key in (
            (UNIT, "fused_bottleneck", plan.template(case)),
            (UNIT, "pack_bottleneck", (*plan.pack_template(case), tables)),
        ):
            if launched(arch, *key):
                found[key] = None
    return list(found)


def _stems(arch):
    """Those of stack_image_conv2d with wgmma, for ResNet-50's first layer."""
    found, device = {}, DEVICES[arch]
    kernel, stride, _, channels_out, _ = RESNET_50[0]
    numbers = {"Half": (1, 3, 8), "BFloat16": (3,), "float": (3,)} if device.hopper else {}
    for element, rows in itertools.product(numbers, ROWS):
        for channels, wide in itertools.product(numbers[element], (channels_out, 32)):
            conv = ImageConv(
                element=element, rows=rows, images=1, grid=GRID, block=(32, 32),
                block_out=(32 // stride,) * 2, image=tuple(32 * n for n in GRID),
                image_out=tuple(32 // stride * n for n in GRID), channels=channels,
                channels_out=wide, kernel=(kernel,) * 2, strides=(stride,) * 2, dilation=(1, 1),
                pads=(kernel // 2,) * 2, activation=1, vectors_out=True,
            )  # fmt: skip
            for plan in candidates(conv, device):
                key = STEM, "stack_image_conv2d", plan.template(conv, by_words=channels < 8)
                if launched(arch, *key):
                    found[key] = None
    return list(found)


def _stack_units(arch):
    """Those of stack_bottleneck, for the paper's stages in blocks of 32 pixels of the image."""
    found, numbers = {}, {"Half": STAGES, "BFloat16": STAGES[2:3], "float": STAGES[1:3]}
    for element, rows in itertools.product(numbers, (29, 72, 286)):
        for stage in numbers[element]:
            block = 16 >> STAGES.index(stage)
            unit = StackBottleneck(
                element=element, rows=rows, images=1, grid=(13, 22), block=(block,) * 2,
                image=(13 * block, 22 * block), channels=stage[3], width=stage[2], expected=rows,
            )  # fmt: skip
            if missing_bottleneck(unit, DEVICES[arch]) is not None:
                continue
            plan = plan_bottleneck(unit, DEVICES[arch])
            found[STACK_UNIT, "stack_bottleneck", plan.template(unit)] = None
            pack = (*plan.config.pack_template(unit.case), "float")
            found[UNIT, "pack_bottleneck", pack] = None
    return list(found)


def _layers(arch):
    """Those of stack_conv2d, for the layers of ResNet-50; in other numbers for one of them."""
    found = {}
    numbers = {"Half": RESNET_50, "BFloat16": RESNET_50[1:2], "float": RESNET_50[1:2]}
    for element, rows in itertools.product(numbers, ROWS):
        for layer in numbers[element]:
            conv = _stack_conv(element, rows, *layer)
            also = [conv._replace(of_images=True)] if DEVICES[arch].bulk_copy else []  # fused_conv
            if layer[:4] == IN_GROUPS[:4]:
                also.append(conv._replace(group=IN_GROUPS[4:]))
            if element == "Half":  # written as a part of another stack, and as pixels
                also.append(conv._replace(out_part_of=2 * conv.channels_out))
            if element == "Half" and conv.strides == (1, 1) and rows == ROWS[0]:
                also.append(conv._replace(unfolded=(2, 2)))
            for each in (conv, *also):
                plan = plan_stack_conv(each, DEVICES[arch])
                key = STACK, plan.kernel, plan.template(each)
                if launched(arch, *key):
                    found[key] = None
    return list(found)


def _sites(arch):
    """Those of convolutions at sites, 3x3x3; in other numbers for some channels; 3x3; all tilings.

    Those of gradients of their weights by wgmma, too.
    """
    found = {}
    numbers = {"Half": (16, 32, 64, 96, 128, 256), "BFloat16": (64,), "float": (64, 128)}
    cases = [
        (element, sites, 27, c)
        for element, sites in itertools.product(numbers, (3000, 14_000, MANY))
        for c in numbers[element]
    ]
    cases += [("Half", 7000, 9, 32), ("BFloat16", 7000, 9, 32), ("float", 7000, 9, 16)]
    for element, sites, taps, c in cases:
        conv = SiteConvSizes(element, sites, sites, taps, c, c, 1, 1, element == "float", 16, 16)
        plan = plan_site_conv(conv, DEVICES[arch])
        for activation in (RELU, GELU) if element == "Half" and sites == MANY else (RELU,):
            key = SITES, plan.kernel, plan.template(conv._replace(activation=activation))
            if not isinstance(plan, FmaPlan) and launched(arch, *key):
                found[key] = None
    narrow = itertools.product(("Half", "float"), (3, 4, 5, 32), (32, 64), range(len(ACTIVATIONS)))
    for (element, c, k, activation), sites in itertools.product(narrow, (3000, 14_000, MANY)):
        conv = SiteConvSizes(
            element, sites, sites, 27, c, k, 1, activation, element == "float",
            vector_bytes(c * ELEMENT_BYTES[element]), 16,
        )  # fmt: skip
        plan = plan_site_conv(conv, DEVICES[arch])
        if isinstance(plan, TilesPlan):
            template = plan.template(conv, overlaps(plan, conv, DEVICES[arch]))
            found[SITES, plan.kernel, template] = None
    shared = itertools.product(_SHARED_TILES.values(), ELEMENT_BYTES, (RELU, GELU))
    for plan, element, activation in shared if DEVICES[arch].hopper else ():
        if element == "double":
            continue
        conv = SiteConvSizes(
            element, 3000, 3000, 27, 128, plan.tile[1], 1, activation, element == "float", 16, 16
        )
        found[SITES, plan.kernel, plan.template(conv)] = None
        found[SITES, "site_conv_sum", plan.sum_template(conv)] = None
    tilings = itertools.product(_TILINGS, ("Half", "float")) if DEVICES[arch].hopper else ()
    for (plan, row_bytes, _), element in tilings:
        channels = row_bytes // ELEMENT_BYTES[element]
        conv = SiteConvSizes(
            element, MANY, MANY, 27, channels, plan.columns, 1, 0, element == "float", 16, 16
        )
        for instance in (plan, alone(plan)):
            found[SITES, plan.kernel, instance.template(conv)] = None
    for tile, plan in PIPELINED.items() if DEVICES[arch].hopper else ():
        for element in ("Half", "BFloat16") if tile == (256, 256) else ("Half",):
            conv = WeightGradSizes(element, 7000, 7000, 27, *tile, 1, False, 16, 16)
            found[f"{SITES}_grad", plan.kernel, plan.template(conv)] = None
    return list(found)


def _stack_conv(element, rows, kernel, stride, channels, channels_out, shrunk):
    """Return a layer's sizes, with a relu."""
    block, image = 32 // shrunk, tuple(32 // shrunk * n for n in GRID)
    return StackConv(
        element=element, rows=rows, images=1, grid=GRID,
        block=(block,) * 2, block_out=(block // stride,) * 2,
        image=image, image_out=tuple(n // stride for n in image),
        channels=channels, channels_out=channels_out,
        kernel=(kernel,) * 2, strides=(stride,) * 2, dilation=(1, 1), pads=(kernel // 2,) * 2,
        activation=1, vectors_in=True, vectors_out=True, expected=rows,
    )  # fmt: skip


def launched(arch, stem, kernel, template):
    """Whether the ops would launch an instantiation on the GPUs of an architecture."""
    device = DEVICES[arch]
    by_four = FOUR_WARPS.intersection(template) or (kernel == "stack_unit" and template[0])
    if by_four and not device.hopper:
        return False
    if kernel == "stack_image_conv2d":
        wgmma, element, channels, _, pixels, columns, _, activation, blocks = template
        most = blocks_of(64 * pixels, 8 * columns, channels, device, scales_last(activation))
        if (wgmma, blocks) != (device.hopper, most):
            return False
        return device.tensor_floats or element == "Half"
    if kernel in ("site_conv_once", "site_conv_tiles", "site_weight_grad_pipelined", "deal_tiles"):
        return device.hopper
    if kernel in ("stack_conv_pipelined", "stack_conv_patch") and template[0] == "TileMma":
        return device.bulk_copy and not device.hopper  # a CPU runs it for those that have wgmma
    if kernel == "site_conv_pipelined":  # a CPU runs it by other instructions
        return device.hopper and template[0] == "TileWgmma"
    if kernel in ("site_conv", "site_weight_grad"):
        return device.tensor_floats or template[0] == "Half"
    pipelined = {"stack_conv": False, "stack_conv_pipelined": True, "stack_conv_patch": True}
    pipelined["stack_unit"] = True
    if pipelined.get(kernel, device.bulk_copy) != device.bulk_copy:
        return False
    if device.tensor_floats or template[:1] not in (("MmaSync",), ("TileMma",)):
        return True
    return template[1] == "Half"
