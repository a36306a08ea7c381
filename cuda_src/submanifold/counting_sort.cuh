// counting_sort.cuh: a stable counting sort of rows by a number of BITS bits; its first step, the rows of a thread block.
//   DigitRanks   in shared memory: each row's place among the rows of the block with the same digit
#pragma once

#include "core/async_copy.cuh"
#include "core/warp_sum.cuh"

constexpr int BITS = 11, BINS = 1 << BITS, PART = 1024, THREADS = 256, WARPS = THREADS / 32, ROUNDS = PART / THREADS;

struct DigitRanks {
    u16 own[WARPS][BINS];  // rows of each digit, of each warp

    DEVICE void clear() {
        for (int i = threadIdx.x; i < WARPS * BINS; i += THREADS) own[i / BINS][i % BINS] = 0;
    }
    // The first of a thread's rows, which are 32 apart.
    static DEVICE i64 first_row() {
        return static_cast<i64>(blockIdx.x) * PART + threadIdx.x / 32 * (PART / WARPS) + threadIdx.x % 32;
    }
    // After clear(), of the digits of a thread's rows: places[row] = digit << 16 | place, counts[block, digit] = rows.
    DEVICE void write(const u32 (&digit)[ROUNDS], u32* __restrict__ places, u16* __restrict__ counts, i64 n) {
        constexpr u32 EVERY = 0xffffffffu;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const i64 first = first_row();
        __syncthreads();
        int place[ROUNDS];
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            u32 same = __ballot_sync(EVERY, first + r * 32 < n);  // lanes with the same digit
#pragma unroll
            for (int bit = 0; bit < BITS; ++bit) {
                const u32 set = __ballot_sync(EVERY, digit[r] >> bit & 1);
                same &= digit[r] >> bit & 1 ? set : ~set;
            }
            u16& count = own[warp][digit[r]];
            place[r] = count + __popc(same & ((1u << lane) - 1));
            __syncwarp();
            if (same >> lane == 1) count = static_cast<u16>(place[r] + 1);  // the last of them
            __syncwarp();
        }
        __syncthreads();
        for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
            int before = 0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const int its = own[w][bin];
                own[w][bin] = static_cast<u16>(before);
                before += its;
            }
            counts[static_cast<i64>(blockIdx.x) * BINS + bin] = static_cast<u16>(before);
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
            if (first + r * 32 < n) places[first + r * 32] = digit[r] << 16 | static_cast<u32>(own[warp][digit[r]] + place[r]);
    }
};
