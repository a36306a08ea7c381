// stack_batch_norm.cuh: what the batch norm of a stack in training and its gradient share: who looks at which pixels.
// A thread block looks at a tile of LANES vectors of channels, of a range of pixels of the stack: LANES threads stand side by
// side on the channels of a pixel, the others on further pixels. The ranges depend on sizes and the count alone, and sums are
// put together by a tree, so that results have the same bits on every GPU.
#pragma once

#include "block_sparse/stack/block_table.cuh"
#include "core/async_copy.cuh"
#include "dense/activation.cuh"

constexpr int NORM_THREADS = 256, NORM_WARPS = NORM_THREADS / 32;

// Sizes of a norm. `whole`: the rows below the count are known to be blocks, and blocks to be cut from whole images.
struct NormSizes {
    BlockTable table;
    int BH, BW, H, W;
    bool whole;

    DEVICE NormSizes(const int* bin_counts, const int* indices, i64 M, i64 N, i64 GH, i64 GW, i64 bh, i64 bw, i64 H, i64 W,
                     i64 whole)
        : table{indices, nullptr, static_cast<int>(N), static_cast<int>(GH), static_cast<int>(GW),
                static_cast<int>(clamp(*bin_counts, 0, M))},
          BH(static_cast<int>(bh)), BW(static_cast<int>(bw)), H(static_cast<int>(H)), W(static_cast<int>(W)),
          whole(whole != 0) {}

    // Pixels of the stack below the count.
    DEVICE int pixels() const { return table.rows * BH * BW; }
    // The first row of an image from n on, in a list in the order of the images.
    DEVICE int first_row(int n) const {
        int low = 0, high = table.rows;
        while (low < high) {
            const int middle = (low + high) / 2;
            if (table.indices[3 * middle] < n)
                low = middle + 1;
            else
                high = middle;
        }
        return low;
    }
    // Whether a pixel below the count is one of an image.
    DEVICE bool inside(int p) const {
        if (whole) return true;
        const int size = BH * BW, row = static_cast<int>(static_cast<u32>(p) / static_cast<u32>(size)), at = p - row * size;
        const int line = static_cast<int>(static_cast<u32>(at) / static_cast<u32>(BW));
        const BlockTable::Block block = table.block(row);
        return block.n >= 0 && block.hi * BH + line < H && block.wi * BW + at - line * BW < W;
    }
};

// A tile of channels of a range of pixels, of `groups` ranges.
template <int LANES>
struct NormRange {
    static constexpr int ROWS = NORM_THREADS / LANES;
    int group, column, begin, end;  // column: this thread's vector of channels; begin: its first pixel, of every ROWS-th

    // Of `pixels` from `start` on.
    DEVICE NormRange(i64 work, int width, int pixels, int groups, int start = 0) {
        const int tiles = ceil_div(width, LANES), lane = static_cast<int>(threadIdx.x) % LANES;
        group = static_cast<int>(divide(work, tiles));
        column = (static_cast<int>(work) - group * tiles) * LANES + lane;
        const int each = ceil_div(pixels, groups);
        const i64 first = static_cast<i64>(group) * each, last = first + each;
        end = static_cast<int>(last < pixels ? last : pixels);
        const i64 mine = first + static_cast<int>(threadIdx.x) / LANES;
        begin = static_cast<int>(mine < end ? mine : end) + start;
        end += start;
        if (column >= width) begin = end;
    }

    // Leave two numbers of each channel in memory, [groups, 2, channels]: thread i has those of channel i of the tile.
    template <int COUNT, typename C>
    DEVICE void store(C* __restrict__ partials, i64 channels, C first, C second) const {
        const int thread = static_cast<int>(threadIdx.x), c = (column - thread % LANES) * COUNT + thread;
        if (thread >= LANES * COUNT || c >= channels) return;
        C* const to = partials + 2 * group * channels + c;
        to[0] = first, to[channels] = second;
    }
};

// COUNT pixels that a thread looks at at once, every ROWS-th from `first` on, and which of them are an image's.
template <int ROWS, int COUNT>
struct NormPixels {
    int first;
    bool inside[COUNT];

    DEVICE NormPixels(const NormSizes& sizes, int first, int end) : first(first) {
#pragma unroll
        for (int a = 0; a < COUNT; ++a) inside[a] = at(a) < end && sizes.inside(at(a));
    }
    DEVICE int at(int a) const { return first + a * ROWS; }
    // The vectors of a column of channels; 0 outside of the images, or where nothing is `there`.
    template <typename V>
    DEVICE void load(V (&values)[COUNT], const V* __restrict__ from, i64 width, int column, bool there = true) const {
#pragma unroll
        for (int a = 0; a < COUNT; ++a) values[a] = there && inside[a] ? from[at(a) * width + column] : zero<V>();
    }
};

// Numbers of the channels of a vector, from a table.
template <int COUNT, typename C>
DEVICE void load_channels(C (&values)[COUNT], const C* __restrict__ from, bool there) {
#pragma unroll
    for (int e = 0; e < COUNT; ++e) values[e] = there ? from[e] : C(0);
}

// The rows of the statistics of a norm, [5, C] and the number of pixels.
enum Statistic { MEAN, VARIANCE, DEVIATION, SCALE, SHIFT, STATISTICS };  // DEVIATION: one over the standard deviation

