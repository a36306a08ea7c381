"""stack_layer_norm: cases of its kernel, compared with the formula in float64."""

import numpy as np

from sbnet_cupy.block_sparse.stack.stack_layer_norm import (
    StackLayerNorm,
    prepare_stack_layer_norm,
)

from .exhaustive import pairs
from .stack_affine_cases import EPS, LEAST
from .stack_on_host import UNWRITTEN, Blocks, loaded, stored

# elements of the stack, of scales, and of the result; channels, block, whether there is a scale
# and a shift
CASES = [
    *pairs(
        [("Half",) * 3, ("BFloat16",) * 3, ("float",) * 3, ("Half", "float", "Half"),
         ("Half", "float", "float"), ("BFloat16", "float", "float")],
        [96, 384, 1, 12, 27, 120], [(4, 2), (1, 1)], [True, False]
    ),
    (("Half",) * 3, 1024, (2, 2), True), (("float",) * 3, 512, (2, 2), True),
    (("Half", "float", "Half"), 1024, (2, 2), True),
]  # fmt: skip


def check(case, xp=np):
    """Run a case on arrays of NumPy or CuPy, twice; what must not be read is NaN."""
    (element, scale_element, out_element), channels, block, affine = case
    rng = np.random.default_rng(channels)
    blocks = Blocks(block=block)
    bin_counts, indices, _ = blocks.table()
    count, shape = int(bin_counts[0]), (len(indices), *blocks.block, channels)
    x = stored(rng.normal(1, 2, shape), element)
    x[count:] = stored(np.array([np.nan]), element)
    scale, shift = (stored(rng.normal(0, 1, channels), scale_element) for _ in range(2))
    of_both = scale_element, out_element
    sizes = StackLayerNorm(element, x.itemsize, *of_both, len(indices), block, channels, 1e-3)
    results = []
    for settled in (False, True):
        out = xp.asarray(stored(np.full(shape, UNWRITTEN), out_element))
        given = [xp.asarray(a) if affine else None for a in (scale, shift)]
        run = prepare_stack_layer_norm(sizes, settled)
        run(xp.asarray(x), *given, xp.asarray(bin_counts), out)
        results.append(out if xp is np else xp.asnumpy(out))
    np.testing.assert_array_equal(*results)
    wide = loaded(x[:count], element)
    apart = wide - wide.mean(-1, keepdims=True)
    variance = np.square(apart).mean(-1, keepdims=True) + 1e-3
    unit = apart / np.sqrt(variance)
    gamma, beta = (
        loaded(a, scale_element) if affine else i for a, i in ((scale, 1.0), (shift, 0.0))
    )
    expected = unit * gamma + beta
    # The mean is off by the depth of its sum; the factor by that of its own, by what the mean adds
    # to the distances (of first order in their sum, which is 0), and by a root and two quotients.
    depth = sizes.each * sizes.vector + 6
    mean_off = depth * EPS["float"] * np.abs(wide).mean(-1, keepdims=True)
    factor_off = (depth + 6) * EPS["float"] + mean_off**2 / variance
    unit_off = mean_off / np.sqrt(variance) * (1 + np.abs(unit)) + np.abs(unit) * factor_off
    near = np.abs(gamma) * unit_off + 3 * EPS["float"] * (np.abs(unit * gamma) + np.abs(beta))
    error = np.abs(loaded(results[0][:count], out_element) - expected)
    rounded = EPS[out_element] * (np.abs(expected) + near) + LEAST[out_element]
    assert (error <= near + rounded).all()
    assert (results[0][count:] == stored(np.array([UNWRITTEN]), out_element)).all()
