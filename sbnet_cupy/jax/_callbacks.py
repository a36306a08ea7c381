"""From XLA into our code: its buffers as NumPy or CuPy arrays, on its stream, in its memory.

The only file that knows ``jax.experimental.buffer_callback``.
"""

import contextlib
import ctypes
import functools
import inspect
import math
from itertools import repeat

import numpy as np

try:
    import jax
except ImportError as error:
    raise ImportError("sbnet_cupy.jax needs JAX; pip install 'sbnet-cupy[jax]'") from error

from ..core.arrays import whole_pieces
from ..core.compile_ahead import Beside
from ..core.device import driver
from ..core.launch import enqueue, launch_at, movable, recorded


def _find_buffer_callback():
    """Return ``buffer_callback``, or say which JAX has it."""
    try:
        from jax.experimental.buffer_callback import buffer_callback

        known = inspect.signature(buffer_callback).parameters
    except ImportError:
        known = {}
    if "command_buffer_compatible" not in known or not hasattr(jax, "enable_x64"):
        raise ImportError(
            "sbnet_cupy.jax needs a JAX with jax.enable_x64 and with command_buffer_compatible of "
            f"jax.experimental.buffer_callback, got {jax.__version__}; pip install -U 'jax>=0.8'"
        )
    return buffer_callback


BESIDE = Beside()  # kernels that are compiled while JAX traces and XLA compiles
_buffer_callback = _find_buffer_callback()
_MOST_PLACES = 64  # sets of addresses for which a callback keeps its launches
_VECTOR = 16  # bytes: what a body launches may depend on addresses modulo this
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

# Without touching the prototype that everybody shares through ctypes.pythonapi.
_capsule_words = ctypes.PYFUNCTYPE(
    ctypes.POINTER(ctypes.c_size_t), ctypes.py_object, ctypes.c_char_p
)(("PyCapsule_GetPointer", ctypes.pythonapi))


def call(body, spec, results, arrays, *, scratch=0, alias=None):
    """Have XLA run ``body(spec, results, scratch, *arrays)`` when it computes the results.

    Parameters
    ----------
    body : function
        Gets NumPy arrays on a CPU and CuPy arrays on a GPU, in XLA's memory, and fills the results.
        On a GPU it must allocate nothing, except through :func:`allocating_from`, and do nothing
        but launch our kernels and what goes through ``enqueue``: that is what is done again.
    spec : hashable
        What else the body needs. The same body and spec are the same callback, compiled once.
    results : sequence of jax.ShapeDtypeStruct
        None of them empty: XLA would not call.
    arrays : sequence of jax.Array or None
        What the body reads.
    scratch : int
        Bytes of scratch, an extra result of which nobody reads the contents.
    alias : dict, optional
        Which array (by position) holds a result's first contents, and should be its memory.
    """
    has_gpu()  # and CuPy, or this raises
    wanted = [*results, jax.ShapeDtypeStruct((scratch,), np.uint8)] if scratch else list(results)
    kinds = tuple(None if a is None else (a.shape, a.dtype) for a in (*wanted, *arrays))
    aliases = tuple((alias or {}).items())
    found = _buffer_callback(
        _callback(body, spec, kinds, len(results), bool(scratch), aliases),
        wanted,
        input_output_aliases={_given_before(source, arrays): t for source, t in aliases},
        command_buffer_compatible=True,
    )(*arrays)
    return vary_alike(found[: len(results)], arrays)


def _given_before(position, arrays):
    """Return the position of an array among those that are given: JAX counts no others."""
    return sum(array is not None for array in arrays[:position])


@functools.cache
def _callback(body, spec, kinds, results, has_scratch, alias=()):
    """Return what XLA calls; the same object for the same body, spec, shapes and dtypes.

    ``kinds`` are (shape, dtype) of so many results, scratch, and what is read. What a body launched
    the first time is launched again: on other memory, if it was nothing but kernels on memory of
    its own, else on the same memory, which XLA gives again and again.
    """
    known = {}  # the launches, by where the memory is, or by its alignment
    sizes = [None if kind is None else _nbytes(*kind) for kind in kinds]

    def callback(context, outs, *arrays):
        buffers = (*outs, *arrays)
        kind, device = buffers[0].__dlpack_device__()
        if int(kind) == 1:
            run(list(map(_numpy_view, buffers)))
            return
        starts = [None if buffer is None else address(buffer) for buffer in buffers]
        alignment = (device, *(None if start is None else start % _VECTOR for start in starts))
        moved = known.get(alignment)
        if moved is not None:
            with _current(device):
                launch_at(moved, context.stream, starts)
            return
        places = (device, *starts)
        with _entered(context.stream, device):
            launches = known.get(places)
            if launches is not None:
                for launch, arguments in launches:
                    launch(*arguments)
                return
            BESIDE.wait()
            with recorded() as launches:
                run(list(map(_cupy_view, starts, kinds, repeat(device))))
        if len(known) >= _MOST_PLACES:
            known.clear()
        memory = zip(starts, sizes, strict=True)
        moved = None if alias else movable(launches, [its if its[1] else None for its in memory])
        if moved is None:
            known[places] = launches
        else:
            known[alignment] = moved

    def run(natives):
        first = results + has_scratch
        scratch = natives[results] if has_scratch else None
        for source, target in alias:
            _fill(natives[target], natives[first + source])
        body(spec, natives[:results], scratch, *natives[first:])

    return callback


