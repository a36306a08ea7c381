// stack_batch_norm.cuh: what the batch norm of a stack in training and its gradient share: who looks at which pixels.
// A thread block looks at a tile of LANES vectors of channels, of a range of pixels of the stack: LANES threads stand side by
// side on the channels of a pixel, the others on further pixels. The ranges depend on sizes and the count alone, and sums are
// put together by a tree, so that results have the same bits on every GPU.
#pragma once

#include "block_sparse/stack/block_table.cuh"
#include "core/async_copy.cuh"
#include "dense/activation.cuh"

constexpr int NORM_THREADS = 256;

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
    bool leads;                     // whether this thread writes what the thread block found of its column

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
        leads = static_cast<int>(threadIdx.x) < LANES && column < width;
        if (column >= width) begin = end;
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

// Leave two numbers of each channel of a range in memory, [groups, 2, C]: those of the first rows of `shared`, and of the others.
template <int ROWS, int LANES, typename C>
DEVICE void store_partials(C* __restrict__ partials, const C (&shared)[ROWS][NORM_THREADS], const NormRange<LANES>& range,
                           i64 channels) {
    constexpr int COUNT = ROWS / 2;
    C* const to = partials + 2 * range.group * channels + range.column * COUNT;
#pragma unroll
    for (int e = 0; e < COUNT; ++e) {
        to[e] = shared[e][threadIdx.x];
        to[channels + e] = shared[COUNT + e][threadIdx.x];
    }
}

// The rows of the statistics of a norm, [5, C] and the number of pixels.
enum Statistic { MEAN, VARIANCE, DEVIATION, SCALE, SHIFT, STATISTICS };  // DEVIATION: one over the standard deviation

// Sums over the groups in a fixed order: CHANNELS threads stand side by side, the others take the groups in turn.
constexpr int FINISH_CHANNELS = 4, FINISH_ROWS = NORM_THREADS / FINISH_CHANNELS;

// The sum over every CHANNELS-th thread, for all of them. `shared` holds NORM_THREADS numbers.
template <int CHANNELS>
DEVICE double sum_of_threads(double value, double* shared) {
    const int thread = static_cast<int>(threadIdx.x);
    __syncthreads();
    shared[thread] = value;
    __syncthreads();
#pragma unroll 1
    for (int half = NORM_THREADS / 2; half >= CHANNELS; half /= 2) {
        if (thread < half) shared[thread] += shared[thread + half];
        __syncthreads();
    }
    return shared[thread % CHANNELS];
}

// The sum over the threads of a channel, for all of them.
DEVICE double sum_of_channel(double value, double* shared) { return sum_of_threads<FINISH_CHANNELS>(value, shared); }
