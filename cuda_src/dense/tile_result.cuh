// tile_result.cuh: from the sums of a tile in registers to y: scale, bias, residual, activation, and what is scaled last.
// A Rows says which pixel of y each row of the tile is: pixel(row), -1 for none, and is_inside(row), else y is 0 there.
#pragma once

#include "dense/activation.cuh"
#include "core/swizzled_tile.cuh"

// Which output channel is in which column: a lane holds two columns of each group of 8 (tensor_core.cuh), and GROUPS
// groups make COUNT channels in a row, 16 bytes.
template <typename T>
struct ChannelOrder {
    static constexpr int GROUPS = 8 / sizeof(T), COUNT = 2 * GROUPS;
    static DEVICE int channel(int column) {
        const int n = column / 8, t = column % 8 / 2, e = column % 2;
        return n / GROUPS * (8 * GROUPS) + t * COUNT + n % GROUPS * 2 + e;
    }
    static DEVICE int column(int channel) {
        const int n = channel / (8 * GROUPS) * GROUPS + channel / 2 % GROUPS;
        return n * 8 + channel / COUNT % 4 * 2 + channel % 2;
    }
};

// sums * scale + bias, in place. WIDE: scale and bias are at multiples of 16 bytes, and there are registers for more of them
// than two at a time.
template <bool WIDE, int COUNT>
DEVICE void scale_and_shift(float (&sums)[COUNT], const float* scale, const float* bias) {
    if constexpr (WIDE) {
#pragma unroll
        for (int e = 0; e < COUNT; e += 4) {
            const float4 a = *reinterpret_cast<const float4*>(scale + e), b = *reinterpret_cast<const float4*>(bias + e);
            sums[e] = __fmaf_rn(sums[e], a.x, b.x), sums[e + 1] = __fmaf_rn(sums[e + 1], a.y, b.y);
            sums[e + 2] = __fmaf_rn(sums[e + 2], a.z, b.z), sums[e + 3] = __fmaf_rn(sums[e + 3], a.w, b.w);
        }
    } else {
#pragma unroll
        for (int e = 0; e < COUNT; ++e) sums[e] = __fmaf_rn(sums[e], scale[e], bias[e]);
    }
}

// By what channels are scaled and shifted behind all else, from a channel on.
struct LastScales {
    const float *scale, *shift;
    DEVICE LastScales at(int column) const { return LastScales{scale + column, shift + column}; }
};
// How many channels LastScales have in memory: as many as the columns of whole tiles.
DEVICE int last_channels(int K) { return ceil_div(K, 256) * 256; }
// How many tables of floats the columns of a tile have: scale and bias, and those of LastScales.
template <int ACTIVATION>
constexpr int TABLES = scales_last(ACTIVATION) ? 4 : 2;

// The result of 16 bytes of channels; `add_to` is the residual, if there is one.
template <typename T, int ACTIVATION, bool WIDE>
DEVICE uint4 finished(const float (&sums)[16 / sizeof(T)], const float* scale, const float* bias, uint4 add_to,
                      bool has_residual, bool inside, LastScales last = {}) {
    constexpr int COUNT = 16 / sizeof(T);
    float values[COUNT];
#pragma unroll
    for (int e = 0; e < COUNT; ++e) values[e] = sums[e];
    scale_and_shift<WIDE>(values, scale, bias);
#pragma unroll
    for (int e = 0; e < COUNT; ++e) values[e] = activate<before_sum(ACTIVATION)>(values[e]);
    if (has_residual) {
        const Elements<T, uint4> addend(add_to);
#pragma unroll
        for (int e = 0; e < COUNT; ++e) values[e] += to_compute<float>(addend.element[e]);
    }
    if constexpr (scales_last(ACTIVATION)) {
#pragma unroll
        for (int e = 0; e < COUNT; ++e) values[e] = activate<after_sum(ACTIVATION)>(values[e]);
        scale_and_shift<WIDE>(values, last.scale, last.shift);
    }
    const uint4 result = rounded<T, scales_last(ACTIVATION) ? 0 : after_sum(ACTIVATION)>(values);
    return inside ? result : zero<uint4>();
}

