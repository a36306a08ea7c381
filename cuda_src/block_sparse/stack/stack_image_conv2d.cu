// stack_image_conv2d.cu: the convolution of images of few channels, at their active blocks, to a stack of blocks.
//   y[m, i, j, k] = activation(scale[k] * sum(x[n, v, u, c] * w[r, s, c, k]) + bias[k])
//   v = (hi * ph + i) * SH - top + r * DH,   u = (wi * pw + j) * SW - left + s * DW,   (n, hi, wi) = indices[m]
// The sum is over r, s, c; pixels outside the image, and those in no active block, are 0. Pixels of y outside their image
// become 0. Rows of y past the count are not written, or become 0. Sums are in float; floats are rounded to tf32.
// Source: convolution as a matrix product (Chellapilla et al. 2006), the rows of A shifted pixels of a patch.
// WGMMA: four warps multiply together, A from registers and B from shared memory, on compute capability 9.0; otherwise by
// mma.sync. Both read the weights from the same tiles.
// Python: sbnet_cupy/block_sparse/stack/stack_image_conv2d.py
// Launch: a persistent grid of 128 threads, blockIdx.y a panel of 8 * NT output channels, whose weights stay in shared
//         memory. A tile is TH x TW <= 64 * MT pixels of a block of y; the patch of x under it, and its rim, is read once.
// Why:    neither a stack of x nor its rims exist in memory, and K is no longer than pixels of 8 bytes make it: tensor
//         cores take pixels of 3 channels with one zero, not five. See cuda_src/README.md for the order of K.
#include "block_sparse/stack/block_table.cuh"
#include "dense/tile_result.cuh"

// K is in units of 8 bytes of a pixel, tap after tap, and four units make a step: the K of one product. Lane l holds both
// words of unit l % 4: it reads them at once, and the order of K within a step is the same for A and B.
constexpr int STEP = 4;

// A number as the tensor cores take it.
template <typename T>
DEVICE T as_factor(T value) {
    if constexpr (Same<T, float>::value) return __uint_as_float(to_tf32(value));
    return value;
}

// packed: float scale[columns], bias[columns]; then for every 8 columns and each step two core matrices, which hold the
// first and the second word of the step's units: 16 bytes for each column. `columns` is K rounded up to 64.
template <typename T>
__global__ void __launch_bounds__(256, 3)
    pack_image_weights(const T* __restrict__ w, const float* __restrict__ scale, const float* __restrict__ bias,
                       u8* __restrict__ packed, i64 C, i64 K, i64 R, i64 S, i64 step_r, i64 step_s, i64 step_c,
                       i64 step_k) {
    // No division of 64 bits: it would be a call, around which registers spill.
    constexpr int PER_UNIT = 8 / sizeof(T);
    const int per_pixel = ceil_div(static_cast<int>(C), PER_UNIT), across = static_cast<int>(S);
    const int taps = static_cast<int>(R) * across, steps = ceil_div(taps * per_pixel, STEP);
    const int columns = ceil_div(static_cast<int>(K), 64) * 64;
    const i64 vectors = static_cast<i64>(columns) * steps * 2;
    float* const tables = reinterpret_cast<float*>(packed);
    uint4* const to = reinterpret_cast<uint4*>(tables + 2 * columns);
    for (i64 i = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x; i < vectors; i += static_cast<i64>(gridDim.x) * 256) {
        if (i < columns) {
            tables[i] = scale && i < K ? scale[i] : 1.0f;
            tables[columns + i] = bias && i < K ? bias[i] : 0.0f;
        }
        const int row = static_cast<int>(i % 8), word = static_cast<int>(i / 8 % 2), pair = static_cast<int>(i / 16);
        const int step = pair % steps;
        const i64 k = ChannelOrder<T>::channel(pair / steps * 8 + row);
        Elements<T, uint4> value(zero<uint4>());
#pragma unroll
        for (int e = 0; e < 2 * PER_UNIT; ++e) {
            const int unit = step * STEP + e / (PER_UNIT / 2), tap = unit / per_pixel;
            const int c = unit % per_pixel * PER_UNIT + word * (PER_UNIT / 2) + e % (PER_UNIT / 2);
            const T* const of_tap = w + (tap / across * step_r + tap % across * step_s);
            if (tap < taps && c < C && k < K) value.element[e] = as_factor(of_tap[c * step_c + k * step_k]);
        }
        to[i] = value.vector;
    }
}

