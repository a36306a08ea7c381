// zero_outside.cu: pixels of a block stack that lie outside the image become 0.
//   blocks[b, r, s, :] = 0 where pixel (hi * sh + oh + r, wi * sw + ow + s) is not of the H x W image;
//   row b of the list is (n, hi, wi), and only rows below the count are looked at.
// Source: SAME padding of a convolution whose input is computed on a stack.
// Python: sbnet_cupy/block_sparse/gather_scatter/zero_outside.py
// Launch: THREADS threads, persistent grid, a thread block per row of the list.
// Why:    a convolution with bias makes something of the zeros that a gather reads outside. Blocks
//         within the image, nearly all, cost one load; nothing is read of any block.
#include "core/async_copy.cuh"

constexpr int THREADS = 256;

// V: vector of elements of a pixel.
template <typename V>
__global__ void __launch_bounds__(THREADS)
    zero_outside(V* __restrict__ blocks,             // [rows, bh, bw, width]
                 const int* __restrict__ count,      // [1]
                 const int* __restrict__ indices,    // [rows, 3]
                 i64 rows, i64 bh, i64 bw, i64 width, i64 oh, i64 ow, i64 sh, i64 sw, i64 H, i64 W) {
    overlap_launches();
    const i64 active = clamp(count[0], 0, rows);
    for (i64 b = blockIdx.x; b < active; b += gridDim.x) {
        const i64 top = indices[3 * b + 1] * sh + oh, left = indices[3 * b + 2] * sw + ow;
        if (top >= 0 && left >= 0 && top + bh <= H && left + bw <= W) continue;
        V* block = blocks + b * bh * bw * width;
        const u32 all = static_cast<u32>(bh * bw * width), line = static_cast<u32>(bw * width);
        for (u32 i = threadIdx.x; i < all; i += THREADS) {
            const u32 r = i / line, s = (i - r * line) / static_cast<u32>(width);
            const i64 y = top + r, x = left + s;
            if (y < 0 || y >= H || x < 0 || x >= W) block[i] = zero<V>();
        }
    }
}
