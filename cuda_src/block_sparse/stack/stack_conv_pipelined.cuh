// stack_conv_pipelined.cuh: the convolution of stack_conv2d.cu, where some warps copy and the others multiply.
//   y[m, i, j, k] = activation(scale[k] * sum(x at (i * SH - top + r * DH, j * SW - left + s * DW) of block m, c] * w[r, s, c, k])
//                              + bias[k] + residual[m, i, j, k])
// With a SHORTCUT, a second product is added before scale and bias: of pixel (i * down_also, j * across_also) of the stack
// `also`, whose channels are whole chunks, and the 1x1 kernel of packed_also, whose bias is added, and whose scale is 1.
// PARTS is the most into which each tile of the last round may be cut, see Rounds.
// With IMAGES it is the convolution of fused_conv.cu: from images to images, at the pixels of the listed blocks.
// With a BOX, for windows of one pixel, the copy engine brings pixels, by a tensor map: one thread asks for BOX of them at a time,
// 64 neighbours of a stack, or with IMAGES lines of a block, or a part of one. Other warps then find where results go.
// Source: as stack_conv2d.cu; warps of different roles as in CUTLASS (Thakkar et al. 2023).
// Python: sbnet_cupy/block_sparse/stack/stack_conv2d.py; launched by stack_launch.py
// Compute capability 9.0 and newer.
// Launch: a persistent grid, SPLIT thread blocks for each tile. See cuda_src/README.md for the picture.
#pragma once

#include "block_sparse/stack/stack_conv_listed.cuh"
#include "block_sparse/stack/stack_conv_tiles.cuh"
#include "core/pipeline.cuh"

template <template <typename, int, int, int, int> class Engine, typename T, int BM, int BN, int WM, int WN, int STAGES,
          int SPLIT, bool PARTIALS, bool POINTWISE, bool VECTOR_IN, bool VECTOR_OUT, bool ROUND, int ACTIVATION,
          bool CACHED, int RESULTS, int BLOCKS, bool SHORTCUT, int PARTS, bool IMAGES, int BOX, int TEAMS, bool GROUPED,
          int LIES>
