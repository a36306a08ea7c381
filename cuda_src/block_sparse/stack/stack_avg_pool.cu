// stack_avg_pool.cu: the mean of each window of a stack of blocks.
//   y[m, p, q, c] = (sum x at (p * SH - top + r, q * SW - left + s) of block m, c) / d
// over the pixels of the image in the window; those in no active block are 0. d is how many pixels of the window are in
// the image, or in the image and its padding, or a number. Rows that are no block are 0. Rows past the count are not
// written, or become 0. PITCHED: as in stack_max_pool.cu.
// Source: average pooling on images that are 0 outside of the active blocks; the divisors are PyTorch's.
// Python: sbnet_cupy/block_sparse/stack/stack_avg_pool.py; launched by stack_pool_launch.py
// Launch: persistent grid of 256 threads; a thread takes a vector of channels of one window at a time.
// Why: as stack_max_pool.cu. Sums are in float, in the order of the window.
#include "block_sparse/stack/stack_pool.cuh"

template <typename T, typename V>
struct Mean {
    using C = typename ComputeOf<T>::type;
    static constexpr int COUNT = Elements<T, V>::COUNT;
    const Pooling& g;
    bool padded;
    C divisor;  // 0: what the window counts
    C sums[COUNT], d;

    // Pixels of a window along one axis that count: up to the end of the image, or of its padding.
    DEVICE int counted(int start, int size, int length, int after) const {
        const int end = start + size, last = padded ? length + after : length;
        const int first = padded || start > 0 ? start : 0;
        return max((end < last ? end : last) - first, 0);
    }
    DEVICE void begin(const Pooled& to) {
#pragma unroll
        for (int e = 0; e < COUNT; ++e) sums[e] = 0;
        d = divisor;
        if (divisor == 0) {
            const i64 down = counted(to.block.hi * g.bh + to.p * g.SH - g.top, g.R, g.H, g.bottom);
            const i64 area = down * counted(to.block.wi * g.bw + to.q * g.SW - g.left, g.S, g.W, g.right);
            d = static_cast<C>(area > 0 ? area : 1);
        }
    }
    DEVICE void visit(V vector, int) {
        const Elements<T, V> values(vector);
#pragma unroll
        for (int e = 0; e < COUNT; ++e) sums[e] += to_compute<C>(values.element[e]);
    }
    DEVICE V result(i64) const {
        Elements<T, V> mean(zero<V>());
#pragma unroll
        for (int e = 0; e < COUNT; ++e) mean.element[e] = from_compute<T>(sums[e] / d);
        return mean.vector;
    }
};

template <typename T, typename V, int KR, int KS, bool PITCHED>
__global__ void __launch_bounds__(POOL_THREADS, pool_blocks(KR * KS))
    stack_avg_pool(const V* __restrict__ x,            // [M, bh, bw, width], its pixels pitch_in vectors apart
                   const int* __restrict__ bin_counts,  // [1]
                   const int* __restrict__ indices,     // [M, 3]
                   const int* __restrict__ grid,        // [N, GH, GW]
                   V* __restrict__ y,                   // [M, ph, pw, width], its pixels pitch_out vectors apart
                   i64 M, i64 N, i64 GH, i64 GW, i64 width, i64 bh, i64 bw, i64 H, i64 W, i64 ph, i64 pw, i64 R, i64 S,
                   i64 SH, i64 SW, i64 top, i64 left, i64 bottom, i64 right, i64 padded, double divisor, i64 settled,
                   i64 clear_rows, i64 pitch_in, i64 pitch_out) {
    using C = typename ComputeOf<T>::type;
    const auto narrow = [](i64 value) { return static_cast<int>(value); };
    const Pooling g{narrow(width), narrow(bh), narrow(bw), narrow(H), narrow(W),   narrow(ph),   narrow(pw), narrow(R),
                    narrow(S),     narrow(SH), narrow(SW), 1, 1, narrow(top), narrow(left), narrow(bottom), narrow(right),
                    OUTSIDE, narrow(pitch_in), narrow(pitch_out)};
    const Mean<T, V> mean{g, padded != 0, static_cast<C>(divisor)};
    pool_windows<KR, KS, PITCHED>(x, bin_counts, indices, grid, y, M, N, GH, GW, g, settled, clear_rows, mean);
}
