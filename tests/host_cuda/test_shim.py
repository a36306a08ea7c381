"""The host shim runs kernels as CUDA would, and finds the bugs that were planted for it."""

from pathlib import Path

import numpy as np
import pytest

import host_cuda
from host_cuda import launch, prepare

TOY = {"source_dir": Path(host_cuda.__file__).parent / "toys"}
ALL_LANES = 0xFFFFFFFF

# Bugs that every launch finds, in toys/planted.cu, and what is said about them.
PLANTED = {
    "barrier_in_branch": r"deadlock.*32 have exited\n +32 wait in __syncthreads \(planted.cu:\d+\)",
    "barrier_in_both_branches": r"thread \(1, 0, 0\) is in __syncthreads.*a divergent barrier",
    "barrier_against_shuffle": r"deadlock.*\n.*31 wait in __shfl_sync.*0xffffffff",
    "exited_lane": r"__shfl_xor_sync.*of which lanes 0x00000008 have exited",
    "foreign_mask": r"thread \(16, 0, 0\) calls __shfl_sync.*leaves out its own lane 16",
    "outside_mask": r"reads lane 31, but only lanes 0x0000ffff came",
    "mixed_operations": r"lanes of one mask must call the same operation",
    "odd_width": r"width 12, which is no power of two",
    "trap": r"thread \(7, 0, 0\) calls __trap",
    "endless_poll": r"deadlock.*\n +64 poll memory",
}

# The same of clusters of two blocks, in toys/clusters.cu.
PLANTED_IN_CLUSTERS = {
    "block_barrier_in_branch": r"deadlock in {1} of 64 threads; 32 have exited\n +32 wait",
    "arrives_twice": r"{1}, thread \(3, 0, 0\) arrives .* a second time",
    "waits_without_having_arrived": r"waits .* \(clusters.cu:\d+\) without having arrived",
    "one_never_arrives": r"{0} of.*\n +64 wait in the barrier of the cluster \(clusters.cu:\d+\)"
    r".*\ndeadlock in {1} of.*\n +64 poll memory",
    "leaves_early": r"{0} of.*\n +64 wait in the barrier.*\n{1} has exited",
    "reaches_elsewhere": r"not in its dynamic shared memory",
    "reaches_too_far": r"block 2 of a cluster of 2",
    "reaches_too_early": r"{1}, which may not have begun",
    "nobody_waits": r"{0} ended before 1 stores sent to it had landed",
    "sends_too_little": r"deadlock in {0} of.*\n +64 poll memory",
    "sends_too_much": r"gets more bytes at a barrier than",
    "sends_without_a_barrier": r"a barrier that nobody initialised",
    "sends_to_who_has_exited": r"{1}, which has exited",
}


@pytest.fixture(autouse=True, scope="module")
def _compiled(require):
    require("g++")
    widths = (1, 2, 8, 32)
    prepare([("sums", "block_sum", (t, n)) for t in ("float", "int") for n in (64, 256)], **TOY)
    prepare([("planted", name, ()) for name in PLANTED], **TOY)
    prepare([("clusters", name, ()) for name in ("exchange", *PLANTED_IN_CLUSTERS)], **TOY)
    prepare([("intrinsics", "shuffles", (width,)) for width in widths], **TOY)


# ---- kernels run right ----


@pytest.mark.parametrize("threads", [64, 256])
@pytest.mark.parametrize("dtype", ["float", "int"])
@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_block_sum(dtype, threads, order, monkeypatch):
    monkeypatch.setenv("SBNET_HOST_ORDER", order)
    n = 5 * threads - 3
    x = (np.arange(n) % 11 - 4).astype({"float": np.float32, "int": np.int32}[dtype])
    x.flags.writeable = False
    sums = np.zeros(5, x.dtype)
    launch("sums", "block_sum", (dtype, threads), 5, threads, (x, sums, n), **TOY)
    np.testing.assert_array_equal(sums, np.pad(x, (0, 3)).reshape(5, threads).sum(axis=1))


@pytest.mark.parametrize("add", [False, True])
def test_dynamic_shared(add):
    x = np.linspace(-1, 1, 70)
    y = np.ones(70)
    # Threads 70 to 95 leave after the barrier.
    launch("sums", "reverse", (add,), 1, 96, (x, y, 70, 3.0), 70 * 8, **TOY)
    np.testing.assert_array_equal(y, 3.0 * x[::-1] + add)


