// stack_conv_operands.cuh: where stack_conv_pipelined.cuh gets its operands from: how threads copy pixels (LeanCopier), or have
// the copy engine bring them (TileBoxes), and how a panel's weights arrive (TileWeights).
#pragma once

#include "block_sparse/stack/stack_conv.cuh"
#include "core/tensor_map.cuh"

constexpr int COPIERS = 128;  // threads of a team that copies

// How a thread copies its part of a tile's chunks, one after another: of every 16th row one vector. What a chunk needs is
// found before it: threads that copy issue one instruction after another, and all others wait for them.
// With a SHORTCUT the last chunks are those of the pixels of another stack at the strides of Shortcut.
struct Shortcut {
    int channels, down, across;  // of its pixels; the strides
    int pitch;                   // channels from a pixel to the next, of which some may be others
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
    // The pixels of a chunk of four rows a thread are looked up before it is their turn.
    static constexpr bool EARLY = !POINTWISE && VECTOR && PASSES == 4;
    int4 ready;

    DEVICE LeanCopier(const T* x, const T* also, const int* all_offsets, const Order& order, const Problem& g,
                      int channels, const Shortcut& shortcut, int thread, int p0, int pixels, int first, int height)
        : x(x), also(also), order(order), C(channels), unit(thread % 8), to(place(thread)),
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
                beside[pass] = shortcut.pixel(g, min(p0 + thread / 8 + pass * PASS, pixels - 1)) * (shortcut.pitch / LANES);
        }
    }

    // Where the first vector of a thread of the team goes in a stage.
    static DEVICE int place(int thread) { return swizzled(thread / 8, thread % 8); }
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
    // The same in two steps, for a chunk of one tap, of EARLY pixels: `own` is where the thread's first vector of the stage goes.
    DEVICE bool is_of_one_tap() const { return chunk < order.groups * order.taps; }
    DEVICE void look_up() {
        if constexpr (EARLY)
            if (is_of_one_tap()) ready = *reinterpret_cast<const int4*>(its);
    }
    DEVICE void copy_ready(SharedPlace own) const {
        const int four[4] = {ready.x, ready.y, ready.z, ready.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) copy_vector<CACHED>(own + e * (PASS * TILE_ROW), x, four[e], c);
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
    DEVICE void copy(SharedPlace stage, int i, SharedPlace bar) const {
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
    DEVICE void copy(SharedPlace stage, const TensorMap& map, int c, int height, SharedPlace bar) const {
        barrier_expect(bar, height * TILE_ROW);
#pragma unroll
        for (int box = 0; box < COUNT; ++box)
            if (box * BOX_ROWS < height) copy_box(stage + box * (BOX_ROWS * TILE_ROW), map, c, across[box], down[box], bar);
    }
};
