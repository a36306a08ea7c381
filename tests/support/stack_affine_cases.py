"""stack_affine: cases of its kernel, compared with the formula in float64."""

import numpy as np

from sbnet_cupy.block_sparse.stack.stack_affine import PRELU, StackAffine, prepare_stack_affine

from .exhaustive import pairs
from .stack_on_host import UNWRITTEN, Blocks, loaded, stored

EPS = {"Half": 2.0**-11, "BFloat16": 2.0**-8, "float": 2.0**-24}  # of one rounding
LEAST = {"Half": 2.0**-25, "BFloat16": 2.0**-134, "float": 2.0**-150}  # that of a subnormal number
SLOPE = np.float32(0.1)  # of leaky relu
ACTIVATIONS = {
    0: lambda t: t,
    1: lambda t: np.maximum(t, 0),
    4: lambda t: t * np.clip(t + 3, 0, 6) / 6,
    5: lambda t: np.clip(t, 0, 6),
    6: lambda t: np.clip(t + 3, 0, 6) / 6,
    7: lambda t: 1 / (1 + np.exp(-t)),
    PRELU: lambda t: np.where(t < 0, t * slopes_of(t.shape[-1]), t),
    int(SLOPE.view(np.int32)): lambda t: np.where(t < 0, t * np.float64(SLOPE), t),
}


def slopes_of(channels):
    """Return the slopes of a PReLU: of both signs, and more than 1."""
    return np.linspace(-0.5, 1.5, channels).astype(np.float32).astype(np.float64)


# element, those of scales, residual, result, and the result in another dtype, or None; channels,
# per image, scale, shift, residual, activation
CASES = pairs(
    [("Half", "float", "Half", "Half", None), (*["Half"] * 4, None),
     ("BFloat16", "float", *["BFloat16"] * 2, None), (*["BFloat16"] * 4, None),
     (*["float"] * 4, None), ("Half", *["float"] * 3, "Half"),
     ("BFloat16", *["float"] * 3, "BFloat16"), (*["float"] * 4, "Half"),
     (*["Half"] * 3, "float", None), ("Half", "float", "float", "Half", None)],
    [16, 12, 5], *[[False, True]] * 4, list(ACTIVATIONS),
)  # fmt: skip


def bound(values, activation, size, element):
    """What rounding may change: the sum's three steps, the activation's four, and the result's.

    ``size`` is the sum of the terms' magnitudes. A hardswish and the PReLU are at most 1.5 times as
    steep as their argument.
    """
    steepness = 1.5 if activation in (4, PRELU) else 1
    inner = steepness * 3 * size + 4 * np.abs(values)
    near = EPS["float"] * inner
    return near + EPS[element] * (np.abs(values) + near) + LEAST[element]


def check(case, xp=np):
    """Run a case on arrays of NumPy or CuPy; what must not be read is NaN."""
    elements, channels, per_image, scaled, shift, residual, activation = case
    element, scale_element, residual_element, out_element, low_element = elements
    rng = np.random.default_rng(channels)
    blocks = Blocks(block=(4, 2))
    bin_counts, indices, _ = blocks.table()
    count, shape = int(bin_counts[0]), (len(indices), *blocks.block, channels)
    of_values = (blocks.images, channels) if per_image else (channels,)

    def drawn(shape, element):
        given = stored(rng.normal(0, 2, shape), element)
        return given, loaded(given, element)

    x, wide_x = drawn(shape, element)
    scale, wide_scale = drawn(of_values, scale_element)
    given_shift, wide_shift = drawn(of_values, scale_element)
    given_residual, wide_residual = drawn(shape, residual_element)
    x[count:] = stored(np.array(np.nan), element)
    given_residual[count:] = stored(np.array(np.nan), residual_element)
    sizes = StackAffine(
        element, x.itemsize, *elements[1:4], low_element or out_element, len(indices),
        blocks.images, blocks.block, channels, per_image, activation,
    )  # fmt: skip
    before = stored(np.full(shape, UNWRITTEN), out_element)
    low = stored(np.full(shape, UNWRITTEN), low_element) if low_element else None
    given = (
        x, scale if scaled else None, given_shift if shift else None,
        given_residual if residual else None, slopes_of(channels).astype(np.float32),
        bin_counts, indices, before, low,
    )  # fmt: skip
    given = [None if array is None else xp.asarray(array) for array in given]
    prepare_stack_affine(sizes, settled=residual)(*given)
    out, low = (a if xp is np or a is None else xp.asnumpy(a) for a in given[-2:])
    of_row = indices[:count, 0] if per_image else np.zeros(count, int)

    def spread(values):
        return values.reshape(-1, channels)[of_row][:, None, None]

    terms = [wide_x[:count] * (spread(wide_scale) if scaled else 1)]
    terms += [spread(wide_shift)] * shift + [wide_residual[:count]] * residual
    expected, size = ACTIVATIONS[activation](sum(terms)), sum(map(np.abs, terms))
    if activation in (4, 6):
        size = size + 3
    error = np.abs(loaded(out[:count], out_element) - expected)
    assert (error <= bound(expected, activation, size, out_element)).all()
    assert (out[count:] == stored(np.array([UNWRITTEN]), out_element)).all()
    if low_element:
        assert (low[:count] == stored(loaded(out[:count], out_element), low_element)).all()
        assert (low[count:] == stored(np.array([UNWRITTEN]), low_element)).all()
