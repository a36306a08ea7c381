// affine_grad.cu: gradients of y = activation(x * scale + shift), one scale and shift per channel.
//   g[p, c] = grad[p, c] * activation'(x[p, c] * scale[c] + shift[c])      0 where inside[p] is 0
//   dx[p, c] = g[p, c] * scale[c];  sums[0, k, c] = sum g * x and sums[1, k, c] = sum g, over the
//   pixels p of group k. The caller adds up the groups.
// Source: the chain rule.  Python: sbnet_cupy/dense/affine_grad.py
// Launch: 256 threads, persistent grid. LANES threads stand side by side on the channels of a pixel
//         (LAST: NHWC), the others on further pixels; NCHW has LANES = 1. A thread block takes one
//         group of pixels of a tile of channels at a time, and adds its threads' sums up as a tree.
// Why:    one pass over memory. Which pixels form a group depends on shapes alone, so that sums are
//         the same bits on every GPU and every run.
#include "core/async_copy.cuh"
#include "dense/activation.cuh"

constexpr int THREADS = 256;

// T element, V vector of them, S scale and shift.
template <typename T, typename V, typename S, int ACTIVATION, bool LAST, int LANES>
__global__ void __launch_bounds__(THREADS, sizeof(T) == 8 ? 1 : 2)
    affine_grad(const V* __restrict__ grad,       // [P, C], or [P / area, C, area]
                const V* __restrict__ x,          // the same; or null: not needed
                const S* __restrict__ scale,      // [C] or null
                const S* __restrict__ shift,      // [C] or null
                const u8* __restrict__ inside,    // [P] or null: everywhere
                V* __restrict__ dx,               // like grad; or null: not wanted
                typename ComputeOf<T>::type* __restrict__ sums,  // [2, groups, C]; or null
                i64 pixels, i64 area, i64 C, i64 group, i64 groups) {
    using Compute = typename ComputeOf<T>::type;
    constexpr int COUNT = Elements<T, V>::COUNT;
    constexpr int CHANNELS = LAST ? COUNT : 1;  // of a thread
    constexpr int ROWS = THREADS / LANES;
    __shared__ Compute shared[2 * CHANNELS * THREADS];
    overlap_launches(grad, x, scale, shift, inside);
    const int thread = static_cast<int>(threadIdx.x), lane = thread % LANES, row = thread / LANES;
    const i64 width = LAST ? C / COUNT : C;  // vectors, or planes
    const i64 tiles = ceil_div(width, static_cast<i64>(LANES));

    for (i64 work = blockIdx.x; work < tiles * groups; work += gridDim.x) {
        const i64 k = divide(work, tiles), column = (work - k * tiles) * LANES + lane;
        const i64 c = column * CHANNELS;
        const bool active = column < width;
        Compute factor[CHANNELS], offset[CHANNELS], by_scale[CHANNELS], by_shift[CHANNELS];
#pragma unroll
        for (int e = 0; e < CHANNELS; ++e) {
            factor[e] = active && scale ? to_compute<Compute>(scale[c + e]) : Compute(1);
            offset[e] = active && shift ? to_compute<Compute>(shift[c + e]) : Compute(0);
            by_scale[e] = by_shift[e] = 0;
        }
        // In steps: pixels, or vectors of pixels.
        const i64 steps = LAST ? pixels : pixels / COUNT, end = k * group + group;
        for (i64 step = k * group + row; active && step < (end < steps ? end : steps); step += ROWS) {
            const i64 p = LAST ? step : step * COUNT;
            i64 at = step * width + column;
            if constexpr (!LAST) {
                const i64 n = divide(p, area);
                at = (n * C + c) * (area / COUNT) + (p - n * area) / COUNT;
            }
            const Elements<T, V> before(grad[at]), input(x ? x[at] : zero<V>());
            Elements<T, V> after;
#pragma unroll
            for (int e = 0; e < COUNT; ++e) {
                const int q = LAST ? e : 0;  // the thread's channel
                const Compute value = to_compute<Compute>(input.element[e]);
                Compute t = value, g = to_compute<Compute>(before.element[e]);
                if (scale) t = multiply(t, factor[q]);
                if (shift) t = add(t, offset[q]);
                g = through_activation<ACTIVATION>(g, t);
                if (inside && !inside[LAST ? p : p + e]) g = 0;
                by_scale[q] = add(by_scale[q], multiply(g, value));
                by_shift[q] = add(by_shift[q], g);
                after.element[e] = from_compute<T>(scale ? multiply(g, factor[q]) : g);
            }
            if (dx) dx[at] = after.vector;
        }
        if (!sums) continue;
#pragma unroll
        for (int e = 0; e < CHANNELS; ++e) {
            shared[2 * e * THREADS + thread] = by_scale[e];
            shared[(2 * e + 1) * THREADS + thread] = by_shift[e];
        }
        __syncthreads();
#pragma unroll 1
        for (int half = THREADS / 2; half >= LANES; half /= 2) {
            if (thread < half)
#pragma unroll
                for (int e = 0; e < 2 * CHANNELS; ++e)
                    shared[e * THREADS + thread] =
                        add(shared[e * THREADS + thread], shared[e * THREADS + thread + half]);
            __syncthreads();
        }
        if (row == 0 && active)
#pragma unroll
            for (int e = 0; e < CHANNELS; ++e) {
                sums[k * C + c + e] = shared[2 * e * THREADS + lane];
                sums[(groups + k) * C + c + e] = shared[(2 * e + 1) * THREADS + lane];
            }
        __syncthreads();  // the next group reuses the shared memory
    }
}
