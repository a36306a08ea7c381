// site_tiles.cu: tiles of the rows of a kernel map, each with the distinct rows that it reads.
//   x[sources[tile][l - 1]] is what row order[tile][r] of y reads at the tap at which l = locals[tile][its number][r]; 0 for none;
//   in a round after the first l counts from where the round's sources begin
// Source: the rule book of Graham et al. 2018 (arXiv:1711.10275), tile by tile; a hash table with linear probing.
// Python: sbnet_cupy/submanifold/site_tiles.py
// Launch: a thread block of BM threads for each tile; at most MOST_TAPS taps.
// A tile that reads more than `most` rows is read in rounds: a round is a run of its taps that read no more. Rows are
// numbered in the order in which the taps read them, so that a tile is a function of the map alone.
#include "submanifold/tile_head.cuh"

constexpr int SLOTS = 2048, MOST_TAPS = 64, KEY_BITS = 48, MOST_PROBES = 64;
constexpr u32 READER = 1u << 16, NOBODY = 0xffffffffu;

// On how many axes a tap is off the centre.
DEVICE int axes_off(int tap, const int (&kernel)[4]) {
    int off = 0;
#pragma unroll
    for (int axis = 3; axis >= 0; --axis) {
        off += 2 * (tap % kernel[axis]) != kernel[axis] - 1;
        tap /= kernel[axis];
    }
    return off;
}

// The distinct rows that are read. What belongs to a row: its number, or READER + its first reader as long as it has none.
struct RowTable {
    int* rows;  // [SLOTS]: or -1
    u32* states;
    DEVICE void clear(int thread, int threads) const {
        for (int s = thread; s < SLOTS; s += threads) rows[s] = -1, states[s] = NOBODY;
    }
    // Note that `reader` reads a row; return its slot, or -1 where the table is too full.
    DEVICE int note(int row, u32 reader, int most_probes) const {
        int slot = static_cast<int>(static_cast<u32>(row) * 0x9e3779b1u >> 21);
        for (int probe = 0; probe < most_probes; ++probe, slot = (slot + 1) % SLOTS) {
            int seen = *reinterpret_cast<volatile int*>(rows + slot);
            if (seen == -1) seen = atomicCAS(rows + slot, -1, row);
            if (seen != -1 && seen != row) continue;
            if (*reinterpret_cast<volatile u32*>(states + slot) > READER + reader) atomicMin(states + slot, READER + reader);
            return slot;
        }
        return -1;
    }
};

// Number of the threads of the block before this one for which `is_new` holds, and in `all` of all; `counts` holds one for
// each warp. All threads meet twice.
template <int WARPS>
DEVICE int number_new(bool is_new, int* counts, int& all) {
    const u32 found = __ballot_sync(0xffffffffu, is_new);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0) counts[warp] = __popc(found);
    __syncthreads();
    int before = __popc(found & ((1u << lane) - 1));
    all = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        before += w < warp ? counts[w] : 0;
        all += counts[w];
    }
    __syncthreads();
    return before;
}

