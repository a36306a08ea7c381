// stack_batch_norm.cu: batch norm of a stack of blocks in training, by the pixels of the images in it.
//   y = activation(x * scale[c] + shift[c] + residual),  0 in pixels outside of the images and in rows past the count
//   scale = weight / sqrt(variance + eps),  shift = bias - mean * scale
// Source: Ioffe and Szegedy, "Batch Normalization" (2015); Chan, Golub and LeVeque, "Updating formulae and a pairwise
// algorithm for computing sample variances" (1979).  Python: sbnet_cupy/block_sparse/stack/stack_batch_norm.py
// Launch: 256 threads. stack_norm_moments leaves mean and squares of each range of pixels in memory, stack_norm_finish puts
// the ranges together, stack_norm_apply is one pass over the stack; see stack_batch_norm.cuh.
// Why: a sum of squares loses its digits where the mean is large. A thread sums up differences from the first pixel that it
// sees; two such sums are put together by their means.
#include "block_sparse/stack/stack_batch_norm.cuh"

template <typename T, typename V, int LANES>
__global__ void __launch_bounds__(NORM_THREADS, 2)
    stack_norm_moments(const V* __restrict__ x,            // [M, bh, bw, width]
                       const int* __restrict__ bin_counts,  // [1]
                       const int* __restrict__ indices,     // [M, 3]
                       typename ComputeOf<T>::type* __restrict__ partials,  // [groups, 2, C], and [groups]: pixels
                       i64 M, i64 N, i64 GH, i64 GW, i64 width, i64 bh, i64 bw, i64 H, i64 W, i64 whole, i64 groups) {
    using C = typename ComputeOf<T>::type;
    constexpr int COUNT = Elements<T, V>::COUNT, ROWS = NORM_THREADS / LANES, AT_ONCE = 4;
    __shared__ C shared[2 * COUNT][NORM_THREADS];
    __shared__ int counts[NORM_THREADS];
    overlap_launches();
    const NormSizes sizes(bin_counts, indices, M, N, GH, GW, bh, bw, H, W, whole);
    const int thread = static_cast<int>(threadIdx.x);
    const i64 channels = width * COUNT;

    for (i64 work = blockIdx.x; work < ceil_div(width, static_cast<i64>(LANES)) * groups; work += gridDim.x) {
        const NormRange<LANES> range(work, static_cast<int>(width), sizes.pixels(), static_cast<int>(groups));
        C first[COUNT], sum[COUNT], squares[COUNT];
        int number = 0;
#pragma unroll
        for (int e = 0; e < COUNT; ++e) first[e] = sum[e] = squares[e] = 0;
        for (int p0 = range.begin; p0 < range.end; p0 += ROWS * AT_ONCE) {
            const NormPixels<ROWS, AT_ONCE> pixels(sizes, p0, range.end);
            V values[AT_ONCE];
            pixels.load(values, x, width, range.column);
#pragma unroll
            for (int a = 0; a < AT_ONCE; ++a) {
                if (!pixels.inside[a]) continue;
                const Elements<T, V> vector(values[a]);
#pragma unroll
                for (int e = 0; e < COUNT; ++e) {
                    const C value = to_compute<C>(vector.element[e]);
                    if (number == 0) first[e] = value;
                    const C apart = value - first[e];
                    sum[e] += apart;
                    squares[e] += apart * apart;
                }
                ++number;
            }
        }
        counts[thread] = number;
        const C share = number > 0 ? C(1) / static_cast<C>(number) : C(0);
#pragma unroll
        for (int e = 0; e < COUNT; ++e) {
            const C away = sum[e] * share;
            shared[e][thread] = first[e] + away;
            shared[COUNT + e][thread] = squares[e] - sum[e] * away;
        }
        __syncthreads();
#pragma unroll 1
        for (int half = NORM_THREADS / 2; half >= LANES; half /= 2) {
            if (thread < half && counts[thread + half] > 0) {
                const int mine = counts[thread], others = counts[thread + half];
                const C part = static_cast<C>(others) / static_cast<C>(mine + others), weight = part * static_cast<C>(mine);
#pragma unroll
                for (int e = 0; e < COUNT; ++e) {
                    const C mean = shared[e][thread], apart = shared[e][thread + half] - mean;
                    shared[e][thread] = mine > 0 ? mean + apart * part : shared[e][thread + half];
                    shared[COUNT + e][thread] += shared[COUNT + e][thread + half];
                    if (mine > 0) shared[COUNT + e][thread] += apart * apart * weight;
                }
                counts[thread] = mine + others;
            }
            __syncthreads();
        }
        if (range.leads) {
            store_partials(partials, shared, range, channels);
            if (range.column == 0) partials[2 * groups * channels + range.group] = static_cast<C>(counts[thread]);
        }
        __syncthreads();  // before the shared memory is written again
    }
}

