// stack_conv.cuh: what the two kernels of stack_conv2d.cu share: the order of K, where pixels lie, and the result.
#pragma once

#include "dense/activation.cuh"
#include "block_sparse/stack/block_table.cuh"
#include "block_sparse/stack/swizzled_tile.cuh"

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
    // The first chunk of thread block `rank` of `split` that share K.
    DEVICE int first(int rank, int split) const {
        return static_cast<int>(static_cast<i64>(chunks) * rank / split);
    }
};

// Which output channel is in which column: a lane holds two columns of each group of 8 (tensor_core.cuh), and GROUPS
// groups make COUNT channels in a row, 16 bytes.
template <typename T>
struct Columns {
    static constexpr int GROUPS = 8 / sizeof(T), COUNT = 2 * GROUPS;
    static DEVICE int channel(int column) {
        const int n = column / 8, t = column % 8 / 2, e = column % 2;
        return n / GROUPS * (8 * GROUPS) + t * COUNT + n % GROUPS * 2 + e;
    }
};

// Packed weights: scale and bias, float[2][64 * panels]; then for each panel of 64 output channels its chunks of
// 64 rows x 128 bytes, swizzled.
constexpr int PANEL = 64, PANEL_CHUNK = PANEL * TILE_ROW;
DEVICE i64 tables_bytes(int K) { return static_cast<i64>(ceil_div(K, PANEL)) * (2 * PANEL * 4); }

// ---------------------------------------------------------------------------- sizes

struct Problem {
    int C, K;            // channels
    int bh, bw, ph, pw;  // pixels of a block of x and of y
    int H, W, P, Q;      // pixels of the images of x and y
    int R, S, SH, SW, DH, DW, top, left;

    DEVICE Problem(i64 C, i64 K, i64 bh, i64 bw, i64 ph, i64 pw, i64 H, i64 W, i64 P, i64 Q, i64 R, i64 S, i64 SH,
                   i64 SW, i64 DH, i64 DW, i64 top, i64 left)
        : C(narrow(C)), K(narrow(K)), bh(narrow(bh)), bw(narrow(bw)), ph(narrow(ph)), pw(narrow(pw)), H(narrow(H)),
          W(narrow(W)), P(narrow(P)), Q(narrow(Q)), R(narrow(R)), S(narrow(S)), SH(narrow(SH)), SW(narrow(SW)),
          DH(narrow(DH)), DW(narrow(DW)), top(narrow(top)), left(narrow(left)) {}
    // No block of y sticks out of its image.
    DEVICE bool whole() const { return P % ph == 0 && Q % pw == 0; }

    static DEVICE int narrow(i64 value) { return static_cast<int>(value); }
};

// Pixel number p of the stack y: in which block, and where.
struct Pixel {
    int row, i, j;  // of the stack, of the block
    DEVICE Pixel(int p, int ph, int pw) {
        const u32 size = static_cast<u32>(ph) * static_cast<u32>(pw);
        row = static_cast<int>(static_cast<u32>(p) / size);
        const int rest = p - row * static_cast<int>(size);
        i = static_cast<int>(static_cast<u32>(rest) / static_cast<u32>(pw));
        j = rest - i * pw;
    }
};

// Whether pixel p of the stack y lies in its image.
DEVICE bool is_inside(const BlockTable& table, int p, int ph, int pw, int P, int Q) {
    const Pixel pixel(p, ph, pw);
    const BlockTable::Block block = table.block(pixel.row);
    return block.n >= 0 && block.hi * ph + pixel.i < P && block.wi * pw + pixel.j < Q;
}

