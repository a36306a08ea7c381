// site_conv_once.cuh: the convolution of site_conv.cu for few sites and small kernels: all that a tile reads is copied at once.
// Python: sbnet_cupy/submanifold/site_conv.py; launched by site_conv_launch.py
// Compute capability 9.0. Rows of x and y are whole vectors of 16 bytes, aligned.
// Launch: a persistent grid, (tiles of BM rows, tiles of BN channels) thread blocks.
// Where tiles are few, a convolution is a chain of loads that wait for each other: which rows a tile reads, then these rows.
// There is room for all taps of BM rows and for all weights of BN channels, so that nothing else waits: the weights come by
// bulk copies meanwhile. Four groups of warps take turns in the chunks of K, and their sums are added in their order.
#pragma once

#include "submanifold/site_product.cuh"

constexpr int ONCE_GROUPS = 4;

//   WM, WN  warps of a group that share the rows and the columns
//   ROUND   x is float, rounded to tf32 in shared memory
//   OVERLAP as in site_conv_tiles
// Launch bounds for one thread block: for more the compiler spills registers.
template <typename T, int BM, int BN, int WM, int WN, bool ROUND, int ACTIVATION, bool OVERLAP>
__global__ void __launch_bounds__(WM * WN * ONCE_GROUPS * 32, 1)
    site_conv_once(const T* __restrict__ x,         // the parameters of site_conv
                   const u8* __restrict__ packed, const int* __restrict__ rows, const int* __restrict__ order,
                   const u32* __restrict__ masks, const u16*, const int2*, const u8* __restrict__ valid,
                   const T* __restrict__ residual, T* __restrict__ y, i64 N, i64 M, i64 taps, i64 C, i64 K, i64) {
    if constexpr (OVERLAP) overlap_launches(x, packed, rows, order, valid, residual);
    using Product = GroupedMma<T, BM, BN, WM, WN, ONCE_GROUPS>;
    constexpr int THREADS = Product::THREADS, GROUP = THREADS / ONCE_GROUPS, MT = Product::MT, NT = Product::NT;
    constexpr int LANES = 16 / sizeof(T), PASS = THREADS / 8, A = BM * TILE_ROW, B = BN * TILE_ROW;
    static_assert(BM % PASS == 0 || PASS % BM == 0, "the threads share the rows evenly");
    static_assert(PASS % 8 == 0 && PANEL % BN == 0, "places are the same in every pass; a tile's channels lie in one panel");

    DYNAMIC_SHARED(u8, left);  // [chunks] of the rows of x, then the groups' sums
    const Steps steps(taps, C, K, LANES);
    u8* const right = left + max(steps.chunks * A, (ONCE_GROUPS - 1) * BM * BN * 4);  // [chunks] of the weights
    float4* const sums = reinterpret_cast<float4*>(left);
    float* const scale = reinterpret_cast<float*>(right + steps.chunks * B);
    float* const bias = scale + BN;
    int* const places = reinterpret_cast<int*>(bias + BN);  // [BM]
    int* const inside = places + BM;                        // [BM]
    int* const sources = inside + BM;                       // [taps][BM]
    __shared__ u64 full;                                    // the weights are there

    const SiteTable<BM> table{rows, order, masks, valid, M, steps.taps};
    const int k0 = static_cast<int>(blockIdx.y) * BN, unit = threadIdx.x % 8, row = threadIdx.x / 8 % BM;
    const int group = threadIdx.x / GROUP;
    // Where BM rows are fewer than a pass, threads take turns in chunks.
    constexpr int TURNS = PASS > BM ? PASS / BM : 1;
    const int turn = threadIdx.x / 8 / BM;
    if (threadIdx.x == 0) {
        barrier_init(&full, 1);
        barrier_init_fence();
    }
    bool first = true;
    for (i64 p0 = static_cast<i64>(blockIdx.x) * BM; p0 < M; p0 += static_cast<i64>(gridDim.x) * BM) {
        for (int i = threadIdx.x; i < steps.taps * BM; i += THREADS) {
            const i64 m = p0 + i % BM;
            copy_async_4(sources + i, rows + static_cast<i64>(i / BM) * M + (m < M ? m : M - 1), true);
        }
        copy_async_commit();
        table.find_places(p0, M, places, inside, threadIdx.x, THREADS);
        if (first) {
            dependent_wait();  // for the packed weights
            const u8* const tables = loaded_later(packed);
            if (threadIdx.x == 0) {
                barrier_expect(&full, steps.chunks * B);
                const u8* from = steps.weights(tables) + static_cast<i64>(k0 / PANEL) * steps.chunks * PANEL_CHUNK + k0 % PANEL * TILE_ROW;
                for (int i = 0; i < steps.chunks; ++i, from += PANEL_CHUNK) bulk_copy(right + i * B, from, B, &full);
            }
            for (int i = threadIdx.x; i < 2 * BN; i += THREADS) scale[i] = steps.table(tables, i / BN, k0 + i % BN);
        }
        copy_async_wait<0>();
        __syncthreads();

        int number = turn * 4 + unit / 2;  // of this thread's step of a chunk
        for (int i = turn; i < steps.chunks; i += TURNS, number += 4 * TURNS) {
            const int tap = static_cast<int>(static_cast<u32>(number) / static_cast<u32>(steps.per_tap));
            const int c = ((number - tap * steps.per_tap) * 2 + unit % 2) * LANES;
#pragma unroll
            for (int m = row; m < BM; m += PASS)
                copy_row<true, true>(left + i * A + swizzled(m, unit), x, tap < steps.taps ? sources[tap * BM + m] : -1, N, c, C);
        }
        copy_async_commit();
        const Result<T, SiteRows> result{residual, y, scale, bias, {places, inside}, k0, static_cast<int>(K)};
        if (residual) result.template prefetch<BM, BN>(threadIdx.x, THREADS);
        copy_async_wait<0>();
        if constexpr (ROUND)  // what this thread has copied
            for (int i = turn; i < steps.chunks; i += TURNS)
                for (int m = row; m < BM; m += PASS) round_four(left + i * A + swizzled(m, unit));
        if (first) barrier_wait(&full, 0);
        first = false;
        __syncthreads();

        float acc[MT][NT][4];
        clear(acc);
#pragma unroll 2
        for (int i = group; i < steps.chunks; i += ONCE_GROUPS) Product::multiply(acc, left + i * A, right + i * B);
        __syncthreads();
        if (group > 0) {
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int n = 0; n < NT; ++n)
                    sums[((group - 1) * MT * NT + m * NT + n) * GROUP + threadIdx.x % GROUP] =
                        make_float4(acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]);
        }
        __syncthreads();
        if (group == 0) {
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int g = 0; g < ONCE_GROUPS - 1; ++g) {
                        const float4 its = sums[(g * MT * NT + m * NT + n) * GROUP + threadIdx.x];
                        const float four[4] = {its.x, its.y, its.z, its.w};
#pragma unroll
                        for (int e = 0; e < 4; ++e) acc[m][n][e] = __fadd_rn(acc[m][n][e], four[e]);
                    }
            result.template store<ACTIVATION, true, true, Product>(acc);
        }
        __syncthreads();
    }
}
