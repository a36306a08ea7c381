// site_tiles.cu: tiles of the rows of a kernel map, each with the distinct rows that it reads.
//   x[sources[tile][l - ZERO_ROWS]] is what row order[tile][r] of y reads at the tap at which l = locals[tile][its number][r]; a
//   number below ZERO_ROWS for none; in a round after the first l counts from where the round's sources begin
// Source: the rule book of Graham et al. 2018 (arXiv:1711.10275), tile by tile; a hash table with linear probing.
// Python: sbnet_cupy/submanifold/site_tiles.py
// Launch: a thread block for each tile, BM threads for each of SLICES slices of the taps; at most MOST_TAPS taps.
// In a tile rows are sorted by their taps, those that the fewest of its rows have first, in Gray order.
// A tile that reads more than `most` rows is read in rounds: a round is a run of its taps that read no more. Rows are
// numbered in the order in which the taps read them, so that a tile is a function of the map alone.
// By colour (COLOURED) 64 rows of y take turns, and the rows that a tile reads are numbered in that order among those of their
// colour. A number that no row has stands for one of the others once more; a row that reads none has the zeros of the colour that
// it would read. Where a colour has a quarter more rows than the others, or the tile is read in rounds, they are numbered as above.
#include "core/async_copy.cuh"
#include "core/warp_sum.cuh"
#include "submanifold/site_colours.cuh"
#include "submanifold/tap_ranks.cuh"
#include "submanifold/tile_head.cuh"

constexpr int MOST_TAPS = 64;
constexpr u32 READER = 1u << 16, NOBODY = 0xffffffffu;

// The distinct rows that are read, by linear probing. What belongs to a row: its number, or READER + its first reader as long
// as it has none. There are as many slots as a tile can read rows, or more.
template <int SLOTS>
struct RowTable {
    int* rows;  // [SLOTS]: or -1; states follow
    u32* states;
    DEVICE void clear(int thread, int threads) const {
        for (int s = 4 * thread; s < 2 * SLOTS; s += 4 * threads)  // rows = -1, states = NOBODY: all bits set
            *reinterpret_cast<uint4*>(rows + s) = make_uint4(NOBODY, NOBODY, NOBODY, NOBODY);
    }
    static DEVICE int first_slot(int row) {
        return static_cast<int>(static_cast<u32>(row) * 0x9e3779b1u >> 16) / (65536 / SLOTS);
    }
    // Look whether a slot is that of a row, or make it so where it is empty.
    DEVICE bool take(int slot, int row) const {
        int seen = *reinterpret_cast<volatile int*>(rows + slot);
        if (seen == -1) seen = atomicCAS(rows + slot, -1, row);
        return seen == -1 || seen == row;
    }
    // The slot of a row, from `slot` on.
    DEVICE int find(int slot, int row) const {
        while (!take(slot, row)) slot = (slot + 1) % SLOTS;
        return slot;
    }
};

// Thread blocks for which a multiprocessor is to have registers: on compute capability 9.0 as many as without spilling any.
DEVICE constexpr int tile_makers(int rows, int slices, int taps, bool coloured) {
    if (slices > 4) return coloured ? 1 : 2;
    return taps > 32 || DEVICE_ARCHITECTURE != 900 ? 1 : (coloured ? 384 : 512) / rows;
}

