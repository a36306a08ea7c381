// stack_depthwise.cu: a depthwise convolution, each channel by itself, from a stack of blocks to a stack of blocks.
//   y[m, i, j, c] = activation(scale[c] * sum(x[at (i * SH - top + r * DH, j * SW - left + s * DW) of block m, c] * w[r, s, c])
//                              + bias[c] + residual[m, i, j, c])
// What lies around a block is as in stack_conv2d.cu, and so are the results outside the image and past the count.
// Python: sbnet_cupy/block_sparse/stack/stack_depthwise.py; launched by stack_launch.py
// A thread block takes tiles of 128 output pixels, in the order of the stack, of a slice of 8 * V channels (blockIdx.y),
// whose weights stay in shared memory. A thread computes V channels of four pixels.
#include "block_sparse/stack/stack_conv.cuh"

template <typename T, int V, int ACTIVATION>
__global__ void __launch_bounds__(256)
    stack_depthwise(const T* __restrict__ x, const T* __restrict__ w, const float* __restrict__ scale,
                    const float* __restrict__ bias, const T* __restrict__ residual,
                    const int* __restrict__ bin_counts, const int* __restrict__ indices, const int* __restrict__ grid,
                    T* __restrict__ y, i64 M, i64 N, i64 GH, i64 GW, i64 C, i64 bh, i64 bw, i64 ph, i64 pw, i64 H,
                    i64 W, i64 P, i64 Q, i64 R, i64 S, i64 SH, i64 SW, i64 DH, i64 DW, i64 top, i64 left, i64 step_r,
                    i64 step_s, i64 step_c, i64 clear_rows) {
    constexpr int PIXELS = 128, LANES = 8, SLICE = LANES * V, PASS = 256 / LANES, EACH = PIXELS / PASS;
    using Vector = typename Bytes<V * sizeof(T)>::type;
    DYNAMIC_SHARED(float, shared);
    const Problem g(C, C, bh, bw, ph, pw, H, W, P, Q, R, S, SH, SW, DH, DW, top, left);
    const int taps = g.R * g.S, c0 = blockIdx.y * SLICE, lane = threadIdx.x % LANES, first_row = threadIdx.x / LANES;
    float* const weights = shared;                     // [taps][SLICE], then scale and bias
    float* const tables = weights + taps * SLICE;
    int* const inside = reinterpret_cast<int*>(tables + 2 * SLICE);
    int* const offsets = inside + PIXELS;  // [taps][PIXELS]
    overlap_launches();
    const int rows = Problem::narrow(clamp(*bin_counts, 0, M)), pixels = rows * g.ph * g.pw;
    const BlockTable table{indices, grid, Problem::narrow(N), Problem::narrow(GH), Problem::narrow(GW), rows};
    if (clear_rows)
        clear_rest<V * sizeof(T) == 16>(y, static_cast<i64>(pixels) * g.C, M * g.ph * g.pw * g.C);
    if (static_cast<i64>(blockIdx.x) * PIXELS >= pixels) return;

    for (int i = threadIdx.x; i < taps * SLICE; i += 256) {
        const int tap = i / SLICE, c = c0 + i % SLICE;
        weights[i] = c < g.C ? to_compute<float>(w[tap / g.S * step_r + tap % g.S * step_s + c * step_c]) : 0.0f;
    }
    for (int i = threadIdx.x; i < 2 * SLICE; i += 256) {
        const int c = c0 + i % SLICE;
        const float* const its = i < SLICE ? scale : bias;
        tables[i] = its && c < g.C ? its[c] : i < SLICE ? 1.0f : 0.0f;
    }
    const bool whole = g.whole();
    const Finder finder(table, g);
    const int c = c0 + lane * V;
    for (int p0 = blockIdx.x * PIXELS; p0 < pixels; p0 += gridDim.x * PIXELS) {
        finder.find<PIXELS, PASS, 2>(p0, 1, offsets, threadIdx.x, 256);
        if (!whole)
            for (int i = threadIdx.x; i < PIXELS; i += 256) inside[i] = finder.is_inside(p0, i);
        __syncthreads();
        float sums[EACH][V];
#pragma unroll
        for (int a = 0; a < EACH; ++a)
#pragma unroll
            for (int e = 0; e < V; ++e) sums[a][e] = 0.0f;
        if (c < g.C) {
#pragma unroll 2
            for (int tap = 0; tap < taps; ++tap) {
                Elements<T, Vector> values[EACH];
#pragma unroll
                for (int a = 0; a < EACH; ++a) {
                    const int offset = offsets[tap * PIXELS + first_row * EACH + a];
                    values[a].vector = zero<Vector>();
                    if (offset >= 0)
                        values[a].vector = *reinterpret_cast<const Vector*>(x + static_cast<i64>(offset) * g.C + c);
                }
#pragma unroll
                for (int e = 0; e < V; ++e) {
                    const float weight = weights[tap * SLICE + lane * V + e];
#pragma unroll
                    for (int a = 0; a < EACH; ++a)
                        sums[a][e] = __fmaf_rn(to_compute<float>(values[a].element[e]), weight, sums[a][e]);
                }
            }
#pragma unroll
            for (int a = 0; a < EACH; ++a) {
                const int row = first_row + a * PASS;
                if (p0 + row >= pixels) continue;
                const i64 to = static_cast<i64>(p0 + row) * g.C + c;
                Elements<T, Vector> add_to(zero<Vector>()), result(zero<Vector>());
                if (residual) add_to.vector = *reinterpret_cast<const Vector*>(residual + to);
#pragma unroll
                for (int e = 0; e < V; ++e) {
                    float value = __fmaf_rn(sums[a][e], tables[lane * V + e], tables[SLICE + lane * V + e]);
                    if (residual) value += to_compute<float>(add_to.element[e]);
                    result.element[e] = from_compute<T>(whole || inside[row] ? activate<ACTIVATION>(value) : 0.0f);
                }
                *reinterpret_cast<Vector*>(y + to) = result.vector;
            }
        }
        __syncthreads();
    }
}