// The same, stored from element `to` of y on; `left` channels are left. `add_to` is the residual, if VECTOR.
template <typename T, int ACTIVATION, bool VECTOR, bool WIDE>
DEVICE void finish(const float (&sums)[16 / sizeof(T)], const float* scale, const float* bias, uint4 add_to,
                   const T* __restrict__ residual, T* __restrict__ y, i64 to, int left, bool inside,
                   LastScales last = {}) {
    if (left <= 0) return;
    if constexpr (VECTOR) {
        *reinterpret_cast<uint4*>(y + to) = finished<T, ACTIVATION, WIDE>(sums, scale, bias, add_to, residual, inside, last);
    } else {
#pragma unroll
        for (int e = 0; e < static_cast<int>(16 / sizeof(T)); ++e) {
            if (e >= left) break;
            float value = activate<before_sum(ACTIVATION)>(__fmaf_rn(sums[e], scale[e], bias[e]));
            if (residual) value += to_compute<float>(residual[to + e]);
            value = activate<after_sum(ACTIVATION)>(value);
            if constexpr (scales_last(ACTIVATION)) value = __fmaf_rn(value, last.scale[e], last.shift[e]);
            y[to + e] = from_compute<T>(inside ? value : 0.0f);
        }
    }
}

// The residual of 16 bytes of channels from element `at` on.
template <bool VECTOR, typename T>
DEVICE uint4 residual_at(const T* __restrict__ residual, i64 at, bool there) {
    if (VECTOR && residual && there) return *reinterpret_cast<const uint4*>(residual + at);
    return zero<uint4>();
}

// The sums of vector `v` of channels that a lane has of row l / 4, or l / 4 + 8, of 16 rows.
template <typename T, int NT>
DEVICE void vector_of(const float (&acc)[NT][4], int v, int half, float (&sums)[ChannelOrder<T>::COUNT]) {
#pragma unroll
    for (int e = 0; e < ChannelOrder<T>::COUNT; ++e) sums[e] = acc[v * ChannelOrder<T>::GROUPS + e / 2][2 * half + e % 2];
}

// A warp's sums of 16 rows of its tile and all its columns, `half` of them at rows l / 4 or l / 4 + 8: visit(row, column, sums).
template <class Product, typename T, int NT, class Visit>
DEVICE void for_each_vector(const float (&acc)[NT][4], int m, int half, Visit visit) {
    constexpr int GROUPS = ChannelOrder<T>::GROUPS, COUNT = ChannelOrder<T>::COUNT;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int v = 0; v < NT / GROUPS; ++v) {
        float sums[COUNT];
        vector_of<T>(acc, v, half, sums);
        visit(Product::row(m) + lane / 4 + 8 * half, Product::column() + v * GROUPS * 8 + lane % 4 * COUNT, sums);
    }
}

template <int COUNT>
DEVICE void store_floats(float* to, const float (&values)[COUNT]) {
#pragma unroll
    for (int e = 0; e < COUNT; e += 4)
        *reinterpret_cast<float4*>(to + e) = make_float4(values[e], values[e + 1], values[e + 2], values[e + 3]);
}

// Bytes of a row of a result that is staged in shared memory: lanes of two rows store to all banks.
template <typename T, int COLUMNS>
struct Staged {
    static constexpr int PITCH = COLUMNS * sizeof(T) + 64;
};

// The pixels that the channels of y become, if they do: down x across of each, with `channels` each, which are whole vectors.
struct Unfolding {
    int down, across, width, channels;  // width: pixels of a line of a block before
};

// How y lies. In its own memory; or y and the residual may be parts of other stacks, whose pixels have more channels; or its
// channels, which are ordered by pixel, become pixels, and it may be a part.
constexpr int WHOLE = 0, IN_PARTS = 1, UNFOLDED = 2;

