"""stack_conv2d and stack_halo by their CUDA kernels, on the shim: the NumPy bodies' results.

Half-precision products are exact in float32; sums come in another order than NumPy's, so that
results are compared within the bound of such sums.
"""

import importlib

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy.block_sparse.stack import stack_interpolate, stack_launch, stack_pool_launch
from sbnet_cupy.block_sparse.stack.stack_conv_plan import StackConv
from support import stack_cases
from support.assertions import assert_close, assert_same
from support.exhaustive import all_but, thinned_pairs
from support.stack_as_on_gpu import by_numpy, in_the_image
from support.stack_cases import drawn
from support.strategies import BFLOAT16

FLOAT16, FLOAT32 = np.dtype("f2"), np.dtype("f4")

CONVOLUTIONS = [
    # dtype, channels in and out, kernel, options
    (FLOAT16, 16, 24, 3, {}),
    (FLOAT16, 16, 24, 3, {"strides": 2, "padding": 1}),
    (FLOAT16, 3, 8, 7, {"strides": 2, "padding": 3}),
    (FLOAT16, 64, 64, 1, {}),
    (FLOAT16, 8, 8, 3, {"dilation": 3}),
    (FLOAT16, 5, 7, 2, {"padding": ((0, 1), (1, 0))}),
    (BFLOAT16, 32, 16, 3, {}),
    (FLOAT32, 16, 8, 3, {"precision": "tf32"}),
    (FLOAT16, 24, 24, 3, {"groups": 24}),
    (FLOAT16, 10, 10, 5, {"groups": 10, "strides": 2, "padding": 2}),
    (FLOAT32, 16, 16, 7, {"groups": 16, "padding": 3}),
    (FLOAT16, 16, 24, 3, {"transposed": True, "padding": 1}),
    (FLOAT16, 8, 8, 3, {"transposed": True, "padding": ((1, 3), (2, 2)), "dilation": 2}),
    (FLOAT16, 32, 48, 3, {"groups": 4}),
    (BFLOAT16, 72, 72, 3, {"groups": 3, "strides": 2, "padding": 1}),
]


CASES = [(*row, "HWIO") for row in CONVOLUTIONS] + [(*row, "OIHW") for row in CONVOLUTIONS[::4]]
USUAL = [CASES[i] for i in (6, 7, 9, 14, 16)]  # of each dtype and layout
SANITIZED = [CASES[i] for i in (0, 2, 12, 13)]  # with these, of each kind of kernel


