"""One class per array library: how its arrays become NumPy or CuPy arrays, and results its arrays.

Nothing is copied in either direction. (New NumPy memory is 64-byte aligned, as JAX and TensorFlow
need it to share it.) A framework is imported only in methods that run when one of its arrays has
been passed.
"""

import collections
import contextlib
import functools
import sys

import numpy as np

from ..errors import DeviceError, DTypeError
from .torch_memory import stream_of


class NumPy:
    """NumPy arrays are native: they pass as they are."""

    name = "numpy"
    native = True

    def place(self, value):
        """Return a key that tells devices apart."""
        return "cpu"


class CuPy:
    """CuPy arrays are native: they pass as they are."""

    name = "cupy"
    native = True

    def place(self, value):
        """Return a key that tells devices apart."""
        return value.data.device_id


class Torch:
    """PyTorch tensors: NumPy views on the CPU, CuPy views of the same memory on a GPU."""

    name = "torch"
    native = False

    def place(self, value):
        """Return a key that tells devices apart."""
        return str(value.device)

    def enter(self, value, argument):
        """View a tensor as a NumPy or CuPy array, unless a trace would not see what reads it."""
        if are_recorded(value):
            raise DTypeError(
                f"{argument} is traced by torch.jit.trace or make_fx, to which the result would be "
                "a constant; call sbnet_cupy.torch there, or this function outside of the trace"
            )
        return self.view(value, argument)

    def view(self, value, argument):
        """View a tensor as a NumPy or CuPy array of the same memory."""
        import torch

        if value.requires_grad:
            raise DTypeError(
                f"{argument} requires grad, and these functions record no gradients; call "
                "sbnet_cupy.torch for differentiable ones, or pass tensor.detach()"
            )
        if value.layout is not torch.strided or value.is_conj() or value.is_neg():
            raise DTypeError(
                f"{argument} must be a plain strided tensor, got layout {value.layout}; call "
                ".to_dense(), .resolve_conj() or .resolve_neg() first"
            )
        if value.numel() and value.device.type in ("cpu", "cuda") and not _has_memory(value):
            raise DTypeError(
                f"{argument} must have memory that can be read, and has none, as inside of "
                "torch.func.functionalize; call this function outside of the transformation"
            )
        if value.device.type == "cuda":
            return _cupy_view(value, torch_dtype(value.dtype, argument))
        if value.device.type != "cpu":
            raise DeviceError(f"{argument} must be on a CPU or CUDA device, got {value.device}")
        if value.dtype is torch.bfloat16:
            return _numpy_view(value.view(torch.int16), argument).view(bfloat16(argument))
        torch_dtype(value.dtype, argument)
        return _numpy_view(value, argument)

    def leave(self, array, like):
        """Return a native array as a PyTorch tensor."""
        import torch

        if not isinstance(array, np.ndarray):
            return torch.from_dlpack(array)
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def finish(self, natives, out=None):
        """Tell autograd what was written, as after PyTorch's own functions that write in place.

        Memory needs nothing: PyTorch reuses it in the order of the stream that we work on.
        """
        if out is not None:
            import torch

            torch.autograd.graph.increment_version(out)

    def stream(self, value):
        """Return a context in which PyTorch's current device and stream are CuPy's."""
        if value.device.type != "cuda":
            return contextlib.nullcontext()
        import cupy
        import torch

        device, stack = value.device.index, contextlib.ExitStack()
        stack.enter_context(cupy.cuda.Device(device))
        stack.enter_context(stream_of(device, torch.cuda.current_stream(device).cuda_stream))
        return stack


def _has_memory(tensor):
    """Whether a tensor has memory of its own; yes where PyTorch says otherwise when it is read."""
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:  # one of torch.func or of a trace, around another or without numbers
        return True


def is_followed(name):
    """Whether ``torch.compile`` may compile what is called now, by PyTorch's version of NumPy.

    Raise where it compiles this call: its graph ends there, and the call is made as it is.
    """
    torch = sys.modules["torch"]
    if torch is None:  # somebody has hidden it
        return False
    if torch.compiler.is_dynamo_compiling():
        raise RuntimeError(
            f"{name} of sbnet_cupy cannot be part of a graph of torch.compile; call that of "
            "sbnet_cupy.torch, or leave out fullgraph=True"
        )
    try:
        return torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None
    except AttributeError:  # a PyTorch without that name
        return True


