// site_pairs.cuh: what the kernels of site_conv_grad.cu share: the pairs of rows of a tap, and whose they are.
#pragma once

#include "core/async_copy.cuh"

// What lists pairs: all threads of the thread block.
struct WholeBlock {
    static DEVICE int thread() { return threadIdx.x; }
    DEVICE void sync() { __syncthreads(); }
};

// The pairs of rows of one tap, in the order of dy, as a ring in shared memory. COUNT threads call, which `Threads` numbers
// and synchronizes.
template <int COUNT, class Threads = WholeBlock>
struct Pairs {
    static constexpr int EACH = 4, WARPS = COUNT / 32, WINDOW = COUNT * EACH, SIZE = 2 * WINDOW;
    int *const source, *const target, *const counts;  // [SIZE], [SIZE], [WARPS]
    const int* const __restrict__ rows;
    const i64 N;
    const u32 end;
    u32 next;        // the first row that has not been looked at
    int listed = 0;  // pairs found so far
    int ahead[EACH];
    Threads all;

    DEVICE Pairs(int* shared, const int* rows, i64 N, i64 begin, i64 end, Threads all = Threads())
        : source(shared), target(shared + SIZE), counts(shared + 2 * SIZE), rows(rows), N(N), end(static_cast<u32>(end)),
          next(static_cast<u32>(begin)), all(all) {
        load();
    }
    // A warp looks at neighbouring rows, 32 at a time.
    DEVICE u32 row(int i) const { return next + (Threads::thread() / 32 * EACH + i) * 32 + threadIdx.x % 32; }
    DEVICE void load() {
#pragma unroll
        for (int i = 0; i < EACH; ++i) ahead[i] = row(i) < end ? rows[row(i)] : -1;
    }
    // List the next rows until there are `wanted` pairs or no rows are left. No more than WINDOW may be in use.
    DEVICE void list(int wanted) {
        while (listed < wanted && next < end) {
            u32 there[EACH];
            int count = 0;
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                there[i] = __ballot_sync(0xffffffffu, ahead[i] >= 0 && ahead[i] < N);
                count += __popc(there[i]);
            }
            const int warp = Threads::thread() / 32, lane = threadIdx.x % 32;
            if (lane == 0) counts[warp] = count;
            all.sync();
            int at = listed;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                if (w < warp) at += counts[w];
                listed += counts[w];
            }
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                if (there[i] >> lane & 1) {
                    const int place = (at + __popc(there[i] & ((1u << lane) - 1))) % SIZE;
                    source[place] = ahead[i];
                    target[place] = static_cast<int>(row(i));
                }
                at += __popc(there[i]);
            }
            next += WINDOW;
            load();
            all.sync();
        }
    }
    static constexpr int BYTES = (2 * SIZE + WARPS) * 4;
};

// What a thread block does: a tile of a tap, over the rows of a share. First come all shares of the tap in the middle, which
// often has the most rows, and so may have more shares; then the other taps, those of a share side by side, as they read the
// same rows.
struct Work {
    i64 tile, tap, begin, end;
    // Which of the matrices of partial sums; computed again where it is needed, at the end.
    static DEVICE i64 slice(i64 tiles) { return divide(blockIdx.x, tiles); }
    DEVICE Work(i64 tiles, i64 taps, i64 shares, i64 middle_shares, i64 M) {
        const i64 middle = divide(taps, 2), slice = Work::slice(tiles);
        tile = blockIdx.x - slice * tiles;
        i64 share = slice, all = middle_shares;
        tap = middle;
        if (slice >= middle_shares) {
            const i64 other = slice - middle_shares;
            share = divide(other, taps - 1), all = shares;
            tap = other - share * (taps - 1);
            if (tap >= middle) ++tap;
        }
        const i64 each = ceil_div<i64>(divide(M + all - 1, all), 32) * 32;
        begin = share * each;
        end = begin + each < M ? begin + each : M;
    }
};

// Write the sums of a warp, as mma.sync and wgmma leave them, to a matrix [C][K]: STEP rows between groups of 16.
template <int STEP, int MT, int NT>
DEVICE void store_sums(const float (&acc)[MT][NT][4], float* __restrict__ to, int c0, int k0, int C, int K) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int c = c0 + m * STEP + half * 8 + lane / 4;
            if (c >= C) continue;
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const int k = k0 + n * 8 + lane % 4 * 2;
                float* const at = to + static_cast<i64>(c) * K + k;
                const float first = acc[m][n][2 * half], second = acc[m][n][2 * half + 1];
                if (K % 2 == 0) {
                    if (k < K) *reinterpret_cast<float2*>(at) = make_float2(first, second);
                } else {
                    if (k < K) at[0] = first;
                    if (k + 1 < K) at[1] = second;
                }
            }
        }
}
