"""The wrappers of async_copy.cuh, tensor_core.cuh and wgmma.cuh, on the CPU and on a GPU.

The same toy kernels run in both places, on the CPU through the host shim. What goes
wrong on purpose runs on the CPU alone.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest

import host_cuda
from sbnet_cupy.core import compile as compiling
from sbnet_cupy.core import launch as kernels
from support.assertions import assert_close, assert_same
from support.strategies import BFLOAT16

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
STEM = "tensor_core_toy"
HALVES = {"Half": np.dtype("float16"), "BFloat16": BFLOAT16}
POISON = 0xFF


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the toy and the headers that it includes."""
    folder = tmp_path_factory.mktemp("tensor_core")
    toys = Path(host_cuda.__file__).parent / "toys"
    shutil.copy(toys / f"{STEM}.cu", folder)
    shutil.copytree(host_cuda.CUDA_SRC / "core", folder / "core")
    return folder


@pytest.fixture(scope="module")
def on_host(require, folder):
    """Run a toy on NumPy arrays; compile them all at the first need."""
    require("g++")
    host_cuda.prepare([(STEM, *toy) for toy in [*TOYS, *PLANTED]], source_dir=folder)

    def run(kernel, template, threads, args, shared=0):
        host_cuda.launch(STEM, kernel, template, 1, threads, args, shared, source_dir=folder)

    return run


@pytest.fixture(scope="module")
def on_gpu(require, folder):
    """Run a toy on copies of NumPy arrays, and copy them back."""
    cupy = require("gpu")

    def run(kernel, template, threads, args, shared=0):
        arrays = [arg for arg in args if isinstance(arg, np.ndarray)]
        copies = [cupy.asarray(array.view(np.uint8)) for array in arrays]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiling, "SOURCE_DIR", folder)
            compiling._source_hash.cache_clear()
            scalars = args[len(arrays) :]
            kernels.launch(STEM, kernel, template, 1, threads, (*copies, *scalars), shared)
        compiling._source_hash.cache_clear()
        for array, copy in zip(arrays, copies, strict=True):
            if array.flags.writeable:
                array.view(np.uint8)[...] = copy.get()

    return run


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def run(request):
    return request.getfixturevalue(f"on_{request.param}")


TOYS = [
    *[("copies", (size,)) for size in (4, 8, 16)],
    ("groups", (0, True, True)),
    ("ring", (True,)),
    ("bulk", (0,)),
    *[("matrices", (count, transposed)) for count in (2, 4) for transposed in (False, True)],
    *[
        ("product", (name, transposed, shuffles))
        for name in HALVES
        for transposed in (False, True)
        for shuffles in (False, True)
    ],
    *[("product_tf32", (shuffles,)) for shuffles in (False, True)],
    ("rounded", (0,)),
    ("addresses", (0,)),
    *[
        ("four_warps", (name, columns, registers, swizzled, 0))
        for name, columns in (("Half", 64), ("BFloat16", 24), ("float", 16))
        for registers in (False, True)
        for swizzled in (False, True)
    ],
]
PLANTED = [
    ("groups", (-1, True, True)),
    ("groups", (1, True, True)),
    ("groups", (0, False, True)),
    ("groups", (0, True, False)),
    ("ring", (False,)),
    ("changed_source", (0,)),
    ("unaligned", (0,)),
    ("unaligned_row", (0,)),
    ("bulk_wrong", (True, True)),
    ("bulk_wrong", (True, False)),
    ("bulk_wrong", (False, True)),
    *[("lanes_apart", (how,)) for how in range(3)],
    *[("four_warps", ("Half", 16, False, True, how)) for how in range(1, 5)],
]


def random_bytes(*shape, seed=0):
    """Bytes that do not end a float16 in NaN by accident, and are never poison."""
    x = np.random.default_rng(seed).integers(0, POISON, shape, np.uint8)
    x.flags.writeable = False
    return x


# ---- copies ----


@pytest.mark.parametrize("inside", [0, 1, 70, 128])
@pytest.mark.parametrize("size", [4, 8, 16])
def test_copies_and_zeros(run, size, inside):
    x, y = random_bytes(128, size), np.full((128, size), POISON, np.uint8)
    run("copies", (size,), 128, (x, y, inside), 128 * size)
    assert_same(y, np.where(np.arange(128)[:, None] < inside, x, np.uint8(0)))


@pytest.mark.parametrize("stages", [1, 3])
def test_groups_of_copies(run, stages):
    x, y = random_bytes(stages, 96, 16), np.zeros((stages, 96, 16), np.uint8)
    run("groups", (0, True, True), 96, (x, y, stages), x.size)
    assert_same(y, x)