@functools.cache
def apart(function):
    """Return a function that ``torch.compile`` leaves alone, with all that it calls."""
    return sys.modules["torch"].compiler.disable(function)


def are_recorded(*tensors):
    """Whether ``torch.jit.trace`` or ``make_fx`` records calls with one of these; some may be None.

    ``torch.jit.trace`` does not tell of which tensors.
    """
    import torch

    if torch.compiler.is_compiling():
        return False
    if torch.jit.is_tracing():
        return True
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")  # make_fx is there
    mode = None if proxies is None else proxies.get_proxy_mode()
    if mode is None:
        return False
    is_recorded = getattr(proxies, "has_proxy_slot", lambda tensor, tracer: True)
    return any(is_recorded(t, mode.tracer) for t in tensors if t is not None)


class Jax:
    """JAX arrays: read-only NumPy views on the CPU, CuPy views through DLPack on a GPU."""

    name = "jax"
    native = False

    def place(self, value):
        """Return a key that tells devices apart."""
        import jax

        return "traced" if isinstance(value, jax.core.Tracer) else str(value.device)

    def enter(self, value, argument):
        """View an array as a NumPy or CuPy array of the same memory."""
        import jax

        if isinstance(value, jax.core.Tracer):
            raise DTypeError(
                f"{argument} is traced by JAX (jit, grad or vmap); call sbnet_cupy.jax there, or "
                "this function outside the transformation"
            )
        if len(value.devices()) != 1:
            raise DeviceError(f"{argument} must be on one device, got {value.devices()}")
        if next(iter(value.devices())).platform == "cpu":
            return np.asarray(value)
        import cupy

        return cupy.from_dlpack(value)

    def leave(self, array, like):
        """Return a native array as a JAX array."""
        import jax

        if isinstance(array, np.ndarray):
            return jax.device_put(array, next(iter(like.devices())), may_alias=True)
        return jax.dlpack.from_dlpack(array)

    def finish(self, natives, out=None):
        """Hold JAX's arrays until our stream is done: JAX frees memory on a stream of its own."""
        _HELD.hold(natives)

    def stream(self, value):
        """Return a context of the array's device; DLPack orders JAX's work and ours."""
        import jax

        if isinstance(value, jax.core.Tracer):  # enter refuses it; it knows the argument's name
            return contextlib.nullcontext()
        device = next(iter(value.devices()))
        if device.platform == "cpu":
            return contextlib.nullcontext()
        import cupy

        return cupy.cuda.Device(device.local_hardware_id)


class TensorFlow:
    """Eager TensorFlow tensors on the CPU: read-only NumPy views."""

    name = "tensorflow"
    native = False

    def place(self, value):
        """Return a key that tells devices apart."""
        return str(value.device) if hasattr(value, "_numpy") else "traced"

    def enter(self, value, argument):
        """View an eager tensor as a read-only NumPy array of the same memory."""
        if not hasattr(value, "_numpy"):
            raise DTypeError(
                f"{argument} must be an eager TensorFlow tensor, got {type(value).__name__}; call "
                "sbnet_cupy.tensorflow inside tf.function, or pass variable.value()"
            )
        if "CPU" not in value.device:
            raise DeviceError(
                f"{argument} must be on the CPU, got {value.device}: TensorFlow tensors on a GPU "
                "are not taken; convert with cupy.from_dlpack"
            )
        array = np.asarray(value).view()
        array.flags.writeable = False
        return array

    def leave(self, array, like):
        """Return a native array as a TensorFlow tensor."""
        import tensorflow as tf

        def share(result):
            result = np.asarray(result, order="C")  # TensorFlow has no strides
            if result.ctypes.data % 64 or not result.size:
                return tf.convert_to_tensor(result)
            return tf.experimental.dlpack.from_dlpack(result.__dlpack__())

        if array.dtype.name == "bfloat16":
            return tf.bitcast(share(array.view(np.uint16)), tf.bfloat16)
        return share(array)

    def finish(self, natives, out=None):
        """Do nothing on a CPU."""

    def stream(self, value):
        """Return an empty context: there is no stream on a CPU."""
        return contextlib.nullcontext()


