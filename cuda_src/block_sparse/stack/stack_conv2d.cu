// stack_conv2d.cu: a convolution from a stack of blocks to a stack of blocks.
//   y[m, i, j, k] = activation(scale[k] * sum(x at (i * SH - top + r * DH, j * SW - left + s * DW) of block m, c] * w[r, s, c, k])
//                              + bias[k] + residual[m, i, j, k])
// Positions outside block m lie in its neighbours, which the table finds; what lies in no active block, or outside the
// image, is 0. Pixels of y outside the image are 0. Rows of y past the count are not written.
// Source: the implicit matrix product of cuDNN (Chetlur et al. 2014, arXiv:1410.0759).
// Python: sbnet_cupy/block_sparse/stack/stack_conv_plan.py
// stack_conv:         rows of the product are output pixels in the order of the stack, so that a tile of BM of them takes
//                     in several small blocks; columns are BN output channels; K is cut into chunks of 128 bytes.
// stack_conv_sum:     adds up what thread blocks that share K left in memory, where there are no clusters.
// pack_stack_weights: lays weights, scale and bias out as stack_conv stages them, once for many calls.
// See cuda_src/README.md for the pictures.
#include "activation.cuh"
#include "block_sparse/stack/block_table.cuh"
#include "block_sparse/stack/swizzled_tile.cuh"
#include "cluster.cuh"

// ---------------------------------------------------------------------------- the order of K

// The units of K, 16 bytes of channels each, in chunks of 8. First come groups of 8 units of channels: of each group
// one chunk for each tap. What is left over of the channels, `rest` units, follows tap by tap, without gaps.
struct Order {
    int taps, groups, rest, chunks;
    DEVICE Order(int channels, int per_unit, int taps) : taps(taps) {
        const int units = (channels + per_unit - 1) / per_unit;
        groups = units / 8, rest = units % 8;
        chunks = groups * taps + (rest * taps + 7) / 8;
    }
    // The tap and the unit of channels of unit `u` of a chunk that belongs to the rest; tap >= taps past the end.
    DEVICE void of_rest(int chunk, int u, int& tap, int& unit) const {
        const int number = (chunk - groups * taps) * 8 + u;
        tap = static_cast<int>(static_cast<u32>(number) / static_cast<u32>(rest));
        unit = groups * 8 + number - tap * rest;
    }
};

// Which output channel is in which column, of 8 * GROUPS columns: a lane holds two columns of each group of 8, and these are
// 2 * GROUPS channels in a row, 16 bytes.
template <typename T>
struct Columns {
    static constexpr int GROUPS = 8 / sizeof(T), COUNT = 2 * GROUPS;
    static DEVICE int channel(int column) {
        const int n = column / 8, t = column % 8 / 2, e = column % 2;
        return n / GROUPS * (8 * GROUPS) + t * COUNT + n % GROUPS * 2 + e;
    }
};

// ---------------------------------------------------------------------------- packed weights

// scale and bias, float[2][64 * panels]; then for each panel of 64 output channels its chunks of 64 rows x 128 bytes,
// swizzled.
constexpr int PANEL = 64, PANEL_CHUNK = PANEL * TILE_ROW;
DEVICE i64 tables_bytes(int K) { return static_cast<i64>(ceil_div(K, PANEL)) * (2 * PANEL * 4); }

template <typename T, bool ROUND>
__global__ void __launch_bounds__(256)
    pack_stack_weights(const T* __restrict__ w, const float* __restrict__ scale, const float* __restrict__ bias,
                       u8* __restrict__ packed, i64 C, i64 K, i64 R, i64 S, i64 step_r, i64 step_s, i64 step_c,
                       i64 step_k) {
    constexpr int LANES = 16 / sizeof(T);
    const Order order(static_cast<int>(C), LANES, static_cast<int>(R * S));
    const i64 panels = ceil_div<i64>(K, PANEL), units = panels * order.chunks * (PANEL * 8);
    const i64 tables = tables_bytes(static_cast<int>(K));
    for (i64 i = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x; i < units; i += static_cast<i64>(gridDim.x) * 256) {
        if (i < 2 * PANEL * panels) {
            const i64 k = i % (PANEL * panels);
            const float* table = i < PANEL * panels ? scale : bias;
            reinterpret_cast<float*>(packed)[i] = k < K && table ? table[k] : i < PANEL * panels ? 1.0f : 0.0f;
        }
        const int u = static_cast<int>(i % 8), column = static_cast<int>(i / 8 % PANEL);
        const i64 slice = i / (8 * PANEL);
        const int chunk = static_cast<int>(slice % order.chunks), panel = static_cast<int>(slice / order.chunks);
        int tap, unit;
        if (chunk < order.groups * order.taps) {
            tap = chunk % order.taps;
            unit = chunk / order.taps * 8 + u;
        } else {
            order.of_rest(chunk, u, tap, unit);
        }
        const i64 k = panel * PANEL + Columns<T>::channel(column);
        Elements<T, uint4> value(zero<uint4>());
#pragma unroll
        for (int e = 0; e < LANES; ++e) {
            const i64 c = static_cast<i64>(unit) * LANES + e;
            if (tap < order.taps && c < C && k < K)
                value.element[e] = w[tap / S * step_r + tap % S * step_s + c * step_c + k * step_k];
            if constexpr (ROUND) value.element[e] = __uint_as_float(to_tf32(value.element[e]));
        }
        *reinterpret_cast<uint4*>(packed + tables + slice * PANEL_CHUNK + swizzled(column, u)) = value.vector;
    }
}

