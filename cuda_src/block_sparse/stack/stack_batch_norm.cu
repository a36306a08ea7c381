// stack_batch_norm.cu: batch norm of a stack of blocks in training, by the pixels of the images in it.
//   y = activation(x * scale[c] + shift[c] + residual),  0 in pixels outside of the images and in rows past the count
//   scale = weight / sqrt(variance + eps),  shift = bias - mean * scale
// Source: Ioffe and Szegedy, "Batch Normalization" (2015); Chan, Golub and LeVeque, "Updating formulae and a pairwise
// algorithm for computing sample variances" (1979).  Python: sbnet_cupy/block_sparse/stack/stack_batch_norm.py
// Launch: 256 threads. stack_norm_moments leaves mean and squares of each range of pixels in memory, stack_norm_finish puts
// the ranges together, stack_norm_apply is one pass over the stack; see stack_batch_norm.cuh.
// Why: a sum of squares loses its digits where the mean is large. A thread sums up differences from the first pixel that it
// sees; threads, and then ranges, are put together by the differences of their means.
#include "block_sparse/stack/stack_batch_norm.cuh"

template <typename T, typename V, int LANES>
__global__ void __launch_bounds__(NORM_THREADS, 2)
    stack_norm_moments(const V* __restrict__ x,            // [M, bh, bw, width]
                       const int* __restrict__ bin_counts,  // [1]
                       const int* __restrict__ indices,     // [M, 3]
                       typename ComputeOf<T>::type* __restrict__ partials,  // [groups, 2, C], and [groups]: pixels
                       i64 M, i64 N, i64 GH, i64 GW, i64 width, i64 bh, i64 bw, i64 H, i64 W, i64 whole, i64 groups,
                       i64 images,     // 1, or N: each image apart, whose blocks follow each other; partials are of each
                       i64 settled) {
    using C = typename ComputeOf<T>::type;
    constexpr int COUNT = Elements<T, V>::COUNT, ROWS = NORM_THREADS / LANES, AT_ONCE = 4;
    __shared__ BlockMoments<C, COUNT, LANES> block;
    begin_launch(settled);
    const NormSizes sizes(bin_counts, indices, M, N, GH, GW, bh, bw, H, W, whole);
    if (settled) dependent_wait();
    x = loaded_later(x);
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
        // the first pixel of the block of the range's first pixel is one of an image
        const int size = sizes.BH * sizes.BW, at = (range.begin - thread / LANES) / size * size;
        Elements<T, V> at_start(zero<V>());
        if (range.begin < range.end && sizes.inside(at)) at_start.vector = x[at * width + range.column];
        ThreadMoments<C, COUNT> mine;
        for (int p0 = range.begin; p0 < range.end; p0 += ROWS * AT_ONCE) {
            const NormPixels<ROWS, AT_ONCE> pixels(sizes, p0, range.end);
            V values[AT_ONCE];
            pixels.load(values, x, width, range.column);
#pragma unroll
            for (int a = 0; a < AT_ONCE; ++a)
                if (pixels.inside[a]) mine.take(Elements<T, V>(values[a]));
        }
        C mean, squares;
        const int pixels = block.put_together(mine, at_start, mean, squares);
        range.template store<COUNT>(own, channels, mean, squares);
        if (range.column == 0 && thread == 0) own[2 * groups * channels + range.group] = static_cast<C>(pixels);
        __syncthreads();  // before the shared memory is written again
    }
}

// Of the pixels of a channel: their number, mean, and the sum of the squares of their differences from it.
struct Moments {
    double number, mean, squares;
};

