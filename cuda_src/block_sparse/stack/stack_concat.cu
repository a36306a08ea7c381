// stack_concat.cu: up to four stacks of blocks side by side in the channels of one.
//   y[m, i, j, first_k + c] = x_k[m, i, j, c]
// or, where x_k is unfolded, its channels become pixels:
//   y[m, i, j, first_k + c] = x_k[m, i / FH, j / FW, (i % FH * FW + j % FW) * C_k + c]
// first_k counts the channels ahead of stack k. Rows of y past the count are not written, or become 0.
// Source: the sub-pixel convolution of Shi et al. 2016, arXiv:1609.05158, whose channels are ordered by pixel here.
// Python: sbnet_cupy/block_sparse/stack/stack_concat.py
// Launch: persistent grid of 256 threads; a thread has AT_ONCE vectors of y under way.
#include "block_sparse/stack/block_table.cuh"
#include "core/async_copy.cuh"

template <typename V>
__global__ void __launch_bounds__(256)
    stack_concat(const V* __restrict__ x0, const V* __restrict__ x1, const V* __restrict__ x2, const V* __restrict__ x3,
                 const int* __restrict__ bin_counts,  // [1]
                 V* __restrict__ y,                   // [M, ph, pw, width]
                 i64 M, i64 ph, i64 pw, i64 width0, i64 width1, i64 width2, i64 width3, i64 unfolded, i64 FH, i64 FW,
                 i64 clear_rows) {
    constexpr int AT_ONCE = 4, STEP = 256 * AT_ONCE;
    const auto narrow = [](i64 value) { return static_cast<int>(value); };
    const int end0 = narrow(width0), end1 = end0 + narrow(width1), end2 = end1 + narrow(width2);
    const int width = end2 + narrow(width3), pixels = narrow(ph * pw), BW = narrow(pw), fh = narrow(FH), fw = narrow(FW);
    const Divisor vectors(width), size(pixels), line(BW), down(fh), across(fw);
    const int coarse_width = across.of(BW), coarse_pixels = down.of(narrow(ph)) * coarse_width;
    overlap_launches();
    const i64 rows = clamp(*bin_counts, 0, M), all = rows * pixels * width;
    for (i64 i0 = static_cast<i64>(blockIdx.x) * STEP; i0 < all; i0 += static_cast<i64>(gridDim.x) * STEP) {
        const i64 pixel0 = divide(i0, width), row0 = divide(pixel0, pixels);
        const int v0 = narrow(i0 - pixel0 * width) + static_cast<int>(threadIdx.x), in0 = narrow(pixel0 - row0 * pixels);
        V values[AT_ONCE];
#pragma unroll
        for (int a = 0; a < AT_ONCE; ++a) {
            values[a] = zero<V>();
            const i64 at = i0 + a * 256 + threadIdx.x;
            if (at >= all) continue;
            const int n = v0 + a * 256, step = vectors.of(n), v = n - step * width;
            const int input = (v >= end0) + (v >= end1) + (v >= end2);
            const V* const x = input == 0 ? x0 : input == 1 ? x1 : input == 2 ? x2 : x3;
            const int first = input == 0 ? 0 : input == 1 ? end0 : input == 2 ? end1 : end2;
            const int its = (input == 0 ? end0 : input == 1 ? end1 : input == 2 ? end2 : width) - first;
            if (unfolded >> input & 1) {
                const int number = in0 + step, ahead = size.of(number), in_block = number - ahead * pixels;
                const int i = line.of(in_block), j = in_block - i * BW, p = down.of(i), q = across.of(j);
                const i64 from = (row0 + ahead) * coarse_pixels + p * coarse_width + q;
                values[a] = x[(from * (fh * fw) + (i - p * fh) * fw + j - q * fw) * its + v - first];
            } else {
                values[a] = x[(pixel0 + step) * its + v - first];
            }
        }
#pragma unroll
        for (int a = 0; a < AT_ONCE; ++a) {
            const i64 at = i0 + a * 256 + threadIdx.x;
            if (at < all) y[at] = values[a];
        }
    }
    if (clear_rows) clear_rest<false>(y, all, M * pixels * width);
}
