// image_linear.cu: a product of the channels of each image with a matrix, for few images, as in squeeze and excitation.
//   y[n, o] = activation(sum over c of x[n, c] * w[o, c] + bias[o])
// Python: sbnet_cupy/block_sparse/stack/image_linear.py, which launches it
// A warp computes one output of one image. Lane l multiplies the vectors l, l + 32, ... of V channels, in float and in
// their order; the lanes' sums are added by a tree.
#include "core/async_copy.cuh"
#include "dense/activation.cuh"

template <typename T, int V, int ACTIVATION>
__global__ void __launch_bounds__(128)
    image_linear(const T* __restrict__ x,     // [N, C]
                 const T* __restrict__ w,     // [O, C]
                 const T* __restrict__ bias,  // [O], or null
                 T* __restrict__ y,           // [N, O]
                 i64 N, i64 C, i64 O, i64 settled) {
    constexpr int AHEAD = 8;  // vectors of weights that are loaded before x is there; the bias is, too
    using Vector = typename Bytes<V * sizeof(T)>::type;
    const int lane = threadIdx.x % 32;
    const i64 number = static_cast<i64>(blockIdx.x) * 4 + threadIdx.x / 32, n = divide(number, O), o = number - n * O;
    const bool real = n < N;
    const T* const row = w + (real ? o : 0) * C + lane * V;
    begin_launch(settled);
    Elements<T, Vector> weights[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
        weights[a].vector = zero<Vector>();
        if ((lane + a * 32) * V < C) weights[a].vector = *reinterpret_cast<const Vector*>(row + a * 32 * V);
    }
    const float addend = bias && real ? to_compute<float>(bias[o]) : 0.0f;
    if (settled) dependent_wait();
    if (!real) return;
    const T* const values = loaded_later(x) + n * C + lane * V;
    float sum = 0.0f;
    for (i64 first = 0; first < C; first += AHEAD * 32 * V) {
        Elements<T, Vector> its[AHEAD];  // all are under way together
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const i64 at = first + a * 32 * V;
            its[a].vector = zero<Vector>();
            if (at + lane * V >= C) continue;
            its[a].vector = *reinterpret_cast<const Vector*>(values + at);
            if (first) weights[a].vector = *reinterpret_cast<const Vector*>(row + at);
        }
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            if (first + a * 32 * V + lane * V >= C) continue;
#pragma unroll
            for (int e = 0; e < V; ++e)
                sum = __fmaf_rn(to_compute<float>(its[a].element[e]), to_compute<float>(weights[a].element[e]), sum);
        }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (lane == 0) {
        if (bias) sum += addend;
        y[number] = from_compute<T>(activate<ACTIVATION>(sum));
    }
}
