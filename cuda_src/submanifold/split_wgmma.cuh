// split_wgmma.cuh: groups of four warps that share the taps of a tile, by group_of_tap.
// Which group has a tap does not depend on the tile, so that the order of a row's sum does not either.
#pragma once

#include "core/swizzled_tile.cuh"

// WM groups, each with all rows and columns.
template <typename T, int BM, int BN, int WM, int WN>
struct SplitWgmma : TileWgmma<T, BM, BN, 1, WN> {
    static constexpr int SPLIT = WM, THREADS = WM * 128;
    static_assert(WN == 1, "the columns are not shared");
    static DEVICE int column() { return 0; }
};

template <class Product>
__host__ __device__ constexpr auto split_of(int) -> decltype(Product::SPLIT) {
    return Product::SPLIT;
}
template <class Product>
__host__ __device__ constexpr int split_of(long) {
    return 1;
}

template <int SPLIT>
DEVICE int group_of() {
    return SPLIT == 1 ? 0 : threadIdx.x / 128;
}

// Of a kernel of three places along each axis, taps (a, b, c) have numbers 9 a + 3 b + c and go to the groups by a + b + c: the
// taps of a surface across any axis are as many in each of three groups.
template <int SPLIT>
DEVICE int group_of_tap(int tap) {
    return SPLIT == 1 ? 0 : (tap + tap / 3 + tap / 9) % SPLIT;
}

// Add the sums of all groups up in the first. `sums` is shared memory for those of the others; nobody may read it any more.
template <int SPLIT, int MT, int NT, class Meet>
DEVICE void gather_sums(float (&acc)[MT][NT][4], float4* sums, Meet& meet) {
    const int group = group_of<SPLIT>();
    float4* const own = sums + threadIdx.x % 128;
    if (group > 0)
#pragma unroll
        for (int i = 0; i < MT * NT; ++i) {
            const float(&four)[4] = acc[i / NT][i % NT];
            own[((group - 1) * (MT * NT) + i) * 128] = make_float4(four[0], four[1], four[2], four[3]);
        }
    meet();
    if (group > 0) return;
#pragma unroll
    for (int other = 0; other < SPLIT - 1; ++other)
#pragma unroll
        for (int i = 0; i < MT * NT; ++i) {
            const float4 four = own[(other * (MT * NT) + i) * 128];
            float(&sum)[4] = acc[i / NT][i % NT];
            sum[0] += four.x, sum[1] += four.y, sum[2] += four.z, sum[3] += four.w;
        }
}