// Where a tile's results go.
template <typename T, class Rows, int LIES = WHOLE>
struct Result {
    const T* __restrict__ residual;
    T* __restrict__ y;
    const float *scale, *bias;  // of the tile's columns
    Rows rows;
    int k0, K;
    int pitch_added, pitch_out;  // if not WHOLE, channels from a pixel of the residual to the next, and of y
    Unfolding pixels;            // if UNFOLDED
    using Sums = const float (&)[ChannelOrder<T>::COUNT];  // no generic lambdas: NVRTC 13.0 takes them for host functions

    LastScales last;  // of the tile's columns, if they are scaled last
    // Those of a column, loaded each time that they are needed: registers are few where a tile ends.
    template <int ACTIVATION>
    DEVICE LastScales last_of(int column) const {
        if constexpr (scales_last(ACTIVATION)) return last.at(recomputed(column));
        return LastScales{};
    }
    // Where a pixel of the residual begins.
    DEVICE i64 added(int pixel) const { return static_cast<i64>(pixel) * (LIES != WHOLE ? pitch_added : K); }
    // Where a pixel of y begins, and where its channel k is from there.
    DEVICE i64 stored(int pixel) const {
        if constexpr (LIES == UNFOLDED) {
            const int line = static_cast<int>(static_cast<u32>(pixel) / static_cast<u32>(pixels.width));
            const i64 first = static_cast<i64>(line) * pixels.down * pixels.width + (pixel - line * pixels.width);
            return first * pixels.across * pitch_out;
        }
        return static_cast<i64>(pixel) * (LIES != WHOLE ? pitch_out : K);
    }
    DEVICE i64 channel(int k) const {
        if constexpr (LIES == UNFOLDED) {
            const int number = static_cast<int>(static_cast<u32>(k) / static_cast<u32>(pixels.channels));
            const int down = static_cast<int>(static_cast<u32>(number) / static_cast<u32>(pixels.across));
            const int beside = down * (pixels.width - 1) * pixels.across + number;
            return static_cast<i64>(beside) * pitch_out + (k - number * pixels.channels);
        }
        return k;
    }

    // The residuals of a thread's part of a tile, loaded before the sums are there: where they are so FEW.
    template <class Product>
    struct Loaded {
        static constexpr int VECTORS = Product::NT / ChannelOrder<T>::GROUPS, ALL = Product::MT * 2 * VECTORS;
        static constexpr bool FEW = ALL <= 8;
        uint4 add_to[FEW ? Product::MT : 1][2][FEW ? VECTORS : 1];
    };
    template <class Product>
    DEVICE void load(Loaded<Product>& to) const {
        constexpr int COUNT = ChannelOrder<T>::COUNT, GROUPS = ChannelOrder<T>::GROUPS, VECTORS = Loaded<Product>::VECTORS;
#pragma unroll
        for (int m = 0; m < Product::MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int pixel = rows.pixel(Product::row(m) + threadIdx.x % 32 / 4 + 8 * half);
#pragma unroll
                for (int v = 0; v < VECTORS; ++v) {
                    const int column = Product::column() + v * GROUPS * 8 + threadIdx.x % 4 * COUNT;
                    to.add_to[m][half][v] = residual_at<true>(residual, added(pixel) + k0 + column,
                                                              pixel >= 0 && k0 + column < K);
                }
            }
    }

    // WIDE: there are registers for many vectors at a time.
    template <int ACTIVATION, bool VECTOR, bool WIDE, class Product, int MT, int NT>
    DEVICE void store(const float (&acc)[MT][NT][4]) const {
        store<ACTIVATION, VECTOR, WIDE, false, Product>(acc, Loaded<Product>());
    }
    // With residuals that are LOADED.
    template <int ACTIVATION, bool VECTOR, bool WIDE, bool LOADED, class Product, int MT, int NT>
    DEVICE void store(const float (&acc)[MT][NT][4], const Loaded<Product>& loaded) const {
        if constexpr (!WIDE)
            store_rows<ACTIVATION, VECTOR, LOADED, Product>(acc, loaded);
        else if (residual)
            store_columns<ACTIVATION, VECTOR, LOADED, true, Product>(acc, loaded);
        else
            store_columns<ACTIVATION, VECTOR, LOADED, false, Product>(acc, loaded);
    }

