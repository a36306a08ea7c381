// stack_layer_norm.cu: the layer norm of the channels of each pixel of a stack.
//   y[m, i, j, c] = (x[m, i, j, c] - mean) / sqrt(variance + eps) * scale[c] + shift[c]
// with mean and variance of the channels of pixel (m, i, j). Rows of y past the count are not written; pixels outside the
// image are computed as all others.
// Python: sbnet_cupy/block_sparse/stack/stack_layer_norm.py, which launches it
// LANES threads side by side have a pixel, EACH vectors of V channels each. Sums are in float, a thread's one after the
// other and the threads' by a tree; the variance is summed of the distances from the mean.
#include "core/async_copy.cuh"

template <int LANES>
DEVICE float sum_of_lanes(float sum) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    return sum;
}

template <typename T, int V, int LANES, int EACH>
__global__ void __launch_bounds__(128)
    stack_layer_norm(const T* __restrict__ x,             // [M, pixels, C]
                     const T* __restrict__ scale,         // [C], or null: 1
                     const T* __restrict__ shift,         // [C], or null: 0
                     const int* __restrict__ bin_counts,  // [1]
                     T* __restrict__ y,                   // [M, pixels, C]
                     i64 M, i64 pixels, i64 C, double eps, i64 settled) {
    using Vector = typename Bytes<V * sizeof(T)>::type;
    constexpr int AT_ONCE = 128 / LANES;
    const int lane = threadIdx.x % LANES;
    const float size = static_cast<float>(C), least = static_cast<float>(eps);
    begin_launch(settled);
    const i64 all = clamp(*bin_counts, 0, M) * pixels;
    Elements<T, Vector> factors[EACH], sums[EACH];
#pragma unroll
    for (int a = 0; a < EACH; ++a) {
        const i64 c = (lane + a * LANES) * V;
#pragma unroll
        for (int e = 0; e < V; ++e) factors[a].element[e] = from_compute<T>(1.0f), sums[a].element[e] = zero<T>();
        if (scale && c < C) factors[a].vector = *reinterpret_cast<const Vector*>(scale + c);
        if (shift && c < C) sums[a].vector = *reinterpret_cast<const Vector*>(shift + c);
    }
    if (settled) dependent_wait();
    x = loaded_later(x);
    for (i64 first = static_cast<i64>(blockIdx.x) * AT_ONCE; first < all; first += static_cast<i64>(gridDim.x) * AT_ONCE) {
        const i64 pixel = first + threadIdx.x / LANES;  // all threads of a warp go on to the end
        float values[EACH][V], sum = 0.0f;
#pragma unroll
        for (int a = 0; a < EACH; ++a) {
            const i64 c = (lane + a * LANES) * V;
            Elements<T, Vector> loaded(zero<Vector>());
            if (pixel < all && c < C) loaded.vector = *reinterpret_cast<const Vector*>(x + pixel * C + c);
#pragma unroll
            for (int e = 0; e < V; ++e) values[a][e] = to_compute<float>(loaded.element[e]), sum += values[a][e];
        }
        const float mean = sum_of_lanes<LANES>(sum) / size;
        float squares = 0.0f;
#pragma unroll
        for (int a = 0; a < EACH; ++a)
#pragma unroll
            for (int e = 0; e < V; ++e) {
                values[a][e] = (lane + a * LANES) * V < C ? values[a][e] - mean : 0.0f;
                squares = __fmaf_rn(values[a][e], values[a][e], squares);
            }
        const float factor = 1.0f / sqrtf(sum_of_lanes<LANES>(squares) / size + least);
#pragma unroll
        for (int a = 0; a < EACH; ++a) {
            const i64 c = (lane + a * LANES) * V;
            Elements<T, Vector> result;
#pragma unroll
            for (int e = 0; e < V; ++e)
                result.element[e] = from_compute<T>(__fmaf_rn(
                    values[a][e] * factor, to_compute<float>(factors[a].element[e]), to_compute<float>(sums[a].element[e])));
            if (pixel < all && c < C) *reinterpret_cast<Vector*>(y + pixel * C + c) = result.vector;
        }
    }
}
