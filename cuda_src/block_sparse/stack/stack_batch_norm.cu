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
                       i64 M, i64 N, i64 GH, i64 GW, i64 width, i64 bh, i64 bw, i64 H, i64 W, i64 whole, i64 groups,
                       i64 images) {  // 1, or N: each image apart, whose blocks follow each other; partials are of each
    using C = typename ComputeOf<T>::type;
    constexpr int COUNT = Elements<T, V>::COUNT, ROWS = NORM_THREADS / LANES, AT_ONCE = 4;
    __shared__ C shared[2 * COUNT][NORM_THREADS];
    __shared__ int counts[NORM_THREADS];
    overlap_launches();
    const NormSizes sizes(bin_counts, indices, M, N, GH, GW, bh, bw, H, W, whole);
    const int thread = static_cast<int>(threadIdx.x);
    const i64 channels = width * COUNT;

    const i64 of_image = ceil_div(width, static_cast<i64>(LANES)) * groups;
    for (i64 item = blockIdx.x; item < of_image * images; item += gridDim.x) {
        const i64 image = images > 1 ? divide(item, of_image) : 0, work = item - image * of_image;
        int start = 0, pixels_of_image = sizes.pixels();
        if (images > 1) {
            const int n = static_cast<int>(image), size = sizes.BH * sizes.BW;
            start = sizes.first_row(n) * size;
            pixels_of_image = sizes.first_row(n + 1) * size - start;
        }
        const NormRange<LANES> range(work, static_cast<int>(width), pixels_of_image, static_cast<int>(groups), start);
        typename ComputeOf<T>::type* const own = partials + image * groups * (2 * channels + 1);
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
            store_partials(own, shared, range, channels);
            if (range.column == 0) own[2 * groups * channels + range.group] = static_cast<C>(counts[thread]);
        }
        __syncthreads();  // before the shared memory is written again
    }
}

// Of the pixels of a channel: their number, mean, and the sum of the squares of their differences from it.
struct Moments {
    double number, mean, squares;
};

