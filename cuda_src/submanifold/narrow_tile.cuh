// narrow_tile.cuh: a tile of 16 output channels: which warp has which rows, and how their sums are stored.
#pragma once

#include "dense/tile_result.cuh"

// Products of 16 channels, by mma.sync; WM warps share the rows.
template <typename T, int BM, int BN, int WM, int WN>
struct NarrowMma {
    static constexpr int THREADS = WM * 32, MT = BM / WM / 16, NT = 2;
    static constexpr bool ASYNC = false;
    static_assert(BN == 16 && WN == 1 && MT * WM * 16 == BM, "warps share the rows evenly");
    static DEVICE int row(int m) { return (threadIdx.x / 32 * MT + m) * 16; }
    static DEVICE int column() { return 0; }
};
// The packed column of a column of a tile. The 16 channels of numbers of 2 bytes are the first four columns of each 8.
template <typename T, int BN>
DEVICE int packed_column(int column) {
    return BN == 16 && sizeof(T) == 2 ? column / 4 * 8 + column % 4 : column;
}
// Store the sums of 16 channels of numbers of 2 bytes: two lanes hold what one stores, and share the rows.
template <int ACTIVATION, class Product, typename T, class Rows, int MT>
DEVICE void store_narrow(const Result<T, Rows>& to, const float (&acc)[MT][2][4]) {
    const int lane = threadIdx.x % 32, bottom = lane >> 1 & 1, channel = lane % 2 * 8;
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        float sums[8];
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float other = __shfl_xor_sync(0xffffffffu, bottom ? acc[m][n][e] : acc[m][n][2 + e], 2);
                sums[4 * n + e] = bottom ? other : acc[m][n][e];
                sums[4 * n + 2 + e] = bottom ? acc[m][n][2 + e] : other;
            }
        const int row = Product::row(m) + lane / 4 + 8 * bottom, pixel = to.rows.pixel(row);
        if (pixel < 0 || channel >= to.K) continue;
        const i64 at = static_cast<i64>(pixel) * to.K + channel;
        finish<T, ACTIVATION, true, false>(sums, to.scale + channel, to.bias + channel,
                                    residual_at<true>(to.residual, at, true), to.residual, to.y, at, to.K - channel, to.rows.is_inside(row));
    }
}
