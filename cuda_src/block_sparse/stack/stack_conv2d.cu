// stack_conv2d.cu: a convolution from a stack of blocks to a stack of blocks.
//   y[m, i, j, k] = activation(scale[k] * sum(x at (i * SH - top + r * DH, j * SW - left + s * DW) of block m, c] * w[r, s, c, k])
//                              + bias[k] + residual[m, i, j, k])
// Positions outside block m lie in its neighbours, which the table finds; what lies in no active block, or outside the
// image, is 0. Pixels of y outside the image are 0. Rows of y past the count are not written, or become 0.
// Source: the implicit matrix product of cuDNN (Chetlur et al. 2014, arXiv:1410.0759).
// Python: sbnet_cupy/block_sparse/stack/stack_conv2d.py; launched by stack_launch.py
// Rows of the product are output pixels in the order of the stack, so that a tile of BM of them takes in several small
// blocks; columns are BN output channels; K is cut into chunks of 128 bytes. SPLIT thread blocks may share K.
// stack_conv:           all threads copy, and all multiply.
// stack_conv_pipelined: some warps copy, the others multiply. Compute capability 9.0 and newer.
// stack_conv_patch:     the same; windows of several pixels with stride 1 read patches of x in shared memory.
// stack_conv_sum:       adds up what thread blocks that share K left in memory, where they are no cluster.
// pad_stack_channels:   copies a stack whose pixels are no whole vectors of 16 bytes into one whose pixels are.
// pack_stack_weights:   lays weights, scale and bias out as these stage them, once for many calls.
// pack_image_conv_weights: the same for stack_conv_pipelined from images to images, and writes their background.
// Launch: a persistent grid, SPLIT thread blocks for each tile. See cuda_src/README.md for the pictures.
#include "block_sparse/background.cuh"
#include "block_sparse/stack/stack_conv_patch.cuh"
#include "block_sparse/stack/stack_conv_pipelined.cuh"

// W is what the weights are in: T, or float, which is rounded. Steps may be negative: w is then that of the first tap.
// Thread block `number` of `count` does its share.
template <typename T, bool ROUND, typename W, typename Table>
DEVICE void pack_weights_of_stack(const W* __restrict__ w, const Table* __restrict__ scale, const Table* __restrict__ bias,
                                  u8* __restrict__ packed, i64 C, i64 K, i64 R, i64 S, i64 step_r, i64 step_s, i64 step_c,
                                  i64 step_k, const ChannelGroups& by_group, i64 number, i64 count) {
    constexpr int LANES = 16 / sizeof(T), PER_VECTOR = 16 / sizeof(W);
    const int across = static_cast<int>(S), outputs = static_cast<int>(K);
    const Order order(by_group.span, LANES, static_cast<int>(R) * across);
    const int panels = ceil_div(outputs, PANEL);
    const i64 units = static_cast<i64>(panels) * order.chunks * (PANEL * 8), tables = tables_bytes(outputs);
    const bool by_output = step_k < step_c;  // neighbouring threads read what lies side by side
    for (i64 i = number * 256 + threadIdx.x; i < units; i += count * 256) {
        if (i < 2 * PANEL * panels) {
            const int k = static_cast<int>(i) % (PANEL * panels);
            const Table* table = i < PANEL * panels ? scale : bias;
            reinterpret_cast<float*>(packed)[i] =
                k < outputs && table ? to_compute<float>(table[k]) : i < PANEL * panels ? 1.0f : 0.0f;
        }
        const u32 slice = static_cast<u32>(i / (8 * PANEL)), within = static_cast<u32>(i) % (8 * PANEL);
        const int u = static_cast<int>(by_output ? within / PANEL : within % 8);
        const int place = static_cast<int>(by_output ? within % PANEL : within / 8);
        const int column = by_output ? ChannelOrder<T>::column(place) : place;
        const int chunk = static_cast<int>(slice % order.chunks), panel = static_cast<int>(slice / order.chunks);
        int tap = chunk % order.taps, unit = chunk / order.taps * 8 + u;
        if (chunk >= order.groups * order.taps) order.of_rest(chunk, u, tap, unit);
        const int k = panel * PANEL + (by_output ? place : ChannelOrder<T>::channel(column));
        // Of the group of k, the first channel of the unit.
        const int first =
            by_group.begin(panel, static_cast<int>(C), LANES) + unit * LANES - k / by_group.out * by_group.in;
        const i64 start = tap / across * step_r + tap % across * step_s + first * step_c + k * step_k;
        const bool there = tap < order.taps && k < outputs;
        Elements<W, uint4> weights[LANES / PER_VECTOR];
        const bool is_whole = there && first >= 0 && first + LANES <= by_group.in;
        if (is_whole && step_c == 1 && reinterpret_cast<u64>(w + start) % 16 == 0) {
#pragma unroll
            for (int v = 0; v < LANES / PER_VECTOR; ++v)
                weights[v].vector = reinterpret_cast<const uint4*>(w + start)[v];
        } else {
#pragma unroll
            for (int e = 0; e < LANES; ++e) {
                const bool is_one = there && static_cast<u32>(first + e) < static_cast<u32>(by_group.in);
                weights[e / PER_VECTOR].element[e % PER_VECTOR] = is_one ? w[start + e * step_c] : zero<W>();
            }
        }
        Elements<T, uint4> value;
#pragma unroll
        for (int e = 0; e < LANES; ++e) {
            const W weight = weights[e / PER_VECTOR].element[e % PER_VECTOR];
            if constexpr (Same<T, W>::value)
                value.element[e] = weight;
            else
                value.element[e] = from_compute<T>(to_compute<float>(weight));
            if constexpr (ROUND) value.element[e] = __uint_as_float(to_tf32(value.element[e]));
        }
        *reinterpret_cast<uint4*>(packed + tables + static_cast<i64>(slice) * PANEL_CHUNK + swizzled(column, u)) = value.vector;
    }
}

