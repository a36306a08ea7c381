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

// Where the pixels that a tile of y reads lie in the stack x.
struct Finder {
    const BlockTable& table;
    const Problem& g;
    Divisor size, width, down, across;  // of blocks of y; of blocks of x
    int above, beside;                  // blocks that the window can reach upwards and to the left

    DEVICE Finder(const BlockTable& table, const Problem& g)
        : table(table), g(g), size(g.ph * g.pw), width(g.pw), down(g.bh), across(g.bw),
          above(g.top > 0 ? ceil_div(g.top, g.bh) : 0), beside(g.left > 0 ? ceil_div(g.left, g.bw) : 0) {}

    // A pixel of the stack y.
    struct Pixel {
        int row, i, j;
    };
    // Pixel number `at` of a tile of at most 256 pixels that begins at pixel `rest` of a row of the stack.
    DEVICE Pixel pixel(int row, int rest, int at) const {
        const int number = rest + at, pixels = static_cast<int>(size.d);
        const int step = pixels >= 256 ? number >= pixels : size.of(number);
        const int in_block = number - step * pixels;
        const int i = pixels <= 1 << 16 ? width.of(in_block) : in_block / g.pw;
        return Pixel{row + step, i, in_block - i * g.pw};
    }
    // Whether pixel `at` of the tile that begins at p0 lies in its image.
    DEVICE bool is_inside(int p0, int at) const {
        const int row = static_cast<int>(static_cast<u32>(p0) / size.d);
        const Pixel p = pixel(row, p0 - row * static_cast<int>(size.d), at);
        const BlockTable::Block block = table.block(p.row);
        return block.n >= 0 && block.hi * g.ph + p.i < g.P && block.wi * g.pw + p.j < g.Q;
    }

    // The pixel of x that each tap of each of BM pixels of y reads, times `units`, or -1. Pixel `row` of tap t goes to
    // offsets[t * BM + row % PASS * (BM / PASS) + row / PASS]: neighbours are what a thread copies that takes every
    // PASS-th row. `threads` threads share the work; each has ITEMS rows of windows under way.
    template <int BM, int PASS, int ITEMS>
    DEVICE void find(int p0, int units, int* offsets, int thread, int threads) const {
        constexpr int TAPS = 3;  // of a row of a window, under way
        const int row0 = static_cast<int>(static_cast<u32>(p0) / size.d), rest = p0 - row0 * static_cast<int>(size.d);
        for (int i0 = thread; i0 < BM * g.R; i0 += ITEMS * threads) {
            BlockTable::Block block[ITEMS];
            Pixel p[ITEMS];
            int r[ITEMS], at[ITEMS];
#pragma unroll
            for (int e = 0; e < ITEMS; ++e) {
                const int i = i0 + e * threads;
                r[e] = i / BM, at[e] = i - r[e] * BM;
                p[e] = pixel(row0, rest, at[e]);
                block[e] = table.block(p[e].row);
            }
            for (int s0 = 0; s0 < g.S; s0 += TAPS) {
                int found[ITEMS][TAPS], place[ITEMS][TAPS];
#pragma unroll
                for (int e = 0; e < ITEMS; ++e) {
                    const int y = p[e].i * g.SH - g.top + r[e] * g.DH + above * g.bh, v = down.of(y);
                    const int in_y = y - v * g.bh, hi = block[e].hi + v - above;
                    const bool inside_y = block[e].n >= 0 && static_cast<u32>(hi * g.bh + in_y) < static_cast<u32>(g.H);
#pragma unroll
                    for (int t = 0; t < TAPS; ++t) {
                        const int x = p[e].j * g.SW - g.left + (s0 + t) * g.DW + beside * g.bw, h = across.of(x);
                        const int in_x = x - h * g.bw, wi = block[e].wi + h - beside;
                        const bool inside = inside_y && static_cast<u32>(wi * g.bw + in_x) < static_cast<u32>(g.W);
                        found[e][t] = table.row(inside ? block[e].n : -1, hi, wi);
                        place[e][t] = in_y * g.bw + in_x;
                    }
                }
#pragma unroll
                for (int e = 0; e < ITEMS; ++e)
#pragma unroll
                    for (int t = 0; t < TAPS; ++t)
                        if (r[e] < g.R && s0 + t < g.S)
                            offsets[(r[e] * g.S + s0 + t) * BM + at[e] % PASS * (BM / PASS) + at[e] / PASS] =
                                found[e][t] < 0 ? -1 : (found[e][t] * g.bh * g.bw + place[e][t]) * units;
            }
        }
    }
};

// ---------------------------------------------------------------------------- one chunk of a tile

// How many units a pixel of x has, as offsets count them: vectors of 16 bytes, or one pixel.
template <typename T, bool VECTOR>
DEVICE int units_of_pixel(const Problem& g) {
    return VECTOR ? g.C / static_cast<int>(16 / sizeof(T)) : 1;
}