// Row r of the window of pixel p: for each of its S taps the pixel of the stack x that it reads, or -1, to
// offsets[s * step].
DEVICE void find_taps(const BlockTable& table, const Problem& g, int p, int r, int* offsets, int step) {
    constexpr int AT_ONCE = 3;  // searches under way
    const Pixel pixel(p, g.ph, g.pw);
    const BlockTable::Block block = table.block(pixel.row);
    const Along v(pixel.i * g.SH - g.top + r * g.DH, g.bh);
    const int hi = block.hi + v.block, y = hi * g.bh + v.at, x0 = pixel.j * g.SW - g.left;
    const bool row_inside = block.n >= 0 && static_cast<u32>(y) < static_cast<u32>(g.H);
    for (int s0 = 0; s0 < g.S; s0 += AT_ONCE) {
        int found[AT_ONCE], at[AT_ONCE];
#pragma unroll
        for (int e = 0; e < AT_ONCE; ++e) {
            const Along h(x0 + (s0 + e) * g.DW, g.bw);
            const int wi = block.wi + h.block, x = wi * g.bw + h.at;
            at[e] = v.at * g.bw + h.at;
            found[e] = -1;
            if (row_inside && static_cast<u32>(x) < static_cast<u32>(g.W) && s0 + e < g.S)
                found[e] = v.block == 0 && h.block == 0 ? pixel.row : table.row(block.n, hi, wi);
        }
#pragma unroll
        for (int e = 0; e < AT_ONCE; ++e)
            if (s0 + e < g.S) offsets[(s0 + e) * step] = found[e] < 0 ? -1 : found[e] * g.bh * g.bw + at[e];
    }
}

// ---------------------------------------------------------------------------- one chunk of a tile

// Which tap and channel a thread copies of the chunks, one after another: unit `unit` of each.
struct ChunkWalk {
    int chunk, tap, group;
    DEVICE ChunkWalk(const Order& order, int first) : chunk(first), tap(first % order.taps), group(first / order.taps) {}
    // The tap, and the first channel; false past the end of K.
    DEVICE bool at(const Order& order, int unit, int lanes, int& its_tap, int& channel) const {
        its_tap = tap, channel = (group * 8 + unit) * lanes;
        if (chunk < order.groups * order.taps) return true;
        order.of_rest(chunk, unit, its_tap, channel);
        channel *= lanes;
        return its_tap < order.taps;
    }
    DEVICE void advance(const Order& order) {
        ++chunk;
        if (++tap == order.taps) tap = 0, ++group;
    }
};

// Begin to copy 16 bytes of channels, from channel c of a pixel of the stack (or -1) on; past channel C come zeros.
template <bool VECTOR, bool CACHED, typename T>
DEVICE void copy_channels(u8* to, const T* __restrict__ x, i64 pixel, int c, int C) {
    constexpr int LANES = 16 / sizeof(T);
    const bool there = pixel >= 0 && c < C;
    const T* const from = x + (there ? pixel * C + c : 0);
    if constexpr (VECTOR && CACHED) {
        copy_async_16_cached(to, from, there);
    } else if constexpr (VECTOR) {
        copy_async_16(to, from, there);
    } else {
        Elements<T, uint4> value(zero<uint4>());
#pragma unroll
        for (int e = 0; e < LANES; ++e)
            if (there && c + e < C) value.element[e] = from[e];
        *reinterpret_cast<uint4*>(to) = value.vector;
    }
}

// Four floats in shared memory to tf32, in place.
DEVICE void round_four(u8* shared) {
    float4& four = *reinterpret_cast<float4*>(shared);
    four = make_float4(__uint_as_float(to_tf32(four.x)), __uint_as_float(to_tf32(four.y)),
                       __uint_as_float(to_tf32(four.z)), __uint_as_float(to_tf32(four.w)));
}

template <int MT, int NT>
DEVICE void clear(float (&acc)[MT][NT][4]) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n) acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0.0f;
}

// ---------------------------------------------------------------------------- the result

// 16 bytes of channels of a pixel, from element `to` of y on; `left` channels are left. `add_to` is the residual, if VECTOR.
template <typename T, int ACTIVATION, bool VECTOR>
DEVICE void finish(const float (&sums)[16 / sizeof(T)], const float* scale, const float* bias, uint4 add_to,
                   const T* __restrict__ residual, T* __restrict__ y, i64 to, int left, bool inside) {
    constexpr int LANES = 16 / sizeof(T);
    if (left <= 0) return;
    const Elements<T, uint4> addend(add_to);
    Elements<T, uint4> result(zero<uint4>());
#pragma unroll
    for (int e = 0; e < LANES; ++e) {
        if (!VECTOR && e >= left) break;
        float value = __fmaf_rn(sums[e], scale[e], bias[e]);
        if (residual) value += to_compute<float>(VECTOR ? addend.element[e] : residual[to + e]);
        value = inside ? activate<ACTIVATION>(value) : 0.0f;
        if constexpr (VECTOR)
            result.element[e] = from_compute<T>(value);
        else
            y[to + e] = from_compute<T>(value);
    }
    if constexpr (VECTOR) *reinterpret_cast<uint4*>(y + to) = result.vector;
}