def _fill(result, array):
    """Copy what a result is to hold at first, unless it is the same memory.

    It should be: but XLA on a GPU hands over a slice, as of ``lax.map``, where it lies.
    """
    if isinstance(result, np.ndarray):
        if not np.may_share_memory(result, array):
            result[...] = array
    elif result.data.ptr != array.data.ptr:
        enqueue(result.data.copy_from_device_async, array.data, result.nbytes)


def vary_alike(arrays, examples=()):
    """Inside ``shard_map``, let arrays vary over all mesh axes that one of them varies over.

    JAX does so for its own operations, and sums gradients over these axes accordingly.
    """
    kinds = [jax.typeof(array) for array in (*arrays, *examples) if array is not None]
    axes = frozenset().union(*map(_axes, kinds))
    if not axes:
        return arrays
    return [array if array is None else _vary(array, axes) for array in arrays]


def _axes(kind):
    """Return the mesh axes that an array varies over; JAX has moved where it says so."""
    return kind.mat.varying if hasattr(kind, "mat") else kind.vma


def _vary(array, axes):
    more = tuple(axes - _axes(jax.typeof(array)))
    if not more:
        return array
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, more, to="varying")
    return jax.lax.pvary(array, more)


@functools.cache
def has_gpu():
    """Whether JAX has a GPU; raise ImportError where CuPy, which computes there, is missing."""
    if jax.default_backend() not in ("gpu", "cuda"):
        return False
    try:
        import cupy  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "sbnet_cupy.jax needs CuPy for arrays on a GPU; pip install 'sbnet-cupy[cuda13x]'"
        ) from error
    return True


def current_device():
    """Return the number of CuPy's current device."""
    import cupy

    return cupy.cuda.runtime.getDevice()


# ------------------------------------------------------------------------- inside the callback


def _current(device):
    """Return a context in which a device is current: all that kernels need that were launched."""
    if current_device() == device:
        return contextlib.nullcontext()
    import cupy

    return cupy.cuda.Device(device)


def _entered(pointer, device):
    """Return a context in which XLA's device and stream are current."""
    import cupy

    try:
        stream = _STREAMS[device, pointer]
    except KeyError:
        with cupy.cuda.Device(device):
            stream = cupy.cuda.Stream.from_external(_Stream(pointer))
        _STREAMS[device, pointer] = stream
    capturing = cupy.cuda.runtime.streamIsCapturing(pointer)
    if not capturing and cupy.cuda.runtime.getDevice() == device:
        return stream
    with contextlib.ExitStack() as stack:
        stack.enter_context(cupy.cuda.Device(device))
        stack.enter_context(stream)
        if capturing:
            stack.enter_context(_relaxed())
        return stack.pop_all()


_STREAMS = {}  # (device, pointer) -> CuPy's object for XLA's stream


class _Stream:
    """XLA's stream, as CuPy takes streams of others."""

    def __init__(self, pointer):
        self._pointer = pointer

    def __cuda_stream__(self):
        return 0, self._pointer


def _numpy_view(buffer):
    """View a buffer on the CPU as an array; what is an input is read-only."""
    if buffer is None:
        return None
    array = np.asarray(buffer)
    if not buffer.writeable:
        array.flags.writeable = False
    return array


def _cupy_view(pointer, kind, device):
    """View a buffer's memory on a GPU as a CuPy array, which must not outlive the call."""
    if pointer is None:
        return None
    import cupy

    memory = cupy.cuda.UnownedMemory(pointer, _nbytes(*kind), None, device)
    return cupy.ndarray(*kind, cupy.cuda.MemoryPointer(memory, 0))


def _nbytes(shape, dtype):
    return math.prod(shape) * dtype.itemsize


def address(buffer):
    """Return where a buffer's memory begins: the first field of the DLTensor in its capsule.

    ``__cuda_array_interface__`` says it too, but has no name for some dtypes.
    """
    capsule = buffer.__dlpack__()  # must outlive the look into it
    return _capsule_words(capsule, b"dltensor")[0]


@contextlib.contextmanager
def _relaxed():
    """Let this thread load kernels while XLA records its stream: that work is not recorded."""
    exchange = driver().cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def allocating_from(scratch):
    """Make CuPy allocate from a scratch array, until the end of a ``with``; NumPy has its own."""
    if scratch is None or isinstance(scratch, np.ndarray):
        return contextlib.nullcontext()
    import cupy

    return cupy.cuda.using_allocator(_Pieces(scratch))


class _Pieces:
    """An allocator of CuPy's kind: one piece of a scratch array after the other."""

    def __init__(self, scratch):
        self._next, self._left = scratch.data, scratch.nbytes

    def __call__(self, nbytes):
        size = whole_pieces(nbytes)
        assert size <= self._left, f"scratch of {self._left} bytes left, {size} needed"
        piece = self._next
        self._next, self._left = piece + size, self._left - size
        return piece