// The products of a tile: rows are the windows of its pixels in the patch, columns the channels of the panel.
template <bool WGMMA, typename T, int MT, int NT>
struct WindowProducts {
    static constexpr int CORES = 256;  // bytes of the core matrices of 8 columns and one step
    const u32* words;      // of the patch; before them are zeros
    const int* offsets;    // of units in the patch, in words
    const u8* weights;     // [NT][steps][2][8] of 16 bytes
    int steps, none;       // none: the step in which the lane's unit is past the last one
    int (&window)[MT][2];  // of the lane's pixels: the first word in the patch
    static constexpr int ZERO = -2;

    using Rows = u32[MT][4];
    DEVICE void load(Rows& a, int step) const {
        const int offset = offsets[step * STEP + threadIdx.x % 4];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // (Two loads: the words of one lead to registers that are no neighbours.)
                const u32* const unit = words + (step == none ? ZERO : window[m][half] + offset);
                a[m][half] = unit[0], a[m][half + 2] = unit[1];
            }
    }
    DEVICE void multiply(float (&acc)[MT][NT][4]) const {
        if constexpr (WGMMA) {
            const u64 columns = matrix_descriptor(shared_address(weights), CORES / 2, steps * CORES);
            const auto begin = [&](const Rows& a, int step) {
                wgmma_fence();
#pragma unroll
                for (int m = 0; m < MT; ++m)
                    Wgmma<T, 8 * NT>::registers(&acc[m][0][0], a[m], columns + step * (CORES >> 4));
                wgmma_commit();
            };
            Rows even, odd;
            int step = steps % 2;
            if (step) {
                load(even, 0);
                begin(even, 0);
                wgmma_wait<0>();
            }
            load(even, min(step, steps - 1));
#pragma unroll 1
            for (; step < steps; step += 2) {  // rows are loaded while those of the step before are multiplied
                begin(even, step);
                wgmma_wait<1>();
                load(odd, step + 1);
                begin(odd, step + 1);
                wgmma_wait<1>();
                load(even, min(step + 2, steps - 1));
            }
            wgmma_wait<0>();
        } else {
            const int lane = threadIdx.x % 32;
            const u8* const its = weights + lane / 16 * (steps * CORES) + lane % 16 * 16;
#pragma unroll 2
            for (int step = 0; step < steps; ++step) {
                Rows a;
                load(a, step);
#pragma unroll
                for (int n = 0; n < NT; n += 2) {
                    u32 b[4];
                    ldmatrix_x4(b, its + (n * steps + step) * CORES);
#pragma unroll
                    for (int m = 0; m < MT; ++m)
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            if constexpr (Same<T, float>::value)
                                mma_1688_tf32(acc[m][n + i], a[m], b[2 * i], b[2 * i + 1]);
                            else
                                mma_16816<T>(acc[m][n + i], a[m], b[2 * i], b[2 * i + 1]);
                        }
                }
            }
        }
    }
};

// The sizes of a convolution, as stack_image_conv2d takes them.
struct ImageConv {
    int K, bh, bw, ph, pw, H, W, P, Q, R, S, SH, SW, DH, DW, top, left;
    int tile_h, tile_w;    // pixels of y that a tile covers
    int across, tiles;     // tiles of a block of y: in a row, in all
    int patch_h, patch_w;  // pixels of x under a tile

    DEVICE bool whole(const BlockTable& table) const { return P == table.GH * ph && Q == table.GW * pw; }
};

// A pixel of x, as it is loaded: its channels one by one; or, if PIXELS, the words that they lie in, side by side and
// with the next pixel's, of which a first half may be the pixel's before.
template <typename T, int C, bool PIXELS>
struct LoadedPixel {
    static constexpr int BYTES = C * sizeof(T), UNITS = ceil_div(BYTES, 8), WORDS = ceil_div(BYTES, 4);
    Elements<u32, uint2> words[UNITS];

