// site_order.cu: an order of the rows of a kernel map in which rows with the same taps are neighbours.
//   order[place] = row, sorted[t, place] = rows[t, order[place]], masks[g] = taps that any of places 32 g to 32 g + 31 has
// Source: implicit products over rows sorted by their masks, as in TorchSparse++ (Tang et al. 2023, MICRO); a stable
// counting sort.  Python: sbnet_cupy/submanifold/site_order.py
// and turns[round, block] = the tile that a thread block of a convolution computes then, which deal_tiles finds (deal_tiles.cuh).
// Launches: bin_rows, scan_bins, order_rows, sort_tiles and, where there are many rows, deal_tiles. sort_rows in place of sort_tiles
// for more than 64 taps, and alone for masks of rows as they are. Sorted twice: bin_rows, scan_bins, order_rows, bin_digits,
// scan_bins, order_rows, sort_tiles.
//   bin_rows, bin_digits     a thread block has PART rows; scan_bins: 32 bins; sort_tiles: TILE rows;
//                            sort_rows: 128 rows and 32 taps; deal_tiles: all
// Why: a tile of a convolution leaves out the taps that none of its rows has. A bin is a number of BITS bits: a bit for each
// column of taps, and one for each end of the columns; bins are in the order of the Gray code, so that neighbours differ
// in a bit. One pass comes close to sorting by all taps. Where many rows share a bin, they are sorted by BITS of their taps before.
// The rows of a tile are sorted again by its rare taps: groups of 64 rows, which are multiplied together, then lack more taps.
#include "submanifold/counting_sort.cuh"
#include "submanifold/deal_tiles.cuh"
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
__global__ void __launch_bounds__(THREADS, 4)
    bin_rows(const I* __restrict__ rows,  // [taps, M]
             I* __restrict__ bins,        // [M]: of each row; or null: the only digit
             u32* __restrict__ places,    // [M]: digit << 16 | place among the rows of the block
             u16* __restrict__ counts,    // [parts, BINS]
             i64 M, i64 N, i64 taps, i64 columns, i64 side) {
    DYNAMIC_SHARED(DigitRanks, ranks);
    overlap_launches(rows);
    const Bins its{static_cast<int>(taps), static_cast<int>(columns), static_cast<int>(side)};
    ranks->clear();
    const i64 first = DigitRanks::first_row();
    u32 code[ROUNDS] = {}, last[ROUNDS] = {};  // by columns; the last BITS taps themselves
    int column = 0;
#pragma unroll 9
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
    ranks->write(code, places, counts, M);
}

// By another digit: the bin of each row.
template <typename I>
__global__ void __launch_bounds__(THREADS)
    bin_digits(const I* __restrict__ bins,   // [M]: of each row
               const I* __restrict__ order,  // [M]: the rows as sorted by the lower digit
               u32* __restrict__ places, u16* __restrict__ counts, i64 M) {
    DYNAMIC_SHARED(DigitRanks, ranks);
    overlap_launches(bins, order);
    ranks->clear();
    const i64 first = DigitRanks::first_row();
    u32 digit[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const i64 m = first + r * 32;
        digit[r] = m < M ? static_cast<u32>(bins[order[m]]) : 0;
    }
    ranks->write(digit, places, counts, M);
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
    const int up_to = sum_up_to_lane(sum, lane);
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
