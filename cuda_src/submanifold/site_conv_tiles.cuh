// site_conv_tiles.cuh: the convolution of site_conv.cu by tiles that read each row of x once.
// Source: tiles with shared inputs as in fVDB (Williams et al. 2024); fragments by local row numbers instead of an im2col matrix.
// Python: sbnet_cupy/submanifold/site_conv.py; launched by site_conv_launch.py
// Compute capability 9.0. Rows of x are whole vectors of COPIED bytes, aligned; rows of y whole vectors of 16.
// Launch: a persistent grid, (tiles of BM rows, tiles of BN channels) thread blocks.
// The distinct rows that a tile reads (site_tiles.cu) lie in shared memory, RB bytes of channels (a part) at a time, after
// ZERO_ROWS of zeros. ldmatrix gathers the rows of a fragment by their local numbers. Sums are made part after part, in a part tap after
// tap, whatever tile a row is in.
//   STAGES   0: all weights stay in shared memory; else a warp streams those of a part and tap through a ring of so many
//   COPIED   bytes that are copied together: 16, or 2, 4 or 8 where rows of x are no such vectors, and at most RB long
//   BUFFERS  2: the next rows are copied while these are multiplied
//   OVERLAP  wait for the launches ahead before all else, and let the next one begin
// With two buffers, where weights are streamed to be multiplied by wgmma and nothing is rounded, three warps beside the one that
// streams copy rows, tile after tile, and those that multiply need not meet; else they copy the rows themselves.
// By SplitWgmma groups of four warps share the taps of a tile, and their sums are added in their order. Each has a ring of its
// own, an equal part of the stages: a group that has none of many taps neither holds the others up nor loses count of a stage.
#pragma once

#include "core/pipeline.cuh"
#include "submanifold/narrow_tile.cuh"
#include "submanifold/site_product.cuh"
#include "submanifold/split_wgmma.cuh"
#include "submanifold/tile_head.cuh"

// Where a unit of 16 bytes of a row lies: 8 rows that follow each other have the same unit in different banks. Unit u + 2 s is
// at that of u ^ 32 s.
template <int RB>
DEVICE int unit_at(int row, int unit) {
    return row * RB + ((unit ^ (RB == 128 ? row & 7 : RB == 64 ? row >> 1 & 3 : row >> 2 & 1)) << 4);
}

// Shared memory, from a multiple of 1024 bytes on.
template <int BM, int BN, int RB, int STAGES, int BUFFERS, int SPLIT>
struct TileMemory {
    static constexpr int STAGE = BN * TILE_ROW;
    int rows_bytes, taps;  // of a buffer of rows
    u8 *weights, *rows;
    float4* sums;  // of groups after the first
    int *heads, *places;
    u16* locals;
    float *scale, *bias;
    u64 *full, *empty, *meeting, *rows_full, *rows_empty;
    DEVICE TileMemory(u8* unaligned, int taps, int chunks, int most) : rows_bytes((most + ZERO_ROWS) * RB), taps(taps) {
        weights = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
        rows = weights + (STAGES ? STAGES : chunks) * STAGE;
        sums = reinterpret_cast<float4*>(rows + BUFFERS * rows_bytes);
        locals = reinterpret_cast<u16*>(sums + (SPLIT - 1) * (BM * BN / 4));
        heads = reinterpret_cast<int*>(locals + BUFFERS * taps * BM);
        places = heads + 3 * TileHead::ints(taps);
        scale = reinterpret_cast<float*>(places + BUFFERS * BM), bias = scale + BN;
        full = reinterpret_cast<u64*>(bias + BN), empty = full + STAGES, meeting = empty + STAGES;
        rows_full = meeting + 1, rows_empty = rows_full + BUFFERS;
    }
};

struct TileRows {
    const int* places;  // row of y, or -1
    const u8* __restrict__ valid;
    DEVICE int pixel(int row) const { return places[row]; }
    DEVICE bool is_inside(int row) const { return places[row] >= 0 && (!valid || valid[places[row]]); }
};

