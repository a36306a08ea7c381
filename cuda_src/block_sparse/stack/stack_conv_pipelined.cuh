// stack_conv_pipelined.cuh: the convolution of stack_conv2d.cu, where some warps copy and the others multiply.
//   y[m, i, j, k] = activation(scale[k] * sum(x at (i * SH - top + r * DH, j * SW - left + s * DW) of block m, c] * w[r, s, c, k])
//                              + bias[k] + residual[m, i, j, k])
// With a SHORTCUT, a second product is added before scale and bias: of pixel (i * down_also, j * across_also) of the stack
// `also`, whose channels are whole chunks, and the 1x1 kernel of packed_also, whose bias is added, and whose scale is 1.
// PARTS is the most into which each tile of the last round may be cut, see Rounds.
// With IMAGES it is the convolution of fused_conv.cu: from images to images, at the pixels of the listed blocks.
// With BULK, for windows of one pixel, the copy engine brings pixels: one thread asks for 64 at a time, by a tensor map.
// Source: as stack_conv2d.cu; warps of different roles as in CUTLASS (Thakkar et al. 2023).
// Python: sbnet_cupy/block_sparse/stack/stack_conv2d.py; launched by stack_launch.py
// Compute capability 9.0 and newer.
// Launch: a persistent grid, SPLIT thread blocks for each tile. See cuda_src/README.md for the picture.
#pragma once

#include "block_sparse/stack/stack_conv.cuh"
#include "block_sparse/stack/stack_pipeline.cuh"
#include "core/cluster.cuh"
#include "core/tensor_map.cuh"

constexpr int COPIERS = 128;  // threads of a team that copies

// How a thread copies its part of a tile's chunks, one after another: of every 16th row one vector. What a chunk needs is
// found before it: threads that copy issue one instruction after another, and all others wait for them.
// With a SHORTCUT the last chunks are those of the pixels of another stack at the strides of Shortcut.
struct Shortcut {
    int channels, down, across;  // of its pixels; the strides
    // The pixel of its stack of pixel p of y.
    DEVICE int pixel(const Problem& g, int p) const {
        const int line = static_cast<int>(static_cast<u32>(p) / static_cast<u32>(g.pw)), j = p - line * g.pw;
        return (line * down) * (g.pw * across) + j * across;
    }
};
template <bool POINTWISE, bool VECTOR, bool CACHED, int BM, bool SHORTCUT, bool CUT, typename T>
struct LeanCopier {
    static constexpr int PASS = COPIERS / 8, PASSES = BM / PASS, LANES = 16 / sizeof(T);
    const T *__restrict__ x, *__restrict__ also;  // the stacks; x begins with the first channel that the tile reads
    const Order& order;
    int C, unit, to;                // channels that it reads; the thread's unit of a chunk, and where its first goes in a stage
    const int *offsets, *its;       // of the thread's rows, at the first tap and the next one
    int mine[POINTWISE ? PASSES : 1];  // where the thread's rows of x begin, where they are the same for all chunks
    int beside[SHORTCUT ? PASSES : 1];  // those of the shortcut
    int chunk, tap, c;              // this chunk; its tap, and the channel of the thread's vector
    int height;                     // rows of the tile that are copied: if CUT a multiple of 64, else BM

    DEVICE LeanCopier(const T* x, const T* also, const int* all_offsets, const Order& order, const Problem& g,
                      int channels, const Shortcut& shortcut, int thread, int p0, int pixels, int first, int height)
        : x(x), also(also), order(order), C(channels), unit(thread % 8), to(swizzled(thread / 8, unit)),
          offsets(all_offsets + thread / 8 * PASSES), its(offsets), chunk(first), tap(0), c(0),
          height(height) {
        if constexpr (POINTWISE) {
            const int units = units_of_pixel<T, VECTOR>(g);
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass) mine[pass] = min(p0 + thread / 8 + pass * PASS, pixels - 1) * units;
            c = (first * 8 + unit) * LANES;
        } else {
            const int group = first / order.taps;
            tap = first - group * order.taps, its += tap * BM, c = (group * 8 + unit) * LANES;
        }
        if constexpr (SHORTCUT) {
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass)
                beside[pass] = shortcut.pixel(g, min(p0 + thread / 8 + pass * PASS, pixels - 1)) * (shortcut.channels / LANES);
        }
    }

    // Begin to copy this chunk. Rows past the last pixel may be any.
    DEVICE void copy(u8* stage) const {
        if (SHORTCUT && chunk >= order.chunks) {
            vectors<true>(stage, also, beside, ((chunk - order.chunks) * 8 + unit) * LANES, true);
        } else if constexpr (POINTWISE) {
            vectors<true>(stage, x, mine, c, c < C);
        } else if (chunk < order.groups * order.taps) {
            vectors<false>(stage, x, its, c, true);
        } else {
            int its_tap, its_unit;
            order.of_rest(chunk, unit, its_tap, its_unit);
            const bool real = its_tap < order.taps && its_unit * LANES < C;
            vectors<false>(stage, x, offsets + (real ? its_tap : 0) * BM, its_unit * LANES, real);
        }
    }
    // Go on to the next one.
    DEVICE void advance() {
        ++chunk;
        if constexpr (POINTWISE) {
            c += 8 * LANES;
        } else {
            its += BM;
            if (++tap == order.taps) tap = 0, its = offsets, c += 8 * LANES;
        }
    }

