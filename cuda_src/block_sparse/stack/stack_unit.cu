// stack_unit.cu: a residual unit from a stack of blocks to a stack of blocks.
//   bottleneck   y = activation(conv1x1(h2) + residual), h2 = inner(conv3x3(h1)), h1 = inner(conv1x1(x))
//   basic block  y = activation(conv3x3(h1) + residual), h1 = inner(conv3x3(x))
// each convolution with scale and bias, of stride 1 and "same" padding, computed as stack_conv2d.cu does: h1 and h2 are
// of 64 channels, rounded to T, and are 0 in blocks that are not active and outside the image. Rows of y past the count
// are not written, or become 0.
// Source: K. He et al., "Deep Residual Learning for Image Recognition", arXiv:1512.03385, figure 5.
// Python: sbnet_cupy/block_sparse/stack/stack_unit.py; which instance: stack_unit_plan.py
// A thread block keeps the weights of all layers in shared memory. It takes BLOCKS pieces of TH x TW output pixels, 64
// rows of a product, and computes h1 on them and on a rim of one pixel; h1 and h2 stay in shared memory. Four warps copy
// pixels of x, two groups of four warps multiply: at the first layer they share the rows, at the 3x3 layer the taps, at
// the last one the columns.
// Launch: a persistent grid; compute capability 9.0 and newer.
#include "block_sparse/stack/stack_unit.cuh"

