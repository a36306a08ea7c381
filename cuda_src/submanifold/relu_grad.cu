// relu_grad.cu: back through y = relu(x + bias), and sums for the gradient of the bias, in one pass.
//   dx[m, k] = grad[m, k] where y[m, k] is not 0 or less, else 0;  sums[g, k] = sum of dx[m, k] over the rows m of group g
// Source: the chain rule.  Python: sbnet_cupy/submanifold/relu_grad.py; sum_shares of site_conv_grad.cu adds the groups up.
// Launch: 256 threads for each (group of `each` rows, LANES vectors of channels). LANES threads stand side by side on a row.
// Why: all loads of a thread are under way together. Which rows are added together depends on sizes and alignment alone.
#include "core/async_copy.cuh"
#include "dense/activation.cuh"

constexpr int THREADS = 256, AT_ONCE = 4;  // rows of a thread that are loaded together

// V: a vector of numbers T; rows of grad are `pitch` of them apart, those of y and dx `width`.
template <typename T, typename V, int LANES>
__global__ void __launch_bounds__(THREADS)
    relu_grad(const V* __restrict__ grad,                      // [M, width]
              const V* __restrict__ y,                         // [M, width]
              V* __restrict__ dx,                              // [M, width]
              typename ComputeOf<T>::type* __restrict__ sums,  // [groups, K]
              i64 M, i64 width, i64 pitch, i64 each) {
    using Compute = typename ComputeOf<T>::type;
    using Numbers = Elements<T, V>;
    constexpr int COUNT = Numbers::COUNT, ROWS = THREADS / LANES, WARPS = THREADS / 32;
    __shared__ Compute parts[WARPS][LANES * COUNT];
    overlap_launches(grad, y);
    const int thread = static_cast<int>(threadIdx.x), lane = thread % LANES, warp = thread / 32;
    const i64 column = static_cast<i64>(blockIdx.y) * LANES + lane;
    const i64 first = static_cast<i64>(blockIdx.x) * each, last = first + each < M ? first + each : M;
    Compute own[COUNT] = {};
    for (i64 from = first + thread / LANES; from < last; from += ROWS * AT_ONCE) {
        Numbers before[AT_ONCE], result[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const i64 m = from + i * ROWS;
            const bool inside = m < last && column < width;
            before[i].vector = inside ? grad[m * pitch + column] : zero<V>();
            result[i].vector = inside ? y[m * width + column] : zero<V>();
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const i64 m = from + i * ROWS;
            if (m >= last || column >= width) continue;
            Numbers after;
#pragma unroll
            for (int e = 0; e < COUNT; ++e) {
                const Compute t = to_compute<Compute>(result[i].element[e]);
                const Compute g = through_activation<1>(to_compute<Compute>(before[i].element[e]), t);
                own[e] = add(own[e], g);
                after.element[e] = from_compute<T>(g);
            }
            dx[m * width + column] = after.vector;
        }
    }
#pragma unroll
    for (int e = 0; e < COUNT; ++e) {
#pragma unroll
        for (int d = LANES; d < 32; d *= 2) own[e] = add(own[e], __shfl_xor_sync(0xffffffffu, own[e], d));
        if (thread % 32 < LANES) parts[warp][lane * COUNT + e] = own[e];
    }
    __syncthreads();
    for (int i = thread; i < LANES * COUNT; i += THREADS) {
        const i64 k = static_cast<i64>(blockIdx.y) * (LANES * COUNT) + i, K = width * COUNT;
        if (k >= K) break;
        Compute sum = parts[0][i];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) sum = add(sum, parts[w][i]);
        sums[blockIdx.x * K + k] = sum;
    }
}
