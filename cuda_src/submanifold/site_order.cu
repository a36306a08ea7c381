// site_order.cu: an order of the rows of a kernel map in which rows with the same taps are neighbours.
//   order[place] = row, sorted[t, place] = rows[t, order[place]], masks[g] = taps that any of places 32 g to 32 g + 31 has
// Source: implicit products over rows sorted by their masks, as in TorchSparse++ (Tang et al. 2023, MICRO); a stable
// counting sort.  Python: sbnet_cupy/submanifold/site_order.py
// and turns[round, block] = the tile that a thread block of a convolution computes then, which deal_tiles finds.
// Launches: bin_rows, scan_bins, order_rows, sort_tiles and, where there are many rows, deal_tiles. sort_rows in place of sort_tiles
// for more than 64 taps, and alone for masks of rows as they are. Sorted twice: bin_rows, scan_bins, order_rows, bin_digits,
// scan_bins, order_rows, sort_tiles.
//   bin_rows, bin_digits     a thread block has PART rows; scan_bins: 32 bins; sort_tiles: TILE rows;
//                            sort_rows: 128 rows and 32 taps; deal_tiles: all
// Why: a tile of a convolution leaves out the taps that none of its rows has. A bin is a number of BITS bits: a bit for each
// column of taps, and one for each end of the columns; bins are in the order of the Gray code, so that neighbours differ
// in a bit. One pass comes close to sorting by all taps. Where many rows share a bin, they are sorted by BITS of their taps before.
// The rows of a tile are sorted again by its rare taps: groups of 64 rows, which are multiplied together, then lack more taps.
// Tiles of sorted rows have from a few taps to all: dealt out by their numbers of taps, each thread block has about as much to do.
#include "submanifold/counting_sort.cuh"
#include "submanifold/site_turns.cuh"
#include "submanifold/tap_ranks.cuh"

// The bin of taps that are there.
struct Bins {
    int taps, columns, side;  // columns of taps; taps in a side, the first or the last of all columns
    // What tap number `tap` adds to a row's bin.
    DEVICE u32 bits(int tap, int column) const {
        return 1u << column | (tap < side ? 1u << (BITS - 2) : 0) | (tap >= taps - side ? 1u << (BITS - 1) : 0);
    }
    // The bit that stands for a tap among the last BITS; 0 for those before.
    DEVICE u32 bit_of_last(int tap) const { return tap >= taps - BITS ? 1u << (tap - max(taps - BITS, 0)) : 0; }
    // The place of a code in Gray order.
    static DEVICE u32 place(u32 code) {
#pragma unroll
        for (int shift = 1; shift < BITS; shift *= 2) code ^= code >> shift;
        return code;
    }
};

template <typename I>
__global__ void __launch_bounds__(THREADS)
    bin_rows(const I* __restrict__ rows,  // [taps, M]
             I* __restrict__ bins,        // [M]: of each row; or null: the only digit
             u32* __restrict__ places,    // [M]: digit << 16 | place among the rows of the block
             u16* __restrict__ counts,    // [parts, BINS]
             i64 M, i64 N, i64 taps, i64 columns, i64 side) {
    __shared__ DigitRanks ranks;
    overlap_launches(rows);
    const Bins its{static_cast<int>(taps), static_cast<int>(columns), static_cast<int>(side)};
    ranks.clear();
    const i64 first = DigitRanks::first_row();
    u32 code[ROUNDS] = {}, last[ROUNDS] = {};  // by columns; the last BITS taps themselves
    int column = 0;
#pragma unroll 4
    for (int tap = 0; tap < its.taps; ++tap) {
        const u32 bits = its.bits(tap, column), bit = its.bit_of_last(tap);
        if (++column == its.columns) column = 0;
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const i64 m = first + r * 32;
            const int row = m < M ? rows[tap * M + m] : -1;
            if (row >= 0 && row < N) code[r] |= bits, last[r] |= bit;
        }
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        code[r] = Bins::place(code[r]);
        if (!bins) continue;
        if (first + r * 32 < M) bins[first + r * 32] = static_cast<I>(code[r]);
        code[r] = Bins::place(last[r]);
    }
    ranks.write(code, places, counts, M);
}