template <typename T, bool ROUND, typename W = T>
__global__ void __launch_bounds__(256)
    pack_stack_weights(const W* __restrict__ w, const float* __restrict__ scale, const float* __restrict__ bias,
                       u8* __restrict__ packed, i64 C, i64 K, i64 R, i64 S, i64 step_r, i64 step_s, i64 step_c,
                       i64 step_k, i64 span, i64 group_in, i64 group_out) {
    const ChannelGroups by_group{static_cast<int>(group_in), static_cast<int>(group_out), static_cast<int>(span)};
    overlap_launches(w, scale, bias);
    pack_weights_of_stack<T, ROUND>(w, scale, bias, packed, C, K, R, S, step_r, step_s, step_c, step_k, by_group, blockIdx.x,
                                    gridDim.x);
}

// The same for fused_conv: the first row of thread blocks packs, the others write the result's background, if there is an
// image.
template <typename T, bool ROUND, typename Table>
__global__ void __launch_bounds__(256)
    pack_image_conv_weights(const T* __restrict__ w, const Table* __restrict__ scale, const Table* __restrict__ bias,
                            u8* __restrict__ packed, const u8* __restrict__ base, u8* __restrict__ image,  // or null
                            i64 C, i64 K, i64 R, i64 S, i64 step_r, i64 step_s, i64 step_c, i64 step_k,
                            i64 image_bytes) {
    const i64 others = gridDim.y - 1;
    if (blockIdx.y == 0) {
        const ChannelGroups by_group{static_cast<int>(C), static_cast<int>(K), static_cast<int>(C)};
        pack_weights_of_stack<T, ROUND>(w, scale, bias, packed, C, K, R, S, step_r, step_s, step_c, step_k, by_group,
                                        blockIdx.x, gridDim.x);
    } else if (image) {
        write_background(base, image, image_bytes, (blockIdx.y - 1) * gridDim.x + blockIdx.x, others * gridDim.x);
    }
}

// padded[m, i, j, c] = x[m, i, j, c], and 0 for channels from C up to a multiple of 16 bytes, in rows below the count.
template <typename T>
__global__ void __launch_bounds__(256)
    pad_stack_channels(const T* __restrict__ x, const int* __restrict__ bin_counts, uint4* __restrict__ padded, i64 M,
                       i64 pixels, i64 C) {
    constexpr int LANES = 16 / sizeof(T);
    overlap_launches();
    const i64 units = ceil_div<i64>(C, LANES), total = clamp(*bin_counts, 0, M) * pixels * units;
    for (i64 i = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x; i < total; i += static_cast<i64>(gridDim.x) * 256) {
        const i64 pixel = divide(i, units);
        const int c = static_cast<int>(i - pixel * units) * LANES;
        Elements<T, uint4> value(zero<uint4>());
#pragma unroll
        for (int e = 0; e < LANES; ++e)
            if (c + e < C) value.element[e] = x[pixel * C + c + e];
        padded[i] = value.vector;
    }
}