// The residual of 16 bytes of channels from element `at` on.
template <bool VECTOR, typename T>
DEVICE uint4 residual_at(const T* __restrict__ residual, i64 at, bool there) {
    if (VECTOR && residual && there) return *reinterpret_cast<const uint4*>(residual + at);
    return zero<uint4>();
}

// A warp's sums of 16 rows of its tile and all its columns, `half` of them at rows l / 4 or l / 4 + 8: visit(row, column, sums).
template <class Product, typename T, int NT, class Visit>
DEVICE void for_each_vector(const float (&acc)[NT][4], int m, int half, Visit visit) {
    constexpr int GROUPS = Columns<T>::GROUPS, COUNT = Columns<T>::COUNT;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < NT; n += GROUPS) {
        float sums[COUNT];
#pragma unroll
        for (int e = 0; e < COUNT; ++e) sums[e] = acc[n + e / 2][2 * half + e % 2];
        visit(n / GROUPS, Product::row(m) + lane / 4 + 8 * half, Product::column() + n * 8 + lane % 4 * COUNT, sums);
    }
}

template <int COUNT>
DEVICE void store_floats(float* to, const float (&values)[COUNT]) {
#pragma unroll
    for (int e = 0; e < COUNT; e += 4)
        *reinterpret_cast<float4*>(to + e) = make_float4(values[e], values[e + 1], values[e + 2], values[e + 3]);
}

// Where a tile's results go.
template <typename T>
struct Result {
    const T* __restrict__ residual;
    T* __restrict__ y;
    const float *scale, *bias;  // of the tile's columns
    const int* inside;          // of the tile's rows; null if all are
    int p0, pixels, k0, K;
    using Sums = const float (&)[Columns<T>::COUNT];  // no generic lambdas: NVRTC 13.0 takes them for host functions

    template <int ACTIVATION, bool VECTOR, class Product, int MT, int NT>
    DEVICE void store(const float (&acc)[MT][NT][4]) const {
        constexpr int VECTORS = NT / Columns<T>::GROUPS;
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            uint4 add_to[2][VECTORS];  // all are loaded before the first is used
#pragma unroll
            for (int half = 0; half < 2; ++half)
                for_each_vector<Product, T>(acc[m], m, half, [&](int v, int row, int column, Sums) {
                    const bool there = p0 + row < pixels && k0 + column < K;
                    add_to[half][v] = residual_at<VECTOR>(residual, static_cast<i64>(p0 + row) * K + k0 + column, there);
                });
#pragma unroll
            for (int half = 0; half < 2; ++half)
                for_each_vector<Product, T>(acc[m], m, half, [&](int v, int row, int column, Sums sums) {
                    if (p0 + row < pixels)
                        finish<T, ACTIVATION, VECTOR>(sums, scale + column, bias + column, add_to[half][v], residual, y,
                                                      static_cast<i64>(p0 + row) * K + k0 + column, K - k0 - column,
                                                      !inside || inside[row]);
                });
        }
    }

    // Leave the sums in shared memory, in rows of PITCH floats.
    template <class Product, int PITCH, int MT, int NT>
    DEVICE void store_sums(const float (&acc)[MT][NT][4], float* sums) const {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                for_each_vector<Product, T>(acc[m], m, half, [&](int, int row, int column, Sums values) {
                    store_floats(sums + row * PITCH + column, values);
                });
    }

    // Leave the sums in memory, for stack_conv_sum.
    template <class Product, int MT, int NT>
    DEVICE void store_partials(const float (&acc)[MT][NT][4], float* partials, int rank, int split, int width) const {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                for_each_vector<Product, T>(acc[m], m, half, [&](int, int row, int column, Sums sums) {
                    if (p0 + row < pixels)
                        store_floats(partials + (static_cast<i64>(p0 + row) * split + rank) * width + k0 + column, sums);
                });
    }

    // Have the residual of a tile of BM x BN brought to the L2 cache, by `threads` threads.
    template <int BM, int BN>
    DEVICE void prefetch(int thread, int threads) const {
        constexpr int LINE = 128 / sizeof(T), LINES = BN / LINE;
        for (int i = thread; i < BM * LINES; i += threads) {
            const int row = i / LINES, k = k0 + i % LINES * LINE;
            if (p0 + row < pixels && k < K) prefetch_line(residual + static_cast<i64>(p0 + row) * K + k);
        }
    }
};