// By a digit, from bit `shift` on, of the number of each row (number_of).
template <typename I>
__global__ void __launch_bounds__(THREADS)
    bin_digits(const I* __restrict__ numbers,  // [M], -1 for none
               const I* __restrict__ order,    // [M]: the rows as sorted by lower digits, or null
               u32* __restrict__ places, u16* __restrict__ counts, i64 M, i64 largest, i64 shift) {
    __shared__ DigitRanks ranks;
    overlap_launches(numbers, order);
    ranks.clear();
    const i64 first = DigitRanks::first_row();
    u32 digit[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const i64 m = first + r * 32;
        digit[r] = 0;
        if (m < M) digit[r] = static_cast<u32>(number_of(numbers, order ? order[m] : m, largest) >> shift) & (BINS - 1);
    }
    ranks.write(digit, places, counts, M);
}

// before[part, bin] = rows of the bin in the parts before; totals[bin] = in all. Lanes have bins, warps shares of the parts.
template <typename I>
__global__ void __launch_bounds__(1024)
    scan_bins(const u16* __restrict__ counts, I* __restrict__ before, I* __restrict__ totals, i64 parts) {
    __shared__ int sums[32][32];
    overlap_launches(counts);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 bin = static_cast<i64>(blockIdx.x) * 32 + lane, share = ceil_div<i64>(parts, 32);
    const i64 first = warp * share, last = first + share < parts ? first + share : parts;
    int sum = 0;
#pragma unroll 8
    for (i64 part = first; part < last; ++part) sum += counts[part * BINS + bin];
    sums[warp][lane] = sum;
    __syncthreads();
    int up_to = 0;
    for (int w = 0; w < warp; ++w) up_to += sums[w][lane];
#pragma unroll 8
    for (i64 part = first; part < last; ++part) {
        before[part * BINS + bin] = up_to;
        up_to += counts[part * BINS + bin];
    }
    if (warp == 31) totals[bin] = up_to;
}

template <typename I>
__global__ void __launch_bounds__(THREADS)
    order_rows(const u32* __restrict__ places, const I* __restrict__ before, const I* __restrict__ totals,
               const I* __restrict__ sorted,  // [M]: the rows as sorted by lower digits, or null
               I* __restrict__ order, i64 M) {
    constexpr int EACH = BINS / THREADS;
    __shared__ int starts[BINS], parts[WARPS];
    overlap_launches(places, before, totals, sorted);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int its[EACH], sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) sum += its[i] = totals[threadIdx.x * EACH + i];
    int up_to = sum;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, up_to, d);
        if (lane >= d) up_to += other;
    }
    if (lane == 31) parts[warp] = up_to;
    __syncthreads();
    int start = up_to - sum;
    for (int w = 0; w < warp; ++w) start += parts[w];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        starts[threadIdx.x * EACH + i] = start;
        start += its[i];
    }
    __syncthreads();
    const i64 first = static_cast<i64>(blockIdx.x) * PART;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const i64 m = first + r * THREADS + threadIdx.x;
        if (m >= M) break;
        const u32 bin = places[m] >> 16;
        const i64 place = starts[bin] + before[static_cast<i64>(blockIdx.x) * BINS + bin] + (places[m] & 0xffff);
        order[place] = sorted ? sorted[m] : static_cast<int>(m);
    }
}

template <typename I>
__global__ void __launch_bounds__(THREADS)
    sort_rows(const I* __restrict__ rows,     // [taps, M]
              const I* __restrict__ order,    // [M], or null: rows stay as they are
              I* __restrict__ sorted,         // [taps, M], or null
              u32* __restrict__ masks,        // [ceil(M / 32)][words]
              i64 M, i64 N, i64 taps, i64 words) {
    constexpr int GROUPS = 4, EACH = 32 / WARPS;  // groups of 32 rows; taps of a warp
    __shared__ u32 found[WARPS][GROUPS];
    overlap_launches(rows, order);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 first = static_cast<i64>(blockIdx.x) * (32 * GROUPS) + lane, tap0 = static_cast<i64>(blockIdx.y) * 32 + warp * EACH;
    i64 from[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        const i64 m = first + g * 32;
        from[g] = m < M ? order ? order[m] : m : -1;
    }
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        u32 bits = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const i64 tap = tap0 + i;
            int row = tap < taps && from[g] >= 0 ? rows[tap * M + from[g]] : -1;
            if (row >= N) row = -1;
            if (sorted && tap < taps && from[g] >= 0) sorted[tap * M + first + g * 32] = row;
            if (__ballot_sync(0xffffffffu, row >= 0)) bits |= 1u << (warp * EACH + i);
        }
        if (lane == 0) found[warp][g] = bits;
    }
    __syncthreads();
    if (threadIdx.x >= GROUPS) return;
    const i64 group = static_cast<i64>(blockIdx.x) * GROUPS + threadIdx.x;
    u32 mask = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) mask |= found[w][threadIdx.x];
    if (group * 32 < M) masks[group * words + blockIdx.y] = mask;
}

