// stack_conv_listed.cuh: the pixels of listed blocks of images, for stack_conv_pipelined.cuh with IMAGES and windows of one pixel:
// who looks up which (ListedPixels), and how the copy engine brings them (BlockBoxes), or threads (BlockRows).
#pragma once

#include "block_sparse/stack/stack_conv_operands.cuh"

// EACH pixels of a tile whose blocks a lane looks up. What the list says is loaded before it is known how much of it there is.
template <int EACH>
struct ListedPixels {
    int p0;                          // the tile's first pixel
    Finder::Pixel begin[EACH];       // where they lie in their blocks
    BlockTable::Block listed[EACH];  // what the list says of these

    // Turn to the tile that begins at a pixel, and to pixels number `at` of it.
    DEVICE void turn_to(const Finder& finder, int first_pixel, const int (&at)[EACH]) {
        p0 = first_pixel;
        const int pixels = static_cast<int>(finder.size.d), row = static_cast<int>(static_cast<u32>(p0) / finder.size.d);
#pragma unroll
        for (int e = 0; e < EACH; ++e) begin[e] = finder.pixel(row, p0 - row * pixels, at[e]);
    }
    // What was found is there, and is not computed behind the wait that follows.
    DEVICE void settle() {
#pragma unroll
        for (int e = 0; e < EACH; ++e)
            begin[e] = Finder::Pixel{recomputed(begin[e].row), recomputed(begin[e].i), recomputed(begin[e].j)};
    }
    // Begin to load what the list, of `capacity` rows, says. They may be past the count.
    DEVICE void look_up(const int* __restrict__ indices, int capacity) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) listed[e] = BlockTable::listed(indices, min(begin[e].row, capacity - 1));
    }
    // Now the count is known: the block, n < 0 where there is none.
    DEVICE BlockTable::Block block(const Finder& finder, int e) const { return finder.table.checked(begin[e].row, listed[e]); }
};

// The boxes of a tile: each has BOX pixels of one block, whole lines or a part of one, of an array of all lines of all images. A
// box that sticks out of its image at the bottom has pixels of the next one, whose results nobody stores.
// Of a tile of BM pixels WARPS warps take a box each in turn, and lane l of a warp looks up its boxes l, l + 32, ... If CUT, tiles
// may have fewer pixels.
template <int BM, int BOX, bool CUT>
struct BlockBoxes {
    static constexpr int COUNT = BM / BOX, WARPS = COUNT > 8 ? 3 : 1;  // to ask for a box takes some ten instructions
    static constexpr int MOST = ceil_div(COUNT, WARPS), EACH = ceil_div(MOST, 32), GROUP = MOST <= 8 ? MOST : 4;
    static constexpr bool HELD = MOST <= 8;  // all lanes hold all boxes of the warp
    static_assert(BM % BOX == 0 && 64 % BOX == 0, "parts of a tile are whole boxes");
    int warp;  // of WARPS
    ListedPixels<EACH> first;  // the first pixels of boxes
    int across[HELD ? MOST : EACH], down[HELD ? MOST : EACH];

