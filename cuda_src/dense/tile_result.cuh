// tile_result.cuh: from the sums of a tile in registers to y: scale, bias, residual, activation.
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
};

template <int MT, int NT>
DEVICE void clear(float (&acc)[MT][NT][4]) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n) acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0.0f;
}

// The result of 16 bytes of channels; `add_to` is the residual, if there is one.
template <typename T, int ACTIVATION>
DEVICE uint4 finished(const float (&sums)[16 / sizeof(T)], const float* scale, const float* bias, uint4 add_to,
                      bool has_residual, bool inside) {
    const Elements<T, uint4> addend(add_to);
    Elements<T, uint4> result(zero<uint4>());
#pragma unroll
    for (int e = 0; e < static_cast<int>(16 / sizeof(T)); ++e) {
        float value = __fmaf_rn(sums[e], scale[e], bias[e]);
        if (has_residual) value += to_compute<float>(addend.element[e]);
        result.element[e] = from_compute<T>(inside ? activate<ACTIVATION>(value) : 0.0f);
    }
    return result.vector;
}

// The same, stored from element `to` of y on; `left` channels are left. `add_to` is the residual, if VECTOR.
template <typename T, int ACTIVATION, bool VECTOR>
DEVICE void finish(const float (&sums)[16 / sizeof(T)], const float* scale, const float* bias, uint4 add_to,
                   const T* __restrict__ residual, T* __restrict__ y, i64 to, int left, bool inside) {
    if (left <= 0) return;
    if constexpr (VECTOR) {
        *reinterpret_cast<uint4*>(y + to) = finished<T, ACTIVATION>(sums, scale, bias, add_to, residual, inside);
    } else {
#pragma unroll
        for (int e = 0; e < static_cast<int>(16 / sizeof(T)); ++e) {
            if (e >= left) break;
            float value = __fmaf_rn(sums[e], scale[e], bias[e]);
            if (residual) value += to_compute<float>(residual[to + e]);
            y[to + e] = from_compute<T>(inside ? activate<ACTIVATION>(value) : 0.0f);
        }
    }
}

// The residual of 16 bytes of channels from element `at` on.
template <bool VECTOR, typename T>
DEVICE uint4 residual_at(const T* __restrict__ residual, i64 at, bool there) {
    if (VECTOR && residual && there) return *reinterpret_cast<const uint4*>(residual + at);
    return zero<uint4>();
}

// A warp's sums of 16 rows of its tile and all its columns, `half` of them at rows l / 4 or l / 4 + 8: visit(row, column, sums).
template <class Product, typename T, int NT, class Visit>
DEVICE void for_each_vector(const float (&acc)[NT][4], int m, int half, Visit visit) {
    constexpr int GROUPS = ChannelOrder<T>::GROUPS, COUNT = ChannelOrder<T>::COUNT;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < NT; n += GROUPS) {
        float sums[COUNT];
#pragma unroll
        for (int e = 0; e < COUNT; ++e) sums[e] = acc[n + e / 2][2 * half + e % 2];
        visit(n / GROUPS, Product::row(m) + lane / 4 + 8 * half, Product::column() + n * 8 + lane % 4 * COUNT, sums);
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

// Where a tile's results go.
template <typename T, class Rows>
struct Result {
    const T* __restrict__ residual;
    T* __restrict__ y;
    const float *scale, *bias;  // of the tile's columns
    Rows rows;
    int k0, K;
    using Sums = const float (&)[ChannelOrder<T>::COUNT];  // no generic lambdas: NVRTC 13.0 takes them for host functions

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
                    to.add_to[m][half][v] = residual_at<true>(residual, static_cast<i64>(pixel) * K + k0 + column,
                                                              pixel >= 0 && k0 + column < K);
                }
            }
    }

    template <int ACTIVATION, bool VECTOR, class Product, int MT, int NT>
    DEVICE void store(const float (&acc)[MT][NT][4]) const {
        store<ACTIVATION, VECTOR, false, Product>(acc, Loaded<Product>());
    }
    // With residuals that are LOADED.
    template <int ACTIVATION, bool VECTOR, bool LOADED, class Product, int MT, int NT>
    DEVICE void store(const float (&acc)[MT][NT][4], const Loaded<Product>& loaded) const {
        constexpr int VECTORS = NT / ChannelOrder<T>::GROUPS;
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int its_row = Product::row(m) + threadIdx.x % 32 / 4 + 8 * half;
                const int pixel = rows.pixel(its_row);
                const bool inside = rows.is_inside(its_row);
                const i64 at = static_cast<i64>(pixel) * K + k0;
                uint4 add_to[VECTORS];  // all are loaded before the first is used
                for_each_vector<Product, T>(acc[m], m, half, [&](int v, int, int column, Sums) {
                    if constexpr (LOADED)
                        add_to[v] = loaded.add_to[m][half][v];
                    else
                        add_to[v] = residual_at<VECTOR>(residual, at + column, pixel >= 0 && k0 + column < K);
                });
                for_each_vector<Product, T>(acc[m], m, half, [&](int v, int, int column, Sums sums) {
                    if (pixel >= 0)
                        finish<T, ACTIVATION, VECTOR>(sums, scale + column, bias + column, add_to[v], residual, y,
                                                      at + column, K - k0 - column, inside);
                });
            }
        }
    }

    // The same through shared memory, where rows of `pitch` bytes hold the residual, if there is one: a warp stores its
    // rows in whole lines.
    template <int ACTIVATION, class Product, int MT, int NT>
    DEVICE void store_staged(const float (&acc)[MT][NT][4], u8* staged, int pitch) const {
        constexpr int LANES = ChannelOrder<T>::COUNT, VECTORS = NT * 8 / LANES, AT_ONCE = 32 / VECTORS;  // rows
        const int lane = recomputed(threadIdx.x % 32);
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int its_row = Product::row(m) + lane / 4 + 8 * half;
                const bool inside = rows.is_inside(its_row);
                for_each_vector<Product, T>(acc[m], m, half, [&](int, int row, int column, Sums sums) {
                    uint4& vector = *reinterpret_cast<uint4*>(staged + row * pitch + column * static_cast<int>(sizeof(T)));
                    const Elements<T, uint4> addend(residual ? vector : zero<uint4>());
                    vector = finished<T, ACTIVATION>(sums, scale + column, bias + column, addend.vector, residual, inside);
                });
            }
        }
        __syncwarp();
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int i = 0; i < 16; i += AT_ONCE) {
                const int row = Product::row(m) + i + lane / VECTORS, pixel = rows.pixel(row);
                const int column = Product::column() + lane % VECTORS * LANES;
                if (pixel >= 0 && k0 + column < K)
                    *reinterpret_cast<uint4*>(y + static_cast<i64>(pixel) * K + k0 + column) =
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
                for_each_vector<Product, T>(acc[m], m, half, [&](int, int row, int column, Sums values) {
                    visit(row, column, values);
                });
    }

    // Leave the sums in memory, for stack_conv_sum.
    template <class Product, int MT, int NT>
    DEVICE void store_partials(const float (&acc)[MT][NT][4], float* partials, int rank, int split, int width) const {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                for_each_vector<Product, T>(acc[m], m, half, [&](int, int row, int column, Sums sums) {
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
            if (pixel >= 0 && k < K) prefetch_line(residual + static_cast<i64>(pixel) * K + k);
        }
    }
};
