// stack_layer_norm.cu: the layer norm of the channels of each pixel of a stack.
//   y[m, i, j, c] = (x[m, i, j, c] - mean) / sqrt(variance + eps) * scale[c] + shift[c]
// with mean and variance of the channels of pixel (m, i, j). Rows of y past the count are not written; pixels outside the
// image are computed as all others.
// Python: sbnet_cupy/block_sparse/stack/stack_layer_norm.py, which launches it
// LANES threads side by side have a pixel, EACH vectors of V channels each. Sums are in float, a thread's one after the
// other and the threads' by a tree; the variance is summed of the distances from the mean. y may be wider than x.
#include "block_sparse/stack/stack_channels.cuh"
#include "core/async_copy.cuh"

template <int LANES>
DEVICE float sum_of_lanes(float sum) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    return sum;
}

template <typename S, int V>
DEVICE Channels<S, V> loaded_or(const S* __restrict__ from, i64 c, i64 C, float otherwise) {
    Channels<S, V> values;
    values.fill(from_compute<S>(otherwise));
    if (from && c < C) values.load(from + c);
    return values;
}

// Scales and shifts stay in registers, unless they are wider than x: then they are loaded for each pixel.
template <typename T, typename S, typename Y, int V, int LANES, int EACH>
__global__ void __launch_bounds__(128)
    stack_layer_norm(const T* __restrict__ x,             // [M, pixels, C]
                     const S* __restrict__ scale,         // [C], or null: 1
                     const S* __restrict__ shift,         // [C], or null: 0
                     const int* __restrict__ bin_counts,  // [1]
                     Y* __restrict__ y,                   // [M, pixels, C]
                     i64 M, i64 pixels, i64 C, double eps, i64 settled) {
    constexpr int AT_ONCE = 128 / LANES;
    const int lane = threadIdx.x % LANES;
    const float size = static_cast<float>(C), least = static_cast<float>(eps);
    begin_launch(settled);
    const i64 all = clamp(*bin_counts, 0, M) * pixels;
    constexpr bool STAY = sizeof(S) <= sizeof(T);
    Channels<S, V> factors[EACH], sums[EACH];
    auto load_tables = [&](int a) {
        factors[a] = loaded_or<S, V>(scale, (lane + a * LANES) * V, C, 1.0f);
        sums[a] = loaded_or<S, V>(shift, (lane + a * LANES) * V, C, 0.0f);
    };
#pragma unroll
    for (int a = 0; STAY && a < EACH; ++a) load_tables(a);
    if (settled) dependent_wait();
    x = loaded_later(x);
    for (i64 first = static_cast<i64>(blockIdx.x) * AT_ONCE; first < all; first += static_cast<i64>(gridDim.x) * AT_ONCE) {
        const i64 pixel = first + threadIdx.x / LANES;  // all threads of a warp go on to the end
        float values[EACH][V], sum = 0.0f;
#pragma unroll
        for (int a = 0; a < EACH; ++a) {
            const i64 c = (lane + a * LANES) * V;
            Channels<T, V> loaded;
            loaded.fill(zero<T>());
            if (pixel < all && c < C) loaded.load(x + pixel * C + c);
#pragma unroll
            for (int e = 0; e < V; ++e) values[a][e] = loaded.get(e), sum += values[a][e];
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
            if constexpr (!STAY) load_tables(a);
            Channels<Y, V> result;
#pragma unroll
            for (int e = 0; e < V; ++e)
                result.set(e, from_compute<Y>(__fmaf_rn(values[a][e] * factor, factors[a].get(e), sums[a].get(e))));
            if (pixel < all && c < C) result.store(y + pixel * C + c);
        }
    }
}
