"""How operators are made known to PyTorch's dispatcher, and our containers to its pytrees.

``torch.library.Library`` and not ``custom_op``: the same operator, at two thirds of the host time.
"""

import torch

from ..blocks import BlockParams
from ..ops.active_blocks import ActiveBlocks
from ..ops.bottleneck_weights import BottleneckWeights

_LIBRARY = torch.library.Library("sbnet_cupy", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

for _container in (ActiveBlocks, BottleneckWeights):  # so that torch.export takes them as inputs
    torch.export.register_dataclass(_container)
if hasattr(torch.utils._pytree, "register_constant"):  # PyTorch 2.7 and newer
    torch.utils._pytree.register_constant(BlockParams)


def apply(operator, recorded, *arguments):
    """Call an operator; ``recorded`` says whether autograd must see the call.

    Where it need not, the call starts below autograd, which costs a third less on the host.
    """
    if recorded or torch.compiler.is_compiling():
        return operator(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def register(schema, body, fake, *, backward=None, setup_context=None):
    """Define an operator; return it as a callable.

    ``body`` computes on CPU and CUDA tensors, ``fake`` gives results of the right shape and dtype
    with no data, ``backward`` and ``setup_context`` are those of ``torch.library``.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=_TAGS)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, body, key)
    torch.library.register_fake(f"sbnet_cupy::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(
            f"sbnet_cupy::{name}", backward, setup_context=setup_context, lib=_LIBRARY
        )
    return getattr(torch.ops.sbnet_cupy, name).default