// Put together what the ranges of pixels left of a channel, for all threads of it; each takes every FINISH_ROWS-th range.
// Differences are from the mean of the first range.
template <typename C>
DEVICE Moments moments_of_channel(const C* __restrict__ partials, i64 groups, i64 channels, i64 c, int turn, double* shared) {
    const C* const numbers = partials + 2 * groups * channels;
    const double start = groups > 0 ? static_cast<double>(partials[c]) : 0;  // 0 where it has no pixels
    double number = 0, total = 0, squares = 0;
    for (i64 k0 = turn; k0 < groups; k0 += FINISH_ROWS * FINISH_EACH) {
        C own[FINISH_EACH], mean[FINISH_EACH], within[FINISH_EACH];
#pragma unroll
        for (int a = 0; a < FINISH_EACH; ++a) {
            const i64 k = k0 + a * FINISH_ROWS, at = k < groups ? k : 0;
            own[a] = k < groups ? numbers[at] : C(0);
            mean[a] = partials[2 * at * channels + c], within[a] = partials[(2 * at + 1) * channels + c];
        }
#pragma unroll
        for (int a = 0; a < FINISH_EACH; ++a) {
            const double pixels = static_cast<double>(own[a]), apart = static_cast<double>(mean[a]) - start;
            if (own[a] > 0)  // else there is no mean
                number += pixels, total += pixels * apart, squares += static_cast<double>(within[a]) + pixels * apart * apart;
        }
    }
    number = sum_of_channel(number, shared);
    total = sum_of_channel(total, shared);
    squares = sum_of_channel(squares, shared);
    const double away = number > 0 ? total / number : 0;
    return Moments{number, start + away, squares - total * away};
}

// A factor and a sum of a channel, 1 and 0 without a table. They are loaded before what they are needed for is known.
struct Parameters {
    double scale = 1, shift = 0;

    template <typename S>
    DEVICE Parameters(const S* __restrict__ scales, const S* __restrict__ shifts, i64 c, bool there) {
        if (there && scales) scale = to_compute<double>(scales[c]);
        if (there && shifts) shift = to_compute<double>(shifts[c]);
    }
};

// C is what sums are in, S the parameters. Of no groups the statistics are the running ones, which stay as they are.
template <typename C, typename S>
__global__ void __launch_bounds__(NORM_THREADS)
    stack_norm_finish(const C* __restrict__ partials, const S* __restrict__ weight, const S* __restrict__ bias,  // or null
                      S* __restrict__ running_mean, S* __restrict__ running_var,                                 // or null
                      C* __restrict__ statistics,  // [5, channels], and the number of pixels
                      double momentum, i64 channels, i64 groups, double eps) {
    __shared__ double shared[NORM_WARPS * FINISH_CHANNELS];
    overlap_launches();
    const int turn = static_cast<int>(threadIdx.x) / FINISH_CHANNELS;
    for (i64 c0 = static_cast<i64>(blockIdx.x) * FINISH_CHANNELS; c0 < channels;
         c0 += static_cast<i64>(gridDim.x) * FINISH_CHANNELS) {
        const i64 c = c0 + threadIdx.x % FINISH_CHANNELS, at = c < channels ? c : channels - 1;
        const bool leads = turn == 0;
        const Parameters own(weight, bias, at, leads), before(running_var, running_mean, at, leads);
        const Moments found = moments_of_channel(partials, groups, channels, at, turn, shared);
        const double number = found.number, squares = found.squares;
        double mean = found.mean;
        if (leads && c < channels) {
            double variance = number > 0 ? squares / number : 0;
            if (groups == 0) mean = before.shift, variance = before.scale;
            const double deviation = 1 / sqrt(variance + eps), scale = own.scale * deviation, shift = own.shift - mean * scale;
            const double found[STATISTICS] = {mean, variance, deviation, scale, shift};
#pragma unroll
            for (int s = 0; s < STATISTICS; ++s) statistics[s * channels + c] = static_cast<C>(found[s]);
            if (c == 0) statistics[STATISTICS * channels] = static_cast<C>(number);
            if (running_mean && number > 0) {
                const double unbiased = number > 1 ? squares / (number - 1) : variance;
                running_mean[c] = from_compute<S>(before.shift * (1 - momentum) + mean * momentum);
                running_var[c] = from_compute<S>(before.scale * (1 - momentum) + unbiased * momentum);
            }
        }
    }
}