    DEVICE void load(const T* pixel, i64 step_c) {
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) words[unit].vector = zero<uint2>();
        if constexpr (PIXELS) {
            const u32* const from = reinterpret_cast<const u32*>(pixel);
#pragma unroll
            for (int w = 0; w < WORDS; ++w) words[w / 2].element[w % 2] = from[w];
        } else {
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit) {
                Elements<T, uint2> channels(zero<uint2>());
                constexpr int COUNT = Elements<T, uint2>::COUNT;
#pragma unroll
                for (int e = 0; e < COUNT; ++e)
                    if (unit * COUNT + e < C) channels.element[e] = pixel[(unit * COUNT + e) * step_c];
                words[unit].vector = channels.vector;
            }
        }
    }
    // A unit of the pixel, which begins at bit `skip` of the words, 0 or 16.
    DEVICE uint2 unit(int number, int skip) const {
        Elements<u32, uint2> result(words[number].vector);
        if constexpr (PIXELS && BYTES % 4 != 0) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int w = 2 * number + i;
                const u64 next = w + 1 < WORDS ? words[(w + 1) / 2 % UNITS].element[(w + 1) % 2] : 0u;
                result.element[i] = static_cast<u32>((next << 32 | result.element[i]) >> skip);
                if (w == WORDS - 1) result.element[i] &= 0xffffu;
            }
        }
        if constexpr (Same<T, float>::value) {
            Elements<T, uint2> floats(result.vector);
#pragma unroll
            for (int e = 0; e < 2; ++e) floats.element[e] = as_factor(floats.element[e]);
            return floats.vector;
        }
        return result.vector;
    }
};

// Copies the patch of x under a tile to shared memory: 0 outside the image and in no active block. A thread takes pixels
// of one column, every `lines`-th of them. Loads do not wait for the table: what it refuses is dropped.
template <typename T, int C, bool PIXELS, int THREADS>
struct PatchLoader {
    static constexpr int PER_UNIT = 8 / sizeof(T), UNITS = ceil_div(C, PER_UNIT);
    using Pixel = LoadedPixel<T, C, PIXELS>;
    // More of them spill registers. With whole pixels, those of usual tiles are all under way together.
    static constexpr int AT_ONCE = PIXELS ? (UNITS == 1 ? 7 : UNITS == 2 ? 3 : 1) : C > 4 ? 1 : UNITS > 1 ? 2 : 3;
    const ImageConv& g;
    Divisor down, across;
    int step_h, step_w, step_c, lines, line, column;

    DEVICE PatchLoader(const ImageConv& g, i64 step_h, i64 step_w, i64 step_c)
        : g(g), down(g.bh), across(g.bw), step_h(static_cast<int>(step_h)), step_w(static_cast<int>(step_w)),
          step_c(static_cast<int>(step_c)), lines(max(THREADS / g.patch_w, 1)), line(threadIdx.x / g.patch_w),
          column(threadIdx.x - line * g.patch_w) {
        if (g.patch_w > THREADS) line = 0, column = threadIdx.x;
    }

    // The patch whose first pixel is (v0, u0) of image n; none of it is there if n < 0.
    DEVICE void load(uint2* patch, const T* __restrict__ image, const BlockTable& table, int n, int v0, int u0) const {
        const int lines = PIXELS ? recomputed(this->lines) : this->lines;  // (or multiples of it are kept, in registers)
        if (line >= lines) return;
        for (int s = column; s < g.patch_w; s += THREADS) {
            const int u = u0 + s;
            const u32 height = n >= 0 && static_cast<u32>(u) < static_cast<u32>(g.W) ? g.H : 0;
            const i64 begin = height ? static_cast<i64>(u) * (PIXELS ? C : step_w) : 0;
            const int skip = PIXELS && Pixel::BYTES % 4 != 0 ? static_cast<int>(begin % 2) * 16 : 0;
            const T* const from = image + (begin - skip / 16);
            const int* const rows = table.grid + (height ? static_cast<i64>(n) * table.GH * table.GW + across.of(u) : 0);
            for (int first = line; first < g.patch_h; first += AT_ONCE * lines) {
                Pixel pixels[AT_ONCE];
                int found[AT_ONCE];
#pragma unroll
                for (int a = 0; a < AT_ONCE; ++a) {  // (something is loaded anyway: branches would wait for it)
                    const int v = v0 + first + a * lines;
                    const bool inside = static_cast<u32>(v) < height;
                    const int at = inside ? v : 0;
                    pixels[a].load(from + static_cast<i64>(at) * step_h, step_c);
                    found[a] = rows[static_cast<i64>(down.of(at)) * table.GW];
                    found[a] = inside ? found[a] : -1;
                }
#pragma unroll
                for (int a = 0; a < AT_ONCE; ++a) {
                    const int r = first + a * lines;
                    const bool active = static_cast<u32>(found[a]) < static_cast<u32>(table.rows);
#pragma unroll
                    for (int unit = 0; unit < UNITS; ++unit)
                        if (r < g.patch_h)
                            patch[(r * g.patch_w + s) * UNITS + unit] = active ? pixels[a].unit(unit, skip) : zero<uint2>();
                }
            }
        }
    }
};

