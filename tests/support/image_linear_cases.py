"""image_linear: cases of its kernel, compared with the formula in float64."""

import numpy as np

from sbnet_cupy.block_sparse.stack.image_linear import ImageLinear, prepare_image_linear

from .exhaustive import pairs
from .stack_affine_cases import EPS, LEAST
from .stack_on_host import UNWRITTEN, loaded, stored

# element, images, channels in and out, bias
CASES = pairs(
    ["Half", "BFloat16", "float"], [1, 3], [(960, 24), (24, 70), (1300, 9), (5, 3)],
    [True, False],
)  # fmt: skip


def check(case, xp=np):
    """Run a case on arrays of NumPy or CuPy, twice."""
    element, images, (channels, out_channels), bias = case
    rng = np.random.default_rng(channels)
    shapes = (images, channels), (out_channels, channels), (out_channels,)
    x, w, b = (stored(rng.normal(0, 1, shape), element) for shape in shapes)
    sizes = ImageLinear(element, x.itemsize, images, channels, out_channels)
    results = []
    for settled in (False, True):
        out = xp.asarray(stored(np.full((images, out_channels), UNWRITTEN), element))
        given = xp.asarray(x), xp.asarray(w), xp.asarray(b) if bias else None
        prepare_image_linear(sizes, settled)(*given, out)
        results.append(out if xp is np else xp.asnumpy(out))
    np.testing.assert_array_equal(*results)
    wide = [loaded(array, element) for array in (x, w, b)]
    sums = wide[0] @ wide[1].T + bias * wide[2]
    size = np.abs(wide[0]) @ np.abs(wide[1]).T + bias * np.abs(wide[2])
    # A lane's terms one after the other, five steps of a tree, the bias.
    near = EPS["float"] * (-(-channels // 32) + sizes.vector + 6) * size
    error = np.abs(loaded(results[0], element) - sums)
    assert (error <= near + EPS[element] * (np.abs(sums) + near) + LEAST[element]).all()
