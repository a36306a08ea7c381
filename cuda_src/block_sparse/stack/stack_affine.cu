// stack_affine.cu: a scale and a shift of each channel, a sum and an activation, from a stack to a stack of the same blocks.
//   y[m, i, j, c] = activation(x[m, i, j, c] * scale[c] + shift[c] + residual[m, i, j, c])
// or, with values for each image, scale[n, c] and shift[n, c] of the image n of block m. Rows of y past the count are not
// written; pixels outside the image are computed as all others.
// Python: sbnet_cupy/block_sparse/stack/stack_affine.py, which launches it
// A thread computes V channels of a pixel. Arithmetic is in float, and rounded once: to the dtype of y, which may be wider
// than that of x, as the residual's may; rounded is y in another dtype, L, beside it, for convolutions that read it so.
// PRELU is a leaky relu with a slope of each channel, which is read. PITCHED: x, the residual and y may be some channels of other
// stacks, whose pixels have more of them.
#include "block_sparse/stack/stack_channels.cuh"
#include "core/async_copy.cuh"
#include "dense/activation.cuh"

constexpr int PRELU = 8;  // after those of activation.cuh

template <typename T, typename S, typename R, typename Y, typename L, int V, bool PER_IMAGE, int ACTIVATION, bool PITCHED>
__global__ void __launch_bounds__(256)
    stack_affine(const T* __restrict__ x,             // [M, pixels, C], its pixels pitch_in elements apart
                 const S* __restrict__ scale,         // [C] or [N, C], or null: 1
                 const S* __restrict__ shift,         // the same, or null: 0
                 const R* __restrict__ residual,      // the same, pitch_added apart, or null
                 const float* __restrict__ slopes,    // [C], of PRELU
                 const int* __restrict__ bin_counts,  // [1]
                 const int* __restrict__ indices,     // [M, 3]
                 Y* __restrict__ y,                   // [M, pixels, C], pitch_out apart
                 L* __restrict__ rounded,             // [M, pixels, C], or null
                 i64 M, i64 N, i64 pixels, i64 C, i64 settled, i64 pitch_in, i64 pitch_added,
                 i64 pitch_out) {
    const i64 vectors = C / V, of_row = pixels * vectors;
    begin_launch(settled);
    const i64 all = clamp(*bin_counts, 0, M) * of_row;
    if (settled) dependent_wait();
    x = loaded_later(x), residual = loaded_later(residual), scale = loaded_later(scale), shift = loaded_later(shift);
    for (i64 i = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x; i < all; i += static_cast<i64>(gridDim.x) * 256) {
        Channels<T, V> values;
        Channels<S, V> factors, sums;
        Channels<R, V> add_to;
        Channels<Y, V> result;
        Channels<L, V> low;
        if constexpr (!PITCHED) values.load(x + i * V);
        Channels<float, V> slope;
        const i64 pixel = divide(i, vectors);
        i64 at = i - pixel * vectors;
        const i64 added = PITCHED ? pixel * pitch_added + at * V : i * V, to = PITCHED ? pixel * pitch_out + at * V : i * V;
        if constexpr (PITCHED) values.load(x + pixel * pitch_in + at * V);
        if constexpr (ACTIVATION == PRELU) slope.load(slopes + at * V);
        if constexpr (PER_IMAGE) at += clamp(indices[divide(i, of_row) * 3], 0, N - 1) * vectors;
        if (scale) factors.load(scale + at * V);
        if (shift) sums.load(shift + at * V);
        if (residual) add_to.load(residual + added);
#pragma unroll
        for (int e = 0; e < V; ++e) {
            float value = __fmaf_rn(values.get(e), scale ? factors.get(e) : 1.0f, shift ? sums.get(e) : 0.0f);
            if (residual) value = __fadd_rn(value, add_to.get(e));
            if constexpr (ACTIVATION == PRELU)
                value = value < 0 ? multiply(value, slope.get(e)) : value;
            else
                value = activate<ACTIVATION>(value);
            result.set(e, from_compute<Y>(value)), low.set(e, from_compute<L>(value));
        }
        result.store(y + to);
        if (rounded) low.store(rounded + i * V);
    }
}
