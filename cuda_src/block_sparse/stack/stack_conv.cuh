// stack_conv.cuh: what the convolutions of a stack share: the order of K, and where pixels lie.
#pragma once

#include "block_sparse/stack/block_table.cuh"
#include "dense/tile_result.cuh"

// ---------------------------------------------------------------------------- the order of K

// The first of `count` that thread block `rank` takes, of `split` that share them.
DEVICE int share_of(int count, int rank, int split) { return static_cast<int>(static_cast<i64>(count) * rank / split); }

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
    DEVICE int first(int rank, int split) const { return share_of(chunks, rank, split); }
};

// Packed weights: scale and bias, float[2][64 * panels]; then for each panel of 64 output channels its chunks of
// 64 rows x 128 bytes, swizzled.
constexpr int PANEL = 64, PANEL_CHUNK = PANEL * TILE_ROW;
DEVICE i64 tables_bytes(int K) { return static_cast<i64>(ceil_div(K, PANEL)) * (2 * PANEL * 4); }

// A value of a table of K channels: scale, bias, and the last scale and shift.
DEVICE float table_value(const u8* __restrict__ packed, const float* __restrict__ scaled, int table, int k, int K) {
    const float* const its = table < 2 ? reinterpret_cast<const float*>(packed) + table * (ceil_div(K, PANEL) * PANEL)
                                       : scaled + (table - 2) * last_channels(K);
    return k < K ? its[k] : 0.0f;
}

// ---------------------------------------------------------------------------- groups

// Groups of channels: `in` of x make `out` of y. All output channels of a panel read the same `span` channels of x, whole
// vectors that hold those of the panel's groups; weights of other groups are 0. Without groups, span is C.
struct ChannelGroups {
    int in, out, span;
    // The first channel that a panel reads, of C.
    DEVICE int begin(int panel, int C, int lanes) const {
        const int first = panel * PANEL / out * in;
        return min(first, ceil_div(C, lanes) * lanes - span) / lanes * lanes;
    }
};

// ---------------------------------------------------------------------------- sizes

struct Problem {
    int C, K;            // channels
    int pitch;           // channels from a pixel of x to the next: more than C, where x is a part of another stack
    int bh, bw, ph, pw;  // pixels of a block of x and of y
    int H, W, P, Q;      // pixels of the images of x and y
    int R, S, SH, SW, DH, DW, top, left;

    DEVICE Problem(i64 C, i64 K, i64 bh, i64 bw, i64 ph, i64 pw, i64 H, i64 W, i64 P, i64 Q, i64 R, i64 S, i64 SH,
                   i64 SW, i64 DH, i64 DW, i64 top, i64 left, i64 pitch)
        : C(narrow(C)), K(narrow(K)), pitch(narrow(pitch)), bh(narrow(bh)), bw(narrow(bw)), ph(narrow(ph)),
          pw(narrow(pw)), H(narrow(H)), W(narrow(W)), P(narrow(P)), Q(narrow(Q)), R(narrow(R)), S(narrow(S)),
          SH(narrow(SH)), SW(narrow(SW)), DH(narrow(DH)), DW(narrow(DW)), top(narrow(top)), left(narrow(left)) {}
    // No block of y sticks out of its image, nor lies outside: a window without padding leaves fewer blocks.
    DEVICE bool whole(const BlockTable& table) const { return P == table.GH * ph && Q == table.GW * pw; }

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

    // The pixel of the image y that is pixel `at` of the tile that begins at p0; -1 outside the image, and from pixel `end`
    // of the stack on.
    DEVICE int image_pixel(int p0, int at, int end) const {
        const int row = static_cast<int>(static_cast<u32>(p0) / size.d);
        const Pixel p = pixel(row, p0 - row * static_cast<int>(size.d), at);
        const BlockTable::Block block = table.block(p.row);
        const int v = block.hi * g.ph + p.i, u = block.wi * g.pw + p.j;
        return p0 + at < end && block.n >= 0 && v < g.P && u < g.Q ? (block.n * g.P + v) * g.Q + u : -1;
    }

