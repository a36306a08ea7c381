// copy_image.cu: one array's memory becomes another's.
//   to[i] = from[i]
// Source: what a result shows where no block is active.  Python: sbnet_cupy/core/copy_image.py
// Launch: THREADS threads, a vector each.
// Why:    the driver's own copy takes up to 1.5 times as long (cudaMemcpyAsync on an H200), and no
//         kernel's set-up overlaps it. Stores are streamed: few of these lines are read soon, while
//         what is read of the source here, the next kernel may find in the cache.
#include "core/async_copy.cuh"

constexpr int THREADS = 256;

template <typename V>
__global__ void __launch_bounds__(THREADS)
    copy_image(const V* __restrict__ from,  // [count]
               V* __restrict__ to,          // [count]
               i64 count) {
    overlap_launches();
    const i64 i = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    if (i < count) __stcs(to + i, from[i]);
}
