"""The weights of a residual unit: drawn at random, folded from batch norms, and checked."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...core import libraries
from ...core.arrays import ArrayContainer, array_function, compute_dtype, namespace
from ...core.byte_order import check_byte_orders
from ...core.checks import (
    PYTORCH_ORDERS,
    check_array,
    check_contiguous,
    check_float,
    hint_of_order,
)
from ...core.packed import Packed
from ...core.readable import describe_array, shape_of
from ...core.scalars import generator_of
from ...core.sizes import is_integer
from ...core.spec import spec_of
from ...dense.conv2d import check_precision
from ...errors import DTypeError, ShapeError

_TABLES = ("scale1", "shift1", "scale2", "shift2", "scale3", "shift3")
WEIGHTS = ("w1", "w2", "w3", *_TABLES)


@dataclass(frozen=True, eq=False, repr=False)
class BottleneckWeights(ArrayContainer):
    """Weights of a residual unit, its batch norms folded to one scale and shift per channel.

    Checked where they are used, so that arrays of any library can be held.

    Parameters
    ----------
    w1, w2, w3 : array
        Kernels, HWIO: ``(1, 1, Cin, Cmid)``, ``(3, 3, Cmid, Cmid)``, ``(1, 1, Cmid, Cout)``.
    scale1, shift1 : array, shape (Cin,)
        ``a1(t) = relu(t * scale1 + shift1)``, before the first convolution; float, of any width.
    scale2, shift2, scale3, shift3 : array, shape (Cmid,)
        The same before the second and the third.

    Examples
    --------
    >>> weights = BottleneckWeights.random(32, 8)
    >>> weights
    BottleneckWeights: w1 float32 (1, 1, 32, 8) on cpu, w2 (3, 3, 8, 8), w3 (1, 1, 8, 32)
    >>> weights.w2.shape, weights.scale1.shape
    ((3, 3, 8, 8), (32,))
    """

    w1: Any
    w2: Any
    w3: Any
    scale1: Any
    shift1: Any
    scale2: Any
    shift2: Any
    scale3: Any
    shift3: Any

    def __repr__(self):
        """Tell the kernels; nothing is read."""
        return f"BottleneckWeights: {self._described()}"

    def _described(self):
        """Return the kernels in words."""
        w2, w3 = shape_of(self.w2), shape_of(self.w3)
        return f"w1 {describe_array(self.w1)}, w2 {w2}, w3 {w3}"

    def _arrays(self):
        return (
            self.w1, self.w2, self.w3, self.scale1, self.shift1, self.scale2, self.shift2,
            self.scale3, self.shift3,
        )  # fmt: skip

    def _map_arrays(self, function):
        return BottleneckWeights(*map(function, self._arrays()))

    @classmethod
    def random(cls, cin, cmid, cout=None, *, xp=np, dtype: Any = "float32", seed=0):
        """Draw weights for trials: kernels that keep the variance, scales and shifts near 1 and 0.

        Parameters
        ----------
        cin, cmid, cout : int
            Channels of the input, of the bottleneck, and of the output (``cin`` by default).
        xp : module
            Array module with ``asarray``, for example numpy or cupy.
        dtype : str or dtype
            Of the kernels; scales and shifts are float32 (float64 for float64).
        seed : int
            Same seed, same weights, in every library.
        """
        rng = generator_of(seed)
        cout = cin if cout is None else cout
        for name, channels in (("cin", cin), ("cmid", cmid), ("cout", cout)):
            if not is_integer(channels) or channels < 0:
                raise ShapeError(f"{name} must be a non-negative integer, got {channels!r}")
        if str(dtype) == "bfloat16":
            dtype = libraries.bfloat16("dtype")

        def kernel(*shape):
            return rng.standard_normal(shape) * np.sqrt(2 / max(np.prod(shape[:3]), 1))

        kernels = kernel(1, 1, cin, cmid), kernel(3, 3, cmid, cmid), kernel(1, 1, cmid, cout)
        tables = []
        for channels in (cin, cmid, cmid):
            tables += [rng.uniform(0.5, 1.5, channels), rng.uniform(-0.5, 0.5, channels)]
        wide = compute_dtype(dtype)
        return cls(
            *(xp.asarray(array.astype(dtype)) for array in kernels),
            *(xp.asarray(array.astype(wide)) for array in tables),
        )

    @classmethod
    def from_batch_norm(cls, w1, w2, w3, bn1, bn2, bn3, eps=1e-5):
        """Fold trained batch norms: ``scale = gamma / sqrt(variance + eps)`` and so on.

        Parameters
        ----------
        w1, w2, w3 : array
            Kernels, as in :class:`BottleneckWeights`.
        bn1, bn2, bn3 : (gamma, beta, mean, variance)
            Float arrays of one value per channel: the batch norm before each convolution.
        eps : float
            What the batch norms add to the variance.
        """
        tables = []
        for name, norm in (("bn1", bn1), ("bn2", bn2), ("bn3", bn3)):
            if not isinstance(norm, tuple | list) or len(norm) != 4:
                raise TypeError(
                    f"{name} must be (gamma, beta, mean, variance), got {type(norm).__name__}"
                )
            tables += _fold(*norm, eps, name)
        return cls(w1, w2, w3, *tables)


class PackedBottleneck(Packed):
    """The weights of a residual unit, packed for :func:`fused_bottleneck`.

    They are packed when a call first needs them and kept, in a form that suits the device. After
    the arrays were changed in place call :meth:`refresh`; until then results are those of the old
    weights, or, where a call is the first of its kind, of the new ones.

    Parameters
    ----------
    weights : BottleneckWeights
        Referred to, not copied.
    precision : None, "ieee" or "tf32"
        How float32 is multiplied, as for :func:`conv2d`.

    Examples
    --------
    >>> PackedBottleneck(BottleneckWeights.random(32, 8), precision="tf32").weights.w2.shape
    (3, 3, 8, 8)
    """

    def __init__(self, weights, *, precision=None):
        super().__init__()
        check_precision(precision)
        if not isinstance(weights, BottleneckWeights):
            raise TypeError(f"weights must be a BottleneckWeights, got {type(weights).__name__}")
        self.weights, self.precision = weights, precision

    def __repr__(self):
        """Tell the kernels and the precision; nothing is read."""
        return f"PackedBottleneck: {self.weights._described()}, precision {self.precision}"

    def _given(self):
        return self.weights._arrays()

    def _entered_with(self, function):
        return PackedBottleneck(self.weights._map_arrays(function), precision=self.precision)

    def plain(self):
        """Return copies of the arrays in the dtype to compute in, for NumPy."""

        def pack(*arrays):
            arrays, copies = arrays[:9], arrays[9:]
            if not copies:
                return [array.copy() for array in widened(self.weights)]
            for copy, array in zip(*copies, arrays, strict=True):
                copy[...] = array
            return copies[0]

        return self.packed("plain", pack)


def plain_of(weights):
    """Return the BottleneckWeights; what is neither that nor packed is refused by the checks."""
    return weights.weights if isinstance(weights, PackedBottleneck) else weights


def arrays_of_unit(x, weights):
    """Return the arrays of the weights of a unit on the image x; raise where they are none."""
    if not isinstance(weights, BottleneckWeights):
        check_weights(spec_of(x), weights)
    return weights._arrays()


def resolve_precision(weights, precision):
    """Return the precision of the call; a PackedBottleneck has its own."""
    own = getattr(weights, "precision", precision)
    if precision is not None and precision is not own and precision != own:
        check_precision(precision)
        raise ValueError(
            f"precision must be {own!r}, that of the PackedBottleneck weights, got {precision!r}"
        )
    return own


def widened(weights):
    """Return the arrays of a BottleneckWeights in the dtype to compute in."""
    wide = compute_dtype(weights.w1.dtype)
    return [array.astype(wide, copy=False) for array in weights._arrays()]


@partial(array_function, takes_strided=True)
def _fold(gamma, beta, mean, variance, eps, name):
    """Return scale and shift of a batch norm, in float32 or float64."""
    like = spec_of(gamma)
    check_array(f"{name} gamma", like, ndim=1, kinds="f")
    for part, value in (("beta", beta), ("mean", mean), ("variance", variance)):
        check_array(f"{name} {part}", spec_of(value), shape=like.shape, kinds="f", like=like)
    xp, wide = namespace(gamma), compute_dtype(gamma.dtype)
    gamma, beta, mean, variance = (a.astype(wide) for a in (gamma, beta, mean, variance))
    scale = gamma / xp.sqrt(variance + wide.type(eps))
    return scale, beta - mean * scale


def check_weights(x, weights):
    """Check x and the weights against each other; return the number of output channels."""
    check_array("x", x, ndim=4)
    check_contiguous("x", x)
    check_float("x", x.dtype)
    if not isinstance(weights, BottleneckWeights):
        raise TypeError(f"weights must be a BottleneckWeights, got {type(weights).__name__}")
    cin = x.shape[3]
    check_array("weights.w1", weights.w1, ndim=4, like=x)
    check_array("weights.w3", weights.w3, ndim=4, like=x)
    cmid, cout = weights.w1.shape[3], weights.w3.shape[3]
    if not cmid:
        raise ShapeError(
            f"weights.w1 must have an output channel or more, got shape {weights.w1.shape}"
        )
    _check_kernel("weights.w1", weights.w1, (1, 1, cin, cmid), x)
    _check_kernel("weights.w2", weights.w2, (3, 3, cmid, cmid), x)
    _check_kernel("weights.w3", weights.w3, (1, 1, cmid, cout), x)
    for name in _TABLES:
        channels = cin if name.endswith("1") else cmid
        check_array(f"weights.{name}", getattr(weights, name), shape=(channels,), kinds="f", like=x)
    return cout


def check_unit(x, weights, w_project, strides):
    """Check x, the weights and the projection; return the number of output channels."""
    cout = check_weights(x, weights)
    cin = x.shape[3]
    if w_project is not None:
        _check_kernel("w_project", w_project, (1, 1, cin, cout), x)
    elif cin != cout or strides != (1, 1):
        raise ShapeError(
            f"w_project must be given where the unit changes channels or size, got None for {cin} "
            f"to {cout} channels and strides {strides}; its shape is (1, 1, {cin}, {cout})"
        )
    return cout


def _check_kernel(name, kernel, shape, x):
    """Check shape and dtype of a kernel."""
    check_array(name, kernel, ndim=4, like=x)
    if kernel.shape != shape:
        raise ShapeError(
            f"{name} must have shape {shape}, for x of {x.shape[3]} channels, got {kernel.shape}"
            + hint_of_order(kernel.shape, shape[2], "HWIO", PYTORCH_ORDERS)
        )
    if kernel.dtype != x.dtype:
        check_byte_orders({"x": x, name: kernel})
        raise DTypeError(
            f"{name} must have the dtype of x, {x.dtype}, got {kernel.dtype}; "
            "convert it"
        )
