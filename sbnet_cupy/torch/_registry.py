"""How operators are made known to PyTorch's dispatcher, called, and our containers to its pytrees.

``torch.library.Library`` and not ``custom_op``: the same operator, at two thirds of the host time.

The dispatcher costs the calling thread more than most of our kernels take. So a call for which it
would do nothing but pass the arguments on, a plain one, goes to the operator's body at once, or to
an ``autograd.Function`` around it where gradients are recorded. Whether a call is plain is asked
of the dispatcher's own state, and anything unusual is left to it: compiling, exporting, modes and
subclasses of either protocol (fake tensors too), ``torch.func``, tracers, lazy conjugates,
forward-mode derivatives, and a profiler, which sees operators only where they are dispatched.
"""

import torch
from torch._C import (
    _dispatch_keys,
    _dispatch_tls_local_include_set,
    _len_torch_function_stack,
)
from torch.autograd import forward_ad

from ..block_sparse.active_blocks import ActiveBlocks
from ..block_sparse.block_params import BlockParams
from ..block_sparse.bottleneck.weights import BottleneckWeights

_LIBRARY = torch.library.Library("sbnet_cupy", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

for _container in (ActiveBlocks, BottleneckWeights):  # so that torch.export takes them as inputs
    torch.export.register_dataclass(_container)
if hasattr(torch.utils._pytree, "register_constant"):  # PyTorch 2.7 and newer
    torch.utils._pytree.register_constant(BlockParams)


def register(schema, body, fake, *, backward=None, setup_context=None):
    """Define an operator; return the function that calls it.

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
    operator = getattr(torch.ops.sbnet_cupy, name).default
    recorded = None if backward is None else _recorded(name, body, backward, setup_context)

    def call(*arguments):
        records = records_if_plain(arguments)
        if records is None:
            return operator(*arguments)
        if records and recorded:
            return recorded(*arguments, None)
        return body(*arguments)

    call.recorded = recorded
    return call


def _recorded(name, body, backward, setup_context):
    """Return what ``torch.library`` makes autograd do with an operator, for plain calls.

    After the arguments it takes None, or a list of the result, if that is there already.
    """

    def forward(ctx, *given):
        *arguments, made = given
        result = body(*arguments) if made is None else made[0]
        setup_context(ctx, arguments, result)
        return result

    def each(ctx, *grads):
        return (*backward(ctx, *grads), None)

    parts = {"forward": staticmethod(forward), "backward": staticmethod(each)}
    function = type(name, (torch.autograd.Function,), parts)
    # Not its own apply, which looks for torch.func in the arguments: none is plain there.
    return super(torch.autograd.Function, function).apply


def records_if_plain(arguments):
    """Whether gradients are recorded; None where the dispatcher has something else to do."""
    if not thread_is_plain():
        return None
    requires_grad = False
    for value in arguments:
        if type(value) in _OPTIONS:
            continue
        if not is_plain(value):
            return None
        requires_grad = requires_grad or value.requires_grad
    return requires_grad and torch.is_grad_enabled()


def thread_is_plain():
    """Whether the dispatcher would pass ordinary tensors of this thread on."""
    return not (
        torch.compiler.is_compiling()
        or _len_torch_function_stack()
        or _dispatch_tls_local_include_set().raw_repr() not in _USUAL
        or forward_ad._current_level >= 0
        or torch.autograd.profiler._is_profiler_enabled
    )


def is_plain(value):
    """Whether a value is an ordinary tensor."""
    return type(value) in _TENSORS and _dispatch_keys(value).raw_repr() in _PLAIN


def records_gradients(*tensors):
    """Whether autograd records what is done to these tensors now."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _keys(*names):
    """Return a set of dispatch keys as the bits of an integer."""
    bits = 0
    for name in names:
        bits |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    return bits


_TENSORS = (torch.Tensor, torch.nn.Parameter)
_OPTIONS = frozenset({type(None), bool, int, float, str, tuple, list})
# Keys of a thread, and of ordinary tensors: each as usual, and as in inference mode.
_USUAL = {_keys("BackendSelect", "ADInplaceOrView"), _keys("BackendSelect")}
_PLAIN = {
    _keys(kind, f"Autocast{kind}", *more)
    for kind in ("CPU", "CUDA")
    for more in ((), ("ADInplaceOrView", f"Autograd{kind}"))
}
