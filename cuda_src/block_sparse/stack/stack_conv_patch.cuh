// stack_conv_patch.cuh: the convolution of stack_conv2d.cu with stride 1, from patches of x in shared memory.
//   y[m, i, j, k] = activation(scale[k] * sum(x at (i - top + r * DH, j - left + s * DW) of block m, c] * w[r, s, c, k])
//                              + bias[k] + residual[m, i, j, k])
// Source: as stack_conv2d.cu; the sums are made in the same order.
// Python: sbnet_cupy/block_sparse/stack/stack_conv2d.py; launched by stack_launch.py
// A tile is PATCHES parts of blocks, of TH x TW output pixels each; for 128 bytes of channels at a time, a part with the
// pixels around it is copied once, and all taps read it: tap (r, s) of pixel (i, j) is row (i + r * DH) * width + j + s * DW
// of the patch. Tensor cores take 8 x 8 output pixels, a cell, as a matrix of 64 rows.
// With REST there are channels beyond whole 128 bytes, an even number of units of 16 bytes: a last patch has them, and each
// step of K, of 32 bytes, a tap of its own, so that several share a chunk, in the order of stack_conv.cuh.
// Tiles of less than 64 channels take the first columns of a panel of weights: those of 32 are for results of so few.
// Launch: a persistent grid. Threads that multiply, a warp that copies weights, and three warps that copy patches.
#pragma once

#include "block_sparse/stack/stack_conv.cuh"
#include "core/pipeline.cuh"

constexpr int PATCH_COPIERS = 96, CELL = 8;

// The parts of blocks that are tiles.
template <int TH, int TW, int PATCHES>
struct Parts {
    static constexpr int ACROSS = TW / CELL, PIXELS = TH * TW;
    int down, across;  // parts of a block
    int rows;          // of the stack
    const Problem& g;
    DEVICE Parts(const Problem& g, int rows) : down(g.ph / TH), across(g.pw / TW), rows(rows), g(g) {}

    struct Part {
        int row, i, j;  // a row of the stack, and the part's first pixel in the block
    };
    DEVICE int tiles() const { return ceil_div(rows * down * across, PATCHES); }
    DEVICE Part part(int number) const {
        const int row = number / (down * across), rest = number - row * (down * across), i = rest / across;
        return Part{row, i * TH, (rest - i * across) * TW};
    }
};

// Rows of a tile that are pixels of cells.
template <int TH, int TW, int PATCHES>
struct PatchRows {
    using All = Parts<TH, TW, PATCHES>;
    const All& parts;
    const BlockTable& table;
    int tile;
    bool whole;
    DEVICE typename All::Part at(int row) const {
        const int cell = row % All::PIXELS / 64, in_cell = row % 64, patch = PATCHES > 1 ? row / All::PIXELS : 0;
        typename All::Part p = parts.part(tile * PATCHES + patch);
        p.i += cell / All::ACROSS * CELL + in_cell / CELL, p.j += cell % All::ACROSS * CELL + in_cell % CELL;
        return p;
    }
    DEVICE int pixel(int row) const {
        const auto p = at(row);
        return p.row < parts.rows ? (p.row * parts.g.ph + p.i) * parts.g.pw + p.j : -1;
    }
    DEVICE bool is_inside(int row) const {
        if (whole) return true;
        const auto p = at(row);
        const BlockTable::Block block = table.block(p.row);
        return block.n >= 0 && block.hi * parts.g.ph + p.i < parts.g.P && block.wi * parts.g.pw + p.j < parts.g.Q;
    }
};

// The blocks of x that a patch of height x width pixels may reach into, found once for all its pixels.
DEVICE int near_blocks(int pixels, int block) { return (pixels + block - 2) / block + 1; }
struct NearBlocks {
    const Problem& g;
    Divisor high, wide;  // a block
    int across, count;   // blocks side by side; all
    DEVICE NearBlocks(const Problem& g, int height, int width)
        : g(g), high(g.bh), wide(g.bw), across(near_blocks(width, g.bw)), count(near_blocks(height, g.bh) * across) {}