class DLPack:
    """Any other object with ``__dlpack__``: results are NumPy or CuPy arrays."""

    name = "dlpack"
    native = False

    def place(self, value):
        """Return a key that tells devices apart."""
        return str(value.__dlpack_device__())

    def enter(self, value, argument):
        """Import the object as a NumPy or CuPy array of the same memory."""
        kind = int(value.__dlpack_device__()[0])
        if kind == 1:
            return np.from_dlpack(value)
        if kind == 2:
            import cupy

            return cupy.from_dlpack(value)
        raise DeviceError(f"{argument} must be on a CPU or CUDA device, got DLPack device {kind}")

    def leave(self, array, like):
        """Return the native array: the library is unknown."""
        return array

    def finish(self, natives, out=None):
        """Hold the producer's arrays until our stream is done with them."""
        _HELD.hold(natives)

    def stream(self, value):
        """Return a context of the array's device; DLPack orders the producer's work before ours."""
        kind, index = value.__dlpack_device__()
        if int(kind) == 1:
            return contextlib.nullcontext()
        import cupy

        return cupy.cuda.Device(index)


class _Held:
    """Holds imported GPU arrays until the kernels that read them are done.

    The producer may reuse the memory as soon as the array is released, and on another stream.
    """

    def __init__(self):
        self._waiting = collections.deque()

    def hold(self, arrays):
        """Hold the CuPy arrays until the current stream has done the work queued on it."""
        arrays = [array for array in arrays if not isinstance(array, np.ndarray)]
        if not arrays:
            return
        import cupy

        event = cupy.cuda.Event(disable_timing=True)
        event.record()
        self._waiting.append((event, arrays))
        while self._waiting and self._waiting[0][0].done:
            self._waiting.popleft()


_HELD = _Held()
NUMPY, CUPY, DLPACK = NumPy(), CuPy(), DLPack()
TORCH_DTYPES = {}  # torch dtype -> NumPy's, of those that were asked for
_FRAMEWORKS = {"torch": Torch(), "jax": Jax(), "tensorflow": TensorFlow()}
_FRAMEWORKS["jaxlib"] = _FRAMEWORKS["jax"]


def classify(kind):
    """Return the library whose arrays are of type ``kind``, or None for other types."""
    if issubclass(kind, np.ma.MaskedArray):
        return None
    if issubclass(kind, np.ndarray):
        return NUMPY
    roots = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if "cupy" in roots and hasattr(kind, "__cuda_array_interface__"):
        return CUPY
    is_array = hasattr(kind, "__dlpack__") or ("tensorflow" in roots and hasattr(kind, "dtype"))
    if not is_array:
        return None
    return next((_FRAMEWORKS[root] for root in roots if root in _FRAMEWORKS), DLPACK)


def bfloat16(argument):
    """Return NumPy's bfloat16 type, which ml_dtypes supplies, or raise DTypeError."""
    try:
        import ml_dtypes
    except ImportError:
        raise DTypeError(
            f"{argument} is bfloat16, which NumPy knows only with ml_dtypes; pip install ml_dtypes"
        ) from None
    return np.dtype(ml_dtypes.bfloat16)


def torch_dtype(dtype, argument):
    """Return the NumPy type of a torch dtype, or raise DTypeError."""
    known = TORCH_DTYPES.get(dtype)
    if known is None:
        known = TORCH_DTYPES[dtype] = _found_dtype(dtype, argument)
    return known


def _found_dtype(dtype, argument):
    name = str(dtype).removeprefix("torch.")
    if name == "bfloat16":
        return bfloat16(argument)
    try:
        known = np.dtype(name)
    except TypeError:
        known = None
    if known is None or known.isbuiltin != 1:
        raise DTypeError(
            f"{argument} has dtype {dtype}, which NumPy does not know; view it as an integer dtype"
        )
    return known


def _numpy_view(tensor, argument):
    """View a CPU tensor as a NumPy array, or raise if it stands for others."""
    try:
        return tensor.numpy()
    except RuntimeError as error:
        raise DeviceError(
            f"{argument} must have data, got a {type(tensor).__name__} that torch.export or "
            "torch.func traces; call what needs data, as finding sites does, outside of the "
            "function that is traced"
        ) from error


def _cupy_view(tensor, dtype):
    """View a CUDA tensor as a CuPy array; the view keeps the tensor alive."""
    import cupy

    shape, strides, nbytes = tuple(tensor.shape), None, tensor.nbytes
    if not tensor.is_contiguous():
        strides = tuple(step * dtype.itemsize for step in tensor.stride())
        extent = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        nbytes = extent + dtype.itemsize if nbytes else 0
    memory = cupy.cuda.UnownedMemory(tensor.data_ptr(), nbytes, tensor, tensor.get_device())
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)
