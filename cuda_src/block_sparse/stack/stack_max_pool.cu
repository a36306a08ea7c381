// stack_max_pool.cu: the maximum of each window of a stack of blocks.
//   y[m, p, q, c] = max x at (p * SH - top + r * DH, q * SW - left + s * DW) of block m, c
// over the pixels of the image in the window; those in no active block are 0. NaN is larger than all. A window without
// a pixel of the image gives 0, and so do rows that are no block.
// Source: max pooling on images that are 0 outside of the active blocks.
// Python: sbnet_cupy/block_sparse/stack/stack_max_pool.py
// Launch: persistent grid of 256 threads; a thread takes a vector of channels of one window at a time.
// Why: windows overlap by a pixel or two, which the first-level cache still holds; most of their pixels are of their own
// block, so that few look into the table.
#include "block_sparse/stack/stack_pool.cuh"

template <typename T, typename V>
__global__ void __launch_bounds__(256, 4)
    stack_max_pool(const V* __restrict__ x,            // [M, bh, bw, width]
                   const int* __restrict__ bin_counts,  // [1]
                   const int* __restrict__ indices,     // [M, 3]
                   const int* __restrict__ grid,        // [N, GH, GW]
                   V* __restrict__ y,                   // [M, ph, pw, width]
                   i64 M, i64 N, i64 GH, i64 GW, i64 width, i64 bh, i64 bw, i64 H, i64 W, i64 ph, i64 pw, i64 R, i64 S,
                   i64 SH, i64 SW, i64 DH, i64 DW, i64 top, i64 left) {
    using C = typename ComputeOf<T>::type;
    constexpr int COUNT = Elements<T, V>::COUNT;
    const auto narrow = [](i64 value) { return static_cast<int>(value); };
    overlap_launches();
    const BlockTable table{indices, grid, narrow(N), narrow(GH), narrow(GW), narrow(clamp(*bin_counts, 0, M))};
    const Pooling g{narrow(M),  narrow(N), narrow(GH), narrow(GW), narrow(width), narrow(bh), narrow(bw), narrow(H),
                    narrow(W),  narrow(ph), narrow(pw), narrow(R), narrow(S),     narrow(SH), narrow(SW), narrow(DH),
                    narrow(DW), narrow(top), narrow(left), 0, 0};
    for_each_window(y, table, g, [&](int row, const BlockTable::Block& block, int h0, int w0, int v) {
        Elements<T, V> best(zero<V>());
        bool none = true;
        visit_window(x, table, g, row, block, h0, w0, v, [&](V vector) {
            const Elements<T, V> values(vector);
#pragma unroll
            for (int e = 0; e < COUNT; ++e) {
                const C value = to_compute<C>(values.element[e]), old = to_compute<C>(best.element[e]);
                if (none || value > old || (value != value && old == old)) best.element[e] = values.element[e];
            }
            none = false;
        });
        return best.vector;
    });
}