__global__ void __launch_bounds__(Engine<T, BM, BN, WM, WN>::THREADS + TEAMS * COPIERS, BLOCKS)
    stack_conv_pipelined(const T* __restrict__ also, const u8* __restrict__ packed_also, STACK_CONV_PARAMETERS,
                         i64 channels_also, i64 down_also, i64 across_also, i64 pitch_also,
                         const __grid_constant__ typename PixelMap<(BOX > 0) && SHORTCUT>::Type map_also,
                         const __grid_constant__ typename PixelMap<(BOX > 0)>::Type map) {
    using Product = Engine<T, BM, BN, WM, WN>;
    constexpr bool BULK = BOX > 0, BOXED = BULK && IMAGES;  // boxes at all; of listed blocks
    constexpr bool DIRECT = IMAGES && POINTWISE && !BULK;   // threads that copy look up their pixels of listed blocks
    constexpr bool LISTED = BOXED || DIRECT;                // and find where results go, for those who store them
    constexpr int MULTIPLIERS = Product::THREADS, MT = Product::MT, NT = Product::NT, LANES = 16 / sizeof(T);
    constexpr int PANELS = BN / PANEL, RESULT_PITCH = Staged<T, BN>::PITCH;
    // Registers of a thread at launch. Of large tiles those that copy keep few, and those that multiply take the others over.
    constexpr bool SHIFTED = Product::ASYNC && BM * BN >= (TEAMS == 1 ? 256 : 128) * 128;
    constexpr int LAUNCHED = 65536 / ((MULTIPLIERS + TEAMS * COPIERS) * BLOCKS) / 8 * 8;
    constexpr int KEPT = TEAMS == 1 || BM * BN == 128 * 128 ? 96 : BM == 192 ? 48 : 64;
    constexpr int TAKEN = (LAUNCHED + (LAUNCHED - KEPT) * TEAMS * COPIERS / MULTIPLIERS) / 8 * 8;
    constexpr bool WIDE = LAUNCHED - MT * NT * 4 >= (Product::ASYNC ? 90 : 110);  // registers are left when a tile ends
    constexpr int ALL_COPIERS = TEAMS * COPIERS;
    constexpr int RESIDUAL_COPIERS = BULK ? COPIERS / 2 : ALL_COPIERS;  // the last of those that copy
    constexpr bool CLUSTERED = SPLIT > 1 && !PARTIALS;
    using ItsReaders = Readers<MULTIPLIERS, Product::ASYNC && !ROUND>;
    using Team = Cluster<PARTIALS ? 1 : SPLIT>;
    using Sums = SharedSums<BM, BN, SPLIT, LANES>;
    // Tiles whose results' pixels are found ahead: the warps that do it may bring boxes too, and are not to wait for results.
    constexpr int FOUND = LISTED ? 4 : 0;
    using Memory = PipelineMemory<BM, BN, STAGES, CLUSTERED ? 1 : RESULTS, CLUSTERED ? Sums::BYTES : RESULTS * BM * RESULT_PITCH, FOUND,
                                   TABLES<ACTIVATION>>;
    using Boxes = BlockBoxes<BM, BOXED ? BOX : BOX_ROWS, (PARTS > 1)>;
    static_assert(RESULTS == 0 || (SPLIT == 1 && VECTOR_OUT), "whole results are staged, in vectors");
    static_assert(!IMAGES || (RESULTS == 0 && !PARTIALS && !SHORTCUT), "results go to pixels one by one");
    static_assert(!DIRECT || (VECTOR_IN && !GROUPED && TEAMS == 1), "a thread knows its pixels");
    static_assert(!GROUPED || (PANELS == 1 && VECTOR_IN && !SHORTCUT), "a tile reads the channels of one panel, in vectors");
    static_assert(!BULK || ((POINTWISE || IMAGES) && VECTOR_IN && !GROUPED && TEAMS == 1), "boxes are neighbouring pixels");
    static_assert(!BULK || IMAGES || BOX == BOX_ROWS, "boxes of a stack");
    static_assert(TEAMS <= 2, "teams take turns by the parity of a count");
    static_assert(PARTS == 1 || (SPLIT == 1 && BM / PARTS % 64 == 0 && MT <= 2), "parts of whole passes and products");

    DYNAMIC_SHARED(u8, unaligned);
    const Memory shared(unaligned);
    const Problem g(C, K, bh, bw, ph, pw, H, W, P, Q, R, S, SH, SW, DH, DW, top, left, pitch);
    const ChannelGroups by_group{Problem::narrow(group_in), Problem::narrow(group_out), Problem::narrow(span)};
    const int channels = GROUPED ? by_group.span : g.C;
    const Order order(channels, LANES, POINTWISE || BULK ? 1 : g.R * g.S);
    const int panels = ceil_div(g.K, PANEL), across = ceil_div(g.K, BN);
    const Shortcut shortcut{Problem::narrow(channels_also), Problem::narrow(down_also), Problem::narrow(across_also),
                            Problem::narrow(pitch_also)};
    const int chunks_also = SHORTCUT ? shortcut.channels / (8 * LANES) : 0, chunks = order.chunks + chunks_also;
    const int rank = blockIdx.x % SPLIT, first = share_of(chunks, rank, SPLIT), count = share_of(chunks, rank + 1, SPLIT) - first;
    const int own = SHORTCUT ? max(0, min(order.chunks - first, count)) : count;  // chunks that are no shortcut's
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(shared.full + s, BOXED ? 1 + Boxes::WARPS : BULK ? 2 : COPIERS + 1);
            barrier_init(shared.empty + s, ItsReaders::COUNT);
        }
        for (int s = 0; s < RESULTS; ++s) {
            barrier_init(shared.result_full + s, RESIDUAL_COPIERS);
            barrier_init(shared.result_empty + s, MULTIPLIERS / 32);
        }
        for (int s = 0; s < FOUND; ++s) {
            barrier_init(shared.found_full + s, BOXED ? RESIDUAL_COPIERS : COPIERS);
            barrier_init(shared.found_empty + s, MULTIPLIERS);
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
    const int step = gridDim.x / SPLIT, first_tile = static_cast<int>(blockIdx.x) / SPLIT;
    BlockTable table{indices, grid, Problem::narrow(N), Problem::narrow(GH), Problem::narrow(GW), 0};
    [[maybe_unused]] const Finder blocks(table, g);
    // Of listed blocks, what the list says of the first tile is loaded with the count, which says how much of the list there is.
    [[maybe_unused]] typename ListedOf<!DIRECT, Boxes, BlockRows<BM>>::Type listed;
    bool looks = false;
    if constexpr (LISTED) {
        listed.warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32 - MULTIPLIERS / 32 - (BOXED ? 1 : 0), 0);
        looks = listed.warp >= 0 && listed.warp < listed.WARPS;
        if (looks) {
            listed.turn_to(blocks, first_tile / across * BM);
            listed.first.settle();
        }
    }
    if (!settled) overlap_launches();
    const int counted = *loaded_later(bin_counts);  // the kernel ahead may have written it
    if (LISTED && looks) listed.first.look_up(loaded_later(indices), Problem::narrow(M));
    const int rows = Problem::narrow(clamp(counted, 0, M)), pixels = rows * g.ph * g.pw;
    table.rows = rows;
    __syncthreads();
    const Rounds<BM, PARTS> rounds(ceil_div(pixels, BM) * across, across, step);
    const int tiles = rounds.count;

    bool waited = !settled;
    const auto wait = [&] {  // before x, the residual, and the memory of y
        if (!waited) {
            dependent_launch();  // not sooner: the next kernel then finds more places that are free
            dependent_wait();
        }
        waited = true;
    };

    // The same in all lanes, so that what follows from it may be in uniform registers.
    if (__shfl_sync(0xffffffffu, threadIdx.x / 32, 0) >= MULTIPLIERS / 32) {
        give_registers<SHIFTED ? KEPT : 0>();
        using Copier = LeanCopier<POINTWISE, VECTOR_IN, CACHED, BM, SHORTCUT, (PARTS > 1), T>;
        const int thread = threadIdx.x - MULTIPLIERS, warp = __shfl_sync(0xffffffffu, thread / 32, 0);
        const auto weights_of = [&](int k0) {
            const int panel = k0 / PANEL;
            const u8* const its = packed + tables_bytes(g.K);
            const i64 step = static_cast<i64>(order.chunks) * PANEL_CHUNK, step_also = static_cast<i64>(chunks_also) * PANEL_CHUNK;
            const u8* const also = SHORTCUT && own < count ? packed_also + tables_bytes(g.K) + panel * step_also +
                                                                 static_cast<i64>(first + own - order.chunks) * PANEL_CHUNK
                                                           : nullptr;
            return TileWeights<PANELS, SHORTCUT>{its + panel * step + static_cast<i64>(first) * PANEL_CHUNK, also,
                                                 step, step_also, own, min(PANELS, panels - panel)};
        };
        const SharedPlace ring = SharedPlace::found(shared.ring), full = SharedPlace::found(shared.full);
        const SharedPlace empty = SharedPlace::found(shared.empty);
        Stage<STAGES> stage;
        int fresh = STAGES;  // stages that nobody has used
        Stage<(RESULTS > 0 ? RESULTS : 1)> result_stage;
        // The residual of a tile: to shared memory, or to the cache, since it is read at the end.
        const int helper = thread - (ALL_COPIERS - RESIDUAL_COPIERS);
        const int added_pitch = LIES != WHOLE ? Problem::narrow(pitch_added) : g.K;
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
                              residual + (there ? static_cast<i64>(p0 + row) * added_pitch + k0 + column : 0), there);
            }
            copies_arrive(shared.result_full + result_stage.slot);
            result_stage.advance();
        };
        const auto prefetch_residual = [&](int p0, int k0, int end) {
            if (residual)
                Result<T, StackRows, LIES>{residual, y, nullptr, nullptr, {p0, end, nullptr}, k0, g.K,
                                           Problem::narrow(pitch_added)}.template prefetch<BM, BN>(
                    recomputed(helper) + rank * RESIDUAL_COPIERS, RESIDUAL_COPIERS * SPLIT);
        };
        // The same of a pixel of images, and those to whom results go.
        [[maybe_unused]] Stage<(FOUND > 0 ? FOUND : 1)> found_stage;
        const auto prefetch_at = [&](int pixel, int k0) {
            constexpr int LINE = 128 / sizeof(T);
            if (!residual || pixel < 0) return;
            for (int k = k0 + rank * LINE; k < min(k0 + BN, g.K); k += SPLIT * LINE)
                prefetch_line(residual + static_cast<i64>(pixel) * added_pitch + k);
        };
        const auto leave_tile = [&](int tile) {
            if constexpr (CLUSTERED) {
                __syncwarp();
                Team::wait();
                if (tile + step < tiles) Team::leave();
            }
        };
        if constexpr (BULK) {
            // One warp brings the weights, one the pixels, which are results of the kernel ahead, and two the residual. At listed
            // blocks these two find the pixels of the result, and bring pixels too where boxes are many.
            [[maybe_unused]] const auto find_results = [&](int p0, int k0, int end) {
                constexpr int EACH = BM / RESIDUAL_COPIERS;
                int found[EACH];
#pragma unroll
                for (int e = 0; e < EACH; ++e) found[e] = blocks.image_pixel(p0, helper + e * RESIDUAL_COPIERS, end);
                barrier_wait(shared.found_empty + found_stage.slot, found_stage.phase ^ 1);
#pragma unroll
                for (int e = 0; e < EACH; ++e)
                    shared.inside[found_stage.slot * BM + helper + e * RESIDUAL_COPIERS] = found[e];
                barrier_arrive(shared.found_full + found_stage.slot);
                found_stage.advance();
#pragma unroll
                for (int e = 0; e < EACH; ++e) prefetch_at(found[e], k0);
            };
            for (int tile = first_tile; tile < tiles; tile += step) {
                const auto its = rounds.template tile<BN>(tile);
                if (warp == 0) {
                    const auto weights = weights_of(its.k0);
#pragma unroll 1
                    for (int i = 0; i < count; ++i) {
                        if (--fresh < 0) barrier_wait(empty + stage.slot * 8, stage.phase ^ 1);
                        if (elected()) weights.copy(ring + (stage.slot * Memory::STAGE + Memory::A), i, full + stage.slot * 8);
                        stage.advance();
                    }
                } else if constexpr (BOXED) {
                    wait();
                    const auto find = [&] {
                        find_results(its.p0, its.k0, PARTS == 1 ? pixels : min(pixels, its.p0 + its.height));
                    };
                    if (Boxes::WARPS == 1 && warp >= 2) {
                        find();
                    } else {
                        const auto look_up = [&](int p0) {
                            listed.turn_to(blocks, p0);
                            listed.first.look_up(indices, Problem::narrow(M));
                        };
                        if (PARTS > 1 && listed.first.p0 != its.p0) look_up(its.p0);  // the first tile is cut
                        listed.place(blocks);
#pragma unroll 1
                        for (int i = 0; i < count; ++i) {
                            if (--fresh < 0) barrier_wait(empty + stage.slot * 8, stage.phase ^ 1);
                            listed.copy(ring + stage.slot * Memory::STAGE, map, (first + i) * (8 * LANES), its.height,
                                        full + stage.slot * 8);
                            stage.advance();
                            if (i > 0) continue;
                            // What the first chunk need not wait for.
                            if (tile + step < tiles) look_up(rounds.template tile<BN>(tile + step).p0);
                            if (Boxes::WARPS > 1 && warp >= 2) find();
                        }
                    }
                } else if (warp == 1) {
                    const TileBoxes<BM> boxes(its.p0, 0x7fffffff), boxes_also(its.p0, g.pw);
                    wait();
#pragma unroll 1
                    for (int i = 0; i < count; ++i) {
                        if (--fresh < 0) barrier_wait(empty + stage.slot * 8, stage.phase ^ 1);
                        const SharedPlace at = ring + stage.slot * Memory::STAGE, bar = full + stage.slot * 8;
                        const int c = (first + i) * (8 * LANES);
                        if (!SHORTCUT || i < own) {
                            if (elected()) boxes.copy(at, map, c, its.height, bar);
                        } else if constexpr (SHORTCUT) {
                            if (elected()) boxes_also.copy(at, map_also, c - order.chunks * (8 * LANES), its.height, bar);
                        }
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
            const SharedPlace own_place = SharedPlace::found_by_each(shared.ring + Copier::place(thread % COPIERS));
            for (int tile = first_tile; tile < tiles; tile += step) {
                const auto its = rounds.template tile<BN>(tile);
                const int p0 = its.p0, k0 = its.k0, end = PARTS == 1 ? pixels : min(pixels, p0 + its.height);
                const auto weights = weights_of(k0);
                const auto copy_weights = [&](int slot, int i) {
                    weights.copy(ring + (slot * Memory::STAGE + Memory::A), i, full + slot * 8);
                };
                const bool is_first = tile == first_tile;
                const int ahead = is_first ? min(STAGES, count) : 0;  // while pixels are searched for; the ring is empty
                if (thread == 0)
#pragma unroll 1
                    for (int s = 0; s < ahead; ++s) copy_weights(s, s);
                if constexpr (!POINTWISE) {
                    if (!is_first) all.sync();  // the last tile's offsets are read
                    finder.find<BM, Copier::PASS, BLOCKS == 1 && TEAMS == 1 ? 2 : 1, IMAGES>(p0, units_of_pixel<T, VECTOR_IN>(g), shared.offsets, recomputed(thread), ALL_COPIERS);
                    all.sync();
                }
                const T* const its_x = x + (GROUPED ? by_group.begin(k0 / PANEL, g.C, LANES) : 0);
                Copier copier(its_x, also, shared.offsets, order, g, channels, shortcut, recomputed(thread % COPIERS), p0, pixels, first, its.height);
                copier.look_up();
                if constexpr (DIRECT) {
                    if (!is_first || listed.first.p0 != p0) {  // the first tile may be cut
                        listed.turn_to(blocks, p0);
                        listed.first.look_up(indices, Problem::narrow(M));
                    }
                    listed.place(blocks, units_of_pixel<T, VECTOR_IN>(g), end, copier.mine);
                }
                wait();
                if constexpr (RESULTS > 0) stage_residual(p0, k0, end);
#pragma unroll 1
                for (int i = 0; i < count; ++i) {
                    --fresh;
                    // Teams take turns, from tile to tile too: neither is more than a round of the ring behind.
                    if (TEAMS == 1 || (fresh & 1) == warp / (COPIERS / 32)) {
                        if (fresh < 0) barrier_wait(empty + stage.slot * 8, stage.phase ^ 1);
                        const int its_warp = i / TEAMS % (COPIERS / 32) + (TEAMS == 1 ? 0 : (fresh & 1) * (COPIERS / 32));
                        if (i >= ahead && its_warp == warp && elected()) copy_weights(stage.slot, i);
                        if (Copier::EARLY && copier.is_of_one_tap())
                            copier.copy_ready(own_place + stage.slot * Memory::STAGE);
                        else
                            copier.copy(shared.ring + stage.slot * Memory::STAGE);
                        if constexpr (VECTOR_IN) {
                            copies_arrive(full + stage.slot * 8);
                        } else {
                            shared_fence();
                            barrier_arrive(full + stage.slot * 8);
                        }
                    }
                    copier.advance();
                    copier.look_up();
                    stage.advance();
                    if constexpr (DIRECT) {
                        if (i > 0) continue;
                        barrier_wait(shared.found_empty + found_stage.slot, found_stage.phase ^ 1);
#pragma unroll
                        for (int e = 0; e < listed.EACH; ++e)
                            shared.inside[found_stage.slot * BM + listed.row(e)] = listed.found[e];
                        barrier_arrive(shared.found_full + found_stage.slot);
                        found_stage.advance();
#pragma unroll
                        for (int e = 0; e < listed.EACH; ++e) prefetch_at(listed.found[e], k0);
                    }
                }
                if constexpr (!PARTIALS && !IMAGES && RESULTS == 0) prefetch_residual(p0, k0, end);
                leave_tile(tile);
            }
            wait();
        }
    } else {
        take_registers<SHIFTED ? TAKEN : 0>();
        const int lane = threadIdx.x % 32;
        [[maybe_unused]] u32 left = 0, right = 0;  // the addresses of the first stage, for the warp
        int group = 0;            // of warps: which rows it has
        if constexpr (Product::ASYNC) group = Product::group_in_warp() % WM;
        if constexpr (Product::ASYNC && !ROUND) {
            left = Product::left(shared_address(shared.ring));
            right = Product::right(shared_address(shared.ring + Memory::A));
        }
        Meeting all(shared.multipliers);
        Stage<STAGES> stage;
        Stage<(RESULTS > 0 ? RESULTS : 1)> result_stage;
        Stage<(FOUND > 0 ? FOUND : 1)> found_stage;
        [[maybe_unused]] u32 rounded[2][MT][4];  // rows as TF32
        const auto release = [&](int slot) { ItsReaders::release(shared.empty + slot); };
        const bool whole = g.whole(table);
        for (int tile = first_tile; tile < tiles; tile += step) {
            const auto its = rounds.template tile<BN>(tile);
            const int p0 = its.p0, k0 = its.k0, end = PARTS == 1 ? pixels : min(pixels, p0 + its.height);
            // Products of 64 rows that are the group's own.
            const int products = !Product::ASYNC || PARTS == 1 ? MT : min(its.height / 64 - group * MT, MT);
            for (int i = recomputed(threadIdx.x); i < TABLES<ACTIVATION> * BN; i += MULTIPLIERS) {
                const int k = k0 + i % BN;
                float value = table_value(packed, scaled, i / BN, k, g.K);
                if (SHORTCUT && i >= BN && k < g.K) value += reinterpret_cast<const float*>(packed_also)[panels * PANEL + k];
                shared.scale[i] = value;
            }
            if (!LISTED && (IMAGES || !whole)) {
                const Finder finder(table, g);
                for (int i = threadIdx.x; i < BM; i += MULTIPLIERS)
                    shared.inside[i] = IMAGES ? finder.image_pixel(p0, i, end) : finder.is_inside(p0, i);
            }
            all.sync();  // scale, bias and inside are there
            wait();

            using Rows = typename RowsOf<IMAGES>::Type;
            if constexpr (LISTED) barrier_wait(shared.found_full + found_stage.slot, found_stage.phase);
            const int* const found = IMAGES || !whole ? shared.inside + found_stage.slot * BM : nullptr;
            const Rows its_rows = rows_of<IMAGES>(p0, end, found);
            const Result<T, Rows, LIES> result{residual, y, shared.scale, shared.bias, its_rows, k0, g.K,
                                               Problem::narrow(pitch_added), Problem::narrow(pitch_out),
                                               unfolding_of<LIES>(g, unfold_down, unfold_across),
                                               {shared.scale + 2 * BN, shared.scale + 3 * BN}};
            using Loaded = typename Result<T, Rows, LIES>::template Loaded<Product>;
            Loaded loaded;
            constexpr bool EARLY = !PARTIALS && (LISTED || !IMAGES) && SPLIT == 1 && RESULTS == 0 && VECTOR_OUT && Loaded::FEW;
            if constexpr (EARLY)  // while the pixels come
                result.load(loaded);
            float acc[MT][NT][4];
            clear(acc);
            int last = 0;
            for (int i = 0; i < count; ++i) {
                barrier_wait(shared.full + stage.slot, stage.phase);
                u8* const a = shared.ring + stage.slot * Memory::STAGE;
                if constexpr (ROUND && !Product::ASYNC) {
                    for (int j = threadIdx.x; j < BM * 8; j += MULTIPLIERS) round_four(a + j * 16);
                    all.sync();
                } else if constexpr (Product::ASYNC && !ROUND && !BULK) {
                    shared_fence();  // what cp.async wrote, before the tensor cores read it
                }
                if constexpr (Product::ASYNC && ROUND) {
                    if (PARTS == 1 || products >= MT)
                        Product::multiply_rounded(acc, rounded, a, a + Memory::A);
                    else if (MT > 1 && products == 1)
                        Product::template multiply_rounded<1>(acc, rounded, a, a + Memory::A);
                } else if constexpr (Product::ASYNC) {
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
                    if (i > 0) release(last);
                    last = stage.slot;
                } else {
                    release(stage.slot);
                }
                stage.advance();
            }
            if constexpr (Product::ASYNC) {
                wgmma_wait<0>();
                if (count > 0) release(last);
            }

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
                result.template store<ACTIVATION, VECTOR_OUT, WIDE, EARLY, Product>(acc, loaded);
            } else {
                finish_in_cluster<ACTIVATION, VECTOR_OUT, MULTIPLIERS, BM, BN, SPLIT, Product>(
                    acc, result, reinterpret_cast<float*>(shared.results), shared.result_full, result_stage.phase, rank);
                result_stage.advance();
                if (tile + step < tiles) Team::leave();
            }
            if constexpr (LISTED) {
                barrier_arrive(shared.found_empty + found_stage.slot);
                found_stage.advance();
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