    // The same through shared memory, where rows of `pitch` bytes hold the residual, if there is one: a warp stores its
    // rows in whole lines.
    template <int ACTIVATION, class Product, int MT, int NT>
    DEVICE void store_staged(const float (&acc)[MT][NT][4], u8* staged, int pitch) const {
        if (residual)
            stage_rows<ACTIVATION, true, Product>(acc, staged, pitch);
        else
            stage_rows<ACTIVATION, false, Product>(acc, staged, pitch);
        constexpr int LANES = ChannelOrder<T>::COUNT, VECTORS = NT * 8 / LANES, AT_ONCE = 32 / VECTORS;  // rows
        const int lane = recomputed(threadIdx.x % 32);
        __syncwarp();
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int i = 0; i < 16; i += AT_ONCE) {
                const int row = Product::row(m) + i + lane / VECTORS, pixel = rows.pixel(row);
                const int column = Product::column() + lane % VECTORS * LANES;
                if (pixel >= 0 && k0 + column < K)
                    *reinterpret_cast<uint4*>(y + stored(pixel) + channel(k0 + column)) =
                        *reinterpret_cast<const uint4*>(staged + row * pitch + column * static_cast<int>(sizeof(T)));
            }
        }
    }

    // Visit all sums of a thread: visit(row, column, sums).
    template <class Product, int MT, int NT, class Visit>
    DEVICE void for_each_sum(const float (&acc)[MT][NT][4], Visit visit) const {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                for_each_vector<Product, T>(acc[m], m, half, visit);
    }

    // Leave the sums in memory, for stack_conv_sum.
    template <class Product, int MT, int NT>
    DEVICE void store_partials(const float (&acc)[MT][NT][4], float* partials, int rank, int split, int width) const {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                for_each_vector<Product, T>(acc[m], m, half, [&](int row, int column, Sums sums) {
                    const int pixel = rows.pixel(row);
                    if (pixel >= 0)
                        store_floats(partials + (static_cast<i64>(pixel) * split + rank) * width + k0 + column, sums);
                });
    }

    // Have the residual of a tile of BM x BN brought to the L2 cache, by `threads` threads.
    template <int BM, int BN>
    DEVICE void prefetch(int thread, int threads) const {
        constexpr int LINE = 128 / sizeof(T), LINES = ceil_div(BN, LINE);
        for (int i = thread; i < BM * LINES; i += threads) {
            const int pixel = rows.pixel(i / LINES), k = k0 + i % LINES * LINE;
            if (pixel >= 0 && k < K) prefetch_line(residual + added(pixel) + k);
        }
    }

private:
    // A thread's rows one after the other, and of each its vectors of channels.
    template <int ACTIVATION, bool VECTOR, bool LOADED, class Product, int MT, int NT>
    DEVICE void store_rows(const float (&acc)[MT][NT][4], const Loaded<Product>& loaded) const {
        constexpr int GROUPS = ChannelOrder<T>::GROUPS, COUNT = ChannelOrder<T>::COUNT, VECTORS = NT / GROUPS;
        const int lane = threadIdx.x % 32, first = Product::column() + lane % 4 * COUNT;
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = Product::row(m) + lane / 4 + 8 * half, pixel = rows.pixel(row);
                const bool inside = rows.is_inside(row);
                uint4 add_to[VECTORS];  // all are loaded before the first is used
#pragma unroll
                for (int v = 0; v < VECTORS; ++v) {
                    const int column = first + v * GROUPS * 8;
                    if constexpr (LOADED)
                        add_to[v] = loaded.add_to[m][half][v];
                    else
                        add_to[v] = residual_at<VECTOR>(residual, added(pixel) + k0 + column, pixel >= 0 && k0 + column < K);
                }
                const i64 at = stored(LIES == IN_PARTS ? recomputed(pixel) : pixel) + (LIES == UNFOLDED ? 0 : k0);
#pragma unroll
                for (int v = 0; v < VECTORS; ++v) {
                    const int column = first + v * GROUPS * 8;
                    float sums[COUNT];
                    vector_of<T>(acc[m], v, half, sums);
                    if (pixel >= 0)
                        finish<T, ACTIVATION, VECTOR, false>(sums, scale + column, bias + column, add_to[v], residual, y,
                                                             at + (LIES == UNFOLDED ? channel(k0 + column) : column),
                                                             K - k0 - column, inside, last_of<ACTIVATION>(column));
                }
            }
        }
    }

    // The same, vector by vector of all rows, which have scale and bias in common: fewer loads, and more registers.
    template <int ACTIVATION, bool VECTOR, bool LOADED, bool ADDED, class Product, int MT, int NT>
    DEVICE void store_columns(const float (&acc)[MT][NT][4], const Loaded<Product>& loaded) const {
        constexpr int GROUPS = ChannelOrder<T>::GROUPS, COUNT = ChannelOrder<T>::COUNT;
        const int lane = threadIdx.x % 32;
        int own[MT][2];
        bool inside[MT][2];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = Product::row(m) + lane / 4 + 8 * half;
                own[m][half] = rows.pixel(row), inside[m][half] = rows.is_inside(row);
            }