    // Turn to the tile that begins at a pixel. A lane past the last box has one that there is.
    DEVICE void turn_to(const Finder& finder, int first_pixel) {
        int at[EACH];
#pragma unroll
        for (int e = 0; e < EACH; ++e)
            at[e] = min(warp + WARPS * (e * 32 + static_cast<int>(threadIdx.x % 32)), COUNT - 1) * BOX;
        first.turn_to(finder, first_pixel, at);
    }
    // Where the boxes begin. One of no block lies past the last image, where there are zeros.
    DEVICE void place(const Finder& finder) {
        int its_across[EACH], its_down[EACH];
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const BlockTable::Block block = first.block(finder, e);
            const int line = block.n * finder.g.H + block.hi * finder.g.ph + first.begin[e].i;
            its_across[e] = block.wi * finder.g.pw + first.begin[e].j;
            its_down[e] = block.n < 0 ? finder.table.N * finder.g.H : line;
        }
        if constexpr (HELD) {
#pragma unroll
            for (int i = 0; i < MOST; ++i)
                across[i] = __shfl_sync(0xffffffffu, its_across[0], i), down[i] = __shfl_sync(0xffffffffu, its_down[0], i);
        } else {
#pragma unroll
            for (int e = 0; e < EACH; ++e) across[e] = its_across[e], down[e] = its_down[e];
        }
    }
    // Begin to copy 128 bytes of channels from c on, of the warp's boxes of the first `height` pixels. All lanes call this.
    DEVICE void copy(SharedPlace stage, const TensorMap& map, int c, int height, SharedPlace bar) const {
        const int count = ceil_div(height / BOX - warp, WARPS);
        const SharedPlace own = stage + warp * (BOX * TILE_ROW);
        if (elected()) barrier_expect(bar, count * (BOX * TILE_ROW));
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
#pragma unroll (HELD ? 1 : 2)
            for (int from = 0; from < (MOST - e * 32 < 32 ? MOST - e * 32 : 32); from += GROUP) {
                int its_across[GROUP], its_down[GROUP];
#pragma unroll
                for (int i = 0; i < GROUP; ++i) {
                    its_across[i] = HELD ? across[i] : __shfl_sync(0xffffffffu, across[e], from + i);
                    its_down[i] = HELD ? down[i] : __shfl_sync(0xffffffffu, down[e], from + i);
                }
                if (elected()) {
#pragma unroll
                    for (int i = 0; i < GROUP; ++i) {
                        const int box = e * 32 + from + i;
                        if ((!CUT && box < COUNT / WARPS) || box < count)
                            copy_box(own + box * (WARPS * BOX * TILE_ROW), map, c, its_across[i], its_down[i], bar);
                    }
                }
            }
        }
    }
};

// The rows of a tile that threads copy, each every 16th row as LeanCopier has it: a warp looks up each of its rows once.
template <int BM>
struct BlockRows {
    static constexpr int PASS = COPIERS / 8, PASSES = BM / PASS, ROWS = 4 * PASSES, WARPS = 4;  // rows of a warp
    static constexpr int EACH = ceil_div(ROWS, 32);
    int warp;  // of WARPS
    ListedPixels<EACH> first;
    int found[EACH];  // pixels of y, or -1

    // The tile's row that is the lane's; of a row that there is, in lanes that have none.
    DEVICE int row(int e) const {
        const int number = min(e * 32 + static_cast<int>(threadIdx.x % 32), ROWS - 1);
        return warp * 4 + number % 4 + number / 4 * PASS;
    }
    DEVICE void turn_to(const Finder& finder, int first_pixel) {
        int at[EACH];
#pragma unroll
        for (int e = 0; e < EACH; ++e) at[e] = row(e);
        first.turn_to(finder, first_pixel, at);
    }
    // Where the rows of x that the thread copies begin, in units, or -1; and which pixels of y, up to pixel `end` of the blocks.
    DEVICE void place(const Finder& finder, int units, int end, int (&mine)[PASSES]) {
        const Problem& g = finder.g;
        int its[EACH];
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const BlockTable::Block block = first.block(finder, e);
            const int v = block.hi * g.ph + first.begin[e].i, u = block.wi * g.pw + first.begin[e].j;
            its[e] = block.n >= 0 && v < g.H && u < g.W ? ((block.n * g.H + v) * g.W + u) * units : -1;
            const bool stored = block.n >= 0 && v < g.P && u < g.Q && first.p0 + row(e) < end;
            found[e] = stored ? (block.n * g.P + v) * g.Q + u : -1;
        }
        const int beside = threadIdx.x % 32 / 8;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass)
            mine[pass] = __shfl_sync(0xffffffffu, its[pass / 8], beside + pass % 8 * 4);
    }
};
template <bool BOXED, class Boxes, class Rows>
struct ListedOf {
    using Type = Boxes;
};
template <class Boxes, class Rows>
struct ListedOf<false, Boxes, Rows> {
    using Type = Rows;
};