//   SLICES, EACH   threads for each row, and taps that each of them looks at: every SLICES-th
template <typename I, int BM, int SLOTS, int SLICES, int EACH, bool COLOURED>
__global__ void __launch_bounds__(BM * SLICES, tile_makers(BM, SLICES, EACH * SLICES, COLOURED))
    tile_rows(const I* __restrict__ rows,  // [taps, M]
              const int* __restrict__ indices,  // [M, 1 + axes]: the sites of y; or null
              int* __restrict__ order,     // [tiles][BM]: row of y, or -1
              int* __restrict__ heads,     // [tiles][TileHead::ints(taps)]
              int* __restrict__ sources,   // [tiles][taps * BM]
              u16* __restrict__ locals,    // [tiles][taps][BM]: of the taps in the head's list
              i64 M, i64 N, i64 taps_, i64 most,
              i64 c0, i64 c1, i64 c2, i64 c3,  // 4 bits of each tap: what it adds to the colour
              i64 factors) {  // of SiteColours
    constexpr int WARPS = BM / 32, THREADS = BM * SLICES, SHARE = BM / SLICES;
    static_assert(BM <= 256 && SHARE % 4 == 0, "a place takes 8 bits; keys are compared four at a time");
    static_assert(16 % SLICES == 0 && EACH * SLICES <= MOST_TAPS, "and 16 taps are a number");
    static_assert(BM % 64 == 0 && 3 * BM <= THREADS, "64 rows take turns; a thread numbers a row");
    constexpr int COLOUR_BIT = 20;  // of a slot: above it, the colour of its row
    static_assert(SLOTS <= 1 << COLOUR_BIT, "slots are below it");
    constexpr u32 EVERY = 0xffffffffu;
    [[maybe_unused]] constexpr int UNROLL = BM != 192 ? 4 : COLOURED ? 2 : 1;  // taps at once, without spilling registers
    const int t = threadIdx.x % BM, slice = threadIdx.x / BM, lane = t % 32, warp = t / 32, taps = static_cast<int>(taps_);
    DYNAMIC_SHARED(u32, keys);  // [BM]; all of it is dynamic, so that its size says whether it needs permission
    int* const places = reinterpret_cast<int*>(keys + BM);        // [BM]: where a row goes
    int* const sorted = places + BM;                              // [BM]: which row is there
    int* const tally = sorted + BM;                               // [THREADS / 32][COLOURS]: rows of a warp
    int* const table_rows = tally + THREADS / 32 * COLOURS;       // [SLOTS]
    u32* const table_states = reinterpret_cast<u32*>(table_rows + SLOTS);
    // [taps][BM]: the slot of the row that is read, or -1
    int* const read = reinterpret_cast<int*>(table_states + SLOTS);
    int* const counts = read + taps * BM;                         // [taps][WARPS]
    int *const groups = counts + taps * WARPS, *const round = groups + taps;  // [taps]: a bit for each 16 rows; [2]
    int* const colours = round + 2;                               // [taps]: what a tap adds to the colour
    int* const numbered = reinterpret_cast<int*>(keys);           // [3 BM], later: slots, with their colours, of rows in order
    u32* const tap_bits = reinterpret_cast<u32*>(tally);          // [MOST_TAPS], before: of tap_ranks.cuh
    const i64 tile = blockIdx.x, p0 = tile * BM;
    const RowTable<SLOTS> table{table_rows, table_states};
    const i64 added[] = {c0, c1, c2, c3};
    table.clear(threadIdx.x, THREADS);
    for (int i = threadIdx.x; i < taps; i += THREADS) groups[i] = 0;
    if (slice == 0) keys[t] = 0, places[t] = 0;
    overlap_launches(rows, indices);
    int colour = 0;  // of the row that this thread looks at
    if (COLOURED && slice == 0 && p0 + t < M) colour = SiteColours{indices, factors}.of(p0 + t);
    int own_rows[EACH];
    const bool there = p0 + t < M;
    const I* next = rows + slice * M + p0 + t;
#pragma unroll
    for (int i = 0; i < EACH; ++i, next += SLICES * M)
        own_rows[i] = there && slice + i * SLICES < taps ? static_cast<int>(*next) : -1;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int tap = slice + i * SLICES;
        if (own_rows[i] >= N) own_rows[i] = -1;
        const int having = __popc(__ballot_sync(EVERY, own_rows[i] >= 0));
        if (lane == 0 && tap < taps) counts[tap * WARPS + warp] = having;
        if (COLOURED && t == 0 && tap < taps) colours[tap] = static_cast<int>(added[i * SLICES / 16] >> (slice + i * SLICES % 16) * 4) & 15;
    }
    __syncthreads();

    u32 took = 0;  // bit i: there is a slot for the row of number i
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int row = own_rows[i];
        took |= static_cast<u32>(row < 0 || table.take(table.first_slot(row), row)) << i;
    }
    if (threadIdx.x / 32 == THREADS / 32 - 1) rank_taps<EACH * SLICES / 32, WARPS>(counts, tap_bits, taps);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int tap = slice + i * SLICES, row = own_rows[i];
        int slot = row < 0 ? -1 : table.first_slot(row);
        if (!(took >> i & 1)) slot = table.find((slot + 1) % SLOTS, row);
        if (tap < taps) read[tap * BM + t] = slot;
    }
    __syncthreads();
    add_taps<SLICES>(keys + t, own_rows, tap_bits, slice);
    __syncthreads();

    // Sorted by counting, since no two keys are the same; a slice of the threads looks at a slice of the keys.
    const auto key_of = [&](i64 row, u32 key) {
        return (p0 + row < M ? gray_place(key) << 8 : ~0u << 8) | static_cast<u32>(row);
    };
    if (slice == 0) keys[t] = key_of(t, keys[t]);
    __syncthreads();
    {
        const u32 own = keys[t];
        int before = 0;
#pragma unroll 8
        for (int i = slice * SHARE; i < (slice + 1) * SHARE; i += 4) {
            const uint4 four = *reinterpret_cast<const uint4*>(keys + i);
            before += (four.x < own) + (four.y < own) + (four.z < own) + (four.w < own);
        }
        atomicAdd(places + t, before);
    }
    __syncthreads();
    if (slice == 0) sorted[places[t]] = COLOURED ? colour << COLOUR_BIT | t : t;
    __syncthreads();
    int from = sorted[t];
    if constexpr (COLOURED) {
        int before = 0;
        colour = from >> COLOUR_BIT;
        if (slice == 0) before = count_before(colour, true, tally + warp * COLOURS);
        __syncthreads();
        if (slice == 0) {
            const int* const both = tally + warp / 2 * 2 * COLOURS;  // counts of two warps
            if (warp % 2) before += both[colour];
            sorted[t / 64 * 64 + place_in_turn(colour, before, both)] = from;
        }
        __syncthreads();
        from = sorted[t];
        colour = from >> COLOUR_BIT, from &= (1 << COLOUR_BIT) - 1;
    }
    if (slice == 0) order[tile * BM + t] = p0 + from < M ? static_cast<int>(p0 + from) : -1;
    int* const mine = read + from;  // what this thread's row reads, BM apart

    // Round by round: the rows that taps from `begin` on read are numbered, of as many taps as read no more than `most`.