private:
    // `from` is in registers, or in shared memory.
    template <bool REGISTERS>
    DEVICE void vectors(u8* stage, const T* __restrict__ x, const int* from, int channel, bool real) const {
        if (!CUT || height == BM) {
            copy_rows<REGISTERS, false>(stage, x, from, channel, real);
        } else {
            copy_rows<REGISTERS, true>(stage, x, from, channel, real);
        }
    }
    template <bool REGISTERS, bool SOME>
    DEVICE void copy_rows(u8* stage, const T* __restrict__ x, const int* from, int channel, bool real) const {
#pragma unroll
        for (int pass = 0; pass < PASSES; pass += 4) {
            if (SOME && pass * PASS >= height) break;
            int four[4];
            if constexpr (REGISTERS) {
#pragma unroll
                for (int e = 0; e < 4; ++e) four[e] = from[pass + e];
            } else {
                const int4 loaded = *reinterpret_cast<const int4*>(from + pass);
                four[0] = loaded.x, four[1] = loaded.y, four[2] = loaded.z, four[3] = loaded.w;
            }
#pragma unroll
            for (int e = 0; e < 4; ++e)
                copy_channels<VECTOR, CACHED>(stage + to + (pass + e) * (PASS * TILE_ROW), x, real ? four[e] : -1, channel, C);
        }
    }
};

// The packed weights of a tile's columns, chunk after chunk: up to PANELS panels.
template <int PANELS, bool SHORTCUT>
struct TileWeights {
    const u8 *own, *also;  // the first chunk's; the shortcut's first chunk's
    i64 step, step_also;   // from panel to panel, in bytes
    int count, here;       // chunks before those of the shortcut; panels that there are
    // Begin to copy those of chunk i.
    DEVICE void copy(u8* stage, int i, u64* bar) const {
        barrier_expect(bar, here * PANEL_CHUNK);
        const bool is_own = !SHORTCUT || i < count;
        const u8* const from = is_own ? own + i * PANEL_CHUNK : also + (i - count) * PANEL_CHUNK;
        const i64 next = is_own ? step : step_also;
#pragma unroll
        for (int j = 0; j < PANELS; ++j)
            if (j < here) bulk_copy(stage + j * PANEL_CHUNK, from + j * next, PANEL_CHUNK, bar);
    }
};

// The parameter for the pixels of a stack: a map of boxes of 64 rows and 128 bytes of channels, or nothing, as a number.
template <bool BULK>
struct PixelMap {
    using Type = i64;
};
template <>
struct PixelMap<true> {
    using Type = TensorMap;
};
constexpr int BOX_ROWS = 64;

// The boxes of a tile of BM pixels from p on, of an array of lines of `line` pixels. A box is part of a line, or whole lines.
template <int BM>
struct TileBoxes {
    static constexpr int COUNT = BM / BOX_ROWS;
    int across[COUNT], down[COUNT];
    DEVICE TileBoxes(int p, int line) {
#pragma unroll
        for (int box = 0; box < COUNT; ++box) {
            const int first = p + box * BOX_ROWS;
            down[box] = static_cast<int>(static_cast<u32>(first) / static_cast<u32>(line)), across[box] = first - down[box] * line;
        }
    }
    // Begin to copy 128 bytes of channels from c on, of the first `height` pixels.
    DEVICE void copy(u8* stage, const TensorMap& map, int c, int height, u64* bar) const {
        barrier_expect(bar, height * TILE_ROW);
#pragma unroll
        for (int box = 0; box < COUNT; ++box)
            if (box * BOX_ROWS < height) copy_box(stage + box * (BOX_ROWS * TILE_ROW), map, c, across[box], down[box], bar);
    }
};

