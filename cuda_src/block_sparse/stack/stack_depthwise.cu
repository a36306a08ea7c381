// stack_depthwise.cu: a depthwise convolution, each channel by itself, from a stack of blocks to a stack of blocks.
//   y[m, i, j, c] = activation(scale[c] * sum(x[at (i * SH - top + r * DH, j * SW - left + s * DW) of block m, c] * w[r, s, c])
//                              + bias[c] + residual[m, i, j, c])
// What lies around a block is as in stack_conv2d.cu, and so are the results outside the image and past the count.
// Python: sbnet_cupy/block_sparse/stack/stack_depthwise.py; stack_depthwise_plan.py chooses the sizes, and stack_launch.py
// launches it
// A thread block takes `tiles` tiles of TH x TW pixels of blocks, of a slice of LANES * V channels (blockIdx.y). It brings
// the pixels that they read into shared memory, all at once, beside the slice's weights as floats. A thread computes V
// channels of RUN pixels side by side: with a window of S columns known to the compiler, a pixel is loaded once for all
// of them. Sums are in the order of the taps.
#include "block_sparse/stack/stack_conv.cuh"

// What `size` outputs side by side read along an axis, without the gaps of a wide dilation: tap r of output i is at
// i * stride + r * pitch.
struct ReadAlong {
    int dilation, pitch, extent;
    DEVICE ReadAlong(int size, int stride, int dilation, int kernel) : dilation(dilation) {
        const int span = (size - 1) * stride + 1;
        pitch = dilation < span ? dilation : span;
        extent = (kernel - 1) * pitch + span;
    }
    // How far the pixel at a place is from that of tap 0 of output 0.
    DEVICE int pixel(int at) const { return pitch == dilation ? at : at / pitch * dilation + at % pitch; }
};

template <typename T, int V>
DEVICE void load_floats(float (&to)[V], const T* from) {
    using Vector = typename Bytes<V * sizeof(T)>::type;
    const Elements<T, Vector> values(*reinterpret_cast<const Vector*>(from));
#pragma unroll
    for (int e = 0; e < V; ++e) to[e] = to_compute<float>(values.element[e]);
}

// Thread blocks for which a multiprocessor has registers without a spill, where the compiler would make room for more; 0: it
// chooses.
template <int S, int COLUMNS, int ACTIVATION>
constexpr int RESIDENT = scales_last(ACTIVATION)                                   ? (DEVICE_ARCHITECTURE == 900 ? 3 : 2)
                         : S > 0 && (DEVICE_ARCHITECTURE != 900 || COLUMNS >= 8) ? 3
                                                                                  : 0;