    // The pixel of the stack x at (y, x) from the corner of a block, or -1.
    DEVICE int at(const BlockTable::Block& block, int y, int x) const {
        const int v = down.of(y + above * g.bh), h = across.of(x + beside * g.bw);
        const int hi = block.hi + v - above, wi = block.wi + h - beside;
        const int in_y = y - (v - above) * g.bh, in_x = x - (h - beside) * g.bw;
        const bool inside = block.n >= 0 && static_cast<u32>(hi * g.bh + in_y) < static_cast<u32>(g.H) &&
                            static_cast<u32>(wi * g.bw + in_x) < static_cast<u32>(g.W);
        const int row = table.row(inside ? block.n : -1, hi, wi);
        return row < 0 ? -1 : (row * g.bh + in_y) * g.bw + in_x;
    }

    // The pixel of x that each tap of each of BM pixels of y reads, times `units`, or -1. Pixel `row` of tap t goes to
    // offsets[t * BM + row % PASS * (BM / PASS) + row / PASS]: neighbours are what a thread copies that takes every
    // PASS-th row. `threads` threads share the work; each has ITEMS rows of windows under way. If IMAGES, x are images.
    template <int BM, int PASS, int ITEMS, bool IMAGES>
    DEVICE void find(int p0, int units, int* offsets, int thread, int threads) const {
        constexpr int TAPS = 3;  // of a row of a window, under way
        const int size_in = IMAGES ? g.H * g.W : g.bh * g.bw;  // pixels of x that are numbered together
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
                        if constexpr (IMAGES) {
                            found[e][t] = inside ? block[e].n : -1;
                            place[e][t] = (hi * g.bh + in_y) * g.W + wi * g.bw + in_x;
                        } else {
                            found[e][t] = table.row(inside ? block[e].n : -1, hi, wi);
                            place[e][t] = in_y * g.bw + in_x;
                        }
                    }
                }
#pragma unroll
                for (int e = 0; e < ITEMS; ++e)
#pragma unroll
                    for (int t = 0; t < TAPS; ++t)
                        if (r[e] < g.R && s0 + t < g.S)
                            offsets[(r[e] * g.S + s0 + t) * BM + at[e] % PASS * (BM / PASS) + at[e] / PASS] =
                                found[e][t] < 0 ? -1 : (found[e][t] * size_in + place[e][t]) * units;
            }
        }
    }
};

// Rows of a tile that are pixels of the stack in their order.
struct StackRows {
    int p0, pixels;
    const int* inside;  // of the tile's rows, whether they lie in their image; null if all do
    // The pixel of the stack y in a row of the tile, or -1.
    DEVICE int pixel(int row) const { return p0 + row < pixels ? p0 + row : -1; }
    DEVICE bool is_inside(int row) const { return !inside || inside[row]; }
};

// Rows of a tile that are pixels of images.
struct ImageRows {
    const int* pixels;  // of the images y, or -1
    DEVICE int pixel(int row) const { return pixels[row]; }
    DEVICE bool is_inside(int) const { return true; }
};
template <bool IMAGES>
struct RowsOf {
    using Type = StackRows;
};
template <>
struct RowsOf<true> {
    using Type = ImageRows;
};
// Those of the tile that begins at pixel p0, and ends before pixel `end`. `found` holds their pixels of images, if IMAGES,
// else whether they lie in their image; it is not there where blocks are whole.
template <bool IMAGES>
DEVICE typename RowsOf<IMAGES>::Type rows_of(int p0, int end, const int* found) {
    if constexpr (IMAGES)
        return ImageRows{found};
    else
        return StackRows{p0, end, found};
}

// ---------------------------------------------------------------------------- one chunk of a tile