@pytest.mark.parametrize(
    ("template", "missing"),
    [
        ((-1, True, True), [0, 1, 2]),  # never waits
        ((1, True, True), [2]),  # leaves the latest group under way
        ((0, False, True), [2]),  # the latest group is not committed
    ],
)
def test_what_is_not_waited_for_does_not_land(on_host, template, missing):
    x, y = random_bytes(3, 96, 16), np.zeros((3, 96, 16), np.uint8)
    on_host("groups", template, 96, (x, y, 3), x.size)
    expected = x.copy()
    expected[missing] = POISON
    assert_same(y, expected)


def test_a_wait_is_of_one_thread(on_host, monkeypatch):
    """Without a barrier, threads that come first do not see what later ones copied."""
    monkeypatch.setenv("SBNET_HOST_ORDER", "forward")
    x, y = random_bytes(1, 96, 16), np.zeros((1, 96, 16), np.uint8)
    on_host("groups", (0, True, False), 96, (x, y, 1), x.size)
    assert (y[:, 48:] == POISON).all()
    assert_same(y[:, :48], x[:, :48])


def ring(run, second_barrier):
    x, y = random_bytes(5, 64, 4).view(np.uint32), np.zeros(64, np.uint32)
    run("ring", (second_barrier,), 64, (x, y, 5), 2 * 64 * 4)
    return y, x.sum(axis=(0, 2), dtype=np.uint32)


def test_a_ring_of_copies(run):
    assert_same(*ring(run, True))


def test_a_copy_over_what_is_still_needed_is_seen(on_host):
    actual, expected = ring(on_host, False)
    assert (actual != expected).any()


def test_the_source_of_a_copy_must_not_change(on_host):
    with pytest.raises(host_cuda.KernelError, match="written before the copy was complete"):
        on_host("changed_source", (0,), 1, (np.zeros(16, np.uint8),))


@pytest.mark.parametrize(("offsets", "where"), [((8, 4), "global"), ((4, 8), "shared")])
def test_copies_must_be_aligned(on_host, offsets, where):
    with pytest.raises(host_cuda.KernelError, match=f"{where} memory must be aligned to 8 bytes"):
        on_host("unaligned", (0,), 1, (random_bytes(32), *offsets), 32)


# ---- bulk copies ----


@pytest.mark.parametrize("half", [32, 96, 20 * 1024])
def test_bulk_copies(run, half):
    check_bulk_copies(run, half)


def test_bulk_copies_fill_the_largest_shared_memory(on_host):
    check_bulk_copies(on_host, 113 * 1024)


def check_bulk_copies(run, half):
    x, y = random_bytes(2, half), np.zeros((2, half), np.uint8)
    run("bulk", (0,), 64, (x, y, half), 2 * half)
    assert_same(y, x[:, ::-1].copy())


BULK = {"expected": 64, "arrivals": 1, "sent": 64, "offset": 0, "parity": 0}
BULK_WRONG = {
    "too few bytes": ({"expected": 96}, r"deadlock.*\n +32 poll memory"),
    "too many bytes": ({"expected": 32}, "more bytes at a barrier than it was told"),
    "no arrival": ({"arrivals": 0}, r"deadlock.*\n +32 poll memory"),
    "two arrivals": ({"arrivals": 2}, "more often than its count"),
    "the wrong phase": ({"parity": 1}, "ended before 1 of its bulk copies"),
    "no phase": ({"parity": 2}, "of parity 2, which is neither"),
    "not whole": ({"sent": 60}, "bytes must be a multiple of 16, got 60"),
    "not aligned": ({"offset": 8}, "global memory must be aligned to 16 bytes"),
}


@pytest.mark.parametrize("name", BULK_WRONG)
def test_wrong_bulk_copies(on_host, name):
    change, message = BULK_WRONG[name]
    args = (random_bytes(96), np.zeros(32, np.uint8), *(BULK | change).values())
    with pytest.raises(host_cuda.KernelError, match=rf"(?s){message}"):
        on_host("bulk_wrong", (True, True), 32, args, 128)


@pytest.mark.parametrize(
    ("template", "message"),
    [((True, False), "ended before 1 of its bulk copies"), ((False, True), "nobody initialised")],
)
def test_a_barrier_is_initialised_and_waited_for(on_host, template, message):
    args = (random_bytes(96), np.zeros(32, np.uint8), *BULK.values())
    with pytest.raises(host_cuda.KernelError, match=message):
        on_host("bulk_wrong", template, 32, args, 128)