// Begin to copy 16 bytes of channels, from channel c of the pixel at an offset (or -1) on; zeros past channel C.
template <bool VECTOR, bool CACHED, typename T>
DEVICE void copy_channels(u8* to, const T* __restrict__ x, int offset, int c, int C) {
    constexpr int LANES = 16 / sizeof(T);
    if constexpr (VECTOR) {
        // One instruction for the address, if the compiler does not see what it is made of.
        const u8* const base = reinterpret_cast<const u8*>(computed_once(reinterpret_cast<i64>(x + c)));
        copy_async_16_unless_negative<CACHED>(to, base + static_cast<u64>(static_cast<u32>(offset)) * 16, offset);
    } else {
        Elements<T, uint4> value(zero<uint4>());
        const T* const from = x + static_cast<i64>(offset) * C + c;
#pragma unroll
        for (int e = 0; e < LANES; ++e)
            if (offset >= 0 && c + e < C) value.element[e] = from[e];
        *reinterpret_cast<uint4*>(to) = value.vector;
    }
}

// How a thread copies its part of a tile's chunks, one chunk after another: of every PASS-th row of BM one vector.
template <bool POINTWISE, bool VECTOR, bool CACHED, int BM, int PASS, typename T>
struct ChunkCopier {
    static constexpr int PASSES = BM / PASS, LANES = 16 / sizeof(T);
    const T* __restrict__ x;
    const int* offsets;  // of the thread's rows, at the first tap
    const Order& order;
    int unit, C, units;  // its unit of each chunk; channels; units of a pixel as offsets count them
    int row, pixels;     // its first row's pixel of the stack y; how many there are
    int chunk, tap, group;

    DEVICE ChunkCopier(const T* x, const int* all_offsets, const Order& order, const Problem& g, int thread, int p0,
                       int pixels, int first)
        : x(x), offsets(all_offsets + thread / 8 * PASSES), order(order), unit(thread % 8), C(g.C),
          units(units_of_pixel<T, VECTOR>(g)), row(p0 + thread / 8), pixels(pixels), chunk(first),
          tap(first % order.taps), group(first / order.taps) {}

    // Begin to copy the next chunk; `to` is where its first row's vector goes.
    DEVICE void copy(u8* to) {
        if (group < order.groups) {
            vectors<false>(to, tap, (group * 8 + unit) * LANES);
        } else {
            int its_tap, its_unit;
            order.of_rest(chunk, unit, its_tap, its_unit);
            vectors<true>(to, its_tap < order.taps ? its_tap : -1, its_unit * LANES);
        }
        ++chunk;
        if (++tap == order.taps) tap = 0, ++group;
    }

private:
    // Channels c and up, at a tap; if PARTLY, tap is -1 past the end of K.
    template <bool PARTLY>
    DEVICE void vectors(u8* to, int its_tap, int c) const {
        const bool real = !PARTLY || (its_tap >= 0 && c < C);
        int mine[PASSES];
        if constexpr (POINTWISE) {
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass)
                mine[pass] = row + pass * PASS < pixels ? (row + pass * PASS) * units : -1;
        } else {
            const int* const its = offsets + (real ? its_tap : 0) * BM;
            if constexpr (PASSES % 4 == 0) {
#pragma unroll
                for (int pass = 0; pass < PASSES; pass += 4) {
                    const int4 four = *reinterpret_cast<const int4*>(its + pass);
                    mine[pass] = four.x, mine[pass + 1] = four.y, mine[pass + 2] = four.z, mine[pass + 3] = four.w;
                }
            } else {
#pragma unroll
                for (int pass = 0; pass < PASSES; ++pass) mine[pass] = its[pass];
            }
        }
        if (PARTLY && !real)
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass) mine[pass] = -1;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass)
            copy_channels<VECTOR, CACHED>(to + pass * (PASS * TILE_ROW), x, mine[pass], c, C);
    }
};

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
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint4 add_to[VECTORS];  // all are loaded before the first is used
                for_each_vector<Product, T>(acc[m], m, half, [&](int v, int row, int column, Sums) {
                    const bool there = p0 + row < pixels && k0 + column < K;
                    add_to[v] = residual_at<VECTOR>(residual, static_cast<i64>(p0 + row) * K + k0 + column, there);
                });
                for_each_vector<Product, T>(acc[m], m, half, [&](int v, int row, int column, Sums sums) {
                    if (p0 + row < pixels)
                        finish<T, ACTIVATION, VECTOR>(sums, scale + column, bias + column, add_to[v], residual, y,
                                                      static_cast<i64>(p0 + row) * K + k0 + column, K - k0 - column,
                                                      !inside || inside[row]);
                });
            }
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
