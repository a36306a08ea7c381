// site_conv_pipelined.cuh: the convolution of site_conv.cu, where some warps copy and the others multiply.
// Source: warps of different roles as in CUTLASS (Thakkar et al. 2023); see block_sparse/stack/stack_conv_pipelined.cuh.
// Python: sbnet_cupy/submanifold/site_conv.py; launched by site_conv_launch.py
// Compute capability 9.0 and newer. Rows of x are whole chunks of 128 bytes, aligned; rows of y whole vectors.
// Launch: a persistent grid, a thread block for each tile of BM rows and BN channels; `turns` says which has which. Where thread
// blocks share tiles, site_conv_shared.cuh says so.
// Why: a thread that copies looks up which rows a tap reads once, and then copies part after part of them. Its warp keeps them in
// shared memory for all taps of a tile, and fetches those of the next tile into the L2 cache meanwhile.
#pragma once

#include "core/pipeline.cuh"
#include "submanifold/site_product.cuh"
#include "submanifold/site_turns.cuh"

constexpr int COPIERS = 128;  // threads that copy

// Shared memory, from a multiple of 1024 bytes on.
template <int BM, int BN, int STAGES>
struct SiteMemory {
    static constexpr int A = BM * TILE_ROW, STAGE = A + BN * TILE_ROW;
    u8* ring;
    u64 *full, *empty;                     // of each stage
    u64 *row_full, *row_empty;             // of each tile's places
    u64 *copiers, *multipliers;            // barriers among themselves
    int2* cuts;                            // [2], of shared tiles
    float *scale, *bias;
    int *notes;                            // of each stage: groups of rows that have it, and LAST
    int *places, *inside;                  // [2][BM]
    int *sources, *list;                   // [taps][BM], [2][taps + 1]: how many there are, and which
    DEVICE SiteMemory(u8* unaligned, int taps) {
        ring = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
        full = reinterpret_cast<u64*>(ring + STAGES * STAGE), empty = full + STAGES;
        row_full = empty + STAGES, row_empty = row_full + 2;
        copiers = row_empty + 2, multipliers = copiers + 1;
        cuts = reinterpret_cast<int2*>(multipliers + 1), scale = reinterpret_cast<float*>(cuts + 2), bias = scale + BN;
        notes = reinterpret_cast<int*>(bias + BN);
        places = notes + STAGES, inside = places + 2 * BM;
        sources = inside + 2 * BM, list = sources + taps * BM;
    }
};
constexpr int LAST = 1 << 8;  // of a tile's chunks

// The tiles of this thread block, turn after turn. A tile is a number, or that of half a tile, inverted.
template <int BM>
struct Turns {
    static constexpr bool HALVES = BM == 256;
    const u16* __restrict__ dealt;  // [rounds][blocks], from this one's first on; or null: in order
    int tiles, block, blocks;
    // `turns` of `shares` thread blocks, as site_turns.cuh has them, or null. Each BM rows have `across` tiles of BN channels.
    DEVICE Turns(const u16* turns, const int2*, int2*, i64 M, i64 shares, int across)
        : dealt(nullptr), tiles(static_cast<int>(ceil_div<i64>(M, BM)) * across), block(static_cast<int>(blockIdx.x)),
          blocks(static_cast<int>(gridDim.x)) {
        if (turns && shares == blocks && tiles > blocks && across == 1) dealt = turns + block + first_turn(BM, M, shares);
    }
    DEVICE int count() const {
        if (!dealt) return block < tiles ? ceil_div(tiles - block, blocks) : 0;
        const int rounds = ceil_div(tiles, blocks);
        return dealt[(rounds - 1) * blocks] == NO_TILE ? rounds - 1 : rounds;
    }
    DEVICE int tile(int turn) const {
        if (!dealt) return block + turn * blocks;
        const int its = dealt[turn * blocks];
        return HALVES && its & HALF_TILE ? ~(its - HALF_TILE) : its;
    }
    // Taps number first_tap to end_tap - 1 of its list are computed, where it has so many.
    static DEVICE int first_tap(int) { return 0; }
    static DEVICE int end_tap(int) { return ALL_TAPS; }
    // Where its sums go: the number of a part; -1 for y.
    static DEVICE int part(int) { return -1; }
    // The rows of a tile: the first, and how many.
    static DEVICE i64 first_row(int tile, int across) {
        return HALVES && tile < 0 ? static_cast<i64>(~tile) * (BM / 2) : static_cast<i64>(tile / across) * BM;
    }
    static DEVICE int height(int tile) { return HALVES && tile < 0 ? BM / 2 : BM; }
};