// ---------------------------------------------------------------------------- all threads copy and multiply

template <template <typename, int, int, int, int> class Engine, typename T, int BM, int BN, int WM, int WN, int STAGES,
          int SPLIT, bool PARTIALS, bool POINTWISE, bool VECTOR_IN, bool VECTOR_OUT, bool ROUND, int ACTIVATION,
          bool CACHED, int BLOCKS, bool GROUPED, int LIES>
__global__ void __launch_bounds__(Engine<T, BM, BN, WM, WN>::THREADS, BLOCKS) stack_conv(STACK_CONV_PARAMETERS) {
    using Product = Engine<T, BM, BN, WM, WN>;
    constexpr int THREADS = Product::THREADS, MT = Product::MT, NT = Product::NT, LANES = 16 / sizeof(T);
    constexpr int A = BM * TILE_ROW, B = BN * TILE_ROW, STAGE = A + B, PANELS = BN / PANEL, AHEAD = STAGES - 1;
    constexpr int PASS = THREADS / 8, PASSES = BM / PASS;  // rows that all threads copy at once
    static_assert(BM % PASS == 0 && AHEAD >= 1 && !Product::ASYNC, "threads share the rows evenly");
    static_assert(SPLIT == 1 || PARTIALS, "without clusters");
    static_assert(!GROUPED || (PANELS == 1 && VECTOR_IN), "a tile reads the channels of one panel, in vectors");

    DYNAMIC_SHARED(u8, ring);
    float* const scale = reinterpret_cast<float*>(ring + STAGES * STAGE);
    float* const bias = scale + BN;
    int* const inside = reinterpret_cast<int*>(scale + TABLES<ACTIVATION> * BN);
    int* const offsets = inside + BM;  // [taps][BM]: pixels of the stack, or -1

    const Problem g(C, K, bh, bw, ph, pw, H, W, P, Q, R, S, SH, SW, DH, DW, top, left, pitch);
    const ChannelGroups by_group{Problem::narrow(group_in), Problem::narrow(group_out), Problem::narrow(span)};
    const int channels = GROUPED ? by_group.span : g.C;
    const Order order(channels, LANES, POINTWISE ? 1 : g.R * g.S);
    const int panels = ceil_div(g.K, PANEL), across = ceil_div(g.K, BN);
    const int rank = blockIdx.x % SPLIT, first = order.first(rank, SPLIT), count = order.first(rank + 1, SPLIT) - first;
    overlap_launches();
    const int rows = Problem::narrow(clamp(*bin_counts, 0, M)), pixels = rows * g.ph * g.pw;
    const BlockTable table{indices, grid, Problem::narrow(N), Problem::narrow(GH), Problem::narrow(GW), rows};
    const int tiles = ceil_div(pixels, BM) * across;
    const int to = swizzled(threadIdx.x / 8, threadIdx.x % 8);  // PASS is a multiple of 8: the same place in every pass
    const bool whole = g.whole(table);
    const Finder finder(table, g);

    for (int tile = blockIdx.x / SPLIT; tile < tiles; tile += gridDim.x / SPLIT) {
        const int tile_m = tile / across, p0 = tile_m * BM, k0 = (tile - tile_m * across) * BN;
        for (int i = threadIdx.x; i < TABLES<ACTIVATION> * BN; i += THREADS)
            scale[i] = table_value(packed, scaled, i / BN, k0 + i % BN, g.K);
        if (!whole)
            for (int i = threadIdx.x; i < BM; i += THREADS) inside[i] = finder.is_inside(p0, i);
        if constexpr (!POINTWISE)
            finder.find<BM, PASS, 1, false>(p0, units_of_pixel<T, VECTOR_IN>(g), offsets, threadIdx.x, THREADS);
        __syncthreads();

        const u8* const weights =
            packed + tables_bytes(g.K) + (static_cast<i64>(k0 / PANEL) * order.chunks + first) * PANEL_CHUNK;
        ChunkCopier<POINTWISE, VECTOR_IN, CACHED, BM, PASS, T> copier(
            x + (GROUPED ? by_group.begin(k0 / PANEL, g.C, LANES) : 0), offsets, order, g, channels, threadIdx.x, p0, pixels,
            first);
        const auto copy_next = [&](int chunk, int slot) {
            u8* const at = ring + slot * STAGE;
#pragma unroll
            for (int j = 0; j < PANELS; ++j)
                for (int i = threadIdx.x * 16; i < PANEL_CHUNK; i += THREADS * 16) {
                    const bool there = k0 / PANEL + j < panels;
                    const i64 from = (static_cast<i64>(j) * order.chunks + chunk) * PANEL_CHUNK + i;
                    copy_async_16(at + A + j * PANEL_CHUNK + i, weights + (there ? from : 0), there);
                }
            copier.copy(at + to);
        };
        int fill = 0, slot = 0;
        for (int s = 0; s < AHEAD; ++s) {
            if (s < count) copy_next(s, s);
            copy_async_commit();
        }
        fill = AHEAD;
        const StackRows its_rows{p0, pixels, whole ? nullptr : inside};
        const Result<T, StackRows, LIES> result{residual, y, scale, bias, its_rows, k0, g.K,
                                           Problem::narrow(pitch_added), Problem::narrow(pitch_out),
                                           unfolding_of<LIES>(g, unfold_down, unfold_across),
                                           {scale + 2 * BN, scale + 3 * BN}};
        if (residual && !PARTIALS) result.template prefetch<BM, BN>(threadIdx.x, THREADS);

        float acc[MT][NT][4];
        clear(acc);
        for (int i = 0; i < count; ++i) {
            copy_async_wait<AHEAD - 1>();
            if constexpr (ROUND)  // what this thread has copied
                for (int pass = 0; pass < PASSES; ++pass) round_four(ring + slot * STAGE + to + pass * (PASS * TILE_ROW));
            __syncthreads();
            if (i + AHEAD < count) copy_next(i + AHEAD, fill);
            copy_async_commit();
            Product::multiply(acc, ring + slot * STAGE, ring + slot * STAGE + A);
            if (++slot == STAGES) slot = 0;
            if (++fill == STAGES) fill = 0;
        }
        copy_async_wait<0>();
        if constexpr (PARTIALS)
            result.template store_partials<Product>(acc, partials, rank, SPLIT, across * BN);
        else
            result.template store<ACTIVATION, VECTOR_OUT, false, Product>(acc);
        __syncthreads();
    }
    if (clear_rows && !PARTIALS) clear_rest<VECTOR_OUT>(y, static_cast<i64>(pixels) * g.K, M * g.ph * g.pw * g.K);
}

