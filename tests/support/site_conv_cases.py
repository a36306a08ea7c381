"""Convolutions over kernel maps, for the kernels: NaN in rows that nobody may read."""

from dataclasses import dataclass, replace

import numpy as np

import sbnet_cupy as sb
from sbnet_cupy.core import operator
from sbnet_cupy.submanifold import site_conv_launch
from support.assertions import assert_close, assert_same, to_numpy
from support.site_map_cases import draw_sites
from support.strategies import BFLOAT16


@dataclass(frozen=True)
class SiteConvCase:
    """A submanifold, strided or transposed convolution of whole numbers."""

    dtype: str = "float16"
    sites: int = 130
    channels: int = 16
    channels_out: int = 24
    kernel: tuple = (3, 3)
    kind: str = "submanifold"
    groups: int = 1
    activation: str | None = "relu"
    residual: bool = True
    tables: bool = True  # scale and bias
    spare: int = 0
    precision: str | None = None
    whole: bool = True  # whole numbers, whose sums are exact

    def arrays(self, seed=0):
        """Return coordinates, shape of the grid, features, weights, scale, bias, and the source."""
        rng = np.random.default_rng(seed)
        d = len(self.kernel)
        shape = {1: (400,), 2: (16, 15), 3: (9, 8, 7), 4: (5, 5, 4, 4)}[d]
        rows = draw_sites(seed, self.sites, shape)
        x = rng.integers(-3, 4, (len(rows), self.channels)).astype(np.float64)
        size = (*self.kernel, self.channels // self.groups, self.channels_out)
        w = rng.integers(-2, 3, size).astype(np.float64)
        if not self.whole:
            x, w = rng.standard_normal(x.shape), rng.standard_normal(w.shape)
        scale = rng.choice([0.5, 1, 2], self.channels_out).astype(np.float32)
        bias = rng.integers(-4, 5, self.channels_out).astype(np.float32)
        return rows, shape, x, w, scale, bias, rng

    def run(self, asarray=np.asarray, seed=0):
        """Return the features of the result, with NaN in rows that hold no site."""
        return self._compute(asarray, seed, sb_dtype(self.dtype), lambda array: array)

    def exact(self, seed=0):
        """Return the result in float64, of arrays of the case's dtype, by array operations."""
        return self._compute(np.asarray, seed, np.dtype(np.float64), lambda array: array)

    def magnitude(self, seed=0):
        """Return the sum of magnitudes of what is added up."""
        linear = replace(self, activation=None)
        return linear._compute(np.asarray, seed, np.dtype(np.float64), abs)

    @property
    def terms(self):
        """Number of products of a sum, and what the epilogue adds."""
        return int(np.prod(self.kernel)) * self.channels // self.groups + 3

    def _compute(self, asarray, seed, dtype, change):
        rows, shape, x, w, scale, bias, rng = self.arrays(seed)
        x, w = (change(array.astype(sb_dtype(self.dtype)).astype(dtype)) for array in (x, w))
        scale, bias = change(scale), change(bias)
        capacity = len(rows) + self.spare if self.spare else None
        x = sb.sparse_tensor(
            asarray(x), asarray(rows), spatial_shape=shape, batch_size=2, capacity=capacity
        )
        x.features[len(rows) :] = np.nan
        tables = {"scale": asarray(scale), "bias": asarray(bias)} if self.tables else {}
        window = {
            "submanifold": {"onto": x.coordinates},
            "strided": {"stride": 2, "padding": 1},
            "transposed": {"stride": 2, "transposed": True},
        }[self.kind]
        made = sb.kernel_map(x.coordinates, self.kernel, **window)
        residual = rng.integers(-4, 5, (made.target.capacity, self.channels_out)).astype(np.float64)
        residual = change(residual).astype(dtype)
        residual[made.target.number() :] = np.nan
        return sb.site_conv(
            x.features, asarray(w), made, groups=self.groups, activation=self.activation,
            residual=asarray(residual) if self.residual else None, precision=self.precision,
            **tables,
        )  # fmt: skip


def run_by_plan(case, plan, asarray, monkeypatch):
    """Return a case's result by a plan that is given, whatever the planner would choose."""
    monkeypatch.setattr(site_conv_launch, "plan_site_conv", lambda conv, device: plan)
    monkeypatch.setattr(operator, "_PLANS", operator._Plans())
    return case.run(asarray, seed=3)


def sb_dtype(name):
    """Return a dtype by its name."""
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def assert_result(case, found, seed=0):
    """Compare a result: bit for bit where only the last rounding is not exact, else by bounds."""
    exact = case.exact(seed)
    if case.whole and case.activation in (None, "relu"):
        assert_same(to_numpy(found), exact.astype(sb_dtype(case.dtype)))
        return
    wide = np.float64 if case.dtype == "float64" else np.float32
    # silu and gelu have slopes of up to 1.13, and round some times more.
    slope, more = (1, 0) if case.activation is None else (1.13, 8)
    assert_close(
        to_numpy(found), exact, terms=case.terms + more, dtype=wide,
        magnitude=slope * case.magnitude(seed),
    )  # fmt: skip


CASES = [
    SiteConvCase(),
    SiteConvCase("bfloat16", channels=40, channels_out=72, kernel=(3, 3, 3), spare=9),
    SiteConvCase("float32", channels=20, kernel=(3, 3, 3), precision="tf32", activation=None),
    SiteConvCase("float32", channels=5, channels_out=7, kernel=(2, 3), spare=3),
    SiteConvCase("float64", channels=6, channels_out=4, groups=2, kernel=(5,)),
    SiteConvCase(channels=64, channels_out=128, kernel=(3, 3, 3), sites=300, residual=False),
    SiteConvCase(channels=3, channels_out=5, kernel=(2, 2, 2), kind="strided", tables=False),
    SiteConvCase(
        "float32", channels=13, channels_out=33, kernel=(3, 3), precision="tf32", kind="transposed",
    ),
    SiteConvCase("bfloat16", channels=12, channels_out=12, groups=12, kernel=(3, 3)),
    SiteConvCase(channels=16, channels_out=32, groups=4, kernel=(2, 1, 2, 1), kind="strided"),
    SiteConvCase(channels=130, channels_out=200, kernel=(1, 1), sites=64),
    *(SiteConvCase(sites=sites) for sites in (63, 64, 65, 1)),
    SiteConvCase("float32", sites=129, channels=8, channels_out=260, precision="tf32"),
    SiteConvCase(channels=8, channels_out=8, kernel=(7, 7, 7), sites=100),
    SiteConvCase(channels=32, kernel=(3, 3, 3, 3), channels_out=16, activation="silu"),
    SiteConvCase("float64", channels=2, channels_out=2, kernel=(3, 3), activation="gelu"),
    SiteConvCase("float16", channels=24, kernel=(3, 3, 3), activation=None, whole=False),
    SiteConvCase("bfloat16", channels=48, kernel=(3, 3, 3), activation="silu", whole=False),
    SiteConvCase("float32", channels=24, kernel=(3, 3, 3), activation="gelu", whole=False),
    SiteConvCase("float64", channels=24, kernel=(3, 3, 3), activation=None, whole=False),
]  # fmt: skip