// ---------------------------------------------------------------------------- sizes

struct Problem {
    int C, K;                // channels
    int bh, bw, ph, pw;      // pixels of a block of x and of y
    int H, W, P, Q;          // pixels of the images of x and y
    int S, R, SH, SW, DH, DW, top, left;
    bool whole;  // no block of y sticks out of its image
};

// Where in its image an output pixel is, and where its window begins in its block.
struct Pixel {
    BlockTable::Block block;
    int row, y, x;  // of the stack; of the window's first tap
    bool inside;    // the image

    DEVICE Pixel(const BlockTable& table, const Problem& g, int p) {
        const u32 size = static_cast<u32>(g.ph) * static_cast<u32>(g.pw);
        row = static_cast<int>(static_cast<u32>(p) / size);
        const int in_block = p - row * static_cast<int>(size);
        const int i = static_cast<int>(static_cast<u32>(in_block) / static_cast<u32>(g.pw)), j = in_block - i * g.pw;
        block = table.block(row);
        inside = block.n >= 0 && block.hi * g.ph + i < g.P && block.wi * g.pw + j < g.Q;
        y = i * g.SH - g.top, x = j * g.SW - g.left;
    }
};

// ---------------------------------------------------------------------------- the result

// COUNT channels of a pixel from channel k on: 16 bytes at once if VECTOR.
template <typename T, int ACTIVATION, bool VECTOR, int COUNT>
DEVICE void finish(const float (&sums)[COUNT], const float* scale, const float* bias, const T* __restrict__ residual,
                   T* __restrict__ y, i64 pixel, int k, int K, bool inside) {
    const i64 to = pixel * K + k;
    constexpr int LANES = 16 / sizeof(T);
#pragma unroll
    for (int part = 0; part < COUNT; part += LANES) {
        if (k + part >= K) return;
        Elements<T, uint4> add_to(zero<uint4>()), result(zero<uint4>());
        if (VECTOR && residual) add_to.vector = *reinterpret_cast<const uint4*>(residual + to + part);
#pragma unroll
        for (int e = 0; e < LANES; ++e) {
            const int at = part + e;
            if (!VECTOR && k + at >= K) continue;
            float value = __fmaf_rn(sums[at], scale[at], bias[at]);
            if (residual) value += to_compute<float>(VECTOR ? add_to.element[e] : residual[to + at]);
            value = inside ? activate<ACTIVATION>(value) : 0.0f;
            if constexpr (VECTOR)
                result.element[e] = from_compute<T>(value);
            else
                y[to + at] = from_compute<T>(value);
        }
        if constexpr (VECTOR) *reinterpret_cast<uint4*>(y + to + part) = result.vector;
    }
}

// ---------------------------------------------------------------------------- the kernel

// One thread block computes tiles of BM output pixels x BN output channels. SPLIT thread blocks share the chunks of a
// tile: a cluster, which adds up through shared memory, or, if PARTIALS, thread blocks that leave their sums in memory.
//   POINTWISE    a 1x1 kernel with stride 1: pixel p of y reads pixel p of x, and the table is not needed
//   VECTOR_IN    pixels of x are whole vectors of 16 bytes, aligned; VECTOR_OUT: those of y and the residual
//   ROUND        x is float, rounded to tf32 in shared memory
//   BULK         weights come by the bulk copy engine
//   CACHED       pixels come through the L1 cache, since taps read the same ones
template <template <typename, int, int, int, int> class Engine, typename T, int BM, int BN, int WM, int WN, int STAGES,
          int SPLIT, bool PARTIALS, bool POINTWISE, bool VECTOR_IN, bool VECTOR_OUT, bool ROUND, int ACTIVATION,
          bool BULK, bool CACHED, int BLOCKS>
