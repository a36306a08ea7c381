"""What the rows are held against: the copy bandwidth of the device, and an empty kernel."""

import contextlib
import itertools

import numpy as np

from benchmarks.harness.timing import Contender

# A grid-stride copy of 16 bytes a thread, UNROLL loads in flight. Streaming marks lines for early
# eviction, which may help or not; the best of all forms counts.
COPY_SOURCE = r"""
#define LOAD(p) (STREAMING ? __ldcs(p) : *(p))
extern "C" __global__ void copy16(const uint4* from, uint4* to, long long n) {
  const long long chunk = (long long)blockDim.x * UNROLL;
  for (long long i = blockIdx.x * chunk + threadIdx.x; i < n; i += gridDim.x * chunk) {
    uint4 v[UNROLL];
#pragma unroll
    for (int k = 0; k < UNROLL; ++k)
      if (i + k * blockDim.x < n) v[k] = LOAD(from + i + k * blockDim.x);
#pragma unroll
    for (int k = 0; k < UNROLL; ++k)
      if (i + k * blockDim.x < n) {
        if (STREAMING) __stcs(to + i + k * blockDim.x, v[k]);
        else to[i + k * blockDim.x] = v[k];
      }
  }
}
"""
EMPTY_SOURCE = 'extern "C" __global__ void empty() {}'
THREADS = 256
GPU_BYTES = {False: 1_200_000_000, True: 300_000_000}  # of a buffer; True: a quick run
CPU_BYTES = {False: 200_000_000, True: 20_000_000}


def gpu_copies(cupy, torch, quick=False):
    """Return (bytes of a copy, contenders), each over two pairs of buffers.

    Sizes and distances of the buffers are no powers of two: those make channels collide.
    """
    size = GPU_BYTES[quick]
    apart = size + 12_345 * 256
    whole = cupy.zeros(4 * apart, cupy.uint8)
    buffers = [whole[i * apart : i * apart + size] for i in range(4)]
    pairs = [(buffers[0], buffers[1]), (buffers[2], buffers[3])]
    wide = [(a.view(cupy.complex128), b.view(cupy.complex128)) for a, b in pairs]
    contenders = [
        Contender("cupy.copyto", [lambda a=a, b=b: cupy.copyto(b, a) for a, b in wide]),
        *_kernels(cupy, pairs, size // 16),
    ]
    if torch:
        tensors = [(torch.from_dlpack(a), torch.from_dlpack(b)) for a, b in pairs]
        calls = [lambda a=a, b=b: b.copy_(a) for a, b in tensors]
        contenders.append(Contender("torch copy_", calls, "torch"))
    return 2 * size, contenders


def _kernels(cupy, pairs, vectors):
    multiprocessors = cupy.cuda.Device().attributes["MultiProcessorCount"]
    for unroll, streaming in itertools.product((1, 4, 8), (0, 1)):
        options = ("-std=c++17", f"-DUNROLL={unroll}", f"-DSTREAMING={streaming}")
        kernel = cupy.RawKernel(COPY_SOURCE, "copy16", options)
        whole_grid = -(-vectors // (THREADS * unroll))
        for per_sm in (8, 32, None):
            grid = whole_grid if per_sm is None else per_sm * multiprocessors
            calls = [
                lambda a=a, b=b, kernel=kernel, grid=grid: kernel(
                    (grid,), (THREADS,), (a, b, np.int64(vectors))
                )
                for a, b in pairs
            ]
            shape = "a block per chunk" if per_sm is None else f"{per_sm} blocks per SM"
            marks = ", streaming" if streaming else ""
            yield Contender(f"kernel: 16 bytes x {unroll}, {shape}{marks}", calls)


def gpu_empty(cupy):
    """Return the contender that launches a kernel of nothing."""
    kernel = cupy.RawKernel(EMPTY_SOURCE, "empty")
    return Contender("empty kernel", [lambda: kernel((1,), (32,), ())] * 64)


def cpu_copies(torch, quick=False):
    """Return (bytes of a copy, contenders) for main memory."""
    size = CPU_BYTES[quick]
    pairs = [(np.ones(size, np.uint8), np.zeros(size, np.uint8)) for _ in range(2)]
    contenders = [Contender("np.copyto", [lambda a=a, b=b: np.copyto(b, a) for a, b in pairs])]
    if torch:
        tensors = [(torch.from_numpy(a), torch.from_numpy(b)) for a, b in pairs]
        calls = [lambda a=a, b=b: b.copy_(a) for a, b in tensors]
        contenders.append(Contender("torch copy_", calls))
    return 2 * size, contenders


def best(contenders, time):
    """Return (name, timing) of the fastest contender; one that does not run is passed over."""
    timings = []
    for contender in contenders:
        with contextlib.suppress(Exception):
            timings.append((contender.name, time(contender)))
    return min(timings, key=lambda named: named[1].us)
