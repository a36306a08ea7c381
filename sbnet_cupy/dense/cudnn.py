"""cuDNN through its Python front end, ``import cudnn``: the fast dense convolution on a GPU.

For float32 the convolution writes the output, and scale, bias and activation are applied to it in
place. float16 and bfloat16 results must be rounded only once, so for them scale, bias and
activation are nodes of the same graph. cuDNN compiles such fused kernels at run time; graphs that
differ in the batch size alone share a cache of compiled kernels.

Source: NVIDIA cuDNN front end, https://github.com/NVIDIA/cudnn-frontend (graph API).
"""

import functools
import threading
from typing import NamedTuple

import numpy as np

from ..core.arrays import address, dtype_name, namespace
from .activation import apply_affine

_MINIMUM_VERSION = 90400  # the first with kernel caches for dynamic shapes
_MOST_ELEMENTS = 2**31 - 1  # elements of one tensor; not every engine has 64-bit offsets
_ALIGNMENT = 16  # bytes; graphs assume it of every pointer
X, W, SCALE, BIAS, Y = range(1, 6)  # tensor numbers; Y is the output or its gradient
_LOCK = threading.RLock()  # only one thread at a time may use a handle


class _Key(NamedTuple):
    """Everything that a graph depends on; tensor sizes in cuDNN's order, NCHW and KCRS."""

    result: int  # Y for the convolution; X or W for their gradients, computed from that of Y
    device: int
    dtype: str
    result_dtype: str
    x: tuple[int, int, int, int]
    w: tuple[int, int, int, int]
    y: tuple[int, int, int, int]
    strides: tuple[int, int]
    pads: tuple[tuple[int, int], tuple[int, int]]
    channels_last: bool
    tf32: bool
    scale: bool
    bias: bool
    activation: str | None

    @property
    def fused(self):
        """Whether the graph has nodes besides the convolution."""
        return self.scale or self.bias or self.activation is not None

    @property
    def family(self):
        """The key without the batch size; graphs of a family share compiled kernels.

        A kernel compiled for one number of channels must not be used for another: cuDNN 9.19 reuses
        it and then misreads memory. So only the batch may vary under one kernel cache.
        """
        return self._replace(x=(0, *self.x[1:]), y=(0, *self.y[1:]))


@functools.cache
def cudnn_available():
    """Whether the front end and a recent enough cuDNN library are installed."""
    try:
        import cudnn

        return cudnn.backend_version() >= _MINIMUM_VERSION
    except (ImportError, OSError):
        return False
    except RuntimeError:  # the front end finds no library: "Unable to find symbol cudnnGetVersion"
        return False


def convolve(x, w, out, scale, bias, problem):
    """Convolve the parts of the batch that cuDNN supports; return the slices that are left."""
    whole = slice(0, len(x))
    dtype = dtype_name(x.dtype)
    if not takes(x, out):
        return [whole]
    plain = scale is None and bias is None and problem.activation is None
    if dtype != "float32" and not plain and not _fusible(x, out, problem):
        return [whole]
    xp = namespace(x)
    order = "OHWI" if problem.channels_last else "OIHW"
    w = xp.ascontiguousarray(w.transpose(problem.weight_axes(order)))
    single = dtype == "float32"
    tables = {} if single else _tables(scale, bias, xp)
    left = []
    for part in parts_of(x, out):
        pointers = {X: x[part], W: w, Y: out[part], **tables}
        activation = None if single else problem.activation
        if not run(describe(pointers, Y, problem, activation), pointers):
            left.append(part)
        elif single:
            axis = -1 if problem.channels_last else 1
            apply_affine(out[part], scale, bias, problem.activation, axis)
    return left


def takes(x, y):
    """Whether cuDNN is installed and supports convolutions from images like x to images like y."""
    within = x.size and y.size and max(x[0].size, y[0].size) <= _MOST_ELEMENTS
    return bool(within) and dtype_name(x.dtype) != "float64" and cudnn_available()


def _fusible(x, out, problem):
    """Whether a half-precision graph of several nodes can be trusted with these arrays.

    Its kernels are compiled at run time. With NCHW arrays and sizes of 1 they left elements of the
    output unwritten (cuDNN 9.19). They are made for NHWC with whole vectors of channels.
    """
    return problem.channels_last and x.shape[3] % 8 == 0 and out.shape[3] % 8 == 0


def _tables(scale, bias, xp):
    """Return the per-channel arrays of the graph, in float32."""
    given = ((SCALE, scale), (BIAS, bias))
    return {uid: xp.ascontiguousarray(a, np.float32) for uid, a in given if a is not None}