__global__ void __launch_bounds__(Engine<T, BM, BN, WM, WN>::THREADS, BLOCKS)
    stack_conv(const T* __restrict__ x, const u8* __restrict__ packed, const T* __restrict__ residual,
               const int* __restrict__ bin_counts, const int* __restrict__ indices, const int* __restrict__ grid,
               float* __restrict__ partials, T* __restrict__ y, i64 M, i64 N, i64 GH, i64 GW, i64 C, i64 K, i64 bh,
               i64 bw, i64 ph, i64 pw, i64 H, i64 W, i64 P, i64 Q, i64 R, i64 S, i64 SH, i64 SW, i64 DH, i64 DW,
               i64 top, i64 left, i64 settled) {
    using Product = Engine<T, BM, BN, WM, WN>;
    constexpr int THREADS = Product::THREADS, MT = Product::MT, NT = Product::NT, LANES = 16 / sizeof(T);
    constexpr int A = BM * TILE_ROW, B = BN * TILE_ROW, STAGE = A + B, PANELS = BN / PANEL;
    constexpr int AHEAD = Product::ASYNC ? STAGES - 2 : STAGES - 1;  // chunks on their way
    constexpr int CLUSTER = PARTIALS ? 1 : SPLIT;
    constexpr int GROUPS = Columns<T>::GROUPS, COUNT = Columns<T>::COUNT;
    constexpr int PASS = THREADS / 8, PASSES = BM / PASS;  // rows that all threads stage at once
    constexpr int PITCH = BN + 4;                          // floats of a row of sums in shared memory
    static_assert(BM % PASS == 0 && AHEAD >= 1, "threads share the rows evenly");
    static_assert(CLUSTER == 1 || BM * PITCH * 4 <= STAGES * STAGE, "sums lie where the stages were");

    DYNAMIC_SHARED(u8, unaligned);
    u8* const ring = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    float* const scale = reinterpret_cast<float*>(ring + STAGES * STAGE);
    float* const bias = scale + BN;
    u64* const arrived = reinterpret_cast<u64*>(bias + BN);
    int* const inside = reinterpret_cast<int*>(arrived + STAGES);
    int* const window = inside + BM;          // [BM][6]: n, hi, wi, row, y, x
    int* const offsets = window + 6 * BM;     // [taps][BM]: pixels of the stack, or -1

    const auto narrow = [](i64 value) { return static_cast<int>(value); };
    const Problem g{narrow(C), narrow(K), narrow(bh), narrow(bw), narrow(ph), narrow(pw), narrow(H), narrow(W),
                    narrow(P), narrow(Q), narrow(S), narrow(R), narrow(SH), narrow(SW), narrow(DH), narrow(DW),
                    narrow(top), narrow(left), P % ph == 0 && Q % pw == 0};
    const int taps = POINTWISE ? 1 : g.R * g.S;
    const Order order(g.C, LANES, taps);
    const int panels = ceil_div(g.K, PANEL), across = ceil_div(g.K, BN);
    const int rank = blockIdx.x % SPLIT;
    const int first = static_cast<int>(static_cast<i64>(order.chunks) * rank / SPLIT);
    const int count = static_cast<int>(static_cast<i64>(order.chunks) * (rank + 1) / SPLIT) - first;

    if (BULK && threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) barrier_init(arrived + s, 1);
        barrier_init_fence();
    }
    if (!settled) overlap_launches();
    const int rows = narrow(clamp(*bin_counts, 0, M)), pixels = rows * g.ph * g.pw;
    const BlockTable table{indices, grid, narrow(N), narrow(GH), narrow(GW), rows};
    bool waited = !settled;
    if constexpr (BULK) __syncthreads();

    const int lane = threadIdx.x % 32, unit = threadIdx.x % 8, first_row = threadIdx.x / 8;
    const int to = swizzled(first_row, unit);  // PASS is a multiple of 8: the same place in every pass
    int slot = 0, phase = 0;                   // of the chunk that is multiplied next
    int fill = 0;                              // the slot that is filled next

    for (int tile = blockIdx.x / SPLIT;; tile += gridDim.x / SPLIT) {
        const int tile_m = tile / across, p0 = tile_m * BM, k0 = (tile - tile_m * across) * BN;
        const bool any = p0 < pixels && static_cast<i64>(tile_m) * BM < pixels;
        if (!any) break;

        // Weights of the first chunks, scale and bias; meanwhile, where the pixels are.
        const u8* const weights = packed + tables_bytes(g.K) + (static_cast<i64>(k0 / PANEL) * order.chunks + first) * PANEL_CHUNK;
        const auto stage_weights = [&](int chunk, int into) {
            u8* const at = ring + into * STAGE + A;
            if constexpr (BULK) {
                if (threadIdx.x == 0) {
                    int here = 0;
#pragma unroll
                    for (int j = 0; j < PANELS; ++j) here += k0 / PANEL + j < panels;
                    barrier_expect(arrived + into, here * PANEL_CHUNK);
#pragma unroll
                    for (int j = 0; j < PANELS; ++j)
                        if (j < here)
                            bulk_copy(at + j * PANEL_CHUNK,
                                      weights + (static_cast<i64>(j) * order.chunks + chunk) * PANEL_CHUNK, PANEL_CHUNK,
                                      arrived + into);
                }
            } else {
#pragma unroll
                for (int j = 0; j < PANELS; ++j)
                    for (int i = threadIdx.x * 16; i < PANEL_CHUNK; i += THREADS * 16) {
                        const bool there = k0 / PANEL + j < panels;
                        const i64 from = (static_cast<i64>(j) * order.chunks + chunk) * PANEL_CHUNK + i;
                        copy_async_16(at + j * PANEL_CHUNK + i, weights + (there ? from : 0), there);
                    }
            }
        };
        if constexpr (BULK)
            for (int s = 0; s < AHEAD && s < count; ++s) stage_weights(s, (fill + s) % STAGES);
        for (int i = threadIdx.x; i < 2 * BN; i += THREADS) {
            const int k = k0 + i % BN;
            const float* const table = reinterpret_cast<const float*>(packed) + (i < BN ? 0 : panels * PANEL);
            scale[i] = k < g.K ? table[k] : 0.0f;
        }
        if (!POINTWISE || !g.whole)
            for (int i = threadIdx.x; i < BM; i += THREADS) {
                const Pixel pixel(table, g, p0 + i);
                inside[i] = pixel.inside;
                int* const mine = window + 6 * i;
                mine[0] = pixel.block.n, mine[1] = pixel.block.hi, mine[2] = pixel.block.wi;
                mine[3] = pixel.row, mine[4] = pixel.y, mine[5] = pixel.x;
            }
        if constexpr (!POINTWISE) {
            __syncthreads();
            for (int i = threadIdx.x; i < BM * g.R; i += THREADS) {
                const int row = i % BM, r = i / BM;
                const int* const its = window + 6 * row;
                const int n = its[0];
                const Along v(its[4] + r * g.DH, g.bh);
                const int hi = its[1] + v.block, image_y = hi * g.bh + v.at;
                for (int s = 0; s < g.S; ++s) {
                    const Along h(its[5] + s * g.DW, g.bw);
                    const int wi = its[2] + h.block, image_x = wi * g.bw + h.at;
                    int offset = -1;
                    if (n >= 0 && static_cast<u32>(image_y) < static_cast<u32>(g.H) &&
                        static_cast<u32>(image_x) < static_cast<u32>(g.W)) {
                        const int found = v.block == 0 && h.block == 0 ? its[3] : table.row(n, hi, wi);
                        if (found >= 0) offset = (found * g.bh + v.at) * g.bw + h.at;
                    }
                    offsets[(r * g.S + s) * BM + row] = offset;
                }
            }
        }
        if (!waited) {  // table and weights were there before; x, the residual and the memory of y may not be
            overlap_launches();
            waited = true;
        }
        if (residual && VECTOR_OUT) {  // it is read at the end
            constexpr int LINES = BN * sizeof(T) / 128;
            for (int i = threadIdx.x + rank * THREADS; i < BM * LINES; i += THREADS * SPLIT) {
                const int row = i / LINES, k = k0 + i % LINES * (128 / static_cast<int>(sizeof(T)));
                if (p0 + row < pixels && k < g.K) prefetch_line(residual + static_cast<i64>(p0 + row) * g.K + k);
            }
        }
        __syncthreads();

        // Begin to copy the next chunk.
        int chunk = 0, tap = first % taps, group = first / taps;  // of full groups
        const auto stage_pixels = [&](int into) {
            u8* const at = ring + into * STAGE + to;
            int t = tap, c = (group * 8 + unit) * LANES;
            bool real = true;
            if (first + chunk >= order.groups * taps) {
                order.of_rest(first + chunk, unit, t, c);
                c *= LANES;
                real = t < taps;
            }
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass) {
                const int row = first_row + pass * PASS;
                i64 pixel;
                if constexpr (POINTWISE) {
                    pixel = p0 + row < pixels ? p0 + row : -1;
                } else {
                    pixel = real ? offsets[t * BM + row] : -1;
                }
                const bool there = real && pixel >= 0;
                const T* const from = x + (there ? pixel * g.C + c : 0);
                if constexpr (VECTOR_IN && CACHED) {
                    copy_async_16_cached(at + pass * (PASS * TILE_ROW), from, there && c < g.C);
                } else if constexpr (VECTOR_IN) {
                    copy_async_16(at + pass * (PASS * TILE_ROW), from, there && c < g.C);
                } else {
                    Elements<T, uint4> value(zero<uint4>());
#pragma unroll
                    for (int e = 0; e < LANES; ++e)
                        if (there && c + e < g.C) value.element[e] = from[e];
                    *reinterpret_cast<uint4*>(at + pass * (PASS * TILE_ROW)) = value.vector;
                }
            }
            ++chunk;
            if (++tap == taps) tap = 0, ++group;
        };
        const auto stage_next = [&](bool with_weights) {
            if (with_weights) stage_weights(chunk, fill);
            stage_pixels(fill);
            if (++fill == STAGES) fill = 0;
        };
        for (int s = 0; s < AHEAD; ++s) {
            if (s < count) stage_next(!BULK);
            copy_async_commit();
        }

        float acc[MT][NT][4];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n) acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0.0f;
        for (int i = 0; i < count; ++i) {
            copy_async_wait<AHEAD - 1>();
            if constexpr (ROUND)  // what this thread has copied
                for (int pass = 0; pass < PASSES; ++pass) {
                    float4& four = *reinterpret_cast<float4*>(ring + slot * STAGE + to + pass * (PASS * TILE_ROW));
                    four = make_float4(__uint_as_float(to_tf32(four.x)), __uint_as_float(to_tf32(four.y)),
                                       __uint_as_float(to_tf32(four.z)), __uint_as_float(to_tf32(four.w)));
                }
            if constexpr (Product::ASYNC) shared_fence();
            __syncthreads();
            if constexpr (BULK) barrier_wait(arrived + slot, phase);
            if constexpr (!Product::ASYNC) {
                if (i + AHEAD < count) stage_next(true);
                copy_async_commit();
            }
            Product::multiply(acc, ring + slot * STAGE, ring + slot * STAGE + A);
            if (++slot == STAGES) slot = 0, phase ^= 1;
            if constexpr (Product::ASYNC) {
                wgmma_wait<1>();  // the slot before this one may be filled again, by the next round
                if (i + AHEAD < count) stage_next(true);
                copy_async_commit();
            }
        }
        if constexpr (Product::ASYNC) wgmma_wait<0>();
        copy_async_wait<0>();

        if constexpr (SPLIT == 1 || PARTIALS) {
            const int column = Product::column();
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = Product::row(m) + lane / 4 + 8 * half, p = p0 + row;
                    if (p >= pixels) continue;
                    const bool keep = g.whole || inside[row];
#pragma unroll
                    for (int n = 0; n < NT; n += GROUPS) {
                        const int at = column + n * 8 + lane % 4 * COUNT;
                        float sums[COUNT];
#pragma unroll
                        for (int e = 0; e < COUNT; ++e) sums[e] = acc[m][n + e / 2][2 * half + e % 2];
                        if constexpr (PARTIALS) {
                            float* const mine = partials + (static_cast<i64>(p) * SPLIT + rank) * (across * BN) + k0 + at;
#pragma unroll
                            for (int e = 0; e < COUNT; e += 4)
                                *reinterpret_cast<float4*>(mine + e) = make_float4(sums[e], sums[e + 1], sums[e + 2], sums[e + 3]);
                        } else {
                            finish<T, ACTIVATION, VECTOR_OUT>(sums, scale + at, bias + at, residual, y, p, k0 + at, g.K, keep);
                        }
                    }
                }
        } else {
            float* const sums = reinterpret_cast<float*>(ring);
            __syncthreads();  // nobody reads the stages any more
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int n = 0; n < NT; n += GROUPS) {
                        const int row = Product::row(m) + lane / 4 + 8 * half;
                        const int at = Product::column() + n * 8 + lane % 4 * COUNT;
#pragma unroll
                        for (int e = 0; e < COUNT; e += 4)
                            *reinterpret_cast<float4*>(sums + row * PITCH + at + e) =
                                make_float4(acc[m][n + e / 2][2 * half], acc[m][n + e / 2][2 * half + 1],
                                            acc[m][n + e / 2 + 1][2 * half], acc[m][n + e / 2 + 1][2 * half + 1]);
                    }
            Cluster<CLUSTER>::sync();
            constexpr int MINE = BM / SPLIT;  // rows that this thread block finishes
            for (int i = threadIdx.x; i < MINE * (BN / COUNT); i += THREADS) {
                const int row = rank * MINE + i / (BN / COUNT), at = i % (BN / COUNT) * COUNT, p = p0 + row;
                if (p >= pixels) continue;
                float total[COUNT];
#pragma unroll
                for (int e = 0; e < COUNT; e += 4) {
                    float4 part[SPLIT];
#pragma unroll
                    for (int q = 0; q < SPLIT; ++q)
                        part[q] = Cluster<CLUSTER>::load(reinterpret_cast<const float4*>(sums + row * PITCH + at + e), q);
                    float4 sum = part[0];
#pragma unroll
                    for (int q = 1; q < SPLIT; ++q)
                        sum.x += part[q].x, sum.y += part[q].y, sum.z += part[q].z, sum.w += part[q].w;
                    total[e] = sum.x, total[e + 1] = sum.y, total[e + 2] = sum.z, total[e + 3] = sum.w;
                }
                finish<T, ACTIVATION, VECTOR_OUT>(total, scale + at, bias + at, residual, y, p, k0 + at, g.K,
                                                  g.whole || inside[row]);
            }
            Cluster<CLUSTER>::sync();  // nobody reads these sums any more
        }
        if constexpr (Product::ASYNC) shared_fence();  // the copy engine fills the ring next
        __syncthreads();
    }
    if (!waited) overlap_launches();
}