# ---- fragments and products ----


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [2, 4])
def test_ldmatrix(run, count, transposed):
    x, registers = np.arange(256, dtype=np.uint16), np.zeros((32, count), np.uint32)
    run("matrices", (count, transposed), 32, (x, registers))
    expected = np.zeros((32, count, 2), np.uint16)
    for lane in range(32):
        for m in range(count):
            for e in range(2):
                i, j = lane // 4, lane % 4 * 2 + e
                if transposed:
                    i, j = j, i
                expected[lane, m, e] = (8 * m + i) * 5 % 32 * 8 + j
    assert_same(registers.view(np.uint16).reshape(expected.shape), expected)


def matrices(dtype, depth, seed=0):
    """a[16, depth], b[depth, 8] and d[16, 8] of wide range: float32, and a and b exact in dtype."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return np.ldexp(rng.standard_normal(shape), rng.integers(-6, 6, shape)).astype(np.float32)

    a, b = draw(16, depth), draw(depth, 8)
    return a.astype(dtype), b.astype(dtype), draw(16, 8)


def arranged(a, b, transposed):
    """As the kernels want a and b in memory."""
    a, b = (a.T, b) if transposed else (a, b.T)
    return np.ascontiguousarray(a), np.ascontiguousarray(b)


def by_loop(a, b, d):
    """Sums k after k, each product exact and each sum rounded once: a fused multiply-add."""
    d = d.copy()
    for k in range(a.shape[1]):
        # A product of 24-bit numbers is exact in longdouble, and its sum is rounded far below.
        d = (a[:, k, None].astype(np.longdouble) * b[k].astype(np.longdouble) + d).astype("f4")
    return d


def check_sum(actual, a, b, d):
    """Within the bound of tensor cores, which cut digits off where a float unit rounds them."""
    a, b, d = (x.astype(np.float64) for x in (a, b, d))
    magnitude = abs(a) @ abs(b) + abs(d)
    assert_close(actual, a @ b + d, terms=2 * a.shape[1] + 1, dtype="f4", magnitude=magnitude)


@pytest.mark.parametrize("shuffles", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", HALVES)
def test_products_of_16_bit_numbers(run, name, transposed, shuffles):
    a, b, d = matrices(HALVES[name], 16)
    result = d.copy()
    run("product", (name, transposed, shuffles), 32, (*arranged(a, b, transposed), result))
    check_sum(result, a, b, d)


@pytest.mark.parametrize("shuffles", [False, True])
@pytest.mark.parametrize("name", HALVES)
def test_a_product_of_small_integers_is_exact(run, name, shuffles):
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-8, 9, shape).astype(HALVES[name]) for shape in ((16, 16), (16, 8)))
    result = np.arange(128, dtype=np.float32).reshape(16, 8)
    expected = a.astype("f4") @ b.astype("f4") + result
    run("product", (name, False, shuffles), 32, (*arranged(a, b, False), result))
    assert_same(result, expected)


def truncated(x):
    """Float32 numbers with only the digits of tf32, cut off; by another route than the kernels."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.trunc(mantissa * 2**11) / 2**11, exponent).astype(np.float32)


@pytest.mark.parametrize("shuffles", [False, True])
def test_products_of_tf32(run, shuffles):
    a, b, d = matrices(np.float32, 8)
    a, b = truncated(a), truncated(b)
    result = d.copy()
    run("product_tf32", (shuffles,), 32, (a, b, result))
    check_sum(result, a, b, d)


@pytest.mark.parametrize("shuffles", [False, True])
@pytest.mark.parametrize("name", [*HALVES, "TF32"])
def test_the_host_sums_k_after_k(on_host, name, shuffles):
    """To the bit, by shuffles and by the last lane alike."""
    a, b, d = matrices(HALVES.get(name, np.float32), 8 if name == "TF32" else 16, seed=2)
    result = d.copy()
    if name == "TF32":
        a, b = truncated(a), truncated(b)
        on_host("product_tf32", (shuffles,), 32, (a, b, result))
    else:
        on_host("product", (name, False, shuffles), 32, (*arranged(a, b, False), result))
    assert_same(result, by_loop(a, b, d))


@pytest.mark.parametrize(
    ("how", "message"),
    [(0, "have exited"), (1, "same operation"), (2, "same operation")],
)
def test_all_lanes_must_multiply(on_host, how, message):
    with pytest.raises(host_cuda.KernelError, match=message):
        on_host("lanes_apart", (how,), 64, (np.zeros(64, np.float32),))


def test_lanes_that_left_do_not_multiply_even_on_lenient_hardware(on_host, folder):
    args = (np.zeros(64, np.float32),)
    with pytest.raises(host_cuda.KernelError, match="whole warp, but lane 16 is not"):
        host_cuda.launch(STEM, "lanes_apart", (0,), 1, 64, args, source_dir=folder, strict=False)