// Add up the SPLIT sums of each pixel and channel, in their order. `width` floats are a row of sums.
template <typename T, int SPLIT, bool VECTOR_OUT, int ACTIVATION>
__global__ void __launch_bounds__(256)
    stack_conv_sum(const float* __restrict__ partials, const u8* __restrict__ packed, const T* __restrict__ residual,
                   const int* __restrict__ bin_counts, const int* __restrict__ indices, const int* __restrict__ grid,
                   T* __restrict__ y, const float* __restrict__ scaled, i64 M, i64 N, i64 GH, i64 GW, i64 K, i64 ph,
                   i64 pw, i64 P, i64 Q, i64 width, i64 pitch_added, i64 pitch_out, i64 clear_rows) {
    constexpr int COUNT = ChannelOrder<T>::COUNT;
    overlap_launches();
    const auto narrow = [](i64 value) { return static_cast<int>(value); };
    const int rows = narrow(clamp(*bin_counts, 0, M));
    const BlockTable table{indices, grid, narrow(N), narrow(GH), narrow(GW), rows};
    const Problem g(0, K, 1, 1, ph, pw, 0, 0, P, Q, 1, 1, 1, 1, 1, 1, 0, 0, 0);
    const Finder finder(table, g);
    const bool whole = g.whole(table);
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
        const bool inside = whole || finder.is_inside(narrow(p), 0);
        finish<T, ACTIVATION, VECTOR_OUT, false>(sums, scale + k, bias + k, residual_at<VECTOR_OUT>(residual, p * pitch_added + k, true),
                                          residual, y, p * pitch_out + k, narrow(K) - k, inside,
                                          LastScales{scaled + k, scaled + last_channels(narrow(K)) + k});
    }
    if (clear_rows) clear_rest<VECTOR_OUT>(y, rows * ph * pw * K, M * ph * pw * K);
}
