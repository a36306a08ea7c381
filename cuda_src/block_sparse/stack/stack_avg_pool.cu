// stack_avg_pool.cu: the mean of each window of a stack of blocks.
//   y[m, p, q, c] = (sum x at (p * SH - top + r, q * SW - left + s) of block m, c) / d
// over the pixels of the image in the window; those in no active block are 0. d is how many pixels of the window are in
// the image, or in the image and its padding, or a number. Rows that are no block are 0.
// Source: average pooling on images that are 0 outside of the active blocks; the divisors are PyTorch's.
// Python: sbnet_cupy/block_sparse/stack/stack_avg_pool.py
// Launch: persistent grid of 256 threads; a thread takes a vector of channels of one window at a time.
// Why: as stack_max_pool.cu. Sums are in float, in the order of the window.
#include "block_sparse/stack/stack_pool.cuh"

// Pixels of a window along one axis that count: up to the end of the image, or of its padding.
DEVICE int counted(int start, int size, int length, int after, bool padded) {
    const int end = start + size, last = padded ? length + after : length;
    const int first = padded || start > 0 ? start : 0;
    return max((end < last ? end : last) - first, 0);
}

template <typename T, typename V>
__global__ void __launch_bounds__(256, 4)
    stack_avg_pool(const V* __restrict__ x,            // [M, bh, bw, width]
                   const int* __restrict__ bin_counts,  // [1]
                   const int* __restrict__ indices,     // [M, 3]
                   const int* __restrict__ grid,        // [N, GH, GW]
                   V* __restrict__ y,                   // [M, ph, pw, width]
                   i64 M, i64 N, i64 GH, i64 GW, i64 width, i64 bh, i64 bw, i64 H, i64 W, i64 ph, i64 pw, i64 R, i64 S,
                   i64 SH, i64 SW, i64 top, i64 left, i64 bottom, i64 right, i64 padded, double divisor) {
    using C = typename ComputeOf<T>::type;
    constexpr int COUNT = Elements<T, V>::COUNT;
    const auto narrow = [](i64 value) { return static_cast<int>(value); };
    overlap_launches();
    const BlockTable table{indices, grid, narrow(N), narrow(GH), narrow(GW), narrow(clamp(*bin_counts, 0, M))};
    const Pooling g{narrow(M), narrow(N),  narrow(GH), narrow(GW), narrow(width), narrow(bh), narrow(bw),
                    narrow(H), narrow(W),  narrow(ph), narrow(pw), narrow(R),     narrow(S),  narrow(SH),
                    narrow(SW), 1, 1, narrow(top), narrow(left), narrow(bottom), narrow(right)};
    for_each_window(y, table, g, [&](int row, const BlockTable::Block& block, int h0, int w0, int v) {
        C sums[COUNT];
#pragma unroll
        for (int e = 0; e < COUNT; ++e) sums[e] = 0;
        visit_window(x, table, g, row, block, h0, w0, v, [&](V vector) {
            const Elements<T, V> values(vector);
#pragma unroll
            for (int e = 0; e < COUNT; ++e) sums[e] += to_compute<C>(values.element[e]);
        });
        C d = static_cast<C>(divisor);
        if (divisor == 0.0) {
            const i64 area = static_cast<i64>(counted(h0, g.R, g.H, g.bottom, padded)) *
                             counted(w0, g.S, g.W, g.right, padded);
            d = static_cast<C>(area > 0 ? area : 1);
        }
        Elements<T, V> mean(zero<V>());
#pragma unroll
        for (int e = 0; e < COUNT; ++e) mean.element[e] = from_compute<T>(sums[e] / d);
        return mean.vector;
    });
}
