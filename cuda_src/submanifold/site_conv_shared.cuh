// site_conv_shared.cuh: the convolution of site_conv_pipelined.cuh where thread blocks share tiles.
// Source: work cut into equal shares, and parts added up, as in Stream-K (Osama et al. 2023, arXiv:2301.03598).
// Python: sbnet_cupy/submanifold/site_conv.py; launched by site_conv_launch.py
// Launch: site_conv_shared has `shares` thread blocks, each with about the same number of taps: `cuts` say where its tiles begin and
// end, maybe between two taps of one. Then site_conv_sum adds up the parts of tiles that are cut.
#pragma once

#include "submanifold/site_conv_pipelined.cuh"

// The tiles of this thread block: all between two cuts, first of BN output channels, then of the next BN.
template <int BM>
struct Shares : Turns<BM> {
    const int2* ends;  // the two cuts, in shared memory, once the thread block has met
    int across;
    DEVICE Shares(const u16*, const int2* cuts, int2* ends, i64 M, i64, int across)
        : Turns<BM>(nullptr, nullptr, nullptr, M, 0, across), ends(ends), across(across) {
        if (threadIdx.x < 2) ends[threadIdx.x] = cuts[blockIdx.x + threadIdx.x];
    }
    DEVICE int each() const { return ends[1].x - ends[0].x + (ends[1].y > 0); }  // tiles of the same channels
    DEVICE int count() const { return each() * across; }
    DEVICE int tile(int turn) const {
        const int column = across > 1 ? turn / each() : 0;
        return (ends[0].x + turn - column * each()) * across + column;
    }
    DEVICE int first_tap(int tile) const { return tile / across == ends[0].x ? ends[0].y : 0; }
    DEVICE int end_tap(int tile) const { return tile / across == ends[1].x ? ends[1].y : ALL_TAPS; }
    DEVICE int part(int tile) const {
        const bool begins = !first_tap(tile);
        if (begins && end_tap(tile) == ALL_TAPS) return -1;
        return part_of(static_cast<int>(blockIdx.x), begins, tile % across, static_cast<int>(gridDim.x));
    }
};

template <template <typename, int, int, int, int> class Engine, typename T, int BM, int BN, int WM, int WN, int STAGES,
          bool CACHED, bool ROUND, int ACTIVATION>
__global__ void __launch_bounds__(Engine<T, BM, BN, WM, WN>::THREADS + COPIERS, 1)
    site_conv_shared(const T* __restrict__ x, const u8* __restrict__ packed, const int* __restrict__ rows,
                     const int* __restrict__ order, const u32* __restrict__ masks, const u16*,
                     const int2* __restrict__ cuts,  // [shares + 1]: site_turns.cuh
                     const u8* __restrict__ valid, const T* __restrict__ residual, T* __restrict__ y,
                     float* __restrict__ partials,  // 2 * BM * BN for each share and BN channels
                     i64 N, i64 M, i64 taps, i64 C, i64 K, i64 shares) {
    static_assert(BM == SHARED_ROWS, "cuts are made of such tiles");
    convolve_pipelined<Engine, T, BM, BN, WM, WN, STAGES, CACHED, ROUND, ACTIVATION, Shares>(
        x, packed, rows, order, masks, nullptr, cuts, valid, residual, y, partials, N, M, taps, C, K, shares);
}

// Add up the parts of tiles that are cut, in the order of their taps. A thread block has a cut, a column of BN
// channels, and a slice of the tile: 16 bytes of channels in two rows for each thread. Those of a tile's first cut add up all its parts.
template <template <typename, int, int, int, int> class Engine, typename T, int BM, int BN, int WM, int WN, int ACTIVATION>
__global__ void __launch_bounds__(Engine<T, BM, BN, WM, WN>::THREADS)
    site_conv_sum(const float* __restrict__ partials, const u8* __restrict__ packed, const int2* __restrict__ cuts,
                  const int* __restrict__ order, const u8* __restrict__ valid, const T* __restrict__ residual,
                  T* __restrict__ y, i64 M, i64 taps, i64 C, i64 K, i64 shares) {
    using Product = Engine<T, BM, BN, WM, WN>;
    constexpr int GROUPS = ChannelOrder<T>::GROUPS, COUNT = ChannelOrder<T>::COUNT, VECTORS = Product::NT / GROUPS;
    constexpr int SLICES = Product::MT * VECTORS;
    const int blocks = static_cast<int>(shares), slice = static_cast<int>(blockIdx.x) % SLICES;
    const int number = static_cast<int>(blockIdx.x) / SLICES, column = number / (blocks - 1), cut = number % (blocks - 1) + 1;
    // Cuts are older than the products, and may be read before the wait.
    const int m = slice / VECTORS, v = slice % VECTORS, tile = cuts[cut].x;
    const auto is_in_tile = [&](int other) { return cuts[other].x == tile && cuts[other].y > 0; };
    int parts = 0;  // that follow this cut, if it is the first in its tile
    if (is_in_tile(cut) && !is_in_tile(cut - 1))
        while (is_in_tile(cut + parts)) ++parts;  // ends: cuts[shares] is in no tile
    overlap_launches(partials, packed, order, valid, residual);
    if (!parts) return;
    float sums[GROUPS][4];
    const auto add = [&](int share, bool begins) {
        const float4* const from = reinterpret_cast<const float4*>(parts_of_thread<Product>(partials, part_of(share, begins, column, blocks)));
        float4 its[GROUPS];
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) its[g] = from[(m * Product::NT + v * GROUPS + g) * Product::THREADS];
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            sums[g][0] = begins ? its[g].x : sums[g][0] + its[g].x, sums[g][1] = begins ? its[g].y : sums[g][1] + its[g].y;
            sums[g][2] = begins ? its[g].z : sums[g][2] + its[g].z, sums[g][3] = begins ? its[g].w : sums[g][3] + its[g].w;
        }
    };
    add(cut - 1, true);
#pragma unroll 2
    for (int part = 0; part < parts; ++part) add(cut + part, false);
    const Steps steps(taps, C, K, 16 / sizeof(T));
    const float* const scales = reinterpret_cast<const float*>(packed);
#pragma unroll
    for (int half = 0; half < 2; ++half)
        for_each_vector<Product, T>(sums, m, half, [&](int row, int first, const float (&its)[COUNT]) {
            const int k = column * BN + v * (GROUPS * 8) + first;
            const i64 place = static_cast<i64>(tile) * BM + row;
            if (place >= M || k >= K) return;
            const i64 to = order[place];
            finish<T, ACTIVATION, true, false>(its, scales + k, scales + steps.panels * PANEL + k,
                                               residual_at<true>(residual, to * K + k, true), residual, y, to * K + k,
                                               static_cast<int>(K) - k, !valid || valid[to]);
        });
}