#pragma unroll
        for (int v = 0; v < NT / GROUPS; ++v) {
            const int column = Product::column() + v * GROUPS * 8 + lane % 4 * COUNT, k = k0 + column;
            uint4 add_to[MT][2];  // all are loaded before the first is used
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    if constexpr (LOADED)
                        add_to[m][half] = loaded.add_to[m][half][v];
                    else
                        add_to[m][half] = residual_at<VECTOR>(ADDED ? residual : nullptr, added(own[m][half]) + k,
                                                              own[m][half] >= 0 && k < K);
                }
            alignas(16) float its_scale[COUNT], its_bias[COUNT];
#pragma unroll
            for (int e = 0; e < COUNT; e += 4) {
                *reinterpret_cast<float4*>(its_scale + e) = *reinterpret_cast<const float4*>(scale + column + e);
                *reinterpret_cast<float4*>(its_bias + e) = *reinterpret_cast<const float4*>(bias + column + e);
            }
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float sums[COUNT];
                    vector_of<T>(acc[m], v, half, sums);
                    const i64 to = stored(own[m][half]) + channel(k);
                    if constexpr (VECTOR) {  // with no branch but that of the store
                        const uint4 result = finished<T, ACTIVATION, true>(sums, its_scale, its_bias, add_to[m][half], ADDED,
                                                                           inside[m][half], last_of<ACTIVATION>(column));
                        if (own[m][half] >= 0 && k < K) *reinterpret_cast<uint4*>(y + to) = result;
                    } else if (own[m][half] >= 0) {
                        finish<T, ACTIVATION, VECTOR, true>(sums, its_scale, its_bias, add_to[m][half],
                                                            ADDED ? residual : nullptr, y, to, K - k, inside[m][half],
                                                            last_of<ACTIVATION>(column));
                    }
                }
        }
    }

    // The same into shared memory.
    template <int ACTIVATION, bool ADDED, class Product, int MT, int NT>
    DEVICE void stage_rows(const float (&acc)[MT][NT][4], u8* staged, int pitch) const {
        constexpr int GROUPS = ChannelOrder<T>::GROUPS, COUNT = ChannelOrder<T>::COUNT;
        const int lane = recomputed(threadIdx.x % 32);
#pragma unroll
        for (int v = 0; v < NT / GROUPS; ++v) {
            const int column = Product::column() + v * GROUPS * 8 + lane % 4 * COUNT;
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = Product::row(m) + lane / 4 + 8 * half;
                    float sums[COUNT];
                    vector_of<T>(acc[m], v, half, sums);
                    uint4& vector = *reinterpret_cast<uint4*>(staged + row * pitch + column * static_cast<int>(sizeof(T)));
                    vector = finished<T, ACTIVATION, false>(sums, scale + column, bias + column, ADDED ? vector : zero<uint4>(), ADDED,
                                                    rows.is_inside(row), last_of<ACTIVATION>(column));
                }
        }
    }
};