// Tiles in the order in which thread blocks take them, `step` at a time. If so few are left for the last round that there are
// thread blocks for each of their parts, these tiles are cut into up to PARTS, a number of rows each: the round is as much
// shorter, and each sum is made as before.
template <int BM, int PARTS>
struct Rounds {
    int across, whole, parts, count;  // tiles side by side; tiles that are not cut, and parts of the others; all together
    DEVICE Rounds(int tiles, int across, int step) : across(across), whole(tiles), parts(1), count(tiles) {
        if constexpr (PARTS > 1) {
            const int rest = static_cast<int>(static_cast<u32>(tiles) % static_cast<u32>(step));
            parts = PARTS;
            while (parts > 1 && rest * parts > step) parts = parts % 2 ? 1 : parts / 2;
            whole = tiles - rest, count = whole + rest * parts;
        }
    }
    struct Tile {
        int p0, k0, height;  // first pixel and output channel; rows
    };
    template <int BN>
    DEVICE Tile tile(int number) const {
        int tile = number, part = 0, height = BM;
        if (PARTS > 1 && number >= whole) {
            const int cut = (number - whole) / parts;
            tile = whole + cut, part = number - whole - cut * parts, height = BM / parts;
        }
        const int tile_m = tile / across;
        return Tile{tile_m * BM + part * height, (tile - tile_m * across) * BN, height};
    }
};

// The sums that a thread block gets from those of its cluster: each sends rows of its tile to each. [SPLIT][ROWS][PITCH]
// floats. Of the COUNT floats of a vector of channels, those that four lanes store at once lie side by side.
template <int BM, int BN, int SPLIT, int COUNT>
struct SharedSums {
    static constexpr int ROWS = ceil_div(BM, SPLIT), PITCH = BN + 16, BYTES = SPLIT * ROWS * PITCH * 4;
    static DEVICE int first_row(int rank) { return BM * rank / SPLIT; }
    static DEVICE int rank_of(int row) { return ((row + 1) * SPLIT - 1) / BM; }
    // Four floats `quarter` of the vector at a column, of a row of the thread block's own.
    static DEVICE int place(int from, int row, int column, int quarter) {
        return (from * ROWS + row) * PITCH + column / (4 * COUNT) * (4 * COUNT) + quarter * 16 + column / COUNT % 4 * 4;
    }
};

// Shared memory, from a multiple of 1024 bytes on. BYTES are those of RESULTS staged results, or of shared sums.
template <int BM, int BN, int STAGES, int RESULTS, int BYTES>
struct PipelineMemory {
    static constexpr int A = BM * TILE_ROW, B = BN * TILE_ROW, STAGE = A + B;
    u8 *ring, *results;
    float *scale, *bias;
    u64 *full, *empty;                  // of each stage
    u64 *result_full, *result_empty;    // of each staged result
    u64 *copiers, *multipliers;         // barriers among themselves
    int* inside;               // [BM]
    int* offsets;              // [taps][BM]: pixels of the stack, or -1
    DEVICE explicit PipelineMemory(u8* unaligned) {
        ring = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
        results = ring + STAGES * STAGE;
        scale = reinterpret_cast<float*>(results + BYTES);
        bias = scale + BN;
        full = reinterpret_cast<u64*>(bias + BN), empty = full + STAGES;
        result_full = empty + STAGES, result_empty = result_full + RESULTS;
        copiers = result_empty + RESULTS, multipliers = copiers + 1;
        inside = reinterpret_cast<int*>(multipliers + 1);
        offsets = inside + BM;
    }
};

template <template <typename, int, int, int, int> class Engine, typename T, int BM, int BN, int WM, int WN, int STAGES,
          int SPLIT, bool PARTIALS, bool POINTWISE, bool VECTOR_IN, bool VECTOR_OUT, bool ROUND, int ACTIVATION,
          bool CACHED, int RESULTS, int BLOCKS, bool SHORTCUT, int PARTS, bool IMAGES, bool BULK, int TEAMS, bool GROUPED>
