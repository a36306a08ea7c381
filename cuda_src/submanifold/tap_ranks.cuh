// tap_ranks.cuh: the keys by which the rows of a tile of a kernel map are sorted: in which order the taps that they have count.
// Rows that are multiplied together shall lack most of the same taps. A tap that few of the rows have comes first: it makes its
// few rows neighbours, so that other rows need not be multiplied with it.
#pragma once

#include "core/common.cuh"

constexpr int KEY_BITS = 24;  // of a key; of more taps the most frequent ones do not count

// How many lanes have a smaller number, of lanes of two halves of the taps; or a number as large before.
//   HALVES   1: only the first 32 taps, 2: 64
template <int HALVES, int BITS>
DEVICE void ranks_of(const u32 (&numbers)[HALVES], int (&ranks)[HALVES]) {
    constexpr u32 EVERY = 0xffffffffu;
    const u32 before = (1u << threadIdx.x % 32) - 1;
    u32 same[HALVES][HALVES];  // [own half][other half]: lanes whose number begins as the own one does
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
        ranks[h] = 0;
#pragma unroll
        for (int other = 0; other < HALVES; ++other) same[h][other] = EVERY;
    }
#pragma unroll
    for (int bit = BITS - 1; bit >= 0; --bit) {
#pragma unroll
        for (int other = 0; other < HALVES; ++other) {
            const u32 set = __ballot_sync(EVERY, numbers[other] >> bit & 1);
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                u32& its = same[h][other];
                const bool own = numbers[h] >> bit & 1;
                ranks[h] += own ? __popc(its & ~set) : 0;
                its &= own ? set : ~set;
            }
        }
    }
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
#pragma unroll
        for (int other = 0; other < HALVES; ++other)
            ranks[h] += __popc(other < h ? same[h][other] : other == h ? same[h][other] & before : 0);
}

// What each tap adds to a key: the fewer rows have it, the higher a bit; nothing for taps that none has, and for those that are
// left when there are no more bits. The 32 threads of a warp call it.
//   HALVES   1 for up to 32 taps, 2 for up to 64;   WARPS   counts of a tap, of 32 rows each
template <int HALVES, int WARPS>
DEVICE void rank_taps(const int* counts,  // [taps][WARPS]: how many rows have a tap; aligned
                      u32* bits,          // [32 HALVES]
                      int taps) {
    static_assert(WARPS % 2 == 0 && WARPS <= 8, "counts are loaded by twos; up to 256 rows");
    const int lane = threadIdx.x % 32;
    u32 numbers[HALVES];
    int ranks[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
        const int tap = 32 * h + lane;
        u32 sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w += 2) {
            const int2 two = tap < taps ? *reinterpret_cast<const int2*>(counts + tap * WARPS + w) : int2{0, 0};
            sum += static_cast<u32>(two.x + two.y);
        }
        numbers[h] = (sum - 1) & 511;  // those that no row has come last
    }
    ranks_of<HALVES, 9>(numbers, ranks);
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
        bits[32 * h + lane] = numbers[h] < 256 && ranks[h] < KEY_BITS ? 1u << (KEY_BITS - 1 - ranks[h]) : 0;
}

// Add what a thread's taps, every SLICES-th from `slice` on, contribute to the key of its row: its[i] is below 0 for those that
// the row lacks.
template <int SLICES, int EACH>
DEVICE void add_taps(u32* key, const int (&its)[EACH], const u32* bits, int slice) {
    u32 sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (its[i] >= 0) sum |= bits[slice + i * SLICES];
    if (sum) atomicOr(key, sum);
}

// The place of a key in Gray order, in which neighbours differ in one tap.
DEVICE u32 gray_place(u32 key) {
#pragma unroll
    for (int shift = 1; shift < KEY_BITS; shift *= 2) key ^= key >> shift;
    return key;
}