// A part of the channels of the rows that a round of a tile reads.
struct TilePart {
    int tile, head, part, round;  // head: which of three
    int buffer, places;           // which of the rows; which of the lists of places and locals
};

// Threads that share work, and which of them this one is.
struct Team {
    int number, count;
};

// Threads that stream weights: a warp, of four that leave registers to those that multiply by wgmma. The other three copy rows.
template <class Product, int STAGES, int BUFFERS, int BLOCKS, bool ROUND>
struct Streamers {
    static constexpr bool COPY = STAGES > 0 && BUFFERS == 2 && Product::ASYNC && split_of<Product>(0) == 1 && !ROUND;
    static constexpr int COUNT = STAGES == 0 ? 0 : Product::ASYNC ? 128 : 32, FEWEST = COPY ? 64 : 24;
    static constexpr int GROUPS = ceil_div(Product::THREADS, 128);
    static constexpr int LAUNCHED = 512 / BLOCKS / (GROUPS + 1) / 8 * 8, ALL = LAUNCHED * (GROUPS + 1);  // registers of each thread
    static constexpr int TAKEN = min_of((ALL - FEWEST) / GROUPS, 232) / 8 * 8;
    static constexpr int LEFT = COPY ? min_of(ALL - TAKEN * GROUPS, 232) : FEWEST;  // what TAKEN is not a multiple of
};

template <template <typename, int, int, int, int> class Engine, typename T, int BM, int BN, int WM, int WN, int RB,
          int STAGES, int BUFFERS, int BLOCKS, int COPIED, bool ROUND, int ACTIVATION, bool OVERLAP>
