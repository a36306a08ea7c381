"""Private names of PyTorch: all of them, and what serves instead where one is missing.

The dispatcher costs the calling thread more than most of our kernels take. A *plain* call is one
for which it would do nothing but pass the arguments on; such a call goes to the kernel at once.
PyTorch has no public way to ask whether a call is plain. Where one of the private names is gone, no
call is: all go through the dispatcher, with the same results.

Not plain are compiling, exporting, modes and subclasses of either protocol (fake tensors too),
``torch.func``, tracers, lazy conjugates, forward-mode derivatives, and a profiler, which sees
operators only where they are dispatched.
"""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.autograd import forward_ad, profiler
from torch.nn.modules import module as modules
from torch.utils import _python_dispatch

_TENSORS = (torch.Tensor, torch.nn.Parameter)


def _keys(*names):
    """Return the bits of some dispatch keys."""
    bits = 0
    for name in names:
        bits |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    return bits


_function_modes = getattr(torch._C, "_len_torch_function_stack", lambda: 1)
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_hooks, _backward_hooks = (
    [getattr(modules, f"_global_{way}_{kind}", True) for kind in ("hooks", "pre_hooks")]
    for way in ("forward", "backward")
)
HOOKS = "_forward_hooks", "_forward_pre_hooks"  # of a module
BACKWARD_HOOKS = "_backward_hooks", "_backward_pre_hooks"
_transforms = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_has_profiler = hasattr(profiler, "_is_profiler_enabled")
_has_level = hasattr(forward_ad, "_current_level")
try:  # keys of a thread, and of a tensor, of which the dispatcher makes nothing
    _keys_of, _keys_of_thread = torch._C._dispatch_keys, torch._C._dispatch_tls_local_include_set
    _usual = {_keys("BackendSelect", "ADInplaceOrView"), _keys("BackendSelect")}
    _plain = {
        _keys(kind, f"Autocast{kind}", *more)
        for kind in ("CPU", "CUDA")
        for more in ((), ("ADInplaceOrView", f"Autograd{kind}"))  # none in inference mode
    }
except AttributeError:  # this PyTorch has them no more, or under other names
    _usual = None


def thread_is_plain():
    """Whether the dispatcher would pass ordinary tensors of this thread on; no if unknown."""
    return (
        _usual is not None
        and not (
            torch.compiler.is_compiling()
            or _function_modes()
            or has_forward_mode()
            or not _has_profiler
            or profiler._is_profiler_enabled
        )
        and _keys_of_thread().raw_repr() in _usual
    )


def is_plain(value):
    """Whether a value is an ordinary tensor; asked only in threads that are plain."""
    return type(value) in _TENSORS and _keys_of(value).raw_repr() in _plain


_dynamo = getattr(torch._C, "_dynamo", None)
_guards = getattr(getattr(_dynamo, "guards", None), "TensorGuards", None)


_strided = torch.strided


def may_match(tensors):
    """Whether a matcher may be asked: it ends the process where a tensor has no strides."""
    for t in tensors:
        if type(t) not in _TENSORS or t.is_nested or t.layout is not _strided:
            return False
    return True


def matcher(tensors):
    """Return a function that tells whether tensors, as its arguments, are like these.

    Like they are in type, dtype, device, shape, strides, ``requires_grad`` and keys: in all but
    memory and values. It says no of a tensor that comes twice, and where there is no telling. It is
    asked in threads that are plain, as it does not see every mode, and only of what may match.
    """
    if _guards is None:
        return lambda *others: False
    sizes = [list(t.shape) for t in tensors]
    strides = [list(t.stride()) for t in tensors]
    return _guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


try:
    _samples = [torch.empty(s, dtype=torch.int8, device="cpu") for s in ((2, 3), (3, 2))]
    if list(map(matcher(_samples[:1]), _samples)) != [True, False]:
        _guards = None
except (TypeError, ValueError, RuntimeError, SystemError):  # it takes other arguments now
    _guards = None