    struct alignas(16) Block {
        int begin;   // its first pixel in the stack, or -1
        int y, x;    // where that lies in the patch: outside of it, too
        u32 limits;  // the rows and columns of the patch from here on, 16 bits each, lie outside the image
    };
    // Block `number` of a patch whose first pixel lies at (y, x) from the corner of a row's block.
    DEVICE Block find(const BlockTable& table, int row, int y, int x, int number) const {
        const BlockTable::Block block = table.block(row);
        const int i = number / across, j = number - i * across;
        const int above = g.top > 0 ? ceil_div(g.top, g.bh) : 0, beside = g.left > 0 ? ceil_div(g.left, g.bw) : 0;
        const int v = high.of(y + above * g.bh) - above + i, h = wide.of(x + beside * g.bw) - beside + j;
        const int hi = block.hi + v, wi = block.wi + h, found = table.row(block.n, hi, wi);
        const int at_y = v * g.bh - y, at_x = h * g.bw - x;
        const u32 rows = static_cast<u32>(min(max(g.H - hi * g.bh + at_y, 0), 0xffff));
        const u32 columns = static_cast<u32>(min(max(g.W - wi * g.bw + at_x, 0), 0xffff));
        return Block{found < 0 ? -1 : found * (g.bh * g.bw), at_y, at_x, rows << 16 | columns};
    }
    // The pixel of the stack x at (i, j) of a patch with such blocks, or -1.
    DEVICE int pixel(const Block* blocks, int i, int j) const {
        const int v = high.of(i - blocks[0].y), h = wide.of(j - blocks[0].x);
        const Block block = blocks[v * across + h];
        const bool inside = static_cast<u32>(i) < block.limits >> 16 && static_cast<u32>(j) < (block.limits & 0xffff);
        return inside && block.begin >= 0 ? block.begin + (i - block.y) * g.bw + j - block.x : -1;
    }
};

// The steps of K of the channels beyond whole chunks: all of a tap, then those of the next.
struct RestSteps {
    const Problem& g;
    int rest, width, unit = 0, shift = 0, column = 0;  // units of a pixel; pixels across a patch
    DEVICE RestSteps(const Problem& g, int rest, int width) : g(g), rest(rest), width(width) {}
    DEVICE PatchStep next() {
        const PatchStep step{shift, unit};
        unit += 2;
        if (unit == rest) {
            unit = 0, shift += g.DW;
            if (++column == g.S) column = 0, shift += g.DH * width - g.S * g.DW;
        }
        return step;
    }
};

// Shared memory, from a multiple of 1024 bytes on.
template <int BN, int STAGES, int PATCH_STAGES, int TABLES>
struct PatchMemory {
    u8 *weights, *patches;
    float* tables;  // [2][TABLES][BN]: scale and bias, and what columns are scaled by last
    u64 *full, *empty, *patch_full, *patch_empty, *table_full, *table_empty, *copiers;
    int* offsets;  // of a patch's pixels, or -1; then the blocks that patches reach into
    DEVICE PatchMemory(u8* unaligned, int patch_bytes) {
        weights = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
        patches = weights + STAGES * BN * TILE_ROW;
        tables = reinterpret_cast<float*>(patches + PATCH_STAGES * patch_bytes);
        full = reinterpret_cast<u64*>(tables + 2 * TABLES * BN), empty = full + STAGES;
        patch_full = empty + STAGES, patch_empty = patch_full + PATCH_STAGES;
        table_full = patch_empty + PATCH_STAGES, table_empty = table_full + 2, copiers = table_empty + 2;
        offsets = reinterpret_cast<int*>(copiers + 2);  // a multiple of 16 bytes
    }
    DEVICE NearBlocks::Block* near(int pixels) const {
        return reinterpret_cast<NearBlocks::Block*>(offsets + ceil_div(pixels, 4) * 4);
    }
};

template <template <typename, int, int, int, int> class Engine, typename T, int TH, int TW, int PATCHES, int BN, int WM,
          int WN, int STAGES, int PATCH_STAGES, bool VECTOR_OUT, int ACTIVATION, int BLOCKS, bool REST, int LIES>