__global__ void __launch_bounds__(Engine<T, BM, BN, WM, WN>::THREADS + Streamers<Engine<T, BM, BN, WM, WN>, STAGES, BUFFERS, BLOCKS, ROUND>::COUNT, BLOCKS)
    site_conv_tiles(const T* __restrict__ x,  // [N, C]
                    const u8* __restrict__ packed,
                    const int* __restrict__ order, const int* __restrict__ heads, const int* __restrict__ sources,
                    const u16* __restrict__ locals,  // of site_tiles.cu
                    const u8* __restrict__ valid,    // [M] or null: all rows
                    const T* __restrict__ residual,  // [M, K] or null
                    T* __restrict__ y,               // [M, K]
                    i64 M, i64 taps, i64 C, i64 K, i64 most) {
    if constexpr (OVERLAP) overlap_launches(x, packed, order, heads, sources, locals, valid, residual);
    using Product = Engine<T, BM, BN, WM, WN>;
    constexpr int SPLIT = split_of<Product>(0);  // groups that share the taps
    using Memory = TileMemory<BM, BN, RB, STAGES, BUFFERS, SPLIT>;
    constexpr int THREADS = Product::THREADS, MT = Product::MT, NT = Product::NT, LANES = 16 / sizeof(T);
    constexpr int UNITS = RB / 16, STEPS = RB / 32, PANELS = ceil_div(BN, PANEL);
    constexpr bool RING = STAGES > 0;
    using Streaming = Streamers<Product, STAGES, BUFFERS, BLOCKS, ROUND>;
    constexpr int OWN_STAGES = STAGES / SPLIT;  // of a group's ring
    static_assert(SPLIT == 1 || (OWN_STAGES * SPLIT == STAGES && OWN_STAGES > 1), "groups share the stages evenly");
    constexpr int REGISTERS = RING && Product::ASYNC ? Streaming::TAKEN : 65536 / ((THREADS + Streaming::COUNT) * BLOCKS);
    constexpr bool WIDE = REGISTERS - MT * NT * 4 >= 90;  // registers are left when a tile ends
    // Whether fragments are read while others are multiplied.
    constexpr bool AHEAD = MT == 2 || NT * 4 + STEPS * 8 + (SPLIT > 1 ? 72 : 32) <= Streaming::TAKEN;

    DYNAMIC_SHARED(u8, unaligned);
    const Steps steps(taps, C, K, LANES, STEPS);
    const Memory shared(unaligned, steps.taps, steps.chunks, static_cast<int>(most));
    const int parts = ceil_div(steps.per_tap, STEPS), head_ints = TileHead::ints(steps.taps);
    const int k0 = blockIdx.y * BN, lane = threadIdx.x % 32;
    const int tiles = static_cast<int>(ceil_div<i64>(M, BM));
    const i64 panel_step = static_cast<i64>(steps.chunks) * PANEL_CHUNK;
    const u8* const weights = steps.weights(packed) + k0 / PANEL * panel_step + k0 % PANEL * TILE_ROW;
    const int panels = min(PANELS, steps.panels - k0 / PANEL);
    constexpr bool COPY = Streaming::COPY;
    constexpr int COPIERS = Streaming::COUNT - 32;
    const auto head_of = [&](const TilePart& its) { return TileHead(shared.heads + its.head * head_ints, steps.taps); };
    const auto copy_head = [&](const Team& team, int tile, int which) {
        for (int i = team.number * 4; i < head_ints; i += team.count * 4)
            copy_async_16(shared.heads + which * head_ints + i, heads + static_cast<i64>(tile) * head_ints + i, true);
    };
    // Copy the 16 bytes that this thread has of the rows of a part, or whole rows.
    const auto copy_rows = [&](const Team& team, const TilePart& its, int first, int count) {
        const int* const list = sources + static_cast<i64>(its.tile) * (steps.taps * BM) + first;
        u8* const to = shared.rows + its.buffer * shared.rows_bytes + ZERO_ROWS * RB;
        if constexpr (COPIED < 16) {
            const int bytes = static_cast<int>(C) * static_cast<int>(sizeof(T));
            for (int i = team.number; i < count; i += team.count) {
                const u8* const row = reinterpret_cast<const u8*>(x + list[i] * C);
#pragma unroll 4
                for (int b = 0; b < bytes; b += COPIED) {
                    u8* const its_unit = to + unit_at<RB>(i, b / 16) + b % 16;
                    if constexpr (COPIED >= 4)
                        copy_async<COPIED>(its_unit, row + b, true);
                    else  // too few for an asynchronous copy
                        *reinterpret_cast<u16*>(its_unit) = *reinterpret_cast<const u16*>(row + b);
                }
            }
            return;
        }
        [[maybe_unused]] constexpr int TOGETHER = Product::ASYNC ? (!AHEAD || (ROUND && !RING) ? 1 : 4) : NT == 4 ? 2 : 4;  // there are no registers for more
        if constexpr (Product::ASYNC) {  // nor for a unit found again for each row
            const int unit = team.number % UNITS;
            const i64 c = (its.part * UNITS + unit) * LANES;
#pragma unroll TOGETHER
            for (int i = team.number / UNITS; i < count; i += team.count / UNITS)
                copy_async_16(to + unit_at<RB>(i, unit), x + list[i] * C + (c < C ? c : 0), c < C);
        } else {  // with 16 channels the other way took up to 20% longer
#pragma unroll TOGETHER
            for (int i = team.number; i < count * UNITS; i += team.count) {
                const i64 c = (its.part * UNITS + i % UNITS) * LANES;
                copy_async_16(to + unit_at<RB>(i / UNITS, i % UNITS), x + list[i / UNITS] * C + (c < C ? c : 0), c < C);
            }
        }
    };
    const auto round_rows = [&](const Team& team, const TilePart& its, const TileHead& head) {  // those that this thread has copied
        const int count = head.round_sources[its.round + 1] - head.round_sources[its.round];
        u8* const from = shared.rows + its.buffer * shared.rows_bytes + ZERO_ROWS * RB;
        constexpr int OWN = COPIED < 16 ? UNITS : 1;  // units of a row that this thread has copied
#pragma unroll 1
        for (int i = team.number; i < count * (UNITS / OWN); i += team.count)
#pragma unroll
            for (int u = 0; u < OWN; ++u) round_four(from + (OWN > 1 ? unit_at<RB>(i, u) : unit_at<RB>(i / UNITS, i % UNITS)));
    };
    const auto copy_part = [&](const Team& team, const TilePart& its, const TileHead& head) {
        const int first = head.round_sources[its.round];
        copy_rows(team, its, first, head.round_sources[its.round + 1] - first);
        if (its.part == 0 && its.round == 0) {
            const int bytes = head.counts[0] * BM * 2;
            u8* const to = reinterpret_cast<u8*>(shared.locals + its.places * steps.taps * BM);
            const u8* const from = reinterpret_cast<const u8*>(locals + static_cast<i64>(its.tile) * (steps.taps * BM));
            for (int i = team.number * 16; i < bytes; i += team.count * 16) copy_async_16(to + i, from + i, true);
            for (int i = team.number * 4; i < BM; i += team.count * 4)
                copy_async_16(shared.places + its.places * BM + i, order + static_cast<i64>(its.tile) * BM + i, true);
            const int next = its.tile + static_cast<int>(gridDim.x);
            if (next < tiles) copy_head(team, next, its.head == 2 ? 0 : its.head + 1);
        }
    };
    const auto after = [&](TilePart its, const TileHead& head) {
        if (++its.round == head.counts[1]) {
            its.round = 0;
            if (++its.part == parts) {
                its.part = 0, its.tile += gridDim.x;
                its.head = its.head == 2 ? 0 : its.head + 1;
                its.places = BUFFERS - 1 - its.places;
            }
        }
        its.buffer = BUFFERS - 1 - its.buffer;
        return its;
    };
    const TilePart first_part{static_cast<int>(blockIdx.x), 0, 0, 0, 0, 0};
    const int zeros = COPIED < 16 ? shared.rows_bytes / 16 : ZERO_ROWS * UNITS;  // or all rows, where a part of them is copied
    for (int i = threadIdx.x; i < BUFFERS * zeros; i += THREADS + Streaming::COUNT)
        *reinterpret_cast<uint4*>(shared.rows + i / zeros * shared.rows_bytes + i % zeros * 16) = zero<uint4>();
    if constexpr (RING) {
        if (threadIdx.x == 0) {
            for (int s = 0; s < STAGES; ++s) {
                barrier_init(shared.full + s, 1);
                barrier_init(shared.empty + s, Product::ASYNC ? THREADS / 32 / SPLIT : THREADS);
            }
            barrier_init(shared.meeting, THREADS);
            for (int b = 0; b < BUFFERS && COPY; ++b) {
                barrier_init(shared.rows_full + b, COPIERS);
                barrier_init(shared.rows_empty + b, THREADS);
            }
            barrier_init_fence();
        }
        __syncthreads();
        if (threadIdx.x >= THREADS) {
            give_registers<Product::ASYNC ? Streaming::LEFT : 0>();
            if (threadIdx.x >= THREADS + 32) {
                if constexpr (!COPY) return;
                const Team team{static_cast<int>(threadIdx.x) - THREADS - 32, COPIERS};
                Stage<BUFFERS> stage;  // its slot is the buffer
                barrier_arrive(shared.rows_full);  // those that multiply copy the first rows
                for (TilePart its = first_part;;) {
                    its = after(its, TileHead(const_cast<int*>(heads) + static_cast<i64>(its.tile) * head_ints, steps.taps));
                    if (its.tile >= tiles) break;
                    const TileHead head(const_cast<int*>(heads) + static_cast<i64>(its.tile) * head_ints, steps.taps);
                    stage.advance();
                    barrier_wait(shared.rows_empty + stage.slot, stage.phase ^ 1);
                    copy_part(team, its, head);
                    copies_arrive(shared.rows_full + stage.slot);
                }
                return;
            }
            dependent_wait();
            Stage<OWN_STAGES> stages[SPLIT];  // of each group
            for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
                const int* const head = heads + static_cast<i64>(tile) * head_ints;
                const int count = head[0];
                for (int part = 0; part < parts; ++part)
                    for (int first = 0; first < count; first += 32) {
                        const int entry = first + lane < count ? head[2 + first + lane] : 0;
                        for (int i = 0; i < min_of(32, count - first); ++i) {
                            const int tap = __shfl_sync(0xffffffffu, entry, i) >> 16, group = group_of_tap<SPLIT>(tap);
                            int slot = 0;
                            u32 phase = 0;
#pragma unroll
                            for (int g = 0; g < SPLIT; ++g)
                                if (g == group) slot = g * OWN_STAGES + stages[g].slot, phase = stages[g].phase, stages[g].advance();
                            barrier_wait(shared.empty + slot, phase ^ 1);
                            if (elected()) {
                                const u8* const its = weights + static_cast<i64>(tap * parts + part) * PANEL_CHUNK;
                                constexpr u32 BYTES = min_of(BN, PANEL) * TILE_ROW;
                                barrier_expect(shared.full + slot, panels * BYTES);
#pragma unroll
                                for (int p = 0; p < PANELS; ++p)
                                    if (p < panels)
                                        bulk_copy(shared.weights + slot * Memory::STAGE + p * BYTES, its + p * panel_step, BYTES,
                                                  shared.full + slot);
                            }
                        }
                    }
            }
            return;
        }
        take_registers<Product::ASYNC ? Streaming::TAKEN : 0>();
    }

    Meeting meeting(shared.meeting);
    const auto meet = [&]() {
        if constexpr (RING) meeting.sync();
        else __syncthreads();
    };
    const Team team{static_cast<int>(threadIdx.x), THREADS};
    copy_head(team, blockIdx.x, 0);
    copy_async_commit();
    copy_async_wait<0>();
    meet();
    dependent_wait();  // for the packed weights
    const u8* const tables = loaded_later(packed);
    if constexpr (!RING)
        for (int i = threadIdx.x; i < steps.chunks * (BN * 8); i += THREADS) {
            const int chunk = i / (BN * 8), column = i / 8 % BN, from = packed_column<T, BN>(column);
            copy_async_16(shared.weights + chunk * Memory::STAGE + swizzled(column, i % 8),
                          weights + from / PANEL * panel_step + static_cast<i64>(chunk) * PANEL_CHUNK +
                              swizzled(from % PANEL, i % 8),
                          from / PANEL < panels);
        }
    TilePart now = first_part;
    copy_part(team, now, head_of(now));
    copy_async_commit();
    for (int i = threadIdx.x; i < 2 * BN; i += THREADS) shared.scale[i] = steps.table(tables, i / BN, k0 + i % BN);

    constexpr u32 EVERY = 0xffffffffu;
    constexpr int OWN = Product::ASYNC ? (MT == 2 ? 255 : 15) : (1 << MT) - 1;  // groups of 16 rows of a warp
    const int own_shift = Product::ASYNC ? Product::row(0) / 64 * 4 : Product::row(0) / 16;
    [[maybe_unused]] const int lane_weights = right_offset(Product::column());
    [[maybe_unused]] const u32 all_weights =
        __shfl_sync(EVERY, shared_address(shared.weights + Product::column() * TILE_ROW), 0);
    float acc[MT][NT][4];
    clear(acc);
    Stage<RING ? OWN_STAGES : 1> stage;  // of this group
    [[maybe_unused]] Stage<BUFFERS> buffer;  // of the rows that others copy
    const auto receive = [&]() {             // those that these threads have copied
        copy_async_wait<0>();
        if constexpr (ROUND) round_rows(team, now, head_of(now));
        if constexpr (Product::ASYNC && !RING) shared_fence();  // for the weights
        meet();
    };
    if constexpr (COPY) receive();
    for (bool more = true; more;) {
        if constexpr (COPY) barrier_wait(shared.rows_full + buffer.slot, buffer.phase);
        else receive();
        if constexpr (BUFFERS == 2 && !COPY) {
            const TilePart next = after(now, head_of(now));
            if (next.tile < tiles) copy_part(team, next, head_of(next));
            copy_async_commit();
        }

        const TileHead head = head_of(now);
        const u8* const rows = shared.rows + now.buffer * shared.rows_bytes;
        const int begin = head.round_entries[now.round], last = head.round_entries[now.round + 1];  // of the list of taps
        // Whether a warp looks at every tap: where weights are streamed through one ring it takes part in each stage.
        constexpr bool EACH = RING && SPLIT == 1;
        // Taps are looked at in runs of up to 32, of which each lane knows one.
        int count, later = last - begin;  // taps of this run, and of those after it
        u32 own, tops, bottoms, left;     // of this run, those that some of this warp's rows have; of these, those to come
        u32 its_weights;                  // where the weights of the lane's tap are, if they stay
        const u16* its_locals;            // of this run
        int next_local[MT] = {};          // of the tap to look at next
        const auto load = [&](int i) {
#pragma unroll
            for (int m = 0; m < MT; ++m) next_local[m] = its_locals[i * BM + m * (Product::ASYNC ? 64 : 16)];
        };
        // The tap of the run to look at after tap i, or from -1 on the first one.
        const auto following = [&](int i) {
            if constexpr (EACH) return i + 1;
            const int next = __ffs(static_cast<int>(left)) - 1;
            left &= left - 1;
            return next;
        };
        const auto exists = [&](int i) { return EACH ? i < count : i >= 0; };
        // Begin the run that starts with entry `first` of the list: return its first tap to look at.
        const auto begin_run = [&](int first) {
            count = min(32, later), later -= count;
            const int entry = lane < count ? head.list[first + lane] : 0, tap = entry >> 16;
            const int groups = group_of_tap<SPLIT>(tap) == group_of<SPLIT>() ? entry >> own_shift : 0;
            left = own = __ballot_sync(EVERY, groups & OWN);
            if constexpr (MT == 2) tops = __ballot_sync(EVERY, groups & OWN & 15), bottoms = __ballot_sync(EVERY, groups & OWN & ~15);
            const int step = tap * steps.per_tap + now.part * STEPS, at = step / 4 * Memory::STAGE + step % 4 * 32;
            its_weights = Product::ASYNC ? (all_weights + at) >> 4 : at;
            its_locals = shared.locals + (now.places * steps.taps + first) * BM + Product::row(0) + lane % 16;
            const int i = following(-1);
            if (exists(i)) load(i);
            return i;
        };
        // Where this lane's rows are; then begin to load those of tap i.
        const auto locate = [&](int (&at)[MT], int i) {
#pragma unroll
            for (int m = 0; m < MT; ++m) at[m] = unit_at<RB>(next_local[m], lane / 16);
            if (exists(i)) load(i);
        };
        int i = begin_run(begin);
        if constexpr (Product::ASYNC) {
            int in_use = -1;  // stage that the tensor cores read
            [[maybe_unused]] bool top_runs = false;  // whether the latest product may still read a[0]
            const auto release = [&](int slot) {
                if (RING && slot >= 0 && lane == 0) barrier_arrive(shared.empty + slot);
            };
            u32 a[AHEAD ? 2 : 1][STEPS][4];
            // Multiply 64 rows by weights; `a` is free but for the latest product.
            const auto multiply = [&](int at, int m, u32 (&a)[STEPS][4], u32 right, bool latest) {
                if (latest) wgmma_wait<0>();
#pragma unroll
                for (int s = 0; s < STEPS; ++s) ldmatrix_x4(a[s], rows + (at ^ s * 32));
                const u64 weights = swizzled_descriptor_at(right);
                wgmma_fence();
#pragma unroll
                for (int s = 0; s < STEPS; ++s)
                    Wgmma<T, NT * 8>::registers(&acc[m][0][0], a[s], weights + s * 2);
                wgmma_commit();
                wgmma_wait<1>();
            };
            const auto step = [&](int i, int next, int odd) {
                int at[MT];
                locate(at, next);
                const int slot = group_of<SPLIT>() * OWN_STAGES + stage.slot;
                const u32 right = RING ? (all_weights >> 4) + slot * (Memory::STAGE >> 4) : __shfl_sync(EVERY, its_weights, i);
                if constexpr (RING) barrier_wait(shared.full + slot, stage.phase);
                if constexpr (MT == 2) {
                    const bool top = tops >> i & 1, bottom = bottoms >> i & 1;
                    if (top) multiply(at[0], 0, a[0], right, !bottom || top_runs);
                    if (bottom) multiply(at[1], 1, a[AHEAD], right, !top);
                    if (top || bottom) top_runs = !bottom;
                } else if (!EACH || own >> i & 1) {
                    multiply(at[0], 0, a[AHEAD * odd], right, !AHEAD);
                }
                if constexpr (RING) {
                    if (!EACH || own >> i & 1) {
                        if constexpr (AHEAD) {
                            release(in_use);
                            in_use = slot;
                        } else {  // the next product waits for this one anyway
                            wgmma_wait<0>();
                            release(slot);
                        }
                    } else {
                        wgmma_wait<0>();  // those that stream must not wait for what was read long ago
                        release(in_use);
                        release(slot);
                        in_use = -1;
                    }
                    stage.advance();
                }
                return next;
            };
            const auto multiply_taps = [&]() {  // (to ask a function whether there is a tap takes more instructions)
#pragma unroll 1
                for (;;)
#pragma unroll
                    for (int odd = 0; odd <= AHEAD; ++odd) {
                        if (!exists(i)) {
                            if (later == 0) return;
                            i = begin_run(begin + 32);
                            if (!exists(i)) return;
                        }
                        i = step(i, following(i), odd);
                    }
            };
            multiply_taps();
            wgmma_wait<0>();
            release(in_use);
        } else {
            const auto multiply = [&](const int (&at)[MT], const u8* weights, int b_at) {
#pragma unroll
                for (int s = 0; s < STEPS; ++s) {
                    u32 right[NT][2];
                    load_right(right, weights + (b_at ^ s * 32));
#pragma unroll
                    for (int m = 0; m < MT; ++m) {
                        u32 left[4];
                        ldmatrix_x4(left, rows + (at[m] ^ s * 32));
                        multiply_step<T>(acc[m], left, right);
                    }
                }
            };
#pragma unroll 1
            for (;;) {
                if (!exists(i)) {
                    if (later == 0) break;
                    i = begin_run(begin + 32);
                    if (!exists(i)) break;
                }
                const int next = following(i);
                int at[MT];
                locate(at, next);
                if constexpr (RING) {
                    barrier_wait(shared.full + stage.slot, stage.phase);
                    if (own >> i & 1) multiply(at, shared.weights + stage.slot * Memory::STAGE, lane_weights);
                    barrier_arrive(shared.empty + stage.slot);
                    stage.advance();
                } else {
                    multiply(at, shared.weights, lane_weights ^ static_cast<int>(__shfl_sync(EVERY, its_weights, i)));
                }
                i = next;
            }
        }
        const TilePart next = after(now, head_of(now));
        more = next.tile < tiles;
        if (next.tile != now.tile) {
            const TileRows its_rows{shared.places + now.places * BM, valid};
            const Result<T, TileRows> result{residual, y, shared.scale, shared.bias, its_rows, k0, static_cast<int>(K)};
            if constexpr (SPLIT > 1) {
                gather_sums<SPLIT>(acc, shared.sums, meet);
                if (group_of<SPLIT>() == 0) result.template store<ACTIVATION, true, WIDE, Product>(acc);
            } else if constexpr (BN == 16 && sizeof(T) == 2) {
                store_narrow<ACTIVATION, Product>(result, acc);
            } else {
                result.template store<ACTIVATION, true, WIDE, Product>(acc);
            }
            clear(acc);
        }
        if constexpr (COPY) {
            barrier_arrive(shared.rows_empty + buffer.slot);
            buffer.advance();
        } else if (BUFFERS == 1 && more) {
            meet();
            copy_part(team, next, head_of(next));
            copy_async_commit();
        }
        now = next;
    }
}