def parts_of(x, y):
    """Cut a batch into slices, each small enough for cuDNN."""
    return _parts(len(x), _MOST_ELEMENTS // max(x[0].size, y[0].size))


def _parts(batch, most):
    """Cut a batch into slices of few different lengths, so that few graphs are needed.

    The number of active blocks changes with every frame, and planning a graph takes milliseconds.
    Lengths have at most four significant bits, as in 1000 = 960 + 40: eight lengths per octave.
    """
    parts, start = [], 0
    while start < batch:
        length = min(batch - start, most)
        spare = max(length.bit_length() - 4, 0)
        length = length >> spare << spare
        parts.append(slice(start, start + length))
        start += length
    return parts


def describe(arrays, result, problem, activation=None):
    """Return the key of the graph that computes the array ``result`` from the others."""
    x, w, y = arrays[X], arrays[W], arrays[Y]
    if problem.channels_last:
        x, w, y = (a.transpose(0, 3, 1, 2) for a in (x, w, y))
    return _Key(
        result=result,
        device=_current()[0],
        dtype=dtype_name((y if result == X else x).dtype),
        result_dtype=dtype_name(arrays[result].dtype),
        x=x.shape,
        w=w.shape,
        y=y.shape,
        strides=problem.strides,
        pads=problem.pads,
        channels_last=problem.channels_last,
        tf32=problem.tf32,
        scale=SCALE in arrays,
        bias=BIAS in arrays,
        activation=activation,
    )


def run(key, arrays):
    """Execute the graph on CuPy's current stream; return False if cuDNN does not support it."""
    import cudnn

    pointers = {uid: address(array) for uid, array in arrays.items()}
    if any(pointer % _ALIGNMENT for pointer in pointers.values()):
        return False
    with _LOCK:
        graph = _graph(key)
        if graph is None:
            return False
        handle = _handle(key.device)
        workspace = namespace(arrays[X]).empty(graph.get_workspace_size(), np.uint8)
        cudnn.set_stream(handle, _current()[1])
        graph.execute(pointers, address(workspace), handle=handle)
    return True


def _current():
    """Return the numbers of CuPy's current device and stream."""
    import cupy

    return cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr


@functools.cache
def _handle(device):
    """Return the handle of a device, which must be the current one."""
    import cudnn

    return cudnn.create_handle()


@functools.cache
def _kernel_cache(family):
    """Return the kernel cache that a family of graphs shares."""
    import cudnn

    return cudnn.create_kernel_cache()


@functools.lru_cache(maxsize=1024)
def _graph(key):
    """Return a graph ready to execute, or None if cuDNN has no kernel for it."""
    import cudnn

    # For a plain convolution the fastest kernels are precompiled ones, for fixed shapes. Fused
    # kernels are compiled, in 0.3 s each; with dynamic shapes this happens once for a family.
    for dynamic in (True, False) if key.fused else (False,):
        try:
            return _plan(key, dynamic)
        except cudnn.cudnnGraphNotSupportedError:
            continue
    return None


def _plan(key, dynamic):
    """Build the graph and let cuDNN choose a kernel."""
    import cudnn

    options = {}
    if dynamic:
        options = {"kernel_cache": _kernel_cache(key.family), "is_dynamic_shape_enabled": True}
    dtype, result_dtype = (
        {
            "float16": cudnn.data_type.HALF,
            "bfloat16": cudnn.data_type.BFLOAT16,
            "float32": cudnn.data_type.FLOAT,
        }[name]
        for name in (key.dtype, key.result_dtype)
    )
    graph = cudnn.pygraph(
        io_data_type=dtype,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=_handle(key.device),
        **options,
    )

    def tensor(uid, sizes, data_type):
        strides = _strides(sizes, key.channels_last)
        return graph.tensor(dim=list(sizes), stride=strides, data_type=data_type, uid=uid)

    (top, bottom), (left, right) = key.pads
    sizes = {X: key.x, W: key.w, Y: key.y}
    inputs = {uid: tensor(uid, dim, dtype) for uid, dim in sizes.items() if uid != key.result}
    geometry = {
        "pre_padding": [top, left],
        "post_padding": [bottom, right],
        "stride": list(key.strides),
        "dilation": [1, 1],
    }
    if key.result == X:
        y = graph.conv_dgrad(loss=inputs[Y], filter=inputs[W], **geometry)
    elif key.result == W:
        y = graph.conv_wgrad(image=inputs[X], loss=inputs[Y], **geometry)
    else:
        y = graph.conv_fprop(image=inputs[X], weight=inputs[W], **geometry)
    per_channel = (1, key.y[1], 1, 1)
    if key.scale:
        y = graph.mul(a=y, b=tensor(SCALE, per_channel, cudnn.data_type.FLOAT))
    if key.bias:
        y = graph.add(a=y, b=tensor(BIAS, per_channel, cudnn.data_type.FLOAT))
    if key.activation == "silu":
        y = graph.swish(input=y, swish_beta=1.0)
    elif key.activation is not None:
        y = {"relu": graph.relu, "gelu": graph.gelu}[key.activation](input=y)
    y.set_output(True).set_data_type(result_dtype).set_uid(key.result)
    y.set_dim(list(sizes[key.result])).set_stride(_strides(sizes[key.result], key.channels_last))
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.deselect_numeric_notes(_unwanted(key, cudnn.numerical_note))
    graph.check_support()
    graph.build_plans()
    return graph


def _strides(sizes, channels_last):
    """Return the strides, in elements, of a packed tensor whose sizes are in NCHW order."""
    _, c, h, w = sizes
    return [c * h * w, 1, c * w, c] if channels_last else [c * h * w, h * w, w, 1]


def _unwanted(key, note):
    """Return the properties of kernels that must not be chosen.

    They would break reproducibility or the accuracy of a plain sum, or for float32, unless TF32 is
    requested, IEEE products.
    """
    unwanted = [note.NONDETERMINISTIC, note.REDUCED_PRECISION_REDUCTION, note.FFT, note.WINOGRAD]
    unwanted += [note.WINOGRAD_TILE_4x4, note.WINOGRAD_TILE_6x6, note.WINOGRAD_TILE_13x13]
    if key.dtype == "float32":
        unwanted.append(note.DOWN_CONVERT_INPUTS)
        if not key.tf32:
            unwanted.append(note.TENSOR_CORE)
    return unwanted
