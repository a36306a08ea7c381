// stack_batch_norm_grad.cu: gradients of stack_batch_norm.cu's y, all 0 outside of the images and past the count.
//   g = grad * activation'(x * scale + shift + residual);  dresidual = g
//   dbias = sum g;  dweight = sum g * (x - mean) * deviation,  over the n pixels of the images
//   dx = scale * (g - dbias / n - (x - mean) * deviation * dweight / n)
// Source: the chain rule.  Python: sbnet_cupy/block_sparse/stack/stack_batch_norm_grad.py
// Launch: 256 threads. stack_norm_grad_sums leaves the sums of each range of pixels in memory, stack_norm_grad_finish adds
// them up, stack_norm_grad_apply is one pass over the stack; see stack_batch_norm.cuh.
// Why: what the activation let through is computed again from x, which is read anyway. With a residual, which may be gone,
// it is where y is over 0; then the activation is relu, or none.
#include "block_sparse/stack/stack_batch_norm.cuh"

// What reaches the norm of a gradient, at a pixel of x; and of y, where `with_y`.
template <int ACTIVATION, typename C>
DEVICE C through(C grad, C x, C scale, C shift, C y, bool with_y) {
    if constexpr (ACTIVATION == 0) return grad;
    if (ACTIVATION == 1 && with_y) return through_activation<1>(grad, y);
    return through_activation<ACTIVATION>(grad, add(multiply(x, scale), shift));
}

// Thread blocks for which a multiprocessor has registers without a spill.
template <typename T>
constexpr int RESIDENT = sizeof(T) == 8 ? 1 : 2;

template <typename T, typename V, int LANES, int ACTIVATION>
__global__ void __launch_bounds__(NORM_THREADS, RESIDENT<T>)
    stack_norm_grad_sums(const V* __restrict__ grad, const V* __restrict__ x, const V* __restrict__ y,  // or null
                         const typename ComputeOf<T>::type* __restrict__ statistics, const int* __restrict__ bin_counts,
                         const int* __restrict__ indices,
                         typename ComputeOf<T>::type* __restrict__ partials,  // [groups, 2, channels]
                         i64 M, i64 N, i64 GH, i64 GW, i64 width, i64 bh, i64 bw, i64 H, i64 W, i64 whole, i64 groups) {
    using C = typename ComputeOf<T>::type;
    constexpr int COUNT = Elements<T, V>::COUNT, ROWS = NORM_THREADS / LANES, AT_ONCE = 2;
    __shared__ BlockSums<C, COUNT, LANES> block;
    overlap_launches();
    const NormSizes sizes(bin_counts, indices, M, N, GH, GW, bh, bw, H, W, whole);
    const i64 channels = width * COUNT;

    for (i64 work = blockIdx.x; work < ceil_div(width, static_cast<i64>(LANES)) * groups; work += gridDim.x) {
        const NormRange<LANES> range(work, static_cast<int>(width), sizes.pixels(), static_cast<int>(groups));
        const bool there = range.column < width;
        const C* const own = statistics + range.column * COUNT;
        C mean[COUNT], scale[COUNT], shift[COUNT], sums[COUNT], products[COUNT];
        load_channels(mean, own + MEAN * channels, there);
        load_channels(scale, own + SCALE * channels, there && ACTIVATION);
        load_channels(shift, own + SHIFT * channels, there && ACTIVATION);
#pragma unroll
        for (int e = 0; e < COUNT; ++e) sums[e] = products[e] = 0;
        for (int p0 = range.begin; p0 < range.end; p0 += ROWS * AT_ONCE) {
            const NormPixels<ROWS, AT_ONCE> pixels(sizes, p0, range.end);
            V values[AT_ONCE], added[AT_ONCE], grads[AT_ONCE];
            pixels.load(grads, grad, width, range.column);
            pixels.load(values, x, width, range.column);
            pixels.load(added, y, width, range.column, ACTIVATION == 1 && y);
#pragma unroll
            for (int a = 0; a < AT_ONCE; ++a) {
                if (!pixels.inside[a]) continue;
                const Elements<T, V> vector(values[a]), other(added[a]), before(grads[a]);
#pragma unroll
                for (int e = 0; e < COUNT; ++e) {
                    const C value = to_compute<C>(vector.element[e]);
                    const C g = through<ACTIVATION>(to_compute<C>(before.element[e]), value, scale[e], shift[e],
                                                    to_compute<C>(other.element[e]), y != nullptr);
                    sums[e] += g;
                    products[e] += g * (value - mean[e]);
                }
            }
        }
        const C sum = block.add_up(sums);
        __syncthreads();  // before the shared memory is written again
        range.template store<COUNT>(partials, channels, sum, block.add_up(products));
        __syncthreads();  // before the shared memory is written again
    }
}

