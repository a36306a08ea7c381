"""PackedWeights: the weights of a fused convolution, laid out once for many calls."""

import math

import numpy as np

from .. import _kernels
from .._arrays import (
    ArrayContainer,
    array_function,
    check_array,
    compute_dtype,
    empty,
    is_float,
    namespace,
)
from ..errors import DeviceError, DTypeError
from ._plans import Plans
from .conv2d import check_choice, check_per_channel, check_precision

_KEPT = []  # memory that captured graphs fill and read: they may be replayed as long as they like


class PackedWeights(ArrayContainer):
    """Weights of a convolution, with the scale and bias after it, packed for :func:`fused_conv`.

    They are packed when a call first needs them and kept, in a form that suits the device. After
    the arrays were changed in place call :meth:`refresh`; until then results are those of the old
    weights, or, where a call is the first of its kind, of the new ones.

    Parameters
    ----------
    w : array, shape (R, S, C, K), or (K, C, R, S) with ``w_format="OIHW"``
        Kernel; float16, bfloat16, float32 or float64. Referred to, not copied.
    scale, bias : float array, shape (K,), optional
        Factor and offset per output channel, for example a folded batch norm.
    w_format : "HWIO" or "OIHW"
        Layout of ``w``.
    precision : None, "ieee" or "tf32"
        How float32 is multiplied, as for :func:`conv2d`.

    Raises
    ------
    ShapeError
        If ``w`` has not four dimensions, or ``scale`` or ``bias`` not one value per channel.
    DTypeError
        If a dtype is not floating.

    Examples
    --------
    >>> weights = PackedWeights(np.ones((3, 3, 2, 4), np.float32), bias=np.ones(4, np.float32))
    >>> weights.w.shape, weights.scale is None
    ((3, 3, 2, 4), True)
    """

    def __init__(self, w, *, scale=None, bias=None, w_format="HWIO", precision=None):
        check_choice("w_format", w_format, ("HWIO", "OIHW"))
        check_precision(precision)
        _check_weights(w, scale, bias, w_format)
        self.w, self.scale, self.bias = w, scale, bias
        self.w_format, self.precision = w_format, precision
        self.launches = Plans()  # of fused_conv with these weights
        self._packed = {}  # how -> (packed, function that packs)
        self._entered = None  # these weights as the door lets them in, if they are not native

    def refresh(self):
        """Pack again, into the same memory, on the current stream; return nothing.

        Graphs that were captured with these weights use the new values from then on.
        """
        _refresh(self)

    def _arrays(self):
        return tuple(array for array in (self.w, self.scale, self.bias) if array is not None)

    def _map_arrays(self, function):
        """Map the arrays once: what is packed must outlive the call."""
        if self._entered is None:
            w, scale, bias = (a if a is None else function(a) for a in self._given())
            options = {"w_format": self.w_format, "precision": self.precision}
            self._entered = PackedWeights(w, scale=scale, bias=bias, **options)
        return self._entered

    def _given(self):
        return self.w, self.scale, self.bias

    def plain(self):
        """Return w (HWIO), scale and bias in the dtype to compute in, for NumPy."""
        dtype = compute_dtype(self.w.dtype)
        axes = tuple(map(self.w_format.index, "HWIO"))

        def pack(w, scale, bias, copies=None):
            arrays = (w.transpose(axes), scale, bias)
            if copies is None:
                return [None if a is None else np.array(a, dtype, order="C") for a in arrays]
            for copy, array in zip(copies, arrays, strict=True):
                if copy is not None:
                    copy[...] = array
            return copies

        return self._once("plain", pack)

    def packed(self, case, plan, pack):
        """Return the bytes that the kernel of a plan reads, made by ``pack``."""
        return self._once((*plan.pack_template(case), plan.chunks), pack)

    def _once(self, how, pack):
        """Return what ``pack`` makes of the weights: the same memory every time."""
        if how not in self._packed:
            if is_capturing(self.w):
                raise DeviceError(
                    "the PackedWeights w must be packed before a graph is captured; make the same "
                    "call once before"
                )
            self._packed[how] = pack(*self._given()), pack
            xp = namespace(self.w)
            if xp is not np:  # once, so that other streams may use them too
                xp.cuda.get_current_stream().synchronize()
        return self._packed[how][0]


@array_function
def _check_weights(w, scale, bias, w_format):
    """Check dtypes and shapes, of the arrays of any library."""
    check_array("w", w, ndim=4)
    if not is_float(w.dtype):
        raise DTypeError(f"w must be float16, bfloat16, float32 or float64, got {w.dtype}")
    check_per_channel(scale, bias, w.shape[w_format.index("O")], like=w)


@array_function
def _refresh(weights):
    """Pack again all that was packed, where it is."""
    for packed, pack in weights._packed.values():
        pack(*weights._given(), packed)


def is_capturing(array):
    """Whether the current stream is recording a CUDA graph."""
    xp = namespace(array)
    return xp is not np and xp.cuda.runtime.streamIsCapturing(xp.cuda.get_current_stream().ptr)


def prepare_pack(case, plan, w_format):
    """Return a function that packs w, scale and bias, into fresh memory unless some is given.

    See pack_weights in cuda_src/fused_conv.cu.
    """
    slices = plan.slices(case)
    units = plan.chunks * plan.steps(case.kernel) * 2 * plan.slice
    sizes = dict(zip("HWIO", (*case.kernel, case.channels, case.channels_out), strict=True))
    steps = {
        letter: math.prod(sizes[inner] for inner in w_format[i + 1 :])
        for i, letter in enumerate(w_format)
    }
    launch = _kernels.prepare(
        "fused_conv",
        "pack_weights",
        plan.pack_template(case),
        (-(-units // 256), slices),
        256,
        4,
        (slices, plan.chunks, case.channels, case.channels_out, *map(steps.get, "HWIO")),
    )

    def pack(w, scale, bias, packed=None):
        xp = namespace(w)
        if packed is None:
            packed = empty((plan.packed_bytes(case),), np.uint8, w)
            if is_capturing(w):
                _KEPT.append(packed)
        tables = (None if t is None else xp.ascontiguousarray(t, np.float32) for t in (scale, bias))
        launch(xp.ascontiguousarray(w), *tables, packed)
        return packed

    return pack