def test_indices_and_block_order():
    grid, block = (2, 3, 4), (3, 2, 2)
    order, ids = np.zeros(24, np.int32), np.zeros((24, 2, 2, 3), np.int32)
    launch("sums", "who", (), grid, block, (order, ids, np.zeros(1, np.int32)), **TOY)
    np.testing.assert_array_equal(order, np.arange(24))
    z, y, x = np.indices((2, 2, 3))
    np.testing.assert_array_equal(ids, np.broadcast_to(x + 10 * y + 100 * z, ids.shape))


def test_shared_memory_starts_poisoned_in_every_block():
    found = np.zeros((3, 2, 8), np.uint8)
    launch("sums", "unset", (8,), 3, 1, (found,), 8, **TOY)
    assert (found == 0xFF).all()


def test_empty_grid_launches_nothing():
    assert launch("no_such_file", "none", (), 0, 32, ()) is None


def test_many_threads():
    x, sums = np.ones(262 * 256, np.float32), np.zeros(262, np.float32)
    arguments = ("sums", "block_sum", ("float", 256), 262, 256, (x, sums, x.size))
    launch(*arguments, **TOY)
    assert (sums == 256).all()


# ---- CUDA's functions ----


@pytest.mark.parametrize("width", [1, 2, 8, 32])
@pytest.mark.parametrize("argument", [0, 1, 3, 7, 16, 31])
def test_shuffles(width, argument):
    out = np.full((4, 32), -1, np.int32)
    launch("intrinsics", "shuffles", (width,), 1, 32, (out, ALL_LANES, argument), **TOY)
    for lane in range(32):
        first = lane // width * width
        up, down, xor = lane - argument, lane + argument, lane ^ argument
        expected = [
            first + argument % width,
            up if up >= first else lane,
            down if down < first + width else lane,
            xor if xor < first + width else lane,
        ]
        assert (out[:, lane] - 100).tolist() == expected, lane


def test_shuffle_within_a_mask():
    out = np.full((4, 32), -1, np.int32)
    launch("intrinsics", "shuffles", (8,), 1, 32, (out, 0x0000FF00, 2), strict=False, **TOY)
    np.testing.assert_array_equal(out[0], [-1] * 8 + [110] * 8 + [-1] * 16)


@pytest.mark.parametrize(
    ("cpp", "dtype"), [("int", "i4"), ("float", "f4"), ("double", "f8"), ("long long", "i8")]
)
def test_shuffle_types(cpp, dtype):
    x = (np.arange(32) * 1.5 - 7).astype(dtype)
    y = np.zeros_like(x)
    launch("intrinsics", "shuffle_type", (cpp,), 1, 32, (x, y), **TOY)
    np.testing.assert_array_equal(y, x[np.arange(32) ^ 1])