// Scale and shift of a channel of this mean, and one over the standard deviation.
template <typename C>
DEVICE void store_factors(C* __restrict__ scale, C* __restrict__ shift, i64 to, const Parameters& own, double mean,
                          double deviation) {
    const double factor = own.scale * deviation;
    scale[to] = static_cast<C>(factor);
    shift[to] = static_cast<C>(own.shift - mean * factor);
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
    __shared__ double shared[NORM_WARPS * FINISH_CHANNELS];
    overlap_launches();
    const int turn = static_cast<int>(threadIdx.x) / FINISH_CHANNELS;
    const i64 tiles = ceil_div(channels, static_cast<i64>(FINISH_CHANNELS));
    for (i64 item = blockIdx.x; item < tiles * images; item += gridDim.x) {
        const i64 n = divide(item, tiles), c = (item - n * tiles) * FINISH_CHANNELS + threadIdx.x % FINISH_CHANNELS;
        const i64 at = c < channels ? c : channels - 1;
        const Parameters own(weight, bias, at, turn == 0 && !moments);
        const C* const of_image = partials + n * groups * (2 * channels + 1);
        const Moments found = moments_of_channel(of_image, groups, channels, at, turn, shared);
        if (turn > 0 || c >= channels) continue;
        if (moments) {
            moments[2 * n * channels + c] = static_cast<C>(found.mean);
            moments[(2 * n + 1) * channels + c] = static_cast<C>(found.squares);
            if (c == 0) moments[2 * images * channels + n] = static_cast<C>(found.number);
        } else {
            const double mean = found.mean * (found.number / pixels), zeros = pixels - found.number;
            const double squares = found.squares + found.mean * found.mean * found.number * (zeros / pixels);
            store_factors(scale, shift, n * channels + c, own, mean, 1 / sqrt(squares / pixels + eps));
        }
    }
}

// The norm of groups of channels of each image: a thread block for each group.
template <typename C, typename S>
__global__ void __launch_bounds__(NORM_THREADS)
    stack_group_norm_finish(const C* __restrict__ moments, const S* __restrict__ weight, const S* __restrict__ bias,
                            C* __restrict__ scale, C* __restrict__ shift,  // [N, channels]
                            i64 channels, i64 in_group, i64 images, double pixels, double eps) {
    __shared__ double shared[NORM_WARPS * FINISH_CHANNELS];
    overlap_launches();
    const i64 groups = divide(channels, in_group);
    for (i64 item = blockIdx.x; item < groups * images; item += gridDim.x) {
        const i64 n = divide(item, groups), c0 = (item - n * groups) * in_group;
        const C *const means = moments + 2 * n * channels + c0, *const squares = means + channels;
        const double number = static_cast<double>(moments[2 * images * channels + n]);
        const double all = pixels * static_cast<double>(in_group);
        double sum = 0;
        for (int i = threadIdx.x; i < in_group; i += NORM_THREADS) sum += static_cast<double>(means[i]);
        const double mean = sum_of_threads<1>(sum, shared) * (number / all);
        sum = 0;
        for (int i = threadIdx.x; i < in_group; i += NORM_THREADS) {
            const double apart = static_cast<double>(means[i]) - mean;
            sum += static_cast<double>(squares[i]) + number * apart * apart;
        }
        sum = sum_of_threads<1>(sum, shared) + (all - number * static_cast<double>(in_group)) * mean * mean;
        const double deviation = 1 / sqrt(sum / all + eps);
        for (int i = threadIdx.x; i < in_group; i += NORM_THREADS)
            store_factors(scale, shift, n * channels + c0 + i, Parameters(weight, bias, c0 + i, true), mean, deviation);
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