@pytest.mark.parametrize("case", all_but(CASES, USUAL, SANITIZED), ids=str)
def test_convolution(on_shim, case):
    """With and without an epilogue; what sticks out is 0, and so are rows past the count."""
    dtype, c, k, size, options, w_format = case
    blocks, table, x, rng = drawn(dtype, c)
    groups = options.get("groups", 1)
    w = (rng.standard_normal((size, size, c // groups, k)) / size).astype(dtype)
    sizes = {name: options[name] for name in ("strides", "padding", "dilation") if name in options}
    after = table.after_transposed if options.get("transposed") else table.after_conv
    after = after(size, **sizes)
    residual = blocks.stack(blocks.images(after, k, rng, dtype), after)
    scale, bias = rng.uniform(0.5, 1.5, (2, k)).astype(np.float32)
    epilogues = [
        {}, {"scale": scale, "bias": bias, "residual": residual, "activation": "relu"}
    ]  # fmt: skip
    given_w = w if w_format == "HWIO" else np.ascontiguousarray(w.transpose(3, 2, 0, 1))
    wide = [a.astype(np.float64) for a in (x, w)]
    large = [abs(a) for a in wide]
    plain = {name: value for name, value in options.items() if name != "precision"}
    tf32 = "precision" in options
    for epilogue in epilogues:
        wide_epilogue = {
            name: v if isinstance(v, str) else v.astype(np.float64) for name, v in epilogue.items()
        }
        expected = by_numpy(sb.stack_conv2d, *wide, table, **plain, **wide_epilogue)
        bounds = {n: v if isinstance(v, str) else abs(v) for n, v in wide_epilogue.items()}
        magnitude = by_numpy(sb.stack_conv2d, *large, table, **plain, **bounds)
        on_shim.clear()
        y = sb.stack_conv2d(x, given_w, table, w_format=w_format, **options, **epilogue)
        assert on_shim, "no kernel was launched"
        inside = sb.stack_pixel_mask(after)[..., None]
        assert not np.where(inside, 0, y.astype(np.float32)).any()
        expected, magnitude = (np.where(inside, a, 0) for a in (expected, magnitude))
        terms = size * size * c // groups + 3
        if tf32:  # factors of 11 significant bits
            magnitude, terms = magnitude * 2.0**14, 1
        assert_close(y, expected, terms=terms, dtype=np.float32, magnitude=magnitude)


def test_packed_weights(on_shim):
    """Packed once; the same bits as packed at the call."""
    _, table, x, rng = drawn(FLOAT16, 16)
    w = rng.standard_normal((3, 3, 16, 8)).astype(FLOAT16)
    bias = rng.standard_normal(8).astype(np.float32)
    weights = sb.PackedWeights(w, bias=bias)
    first = sb.stack_conv2d(x, w, table, bias=bias)
    for _ in range(2):
        assert_same(sb.stack_conv2d(x, weights, table), first)
    assert [kernel for _, kernel in on_shim].count("pack_stack_weights") == 2


@pytest.mark.parametrize("element, dtype", [("Half", FLOAT16), ("BFloat16", BFLOAT16),
                                            ("float", FLOAT32)])  # fmt: skip
@pytest.mark.parametrize("turned", [False, True])
def test_weights_are_packed_as_they_lie(on_shim, element, dtype, turned):
    """From float32 in any layout, and turned round: the bytes of a rounded copy."""
    k, c = 24, 20
    rng = np.random.default_rng(0)
    w = rng.standard_normal((3, 5, c, k)).astype(np.float32)  # HWIO
    if turned:
        c, k = k, c
    logical = w[::-1, ::-1].swapaxes(2, 3) if turned else w
    conv = StackConv(element, 1, 1, (1, 1), (8, 8), (8, 8), (8, 8), (8, 8), c, k, (3, 5), (1, 1),
                     (1, 1), (1, 2), 0, True, True, 1)  # fmt: skip
    expected = stack_launch.prepare_stack_pack(conv, "HWIO")(
        np.ascontiguousarray(logical.astype(dtype)), None, None
    )
    steps = [s // 4 for s in logical.strides]
    first = w.reshape(-1)[(w.shape[0] * w.shape[1] - 1) * w.shape[2] * w.shape[3] :]
    packed = np.zeros(conv.packed_bytes, np.uint8)
    run = stack_launch.prepare_stack_pack_strided(conv, tuple(steps), "float")
    run(first if turned else w, None, None, packed)
    assert_same(packed, expected)


DTYPES = [FLOAT16, BFLOAT16, FLOAT32, np.dtype("f8")]
SMALL = [(8, (8, 8)), (3, (4, 2)), (1, (1, 1))]  # channels, block


@pytest.mark.parametrize(
    "fill, dtype, sizes", thinned_pairs(6, [0, "-inf", "edge"], DTYPES, SMALL), ids=str
)
def test_halo(on_shim, fill, dtype, sizes):
    channels, block = sizes
    _, table, x, _ = drawn(dtype, channels, block, (13, 9))
    expected = by_numpy(sb.stack_halo, x, table, ((1, 3), (0, 5)), fill=fill)
    y = sb.stack_halo(x, table, ((1, 3), (0, 5)), fill=fill)
    assert [kernel for _, kernel in on_shim] == ["stack_halo"]
    assert_same(y, expected)


INTERPOLATIONS = ["nearest", "bilinear", "bilinear corners"]


@pytest.mark.parametrize(
    "mode, factor, dtype, sizes",
    [
        *thinned_pairs(6, INTERPOLATIONS, [2, 3, 0.5, 4], DTYPES[:3], SMALL[:2]),
        ("bilinear", 2, FLOAT16, (301, (2, 2))),  # more vectors of a pixel than threads
        *[("bilinear", 8, dtype, (21, (4, 2))) for dtype in DTYPES[:3]],  # as the end of an FCN
        ("bilinear", 4, FLOAT32, (8, (8, 8))),  # wide vectors of channels
        ("bilinear", 2, FLOAT16, (2000, (2, 2))),  # lines that are too long for shared memory
    ],
    ids=str,
)
def test_interpolation(on_shim, mode, factor, dtype, sizes):
    """As the core computes it from exact positions; here they are rounded, and so are shares."""
    channels, block = sizes
    _, table, x, _ = drawn(dtype, channels, block, (12, 10))
    after = table.after_interpolate(factor)
    options = {"mode": mode.split()[0], "align_corners": mode.endswith("corners")}
    wide = x.astype(np.float64)
    expected = by_numpy(sb.stack_interpolate, wide, table, scale_factor=factor, **options)
    size, new = table.image_size, after.image_size
    steps = tuple((a - 1) / (b - 1) if options["align_corners"] else a / b
                  for a, b in zip(size, new, strict=True))  # fmt: skip
    pool = stack_pool_launch.StackPool(
        {2: "Half", 4: "float"}[dtype.itemsize] if dtype != BFLOAT16 else "BFloat16",
        dtype.itemsize, table.capacity, table.batch, table.grid.shape[1:], channels, block, size,
        block_out=after.block_size,
    )  # fmt: skip
    run = stack_interpolate.prepare_stack_interpolate(pool, mode, steps)
    y = np.full((len(x), *after.block_size, channels), 7, dtype)
    run(x, table.bin_counts, table.active_block_indices, table.grid, y)
    is_wide = channels * dtype.itemsize % 16 == 0 or channels > 1000
    by_lines = mode.startswith("bilinear") and factor >= 2 and not is_wide
    assert [name for _, name in on_shim] == ["stack_interpolate" + by_lines * "_lines"]
    assert not y[table.count() :].any()
    # A share is a position of less than 64 pixels, rounded twice, less a whole number; it scales
    # the difference of two pixels, each no larger than the largest.
    most = np.full(expected.shape, abs(np.nan_to_num(wide)).max())
    actual, expected = (in_the_image(a, after) for a in (y, expected))
    assert_close(actual, expected, terms=4 * 64, dtype=stack_cases.sum_dtype(dtype), magnitude=most)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("mode", INTERPOLATIONS[1:])
@pytest.mark.parametrize("channels, factor", [(21, 8), (3, 2), (2, 3), (1, 4)])
def test_lines_have_the_bits_of_pixels(on_shim, monkeypatch, mode, dtype, channels, factor):
    """Interpolated by whole lines, or a pixel by each thread."""
    _, table, x, _ = drawn(dtype, channels, (4, 2), (13, 9))
    after = table.after_interpolate(factor)
    element = {2: "Half", 4: "float"}[dtype.itemsize] if dtype != BFLOAT16 else "BFloat16"
    pool = stack_pool_launch.StackPool(
        element, dtype.itemsize, table.capacity, table.batch, table.grid.shape[1:], channels,
        (4, 2), table.image_size, block_out=after.block_size,
    )  # fmt: skip
    found = []
    for _ in range(2):
        run = stack_interpolate.prepare_stack_interpolate(pool, mode, (1 / factor, 1 / factor))
        y = np.full((len(x), *after.block_size, channels), 7, dtype)
        run(x, table.bin_counts, table.active_block_indices, table.grid, y)
        found.append(in_the_image(y, after))
        monkeypatch.setattr(stack_interpolate, "_MOST_STEP", 0)
    assert [name for _, name in on_shim] == ["stack_interpolate_lines", "stack_interpolate"]
    assert np.array_equal(*found)


OTHERS = {
    "stack_interpolate": lambda x, table: sb.stack_interpolate(
        x, table, scale_factor=2, mode="bilinear"
    ),
    "stack_conv2d_grad": lambda x, table: sb.stack_conv2d_grad(
        x, x, np.full((3, 3, 8, 8), 0.5, x.dtype), table
    ),
    "stack_max_pool_grad": lambda x, table: sb.stack_max_pool_grad(
        sb.stack_max_pool(x, table, kernel=2), x, table, kernel=2
    ),
}


@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("function", OTHERS)
def test_what_else_reads_rims_reads_them_by_the_kernel(on_shim, monkeypatch, function, dtype):
    """Small whole numbers, so that sums are exact in any order."""
    _, table, x, _ = drawn(dtype, 8, (4, 2), (13, 9))
    x[...] = np.where(np.isnan(x), x, np.round(x))
    expected = by_numpy(OTHERS[function], x, table)
    on_shim.clear()
    for name in ("taps", "per_image", function):
        module = importlib.import_module(f"sbnet_cupy.block_sparse.stack.{name}")
        monkeypatch.setattr(module, "is_cupy", lambda array: True, raising=False)
    y = OTHERS[function](x, table)
    assert "stack_halo" in [kernel for _, kernel in on_shim]
    pairs = zip(y, expected, strict=True) if isinstance(y, tuple) else [(y, expected)]
    for actual, wanted in pairs:
        if actual is not None:
            count = table.count() if len(actual) == table.capacity else len(actual)
            assert not actual[count:].any()
            assert_same(actual[:count], wanted[:count], signed_zero=False)