__global__ void __launch_bounds__(Engine<T, TH * TW * PATCHES, BN, WM, WN>::THREADS + 32 + PATCH_COPIERS, BLOCKS)
    stack_conv_patch(STACK_CONV_PARAMETERS) {
    constexpr int BM = TH * TW * PATCHES;
    using Product = Engine<T, BM, BN, WM, WN>;
    using All = Parts<TH, TW, PATCHES>;
    constexpr int MULTIPLIERS = Product::THREADS, MT = Product::MT, NT = Product::NT, LANES = 16 / sizeof(T);
    constexpr int PANELS = ceil_div(BN, PANEL), COLUMNS = min_of(BN, PANEL);  // of each panel
    constexpr bool FOUR_STEPS = BLOCKS == 1 || BN < PANEL;  // begun together: else registers would spill where there are few
    constexpr bool ALONE = REST && PATCH_STAGES == 1;  // what is left of the channels is all
    constexpr bool SHIFTED = Product::ASYNC && MULTIPLIERS == 256 && BLOCKS == 1;  // registers, to those that multiply
    static_assert(TH % CELL == 0 && TW % CELL == 0, "cells of 8 x 8 pixels");

    DYNAMIC_SHARED(u8, unaligned);
    const Problem g(C, K, bh, bw, ph, pw, H, W, P, Q, R, S, SH, SW, DH, DW, top, left, pitch);
    const Order order(g.C, LANES, g.R * g.S);
    const int groups = ALONE ? 1 : order.groups + (REST ? 1 : 0);  // patches of a tile
    const int height = TH + (g.R - 1) * g.DH, width = TW + (g.S - 1) * g.DW, patch_pixels = PATCHES * height * width;
    const int patch_bytes = ceil_div(patch_pixels * TILE_ROW, 1024) * 1024;
    const PatchMemory<BN, STAGES, PATCH_STAGES, TABLES<ACTIVATION>> shared(unaligned, patch_bytes);
    const int panels = ceil_div(g.K, PANEL), across = ceil_div(g.K, BN);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) barrier_init(shared.full + s, 1), barrier_init(shared.empty + s, MULTIPLIERS / 32);
        for (int s = 0; s < PATCH_STAGES; ++s)
            barrier_init(shared.patch_full + s, PATCH_COPIERS), barrier_init(shared.patch_empty + s, MULTIPLIERS / 32);
        for (int s = 0; s < 2; ++s)
            barrier_init(shared.table_full + s, 1), barrier_init(shared.table_empty + s, MULTIPLIERS / 32);
        barrier_init(shared.copiers, PATCH_COPIERS);
        barrier_init_fence();
    }
    begin_launch(settled);
    const int rows = Problem::narrow(clamp(*bin_counts, 0, M));
    const BlockTable table{indices, grid, Problem::narrow(N), Problem::narrow(GH), Problem::narrow(GW), rows};
    __syncthreads();
    const All parts(g, rows);
    const int tiles = parts.tiles() * across, step = gridDim.x, first = blockIdx.x;
    const bool resident = step % across == 0 && order.chunks <= STAGES;  // the weights of all tiles are the first tile's

    bool waited = !settled;
    const auto wait = [&] {  // before x, the residual, and the memory of y
        if (!waited) dependent_wait();
        waited = true;
    };

    if (threadIdx.x >= MULTIPLIERS) {
        give_registers<SHIFTED ? 88 : 0>();
        if (threadIdx.x >= MULTIPLIERS + PATCH_COPIERS) {
            const i64 panel_step = static_cast<i64>(order.chunks) * PANEL_CHUNK;
            Stage<STAGES> stage;
            Stage<2> its_tables;
            int issued = 0;
            for (int tile = first; tile < tiles; tile += step) {
                const int k0 = tile % across * BN, here = min(PANELS, panels - k0 / PANEL);
                const u8* weights = packed + tables_bytes(g.K) + k0 / PANEL * panel_step + k0 % PANEL * TILE_ROW;
                const int count = resident && tile != first ? 0 : order.chunks;
                for (int i = 0; i < count; ++i) {
                    u64* const full = shared.full + stage.slot;
                    barrier_wait(shared.empty + stage.slot, stage.phase ^ 1);
                    if (elected()) {
                        barrier_expect(full, here * (COLUMNS * TILE_ROW));
#pragma unroll
                        for (int j = 0; j < PANELS; ++j)
                            if (j < here)
                                bulk_copy(shared.weights + stage.slot * (BN * TILE_ROW) + j * PANEL_CHUNK,
                                          weights + j * panel_step, COLUMNS * TILE_ROW, full);
                    }
                    weights += PANEL_CHUNK;
                    stage.advance();
                    if (++issued == STAGES) wait();
                }
                u64* const full = shared.table_full + its_tables.slot;
                float* const to = shared.tables + its_tables.slot * (TABLES<ACTIVATION> * BN);
                barrier_wait(shared.table_empty + its_tables.slot, its_tables.phase ^ 1);
                if (elected()) {
                    barrier_expect(full, TABLES<ACTIVATION> * here * (COLUMNS * 4));
                    bulk_copy(to, packed + k0 * 4, here * (COLUMNS * 4), full);
                    bulk_copy(to + BN, packed + (panels * PANEL + k0) * 4, here * (COLUMNS * 4), full);
                    if constexpr (scales_last(ACTIVATION)) {
                        const u8* const last = reinterpret_cast<const u8*>(scaled + k0);
                        bulk_copy(to + 2 * BN, last, here * (COLUMNS * 4), full);
                        bulk_copy(to + 3 * BN, last + last_channels(g.K) * 4, here * (COLUMNS * 4), full);
                    }
                }
                its_tables.advance();
            }
            wait();
        } else {
            constexpr int ITEMS = BLOCKS > 1 ? 2 : 4;  // copies under way
            const int thread = threadIdx.x - MULTIPLIERS, units = units_of_pixel<T, true>(g);
            const Divisor part_pixels(height * width), pixels_across(width);
            Meeting all(shared.copiers);
            Stage<PATCH_STAGES> stage;
            for (int tile = first; tile < tiles; tile += step) {
                const NearBlocks near(g, recomputed(height), recomputed(width));  // again: registers are few
                NearBlocks::Block* const blocks = shared.near(recomputed(patch_pixels));
                if (thread < PATCHES * near.count) {  // one block each
                    const int patch = thread / near.count;
                    const typename All::Part part = parts.part(tile / across * PATCHES + patch);
                    const int number = thread - patch * near.count;
                    blocks[thread] = near.find(table, part.row, part.i - g.top, part.j - g.left, number);
                }
                all.sync();  // and the last tile's offsets are read
#pragma unroll 1
                for (int q = thread; q < patch_pixels; q += PATCH_COPIERS) {
                    const int patch = PATCHES > 1 ? part_pixels.of(q) : 0, in_patch = q - patch * (height * width);
                    const int i = pixels_across.of(in_patch);
                    const int pixel = near.pixel(blocks + patch * near.count, i, in_patch - i * width);
                    shared.offsets[q] = pixel < 0 ? -1 : pixel * units;
                }
                all.sync();
                wait();
                for (int group = 0; group < groups; ++group) {
                    barrier_wait(shared.patch_empty + stage.slot, stage.phase ^ 1);
                    u8* const patch = shared.patches + stage.slot * patch_bytes;
                    const bool rest = REST && group == order.groups;
                    const int across = !rest || order.rest > 4 ? 8 : order.rest, there = rest ? order.rest : 8;  // units
                    const int unit = thread % across, pass = PATCH_COPIERS / across;  // pixels that are copied at once
                    for (int q0 = thread / across; q0 < patch_pixels; q0 += ITEMS * pass) {
                        int offsets[ITEMS];
    #pragma unroll
                        for (int e = 0; e < ITEMS; ++e) offsets[e] = shared.offsets[min(q0 + e * pass, patch_pixels - 1)];
    #pragma unroll
                        for (int e = 0; e < ITEMS; ++e)
                            if (q0 + e * pass < patch_pixels && unit < there)
                                copy_channels<true, false>(patch + swizzled(q0 + e * pass, unit), x, offsets[e],
                                                           (group * 8 + unit) * LANES, g.C);
                    }
                    copies_arrive(shared.patch_full + stage.slot);
                    stage.advance();
                }
                if (residual) {  // it is read at the end
                    const PatchRows<TH, TW, PATCHES> its{parts, table, tile / across, true};
                    const Result<T, PatchRows<TH, TW, PATCHES>, LIES> result{
                        residual, y, nullptr, nullptr, its, tile % across * BN, g.K, Problem::narrow(pitch_added)};
                    result.template prefetch<BM, BN>(thread, PATCH_COPIERS);
                }
            }
            wait();
        }
    } else {
        take_registers<SHIFTED ? 208 : 0>();
        const int lane = threadIdx.x % 32;
        Stage<STAGES> stage;
        Stage<PATCH_STAGES> patch_stage;
        Stage<2> its_tables;
        const bool whole = g.whole(table);
        int cells[MT];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            const int row = Product::row(m), cell = row % All::PIXELS / 64;
            const int corner = row / All::PIXELS * height + cell / All::ACROSS * CELL;
            cells[m] = Product::patch_row(corner * width + cell % All::ACROSS * CELL, row % 64, width);
        }
        for (int tile = first; tile < tiles; tile += step) {
            float acc[MT][NT][4];
            clear(acc);
            int last = -1, last_patch = 0;
            const auto release = [&](u64* empty) {
                if constexpr (!Product::ASYNC) __syncwarp();
                if (lane == 0) barrier_arrive(empty);
            };
            if (resident) stage = Stage<STAGES>();  // where they lie
            const auto multiplied = [&](bool first_of_patch) {  // a chunk: release what the one before has read
                if constexpr (Product::ASYNC) {
                    wgmma_wait<1>();  // the product before has ended
                    if (last >= 0 && !resident) release(shared.empty + last);
                    if (PATCH_STAGES > 1 && first_of_patch) release(shared.patch_empty + last_patch);
                    last = stage.slot;
                } else if (!resident) {
                    release(shared.empty + stage.slot);
                }
                stage.advance();
            };
            for (int group = 0; group < groups; ++group) {
                barrier_wait(shared.patch_full + patch_stage.slot, patch_stage.phase);
                if constexpr (Product::ASYNC) shared_fence();  // what cp.async wrote, before the tensor cores read it
                const u8* const patch = shared.patches + patch_stage.slot * patch_bytes;
                if (!ALONE && (!REST || group < order.groups)) {
                    for (int r = 0; r < g.R; ++r)
                        for (int s = 0; s < g.S; ++s) {
                            barrier_wait(shared.full + stage.slot, stage.phase);
                            Product::multiply_patch(acc, patch, cells, r * g.DH * width + s * g.DW, width,
                                                    shared.weights + stage.slot * (BN * TILE_ROW));
                            multiplied(group > 0 && r == 0 && s == 0);
                        }
                } else {
                    RestSteps steps(g, order.rest, width);
#pragma unroll 1
                    for (int left = order.rest * order.taps / 2; left > 0; left -= 4) {
                        barrier_wait(shared.full + stage.slot, stage.phase);
                        const u8* const weights = shared.weights + stage.slot * (BN * TILE_ROW);
                        if (FOUR_STEPS && left >= 4) {
                            const PatchStep four[4] = {steps.next(), steps.next(), steps.next(), steps.next()};
                            Product::multiply_steps(acc, patch, cells, four, width, weights, 0);
                        } else {
#pragma unroll 1
                            for (int step = 0; step < min(left, 4); ++step) {
                                const PatchStep one[1] = {steps.next()};
                                Product::multiply_steps(acc, patch, cells, one, width, weights, step);
                            }
                        }
                        multiplied(group > 0 && left == order.rest * order.taps / 2);
                    }
                }
                last_patch = patch_stage.slot;
                if constexpr (Product::ASYNC && PATCH_STAGES == 1) wgmma_wait<0>();  // the next patch needs this one's place
                if constexpr (!Product::ASYNC || PATCH_STAGES == 1) release(shared.patch_empty + last_patch);
                patch_stage.advance();
            }
            if constexpr (Product::ASYNC) {
                wgmma_wait<0>();
                if (!resident) release(shared.empty + last);
                if constexpr (PATCH_STAGES > 1) release(shared.patch_empty + last_patch);
            }
            wait();
            barrier_wait(shared.table_full + its_tables.slot, its_tables.phase);
            const float* const scale = shared.tables + its_tables.slot * (TABLES<ACTIVATION> * BN);
            const PatchRows<TH, TW, PATCHES> its{parts, table, tile / across, whole};
            const Result<T, PatchRows<TH, TW, PATCHES>, LIES> result{
                residual, y, scale, scale + BN, its, tile % across * BN, g.K, Problem::narrow(pitch_added),
                Problem::narrow(pitch_out), unfolding_of<LIES>(g, unfold_down, unfold_across),
                {scale + 2 * BN, scale + 3 * BN}};
            result.template store<ACTIVATION, VECTOR_OUT, false, Product>(acc);
            __syncwarp();
            if (lane == 0) barrier_arrive(shared.table_empty + its_tables.slot);
            its_tables.advance();
        }
        wait();
    }
    if (clear_rows) clear_rest<VECTOR_OUT>(y, static_cast<i64>(rows) * g.ph * g.pw * g.K, M * g.ph * g.pw * g.K);
}