// Put together what the ranges of pixels left of a channel, for all threads of it; each takes every FINISH_ROWS-th range.
template <typename C>
DEVICE Moments moments_of_channel(const C* __restrict__ partials, i64 groups, i64 channels, i64 c, int turn, double* shared) {
    const C* const numbers = partials + 2 * groups * channels;
    double number = 0, total = 0, squares = 0;
#pragma unroll 4
    for (i64 k = turn; k < groups; k += FINISH_ROWS) {
        const double own = static_cast<double>(numbers[k]), mean = static_cast<double>(partials[2 * k * channels + c]);
        number += own;
        if (own > 0) total += own * mean;  // of no pixels there is no mean
    }
    number = sum_of_channel(number, shared);
    total = sum_of_channel(total, shared);
    const double mean = number > 0 ? total / number : 0;
#pragma unroll 4
    for (i64 k = turn; k < groups; k += FINISH_ROWS) {
        const double own = static_cast<double>(numbers[k]);
        const double apart = static_cast<double>(partials[2 * k * channels + c]) - mean;
        const double within = static_cast<double>(partials[(2 * k + 1) * channels + c]);
        if (own > 0) squares += within + own * apart * apart;
    }
    return Moments{number, mean, sum_of_channel(squares, shared)};
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
        const Moments found = moments_of_channel(partials, groups, channels, at, turn, shared);
        const double number = found.number, squares = found.squares;
        double mean = found.mean;
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

// Scale and shift of a channel of this mean, and one over the standard deviation.
template <typename C, typename S>
DEVICE void store_factors(C* __restrict__ scale, C* __restrict__ shift, i64 to, const S* __restrict__ weight,
                          const S* __restrict__ bias, i64 c, double mean, double deviation) {
    const double factor = weight ? deviation * to_compute<double>(weight[c]) : deviation;
    scale[to] = static_cast<C>(factor);
    shift[to] = static_cast<C>((bias ? to_compute<double>(bias[c]) : 0) - mean * factor);
}

// The norm of each channel of each image of `pixels`, of which those in no block are 0; or, for groups of channels, what
// stack_group_norm_finish puts together: mean and squares of differences of the active pixels, and their number.
template <typename C, typename S>
__global__ void __launch_bounds__(NORM_THREADS)
    stack_image_norm_finish(const C* __restrict__ partials,  // of stack_norm_moments
                            const S* __restrict__ weight, const S* __restrict__ bias,  // or null
                            C* __restrict__ scale, C* __restrict__ shift,               // [N, channels], where there are no moments
                            C* __restrict__ moments,                                    // [N, 2, channels] and [N], or null
                            i64 channels, i64 groups, i64 images, double pixels, double eps) {
    __shared__ double shared[NORM_THREADS];
    overlap_launches();
    const int turn = static_cast<int>(threadIdx.x) / FINISH_CHANNELS;
    const i64 tiles = ceil_div(channels, static_cast<i64>(FINISH_CHANNELS));
    for (i64 item = blockIdx.x; item < tiles * images; item += gridDim.x) {
        const i64 n = divide(item, tiles), c = (item - n * tiles) * FINISH_CHANNELS + threadIdx.x % FINISH_CHANNELS;
        const i64 at = c < channels ? c : channels - 1;
        const C* const own = partials + n * groups * (2 * channels + 1);
        const Moments found = moments_of_channel(own, groups, channels, at, turn, shared);
        if (turn > 0 || c >= channels) continue;
        if (moments) {
            moments[2 * n * channels + c] = static_cast<C>(found.mean);
            moments[(2 * n + 1) * channels + c] = static_cast<C>(found.squares);
            if (c == 0) moments[2 * images * channels + n] = static_cast<C>(found.number);
        } else {
            const double mean = found.mean * (found.number / pixels), zeros = pixels - found.number;
            const double squares = found.squares + found.mean * found.mean * found.number * (zeros / pixels);
            store_factors(scale, shift, n * channels + c, weight, bias, c, mean, 1 / sqrt(squares / pixels + eps));
        }
    }
}

// The norm of groups of channels of each image: a thread block for each group.
template <typename C, typename S>
__global__ void __launch_bounds__(NORM_THREADS)
    stack_group_norm_finish(const C* __restrict__ moments, const S* __restrict__ weight, const S* __restrict__ bias,
                            C* __restrict__ scale, C* __restrict__ shift,  // [N, channels]
                            i64 channels, i64 in_group, i64 images, double pixels, double eps) {
    __shared__ double shared[NORM_THREADS];
    overlap_launches();
    const i64 groups = divide(channels, in_group);
    for (i64 item = blockIdx.x; item < groups * images; item += gridDim.x) {
        const i64 n = divide(item, groups), c0 = (item - n * groups) * in_group;
        const C *const means = moments + 2 * n * channels + c0, *const squares = means + channels;
        const double number = static_cast<double>(moments[2 * images * channels + n]);
        const double all = pixels * static_cast<double>(in_group);
        double sum = 0;
        for (i64 i = threadIdx.x; i < in_group; i += NORM_THREADS) sum += static_cast<double>(means[i]);
        const double mean = sum_of_threads<1>(sum, shared) * (number / all);
        sum = 0;
        for (i64 i = threadIdx.x; i < in_group; i += NORM_THREADS) {
            const double apart = static_cast<double>(means[i]) - mean;
            sum += static_cast<double>(squares[i]) + number * apart * apart;
        }
        sum = sum_of_threads<1>(sum, shared) + (all - number * static_cast<double>(in_group)) * mean * mean;
        const double deviation = 1 / sqrt(sum / all + eps);
        for (i64 i = threadIdx.x; i < in_group; i += NORM_THREADS)
            store_factors(scale, shift, n * channels + c0 + i, weight, bias, c0 + i, mean, deviation);
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