// C is what sums are in, S the parameters. Of no groups the statistics are the running ones, which stay as they are.
template <typename C, typename S>
__global__ void __launch_bounds__(NORM_THREADS)
    stack_norm_finish(const C* __restrict__ partials, const S* __restrict__ weight, const S* __restrict__ bias,  // or null
                      S* __restrict__ running_mean, S* __restrict__ running_var,                                 // or null
                      C* __restrict__ statistics,  // [5, channels], and the number of pixels
                      double momentum, i64 channels, i64 groups, double eps) {
    __shared__ double shared[NORM_THREADS];
    overlap_launches();
    const int turn = static_cast<int>(threadIdx.x) / FINISH_CHANNELS;
    for (i64 c0 = static_cast<i64>(blockIdx.x) * FINISH_CHANNELS; c0 < channels;
         c0 += static_cast<i64>(gridDim.x) * FINISH_CHANNELS) {
        const i64 c = c0 + threadIdx.x % FINISH_CHANNELS, at = c < channels ? c : channels - 1;
        const C* const numbers = partials + 2 * groups * channels;
        double number = 0, total = 0, squares = 0;
#pragma unroll 4
        for (i64 k = turn; k < groups; k += FINISH_ROWS) {
            const double own = static_cast<double>(numbers[k]), mean = static_cast<double>(partials[2 * k * channels + at]);
            number += own;
            if (own > 0) total += own * mean;  // of no pixels there is no mean
        }
        number = sum_of_channel(number, shared);
        total = sum_of_channel(total, shared);
        double mean = number > 0 ? total / number : 0;
#pragma unroll 4
        for (i64 k = turn; k < groups; k += FINISH_ROWS) {
            const double own = static_cast<double>(numbers[k]);
            const double apart = static_cast<double>(partials[2 * k * channels + at]) - mean;
            const double within = static_cast<double>(partials[(2 * k + 1) * channels + at]);
            if (own > 0) squares += within + own * apart * apart;
        }
        squares = sum_of_channel(squares, shared);
        if (turn == 0 && c < channels) {
            double variance = number > 0 ? squares / number : 0;
            if (groups == 0) mean = to_compute<double>(running_mean[c]), variance = to_compute<double>(running_var[c]);
            const double deviation = 1 / sqrt(variance + eps);
            const double scale = weight ? deviation * to_compute<double>(weight[c]) : deviation;
            const double shift = (bias ? to_compute<double>(bias[c]) : 0) - mean * scale;
            const double found[STATISTICS] = {mean, variance, deviation, scale, shift};
#pragma unroll
            for (int s = 0; s < STATISTICS; ++s) statistics[s * channels + c] = static_cast<C>(found[s]);
            if (c == 0) statistics[STATISTICS * channels] = static_cast<C>(number);
            if (running_mean && number > 0) {
                const double unbiased = number > 1 ? squares / (number - 1) : variance;
                const double before = to_compute<double>(running_mean[c]), spread = to_compute<double>(running_var[c]);
                running_mean[c] = from_compute<S>(before * (1 - momentum) + mean * momentum);
                running_var[c] = from_compute<S>(spread * (1 - momentum) + unbiased * momentum);
            }
        }
    }
}

template <typename T, typename V, int LANES, int ACTIVATION>
__global__ void __launch_bounds__(NORM_THREADS, 2)
    stack_norm_apply(const V* __restrict__ x, const V* __restrict__ residual,  // or null
                     const typename ComputeOf<T>::type* __restrict__ statistics, const int* __restrict__ bin_counts,
                     const int* __restrict__ indices, V* __restrict__ y, i64 M, i64 N, i64 GH, i64 GW, i64 width, i64 bh,
                     i64 bw, i64 H, i64 W, i64 whole, i64 groups) {
    using C = typename ComputeOf<T>::type;
    constexpr int COUNT = Elements<T, V>::COUNT, ROWS = NORM_THREADS / LANES, AT_ONCE = 4;
    overlap_launches();
    const NormSizes sizes(bin_counts, indices, M, N, GH, GW, bh, bw, H, W, whole);
    const i64 channels = width * COUNT;
    for (i64 work = blockIdx.x; work < ceil_div(width, static_cast<i64>(LANES)) * groups; work += gridDim.x) {
        const NormRange<LANES> range(work, static_cast<int>(width), sizes.pixels(), static_cast<int>(groups));
        const bool there = range.column < width;
        C scale[COUNT], shift[COUNT];
        load_channels(scale, statistics + SCALE * channels + range.column * COUNT, there);
        load_channels(shift, statistics + SHIFT * channels + range.column * COUNT, there);
        for (int p0 = range.begin; p0 < range.end; p0 += ROWS * AT_ONCE) {
            const NormPixels<ROWS, AT_ONCE> pixels(sizes, p0, range.end);
            V values[AT_ONCE], added[AT_ONCE];
            pixels.load(values, x, width, range.column);
            pixels.load(added, residual, width, range.column, residual != nullptr);
#pragma unroll
            for (int a = 0; a < AT_ONCE; ++a) {
                if (pixels.at(a) >= range.end) break;
                const Elements<T, V> vector(values[a]), other(added[a]);
                Elements<T, V> result(zero<V>());
                if (pixels.inside[a])
#pragma unroll
                    for (int e = 0; e < COUNT; ++e) {
                        C t = add(multiply(to_compute<C>(vector.element[e]), scale[e]), shift[e]);
                        if (residual) t = add(t, to_compute<C>(other.element[e]));
                        result.element[e] = from_compute<T>(activate<ACTIVATION>(t));
                    }
                y[pixels.at(a) * width + range.column] = result.vector;
            }
        }
    }
    clear_rest<false>(y, sizes.pixels() * width, M * bh * bw * width);
}