// COPY bytes move at once. S and SW are the columns and the stride of the window where the compiler is to know them (then
// its columns are staged side by side), or S is 0.
template <typename T, int V, int LANES, int COPY, int RUN, int S, int SW, int ACTIVATION>
__global__ void __launch_bounds__(256, RESIDENT<S, RUN * SW, ACTIVATION>)
    stack_depthwise(const T* __restrict__ x, const T* __restrict__ w, const float* __restrict__ scale,
                    const float* __restrict__ bias, const T* __restrict__ residual,
                    const int* __restrict__ bin_counts, const int* __restrict__ indices, const int* __restrict__ grid,
                    T* __restrict__ y, const float* __restrict__ scaled, i64 M, i64 N, i64 GH, i64 GW, i64 C, i64 bh,
                    i64 bw, i64 ph, i64 pw, i64 H, i64 W, i64 P, i64 Q, i64 kernel_h, i64 kernel_w, i64 SH, i64 stride_w,
                    i64 DH, i64 DW, i64 top, i64 left, i64 step_tap, i64 step_c, i64 tile_h, i64 runs_of_tile,
                    i64 tiles_at_once, i64 settled, i64 clear_rows) {
    constexpr int SLICE = LANES * V, WEIGHTS = SLICE + 4, PER_PIXEL = SLICE * static_cast<int>(sizeof(T)) / COPY;
    constexpr int PLACE = 5;
    using Vector = typename Bytes<V * sizeof(T)>::type;
    DYNAMIC_SHARED(u8, shared);
    const Problem g(C, C, bh, bw, ph, pw, H, W, P, Q, kernel_h, kernel_w, SH, stride_w, DH, DW, top, left, C);
    const int TH = Problem::narrow(tile_h), runs = Problem::narrow(runs_of_tile), at_once = Problem::narrow(tiles_at_once);
    const int TW = runs * RUN, taps = g.R * g.S, c0 = blockIdx.y * SLICE, threads = blockDim.x;
    const ReadAlong down(TH, g.SH, g.DH, g.R), across(TW, g.SW, g.DW, g.S);
    const int line = across.extent | 1, region = down.extent * line;  // odd: rows begin in different banks
    T* const staged = reinterpret_cast<T*>(shared);  // [at_once][down.extent][line][SLICE]
    float* const weights = reinterpret_cast<float*>(
        shared + ceil_div(at_once * region * SLICE * static_cast<int>(sizeof(T)), 16) * 16);  // [taps][WEIGHTS]
    constexpr int NUMBERS = TABLES<ACTIVATION> * SLICE;
    float* const tables = weights + taps * WEIGHTS;                   // scale and bias, and what channels are scaled by last
    int* const offsets = reinterpret_cast<int*>(tables + NUMBERS);  // [at_once][region]: pixels of x, -1 for zeros

    int* const tile_places = offsets + at_once * region;  // [at_once][PLACE]: image and block, corner of what the tile reads

    begin_launch(settled);
    const int most = Problem::narrow(M), thread = threadIdx.x;
    const BlockTable table{indices, grid, Problem::narrow(N), Problem::narrow(GH), Problem::narrow(GW), most};
    const Finder finder(table, g);
    const Divisor of_region(region), of_line(line);
    const int tiles_down = ceil_div(g.ph, TH), tiles_across = ceil_div(g.pw, TW), tiles_of_block = tiles_down * tiles_across;
    // The row of the stack of a tile, and the tile's place in its block.
    const auto place = [&](int tile, int& row, int& i, int& j) {
        const int number = tiles_across == 1 ? tile : tile / tiles_across;
        j = (tile - number * tiles_across) * TW;
        row = tiles_down == 1 ? number : number / tiles_down;
        i = (number - row * tiles_down) * TH;
    };
    // What a search needs to know of a tile. It does not wait for the count: a tile past it is dropped later.
    const auto place_tile = [&](int first) {
        if (thread >= at_once) return;
        int row, i, j;
        place(first + thread, row, i, j);
        const BlockTable::Block block = table.block(row);
        int* const to = tile_places + thread * PLACE;
        to[0] = block.n, to[1] = block.hi, to[2] = block.wi, to[3] = i * g.SH - g.top, to[4] = j * g.SW - g.left;
    };
    // Find the pixels of x of the tiles that were placed; a thread has ITEMS searches under way.
    const auto find = [&] {
        constexpr int ITEMS = 4;
        const int all = at_once * region;
        for (int number0 = thread; number0 < all; number0 += ITEMS * threads) {
            int offset[ITEMS];
#pragma unroll
            for (int e = 0; e < ITEMS; ++e) {
                const int number = number0 + e * threads;
                if (number >= all) break;
                const int k = of_region.of(number), at = number - k * region, v = of_line.of(at), h = at - v * line;
                const int* const tile = tile_places + k * PLACE;
                const BlockTable::Block block{h < across.extent ? tile[0] : -1, tile[1], tile[2]};
                offset[e] = finder.at(block, tile[3] + down.pixel(v), tile[4] + across.pixel(h));
            }
#pragma unroll
            for (int e = 0; e < ITEMS; ++e)
                if (number0 + e * threads < all) offsets[number0 + e * threads] = offset[e];
        }
    };
    int first = blockIdx.x * at_once;
    const auto table_entry = [&](int i) {
        const int c = c0 + i % SLICE, table = i / SLICE;
        const float* const its = table == 0 ? scale : table == 1 ? bias : scaled + (table - 2) * last_channels(g.C);
        return its && c < g.C ? its[c] : table == 0 ? 1.0f : 0.0f;
    };
    // All loads from here to the barrier are under way together.
    const int listed = *bin_counts;
    const float entry = thread < NUMBERS ? table_entry(thread) : 0.0f;
    const Divisor of_taps(taps);
    for (int i0 = thread; i0 == thread || i0 < taps * SLICE; i0 += 8 * threads) {  // in the order of memory; once at least,
        T loaded[8];
        int to[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const int i = i0 + e * threads;
            to[e] = -1;
            if (i >= taps * SLICE) break;
            const int outer = step_c == 1 ? i / SLICE : of_taps.of(i);
            const int tap = step_c == 1 ? outer : i - outer * taps, c = step_c == 1 ? i - outer * SLICE : outer;
            to[e] = tap * WEIGHTS + c, loaded[e] = zero<T>();
            if (c0 + c < g.C) loaded[e] = w[tap * step_tap + (c0 + c) * step_c];
        }
        if (i0 == thread) place_tile(first);  // as there may be more tiles than weights; while these are on their way
#pragma unroll
        for (int e = 0; e < 8; ++e)
            if (i0 + e * threads < taps * SLICE) weights[to[e]] = to_compute<float>(loaded[e]);
    }
    if (thread < NUMBERS) tables[thread] = entry;
    for (int i = thread + threads; i < NUMBERS; i += threads) tables[i] = table_entry(i);
    __syncthreads();
    find();
    if (settled) dependent_wait();
    x = loaded_later(x), residual = loaded_later(residual);
    const int rows = Problem::narrow(clamp(static_cast<i64>(listed), 0, M)), tiles = rows * tiles_of_block;
    if (clear_rows)
        clear_rest<COPY == 16>(y, static_cast<i64>(rows) * g.ph * g.pw * g.C, M * g.ph * g.pw * g.C);

    const bool whole = g.whole(table);
    const int in_tile = threadIdx.x / LANES % (TH * runs), mine = threadIdx.x / LANES / (TH * runs);
    const int run = in_tile / TH, my_i = in_tile - run * TH;  // threads side by side have rows one below the other
    for (; first < tiles; first += gridDim.x * at_once) {
        if (first != static_cast<int>(blockIdx.x) * at_once) {
            place_tile(first);
            __syncthreads();
            find();
        }
        __syncthreads();
        for (int n = COPY < 4 ? recomputed(threadIdx.x) : thread; n < at_once * region * PER_PIXEL; n += threads) {
            const int at = n / PER_PIXEL, channel = c0 + (n - at * PER_PIXEL) * (COPY / static_cast<int>(sizeof(T)));
            const int offset = offsets[at];
            const bool inside = offset >= 0 && channel < g.C;
            const T* const from = inside ? x + static_cast<i64>(offset) * g.C + channel : x;
            if constexpr (COPY >= 4)
                copy_async<COPY>(shared + n * COPY, from, inside);
            else
                staged[n] = inside ? *from : zero<T>();
        }
        copy_async_commit();
        copy_async_wait<0>();
        __syncthreads();

        const int lane = recomputed(threadIdx.x) % LANES, c = c0 + lane * V;  // (or addresses spill registers)
        int row, i, j;
        place(first + mine, row, i, j);
        i += my_i, j += run * RUN;
        if (mine >= at_once || first + mine >= tiles || c >= g.C || i >= g.ph || j >= g.pw) continue;
        float sums[RUN][V];
#pragma unroll
        for (int a = 0; a < RUN; ++a)
#pragma unroll
            for (int e = 0; e < V; ++e) sums[a][e] = 0.0f;
        const T* from = staged + (mine * region + my_i * g.SH * line + run * RUN * g.SW) * SLICE + lane * V;
        const float* weight = weights + lane * V;
#pragma unroll 1
        for (int r = 0; r < g.R; ++r) {
            if constexpr (S > 0) {
                float factors[S][V];
#pragma unroll
                for (int s = 0; s < S; ++s) load_floats<float, V>(factors[s], weight + s * WEIGHTS);
#pragma unroll
                for (int at = 0; at < (RUN - 1) * SW + S; ++at) {
                    float value[V];
                    load_floats<T, V>(value, from + at * SLICE);
#pragma unroll
                    for (int s = 0; s < S; ++s) {
                        if (at < s || (at - s) % SW || (at - s) / SW >= RUN) continue;
#pragma unroll
                        for (int e = 0; e < V; ++e)
                            sums[(at - s) / SW][e] = __fmaf_rn(value[e], factors[s][e], sums[(at - s) / SW][e]);
                    }
                }
            } else {
                for (int s = 0; s < g.S; ++s) {
                    float factors[V];
                    load_floats<float, V>(factors, weight + s * WEIGHTS);
#pragma unroll
                    for (int a = 0; a < RUN; ++a) {
                        float value[V];
                        load_floats<T, V>(value, from + (a * g.SW + s * across.pitch) * SLICE);
#pragma unroll
                        for (int e = 0; e < V; ++e) sums[a][e] = __fmaf_rn(value[e], factors[e], sums[a][e]);
                    }
                }
            }
            from += down.pitch * line * SLICE, weight += g.S * WEIGHTS;
        }
        const BlockTable::Block block = whole ? BlockTable::Block{0, 0, 0} : table.block(row);
        const bool inside_y = whole || (block.n >= 0 && block.hi * g.ph + i < g.P);
#pragma unroll
        for (int a = 0; a < RUN; ++a) {
            if (j + a >= g.pw) break;
            const i64 to = (static_cast<i64>(row) * g.ph * g.pw + i * g.pw + j + a) * g.C + c;
            const bool inside = inside_y && (whole || block.wi * g.pw + j + a < g.Q);
            Elements<T, Vector> add_to(zero<Vector>()), result(zero<Vector>());
            if (residual) add_to.vector = *reinterpret_cast<const Vector*>(residual + to);
            // Loaded for each pixel: registers are few.
            const float* const last = tables + 2 * SLICE + (scales_last(ACTIVATION) ? recomputed(lane * V) : 0);
#pragma unroll
            for (int e = 0; e < V; ++e) {
                float value = __fmaf_rn(sums[a][e], tables[lane * V + e], tables[SLICE + lane * V + e]);
                value = activate<before_sum(ACTIVATION)>(value);
                if (residual) value += to_compute<float>(add_to.element[e]);
                value = activate<after_sum(ACTIVATION)>(value);
                if constexpr (scales_last(ACTIVATION))
                    value = __fmaf_rn(value, last[e], last[SLICE + e]);
                result.element[e] = from_compute<T>(inside ? value : 0.0f);
            }
            *reinterpret_cast<Vector*>(y + to) = result.vector;
        }
    }
}