def has_forward_mode():
    """Whether tensors may have forward-mode derivatives: yes, where there is no telling."""
    return not _has_level or forward_ad._current_level >= 0


def in_dispatch_mode():
    """Whether a mode sees each operator of this thread's calls. Yes, where there is no telling."""
    return _dispatch_modes() > 0


# A context in which no mode sees operators.
without_modes = getattr(_python_dispatch, "_disable_current_modes", contextlib.nullcontext)


def in_transform():
    """Whether ``torch.func``, forward-mode derivatives or ``torch.compile`` follow this thread's
    calls. Yes, where there is no telling.
    """
    return torch.compiler.is_compiling() or _transforms() or has_forward_mode()


_functorch = getattr(torch._C, "_functorch", None)
_is_wrapped = getattr(_functorch, "is_functorch_wrapped_tensor", lambda tensor: False)
_unwrapped = getattr(_functorch, "get_unwrapped", lambda tensor: None)
_is_batched = getattr(_functorch, "is_batchedtensor", lambda tensor: False)


def has_function_transforms():
    """Whether ``torch.func`` follows this thread's calls. Yes, where there is no telling."""
    return _transforms()


def without_function_transforms():
    """Return a context in which ``torch.func`` does not follow calls, where there is one."""
    from torch._functorch import pyfunctorch  # only loaded with torch.func

    clear = getattr(pyfunctorch, "temporarily_clear_interpreter_stack", contextlib.nullcontext)
    return clear()


def are_in_gradient(*tensors):
    """Whether ``torch.func``, which follows calls, takes gradients of one of these.

    No, where there is no telling.
    """
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors:
        while tensor is not None and _is_wrapped(tensor):
            if tensor.requires_grad:
                return True
            tensor = _unwrapped(tensor)
    return False


def is_mapped(tensor):
    """Whether ``torch.vmap`` maps a tensor. No, where there is no telling."""
    while tensor is not None and _is_wrapped(tensor):
        if _is_batched(tensor):
            return True
        tensor = _unwrapped(tensor)
    return False


def innermost(tensor):
    """Return the tensor that ``torch.func`` has wrapped, or one that it has not."""
    while _is_wrapped(tensor):
        tensor = _unwrapped(tensor)
    return tensor


def storage_of(tensor):
    """Return a tensor's storage, also of one that ``torch.func`` has wrapped."""
    return innermost(tensor).untyped_storage()


def memory_of(tensor):
    """Return the address of a tensor's memory, also of one that ``torch.func`` has wrapped."""
    return storage_of(tensor).data_ptr()


def are_hooked(*called):
    """Whether hooks of all modules, or of these, see calls. Yes, where there is no telling."""
    return any(_hooks) or any(getattr(module, name, True) for module in called for name in HOOKS)


def is_watched():
    """Whether something sees, or changes, each function or module of this thread's calls.

    So are modes, profilers, and hooks of all modules. Yes, where there is no telling.
    """
    return not thread_is_plain() or any(_hooks)


def is_watched_in_backward():
    """Whether something sees gradients, or what is saved for them, of each function or module.

    Yes, where there is no telling.
    """
    return (
        torch.is_anomaly_enabled() or any(_backward_hooks) or saved_tensor_hooks() is not None
    )


def direct_apply(function):
    """Return ``apply`` of a ``torch.autograd.Function`` that is called with plain tensors.

    Its own looks for ``torch.func`` in the arguments first; the one that it ends in does not.
    """
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


# Number of the current GPU, and address of torch's current stream on a GPU. The public ways make an
# object, or see to it that CUDA is initialised, at each call.
current_device = getattr(torch._C, "_cuda_getDevice", lambda: torch.cuda.current_device())
current_stream = getattr(
    torch._C,
    "_cuda_getCurrentRawStream",
    lambda device: torch.cuda.current_stream(device).cuda_stream,
)


def _has_autocast():
    return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")


# Whether any device has autocast: a quarter of the time of asking for two.
has_autocast = getattr(torch._C, "_is_any_autocast_enabled", _has_autocast)