constexpr int TILE = 256, SLICES = 4;  // rows of the largest tile of a convolution; threads for each row, which share its taps

// The lane's key when those of the warp are sorted: bitonic.
DEVICE u32 sorted_in_warp(u32 key) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int run = 2; run <= 32; run *= 2)
#pragma unroll
        for (int apart = run / 2; apart > 0; apart /= 2) {
            const u32 other = __shfl_xor_sync(0xffffffffu, key, apart);
            key = !(lane & apart) == !(lane & run) ? min(key, other) : max(key, other);
        }
    return key;
}

// How many of 32 sorted keys are smaller.
DEVICE int smaller(const u32* keys, u32 key) {
    int count = 0;
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        if (keys[count + step - 1] < key) count += step;
    return count + (keys[count] < key);
}

// Sort each TILE rows of the order again, by their taps: those that the fewest of these rows have first, in Gray order.
//   WORDS   1 for up to 32 taps, with two thread blocks where a multiprocessor has room for 2048 threads; 2 for up to 64
template <typename I, int WORDS>
__global__ void __launch_bounds__(TILE * SLICES, 3 - WORDS)
    sort_tiles(const I* __restrict__ rows,  // [taps, M]
               I* order,                    // [M]: a thread block reads its rows before it writes them
               I* __restrict__ sorted,      // [taps, M]
               u32* __restrict__ masks,     // [ceil(M / 32)][WORDS]
               i64 M, i64 N, i64 taps_) {
    constexpr int GROUPS = TILE / 32, EACH = 32 * WORDS / SLICES;  // groups of 32 rows; taps of a thread: every SLICES-th
    constexpr u32 EVERY = 0xffffffffu;
    static_assert(TILE <= 256 && GROUPS % SLICES == 0, "a place takes 8 bits; slices share the groups");
    __shared__ u32 keys[TILE], sorted_keys[TILE];
    __shared__ __align__(8) int counts[SLICES * EACH * GROUPS];  // [taps][GROUPS]: rows that have a tap
    __shared__ int places[TILE], moved[32][TILE];                // where a row goes; the sorted table, one word's taps at a time
    __shared__ u32 tap_bits[32 * WORDS], found[SLICES][GROUPS];
    const int t = threadIdx.x % TILE, slice = threadIdx.x / TILE, lane = t % 32, group = t / 32, taps = static_cast<int>(taps_);
    const i64 p0 = static_cast<i64>(blockIdx.x) * TILE, step = SLICES * M;
    const bool there = p0 + t < M;
    if (slice == 0) keys[t] = 0, places[t] = 0;
    overlap_launches(rows);
    const int from = there ? order[p0 + t] : 0;
    const u32 sources = static_cast<u32>(N);
    int its[EACH];
    const I* next = rows + slice * M + from;
#pragma unroll
    for (int i = 0; i < EACH; ++i, next += step) its[i] = there && slice + i * SLICES < taps ? *next : -1;
    u32 having = 0;  // of the tap whose number is the lane's: rows of the warp
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (static_cast<u32>(its[i]) >= sources) its[i] = -1;
        const u32 all = __ballot_sync(EVERY, its[i] >= 0);
        if (lane == i) having = all;
    }
    if (lane < EACH) counts[(slice + lane * SLICES) * GROUPS + group] = __popc(having);
    __syncthreads();
    if (threadIdx.x < 32) rank_taps<WORDS, GROUPS>(counts, tap_bits, taps);
    __syncthreads();
    add_taps<SLICES>(keys + t, its, tap_bits, slice);
    __syncthreads();

    // A row's place is the number of smaller keys in all groups of 32 rows, each of them sorted; slices share the groups. No two
    // keys are the same: rows with the same taps stay in their order. Those past M come last.
    u32 key;
    if (slice == 0) {
        keys[t] = key = (there ? gray_place(keys[t]) << 8 : ~0u << 8) | static_cast<u32>(t);
        sorted_keys[t] = sorted_in_warp(key);
    }
    __syncthreads();
    key = keys[t];
    int before = 0;
