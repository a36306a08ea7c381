// stack_to_image.cu: whole images from a stack of blocks, and from a background where no block is active.
//   y[n, h, v, c] = stack[grid[n, h / bh, v / bw], h % bh, v % bw, c], or background where that row is -1
// Source: Ren et al. 2018, section 3.2, seen from the image.  Python: sbnet_cupy/block_sparse/stack/stack_to_image.py
// Launch: a persistent grid of 256 threads; LANES threads take a row of pixels, each AT_ONCE vectors of it.
// Why:    every byte of y is written once, in the order of memory: nothing is filled first and written over. In a row of
//         pixels a block is one run of bytes, here and in the stack, so that vectors may straddle pixels, and a block
//         that sticks out of the image ends with the row. Without BLOCKS the background is written everywhere and no
//         table is read: by a few thread blocks, beside kernels that leave memory idle, before sparse_scatter.
#include "core/async_copy.cuh"
#include "block_sparse/stack/block_table.cuh"

enum Background { CONSTANT, CHANNELS, IMAGE };

template <typename V, typename E, int BACKGROUND, int LANES, bool BLOCKS>
__global__ void __launch_bounds__(256)
    stack_to_image(const V* __restrict__ stack,         // [M, bh, run]
                   const int* __restrict__ bin_counts,  // [1]
                   const int* __restrict__ grid,        // [N, GH, GW]
                   const void* background,              // none; E [C]; or V [N, H, line], which may be y
                   V* y,                                // [N, H, line]
                   i64 M, i64 N, i64 GH, i64 GW, i64 C, i64 bh, i64 run, i64 H, i64 line, i64 constant) {
    constexpr int AT_ONCE = 4, LINES = 256 / LANES, COUNT = sizeof(V) / sizeof(E);
    const auto narrow = [](i64 value) { return static_cast<int>(value); };
    overlap_launches();
    const int count = BLOCKS ? narrow(clamp(*bin_counts, 0, M)) : 0;
    const BlockTable table{nullptr, grid, narrow(N), narrow(GH), narrow(GW), count};
    const Divisor across(narrow(run));
    const int channels = narrow(C), width = narrow(line), parts = ceil_div(width, LANES * AT_ONCE);
    const u32 lines = static_cast<u32>(N * H), height = static_cast<u32>(H), down = static_cast<u32>(bh);
    const i64 items = ceil_div<i64>(lines, LINES) * parts;
    Elements<i64, uint4> pattern;  // the bytes of the constant, repeated
    pattern.element[0] = pattern.element[1] = constant;

    for (i64 item = blockIdx.x; item < items; item += gridDim.x) {
        const u32 group = static_cast<u32>(divide(item, parts));
        const int part = narrow(item - static_cast<i64>(group) * parts);
        const u32 row = group * LINES + threadIdx.x / LANES;
        if (row >= lines) continue;
        const u32 n = row / height, h = row - n * height, hi = h / down;
        const int first = part * (LANES * AT_ONCE) + threadIdx.x % LANES;
        const i64 start = static_cast<i64>(row) * line;
        int found[AT_ONCE], wi[AT_ONCE];
#pragma unroll
        for (int a = 0; a < AT_ONCE; ++a) {
            const int v = first + a * LANES;
            wi[a] = across.of(v < width ? v : 0);
            found[a] = BLOCKS ? table.row(v < width ? narrow(n) : -1, narrow(hi), wi[a]) : -1;
        }
        V value[AT_ONCE];
#pragma unroll
        for (int a = 0; a < AT_ONCE; ++a) {
            const int v = first + a * LANES;
            if (v >= width) continue;
            if (found[a] >= 0) {
                value[a] = stack[(found[a] * bh + (h - hi * down)) * run + v - static_cast<i64>(wi[a]) * run];
            } else if constexpr (BACKGROUND == IMAGE) {
                value[a] = static_cast<const V*>(background)[start + v];
            } else if constexpr (BACKGROUND == CHANNELS) {
                Elements<E, V> each;
                int c = narrow((static_cast<i64>(v) * COUNT) % channels);
#pragma unroll
                for (int e = 0; e < COUNT; ++e) {
                    each.element[e] = static_cast<const E*>(background)[c];
                    c = c + 1 == channels ? 0 : c + 1;
                }
                value[a] = each.vector;
            } else {
                value[a] = *reinterpret_cast<const V*>(&pattern);
            }
        }
#pragma unroll
        for (int a = 0; a < AT_ONCE; ++a)
            if (first + a * LANES < width) y[start + first + a * LANES] = value[a];
    }
}