template <bool WGMMA, typename T, int CHANNELS, bool PIXELS, int MT, int NT, bool VECTOR, int ACTIVATION, int BLOCKS>
__global__ void __launch_bounds__(128, BLOCKS)
    stack_image_conv2d(const T* __restrict__ x,             // images, by their steps
                       const u8* __restrict__ packed,       // by pack_image_weights
                       const int* __restrict__ bin_counts,  // [1]
                       const int* __restrict__ indices,     // [M, 3]
                       const int* __restrict__ grid,        // [N, GH, GW]
                       T* __restrict__ y,                   // [M, ph, pw, K]
                       const float* __restrict__ scaled,      // as in stack_conv.cuh
                       i64 M, i64 N, i64 GH, i64 GW, i64 K, i64 bh, i64 bw, i64 ph, i64 pw, i64 H, i64 W, i64 P,
                       i64 Q, i64 R, i64 S, i64 SH, i64 SW, i64 DH, i64 DW, i64 top, i64 left, i64 step_n, i64 step_h,
                       i64 step_w, i64 step_c, i64 tile_h, i64 tile_w, i64 settled, i64 clear_rows) {
    constexpr int THREADS = 128, BN = 8 * NT, UNITS = ceil_div(CHANNELS, static_cast<int>(8 / sizeof(T)));
    constexpr int GROUPS = ChannelOrder<T>::GROUPS, COUNT = ChannelOrder<T>::COUNT;
    static_assert(NT % GROUPS == 0, "a lane's columns are whole vectors");
    const auto narrow = [](i64 value) { return static_cast<int>(value); };
    const int across = ceil_div(narrow(pw), narrow(tile_w)), tiles = across * ceil_div(narrow(ph), narrow(tile_h));
    const ImageConv g{narrow(K),  narrow(bh), narrow(bw),  narrow(ph),   narrow(pw),     narrow(H),      narrow(W),
                      narrow(P),  narrow(Q),  narrow(R),   narrow(S),    narrow(SH),     narrow(SW),     narrow(DH),
                      narrow(DW), narrow(top), narrow(left), narrow(tile_h), narrow(tile_w), across,        tiles,
                      narrow((tile_h - 1) * SH + (R - 1) * DH + 1), narrow((tile_w - 1) * SW + (S - 1) * DW + 1)};
    const int units = g.R * g.S * UNITS, steps = ceil_div(units, STEP), k0 = blockIdx.y * BN;
    const int thread = threadIdx.x, lane = thread % 32, t = lane % 4;

    DYNAMIC_SHARED(uint4, weights);                                          // [BN][steps][2]
    float* const tables = reinterpret_cast<float*>(weights + BN * steps * 2);  // scale and bias, and what is last
    int* const offsets = reinterpret_cast<int*>(tables + TABLES<ACTIVATION> * BN);  // of the units of a window in the patch
    uint2* const patch = reinterpret_cast<uint2*>(offsets + steps * STEP) + 2;  // [patch_h][patch_w][UNITS], after zeros

    const auto load_weights = [&]() {
        const int columns = ceil_div(g.K, 64) * 64;
        const float* const from = reinterpret_cast<const float*>(packed);
        const uint4* const all = reinterpret_cast<const uint4*>(from + 2 * columns);
        for (int i = thread; i < BN * steps * 2; i += THREADS)
            copy_async_16(weights + i, all + static_cast<i64>(k0) * steps * 2 + i, true);
        for (int i = thread * 4; i < TABLES<ACTIVATION> * BN; i += THREADS * 4) {
            const int table = i / BN, k = k0 + i % BN;
            copy_async_16(tables + i, table < 2 ? from + table * columns + k : scaled + (table - 2) * last_channels(g.K) + k, true);
        }
        copy_async_commit();
    };
    if (settled) load_weights();
    for (int unit = thread; unit < steps * STEP; unit += THREADS) {
        const int tap = unit / UNITS, r = tap / g.S;
        offsets[unit] = unit < units ? ((r * g.DH * g.patch_w + (tap - r * g.S) * g.DW) * UNITS + unit - tap * UNITS) * 2 : 0;
    }
    if (thread < 2) patch[-1 - thread] = zero<uint2>();
    const Divisor tile_width(g.tile_w);
    constexpr int NEXT_ROWS = WGMMA ? 64 : 16;  // from a warp's 16 rows of a product to its next ones
    const int first_pixel = thread / 32 * (WGMMA ? 16 : 16 * MT) + lane / 4;  // of the lane; another is 8 further
    int window[MT][2];  // of the lane's pixels of a tile: the first word in the patch
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int pixel = first_pixel + m * NEXT_ROWS + half * 8, i = tile_width.of(pixel), j = pixel - i * g.tile_w;
            window[m][half] = i < g.tile_h ? (i * g.SH * g.patch_w + j * g.SW) * UNITS * 2 : 0;
        }
    const PatchLoader<T, CHANNELS, PIXELS, THREADS> loader(g, step_h, step_w, step_c);
    const int none = units % STEP && t >= units % STEP ? steps - 1 : -1;  // the step in which the lane's unit is none
    const WindowProducts<WGMMA, T, MT, NT> products{reinterpret_cast<const u32*>(patch), offsets,
                                                    reinterpret_cast<const u8*>(weights), steps, none, window};

    overlap_launches();
    if (!settled) load_weights();
    const BlockTable all_rows{indices, grid, narrow(N), narrow(GH), narrow(GW), narrow(M)};
    BlockTable::Block next = all_rows.block(blockIdx.x / g.tiles);  // does not wait for the count
    BlockTable table = all_rows;
    table.rows = narrow(clamp(*bin_counts, 0, M));
    if (clear_rows) {
        const i64 each = static_cast<i64>(g.ph) * g.pw * g.K;
        clear_rest<VECTOR>(y, table.rows * each, M * each);
    }
    const bool whole = g.whole(table);
    const int all = table.rows * g.tiles;
    for (int tile = blockIdx.x; tile < all; tile += gridDim.x) {
        const int row = tile / g.tiles, part = tile - row * g.tiles;
        const int i0 = part / g.across * g.tile_h, j0 = part % g.across * g.tile_w;
        const BlockTable::Block block = next;
        const T* const image = x + max(block.n, 0) * step_n;
        loader.load(patch, image, table, block.n, (block.hi * g.ph + i0) * g.SH - g.top,
                    (block.wi * g.pw + j0) * g.SW - g.left);
        next = all_rows.block((tile + gridDim.x) / g.tiles);
        copy_async_wait<0>();
        if (WGMMA) shared_fence();  // for the weights
        __syncthreads();

        float acc[MT][NT][4];
        clear(acc);
        products.multiply(acc);
        __syncthreads();  // the patch may be written again

        T* const corner = y + ((static_cast<i64>(row) * g.ph + i0) * g.pw + j0) * g.K + k0 + t * COUNT;
        const int left_h = block.n < 0 ? 0 : whole ? g.ph : g.P - block.hi * g.ph;  // pixels of the block in its image
        const int left_w = whole ? g.pw : g.Q - block.wi * g.pw;
#pragma unroll
        for (int n = 0; n < NT; n += GROUPS) {
            const int column = n * 8 + t * COUNT, channel = k0 + column;
            if (channel >= g.K) break;
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int pixel = recomputed(first_pixel) + m * NEXT_ROWS + half * 8;
                    const int i = tile_width.of(pixel), j = pixel - i * g.tile_w;
                    if (i >= g.tile_h || i0 + i >= g.ph || j0 + j >= g.pw) continue;
                    float values[COUNT];
                    vector_of<T>(acc[m], n / GROUPS, half, values);
                    scale_and_shift<true>(values, tables + column, tables + BN + column);
                    const bool inside = i0 + i < left_h && j0 + j < left_w;
                    if constexpr (scales_last(ACTIVATION)) {
#pragma unroll
                        for (int e = 0; e < COUNT; ++e) values[e] = activate<after_sum(ACTIVATION)>(values[e]);
                        const float* const last = tables + 2 * BN + recomputed(column);
                        scale_and_shift<false>(values, last, last + BN);
                    }
                    constexpr int AT_END = scales_last(ACTIVATION) ? 0 : ACTIVATION;
                    const Elements<T, uint4> result(inside ? rounded<T, AT_END>(values) : zero<uint4>());
                    T* const to = corner + static_cast<i64>((i * g.pw + j) * g.K) + n * 8;
                    if constexpr (VECTOR) {
                        *reinterpret_cast<uint4*>(to) = result.vector;
                    } else {
#pragma unroll
                        for (int e = 0; e < COUNT; ++e)
                            if (channel + e < g.K) to[e] = result.element[e];
                    }
                }
        }
    }
}
