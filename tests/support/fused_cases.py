"""Calls of fused_conv, made from a seed: on NumPy, on a GPU and on the host shim the same."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sbnet_cupy import PackedWeights, fused_conv
from support import conv_oracles as oracles
from support.strategies import BFLOAT16, INT32

ORDER = {"NHWC": (0, 1, 2, 3), "NCHW": (0, 3, 1, 2), "HWIO": (0, 1, 2, 3), "OIHW": (3, 2, 0, 1)}
DTYPES = {name: np.dtype(name) for name in ("float16", "float32", "float64")}
DTYPES["bfloat16"] = BFLOAT16
_FAR = (INT32.min, INT32.max, -1, 2**30)
CORRUPT = [(-1, 0, 0), (INT32.max, 0, 1), (INT32.min, 1, 0), (9, 9, 9)] + [
    (0, *row) for far in _FAR for row in ((far, 0), (0, far), (far, far))
]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A convolution, the blocks of its result, and which of them are active."""

    image: tuple[int, int, int, int] = (2, 13, 11, 5)  # N, H, W, C
    kernel: tuple[int, int] = (3, 3)
    channels: int = 7
    strides: tuple[int, int] = (1, 1)
    padding: Any = "SAME"
    bsize: tuple[int, int] = (4, 5)
    dtype: str = "float32"
    precision: str | None = None
    data_format: str = "NHWC"
    w_format: str = "HWIO"
    extras: tuple = ()  # of scale, bias, residual
    activation: str | None = None
    table: str = "some"
    density: float = 0.6
    packed: bool = False
    expected: int | None = None
    seed: int = 0

    def __str__(self):
        plain = Case()
        words = [self.dtype, *([self.precision] if self.precision else [])]
        for name in ("image", "kernel", "channels", "strides", "padding", "bsize", "data_format",
                     "w_format", "extras", "activation", "table", "packed",
                     "expected"):  # fmt: skip
            value = getattr(self, name)
            if value != getattr(plain, name):
                words.append(f"{name} {value}")
        return ", ".join(words).replace(" ", "_")

    @property
    def type(self):
        return DTYPES[self.dtype]

    @property
    def epsilon(self):
        """Of the sums."""
        tf32 = self.dtype == "float32" and self.precision == "tf32"
        return oracles.epsilon_of_sums(self.type, tf32=tf32)

    @property
    def shape(self):
        """Of the result: N, P, Q, K."""
        size, pads = (
            self.image[1:3],
            oracles.pads(self.image[1:3], self.kernel, self.strides, self.padding),
        )
        axes = zip(size, pads, self.kernel, self.strides, strict=True)
        size = tuple(max((n + sum(pad) - k) // s + 1, 0) for n, pad, k, s in axes)
        return self.image[0], *size, self.channels

    def arrays(self, *, whole=True):
        """Image, kernel, scale, bias and residual, NHWC and HWIO.

        With whole numbers every product and sum is exact in float32, and so are the scales, which
        are powers of two.
        """
        rng = np.random.default_rng([self.seed, whole])
        w_shape, shape = (*self.kernel, self.image[3], self.channels), self.shape
        if whole:
            x, w = rng.integers(-3, 4, self.image), rng.integers(-1, 2, w_shape)
            scale = rng.choice([0.5, 1, -2], self.channels)
            bias, residual = rng.integers(-9, 10, self.channels), rng.integers(-9, 10, shape)
        else:
            x, w = rng.standard_normal(self.image), rng.standard_normal(w_shape)
            w /= math.sqrt(math.prod(w_shape[:3]))
            scale = rng.uniform(0.5, 1.5, self.channels)
            bias, residual = rng.standard_normal(self.channels), rng.standard_normal(shape)
        dtypes = (self.type, self.type, np.float32, np.float16, self.type)
        arrays = [a.astype(t) for a, t in zip((x, w, scale, bias, residual), dtypes, strict=True)]
        wanted = (True, True, *(name in self.extras for name in ("scale", "bias", "residual")))
        return tuple(a if want else None for a, want in zip(arrays, wanted, strict=True))

    def indices(self):
        """(bin_counts, active_block_indices)"""
        rng = np.random.default_rng([self.seed, 9])
        counts = (-(-n // b) for n, b in zip(self.shape[1:3], self.bsize, strict=True))
        every = np.argwhere(np.ones((self.shape[0], *counts))).astype(np.int32)
        rows = every[rng.random(len(every)) < self.density]
        spare = np.full((3, 3), -1, np.int32)
        spare[0] = 0  # a row past the count that would be right
        count, rows = {
            "some": (len(rows), [*rows, *spare]),
            "all": (len(every), every),
            "empty": (0, []),
            "count 0": (0, every),
            "count negative": (INT32.min, every),
            "count too large": (INT32.max, rows),
            "corrupt": (INT32.max, rng.permutation([*rows, *CORRUPT, (self.image[0], 0, 0)])),
            "repeated": (3 * len(rows), rng.permutation([*rows, *rows, *rows])),
        }[self.table]
        return np.array([count], np.int32), np.array(rows, np.int32, order="C").reshape(-1, 3)

    def active(self):
        """Which pixels of the result are active: bool [N, P, Q]."""
        (count,), rows = self.indices()
        bsize = tuple(min(b, n) for b, n in zip(self.bsize, self.shape[1:3], strict=True))
        return oracles.active_outputs(self.shape[:3], rows[: max(count, 0)].tolist(), bsize)

    def exact(self):
        """The result at every pixel for whole numbers, NHWC in float64."""
        return self._bounded(*self.arrays(), epsilon=0.0).value

    def bounded(self):
        """Values and bounds for the other numbers."""
        values = self._bounded(*self.arrays(whole=False), epsilon=self.epsilon)
        return oracles.bounded_round(values, self.type)

    def _bounded(self, x, w, scale, bias, residual, epsilon):
        options = {"epsilon": epsilon}
        y = oracles.bounded_conv2d(oracles.exact(x), w, self.strides, self.padding, **options)
        # scale, bias and residual are rounded in float also where the factors are not
        options = {"epsilon": min(epsilon, oracles.epsilon_of_sums(self.type))}
        y = oracles.bounded_affine(y, scale, bias, **options)
        if residual is not None:
            y = oracles.bounded_add(y, oracles.exact(residual))
            y = y._replace(error=y.error + options["epsilon"] * (abs(y.value) + y.error))
        return oracles.bounded_affine(y, None, None, self.activation, **options)

    def laid_out(self, image):
        """An NHWC image in the layout of the result, C-contiguous."""
        return np.ascontiguousarray(image.transpose(ORDER[self.data_format]))

    def arguments(self, arrays, give):
        """Positional and keyword arguments of the call; ``give`` hands an array over."""
        x, w, scale, bias, residual = arrays
        x, w = self.laid_out(x), np.ascontiguousarray(w.transpose(ORDER[self.w_format]))
        tables = {"scale": scale, "bias": bias}
        tables = {name: give(table) for name, table in tables.items() if table is not None}
        layout = {"w_format": self.w_format, "precision": self.precision}
        keywords = {name: getattr(self, name) for name in _OPTIONS}
        if self.packed:
            w = PackedWeights(give(w), **tables, **layout)
        else:
            w, keywords = give(w), keywords | tables | layout
        if residual is not None:
            keywords["residual"] = give(self.laid_out(residual))
        return (give(x), w, *map(give, self.indices())), keywords

    def run(self, arrays, give, **options):
        """Call fused_conv."""
        positional, keywords = self.arguments(arrays, give)
        return fused_conv(*positional, **keywords, **options)


_OPTIONS = ("bsize", "strides", "padding", "activation", "data_format", "expected")


def _cases():
    for dtype, precision in (("float16", None), ("bfloat16", None), ("float32", "tf32"),
                             ("float32", "ieee"), ("float64", None)):  # fmt: skip
        number = {"dtype": dtype, "precision": precision}
        # Whole vectors of channels, and odd ones in either layout.
        for channels in ((24, 24), (48, 16), (1, 1), (3, 17), (17, 3), (20, 40), (100, 8)):
            yield Case(image=(2, 13, 11, channels[0]), channels=channels[1], **number)
        yield Case(data_format="NCHW", w_format="OIHW", bsize=(3, 8), **number)
        yield Case(image=(1, 9, 16, 24), channels=8, data_format="NCHW", **number)
        # Kernels, strides, padding.
        for kernel in ((1, 1), (5, 5), (7, 7), (1, 5), (4, 2)):
            yield Case(kernel=kernel, image=(1, 13, 11, 8), channels=8, **number)
        for strides in ((2, 2), (1, 2), (3, 1)):
            yield Case(strides=strides, image=(1, 17, 19, 16), channels=8, **number)
            yield Case(strides=strides, padding="VALID", kernel=(3, 2), **number)
        yield Case(padding=((2, 0), (0, 3)), **number)
        yield Case(padding=((5, 4), (6, 7)), strides=(2, 2), kernel=(3, 5), **number)
        # What follows the sum.
        extras = ("scale", "bias", "residual")
        image = {"image": (2, 13, 11, 16), "channels": 16}
        yield Case(extras=extras, activation="relu", **image, **number)
        yield Case(extras=extras, activation="relu", data_format="NCHW", **number)
        yield Case(extras=("residual",), **image, **number)
        yield Case(extras=("scale",), packed=True, **image, **number)
        yield Case(extras=extras, packed=True, activation="relu", w_format="OIHW", **number)
        # Blocks that tiles do not divide, of one pixel, and larger than the image.
        for bsize in ((1, 1), (16, 16), (9, 17), (40, 3), (100, 100), (2**31 - 1, 2**31 - 1)):
            yield Case(bsize=bsize, image=(1, 23, 21, 8), channels=8, **number)
        yield Case(image=(1, 3, 2, 8), channels=8, kernel=(7, 7), **number)  # smaller than a window
        yield Case(kernel=(5, 5), padding="VALID", image=(2, 4, 9, 3), **number)  # no result
        yield Case(image=(0, 8, 8, 3), **number)
    base = Case(image=(2, 17, 19, 8), channels=8, dtype="float16", packed=True)
    for table in ("all", "empty", "count 0", "count negative", "count too large", "corrupt",
                  "repeated"):  # fmt: skip
        yield replace(base, table=table)
    yield replace(base, expected=0)
    yield replace(base, expected=10**6)


CASES = list(_cases())
SMOOTH = [
    Case(image=(1, 13, 11, 8), channels=8, activation=activation, extras=extras, **number)
    for activation in ("silu", "gelu")
    for extras in ((), ("scale", "bias", "residual"))
    for number in (
        {"dtype": "float16"}, {"dtype": "bfloat16"}, {"dtype": "float64"},
        {"precision": "tf32"}, {},
    )
]  # fmt: skip