@pytest.mark.parametrize("pattern", [0, ALL_LANES, 0x80000001])
def test_votes(pattern):
    predicates = np.array([3 * (pattern >> i % 32 & 1) for i in range(64)], np.int32)
    predicates[32:] *= pattern != 0x80000001  # the second warp may differ
    out = np.zeros((64, 6), np.int32)
    launch("intrinsics", "votes", (), 1, 64, (predicates, out), **TOY)
    truth = predicates != 0
    for thread, row in enumerate(out):
        warp = truth[thread // 32 * 32 :][:32]
        ballot = sum(1 << lane for lane in range(32) if warp[lane])
        votes = [warp.any(), warp.all(), truth.sum(), truth.any(), truth.all()]
        assert [int(row[0]) % 2**32, *row[1:]] == [ballot, *votes]


def test_halves_of_a_warp_work_apart():
    out = np.zeros(32, np.int32)
    launch("intrinsics", "halves", (), 1, 32, (out,), **TOY)
    expected = np.arange(32)
    for step in range(7):
        exchanged = expected + expected[np.arange(32) ^ 1]
        expected = np.where((np.arange(32) >= 16) | (step < 3), exchanged, expected)
    np.testing.assert_array_equal(out, expected)


def test_bits():
    x, y = 0x3F8010F4, 0x90ABCDEF
    out = np.zeros(11, np.uint32)
    launch("intrinsics", "bits", (), 1, 1, (out, x, y), **TOY)
    both = y << 32 | x
    expected = [
        x.bit_count(),
        3,  # the lowest set bit is bit 2
        2,
        int(f"{x:032b}"[::-1], 2),
        both >> 4 & ALL_LANES,
        both << 4 >> 32 & ALL_LANES,
        0x90F4EF10,
        x * y >> 32,
        x,
        32 + 63 + 64 + 0,
        3 + 2 + 1,
    ]
    assert out.tolist() == expected


def test_atomics():
    i = np.array([2**31 - 10, -5, 5, 0], np.int32)
    u, big, f = np.zeros(3, np.uint32), np.zeros(1, np.uint64), np.zeros(1, np.float32)
    launch("intrinsics", "atomics", (), 1, 40, (i, u, big, f), **TOY)
    assert i.tolist() == [-(2**31) + 30, 39, -39, 40]  # addition wraps around
    assert u.tolist() == [ALL_LANES, 39, 2**32 - 40]
    assert big[0] == 40 << 40
    assert f[0] == 20


def test_warp_exchange_of_a_struct():
    out = np.zeros(32, np.float32)
    launch("intrinsics", "exchange", (), 1, 32, (out,), **TOY)
    lanes = np.arange(32)
    assert (out == ((31 - lanes) * lanes / 2).sum()).all()


@pytest.mark.parametrize(
    ("vector", "bytes_"), [("uchar4", 4), ("uint2", 8), ("float4", 16), ("ulonglong2", 16)]
)
def test_vector_types(vector, bytes_):
    x = np.arange(5 * bytes_, dtype=np.uint8).reshape(5, bytes_)
    y = np.zeros_like(x)
    launch("intrinsics", "copy_vectors", (vector,), 1, 5, (x, y), **TOY)
    np.testing.assert_array_equal(y, x)


# ---- bugs ----


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_reported(name):
    with pytest.raises(host_cuda.KernelError, match=rf"(?s){name}: .*{PLANTED[name]}"):
        launch("planted", name, (), 2, 64, (np.zeros(64, np.int32),), **TOY)
    # The shim is whole after it.
    sums = np.zeros(1, np.float32)
    launch("sums", "block_sum", ("float", 64), 1, 64, (np.ones(64, "f4"), sums, 64), **TOY)
    assert sums[0] == 64


def test_not_strict_is_as_lenient_as_hardware():
    y = np.zeros(64, np.int32)
    for kernel in ("barrier_in_branch", "barrier_in_both_branches"):
        y[:] = 0
        launch("planted", kernel, (), 1, 64, (y,), strict=False, **TOY)
        assert (y == 1).all()
    with pytest.raises(host_cuda.KernelError, match="reads lane 3, but only lanes 0xfffffff7 came"):
        launch("planted", "exited_lane", (), 1, 64, (y,), strict=False, **TOY)


def test_reverse_order_shows_a_missing_barrier(monkeypatch):
    expected = np.maximum(np.arange(64) - 1, 0)
    results = {}
    for order in ("forward", "reverse"):
        monkeypatch.setenv("SBNET_HOST_ORDER", order)
        y = np.zeros(64, np.int32)
        launch("planted", "missing_barrier", (), 1, 64, (y,), **TOY)
        results[order] = (y == expected).all()
    assert results == {"forward": True, "reverse": False}


# ---- clusters ----


@pytest.mark.parametrize("cluster", [1, 2, 3, 16])
@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_blocks_of_a_cluster_exchange_numbers(order, cluster, monkeypatch):
    monkeypatch.setenv("SBNET_HOST_ORDER", order)
    threads, rounds = 5, 3
    x = np.arange(2 * cluster * threads, dtype=np.float32).reshape(2, cluster, threads) % 3
    y = np.zeros_like(x)
    shared = 16 + 16 * cluster + 4 * threads * (1 + cluster)
    arguments = ("clusters", "exchange", (), 2 * cluster, threads, (x, y, rounds), shared)
    launch(*arguments, cluster=cluster, **TOY)
    total = np.zeros((2, threads), np.float32)
    for times in range(1, rounds + 1):
        for rank in range(cluster):
            total = total / 2 + (times * x[:, rank] + x[:, rank, :1])
    np.testing.assert_array_equal(y, np.broadcast_to(total[:, None], y.shape))


def test_blocks_of_a_cluster_take_turns(monkeypatch):
    for order, expected in (("forward", [0, 1, 2, 3, 4, 5]), ("reverse", [2, 1, 0, 5, 4, 3])):
        monkeypatch.setenv("SBNET_HOST_ORDER", order)
        found = np.zeros(6, np.int32)
        arguments = ("clusters", "turns", (), 6, 64, (found, np.zeros(1, np.int32)))
        launch(*arguments, cluster=3, **TOY)
        assert found.tolist() == expected


@pytest.mark.parametrize("name", PLANTED_IN_CLUSTERS)
def test_planted_bug_in_a_cluster_is_reported(name):
    y, message = np.zeros(64, np.int32), PLANTED_IN_CLUSTERS[name]
    for rank in (0, 1):
        message = message.replace(f"{{{rank}}}", rf"block \({rank}, 0, 0\)")
    with pytest.raises(host_cuda.KernelError, match=rf"{name}: (?s:.*){message}"):
        launch("clusters", name, (), 4, 64, (y,), 64, cluster=2, **TOY)


def test_a_store_that_was_not_waited_for_is_poison():
    y = np.zeros(64, np.int32)
    launch("clusters", "sends_and_waits", (), 2, 64, (y,), 64, cluster=2, **TOY)
    assert (y == 2).all()
    y = np.zeros((2, 64), np.int32)
    launch("clusters", "reads_what_it_did_not_wait_for", (), 2, 64, (y,), 64, cluster=2, **TOY)
    assert (y == -100 + 5).all()


def test_a_cluster_does_not_wait_for_exited_threads_if_not_strict():
    y = np.zeros(64, np.int32)
    launch("clusters", "leaves_early", (), 2, 64, (y,), strict=False, cluster=2, **TOY)
    assert (y == 1).all()


def test_clusters_are_whole_and_not_too_large():
    for cluster, grid in ((0, 4), (3, 4), (17, 34), (2, (3, 2))):
        with pytest.raises(ValueError, match="cluster must be from 1 to 16 blocks that divide"):
            launch("clusters", "turns", (), grid, 64, (None, None), cluster=cluster, **TOY)


@pytest.mark.parametrize(
    ("stem", "kernel"),
    [("clusters", "has_static_memory"), ("static_memory", "has_static_memory_elsewhere")],
)
def test_clusters_have_no_static_shared_memory(stem, kernel):
    y = np.zeros(64, np.int32)
    launch(stem, kernel, (), 2, 64, (y,), **TOY)
    assert (y == 1).all()
    with pytest.raises(ValueError, match="no clusters of kernels with static __shared__ variables"):
        launch(stem, kernel, (), 2, 64, (y,), cluster=2, **TOY)


# ---- what Python is told ----


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((np.zeros(4), np.zeros(4), 4), TypeError, "takes 4 arguments, got 3"),
        ((np.zeros(4), np.zeros(4), 4.0, 1.0), TypeError, "argument 2 of .* an int, got 4.0"),
        ((np.zeros(4), np.zeros(4), 4, 1), TypeError, "argument 3 of .* a float, got 1"),
        ((np.zeros(4), [0.0], 4, 1.0), TypeError, "argument 1 of .* a NumPy array or None"),
        ((np.zeros(4), np.zeros((4, 2))[:, 0], 4, 1.0), ValueError, "C-contiguous"),
        ((np.zeros(4), np.broadcast_to(1.0, 1), 4, 1.0), ValueError, "read-only"),
        ((None, None, 2**63, 1.0), OverflowError, "fit in a long long"),
    ],
)
def test_wrong_arguments(args, error, message):
    with pytest.raises(error, match=message):
        launch("sums", "reverse", (False,), 1, 32, args, 256, **TOY)