//   TAPS      of the first layer: 1 for a bottleneck, 9 for a basic block
//   settled, clear_rows   as in stack_conv2d.cu
template <bool WGMMA, typename T, int TAPS, int TH, int TW, int BLOCKS, int X_STAGES, int INNER, int ACTIVATION>
__global__ void __launch_bounds__(UNIT_THREADS, 1)
    stack_unit(const T* __restrict__ x, const u8* __restrict__ packed1, const u8* __restrict__ packed2,
               const u8* __restrict__ packed3, const T* __restrict__ residual, const int* __restrict__ bin_counts,
               const int* __restrict__ indices, const int* __restrict__ grid, T* __restrict__ y, i64 M, i64 N, i64 GH,
               i64 GW, i64 C, i64 K, i64 bh, i64 bw, i64 H, i64 W, i64 settled, i64 clear_rows) {
    constexpr bool BOTTLENECK = TAPS == 1;
    constexpr int LANES = 16 / sizeof(T), LAYERS = BOTTLENECK ? 3 : 2;
    using Tile = UnitTile<TH, TW, BLOCKS, TAPS>;
    using Memory = UnitMemory<Tile, X_STAGES>;
    using Product = RowProduct<WGMMA, T>;
    using Finder = UnitFinder<Tile, TH, TW, BLOCKS>;

    DYNAMIC_SHARED(u8, unaligned);
    u8* const ring = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    const int channels = Problem::narrow(C), width_out = Problem::narrow(K), x_chunks = channels / 64;
    const int panels = BOTTLENECK ? width_out / 64 : 0;
    const int first_chunks = x_chunks * TAPS, before_last = first_chunks + 9, chunks = before_last + panels;
    const Memory shared(ring, chunks * PANEL_CHUNK);
    if (threadIdx.x == 0) {
        for (int s = 0; s < X_STAGES; ++s)
            barrier_init(shared.x_full + s, UNIT_COPIERS), barrier_init(shared.x_empty + s, UNIT_MULTIPLIERS);
        for (int s = 0; s < 3; ++s) barrier_init(shared.weights + s, 1);
        for (int s = 0; s < 2; ++s) barrier_init(shared.found + s, UNIT_COPIERS), barrier_init(shared.done + s, UNIT_MULTIPLIERS);
        barrier_init(shared.first, UNIT_MULTIPLIERS);
        barrier_init(shared.last, UNIT_MULTIPLIERS);
        barrier_init(shared.meet, UNIT_MULTIPLIERS);
        barrier_init(shared.ready, UNIT_MULTIPLIERS);
        barrier_init_fence();
    }
    begin_launch(settled);
    if (threadIdx.x == 0) {  // packed, a panel of 64 columns is one piece
        const u8* const from[3] = {packed1 + tables_bytes(WIDTH), packed2 + tables_bytes(BOTTLENECK ? WIDTH : width_out),
                                   BOTTLENECK ? packed3 + tables_bytes(width_out) : nullptr};
        const int begin[4] = {0, first_chunks, before_last, chunks};
#pragma unroll
        for (int layer = 0; layer < LAYERS; ++layer) {
            const int bytes = (begin[layer + 1] - begin[layer]) * PANEL_CHUNK;
            barrier_expect(shared.weights + layer, bytes);
            bulk_copy(ring + begin[layer] * PANEL_CHUNK, from[layer], bytes, shared.weights + layer);
        }
    }
    const int rows = Problem::narrow(clamp(*bin_counts, 0, M));
    const BlockTable table{indices, grid, Problem::narrow(N), Problem::narrow(GH), Problem::narrow(GW), rows};
    const Finder finder(table, Problem::narrow(bh), Problem::narrow(bw), Problem::narrow(H), Problem::narrow(W));
    const int tiles = finder.tiles(), step = gridDim.x;
    __syncthreads();  // the barriers are there

    if (threadIdx.x >= UNIT_MULTIPLIERS) {  // --------------------------------------------------- pixels of x
        constexpr int PASS = UNIT_COPIERS / 8;  // rows that are copied at once, a multiple of 8
        const int thread = threadIdx.x - UNIT_MULTIPLIERS, unit = thread % 8;
        const int place = swizzled(thread / 8, unit) - thread / 8 * TILE_ROW;  // in every row that this thread copies
        const u64 pixel_bytes = static_cast<u64>(channels) * sizeof(T);
        bool waited = !settled;
        Stage<X_STAGES> next;
        int round = 0;
        for (int tile = blockIdx.x; tile < tiles; tile += step, ++round) {
            int* const offsets = shared.offsets + round % 2 * Tile::X_ROWS;
            if (round >= 2) barrier_wait(shared.done + round % 2, (round / 2 + 1) % 2);
#pragma unroll
            for (int first = 0; first < Tile::X_ROWS; first += UNIT_COPIERS)
                if (first + thread < Tile::X_ROWS) offsets[first + thread] = finder.x_pixel(tile, first + thread);
            barrier_arrive(shared.found + round % 2);
            barrier_wait(shared.found + round % 2, round / 2 % 2);
            if (!waited) dependent_wait();
            waited = true;
            const u8* from = reinterpret_cast<const u8*>(x) + unit * 16;
            for (int c = 0; c < x_chunks; ++c, from += TILE_ROW) {
                barrier_wait(shared.x_empty + next.slot, next.phase ^ 1);
                u8* const to = shared.x + next.slot * Memory::X + place;
#pragma unroll 5
                for (int row = thread / 8; row < Tile::X_ROWS; row += PASS) {
                    const int offset = offsets[row];
                    copy_async_16_unless_negative<false>(to + row * TILE_ROW,
                                                         from + static_cast<u32>(offset) * pixel_bytes, offset);
                }
                copies_arrive(shared.x_full + next.slot);
                next.advance();
            }
        }
        if (!waited) dependent_wait();
    } else {  // ------------------------------------------------------------------------------ products
        const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // known to be one for a warp
        const int lane = threadIdx.x % 32, thread = threadIdx.x % 128, half_unit = lane / 16;
        const int lane_row = Product::row(), its_row = threadIdx.x / 32 % 4 * 16 + lane / 4;
        const float* const tables[3] = {reinterpret_cast<const float*>(packed1), reinterpret_cast<const float*>(packed2),
                                        reinterpret_cast<const float*>(packed3)};
        float* const scale2 = shared.tables + 2 * WIDTH;
        float* const scale3 = scale2 + 2 * WIDTH;
        for (int i = threadIdx.x; i < 2 * WIDTH; i += UNIT_MULTIPLIERS) shared.tables[i] = tables[0][i], scale2[i] = tables[1][i];
        if constexpr (BOTTLENECK)
            for (int i = threadIdx.x; i < 2 * width_out; i += UNIT_MULTIPLIERS) scale3[i] = tables[2][i];
        if (settled) dependent_wait();
        barrier_arrive(shared.ready);

        const UnitWeights weights(ring);
        const int row = group * UNIT_ROWS + lane_row, x_row = Tile::x_row(row < Tile::MIDDLE_ROWS ? row : 0);
        const int tap_row = Tile::middle_row(lane_row < Tile::PIXELS ? lane_row : 0);

        Stage<X_STAGES> next;
        int round = 0;
        for (int tile = blockIdx.x; tile < tiles; tile += step, ++round) {
            const int* const offsets = shared.offsets + round % 2 * Tile::X_ROWS;
            typename Product::Rows rows[2];
            float acc[1][8][4];
            clear(acc);
            if (round == 0) barrier_wait(shared.weights, 0);
            // The first layer, at the pixels of the tile and of its rim: the groups share the rows.
            UnitWeights its = weights;
#pragma unroll 1
            for (int c = 0; c < x_chunks; ++c) {
                barrier_wait(shared.x_full + next.slot, next.phase);
                const u8* const from = shared.x + next.slot * Memory::X;
                __syncwarp();
                Product::load(rows[0], from, x_row, half_unit);
#pragma unroll
                for (int tap = 0; tap < TAPS; ++tap) {
                    Product::multiply(acc[0], rows[tap % 2], its.chunk(tap));
                    if (tap + 1 == TAPS) continue;
                    Product::template wait<1>();
                    Product::load(rows[(tap + 1) % 2], from, x_row + (tap + 1) / 3 * Tile::XW + (tap + 1) % 3, half_unit);
                }
                Product::template wait<0>();
                its = its.chunk(TAPS);
                barrier_arrive(shared.x_empty + next.slot);
                next.advance();
            }
            if (round == 0) barrier_wait(shared.ready, 0);
            barrier_wait(shared.found + round % 2, round / 2 % 2);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int middle = group * UNIT_ROWS + its_row + 8 * half;
                if (middle >= Tile::MIDDLE_ROWS) continue;
                const bool inside = offsets[Tile::x_centre(middle)] >= 0;
#pragma unroll
                for (int n = 0; n < 8; n += 4) {
                    const int column = n * 8 + lane % 4 * 8;
                    float sums[8];
#pragma unroll
                    for (int e = 0; e < 8; ++e) sums[e] = acc[0][n + e / 2][2 * half + e % 2];
                    *reinterpret_cast<uint4*>(shared.middle + swizzled(middle, column / 8)) =
                        finished<T, INNER, true>(sums, shared.tables + column, shared.tables + WIDTH + column,
                                           zero<uint4>(), false, inside);
                }
            }
            barrier_arrive(shared.first);
            barrier_wait(shared.first, round % 2);
            if (round == 0) barrier_wait(shared.weights + 1, 0);

            // The 3x3 layer, at the pixels of the tile: the groups take turns in its taps.
            clear(acc);
            its = weights.chunk(first_chunks + group);
            __syncwarp();
            const auto load = [&](typename Product::Rows& to, int tap) {
                Product::load(to, shared.middle, tap_row + tap / 3 * Tile::MW + tap % 3, half_unit);
            };
            load(rows[0], group);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                Product::multiply(acc[0], rows[i % 2], its.chunk(2 * i));
                Product::template wait<1>();
                load(rows[(i + 1) % 2], min(2 * i + 2 + group, 8));
            }
            Product::template wait<0>();
            if (group == 0) {
                Product::multiply(acc[0], rows[0], its.chunk(8));
                Product::template wait<0>();
            }
            // Each group gives away half of its rows, and adds what it gets to the other half.
            float sums[8][2];  // of rows its_row + 8 * group
#pragma unroll
            for (int n = 0; n < 8; n += 2)
                shared.sums[(group * 4 + n / 2) * 128 + thread] =
                    group ? make_float4(acc[0][n][0], acc[0][n][1], acc[0][n + 1][0], acc[0][n + 1][1])
                          : make_float4(acc[0][n][2], acc[0][n][3], acc[0][n + 1][2], acc[0][n + 1][3]);
            barrier_arrive(shared.meet);
            barrier_wait(shared.meet, round % 2);
#pragma unroll
            for (int n = 0; n < 8; n += 2) {
                const float4 taken = shared.sums[((1 - group) * 4 + n / 2) * 128 + thread];
                const float theirs[4] = {taken.x, taken.y, taken.z, taken.w};
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float mine = group ? acc[0][n + e / 2][2 + e % 2] : acc[0][n + e / 2][e % 2];
                    sums[n + e / 2][e % 2] = __fadd_rn(mine, theirs[e]);
                }
            }
            const int pixel = its_row + 8 * group;  // whose sums these are
            const bool inside = pixel < Tile::PIXELS && offsets[Tile::x_of_pixel(pixel < Tile::PIXELS ? pixel : 0)] >= 0;
            const auto vector = [&](int n, float (&to)[8]) {
#pragma unroll
                for (int e = 0; e < 8; ++e) to[e] = sums[n + e / 2][e % 2];
            };
            if constexpr (!BOTTLENECK) {
                const int place = finder.y_pixel(tile, pixel);
                uint4 add_to[2];
#pragma unroll
                for (int v = 0; v < 2; ++v)
                    add_to[v] = residual_at<true>(residual, static_cast<i64>(place) * WIDTH + v * 32 + lane % 4 * 8, place >= 0);
                if (place >= 0)
#pragma unroll
                    for (int v = 0; v < 2; ++v) {
                        const int column = v * 32 + lane % 4 * 8;
                        float values[8];
                        vector(v * 4, values);
                        finish<T, ACTIVATION, true, true>(values, scale2 + column, scale2 + WIDTH + column, add_to[v],
                                                    residual, y, static_cast<i64>(place) * WIDTH + column, LANES, inside);
                    }
            } else {
#pragma unroll
                for (int n = 0; n < 8; n += 4) {
                    const int column = n * 8 + lane % 4 * 8;
                    float values[8];
                    vector(n, values);
                    *reinterpret_cast<uint4*>(shared.second + swizzled(pixel, column / 8)) =
                        finished<T, INNER, true>(values, scale2 + column, scale2 + WIDTH + column, zero<uint4>(),
                                           false, inside);
                }
                barrier_arrive(shared.last);
                int places[2];
                bool real[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    places[half] = finder.y_pixel(tile, its_row + 8 * half);
                    real[half] = places[half] >= 0 && offsets[Tile::x_of_pixel(its_row + 8 * half)] >= 0;
                }
                // The last layer: the groups take turns in panels of 64 columns.
                uint4 add_to[2][2];
                const auto load_residual = [&](int panel) {
#pragma unroll
                    for (int half = 0; half < 2; ++half)
#pragma unroll
                        for (int v = 0; v < 2; ++v)
                            add_to[half][v] = residual_at<true>(
                                residual, static_cast<i64>(places[half]) * width_out + panel * 64 + v * 32 + lane % 4 * 8,
                                places[half] >= 0 && panel < panels);
                };
                load_residual(group);
                barrier_wait(shared.last, round % 2);
                if (round == 0) barrier_wait(shared.weights + 2, 0);
                __syncwarp();
                Product::load(rows[0], shared.second, lane_row, half_unit);
#pragma unroll 1
                for (int panel = group; panel < panels; panel += UNIT_GROUPS) {
                    clear(acc);
                    Product::multiply(acc[0], rows[0], weights.chunk(before_last + panel));
                    Product::template wait<0>();
#pragma unroll
                    for (int half = 0; half < 2; ++half)
#pragma unroll
                        for (int v = 0; v < 2; ++v) {
                            if (places[half] < 0) continue;
                            float values[8];
#pragma unroll
                            for (int e = 0; e < 8; ++e) values[e] = acc[0][v * 4 + e / 2][2 * half + e % 2];
                            const int column = panel * 64 + v * 32 + lane % 4 * 8;
                            finish<T, ACTIVATION, true, true>(values, scale3 + column, scale3 + width_out + column,
                                                        add_to[half][v], residual, y, static_cast<i64>(places[half]) * width_out + column,
                                                        LANES, real[half]);
                        }
                    load_residual(panel + UNIT_GROUPS);
                }
            }
            barrier_arrive(shared.done + round % 2);
        }
    }
    if (static_cast<int>(blockIdx.x) >= tiles)  // no copy may be under way at the end
        for (int layer = 0; layer < LAYERS; ++layer) barrier_wait(shared.weights + layer, 0);
    if (clear_rows) {
        if (settled) dependent_wait();
        clear_rest<true>(y, static_cast<i64>(rows) * bh * bw * K, M * bh * bw * K);
    }
}
