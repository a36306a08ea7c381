"""What follows a convolution or a read: scale and shift per channel, then relu, silu or gelu."""

import numpy as np

from ..core.arrays import is_cupy, namespace

ACTIVATIONS = (None, "relu", "silu", "gelu")
SCALED_LAST = 1 << 30  # in the number of what follows a convolution, as in activation.cuh


def scales_last(number):
    """Whether channels are scaled and shifted behind what has such a number."""
    return bool(number & SCALED_LAST)


# erf in four pieces, each a quotient of polynomials (lowest power first), from the freely usable
# s_erf.c of Sun Microsystems' FDLIBM 5.3 (1993), error below one unit in the last place.
_ONE_ROUNDED = 8.45062911510467529297e-01  # erf(1), rounded so that it is exact in float32
_TINY_P = (1.28379167095512558561e-01, -3.25042107247001499370e-01, -2.84817495755985104766e-02,
           -5.77027029648944159157e-03, -2.37630166566501626084e-05)  # fmt: skip
_TINY_Q = (1.0, 3.97917223959155352819e-01, 6.50222499887672944485e-02, 5.08130628187576562776e-03,
           1.32494738004321644526e-04, -3.96022827877536812320e-06)  # fmt: skip
_ONE_P = (-2.36211856075265944077e-03, 4.14856118683748331666e-01, -3.72207876035701323847e-01,
          3.18346619901161753674e-01, -1.10894694282396677476e-01, 3.54783043256182359371e-02,
          -2.16637559486879084300e-03)  # fmt: skip
_ONE_Q = (1.0, 1.06420880400844228286e-01, 5.40397917702171048937e-01, 7.18286544141962662868e-02,
          1.26171219808761642112e-01, 1.36370839120290507362e-02,
          1.19844998467991074170e-02)  # fmt: skip
_MIDDLE_P = (-9.86494403484714822705e-03, -6.93858572707181764372e-01, -1.05586262253232909814e01,
             -6.23753324503260060396e01, -1.62396669462573470355e02, -1.84605092906711035994e02,
             -8.12874355063065934246e01, -9.81432934416914548592e00)  # fmt: skip
_MIDDLE_Q = (1.0, 1.96512716674392571292e01, 1.37657754143519042600e02, 4.34565877475229228821e02,
             6.45387271733267880336e02, 4.29008140027567833386e02, 1.08635005541779435134e02,
             6.57024977031928170135e00, -6.04244152148580987438e-02)  # fmt: skip
_TAIL_P = (-9.86494292470009928597e-03, -7.99283237680523006574e-01, -1.77579549177547519889e01,
           -1.60636384855821916062e02, -6.37566443368389627722e02, -1.02509513161107724954e03,
           -4.83519191608651397019e02)  # fmt: skip
_TAIL_Q = (1.0, 3.03380607434824582924e01, 3.25792512996573918826e02, 1.53672958608443695994e03,
           3.19985821950859553908e03, 2.55305040643316442583e03, 4.74528541206955367215e02,
           -2.24409524465858183362e01)  # fmt: skip


def check_activation(activation):
    """Raise ValueError unless ``activation`` is one of :data:`ACTIVATIONS`."""
    if not (activation is None or isinstance(activation, str)) or activation not in ACTIVATIONS:
        raise ValueError(f"activation must be None, 'relu', 'silu' or 'gelu', got {activation!r}")


def apply_affine(array, scale, shift, activation, channel_axis=-1):
    """Make a float32 or float64 array ``activation(array * scale + shift)``, in place; return it.

    ``scale`` and ``shift`` hold one value per channel, or are None.
    """
    per_channel = [1] * array.ndim
    per_channel[channel_axis] = -1
    if scale is not None:
        array *= scale.astype(array.dtype, copy=False).reshape(per_channel)
    if shift is not None:
        array += shift.astype(array.dtype, copy=False).reshape(per_channel)
    return array if activation is None else apply_activation(array, activation)


def apply_activation(array, name):
    """Apply the activation to a float32 or float64 array, in place; return the array.

    ``relu(x) = max(x, 0)`` (NaN stays NaN), ``silu(x) = x * sigmoid(x)`` and
    ``gelu(x) = x * (1 + erf(x / sqrt(2))) / 2``, exact, not the tanh approximation.
    """
    if name is None:
        return array
    xp = namespace(array)
    if name == "relu":
        return xp.maximum(array, 0, out=array)
    if name == "silu":
        # exp of a negative number never overflows: sigmoid(x) = (1 or e^x) / (1 + e^-|x|)
        decay = xp.exp(-xp.abs(array))
        array *= xp.where(array >= 0, array.dtype.type(1), decay)
        decay += 1
        array /= decay
        return array
    if name == "gelu":
        factor = erf(array * array.dtype.type(0.5**0.5))
        factor += 1
        array *= 0.5
        array *= factor
        return array
    return array