def test_null_pointers_and_limits():
    launch("sums", "reverse", (False,), 1, 32, (None, None, 0, 1.0), **TOY)
    for grid, block, shared in ((1, 1025, 0), (1, 0, 0), (2**31, 32, 0), (1, 32, 228 * 1024)):
        with pytest.raises(ValueError, match="at most"):
            launch("sums", "reverse", (False,), grid, block, (None, None, 0, 1.0), shared, **TOY)


def test_compile_error_names_the_line(tmp_path):
    (tmp_path / "wrong.cu").write_text(
        "template <int N>\n__global__ void f(int x) { undefined(); }\n"
    )
    with pytest.raises(host_cuda.CompileError, match=r"wrong\.cu:2:"):
        launch("wrong", "f", (1,), 1, 1, (), source_dir=tmp_path)
    (tmp_path / "wrong.cu").write_text("template <int N>\n__global__ void f(int x) {}\n")
    with pytest.raises(host_cuda.CompileError, match="pointers, long long, double or tensor maps"):
        launch("wrong", "f", (1,), 1, 1, (), source_dir=tmp_path)


def test_recorded_instantiations(tmp_path, monkeypatch):
    path = tmp_path / "instantiations.jsonl"
    monkeypatch.setenv("SBNET_RECORD_INSTANTIATIONS", str(path))
    monkeypatch.setattr(host_cuda.instantiations, "INSTANTIATIONS", {})
    keys = [("gather", "rows", ("uint4", 3, True)), ("gather", "rows", ("uint4", 3, False))]
    for key in keys + keys:
        host_cuda.instantiations.record(*key)
    assert len(path.read_text().splitlines()) == 2
    assert host_cuda.read_instantiations(path) == keys[::-1]