// Parts of tiles lie as threads hold their sums: [parts][MT * NT][THREADS] of four floats. Where those of this thread begin; the next
// four are THREADS * 4 floats further.
template <class Product, typename Float>
DEVICE auto parts_of_thread(Float* partials, int part) {
    constexpr int ALL = Product::MT * Product::NT * Product::THREADS;
    return partials + (static_cast<i64>(part) * ALL + threadIdx.x) * 4;
}

template <template <typename, int, int, int, int> class Engine, typename T, int BM, int BN, int WM, int WN, int STAGES,
          bool CACHED, bool ROUND, int ACTIVATION, template <int> class Its>
DEVICE void convolve_pipelined(const T* __restrict__ x, const u8* __restrict__ packed, const int* __restrict__ rows,
                               const int* __restrict__ order, const u32* __restrict__ masks,
                               const u16* __restrict__ its_turns, const int2* __restrict__ cuts,
                               const u8* __restrict__ valid, const T* __restrict__ residual, T* __restrict__ y,
                               float* __restrict__ partials, i64 N, i64 M, i64 taps, i64 C, i64 K, i64 shares) {
    using Product = Engine<T, BM, BN, WM, WN>;
    using Memory = SiteMemory<BM, BN, STAGES>;
    constexpr int MULTIPLIERS = Product::THREADS, MT = Product::MT, NT = Product::NT, LANES = 16 / sizeof(T);
    constexpr int PANELS = ceil_div(BN, PANEL), PASS = COPIERS / 8, PASSES = BM / PASS;
    constexpr bool SHIFTED = Product::ASYNC && BM * BN >= 256 * 128;  // registers, to those that multiply
    constexpr int COPYING = !SHIFTED ? 0 : BM == 256 ? 96 : 120, MULTIPLYING = !SHIFTED ? 0 : BM == 256 ? 200 : 192;
    using ItsReaders = Readers<MULTIPLIERS, Product::ASYNC && !ROUND>;
    static_assert(BM == 128 || BM == 256, "rows of tiles that are dealt out");
    static_assert(BN % PANEL == 0 && BM / WM % ROWS_OF_GROUP == 0, "whole panels, whole groups");

    DYNAMIC_SHARED(u8, unaligned);
    const Memory shared(unaligned, static_cast<int>(taps));
    const Steps steps(taps, C, K, LANES);
    const SiteTable<BM> table{rows, order, masks, valid, M, steps.taps};
    const int channels_out = static_cast<int>(K), across = ceil_div(channels_out, BN), chunks_of_tap = steps.per_tap / 4;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(shared.full + s, COPIERS + 1);
            barrier_init(shared.empty + s, ItsReaders::COUNT);
        }
        for (int s = 0; s < 2; ++s) {
            barrier_init(shared.row_full + s, COPIERS);
            barrier_init(shared.row_empty + s, MULTIPLIERS);
        }
        barrier_init(shared.copiers, COPIERS);
        barrier_init(shared.multipliers, MULTIPLIERS);
        barrier_init_fence();
    }
    const auto first_row = [&](int tile) { return Turns<BM>::first_row(tile, across); };
    const auto end_row = [&](int tile) { return min(first_row(tile) + Turns<BM>::height(tile), M); };
    const Its<BM> turns(its_turns, cuts, shared.cuts, M, shares, across);
    __syncthreads();
    const int turns_here = turns.count();

    if (threadIdx.x >= MULTIPLIERS) {
        give_registers<COPYING>();
        const int thread = threadIdx.x - MULTIPLIERS, own_unit = thread % 8, own_row = thread / 8;
        const int vectors_of_row = static_cast<int>(C) / LANES;
        u8* const to = shared.ring + swizzled(own_row, own_unit);  // in the first stage; the same place in every pass
        Meeting all(shared.copiers);
        Stage<STAGES> stage;
        Stage<2> row_stage;
        // Find the taps of a tile.
        const auto prepare = [&](int tile, int which) {
            int* const list = shared.list + which * (steps.taps + 1);
            all.sync();  // who reads the list that was there is done
            if (thread < 32) {
                const int count = table.list(first_row(tile), end_row(tile), list + 1);
                if (thread == 0) list[0] = count;
            }
            all.sync();
        };
        // Begin to copy which rows of x the taps of a tile read, from number `from` of those here to `to`, for the rows of the tile
        // that this warp copies.
        constexpr int OF_WARP = BM / (COPIERS / 32), IN_PASS = 32 / 8, FIRST = 2;
        int* const sources = shared.sources + thread / 32 * (steps.taps * OF_WARP);
        const auto look_up = [&](int tile, const int* list, int from, int to) {
            const int first = turns.first_tap(tile);
            to = min(to, min(list[-1], turns.end_tap(tile)) - first);
            for (int number = from; number < to; ++number)
#pragma unroll
                for (int e = thread % 32; e < OF_WARP; e += 32) {
                    const int row = e / IN_PASS * PASS + thread / 32 * IN_PASS + e % IN_PASS;
                    copy_async_4(sources + number * OF_WARP + e, table.source(list[first + number] >> 8, first_row(tile) + row), true);
                }
        };
        int which = 0, next = turns_here > 0 ? turns.tile(0) : 0;
        if (turns_here > 0) {
            prepare(next, 0);
            look_up(next, shared.list + 1, 0, FIRST);
            copy_async_commit();
            look_up(next, shared.list + 1, FIRST, ALL_TAPS);
        }
        dependent_wait();  // for the packed weights
        for (int turn = 0; turn < turns_here; ++turn, which ^= 1) {
            const int tile = next, from = turns.first_tap(tile), k0 = across > 1 ? tile % across * BN : 0;
            const int here = min(PANELS, steps.panels - k0 / PANEL);  // panels of weights
            const i64 panel_step = static_cast<i64>(steps.chunks) * PANEL_CHUNK;
            const u8* const weights = steps.weights(packed) + k0 / PANEL * panel_step;
            const int* const list = shared.list + which * (steps.taps + 1) + 1;
            const int* const next_list = shared.list + (which ^ 1) * (steps.taps + 1) + 1;
            copy_async_commit();
            if (turn == 0)
                copy_async_wait<1>();
            else
                copy_async_wait<0>();
            __syncwarp();  // the sources are there; in the first turn those of its FIRST taps
            const int chunks = (min(list[-1], turns.end_tap(tile)) - from) * chunks_of_tap, last = max(chunks, 1) - 1;
            const u8* its = weights;  // the chunk of each panel
            int number = -1, part = chunks_of_tap - 1, entry = 0;
            int vectors[PASSES];  // of this thread, in the rows that the tap at hand reads: of x, 16 bytes each; or -1
            for (int i = 0; i <= last; ++i) {  // a tile without taps has one chunk, which nobody multiplies
                if (++part == chunks_of_tap && chunks) {
                    part = 0, entry = list[from + ++number];
                    if (turn == 0 && number == FIRST) {
                        copy_async_wait<0>();
                        __syncwarp();
                    }
                    its = weights + static_cast<i64>((entry >> 8) * chunks_of_tap) * PANEL_CHUNK;
#pragma unroll
                    for (int r = 0; r < PASSES; ++r) {
                        const int row = sources[number * OF_WARP + r * IN_PASS + own_row % IN_PASS];
                        vectors[r] = static_cast<u32>(row) < static_cast<u32>(N) ? row * vectors_of_row + own_unit : -1;
                    }
                }
                barrier_wait(shared.empty + stage.slot, stage.phase ^ 1);
                u8* const at = to + stage.slot * Memory::STAGE;
                u64* const full = shared.full + stage.slot;
                if (elected()) {
                    if (thread < 32) {
                        shared.notes[stage.slot] = (entry & 255) | (i == last ? LAST : 0);
                        barrier_expect(full, chunks ? here * PANEL_CHUNK : 0);
                    }
                    u8* const b = shared.ring + stage.slot * Memory::STAGE + Memory::A;
#pragma unroll
                    for (int j = 0; j < PANELS; ++j)
                        if (j < here && chunks && j % (COPIERS / 32) == thread / 32)
                            bulk_copy(b + j * PANEL_CHUNK, its + j * panel_step, PANEL_CHUNK, full);
                }
                its += PANEL_CHUNK;
                constexpr int TOGETHER = BM / WM;  // rows that are multiplied together
#pragma unroll
                for (int r = 0; r < PASSES; ++r) {
                    constexpr int ITS = (1 << TOGETHER / ROWS_OF_GROUP) - 1;
                    if (entry >> r * PASS / TOGETHER * (TOGETHER / ROWS_OF_GROUP) & ITS)
                        copy_async_16_unless_negative<CACHED>(
                            at + r * PASS * TILE_ROW, reinterpret_cast<const uint4*>(x) + static_cast<u32>(vectors[r] + part * 8),
                            vectors[r]);
                }
                copies_arrive(full);
                stage.advance();
                if (i == min(STAGES - 1, last)) {  // while the ring is full
                    barrier_wait(shared.row_empty + row_stage.slot, row_stage.phase ^ 1);
                    table.find_places(first_row(tile), end_row(tile), shared.places + row_stage.slot * BM,
                                      shared.inside + row_stage.slot * BM, thread, COPIERS);
                    barrier_arrive(shared.row_full + row_stage.slot);
                    row_stage.advance();
                    if (turn + 1 < turns_here) {
                        next = turns.tile(turn + 1);
                        prepare(next, which ^ 1);
                        const int end = min(next_list[-1], turns.end_tap(next));
                        for (int e = turns.first_tap(next) * (BM / 32) + thread; e < end * (BM / 32); e += COPIERS)
                            prefetch(table.source(next_list[e / (BM / 32)] >> 8, first_row(next) + e % (BM / 32) * 32));
                    }
                }
            }
            __syncwarp();  // those of the next tile may take the places of its rows
            if (turn + 1 < turns_here) look_up(next, next_list, 0, ALL_TAPS);
        }
    } else {
        take_registers<MULTIPLYING>();
        dependent_wait();
        const u8* const tables = loaded_later(packed);
        constexpr int ITS = (1 << BM / WM / ROWS_OF_GROUP) - 1;  // groups of rows of a warp
        const int own = ITS << Product::row(0) / (BM / WM) * (BM / WM / ROWS_OF_GROUP);
        constexpr bool TWICE = Product::ASYNC && MT == 2;  // 64 rows, and another 64
        const int second = own & own << 64 / ROWS_OF_GROUP;
        Meeting all(shared.multipliers);
        Stage<STAGES> stage;
        Stage<2> row_stage;
        [[maybe_unused]] u32 rounded[2][MT][4];  // rows as TF32
        const auto release = [&](int slot) { ItsReaders::release(shared.empty + slot); };
        for (int turn = 0; turn < turns_here; ++turn) {
            const int k0 = across > 1 ? turns.tile(turn) % across * BN : 0;
            if (turn == 0 || across > 1)
#pragma unroll 1
                for (int i = threadIdx.x; i < 2 * BN; i += MULTIPLIERS)
                    shared.scale[i] = steps.table(tables, i / BN, k0 + i % BN);
            float acc[MT][NT][4];
            clear(acc);
            int last = -1;  // a stage that is read
            for (bool more = true; more;) {
                barrier_wait(shared.full + stage.slot, stage.phase);
                const int note = ItsReaders::read(shared.notes + stage.slot);
                u8* const a = shared.ring + stage.slot * Memory::STAGE;
                more = !(note & LAST);
                if constexpr (ROUND && !Product::ASYNC) {
                    for (int j = threadIdx.x; j < BM * 8; j += MULTIPLIERS) round_four(a + j * 16);
                    all.sync();
                } else if constexpr (Product::ASYNC && !ROUND) {
                    shared_fence();  // what cp.async wrote, before the tensor cores read it
                }
                if (note & own) {
                    const bool few = TWICE && !(note & second);
                    if constexpr (Product::ASYNC && ROUND) {
                        if (few)
                            Product::template multiply_rounded<1>(acc, rounded, a, a + Memory::A);
                        else
                            Product::multiply_rounded(acc, rounded, a, a + Memory::A);
                    } else if constexpr (TWICE) {
                        if (few)
                            Product::template multiply<1>(acc, a, a + Memory::A);
                        else
                            Product::multiply(acc, a, a + Memory::A);
                    } else {
                        Product::multiply(acc, a, a + Memory::A);
                    }
                    if constexpr (Product::ASYNC) {
                        wgmma_wait<1>();
                        if (last >= 0) release(last);
                        last = stage.slot;
                    } else {
                        release(stage.slot);
                    }
                } else {
                    if (Product::ASYNC && last >= 0) {  // those that copy must not wait for what was read long ago
                        wgmma_wait<0>();
                        release(last);
                        last = -1;
                    }
                    release(stage.slot);
                }
                stage.advance();
            }
            if constexpr (Product::ASYNC) {
                wgmma_wait<0>();
                if (last >= 0) release(last);
            }
            barrier_wait(shared.row_full + row_stage.slot, row_stage.phase);
            if (turn == 0 || across > 1) all.sync();  // scale and bias are there
            const SiteRows its_rows{shared.places + row_stage.slot * BM, shared.inside + row_stage.slot * BM};
            const Result<T, SiteRows> result{residual, y, shared.scale, shared.bias, its_rows, k0, channels_out};
            const int part = turns.part(turns.tile(turn));
            if (part < 0) {
                result.template store<ACTIVATION, true, false, Product>(acc);
            } else {
                float4* const to = reinterpret_cast<float4*>(parts_of_thread<Product>(partials, part));
#pragma unroll
                for (int m = 0; m < MT; ++m)
#pragma unroll
                    for (int n = 0; n < NT; ++n)
                        to[(m * NT + n) * MULTIPLIERS] = make_float4(acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]);
            }
            barrier_arrive(shared.row_empty + row_stage.slot);
            row_stage.advance();
            if (across > 1) all.sync();  // scale and bias may be overwritten
        }
    }
}

template <template <typename, int, int, int, int> class Engine, typename T, int BM, int BN, int WM, int WN, int STAGES,
          bool CACHED, bool ROUND, int ACTIVATION>
__global__ void __launch_bounds__(Engine<T, BM, BN, WM, WN>::THREADS + COPIERS, 1)
    site_conv_pipelined(const T* __restrict__ x,  // the parameters of site_conv
                        const u8* __restrict__ packed, const int* __restrict__ rows, const int* __restrict__ order,
                        const u32* __restrict__ masks, const u16* __restrict__ turns,  // of site_order.cu
                        const int2*, const u8* __restrict__ valid, const T* __restrict__ residual, T* __restrict__ y, i64 N,
                        i64 M, i64 taps, i64 C, i64 K, i64 shares) {
    convolve_pipelined<Engine, T, BM, BN, WM, WN, STAGES, CACHED, ROUND, ACTIVATION, Turns>(
        x, packed, rows, order, masks, turns, nullptr, valid, residual, y, nullptr, N, M, taps, C, K, shares);
}
