// stack_sum.cu: the sum of two to four stacks and an activation; smaller ones are enlarged as they are read.
//   y[m, i, j, c] = activation((x_0[m, i / FH_0, j / FW_0, c] + x_1[m, i / FH_1, j / FW_1, c]) + ...)
// in the order of the stacks. Sums are in float, and each but the last is rounded to T: so are those of layers that add one
// after the other, and enlarge stacks of their own before that. The activation is applied to the last sum, which is rounded
// behind it. As in stack_affine.cu, rows of y past the count are not written, pixels outside the image are computed as all
// others, and -0 + -0 is 0. A pixel of x_k lies pitch_k elements behind the one before, and one of y pitch_out, where they are
// some channels of other stacks.
// Python: sbnet_cupy/block_sparse/stack/stack_sum.py, which launches it
// A thread computes V channels of a pixel; it has loaded all stacks before it adds.
#include "block_sparse/stack/block_table.cuh"
#include "block_sparse/stack/stack_channels.cuh"
#include "core/async_copy.cuh"
#include "dense/activation.cuh"

template <typename T, int V, int TERMS, int ACTIVATION>
__global__ void __launch_bounds__(256)
    stack_sum(const T* __restrict__ x0,            // [M, ph / FH_0, pw / FW_0, C]
              const T* __restrict__ x1,            // the same of FH_1, FW_1
              const T* __restrict__ x2,            // likewise, or null
              const T* __restrict__ x3,            // likewise, or null
              const int* __restrict__ bin_counts,  // [1]
              T* __restrict__ y,                   // [M, ph, pw, C]
              i64 M, i64 ph, i64 pw, i64 C, i64 settled, i64 FH0, i64 FH1, i64 FH2, i64 FH3, i64 FW0, i64 FW1, i64 FW2, i64 FW3,
              i64 pitch0, i64 pitch1, i64 pitch2, i64 pitch3, i64 pitch_out) {
    const auto narrow = [](i64 value) { return static_cast<int>(value); };
    const i64 pitches[] = {pitch0, pitch1, pitch2, pitch3}, vectors = C / V, pixels = ph * pw;
    const Divisor line(narrow(pw));
    const Divisor down[] = {Divisor(narrow(FH0)), Divisor(narrow(FH1)), Divisor(narrow(FH2)), Divisor(narrow(FH3))};
    const Divisor across[] = {Divisor(narrow(FW0)), Divisor(narrow(FW1)), Divisor(narrow(FW2)), Divisor(narrow(FW3))};
    int widths[TERMS], sizes[TERMS];  // of a block of each stack
#pragma unroll
    for (int k = 0; k < TERMS; ++k)
        widths[k] = across[k].of(narrow(pw)), sizes[k] = down[k].of(narrow(ph)) * widths[k];
    begin_launch(settled);
    const i64 all = clamp(*bin_counts, 0, M) * pixels * vectors;
    if (settled) dependent_wait();
    const T* const terms[] = {loaded_later(x0), loaded_later(x1), loaded_later(x2), loaded_later(x3)};
    for (i64 i = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x; i < all; i += static_cast<i64>(gridDim.x) * 256) {
        const i64 pixel = divide(i, vectors), row = divide(pixel, pixels), first = (i - pixel * vectors) * V;
        const int in_block = narrow(pixel - row * pixels), p = line.of(in_block), q = in_block - p * narrow(pw);
        Channels<T, V> values[TERMS];
#pragma unroll
        for (int k = 0; k < TERMS; ++k) {
            const i64 from = row * sizes[k] + down[k].of(p) * widths[k] + across[k].of(q);
            values[k].load(terms[k] + from * pitches[k] + first);
        }
        Channels<T, V> result;
#pragma unroll
        for (int e = 0; e < V; ++e) {
            float value = __fadd_rn(values[0].get(e), 0.0f);
#pragma unroll
            for (int k = 1; k < TERMS; ++k) {
                value = __fadd_rn(value, values[k].get(e));
                if (k + 1 < TERMS) value = to_compute<float>(from_compute<T>(value));
            }
            result.set(e, from_compute<T>(activate<ACTIVATION>(value)));
        }
        result.store(y + pixel * pitch_out + first);
    }
}