def parameters_of(module, *names):
    """Return parameters of a module, in a third of the time in which ``getattr`` finds them."""
    own = getattr(module, "_parameters", {})
    return [own[name] if name in own else getattr(module, name) for name in names]


# The namespace of functions behind ``torch.nn.functional``; most of them are in both.
builtin_functions = getattr(torch._C, "_nn", torch.nn.functional)

_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def saved_tensor_hooks():
    """Return what tells the hooks apart that tensors are saved by, or None where there is none.

    Where there is no telling, never the same twice.
    """
    return object() if _top_hooks is None else _top_hooks(False)


_plainly = getattr(torch._C, "DisableTorchFunctionSubclass", None)


def plainly(function, *args, **kwargs):
    """Call a function of tensors as if those of a subclass had no ``__torch_function__``."""
    if _plainly is None:
        return torch.Tensor.__torch_function__(function, (), args, kwargs)
    with _plainly():
        return function(*args, **kwargs)


_make_wrapper = getattr(torch.Tensor, "_make_wrapper_subclass", None)


def without_memory(kind, shape, dtype, device, requires_grad):
    """Return a tensor of a subclass that has a shape, dtype and device, and no memory."""
    if _make_wrapper is not None:
        return _make_wrapper(kind, shape, dtype=dtype, device=device, requires_grad=requires_grad)

    def make():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        tensor.untyped_storage().resize_(0)
        tensor = tensor.as_subclass(kind)
        plainly(torch.Tensor.requires_grad_, tensor, requires_grad)
        return tensor

    if not in_dispatch_mode():
        return make()
    with ThreadPoolExecutor(1) as other:  # whose modes are none: fake tensors have no subclasses
        return other.submit(make).result()


_operators = getattr(torch, "_ops", None)
_Overload, _Packet = (
    getattr(_operators, name, ()) for name in ("OpOverload", "OpOverloadPacket")
)


def written_arguments(func):
    """Return the arguments that an operator writes to, by its schema: names with their positions.

    None of other functions, of operators with several overloads, and where there is no telling.
    """
    if isinstance(func, _Packet):
        names = func.overloads()
        func = getattr(func, names[0]) if len(names) == 1 else None
    found = _arguments(func)
    if found is None:
        return None
    aliases = ((a.name, i, a.alias_info) for i, a in enumerate(found))
    return {name: i for name, i, alias in aliases if alias is not None and alias.is_write}


def argument_names(operator):
    """Return the names of an operator's arguments in their order, or None where no schema tells."""
    found = _arguments(operator)
    return None if found is None else [argument.name for argument in found]


def _arguments(func):
    schema = getattr(func, "_schema", None) if isinstance(func, _Overload) else None
    return None if schema is None else schema.arguments


def aten_operator(func):
    """Return the name of an ATen operator with that of its overload, or None of other functions."""
    if not isinstance(func, _Overload) or func.namespace != "aten":
        return None
    return func.__name__


# Of functions of PyTorch's own in Python, which wrap what a module or a checkpoint was given.
BACKWARD_HOOK, CHECKPOINT = "BackwardHookFunctionBackward", "CheckpointFunctionBackward"


def register_constant(kind):
    """Let torch.compile and torch.export take instances of a class as constants, if they can."""
    register = getattr(torch.utils._pytree, "register_constant", None)  # PyTorch 2.7 and newer
    if register is not None:
        register(kind)


_callback = getattr(
    getattr(_dynamo, "eval_frame", None), "get_eval_frame_callback", lambda: None
)


def is_followed():
    """Whether Dynamo follows this call, or looks at each function that is called.

    Where there is no telling, only the first is known.
    """
    return torch.compiler.is_dynamo_compiling() or callable(_callback())


# Has Dynamo take a function into a graph without following its code, which what is behind Dynamo
# traces. Its arguments may be modules. Where the name is missing, the function stays out of graphs.
in_one_piece = getattr(torch._dynamo, "nonstrict_trace", torch.compiler.disable)
