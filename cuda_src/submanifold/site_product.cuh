// site_product.cuh: what the convolutions of site_conv.cu on tensor cores share: the order of K, and the rows of tiles.
// K of the product is a list of steps, 32 bytes of channels of a tap, tap after tap. site_conv and site_conv_pipelined add up
// in that order, whatever tile a row is in. A tile leaves out the taps that none of its rows has, and a group of 32 rows those that none of
// its own has: what is left out would add zeros.
#pragma once

#include "dense/tile_result.cuh"

constexpr int PANEL = 64, PANEL_CHUNK = PANEL * TILE_ROW;  // output channels that are packed together; 4 steps of them
constexpr int ROWS_OF_GROUP = 32;                          // rows of the result that have a mask of taps

// Packed weights: scale and bias, float[2][64 * panels]; then for each panel of 64 output channels its chunks of 4 steps, 64
// rows x 128 bytes, swizzled.
struct Steps {
    int taps, per_tap, chunks, panels;
    // The steps of a tap are a multiple of `whole`: those past its channels are zeros.
    DEVICE Steps(i64 taps, i64 C, i64 K, int lanes, int whole = 1)
        : taps(static_cast<int>(taps)), per_tap(ceil_div(static_cast<int>(ceil_div<i64>(C, 2 * lanes)), whole) * whole),
          chunks(ceil_div(this->taps * per_tap, 4)), panels(static_cast<int>(ceil_div<i64>(K, PANEL))) {}
    DEVICE const u8* weights(const u8* packed) const { return packed + static_cast<i64>(panels) * (2 * PANEL * 4); }
    // Scale (`which` 0) or bias (1) of channel k of the packed tables.
    DEVICE float table(const u8* packed, int which, int k) const {
        return k < panels * PANEL ? reinterpret_cast<const float*>(packed)[which * panels * PANEL + k] : 0.0f;
    }
};

// The rows of y in a tile.
struct SiteRows {
    const int *places, *inside;  // of each row of the tile, in shared memory: the row of y or -1; whether it is valid
    DEVICE int pixel(int row) const { return places[row]; }
    DEVICE bool is_inside(int row) const { return inside[row]; }
};

// What a kernel map says of the rows of tiles of BM rows.
template <int BM>
struct SiteTable {
    static constexpr int GROUPS = BM / ROWS_OF_GROUP;
    const int* __restrict__ rows;    // [taps, M]: rows of x
    const int* __restrict__ order;   // [M]: the row of y, or null: the same
    const u32* __restrict__ masks;   // [ceil(M / 32)][words]
    const u8* __restrict__ valid;    // [M] or null: all rows of y
    i64 M;
    int taps;

    // List the taps that the tile of rows p0 to `end` has, tap << 8 | groups of its rows that have it; return how many.
    // The 32 threads of a warp call it.
    DEVICE int list(i64 p0, i64 end, int* listed) const {
        const int lane = threadIdx.x % 32, words = ceil_div(taps, 32);
        const i64 first = p0 / ROWS_OF_GROUP, all = ceil_div<i64>(end, ROWS_OF_GROUP);
        int count = 0;
        for (int word = 0; word < words; ++word) {
            u32 any = 0;
            int groups = 0;
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                const u32 mask = first + g < all ? masks[(first + g) * words + word] : 0;
                groups |= static_cast<int>(mask >> lane & 1) << g;
                any |= mask;
            }
            if (groups) listed[count + __popc(any & ((1u << lane) - 1))] = (word * 32 + lane) << 8 | groups;
            count += __popc(any);
        }
        return count;
    }
    // Begin to copy the rows of x that the listed taps read: sources[number in the list][BM]. Past row M they are anything.
    DEVICE void copy_sources(i64 p0, const int* listed, int count, int* sources, int thread, int threads) const {
        for (int i = thread; i < count * BM; i += threads)
            copy_async_4(sources + i, source(listed[i / BM] >> 8, p0 + i % BM), true);
    }
    // Where the row of x is that a tap reads for row m of the table; past row M anything.
    DEVICE const int* source(int tap, i64 m) const { return rows + static_cast<i64>(tap) * M + (m < M ? m : M - 1); }
    DEVICE void find_places(i64 p0, i64 end, int* places, int* inside, int thread, int threads) const {
        for (int r = thread; r < BM; r += threads) {
            const i64 m = p0 + r;
            const int place = m >= end ? -1 : order ? order[m] : static_cast<int>(m);
            places[r] = place;
            inside[r] = place >= 0 && (!valid || valid[place]);
        }
    }
};

// Begin to copy 16 bytes of channels, from channel c of a row of x on; zeros past channel C, and where there is no such row.
// CACHED: through the L1 cache, for rows that several taps of a tile read.
template <bool VECTOR, bool CACHED, typename T>
DEVICE void copy_row(u8* to, const T* __restrict__ x, int row, i64 N, int c, i64 C) {
    const bool there = static_cast<u32>(row) < static_cast<u32>(N) && c < C;
    if constexpr (VECTOR) {  // few instructions: those that copy have no time
        const u64 at = static_cast<u64>(static_cast<u32>(row)) * static_cast<u32>(C * static_cast<i64>(sizeof(T)));
        copy_async_16_unless_negative<CACHED>(to, reinterpret_cast<const u8*>(x + c) + at, there ? row : -1);
    } else {
        const T* const from = x + (there ? row * C + c : 0);
        Elements<T, uint4> value(zero<uint4>());
#pragma unroll
        for (int e = 0; e < static_cast<int>(16 / sizeof(T)); ++e)
            if (there && c + e < C) value.element[e] = from[e];
        *reinterpret_cast<uint4*>(to) = value.vector;
    }
}
