// deal_tiles.cuh: which thread block of a convolution computes which tiles of sorted rows, and when.
// Such tiles have from one tap to all. They are dealt out by their numbers of taps, or cut, so that each thread block has about as
// much to do.
#pragma once

#include "core/warp_sum.cuh"
#include "submanifold/site_turns.cuh"

constexpr int STORED = 2;  // taps that take as long as to store a tile's result

// The taps that any row of a tile of so many groups of 32 rows has.
DEVICE int taps_of_tile(const u32* __restrict__ masks, i64 tile, int groups, i64 all, i64 words) {
    int count = 0;
    for (i64 word = 0; word < words; ++word) {
        u32 any = 0;
#pragma unroll (DEVICE_ARCHITECTURE >= 1000 ? 1 : 4)  // where it is not launched, NVRTC 13.5 spills registers otherwise
        for (int g = 0; g < groups; ++g) {
            const i64 group = tile * groups + g;
            any |= group < all ? masks[group * words + word] : 0;
        }
        count += __popc(any);
    }
    return count;
}

// Cut the taps of all tiles of SHARED_ROWS, one tile after the other, into shares of the same length.
DEVICE void cut_tiles(const u32* __restrict__ masks, int2* __restrict__ cuts, i64 M, i64 words, i64 shares, int (&sums)[32]) {
    const i64 all = ceil_div<i64>(M, 32), tiles = ceil_div<i64>(M, SHARED_ROWS);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, threads = static_cast<int>(blockDim.x);
    // The cost of this thread's tile, `first` + threadIdx.x; of the tiles of the threads before it; and of those of all threads.
    int its, before, together;
    const auto next = [&](i64 first) {
        const i64 tile = first + threadIdx.x;
        its = tile < tiles ? max(taps_of_tile(masks, tile, SHARED_ROWS / 32, all, words), 1) + STORED : 0;
        const int up_to = sum_up_to_lane(its, lane);
        __syncthreads();
        if (lane == 31) sums[warp] = up_to;
        __syncthreads();
        before = up_to - its, together = 0;
        for (int w = 0; w < threads / 32; ++w) {
            if (w < warp) before += sums[w];
            together += sums[w];
        }
    };
    // First the cost of all tiles, then where multiples of the length of a share fall. A cut in what a tile takes beside its taps
    // is moved to its first tap.
    i64 total = 0;
    for (i64 first = 0; first < tiles; first += threads) {
        next(first);
        total += together;
    }
    const i64 each = max(ceil_div<i64>(total, shares), static_cast<i64>(1));
    i64 start = 0;
    for (i64 first = 0; first < tiles; first += threads) {
        next(first);
        const i64 begin = start + before;
        for (i64 share = ceil_div<i64>(begin, each); share * each < begin + its; ++share)
            cuts[share] = make_int2(static_cast<int>(first + threadIdx.x),
                                    static_cast<int>(max(share * each - begin - STORED, static_cast<i64>(0))));
        start += together;
    }
    for (i64 share = ceil_div<i64>(total, each) + threadIdx.x; share <= shares; share += threads)
        cuts[share] = make_int2(static_cast<int>(tiles), 0);
}

// Thread block 0 cuts tiles into shares. The others, if there are any, deal tiles out in rounds, those with the most taps first: in
// each round who has least to do so far gets the longest tile. 1 deals tiles of 128 rows, 2 tiles of 256, whose rounds follow. Of
// the latter, the longest are cut in halves, as many as rounds have room for, where that makes the most that a thread block has to
// do a quarter less, as far as it is known: no less than a tile, and than the average. If none is cut, and at most half of the
// thread blocks would get a tile in the last round, they get halves of one.
constexpr int MOST_TILES = 8192, MOST_SHARES = 512, COSTS = 32;  // of site_order.py; how many costs are told apart
constexpr int CUT = 128;   // flag of a cost: that of half a tile
DEVICE int cost_of_half(int cost) { return ceil_div(cost * 5, 8); }  // both need the weights