def of_four_warps(name, columns):
    """Return small whole numbers, [64, K] and [columns, K], and room for their product."""
    rng = np.random.default_rng(columns)
    dtype = HALVES.get(name, np.dtype(np.float32))
    a, b = (rng.integers(-8, 9, (n, 32 // dtype.itemsize)).astype(dtype) for n in (64, columns))
    return a, b, np.full((64, columns), np.nan, np.float32)


@pytest.mark.parametrize("template", [t for kernel, t in TOYS if kernel == "four_warps"], ids=str)
def test_products_of_four_warps(run, template, request):
    if "gpu" in request.node.callspec.id:
        from sbnet_cupy.core.device import current_device

        if not current_device().hopper:
            pytest.skip("needs wgmma")
    a, b, d = of_four_warps(*template[:2])
    run("four_warps", template, 128, (a, b, d), 1024 + 128 * 128)
    assert_same(d, a.astype("f4") @ b.astype("f4").T)


@pytest.mark.parametrize("how", [1, 2])
def test_products_end_as_late_as_they_may(on_host, how):
    """Sums that nobody waited for are not there; what is overwritten before was not read."""
    a, b, d = of_four_warps("Half", 16)
    on_host("four_warps", ("Half", 16, False, True, how), 128, (a, b, d), 1024 + 128 * 128)
    assert not np.array_equal(d, a.astype("f4") @ b.astype("f4").T)


@pytest.mark.parametrize(
    ("how", "message"), [(3, "another one in lane 5"), (4, "ends before 1 of its products")]
)
def test_products_of_four_warps_that_go_wrong(on_host, how, message):
    args, template = of_four_warps("Half", 16), ("Half", 16, False, True, how)
    with pytest.raises(host_cuda.KernelError, match=message):
        on_host("four_warps", template, 128, args, 1024 + 128 * 128)


def test_rows_of_ldmatrix_are_aligned(on_host):
    with pytest.raises(host_cuda.KernelError, match="a row must be aligned to 16 bytes"):
        on_host("unaligned_row", (0,), 32, (np.zeros(64, np.uint16),))


def test_rounding_to_tf32(run):
    """To the nearest number of 10 fraction bits; halfway away from zero."""
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, np.uint32)
    ties = (bits & 0xFFFFE000) | 0x1000
    bits = np.r_[bits, ties, ties - 1, ties + 1, 0, 1 << 31, 0x7F7FFFFF, 0x7F800000, 0xFF800000]
    x = bits[(bits & 0x7F800000 != 0x7F800000) | (bits & 0x7FFFFF == 0)].view(np.float32)
    y = np.zeros(x.size, np.uint32)
    run("rounded", (0,), 128, (x, y, x.size))
    mantissa, exponent = np.frexp(x.astype(np.float64))
    digits = np.where(abs(x) < 2.0**-126, exponent + 136, 11)  # fewer in subnormal numbers
    finite = np.isfinite(x)
    scaled = np.ldexp(np.where(finite, mantissa, 0), digits)
    nearest = np.copysign(np.floor(abs(scaled) + 0.5), scaled)
    with np.errstate(over="ignore"):
        expected = np.ldexp(nearest, np.where(finite, exponent - digits, 0)).astype(np.float32)
    y &= 0xFFFFE000
    assert_same(y.view(np.float32), np.where(finite, expected, x))


def test_nan_stays_nan_in_tf32(run):
    bits = np.uint32([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0x7F801000])
    y = np.zeros(bits.size, np.uint32)
    run("rounded", (0,), 32, (bits.view(np.float32), y, bits.size))
    assert np.isnan((y & 0xFFFFE000).view(np.float32)).all()


def test_shared_addresses_count_bytes(run):
    y = np.zeros(64, np.uint32)
    run("addresses", (0,), 64, (y,))
    assert_same(y, 8 * np.arange(64, dtype=np.uint32))


# ---- for real GPUs ----


@pytest.mark.skipif(host_cuda.SANITIZE, reason="under a sanitizer NVRTC does not find its parts")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_wrapper_compiles(require, folder, architecture, monkeypatch):
    require("cupy")
    monkeypatch.setattr(compiling, "SOURCE_DIR", folder)
    expressions = [compiling.name_expression(*toy) for toy in TOYS]
    _, symbols, log = compiling.compile_cubin(STEM, expressions, architecture)
    assert len(symbols) == len(TOYS)
    assert log.count("0 bytes spill stores, 0 bytes spill loads") == len(TOYS)
    assert log.count("bytes spill stores") == len(TOYS)