#pragma unroll UNROLL
    for (int i = 0; i < EACH; ++i) {
        const int tap = slice + i * SLICES;
        if (tap >= taps) break;
        const int slot = mine[tap * BM];
        const u32 readers = __ballot_sync(EVERY, slot != -1);
        if (lane == 0 && readers) atomicOr(groups + tap, ((readers & 0xffff ? 1 : 0) | (readers >> 16 ? 2 : 0)) << (2 * warp));
        if (slot >= 0) atomicMin(table.states + slot, READER + static_cast<u32>(tap * BM + t));
    }
    __syncthreads();
    u64 listed = 0;  // taps that some row has
#pragma unroll
    for (int h = 0; h < 2; ++h)
        listed |= static_cast<u64>(__ballot_sync(EVERY, 32 * h + lane < taps && groups[32 * h + lane])) << 32 * h;
    const auto entries_before = [&](int tap) { return __popcll(tap < 64 ? listed & ((1ull << tap) - 1) : listed); };
    const TileHead head(heads + tile * TileHead::ints(taps), taps);
    if (threadIdx.x == 0) head.round_entries[0] = head.round_sources[0] = 0;
    int* const its_sources = sources + tile * taps * BM;
    int begin = 0, rounds = 0, total = 0;
    for (;;) {
        if (begin > 0) {  // enter the rows that are left in an empty table
#pragma unroll 1
            for (int tap = slice; tap < taps; tap += SLICES) {
                const int slot = mine[tap * BM];
                if (tap >= begin && slot >= 0) mine[tap * BM] = table.rows[slot];
            }
            __syncthreads();
            table.clear(threadIdx.x, THREADS);
            __syncthreads();
#pragma unroll 1
            for (int tap = slice; tap < taps; tap += SLICES) {
                const int row = mine[tap * BM];
                if (tap < begin || row < 0) continue;
                const int slot = table.find(table.first_slot(row), row);
                atomicMin(table.states + slot, READER + static_cast<u32>(tap * BM + t));
                mine[tap * BM] = slot;
            }
            __syncthreads();
        }
        u32 firsts = 0;  // bit i: this thread's row is the first that reads the one that it reads
#pragma unroll UNROLL
        for (int i = 0; i < EACH; ++i) {
            const int tap = slice + i * SLICES;
            if (tap >= taps) break;
            const int slot = begin <= tap ? mine[tap * BM] : -1;
            const bool first = slot >= 0 && table.states[slot] == READER + static_cast<u32>(tap * BM + t);
            const u32 found = __ballot_sync(EVERY, first);
            firsts |= static_cast<u32>(first) << i;
            if (lane == 0) counts[tap * WARPS + warp] = __popc(found);
        }
        __syncthreads();
        if (threadIdx.x < 32) {  // exclusive sums: a lane has a tap
            int before = 0, fitting = 0, sums[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int tap = 32 * h + lane;
                int its[WARPS], sum = 0;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) sum += its[w] = tap < taps ? counts[tap * WARPS + w] : 0;
                const int up_to = sum_up_to_lane(sum, lane);
                int place = before + up_to - sum;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) {
                    if (tap < taps) counts[tap * WARPS + w] = place;
                    place += its[w];
                }
                sums[h] = place;
                fitting += __popc(__ballot_sync(EVERY, begin <= tap && tap < taps && place <= most));
                before += __shfl_sync(EVERY, up_to, 31);
            }
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (32 * h + lane == begin + fitting - 1) round[0] = begin + fitting, round[1] = sums[h];
        }
        __syncthreads();
        const int end = round[0], distinct = round[1];
        const int room = min(static_cast<int>(most), min(taps, 3) * BM) / COLOURS * COLOURS;  // numbers by colour
