// stack_interpolate.cu: the images of a stack of blocks with more, or fewer, pixels.
//   y[m, p, q, c] = x at (s(p), s(q)) of the image of block m, c,   s(p) = (p + before) * step - after
// with p and q counted from the corner of the image, and s clamped to it: the pixel at floor(s), or the mean of the two
// pixels around s along each axis, in the shares of their nearness. Pixels in no active block are 0. Rows that are no
// block are 0; rows past the count are not written, or become 0.
// Source: PyTorch's interpolate on images that are 0 outside of the active blocks. Positions are in float, as there.
// Python: sbnet_cupy/block_sparse/stack/stack_interpolate.py
// Launch: persistent grid of 256 threads; a thread takes a vector of channels of one pixel of y at a time.
#include "block_sparse/stack/stack_pool.cuh"

// The two pixels around a position along an axis, and the share of the second.
struct Between {
    int low, high;
    float share;
    DEVICE Between(int pixel, float step, float before, float after, int size) {
        const float at = __fmul_rn(static_cast<float>(pixel) + before, step) - after;
        const float last = static_cast<float>(size - 1), source = at < 0.0f ? 0.0f : at > last ? last : at;
        low = static_cast<int>(source);
        high = low + 1 < size ? low + 1 : low;
        share = source - static_cast<float>(low);
    }
};

// The mean of two numbers; one that has no share does not count, whatever it is.
DEVICE float mix(float first, float second, float share) {
    return share == 0.0f ? first : __fmaf_rn(share, second, __fmul_rn(1.0f - share, first));
}

template <typename T, typename V, bool LINEAR>
__global__ void __launch_bounds__(POOL_THREADS, 3)
    stack_interpolate(const V* __restrict__ x,             // [M, bh, bw, width]
                      const int* __restrict__ bin_counts,   // [1]
                      const int* __restrict__ indices,      // [M, 3]
                      const int* __restrict__ grid,         // [N, GH, GW]
                      V* __restrict__ y,                    // [M, ph, pw, width]
                      i64 M, i64 N, i64 GH, i64 GW, i64 width, i64 bh, i64 bw, i64 H, i64 W, i64 ph, i64 pw,
                      double step_h, double step_w, double before, double after, i64 settled, i64 clear_rows) {
    constexpr int COUNT = Elements<T, V>::COUNT, SIDE = LINEAR ? 2 : 1;
    const auto narrow = [](i64 value) { return static_cast<int>(value); };
    begin_launch(settled);
    bool waited = !settled;
    const int rows = narrow(clamp(*bin_counts, 0, M));
    const BlockTable table{indices, grid, narrow(N), narrow(GH), narrow(GW), rows};
    const Pooling g{narrow(width), narrow(bh), narrow(bw), narrow(H), narrow(W), narrow(ph), narrow(pw), 1, 1, 1, 1, 1, 1,
                    0, 0, 0, 0};
    const Windows windows(table, g);
    const float lead = static_cast<float>(before), back = static_cast<float>(after);
    const i64 all = static_cast<i64>(rows) * g.ph * g.pw * g.width;
    for (i64 i0 = static_cast<i64>(blockIdx.x) * POOL_THREADS; i0 < all; i0 += static_cast<i64>(gridDim.x) * POOL_THREADS) {
        if (i0 + threadIdx.x >= all) break;
        const Pooled to = windows.at(i0);
        const Between down(to.block.hi * g.ph + to.p, static_cast<float>(step_h), lead, back, g.H);
        const Between across(to.block.wi * g.pw + to.q, static_cast<float>(step_w), lead, back, g.W);
        i64 from[SIDE][SIDE];
#pragma unroll
        for (int r = 0; r < SIDE; ++r)
#pragma unroll
            for (int s = 0; s < SIDE; ++s) {
                const int h = r ? down.high : down.low, w = s ? across.high : across.low;
                const int hi = h / g.bh, wi = w / g.bw, row = table.row(to.block.n, hi, wi);
                from[r][s] = row < 0 ? -1 : (static_cast<i64>(row) * g.bh + h - hi * g.bh) * g.bw + w - wi * g.bw;
            }
        if (!waited) dependent_wait();
        waited = true;
        const V* const stack = loaded_later(x);
        Elements<T, V> values[SIDE][SIDE], result(zero<V>());
#pragma unroll
        for (int r = 0; r < SIDE; ++r)
#pragma unroll
            for (int s = 0; s < SIDE; ++s)
                values[r][s].vector = from[r][s] < 0 ? zero<V>() : stack[from[r][s] * g.width + to.v];
        if constexpr (LINEAR) {
#pragma unroll
            for (int e = 0; e < COUNT; ++e) {
                float line[2];
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    line[r] = mix(to_compute<float>(values[r][0].element[e]), to_compute<float>(values[r][1].element[e]),
                                  across.share);
                result.element[e] = from_compute<T>(mix(line[0], line[1], down.share));
            }
        } else {
            result = values[0][0];
        }
        y[i0 + threadIdx.x] = result.vector;
    }
    if (!waited) dependent_wait();
    if (clear_rows) clear_rest<false>(y, all, M * g.ph * g.pw * g.width);
}