// Sums over the groups in a fixed order: CHANNELS threads stand side by side, the others take the groups in turn.
constexpr int FINISH_CHANNELS = 4, FINISH_ROWS = NORM_THREADS / FINISH_CHANNELS, FINISH_EACH = 5;  // groups under way at once

// The sum over every CHANNELS-th thread, for all of them. `shared` holds NORM_WARPS * CHANNELS numbers.
template <int CHANNELS>
DEVICE double sum_of_threads(double value, double* shared) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
#pragma unroll
    for (int distance = 16; distance >= CHANNELS; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    __syncthreads();  // before what was there is written again
    if (lane < CHANNELS) shared[thread / 32 * CHANNELS + lane] = value;
    __syncthreads();
    double sum = 0;
#pragma unroll
    for (int w = 0; w < NORM_WARPS; ++w) sum += shared[w * CHANNELS + lane % CHANNELS];
    return sum;
}

// The sum over the threads of a channel, for all of them.
DEVICE double sum_of_channel(double value, double* shared) { return sum_of_threads<FINISH_CHANNELS>(value, shared); }

// What a thread found of COUNT channels: sums of differences from the first pixel that it saw, and of their squares.
template <typename C, int COUNT>
struct ThreadMoments {
    C first[COUNT], sum[COUNT], squares[COUNT];
    int number = 0;  // of pixels

    DEVICE ThreadMoments() {
#pragma unroll
        for (int e = 0; e < COUNT; ++e) first[e] = sum[e] = squares[e] = 0;
    }
    template <typename T, typename V>
    DEVICE void take(const Elements<T, V>& vector) {
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
};

// Sums of LANES * COUNT channels over a thread block, whose threads have COUNT each; LANES side by side have a pixel.
template <typename C, int COUNT, int LANES>
struct BlockSums {
    static constexpr int SUMS = LANES * COUNT;
    static_assert(SUMS <= NORM_THREADS, "a thread has one channel");
    C each[NORM_WARPS][SUMS];

    // The sum of each channel, for thread i < SUMS that of channel i; for others 0.
    DEVICE C add_up(C (&values)[COUNT]) {
        const int thread = static_cast<int>(threadIdx.x);
        int count = COUNT, first = 0;  // of the channels that this thread still adds up
        bool leads = true;
#pragma unroll
        for (int distance = 16; distance >= LANES; distance /= 2) {
            const bool upper = (thread & distance) != 0;
            if (count > 1) {  // exchange halves: the upper threads go on with the upper channels
                count /= 2;
#pragma unroll
                for (int i = 0; i < COUNT / 2; ++i) {
                    if (i >= count) break;
                    const C low = values[i], high = values[count + i];
                    values[i] = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
                }
                if (upper) first += count;
            } else {
                values[0] += __shfl_xor_sync(0xffffffffu, values[0], distance);
                leads = leads && !upper;
            }
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (leads && i < count) each[thread / 32][thread % LANES * COUNT + first + i] = values[i];
        __syncthreads();
        C sum = 0;
        if (thread < SUMS)
#pragma unroll
            for (int w = 0; w < NORM_WARPS; ++w) sum += each[w][thread];
        return sum;
    }
};

// What a thread block finds of such channels from what its threads found.
template <typename C, int COUNT, int LANES>
struct BlockMoments : BlockSums<C, COUNT, LANES> {
    static constexpr int SUMS = LANES * COUNT;
    C means[SUMS], starts[SUMS];
    int counts[NORM_WARPS];

    // Return the number of pixels; thread i < SUMS has the mean of channel i, and the squares of the differences from it.
    // Means are of differences from the pixel `start`, which all threads of a lane share.
    template <typename T, typename V>
    DEVICE int put_together(ThreadMoments<C, COUNT>& mine, const Elements<T, V>& start, C& mean, C& squares) {
        const int thread = static_cast<int>(threadIdx.x), lane = thread % LANES;
        int counted = mine.number;
#pragma unroll
        for (int distance = 16; distance >= LANES; distance /= 2)
            counted += __shfl_xor_sync(0xffffffffu, counted, distance);
        if (thread % 32 == 0) counts[thread / 32] = counted;  // the first lane has a pixel where others have it
        const C number = static_cast<C>(mine.number), share = mine.number > 0 ? C(1) / number : C(0);
        C apart[COUNT], total[COUNT];
#pragma unroll
        for (int e = 0; e < COUNT; ++e) {
            const C its = to_compute<C>(start.element[e]), from_start = mine.first[e] - its, away = mine.sum[e] * share;
            total[e] = mine.number > 0 ? number * from_start + mine.sum[e] : C(0);
            apart[e] = from_start + away;
            mine.squares[e] -= mine.sum[e] * away;
            if (thread < LANES) starts[lane * COUNT + e] = its;
        }
        const C all = this->add_up(total);
        int pixels = 0;
#pragma unroll
        for (int w = 0; w < NORM_WARPS; ++w) pixels += counts[w];
        if (thread < SUMS) means[thread] = pixels > 0 ? all / static_cast<C>(pixels) : C(0);
        __syncthreads();
#pragma unroll
        for (int e = 0; e < COUNT; ++e) {
            apart[e] -= means[lane * COUNT + e];
            if (mine.number > 0) mine.squares[e] += number * apart[e] * apart[e];
        }
        squares = this->add_up(mine.squares);
        mean = thread < SUMS ? starts[thread] + means[thread] : C(0);
        return pixels;
    }
};