// dx = g * scale + x * factors[0] + factors[1].
template <typename C, typename S>
__global__ void __launch_bounds__(NORM_THREADS)
    stack_norm_grad_finish(const C* __restrict__ partials, const C* __restrict__ statistics,
                           S* __restrict__ dweight, S* __restrict__ dbias,  // or null
                           C* __restrict__ factors,                         // [2, channels]
                           i64 channels, i64 groups) {
    __shared__ double shared[NORM_WARPS * FINISH_CHANNELS];
    overlap_launches();
    const int turn = static_cast<int>(threadIdx.x) / FINISH_CHANNELS;
    for (i64 c0 = static_cast<i64>(blockIdx.x) * FINISH_CHANNELS; c0 < channels;
         c0 += static_cast<i64>(gridDim.x) * FINISH_CHANNELS) {
        const i64 c = c0 + threadIdx.x % FINISH_CHANNELS, at = c < channels ? c : channels - 1;
        double sum = 0, products = 0;
        for (i64 k0 = turn; k0 < groups; k0 += FINISH_ROWS * FINISH_EACH) {
            C of_group[FINISH_EACH], product[FINISH_EACH];
#pragma unroll
            for (int a = 0; a < FINISH_EACH; ++a) {
                const i64 k = k0 + a * FINISH_ROWS, from = 2 * (k < groups ? k : 0) * channels + at;
                of_group[a] = k < groups ? partials[from] : C(0);
                product[a] = k < groups ? partials[from + channels] : C(0);
            }
#pragma unroll
            for (int a = 0; a < FINISH_EACH; ++a)
                sum += static_cast<double>(of_group[a]), products += static_cast<double>(product[a]);
        }
        sum = sum_of_channel(sum, shared);
        products = sum_of_channel(products, shared);
        if (turn == 0 && c < channels) {
            const double deviation = static_cast<double>(statistics[DEVIATION * channels + c]);
            const double scale = static_cast<double>(statistics[SCALE * channels + c]);
            const double mean = static_cast<double>(statistics[MEAN * channels + c]);
            const double number = static_cast<double>(statistics[STATISTICS * channels]);
            const double by_x = number > 0 ? -scale * deviation * deviation * products / number : 0;
            factors[c] = static_cast<C>(by_x);
            factors[channels + c] = static_cast<C>(number > 0 ? -scale * sum / number - by_x * mean : 0);
            if (dweight) dweight[c] = from_compute<S>(products * deviation);
            if (dbias) dbias[c] = from_compute<S>(sum);
        }
    }
}

template <typename T, typename V, int LANES, int ACTIVATION>
__global__ void __launch_bounds__(NORM_THREADS, RESIDENT<T>)
    stack_norm_grad_apply(const V* __restrict__ grad, const V* __restrict__ x, const V* __restrict__ y,  // or null
                          const typename ComputeOf<T>::type* __restrict__ statistics,
                          const typename ComputeOf<T>::type* __restrict__ factors, const int* __restrict__ bin_counts,
                          const int* __restrict__ indices, V* __restrict__ dx, V* __restrict__ dresidual,  // or null
                          i64 M, i64 N, i64 GH, i64 GW, i64 width, i64 bh, i64 bw, i64 H, i64 W, i64 whole, i64 groups) {
    using C = typename ComputeOf<T>::type;
    constexpr int COUNT = Elements<T, V>::COUNT, ROWS = NORM_THREADS / LANES, AT_ONCE = 2;
    overlap_launches();
    const NormSizes sizes(bin_counts, indices, M, N, GH, GW, bh, bw, H, W, whole);
    const i64 channels = width * COUNT;
    for (i64 work = blockIdx.x; work < ceil_div(width, static_cast<i64>(LANES)) * groups; work += gridDim.x) {
        const NormRange<LANES> range(work, static_cast<int>(width), sizes.pixels(), static_cast<int>(groups));
        const bool there = range.column < width;
        const C* const own = statistics + range.column * COUNT;
        C scale[COUNT], shift[COUNT], by_x[COUNT], constant[COUNT];
        load_channels(scale, own + SCALE * channels, there);
        load_channels(shift, own + SHIFT * channels, there && ACTIVATION);
        load_channels(by_x, factors + range.column * COUNT, there && dx);
        load_channels(constant, factors + channels + range.column * COUNT, there && dx);
        for (int p0 = range.begin; p0 < range.end; p0 += ROWS * AT_ONCE) {
            const NormPixels<ROWS, AT_ONCE> pixels(sizes, p0, range.end);
            V values[AT_ONCE], added[AT_ONCE], grads[AT_ONCE];
            pixels.load(grads, grad, width, range.column);
            pixels.load(values, x, width, range.column);
            pixels.load(added, y, width, range.column, ACTIVATION == 1 && y);
#pragma unroll
            for (int a = 0; a < AT_ONCE; ++a) {
                if (pixels.at(a) >= range.end) break;
                const Elements<T, V> vector(values[a]), other(added[a]), before(grads[a]);
                Elements<T, V> result(zero<V>()), passed(zero<V>());
                if (pixels.inside[a])
#pragma unroll
                    for (int e = 0; e < COUNT; ++e) {
                        const C value = to_compute<C>(vector.element[e]);
                        const C g = through<ACTIVATION>(to_compute<C>(before.element[e]), value, scale[e], shift[e],
                                                        to_compute<C>(other.element[e]), y != nullptr);
                        passed.element[e] = from_compute<T>(g);
                        const C t = add(multiply(g, scale[e]), multiply(value, by_x[e]));
                        result.element[e] = from_compute<T>(add(t, constant[e]));
                    }
                const i64 at = pixels.at(a) * width + range.column;
                if (dx) dx[at] = result.vector;
                if (dresidual) dresidual[at] = passed.vector;
            }
        }
    }
    const i64 from = sizes.pixels() * width, to = M * bh * bw * width;
    if (dx) clear_rest<false>(dx, from, to);
    if (dresidual) clear_rest<false>(dresidual, from, to);
}
