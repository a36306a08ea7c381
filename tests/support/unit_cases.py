"""Calls of fused_bottleneck, made from a seed: on NumPy, on a GPU and on the host shim the same."""

import math
from dataclasses import dataclass, replace

import numpy as np

from sbnet_cupy import BottleneckWeights, PackedBottleneck, fused_bottleneck
from support import conv_oracles as oracles
from support import fused_cases
from support.fused_cases import DTYPES

STAGES = ((96, 24), (192, 48), (256, 64), (384, 96))  # channels of the paper's units, and between


@dataclass(frozen=True, kw_only=True)
class Case:
    """A residual unit, the blocks of its image, and which of them are active."""

    image: tuple[int, int, int, int] = (2, 13, 11, 16)  # N, H, W, C
    middle: int = 8
    bsize: tuple[int, int] = (4, 5)
    dtype: str = "float16"
    precision: str | None = None
    tight: bool = False  # scale1 and shift1 in the dtype of the image, else in float32
    table: str = "some"
    density: float = 0.6
    packed: bool = False
    expected: int | None = None
    seed: int = 0

    indices, active = fused_cases.Case.indices, fused_cases.Case.active

    def __str__(self):
        plain = Case()
        words = [self.dtype, *([self.precision] if self.precision else [])]
        for name in ("image", "middle", "bsize", "tight", "table", "packed", "expected"):
            value = getattr(self, name)
            if value != getattr(plain, name):
                words.append(f"{name} {value}")
        return ", ".join(words).replace(" ", "_")

    @property
    def type(self):
        return DTYPES[self.dtype]

    @property
    def shape(self):
        """Of the result."""
        return self.image

    def laid_out(self, image):
        """An image in the layout of the result, which is NHWC."""
        return image

    def arrays(self, *, whole=True):
        """Image, kernels, and the six scales and shifts.

        With whole numbers few weights of a channel are not 0, and all sums are whole and at most
        256: exact in every dtype, so that one wrong number shows wherever it comes from.
        """
        rng = np.random.default_rng([self.seed, whole])
        cin, cmid = self.image[3], self.middle
        shapes = (1, 1, cin, cmid), (3, 3, cmid, cmid), (1, 1, cmid, cin)
        if whole:
            x = rng.integers(-3, 4, self.image)
            kernels = [_sparse(rng, s, n) for s, n in zip(shapes, (4, 3, 3), strict=True)]
            tables = [rng.choice(v, c) for c in (cin, cmid, cmid) for v in ((-1, 1), (-2, 0, 1, 2))]
        else:
            x = rng.standard_normal(self.image)
            kernels = [rng.standard_normal(s) / math.sqrt(math.prod(s[:3]) or 1) for s in shapes]
            ranges = ((0.5, 1.5), (-0.5, 0.5))
            tables = [rng.uniform(*r, c) for c in (cin, cmid, cmid) for r in ranges]
        wide = np.float64 if self.dtype == "float64" else np.float32
        first = self.type if self.tight else wide
        dtypes = [self.type] * 4 + [first] * 2 + [wide] * 4
        return tuple(a.astype(t) for a, t in zip((x, *kernels, *tables), dtypes, strict=True))

    def spoiled(self, value, signs):
        """Arrays with ``value`` in a few channels of a few pixels.

        ``signs`` None leaves NaN of most infinities. Of the three kernels otherwise: with weights
        of one sign a sum with an infinity is infinite, and relu cuts it off or not.
        """
        x, *weights = self.arrays(whole=False)
        rng = np.random.default_rng(3)
        bad = rng.random(x.shape[:3]) < 0.03
        bad[0, 0, 0] = bad[-1, -1, -1] = True
        x[bad, rng.integers(0, x.shape[3], bad.sum())] = value
        if signs is not None:
            weights[:3] = [
                (sign * abs(w)).astype(w.dtype) for sign, w in zip(signs, weights[:3], strict=True)
            ]
        return x, *weights

    def exact(self):
        """The unit at every pixel for whole numbers, in float64."""
        return dense(*self.arrays())

    def bounded(self):
        """The unit at every pixel for the other numbers, and a bound on each pixel's error.

        Bounds of single values would grow through three sums of absolute values and say little.
        Norms of pixels, over their channels, grow by the largest singular values. What enters a
        product may be rounded, to 16 bits or tf32, as are weights to tf32; all else is in float.
        """
        x, *weights = (a.astype(np.float64) for a in self.arrays(whole=False))
        unit, tiny = oracles.rounding(self.type)
        tf32 = 2.0**-11 if self.precision == "tf32" and self.dtype == "float32" else 0.0
        factor = tf32 or (unit if self.type.itemsize == 2 else 0.0)
        sums = oracles.epsilon_of_sums(self.type)
        t, error = x, np.zeros_like(x[..., :1])
        for w, scale, shift in zip(weights[:3], weights[3::2], weights[4::2], strict=True):
            through = abs(scale).max() * error
            error = through + 2 * sums * (_norm(abs(t * scale) + abs(shift)) + through)
            t = np.maximum(t * scale + shift, 0)
            error = error + factor * (_norm(t) + error) + tiny * math.sqrt(t.shape[-1])
            matrix, window = w.reshape(-1, w.shape[3]), np.ones((*w.shape[:2], 1, 1))
            reach, error = (
                np.sqrt(oracles.conv2d(v * v, window)) for v in (_norm(t) + error, error)
            )
            relative = len(matrix) * sums * np.linalg.norm(abs(matrix), 2)
            relative += tf32 * (1 + tf32) * np.linalg.norm(matrix)
            error = np.linalg.norm(matrix, 2) * error + relative * reach
            t = oracles.conv2d(t, w)
        t = x + t
        error = error + sums * (_norm(t) + error)
        return t, error + unit * (_norm(t) + error) + tiny * math.sqrt(t.shape[-1])

    def assert_within_bound(self, y):
        """Raise unless every active pixel of ``y`` lies within its bound; NaN never does."""
        value, error = self.bounded()
        ratio = (_norm(np.asarray(y).astype(np.float64) - value) / error)[self.active()]
        if not (ratio <= 1).all():
            wrong = ~(ratio <= 1)
            raise AssertionError(
                f"{wrong.sum()} of {wrong.size} pixels beyond the bound, by up to {ratio.max():.3g}"
            )

    def arguments(self, arrays, give):
        """Positional and keyword arguments of the call; ``give`` hands an array over."""
        x, *rest = arrays
        weights = BottleneckWeights(*map(give, rest))
        keywords = {"bsize": self.bsize, "expected": self.expected}
        if self.packed:
            weights = PackedBottleneck(weights, precision=self.precision)
        else:
            keywords["precision"] = self.precision
        return (give(x), weights, *map(give, self.indices())), keywords

    def run(self, arrays, give, **options):
        """Call fused_bottleneck."""
        positional, keywords = self.arguments(arrays, give)
        return fused_bottleneck(*positional, **keywords, **options)