#pragma unroll UNROLL
        for (int i = 0; i < EACH; ++i) {
            const int tap = slice + i * SLICES;
            if (tap >= end) break;
            const bool first = firsts >> i & 1;
            const u32 found = __ballot_sync(EVERY, first);
            if (!first) continue;
            const int place = counts[tap * WARPS + warp] + __popc(found & ((1u << lane) - 1)), slot = mine[tap * BM];
            table.states[slot] = static_cast<u32>(place + ZERO_ROWS);
            its_sources[total + place] = table.rows[slot];
            if (COLOURED && distinct <= room) numbered[place] = (colour + colours[tap]) % COLOURS << COLOUR_BIT | slot;
        }
        __syncthreads();
        int length = distinct;
        bool coloured = COLOURED && begin == 0 && end == taps && distinct <= room;
        if (coloured) {
            const bool there = static_cast<int>(threadIdx.x) < distinct;
            const int its = there ? numbered[threadIdx.x] : 0, its_colour = its >> COLOUR_BIT;
            const int slot = its & ((1 << COLOUR_BIT) - 1), its_warp = threadIdx.x / 32 * COLOURS;
            int before = count_before(its_colour, there, tally + its_warp);
            __syncthreads();
            if (threadIdx.x / 32 < COLOURS) {  // exclusive sums: a warp has a colour
                int& count = tally[lane < THREADS / 32 ? lane * COLOURS + threadIdx.x / 32 : 0];
                const int own = lane < THREADS / 32 ? count : 0;
                const int up_to = sum_up_to_lane(own, lane);
                if (lane < THREADS / 32) count = up_to - own;
                if (lane == 31) numbered[threadIdx.x / 32] = up_to;
            }
            __syncthreads();
            const ColouredNumbers numbers{numbered, room / COLOURS};
            const int all = numbers.end();
            coloured = all <= distinct + distinct / 4;
            if (coloured) {
                length = all;
                const int any_row = its_sources[0], row = there ? table.rows[slot] : 0;
                __syncthreads();
                if (numbers.is_full()) {  // rows of one colour have numbers of others
                    if (static_cast<int>(threadIdx.x) < length) its_sources[threadIdx.x] = any_row;
                    __syncthreads();
                } else if (static_cast<int>(threadIdx.x) < length &&
                           static_cast<int>(threadIdx.x) / COLOURS >= numbered[threadIdx.x % COLOURS]) {
                    its_sources[threadIdx.x] = any_row;
                }
                if (there) {
                    const int number = numbers.number(its_colour, before + tally[its_warp + its_colour]);
                    table.states[slot] = static_cast<u32>(number + ZERO_ROWS);
                    its_sources[number] = row;
                }
                __syncthreads();
            }
        }
#pragma unroll UNROLL
        for (int i = 0; i < EACH; ++i) {
            const int tap = slice + i * SLICES;
            if (tap >= end) break;
            if (tap < begin || !(listed >> tap & 1)) continue;
            const int entry = entries_before(tap), slot = mine[tap * BM];
            const u32 zeros = coloured ? static_cast<u32>(colour + colours[tap]) % COLOURS : 0;
            locals[(tile * taps + entry) * BM + t] = static_cast<u16>(slot >= 0 ? table.states[slot] : zeros);
            if (t == 0) head.list[entry] = tap << 16 | groups[tap];
        }
        total += length, ++rounds;
        if (threadIdx.x == 0) head.round_entries[rounds] = entries_before(end), head.round_sources[rounds] = total;
        if (end == taps) break;
        begin = end;
    }
    if (threadIdx.x == 0) head.counts[0] = __popcll(listed), head.counts[1] = rounds;
}