template <typename I>
__global__ void __launch_bounds__(1024, 1)
    deal_tiles(const u32* __restrict__ masks,  // [ceil(M / 32)][words]
               u16* __restrict__ turns,        // [rounds, shares] twice: site_turns.cuh
               int2* __restrict__ cuts,        // [shares + 1]
               i64 M, i64 taps, i64 words, i64 shares) {
    __shared__ u16 sorted[MOST_TILES + MOST_SHARES];  // tiles, those that take longest first
    __shared__ u8 costs[MOST_TILES + MOST_SHARES];    // of each tile, and of the second halves of those that are cut
    __shared__ u16 longest[MOST_SHARES];              // tiles that are cut
    __shared__ int counts[COSTS];                     // of tiles that cost as much
    __shared__ uint4 loads[2][MOST_SHARES / 4];  // of each thread block: cost << 16 | its number
    overlap_launches(masks);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, threads = static_cast<int>(blockDim.x);
    if (blockIdx.x == 0) return cut_tiles(masks, cuts, M, words, shares, counts);
    const int groups = 2 << blockIdx.x, blocks = static_cast<int>(shares);
    const i64 all = ceil_div<i64>(M, 32);
    const int tiles = static_cast<int>(ceil_div<i64>(all, groups)), rounds = ceil_div(tiles, blocks);
    constexpr int EACH = 4;  // threads that compare the load of a thread block with the others
    const int padded = ceil_div(blocks, 32) * 32;  // whole warps
    turns += first_turn(groups * 32, M, shares);
    for (int tile = threadIdx.x; tile < tiles; tile += threads) {
        const int count = STORED + taps_of_tile(masks, tile, groups, all, words);
        costs[tile] = static_cast<u8>(count * (COSTS - 1) / (static_cast<int>(taps) + STORED));
    }
    for (int block = threadIdx.x; block < MOST_SHARES; block += threads)
        reinterpret_cast<u32*>(loads[0])[block] = block < blocks ? static_cast<u32>(block) : ~0u;
    __syncthreads();
    const auto sort = [&](int entries) {
        const auto have = [&](int from, int cost) {  // which of 32 have that cost
            return __ballot_sync(0xffffffffu, from + lane < entries && costs[from + lane] % CUT == cost);
        };
        for (int cost = warp; cost < COSTS; cost += threads / 32) {
            int count = 0;
#pragma unroll 4
            for (int from = 0; from < entries; from += 32) count += __popc(have(from, cost));
            if (lane == 0) counts[cost] = count;
        }
        __syncthreads();
        for (int cost = warp; cost < COSTS; cost += threads / 32) {
            int place = 0;
            for (int more = cost + 1; more < COSTS; ++more) place += counts[more];
#pragma unroll 4
            for (int from = 0; from < entries; from += 32) {
                const u32 same = have(from, cost);
                if (same >> lane & 1) sorted[place + __popc(same & ((1u << lane) - 1))] = static_cast<u16>(from + lane);
                place += __popc(same);
            }
        }
        __syncthreads();
    };
    sort(tiles);
    int cut = 0;
    if (blockIdx.x == 2) {
        int longest_cost = COSTS - 1, sum = 0, more = 0, halves = 0;
        for (int cost = 0; cost < COSTS; ++cost) sum += cost * counts[cost];
        while (!counts[longest_cost]) --longest_cost;
        int least = max(longest_cost, ceil_div(sum, blocks)) * 3 / 4 + 1;
        for (int cost = longest_cost; cost >= 0; --cost) {
            if (cost > 0 && !counts[cost]) continue;
            const int most = max(max(cost, cost_of_half(longest_cost)), ceil_div(sum + more, blocks));  // if those that cost more are cut
            if (halves && most < least) least = most, cut = halves;
            halves += counts[cost], more += counts[cost] * (2 * cost_of_half(cost) - cost);
            if (halves > rounds * blocks - tiles) break;
        }
    }
    if (cut) {
        for (int i = threadIdx.x; i < cut; i += threads) {
            const int tile = longest[i] = sorted[i];
            costs[tile] = costs[tiles + i] = static_cast<u8>(CUT + cost_of_half(costs[tile]));
        }
        __syncthreads();
        sort(tiles + cut);
    }
    for (int round = 0; round < rounds; ++round) {
        const uint4* const before = loads[round % 2];
        const int left = tiles + cut - round * blocks, halves = blockIdx.x == 2 && !cut && 2 * left <= blocks;
        for (int block = threadIdx.x / EACH; block < padded; block += threads / EACH) {
            const u32 load = reinterpret_cast<const u32*>(before)[block];
            int less = 0;  // thread blocks that have less to do
#pragma unroll 4
            for (int i = threadIdx.x % EACH; i < padded / 4; i += EACH) {
                const uint4 four = before[i];
                less += (four.x < load) + (four.y < load) + (four.z < load) + (four.w < load);
            }
#pragma unroll
            for (int apart = EACH / 2; apart > 0; apart /= 2) less += __shfl_xor_sync(0xffffffffu, less, apart);
            if (threadIdx.x % EACH) continue;
            u32 more = 0;
            int its = NO_TILE;
            if (block < blocks && less < left << halves) {
                const int tile = sorted[round * blocks + (less >> halves)];
                more = static_cast<u32>(costs[tile] % CUT) << 16;
                its = halves                ? HALF_TILE | (2 * tile + less % 2)
                      : tile >= tiles       ? HALF_TILE | (2 * longest[tile - tiles] + 1)
                      : costs[tile] / CUT   ? HALF_TILE | 2 * tile
                                            : tile;
            }
            reinterpret_cast<u32*>(loads[(round + 1) % 2])[block] = load + more;
            if (block < blocks) turns[round * blocks + block] = static_cast<u16>(its);
        }
        __syncthreads();
    }
}