__global__ void __launch_bounds__(Engine<T, BM, BN, WM, WN>::THREADS + TEAMS * COPIERS, BLOCKS)
    stack_conv_pipelined(const T* __restrict__ also, const u8* __restrict__ packed_also, STACK_CONV_PARAMETERS,
                         i64 channels_also, i64 down_also, i64 across_also,
                         const __grid_constant__ typename PixelMap<BULK && SHORTCUT>::Type map_also,
                         const __grid_constant__ typename PixelMap<BULK>::Type map) {
    using Product = Engine<T, BM, BN, WM, WN>;
    constexpr int MULTIPLIERS = Product::THREADS, MT = Product::MT, NT = Product::NT, LANES = 16 / sizeof(T);
    constexpr int PANELS = BN / PANEL, RESULT_PITCH = Staged<T, BN>::PITCH;
    // Registers of a thread at launch. Of large tiles those that copy keep few, and those that multiply take the others over.
    constexpr bool SHIFTED = Product::ASYNC && BM * BN >= (TEAMS == 1 ? 256 : 128) * 128;
    constexpr int LAUNCHED = 65536 / ((MULTIPLIERS + TEAMS * COPIERS) * BLOCKS) / 8 * 8;
    constexpr int KEPT = TEAMS == 1 || BM * BN == 128 * 128 ? 96 : BM == 192 ? 48 : 64;
    constexpr int TAKEN = (LAUNCHED + (LAUNCHED - KEPT) * TEAMS * COPIERS / MULTIPLIERS) / 8 * 8;
    constexpr int ALL_COPIERS = TEAMS * COPIERS;
    constexpr int RESIDUAL_COPIERS = BULK ? COPIERS / 2 : ALL_COPIERS;  // the last of those that copy
    constexpr bool CLUSTERED = SPLIT > 1 && !PARTIALS;
    using Team = Cluster<PARTIALS ? 1 : SPLIT>;
    using Sums = SharedSums<BM, BN, SPLIT, LANES>;
    using Memory = PipelineMemory<BM, BN, STAGES, CLUSTERED ? 1 : RESULTS, CLUSTERED ? Sums::BYTES : RESULTS * BM * RESULT_PITCH>;
    static_assert(RESULTS == 0 || (SPLIT == 1 && VECTOR_OUT), "whole results are staged, in vectors");
    static_assert(!IMAGES || (RESULTS == 0 && !PARTIALS && !POINTWISE && !SHORTCUT), "results go to pixels one by one");
    static_assert(!GROUPED || (PANELS == 1 && VECTOR_IN && !SHORTCUT), "a tile reads the channels of one panel, in vectors");
    static_assert(!BULK || (POINTWISE && VECTOR_IN && !GROUPED && TEAMS == 1), "boxes are neighbouring pixels");
    static_assert(TEAMS <= 2, "teams take turns by the parity of a count");
    static_assert(PARTS == 1 || (SPLIT == 1 && BM / PARTS % 64 == 0 && MT <= 2), "parts of whole passes and products");

    DYNAMIC_SHARED(u8, unaligned);
    const Memory shared(unaligned);
    const Problem g(C, K, bh, bw, ph, pw, H, W, P, Q, R, S, SH, SW, DH, DW, top, left);
    const ChannelGroups by_group{Problem::narrow(group_in), Problem::narrow(group_out), Problem::narrow(span)};
    const int channels = GROUPED ? by_group.span : g.C;
    const Order order(channels, LANES, POINTWISE ? 1 : g.R * g.S);
    const int panels = ceil_div(g.K, PANEL), across = ceil_div(g.K, BN);
    const Shortcut shortcut{Problem::narrow(channels_also), Problem::narrow(down_also), Problem::narrow(across_also)};
    const int chunks_also = SHORTCUT ? shortcut.channels / (8 * LANES) : 0, chunks = order.chunks + chunks_also;
    const int rank = blockIdx.x % SPLIT, first = share_of(chunks, rank, SPLIT), count = share_of(chunks, rank + 1, SPLIT) - first;
    const int own = SHORTCUT ? max(0, min(order.chunks - first, count)) : count;  // chunks that are no shortcut's
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(shared.full + s, BULK ? 2 : COPIERS + 1);
            barrier_init(shared.empty + s, MULTIPLIERS / 32);
        }
        for (int s = 0; s < RESULTS; ++s) {
            barrier_init(shared.result_full + s, RESIDUAL_COPIERS);
            barrier_init(shared.result_empty + s, MULTIPLIERS / 32);
        }
        if constexpr (CLUSTERED) barrier_init(shared.result_full, 1);
        barrier_init(shared.copiers, ALL_COPIERS);
        barrier_init(shared.multipliers, MULTIPLIERS);
        barrier_init_fence();
        if constexpr (BULK) prefetch_map(map);
        if constexpr (BULK && SHORTCUT) prefetch_map(map_also);
        // The first tile of pixels brings its weights, all there are, to the L2 cache while the kernel ahead still runs.
        // A prefetch may come too early: what is copied later is what is there then.
        const int k0 = static_cast<int>(blockIdx.x) / SPLIT * BN;
        for (int panel = k0 / PANEL; k0 < g.K && panel < panels && panel < k0 / PANEL + PANELS; ++panel) {
            if (own > 0)
                prefetch_bulk(packed + tables_bytes(g.K) + (static_cast<i64>(panel) * order.chunks + first) * PANEL_CHUNK,
                              own * PANEL_CHUNK);
            if (SHORTCUT && own < count)
                prefetch_bulk(packed_also + tables_bytes(g.K) +
                                  (static_cast<i64>(panel) * chunks_also + first + own - order.chunks) * PANEL_CHUNK,
                              (count - own) * PANEL_CHUNK);
        }
    }
    if constexpr (CLUSTERED) {  // the others may send sums
        __syncwarp();
        Team::leave();
    }
    begin_launch(settled);
    const int rows = Problem::narrow(clamp(*bin_counts, 0, M)), pixels = rows * g.ph * g.pw;
    const BlockTable table{indices, grid, Problem::narrow(N), Problem::narrow(GH), Problem::narrow(GW), rows};
    __syncthreads();
    const int step = gridDim.x / SPLIT, first_tile = static_cast<int>(blockIdx.x) / SPLIT;
    const Rounds<BM, PARTS> rounds(ceil_div(pixels, BM) * across, across, step);
    const int tiles = rounds.count;

    bool waited = !settled;
    const auto wait = [&] {  // before x, the residual, and the memory of y
        if (!waited) dependent_wait();
        waited = true;
    };

    // The same in all lanes, so that what follows from it may be in uniform registers.
    if (__shfl_sync(0xffffffffu, threadIdx.x / 32, 0) >= MULTIPLIERS / 32) {
        give_registers<SHIFTED ? KEPT : 0>();
        using Copier = LeanCopier<POINTWISE, VECTOR_IN, CACHED, BM, SHORTCUT, (PARTS > 1), T>;
        const int thread = threadIdx.x - MULTIPLIERS, warp = __shfl_sync(0xffffffffu, thread / 32, 0);
        int fresh = STAGES;  // stages that nobody has used
        const auto weights_of = [&](int k0) {
            const int panel = k0 / PANEL;
            const u8* const its = packed + tables_bytes(g.K);
            const u8* const also = SHORTCUT && own < count ? packed_also + tables_bytes(g.K) : nullptr;
            const i64 step = static_cast<i64>(order.chunks) * PANEL_CHUNK, step_also = static_cast<i64>(chunks_also) * PANEL_CHUNK;
            return TileWeights<PANELS, SHORTCUT>{its + panel * step + static_cast<i64>(first) * PANEL_CHUNK,
                                                 also + panel * step_also + static_cast<i64>(first + own - order.chunks) * PANEL_CHUNK,
                                                 step, step_also, own, min(PANELS, panels - panel)};
        };
        Stage<STAGES> stage;
        Stage<(RESULTS > 0 ? RESULTS : 1)> result_stage;
        // The residual of a tile: to shared memory, or to the cache, since it is read at the end.
        const int helper = thread - (ALL_COPIERS - RESIDUAL_COPIERS);
        const auto stage_residual = [&](int p0, int k0, int end) {
            if (!residual) return;
            barrier_wait(shared.result_empty + result_stage.slot, result_stage.phase ^ 1);
            u8* const result = shared.results + result_stage.slot * (BM * RESULT_PITCH);
            constexpr int VECTORS = BN / LANES;
#pragma unroll (BM * VECTORS / COPIERS)
            for (int i = 0; i < BM * VECTORS / RESIDUAL_COPIERS; ++i) {
                const int vector = i * RESIDUAL_COPIERS + helper, row = vector / VECTORS, column = vector % VECTORS * LANES;
                const bool there = p0 + row < end && k0 + column < g.K;
                copy_async_16(result + row * RESULT_PITCH + column * sizeof(T),
                              residual + (there ? static_cast<i64>(p0 + row) * g.K + k0 + column : 0), there);
            }
            copies_arrive(shared.result_full + result_stage.slot);
            result_stage.advance();
        };
        const auto prefetch_residual = [&](int p0, int k0, int end) {
            if (residual)
                Result<T, StackRows>{residual, y, nullptr, nullptr, {p0, end, nullptr}, k0, g.K}.template prefetch<BM, BN>(
                    helper + rank * RESIDUAL_COPIERS, RESIDUAL_COPIERS * SPLIT);
        };
        const auto leave_tile = [&](int tile) {
            if constexpr (CLUSTERED) {
                __syncwarp();
                Team::wait();
                if (tile + step < tiles) Team::leave();
            }
        };
        if constexpr (BULK) {
            // One warp brings the weights, one the pixels, which are results of the kernel ahead, and two the residual.
            for (int tile = first_tile; tile < tiles; tile += step) {
                const auto its = rounds.template tile<BN>(tile);
                if (warp == 0) {
                    const auto weights = weights_of(its.k0);
                    if (elected())
#pragma unroll 1
                        for (int i = 0; i < count; ++i) {
                            if (--fresh < 0) barrier_wait(shared.empty + stage.slot, stage.phase ^ 1);
                            weights.copy(shared.ring + stage.slot * Memory::STAGE + Memory::A, i, shared.full + stage.slot);
                            stage.advance();
                        }
                } else if (warp == 1) {
                    wait();
                    const TileBoxes<BM> boxes(its.p0, 0x7fffffff), boxes_also(its.p0, g.pw);
                    if (elected())
#pragma unroll 1
                        for (int i = 0; i < count; ++i) {
                            if (--fresh < 0) barrier_wait(shared.empty + stage.slot, stage.phase ^ 1);
                            u8* const at = shared.ring + stage.slot * Memory::STAGE;
                            const int c = (first + i) * (8 * LANES);
                            if (!SHORTCUT || i < own)
                                boxes.copy(at, map, c, its.height, shared.full + stage.slot);
                            else if constexpr (SHORTCUT)
                                boxes_also.copy(at, map_also, c - order.chunks * (8 * LANES), its.height, shared.full + stage.slot);
                            stage.advance();
                        }
                } else {
                    wait();
                    const int end = PARTS == 1 ? pixels : min(pixels, its.p0 + its.height);
                    if constexpr (RESULTS > 0) stage_residual(its.p0, its.k0, end);
                    if constexpr (!PARTIALS && RESULTS == 0) prefetch_residual(its.p0, its.k0, end);
                }
                leave_tile(tile);
            }
            wait();
        } else {
            const Finder finder(table, g);
            Meeting all(shared.copiers);
            for (int tile = first_tile; tile < tiles; tile += step) {
                const auto its = rounds.template tile<BN>(tile);
                const int p0 = its.p0, k0 = its.k0, end = PARTS == 1 ? pixels : min(pixels, p0 + its.height);
                const auto weights = weights_of(k0);
                const auto copy_weights = [&](int slot, int i) {
                    weights.copy(shared.ring + slot * Memory::STAGE + Memory::A, i, shared.full + slot);
                };
                const bool is_first = tile == first_tile;
                const int ahead = is_first ? min(STAGES, count) : 0;  // while pixels are searched for; the ring is empty
                if (thread == 0)
#pragma unroll 1
                    for (int s = 0; s < ahead; ++s) copy_weights(s, s);
                if constexpr (!POINTWISE) {
                    if (!is_first) all.sync();  // the last tile's offsets are read
                    finder.find<BM, Copier::PASS, BLOCKS == 1 && TEAMS == 1 ? 2 : 1, IMAGES>(p0, units_of_pixel<T, VECTOR_IN>(g), shared.offsets, thread, ALL_COPIERS);
                    all.sync();
                }
                const T* const its_x = x + (GROUPED ? by_group.begin(k0 / PANEL, g.C, LANES) : 0);
                Copier copier(its_x, also, shared.offsets, order, g, channels, shortcut, thread % COPIERS, p0, pixels, first, its.height);
                wait();
                if constexpr (RESULTS > 0) stage_residual(p0, k0, end);
#pragma unroll 1
                for (int i = 0; i < count; ++i) {
                    --fresh;
                    // Teams take turns, from tile to tile too: neither is more than a round of the ring behind.
                    if (TEAMS == 1 || (fresh & 1) == warp / (COPIERS / 32)) {
                        if (fresh < 0) barrier_wait(shared.empty + stage.slot, stage.phase ^ 1);
                        const int its_warp = i / TEAMS % (COPIERS / 32) + (TEAMS == 1 ? 0 : (fresh & 1) * (COPIERS / 32));
                        if (i >= ahead && its_warp == warp && thread % 32 == 0) copy_weights(stage.slot, i);
                        copier.copy(shared.ring + stage.slot * Memory::STAGE);
                        if constexpr (VECTOR_IN) {
                            copies_arrive(shared.full + stage.slot);
                        } else {
                            shared_fence();
                            barrier_arrive(shared.full + stage.slot);
                        }
                    }
                    copier.advance();
                    stage.advance();
                }
                if constexpr (!PARTIALS && !IMAGES && RESULTS == 0) prefetch_residual(p0, k0, end);
                leave_tile(tile);
            }
            wait();
        }
    } else {
        take_registers<SHIFTED ? TAKEN : 0>();
        const int lane = threadIdx.x % 32;
        u32 left = 0, right = 0;  // the addresses of the first stage, for the warp
        int group = 0;            // of warps: which rows it has
        if constexpr (Product::ASYNC) {
            group = Product::group_in_warp() % WM;
            left = Product::left(shared_address(shared.ring));
            right = Product::right(shared_address(shared.ring + Memory::A));
        }
        Meeting all(shared.multipliers);
        Stage<STAGES> stage;
        Stage<(RESULTS > 0 ? RESULTS : 1)> result_stage;
        const bool whole = g.whole();
        for (int tile = first_tile; tile < tiles; tile += step) {
            const auto its = rounds.template tile<BN>(tile);
            const int p0 = its.p0, k0 = its.k0, end = PARTS == 1 ? pixels : min(pixels, p0 + its.height);
            // Products of 64 rows that are the group's own.
            const int products = !Product::ASYNC || PARTS == 1 ? MT : min(its.height / 64 - group * MT, MT);
            for (int i = threadIdx.x; i < 2 * BN; i += MULTIPLIERS) {
                const int k = k0 + i % BN;
                const float* const its = reinterpret_cast<const float*>(packed) + (i < BN ? 0 : panels * PANEL);
                float value = k < g.K ? its[k] : 0.0f;
                if (SHORTCUT && i >= BN && k < g.K) value += reinterpret_cast<const float*>(packed_also)[panels * PANEL + k];
                shared.scale[i] = value;
            }
            if (IMAGES || !whole) {
                const Finder finder(table, g);
                for (int i = threadIdx.x; i < BM; i += MULTIPLIERS)
                    shared.inside[i] = IMAGES ? finder.image_pixel(p0, i, end) : finder.is_inside(p0, i);
            }
            wait();

            using Rows = typename RowsOf<IMAGES>::Type;
            const Rows its_rows = rows_of<IMAGES>(p0, end, IMAGES || !whole ? shared.inside : nullptr);
            const Result<T, Rows> result{residual, y, shared.scale, shared.bias, its_rows, k0, g.K};
            using Loaded = typename Result<T, Rows>::template Loaded<Product>;
            Loaded loaded;
            constexpr bool EARLY = !PARTIALS && !IMAGES && SPLIT == 1 && RESULTS == 0 && VECTOR_OUT && Loaded::FEW;
            if constexpr (EARLY)  // while the pixels come
                result.load(loaded);
            float acc[MT][NT][4];
            clear(acc);
            int last = 0;
            for (int i = 0; i < count; ++i) {
                barrier_wait(shared.full + stage.slot, stage.phase);
                u8* const a = shared.ring + stage.slot * Memory::STAGE;
                if constexpr (ROUND) {
                    for (int j = threadIdx.x; j < BM * 8; j += MULTIPLIERS) round_four(a + j * 16);
                    if constexpr (Product::ASYNC) shared_fence();
                    all.sync();
                } else if constexpr (Product::ASYNC && !BULK) {
                    shared_fence();  // what cp.async wrote, before the tensor cores read it
                }
                if constexpr (Product::ASYNC) {
                    const u32 its_left = left + stage.slot * (Memory::STAGE / 16), its_right = right + stage.slot * (Memory::STAGE / 16);
                    if (PARTS == 1 || products >= MT)
                        Product::multiply_at(acc, its_left, its_right);
                    else if (MT > 1 && products == 1)
                        Product::template multiply_at<1>(acc, its_left, its_right);
                } else {
                    Product::multiply(acc, a, a + Memory::A);
                }
                if constexpr (Product::ASYNC) {
                    wgmma_wait<1>();
                    if (i > 0 && lane == 0) barrier_arrive(shared.empty + last);
                    last = stage.slot;
                } else {
                    __syncwarp();
                    if (lane == 0) barrier_arrive(shared.empty + stage.slot);
                }
                stage.advance();
            }
            if constexpr (Product::ASYNC) {
                wgmma_wait<0>();
                if (count > 0 && lane == 0) barrier_arrive(shared.empty + last);
            }
            all.sync();  // scale, bias and inside are there

            if constexpr (PARTIALS) {
                result.template store_partials<Product>(acc, partials, rank, SPLIT, across * BN);
            } else if constexpr (RESULTS > 0) {
                if (residual) barrier_wait(shared.result_full + result_stage.slot, result_stage.phase);
                result.template store_staged<ACTIVATION, Product>(
                    acc, shared.results + result_stage.slot * (BM * RESULT_PITCH), RESULT_PITCH);
                __syncwarp();
                if (residual && lane == 0) barrier_arrive(shared.result_empty + result_stage.slot);
                result_stage.advance();
            } else if constexpr (SPLIT == 1) {
                result.template store<ACTIVATION, VECTOR_OUT, EARLY, Product>(acc, loaded);
            } else {
                // Each row of sums goes to the thread block that finishes it, which adds up what it gets in the order of ranks.
                float* const sums = reinterpret_cast<float*>(shared.results);
                constexpr int VECTORS = BN / LANES;
                const int from = Sums::first_row(rank), to = Sums::first_row(rank + 1);
                if (threadIdx.x == 0) barrier_expect(shared.result_full, (to - from) * BN * SPLIT * 4);
                __syncwarp();
                Team::wait();  // all have read the last tile's sums
                result.template for_each_sum<Product>(acc, [&](int row, int column, const float (&values)[LANES]) {
                    const int its_rank = Sums::rank_of(row), its_row = row - Sums::first_row(its_rank);
#pragma unroll
                    for (int e = 0; e < LANES / 4; ++e)
                        Team::send(reinterpret_cast<float4*>(sums + Sums::place(rank, its_row, column, e)),
                                   make_float4(values[4 * e], values[4 * e + 1], values[4 * e + 2], values[4 * e + 3]),
                                   shared.result_full, its_rank);
                });
                const auto add_to = [&](int i) {
                    const int p = its_rows.pixel(from + i / VECTORS), k = k0 + i % VECTORS * LANES;
                    return residual_at<VECTOR_OUT>(residual, static_cast<i64>(p) * g.K + k, p >= 0 && k < g.K);
                };
                uint4 addend = zero<uint4>();
                if (static_cast<int>(threadIdx.x) < (to - from) * VECTORS) addend = add_to(threadIdx.x);
                Team::wait_for_all(shared.result_full, result_stage.phase);
                result_stage.advance();
                for (int i = threadIdx.x; i < (to - from) * VECTORS; i += MULTIPLIERS) {
                    const int row = i / VECTORS, column = i % VECTORS * LANES, p = its_rows.pixel(from + row);
                    if (i >= MULTIPLIERS) addend = add_to(i);
                    float total[LANES];
#pragma unroll
                    for (int e = 0; e < LANES / 4; ++e) {
                        float4 sum = *reinterpret_cast<const float4*>(sums + Sums::place(0, row, column, e));
#pragma unroll
                        for (int q = 1; q < SPLIT; ++q) {
                            const float4 part = *reinterpret_cast<const float4*>(sums + Sums::place(q, row, column, e));
                            sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
                        }
                        total[4 * e] = sum.x, total[4 * e + 1] = sum.y, total[4 * e + 2] = sum.z, total[4 * e + 3] = sum.w;
                    }
                    if (p >= 0)
                        finish<T, ACTIVATION, VECTOR_OUT>(total, shared.scale + column, shared.bias + column, addend, residual,
                                                          y, static_cast<i64>(p) * g.K + k0 + column, g.K - k0 - column,
                                                          its_rows.is_inside(from + row));
                }
                __syncwarp();
                if (tile + step < tiles) Team::leave();
            }
            if (tile + step < tiles) all.sync();  // scale, bias and inside may be overwritten
        }
        wait();
    }
    if constexpr (CLUSTERED)
        if (first_tile >= tiles) {  // nobody has waited
            __syncwarp();
            Team::wait();
        }
    if (clear_rows && !PARTIALS) clear_rest<VECTOR_OUT>(y, static_cast<i64>(pixels) * g.K, M * g.ph * g.pw * g.K);
}