// How many units a pixel of x lies behind the one before, as offsets count them: vectors of 16 bytes, or one pixel.
template <typename T, bool VECTOR>
DEVICE int units_of_pixel(const Problem& g) {
    return VECTOR ? g.pitch / static_cast<int>(16 / sizeof(T)) : 1;
}

// Begin to copy 16 bytes of channels, from channel c of the pixel at an offset on, or zeros for -1.
template <bool CACHED, typename T>
DEVICE void copy_vector(SharedPlace to, const T* __restrict__ x, int offset, int c) {
    // One instruction for the address, if the compiler does not see what it is made of.
    const u8* const base = reinterpret_cast<const u8*>(computed_once(reinterpret_cast<i64>(x + c)));
    copy_async_16_unless_negative<CACHED>(to, base + static_cast<u64>(static_cast<u32>(offset)) * 16, offset);
}

// The same, also of pixels that are no whole vectors; zeros past channel C.
template <bool VECTOR, bool CACHED, typename T>
DEVICE void copy_channels(u8* to, const T* __restrict__ x, int offset, int c, int C) {
    constexpr int LANES = 16 / sizeof(T);
    if constexpr (VECTOR) {
        copy_vector<CACHED>(to, x, offset, c);
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

    // x begins with the first of the `channels` that the tile reads.
    DEVICE ChunkCopier(const T* x, const int* all_offsets, const Order& order, const Problem& g, int channels, int thread,
                       int p0, int pixels, int first)
        : x(x), offsets(all_offsets + thread / 8 * PASSES), order(order), unit(thread % 8), C(channels),
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

// What the channels of y become, if y LIES so.
template <int LIES>
DEVICE Unfolding unfolding_of(const Problem& g, i64 down, i64 across) {
    if constexpr (LIES != UNFOLDED) return {};
    const int n = Problem::narrow(down), m = Problem::narrow(across);
    return {n, m, g.pw, g.K / (n * m)};
}

// ---------------------------------------------------------------------------- what the kernels are given

// What a thread block works on.
//   POINTWISE    a 1x1 kernel with stride 1: pixel p of y reads pixel p of x, and the table is not needed
//   VECTOR_IN    pixels of x are whole vectors of 16 bytes, aligned; VECTOR_OUT: those of y and the residual
//   scaled       [2][last_channels(K)], by what channels are scaled and shifted last, if ACTIVATION says so
//   pitch        channels from a pixel of x to the next; if y does not lie WHOLE pitch_added: of the residual, pitch_out: of y.
//                In vectors, these may be some channels of other stacks
//   LIES         how y lies: UNFOLDED, its channels become unfold_down x unfold_across pixels each
//   ROUND        x is float, rounded to tf32 in shared memory
//   PARTIALS     thread blocks that share K leave their sums in memory; else they are a cluster and add up
//   CACHED       pixels come through the L1 cache, since taps read the same ones
//   GROUPED      columns of a tile are one panel, which reads `span` channels from ChannelGroups::begin on
//   IMAGES       x, y and the residual are images: a window reads all of x, and the table has no grid
//   settled      no kernel ahead that may still run writes the table or the weights
//   clear_rows   rows of y past the count become 0
#define STACK_CONV_PARAMETERS                                                                                          \
    const T *__restrict__ x, const u8 *__restrict__ packed, const T *__restrict__ residual,                           \
        const int *__restrict__ bin_counts, const int *__restrict__ indices, const int *__restrict__ grid,            \
        float *__restrict__ partials, T *__restrict__ y, const float *__restrict__ scaled, i64 M, i64 N, i64 GH,     \
        i64 GW, i64 C, i64 K, i64 bh, i64 bw, i64 ph, i64 pw, i64 H, i64 W, i64 P, i64 Q, i64 R, i64 S, i64 SH,       \
        i64 SW, i64 DH, i64 DW, i64 top, i64 left, i64 pitch, i64 pitch_added, i64 pitch_out, i64 unfold_down,         \
        i64 unfold_across, i64 span, i64 group_in, i64 group_out, i64 settled, i64 clear_rows