#pragma unroll
    for (int g = 0; g < GROUPS / SLICES; ++g) before += smaller(sorted_keys + (slice * (GROUPS / SLICES) + g) * 32, key);
    atomicAdd(places + t, before);
    __syncthreads();
    const int place = places[t];
    if (slice == 0 && there) order[p0 + place] = from;
    I* to = sorted + slice * M + p0 + t;
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
        if (w) __syncthreads();
#pragma unroll
        for (int i = 0; i < 32 / SLICES; ++i) moved[slice + i * SLICES][place] = its[w * (32 / SLICES) + i];
        __syncthreads();
        u32 bits = 0;
#pragma unroll
        for (int i = 0; i < 32 / SLICES; ++i, to += step) {
            const int bit = slice + i * SLICES;
            if (32 * w + bit >= taps) break;
            const int row = moved[bit][t];
            if (there) *to = row;
            if (__any_sync(EVERY, row >= 0)) bits |= 1u << i * SLICES;
        }
        if (lane == 0) found[slice][group] = bits << slice;
        __syncthreads();
        const i64 own_group = p0 / 32 + threadIdx.x;
        if (threadIdx.x < GROUPS && own_group * 32 < M) {
            u32 mask = 0;
#pragma unroll
            for (int s = 0; s < SLICES; ++s) mask |= found[s][threadIdx.x];
            masks[own_group * WORDS + w] = mask;
        }
    }
}

// Deal tiles out in rounds, those with the most taps first: in each round who has least to do so far gets the longest tile.
// Thread block 0 deals tiles of 128 rows, 1 tiles of 256, whose rounds follow. Of the latter, the longest are cut in halves, as
// many as rounds have room for, where that makes the most that a thread block has to do a quarter less, as far as it is known:
// no less than a tile, and than the average. If none is cut, and at most half of the thread blocks would get a tile in the
// last round, they get halves of one.
constexpr int MOST_TILES = 8192, MOST_SHARES = 512, COSTS = 32;  // of site_order.py; how many costs are told apart
constexpr int RESULT = 2;  // taps that take as long as to store a tile's result
constexpr int CUT = 128;   // flag of a cost: that of half a tile
DEVICE int cost_of_half(int cost) { return ceil_div(cost * 5, 8); }  // both need the weights

template <typename I>
__global__ void __launch_bounds__(1024, 1)
    deal_tiles(const u32* __restrict__ masks,  // [ceil(M / 32)][words]
               u16* __restrict__ turns,        // [rounds, shares] twice: site_turns.cuh
               i64 M, i64 taps, i64 words, i64 shares) {
    __shared__ u16 sorted[MOST_TILES + MOST_SHARES];  // tiles, those that take longest first
    __shared__ u8 costs[MOST_TILES + MOST_SHARES];    // of each tile, and of the second halves of those that are cut
    __shared__ u16 longest[MOST_SHARES];              // tiles that are cut
    __shared__ int counts[COSTS];                     // of tiles that cost as much
    __shared__ uint4 loads[2][MOST_SHARES / 4];  // of each thread block: cost << 16 | its number
    overlap_launches(masks);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, threads = static_cast<int>(blockDim.x);
    const int groups = 4 << blockIdx.x, blocks = static_cast<int>(shares);
    const i64 all = ceil_div<i64>(M, 32);
    const int tiles = static_cast<int>(ceil_div<i64>(all, groups)), rounds = ceil_div(tiles, blocks);
    turns += first_turn(groups * 32, M, shares);
    for (int tile = threadIdx.x; tile < tiles; tile += threads) {
        int count = RESULT;
        for (i64 word = 0; word < words; ++word) {
            u32 any = 0;
            for (int g = 0; g < groups; ++g) {
                const i64 group = static_cast<i64>(tile) * groups + g;
                any |= group < all ? masks[group * words + word] : 0;
            }
            count += __popc(any);
        }
        costs[tile] = static_cast<u8>(count * (COSTS - 1) / (static_cast<int>(taps) + RESULT));
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
    if (blockIdx.x == 1) {
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
        const int left = tiles + cut - round * blocks, halves = blockIdx.x == 1 && !cut && 2 * left <= blocks;
        for (int block = threadIdx.x; block < MOST_SHARES; block += threads) {
            const u32 load = reinterpret_cast<const u32*>(before)[block];
            int less = 0;  // thread blocks that have less to do
            for (int i = 0; i < ceil_div(blocks, 4); ++i) {
                const uint4 four = before[i];
                less += (four.x < load) + (four.y < load) + (four.z < load) + (four.w < load);
            }
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