// Add up the SPLIT sums of each pixel and channel, in their order. `width` floats are a row of sums.
template <typename T, int SPLIT, bool VECTOR_OUT, int ACTIVATION>
__global__ void __launch_bounds__(256)
    stack_conv_sum(const float* __restrict__ partials, const u8* __restrict__ packed, const T* __restrict__ residual,
                   const int* __restrict__ bin_counts, const int* __restrict__ indices, const int* __restrict__ grid,
                   T* __restrict__ y, i64 M, i64 N, i64 GH, i64 GW, i64 K, i64 ph, i64 pw, i64 P, i64 Q, i64 width) {
    constexpr int COUNT = Columns<T>::COUNT;
    overlap_launches();
    const auto narrow = [](i64 value) { return static_cast<int>(value); };
    const int rows = narrow(clamp(*bin_counts, 0, M));
    const BlockTable table{indices, grid, narrow(N), narrow(GH), narrow(GW), rows};
    Problem g{};
    g.ph = narrow(ph), g.pw = narrow(pw), g.P = narrow(P), g.Q = narrow(Q);
    const bool whole = P % ph == 0 && Q % pw == 0;
    const i64 across = ceil_div<i64>(K, COUNT), total = rows * ph * pw * across;
    const float* const scale = reinterpret_cast<const float*>(packed);
    const float* const bias = scale + ceil_div<i64>(K, PANEL) * PANEL;
    for (i64 i = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x; i < total; i += static_cast<i64>(gridDim.x) * 256) {
        const i64 p = divide(i, across);
        const int k = static_cast<int>(i - p * across) * COUNT;
        float sums[COUNT];
#pragma unroll
        for (int e = 0; e < COUNT; e += 4)
#pragma unroll
            for (int q = 0; q < SPLIT; ++q) {
                const float4 part = *reinterpret_cast<const float4*>(partials + (p * SPLIT + q) * width + k + e);
                const float values[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
                for (int v = 0; v < 4; ++v) sums[e + v] = q == 0 ? values[v] : sums[e + v] + values[v];
            }
        const bool inside = whole || Pixel(table, g, static_cast<int>(p)).inside;
        finish<T, ACTIVATION, VECTOR_OUT>(sums, scale + k, bias + k, residual, y, p, k, static_cast<int>(K), inside);
    }
}