template <typename I, int BM>
__global__ void __launch_bounds__(BM)
    tile_rows(const I* __restrict__ rows,  // [taps, M]
              int* __restrict__ order,     // [tiles][BM]: row of y, or -1
              int* __restrict__ heads,     // [tiles][TileHead::ints(taps)]
              int* __restrict__ sources,   // [tiles][taps * BM]
              u16* __restrict__ locals,    // [tiles][taps][BM]: of the taps in the head's list
              i64 M, i64 N, i64 taps_, i64 most, i64 k0, i64 k1, i64 k2, i64 k3) {
    constexpr int WARPS = BM / 32;
    const int t = threadIdx.x, lane = t % 32, warp = t / 32, taps = static_cast<int>(taps_);
    DYNAMIC_SHARED(u64, sorted);  // [BM]; all of it is dynamic, so that its size says whether it needs permission
    u64* const has = sorted + BM;                                 // [BM]
    int* const table_rows = reinterpret_cast<int*>(has + BM);     // [SLOTS]
    u32* const table_states = reinterpret_cast<u32*>(table_rows + SLOTS);
    int* const read = reinterpret_cast<int*>(table_states + SLOTS);  // [taps][BM]: rows, or -1
    int* const counts = read + taps * BM;                         // [taps][WARPS]
    int *const off_centre = counts + taps * WARPS, *const groups = off_centre + taps;  // [taps]
    int *const bits = groups + taps, *const distinct = bits + taps;  // bits: of a tap in the key by which rows are sorted, or -1
    const i64 tile = blockIdx.x, p0 = tile * BM;
    const int kernel[4] = {static_cast<int>(k0), static_cast<int>(k1), static_cast<int>(k2), static_cast<int>(k3)};
    const RowTable table{table_rows, table_states};
    for (int i = t; i < taps; i += BM) off_centre[i] = axes_off(i, kernel), groups[i] = 0;
    table.clear(t, BM);
    u64 its_taps = 0;
#pragma unroll 9
    for (int tap = 0; tap < taps; ++tap) {
        const i64 row = p0 + t < M ? rows[tap * M + p0 + t] : -1;
        const bool there = row >= 0 && row < N;
        read[tap * BM + t] = there ? static_cast<int>(row) : -1;
        if (there) its_taps |= 1ull << tap;
    }
    __syncthreads();
    if (t < taps) {  // taps that are off the centre on most axes count first
        int rank = 0;
        for (int j = 0; j < taps; ++j) rank += off_centre[j] > off_centre[t] || (off_centre[j] == off_centre[t] && j < t);
        bits[t] = max(KEY_BITS - 1 - rank, -1);
    }
    __syncthreads();

    u64 key = 0;
    for (int tap = 0; tap < taps; ++tap)
        if (its_taps >> tap & 1 && bits[tap] >= 0) key |= 1ull << bits[tap];
#pragma unroll
    for (int shift = 1; shift < KEY_BITS; shift *= 2) key ^= key >> shift;  // the place in Gray order
    has[t] = its_taps;
    sorted[t] = (p0 + t < M ? key << 8 : ~0ull << 8) | static_cast<u64>(t);
    __syncthreads();
    for (int size = 2; size <= BM; size *= 2)  // bitonic sort
        for (int step = size / 2; step > 0; step /= 2) {
            const int other = t ^ step;
            if (other > t) {
                const u64 a = sorted[t], b = sorted[other];
                if ((a > b) == ((t & size) == 0)) sorted[t] = b, sorted[other] = a;
            }
            __syncthreads();
        }
    const int from = static_cast<int>(sorted[t] & 255);
    order[tile * BM + t] = p0 + from < M ? static_cast<int>(p0 + from) : -1;
    const u64 own = has[from];
    int* const mine = read + from;  // what this thread's row reads, BM apart

    // All taps at once: who reads each row first.
    bool missed = false;
    for (int tap = 0; tap < taps; ++tap) {
        const bool there = own >> tap & 1;
        const u32 readers = __ballot_sync(0xffffffffu, there);
        if (lane == 0 && readers) atomicOr(groups + tap, ((readers & 0xffff ? 1 : 0) | (readers >> 16 ? 2 : 0)) << (2 * warp));
        if (there) {
            const int row = mine[tap * BM], slot = table.note(row, static_cast<u32>(tap * BM + t), MOST_PROBES);
            mine[tap * BM] = slot >= 0 ? slot : -2 - row;
            missed |= slot < 0;
        }
    }
    const bool full = __syncthreads_or(missed);
    u64 is_first = 0;
    for (int tap = 0; tap < taps; ++tap) {
        const int slot = own >> tap & 1 ? mine[tap * BM] : -1;
        const bool first = slot >= 0 && table.states[slot] == READER + static_cast<u32>(tap * BM + t);
        const u32 found = __ballot_sync(0xffffffffu, first);
        if (first) is_first |= 1ull << tap;
        if (lane == 0) counts[tap * WARPS + warp] = __popc(found);
    }
    __syncthreads();
    if (warp == 0) {  // exclusive sums
        int sum = 0;
        for (int i = lane * taps * WARPS / 32; i < (lane + 1) * taps * WARPS / 32; ++i) {
            const int its = counts[i];
            counts[i] = sum;
            sum += its;
        }
        int up_to = sum;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, up_to, d);
            if (lane >= d) up_to += other;
        }
        for (int i = lane * taps * WARPS / 32; i < (lane + 1) * taps * WARPS / 32; ++i) counts[i] += up_to - sum;
        if (lane == 31) *distinct = up_to;
    }
    __syncthreads();
    const TileHead head(heads + tile * TileHead::ints(taps), taps);
    const bool in_rounds = full || *distinct > most;
    int entries = 0, rounds = 0, used = 0, total = 0;
    if (t == 0) head.round_entries[0] = head.round_sources[0] = 0;
    if (!in_rounds) {
        total = *distinct;
        for (int tap = 0; tap < taps; ++tap) {
            const bool first = is_first >> tap & 1;
            const u32 found = __ballot_sync(0xffffffffu, first);
            if (!first) continue;
            const int place = counts[tap * WARPS + warp] + __popc(found & ((1u << lane) - 1)), slot = mine[tap * BM];
            table.states[slot] = static_cast<u32>(place + 1);
            sources[tile * taps * BM + place] = table.rows[slot];
        }
    } else {
        for (int tap = 0; tap < taps; ++tap) {
            const int slot = own >> tap & 1 ? mine[tap * BM] : -1;
            if (own >> tap & 1) mine[tap * BM] = slot >= 0 ? table.rows[slot] : -2 - slot;
        }
        __syncthreads();
        table.clear(t, BM);
    }
    __syncthreads();
    for (int tap = 0; tap < taps; ++tap) {
        if (!groups[tap]) continue;
        const bool there = own >> tap & 1;
        int slot = there ? mine[tap * BM] : -1;
        if (in_rounds) {
            const int row = slot;
            for (;;) {
                if (there) slot = table.note(row, static_cast<u32>(t), SLOTS);
                __syncthreads();
                const bool is_new = there && table.states[slot] == READER + static_cast<u32>(t);
                int all;
                const int place = number_new<WARPS>(is_new, counts, all);
                if (used + all <= most) {
                    if (is_new) {
                        table.states[slot] = static_cast<u32>(used + place + 1);
                        sources[tile * taps * BM + total + place] = row;
                    }
                    used += all, total += all;
                    break;
                }
                table.clear(t, BM);  // this tap begins another round
                used = 0, ++rounds;
                if (t == 0) head.round_entries[rounds] = entries, head.round_sources[rounds] = total;
                __syncthreads();
            }
            __syncthreads();
        }
        locals[(tile * taps + entries) * BM + t] = static_cast<u16>(there ? table.states[slot] : 0);
        if (t == 0) head.list[entries] = tap << 16 | groups[tap];
        ++entries;
        if (in_rounds) __syncthreads();
    }
    if (t == 0) {
        head.counts[0] = entries, head.counts[1] = ++rounds;
        head.round_entries[rounds] = entries, head.round_sources[rounds] = total;
    }
}