def _norm(image):
    """The 2-norm of each pixel, [N, H, W, 1]."""
    return np.linalg.norm(image, axis=-1, keepdims=True)


def _sparse(rng, shape, count):
    """A kernel with ``count`` weights of 1 or -1 for each output channel, the others 0."""
    w = np.zeros((math.prod(shape[:3]), shape[3]))
    for column in w.T:
        where = rng.choice(len(w), min(count, len(w)), replace=False)
        column[where] = rng.choice((-1, 1), len(where))
    return w.reshape(shape)


def dense(x, w1, w2, w3, scale1, shift1, scale2, shift2, scale3, shift3):
    """The unit at every pixel in float64; NaN and infinities spread as they do."""
    tables = (scale1, shift1), (scale2, shift2), (scale3, shift3)
    t = x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        for w, (scale, shift) in zip((w1, w2, w3), tables, strict=True):
            t = np.maximum(t * scale.astype(np.float64) + shift.astype(np.float64), 0)
            t = oracles.conv2d(t, w)
        return t + x


def kinds(y):
    """Tell numbers, NaN (of any sign) and the infinities apart."""
    return np.select([np.isnan(y), y == np.inf, y == -np.inf], [1, 2, 3])


SPREADING = [  # values, and signs of the kernels
    (np.nan, None), (np.inf, None), (-np.inf, None),
    (np.inf, (-1, 1, 1)), (np.inf, (1, -1, 1)), (np.inf, (1, 1, 1)), (np.inf, (1, 1, -1)),
]  # fmt: skip
NUMBERS = [
    {"dtype": "float16"}, {"dtype": "bfloat16"}, {"dtype": "float32", "precision": "tf32"},
]  # fmt: skip


def _cases():
    for number in NUMBERS:
        narrow = number["dtype"] != "float32"
        for cin, cmid in STAGES:
            for expected in (0, 10**6):
                image = (1, 9, 13, cin)
                yield Case(image=image, middle=cmid, expected=expected, packed=True, **number)
        # Bottlenecks and images that do not fill planes of channels, chunks of 64 bytes, pairs.
        for cin, cmid in ((8, 8), (16, 16), (24, 20), (40, 3), (72, 33), (104, 40), (64, 128),
                          (512, 128 if narrow else 64), (200, 56)):  # fmt: skip
            yield Case(image=(1, 10, 9, cin), middle=cmid, **number)
        # Blocks that tiles do not divide, of one pixel, and larger than the image.
        for bsize in ((1, 1), (8, 8), (16, 16), (9, 17), (40, 3), (3, 20), (2**31 - 1, 2**31 - 1)):
            for expected in (0, 10**6):
                image = (2, 23, 21, 32)
                yield Case(image=image, bsize=bsize, expected=expected, **number)
        for size in ((1, 1), (1, 7), (2, 2), (3, 1)):
            yield Case(image=(2, *size, 16), table="all", **number)
        yield Case(image=(0, 8, 8, 16), **number)
        if narrow:
            yield Case(image=(2, 13, 11, 48), middle=24, tight=True, **number)
            yield Case(image=(2, 13, 11, 96), middle=24, tight=True, packed=True, **number)
    base = Case(image=(2, 17, 19, 24), middle=16, packed=True)
    for table in ("all", "empty", "count 0", "count negative", "count too large", "corrupt",
                  "repeated"):  # fmt: skip
        for expected in (0, 10**6):
            yield replace(base, table=table, expected=expected)


CASES = list(_cases())
NUMPY_CASES = [  # for which a GPU has no kernel
    Case(image=(2, 13, 11, channels), middle=middle, dtype=dtype, precision=precision,
         packed=packed)
    for dtype, precision in (("float64", None), ("float32", None), ("float32", "ieee"),
                             ("float16", None), ("bfloat16", None))
    for channels, middle in (((8, 4), (17, 5), (1, 1)) if dtype[-2:] != "16" else ((17, 5), (1, 1)))
    for packed in (False, True)
]  # fmt: skip
