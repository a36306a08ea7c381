// stack_affine.cu: a scale and a shift of each channel, a sum and an activation, from a stack to a stack of the same blocks.
//   y[m, i, j, c] = activation(x[m, i, j, c] * scale[c] + shift[c] + residual[m, i, j, c])
// or, with values for each image, scale[n, c] and shift[n, c] of the image n of block m. Rows of y past the count are not
// written; pixels outside the image are computed as all others.
// Python: sbnet_cupy/block_sparse/stack/stack_affine.py, which launches it
// A thread computes V channels of a pixel. Arithmetic is in float, and rounded once.
#include "core/async_copy.cuh"
#include "dense/activation.cuh"

template <typename S, int V>
DEVICE void load_values(float (&to)[V], const S* __restrict__ from, float otherwise) {
    using Vector = typename Bytes<V * sizeof(S) <= 16 ? V * sizeof(S) : 16>::type;
    constexpr int EACH = sizeof(Vector) / sizeof(S);
#pragma unroll
    for (int at = 0; at < V; at += EACH) {
        Elements<S, Vector> values;
        if (from) values.vector = *reinterpret_cast<const Vector*>(from + at);
#pragma unroll
        for (int e = 0; e < EACH; ++e) to[at + e] = from ? to_compute<float>(values.element[e]) : otherwise;
    }
}

template <typename T, typename S, int V, bool PER_IMAGE, int ACTIVATION>
__global__ void __launch_bounds__(256)
    stack_affine(const T* __restrict__ x,             // [M, pixels, C]
                 const S* __restrict__ scale,         // [C] or [N, C], or null: 1
                 const S* __restrict__ shift,         // the same, or null: 0
                 const T* __restrict__ residual,      // [M, pixels, C], or null
                 const int* __restrict__ bin_counts,  // [1]
                 const int* __restrict__ indices,     // [M, 3]
                 T* __restrict__ y,                   // [M, pixels, C]
                 i64 M, i64 N, i64 pixels, i64 C, i64 settled) {
    using Vector = typename Bytes<V * sizeof(T)>::type;
    const i64 vectors = C / V, of_row = pixels * vectors;
    begin_launch(settled);
    const i64 all = clamp(*bin_counts, 0, M) * of_row;
    if (settled) dependent_wait();
    x = loaded_later(x), residual = loaded_later(residual), scale = loaded_later(scale), shift = loaded_later(shift);
    for (i64 i = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x; i < all; i += static_cast<i64>(gridDim.x) * 256) {
        Elements<T, Vector> values(*reinterpret_cast<const Vector*>(x + i * V)), result;
        float factors[V], sums[V], add_to[V];
        i64 at = i - divide(i, vectors) * vectors;
        if constexpr (PER_IMAGE) at += clamp(indices[divide(i, of_row) * 3], 0, N - 1) * vectors;
        load_values<S, V>(factors, scale ? scale + at * V : nullptr, 1.0f);
        load_values<S, V>(sums, shift ? shift + at * V : nullptr, 0.0f);
        load_values<T, V>(add_to, residual ? residual + i * V : nullptr, 0.0f);
#pragma unroll
        for (int e = 0; e < V; ++e) {
            float value = __fmaf_rn(to_compute<float>(values.element[e]), factors[e], sums[e]);
            if (residual) value = __fadd_rn(value, add_to[e]);
            result.element[e] = from_compute<T>(activate<ACTIVATION>(value));
        }
        *reinterpret_cast<Vector*>(y + i * V) = result.vector;
    }
}