def activation_grad(grad, array, name):
    """Return ``grad`` times the activation's derivative at ``array``; both float32 or float64.

    relu's derivative at 0 is 0, and 1 at NaN, as in PyTorch; silu's is ``s * (1 + x * (1 - s))``
    with ``s = sigmoid(x)``, and gelu's ``(1 + erf(x / sqrt(2))) / 2 + x * exp(-x^2 / 2) /
    sqrt(2 * pi)``.

    Examples
    --------
    >>> activation_grad(np.ones(3), np.array([-2.0, 0.0, 2.0]), "relu")
    array([0., 0., 1.])
    """
    xp = namespace(array)
    if name == "relu":
        return xp.where(array <= 0, grad.dtype.type(0), grad)
    if name == "silu":
        decay = xp.exp(-xp.abs(array))
        larger, smaller = 1 / (1 + decay), decay / (1 + decay)  # sigmoid(|x|) and sigmoid(-|x|)
        sigmoid = xp.where(array >= 0, larger, smaller)
        complement = xp.where(array >= 0, smaller, larger)  # 1 - sigmoid, with no digit lost
        return grad * (sigmoid * (1 + array * complement))
    if name == "gelu":
        half = array * array.dtype.type(0.5**0.5)
        slope = (1 + erf(half)) * 0.5
        slope += array * xp.exp(-half * half) * array.dtype.type(0.3989422804014327)  # (2 pi)**-0.5
        return grad * slope
    return grad


def erf(array):
    """Return the error function of a float32 or float64 array, in its dtype.

    Source: FDLIBM 5.3, s_erf.c (NumPy has no erf); CuPy brings its own.

    Examples
    --------
    >>> import math
    >>> bool(erf(np.array([0.5]))[0] == math.erf(0.5))
    True
    """
    if is_cupy(array):
        from cupyx.scipy.special import erf as cupy_erf

        return cupy_erf(array)
    size = np.abs(array, dtype=np.float64)
    value = np.where(size < 6, size, 1.0)  # 1 - erf(6) is below half a unit in the last place
    for low, high, piece in _PIECES:
        inside = (size >= low) & (size < high)
        if inside.any():
            value[inside] = piece(size[inside])
    value[np.isnan(size)] = np.nan
    return np.copysign(value, array).astype(array.dtype, copy=False)


def _erf_near_zero(x):
    square = x * x
    return x + x * (_polynomial(_TINY_P, square) / _polynomial(_TINY_Q, square))


def _erf_near_one(x):
    return _ONE_ROUNDED + _polynomial(_ONE_P, x - 1) / _polynomial(_ONE_Q, x - 1)


def _erf_middle(x):
    return _erf_through_exp(x, _MIDDLE_P, _MIDDLE_Q)


def _erf_tail(x):
    return _erf_through_exp(x, _TAIL_P, _TAIL_Q)


def _erf_through_exp(x, numerator, denominator):
    """1 - exp(-x^2 - 0.5625 + quotient) / x, with x^2 split so that no digit of it is lost."""
    inverse_square = 1 / (x * x)
    quotient = _polynomial(numerator, inverse_square) / _polynomial(denominator, inverse_square)
    head = x.astype(np.float32).astype(np.float64)
    return 1 - np.exp(-head * head - 0.5625) * np.exp((head - x) * (head + x) + quotient) / x


_PIECES = (
    (0, 0.84375, _erf_near_zero),
    (0.84375, 1.25, _erf_near_one),
    (1.25, 1 / 0.35, _erf_middle),
    (1 / 0.35, 6, _erf_tail),
)


def _polynomial(coefficients, x):
    """Evaluate by Horner's rule, lowest power first."""
    value = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value *= x
        value += coefficient
    return value


def same_dtype(scale, shift, dtype):
    """Bring scale and shift to one dtype when they differ; the usual case copies nothing."""
    if scale is None or shift is None or scale.dtype == shift.dtype:
        return scale, shift
    xp = namespace(scale)
    return xp.asarray(scale, dtype), xp.asarray(shift, dtype)
