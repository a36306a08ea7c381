// stack_concat.cu: up to eight stacks of blocks, or channels of stacks, side by side in the channels of one.
//   y[m, i, j, first_k + c] = x_k[m, i, j, c]
// or, where x_k is unfolded, its channels become pixels:
//   y[m, i, j, first_k + c] = x_k[m, i / FH, j / FW, (i % FH * FW + j % FW) * C_k + c]
// or, where x_k is enlarged, each of its pixels becomes FH x FW:
//   y[m, i, j, first_k + c] = x_k[m, i / FH, j / FW, c]
// first_k counts the channels ahead of stack k, or is place_k where y has other channels between them. A pixel of x_k lies
// pitch_k behind the one before, which may have other channels too; of one that is unfolded all are taken. So may those of
// y, which lie pitch_out apart. Rows of y past the count are not written, or become 0, if y has no other channels.
// Source: the sub-pixel convolution of Shi et al. 2016, arXiv:1609.05158, whose channels are ordered by pixel here.
// Python: sbnet_cupy/block_sparse/stack/stack_concat.py
// Launch: persistent grid of 256 threads; a thread has AT_ONCE vectors of y under way.
#include "block_sparse/stack/block_table.cuh"
#include "core/async_copy.cuh"

template <typename V, int INPUTS>
__global__ void __launch_bounds__(256)
    stack_concat(const V* __restrict__ x0, const V* __restrict__ x1, const V* __restrict__ x2, const V* __restrict__ x3,
                 const V* __restrict__ x4, const V* __restrict__ x5, const V* __restrict__ x6, const V* __restrict__ x7,
                 const int* __restrict__ bin_counts,  // [1]
                 V* __restrict__ y,                   // [M, ph, pw, width]
                 i64 M, i64 ph, i64 pw, i64 width0, i64 width1, i64 width2, i64 width3, i64 width4, i64 width5, i64 width6,
                 i64 width7, i64 pitch0, i64 pitch1, i64 pitch2, i64 pitch3, i64 pitch4, i64 pitch5, i64 pitch6, i64 pitch7,
                 i64 place0, i64 place1, i64 place2, i64 place3, i64 place4, i64 place5, i64 place6, i64 place7, i64 pitch_out,
                 i64 unfolded, i64 enlarged, i64 FH, i64 FW, i64 clear_rows) {
    constexpr int AT_ONCE = 4, STEP = 256 * AT_ONCE;
    const auto narrow = [](i64 value) { return static_cast<int>(value); };
    const V* const inputs[] = {x0, x1, x2, x3, x4, x5, x6, x7};
    const i64 widths[] = {width0, width1, width2, width3, width4, width5, width6, width7};
    const i64 pitches[] = {pitch0, pitch1, pitch2, pitch3, pitch4, pitch5, pitch6, pitch7};
    const i64 places[] = {place0, place1, place2, place3, place4, place5, place6, place7};
    int width = 0;
#pragma unroll
    for (int k = 0; k < INPUTS; ++k) width += narrow(widths[k]);
    const int pixels = narrow(ph * pw), BW = narrow(pw), fh = narrow(FH), fw = narrow(FW);
    const Divisor vectors(width), size(pixels), line(BW), down(fh), across(fw);
    const int coarse_width = across.of(BW), coarse_pixels = down.of(narrow(ph)) * coarse_width;
    overlap_launches();
    const i64 rows = clamp(*bin_counts, 0, M), all = rows * pixels * width;
    for (i64 i0 = static_cast<i64>(blockIdx.x) * STEP; i0 < all; i0 += static_cast<i64>(gridDim.x) * STEP) {
        const i64 pixel0 = divide(i0, width), row0 = divide(pixel0, pixels);
        const int v0 = narrow(i0 - pixel0 * width) + static_cast<int>(threadIdx.x), in0 = narrow(pixel0 - row0 * pixels);
        V values[AT_ONCE];
        i64 to[AT_ONCE];
#pragma unroll
        for (int a = 0; a < AT_ONCE; ++a) {
            values[a] = zero<V>();
            const i64 at = i0 + a * 256 + threadIdx.x;
            if (at >= all) continue;
            const int n = v0 + a * 256, step = vectors.of(n), v = n - step * width;
            const V* x = x0;
            int input = 0, first = 0, its = narrow(widths[0]), end = its;
            i64 pitch = pitches[0], its_place = places[0];
#pragma unroll
            for (int k = 1; k < INPUTS; ++k) {
                if (v >= end)
                    x = inputs[k], input = k, first = end, its = narrow(widths[k]), pitch = pitches[k], its_place = places[k];
                end += narrow(widths[k]);
            }
            to[a] = (pixel0 + step) * pitch_out + its_place + v - first;
            const bool unfolds = unfolded >> input & 1;
            if (unfolds || enlarged >> input & 1) {
                const int number = in0 + step, ahead = size.of(number), in_block = number - ahead * pixels;
                const int i = line.of(in_block), j = in_block - i * BW, p = down.of(i), q = across.of(j);
                const i64 from = (row0 + ahead) * coarse_pixels + p * coarse_width + q;
                const i64 place = unfolds ? (from * (fh * fw) + (i - p * fh) * fw + j - q * fw) * its : from * pitch;
                values[a] = x[place + v - first];
            } else {
                values[a] = x[(pixel0 + step) * pitch + v - first];
            }
        }
#pragma unroll
        for (int a = 0; a < AT_ONCE; ++a) {
            const i64 at = i0 + a * 256 + threadIdx.x;
            if (at < all) y[to[a]] = values[a];
        }
    }
    if (clear_rows) clear_rest<false>(y, all, M * pixels * width);
}
