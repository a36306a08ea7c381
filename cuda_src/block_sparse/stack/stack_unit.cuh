// stack_unit.cuh: what stack_unit.cu is made of: the pixels of its tiles, its products, its shared memory.
#pragma once

#include "block_sparse/stack/stack_conv.cuh"
#include "core/pipeline.cuh"

constexpr int UNIT_GROUPS = 2, UNIT_MULTIPLIERS = UNIT_GROUPS * 128;  // groups of four warps; each has 64 rows of a product
constexpr int UNIT_COPIERS = 128, UNIT_THREADS = UNIT_MULTIPLIERS + UNIT_COPIERS;
constexpr int UNIT_ROWS = 64;
constexpr int WIDTH = 64;  // channels between the layers

// The pixels of a tile: BLOCKS pieces of TH x TW output pixels, around each a rim of one pixel of the middle layer, and
// the pixels of x that those read by a kernel of TAPS taps.
template <int TH, int TW, int BLOCKS, int TAPS>
struct UnitTile {
    static constexpr int RIM = TAPS == 9 ? 2 : 1;
    static constexpr int XH = TH + 2 * RIM, XW = TW + 2 * RIM, X_ROWS = BLOCKS * XH * XW;
    static constexpr int MH = TH + 2, MW = TW + 2, MIDDLE_ROWS = BLOCKS * MH * MW;
    static constexpr int PIXELS = BLOCKS * TH * TW;
    static_assert(MIDDLE_ROWS > UNIT_ROWS && MIDDLE_ROWS <= 2 * UNIT_ROWS, "the groups share the rows of the middle layer");
    static_assert(PIXELS <= UNIT_ROWS, "and each has all output pixels");

    // The row of x under the first tap of a row of the middle layer, and under its centre.
    static DEVICE int x_row(int row) {
        if constexpr (TAPS == 1) return row;
        return (row / (MH * MW) * XH + row / MW % MH) * XW + row % MW;
    }
    static DEVICE int x_centre(int row) { return x_row(row) + (TAPS == 1 ? 0 : XW + 1); }
    // The row of the middle layer under the first tap of an output pixel, and the row of x under its centre.
    static DEVICE int middle_row(int pixel) {
        return (pixel / (TH * TW) * MH + pixel / TW % TH) * MW + pixel % TW;
    }
    static DEVICE int x_of_pixel(int pixel) {
        return (pixel / (TH * TW) * XH + pixel / TW % TH + RIM) * XW + pixel % TW + RIM;
    }
};

// Where the pixels of tiles lie in the stack. Pieces are numbered along the rows of blocks, block by block.
template <class Tile, int TH, int TW, int BLOCKS>
struct UnitFinder {
    const BlockTable& table;
    int bh, bw, H, W, across, per_block, pieces;

    DEVICE UnitFinder(const BlockTable& table, int bh, int bw, int H, int W)
        : table(table), bh(bh), bw(bw), H(H), W(W), across(bw / TW), per_block(bh / TH * across),
          pieces(table.rows * per_block) {}
    DEVICE int tiles() const { return ceil_div(pieces, BLOCKS); }

    struct Corner {
        int row, i, j;  // of the stack; of the block
    };
    DEVICE Corner corner(int piece) const {
        const int row = per_block == 1 ? piece : piece / per_block, rest = piece - row * per_block;
        return Corner{row, rest / across * TH, rest % across * TW};
    }
    // The pixel of the stack in row `row` of a tile of x; -1 where none is active or the image ends.
    DEVICE int x_pixel(int tile, int row) const {
        const int piece = tile * BLOCKS + row / (Tile::XH * Tile::XW);
        const Corner at = corner(piece);
        const BlockTable::Block block = table.block(at.row);
        int i = at.i - Tile::RIM + row / Tile::XW % Tile::XH, j = at.j - Tile::RIM + row % Tile::XW;
        const int down = i < 0 ? -1 : i >= bh, right = j < 0 ? -1 : j >= bw;
        i -= down * bh, j -= right * bw;
        const int hi = block.hi + down, wi = block.wi + right;
        const bool inside = piece < pieces && block.n >= 0 && static_cast<u32>(hi * bh + i) < static_cast<u32>(H) &&
                            static_cast<u32>(wi * bw + j) < static_cast<u32>(W);
        const int found = table.row(inside ? block.n : -1, hi, wi);
        return found < 0 ? -1 : (found * bh + i) * bw + j;
    }
    // The pixel of the stack that is output pixel `pixel` of a tile; -1 past the end.
    DEVICE int y_pixel(int tile, int pixel) const {
        const int piece = tile * BLOCKS + pixel / (TH * TW);
        const Corner at = corner(piece);
        const int place = (at.row * bh + at.i + pixel / TW % TH) * bw + at.j + pixel % TW;
        return pixel < Tile::PIXELS && piece < pieces ? place : -1;
    }
};

// Weights in shared memory: 64 columns of 128 bytes of K, for ldmatrix and for wgmma.
struct UnitWeights {
    const u8* at;
    u32 low;  // half of the descriptor
    DEVICE explicit UnitWeights(const u8* at)
        : at(at), low(__shfl_sync(0xffffffffu, static_cast<u32>(swizzled_descriptor(shared_address(at))), 0)) {}
    DEVICE UnitWeights(const u8* at, u32 low) : at(at), low(low) {}
    DEVICE UnitWeights chunk(int number) const {
        return UnitWeights(at + number * PANEL_CHUNK, low + number * (PANEL_CHUNK >> 4));
    }
    DEVICE u64 descriptor(int step) const {
        return (swizzled_descriptor(0) & ~0xffffffffull) | (low + step * (32 >> 4));
    }
};

// The product of 64 rows, which may lie anywhere in a tile in shared memory, with 64 columns of weights: four warps
// together, of which each takes 16 rows.
template <bool WGMMA, typename T>
struct RowProduct {
    using Rows = u32[4][4];  // a warp's rows, 128 bytes of K, as mma takes them
    static DEVICE int row() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16; }  // that a lane points to

    // `row` is where the lane's row lies; `half` is its half of 32 bytes.
    static DEVICE void load(Rows& rows, const u8* tile, int row, int half) {
        const int place = (row & 7) ^ half;
        const u8* const a = tile + row * TILE_ROW;
#pragma unroll
        for (int step = 0; step < 4; ++step) ldmatrix_x4(rows[step], a + ((place ^ (2 * step)) << 4));
    }

    // Begin acc += rows * columns; wait<0> ends it, wait<1> ends the one before.
    static DEVICE void multiply(float (&acc)[8][4], const Rows& rows, const UnitWeights& weights) {
        if constexpr (WGMMA) {
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step)
                Wgmma<T, 64>::registers(&acc[0][0], rows[step], weights.descriptor(step));
            wgmma_commit();
        } else {
            const int lane = threadIdx.x % 32, column = lane / 16 * 8 + lane % 8;
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                const u8* const b_at = weights.at + swizzled(column, 2 * step + lane / 8 % 2);
#pragma unroll
                for (int n = 0; n < 8; n += 2) {
                    u32 two[4];
                    ldmatrix_x4(two, b_at + n * 8 * TILE_ROW);
                    mma_16816<T>(acc[n], rows[step], two[0], two[1]);
                    mma_16816<T>(acc[n + 1], rows[step], two[2], two[3]);
                }
            }
        }
    }
    template <int COUNT>
    static DEVICE void wait() {
        if constexpr (WGMMA) wgmma_wait<COUNT>();
    }
};

// Shared memory, from a multiple of 1024 bytes on: BYTES, the weights, and scale and bias of each layer's columns.
template <class Tile, int X_STAGES>
struct UnitMemory {
    static constexpr int X = Tile::X_ROWS * TILE_ROW, MIDDLE = Tile::MIDDLE_ROWS * TILE_ROW;
    static constexpr int SECOND = Tile::RIM == 1 ? UNIT_ROWS * TILE_ROW : 0;
    static constexpr int SUMS = 2 * 4 * 128 * 16;  // that the groups exchange
    static constexpr int BYTES = X_STAGES * X + MIDDLE + SECOND + SUMS + (2 * X_STAGES + 12) * 8 + 2 * Tile::X_ROWS * 4;
    u8 *x, *middle, *second;
    float4* sums;
    u64 *x_full, *x_empty;     // of each stage
    u64* weights;              // [3]: those of a layer are there
    u64 *found, *done;         // [2]: the pixels of a tile are found; it is finished
    u64 *first, *last, *meet;  // a middle layer is there; the groups' sums are
    u64* ready;                // scale and bias are there
    int* offsets;              // [2][X_ROWS]: pixels of the stack x, or -1
    float* tables;

    DEVICE UnitMemory(u8* base, int weight_bytes) {
        x = base + weight_bytes;
        middle = x + X_STAGES * X;
        second = middle + MIDDLE;
        sums = reinterpret_cast<float4*>(second + SECOND);
        x_full = reinterpret_cast<u64*>(sums + SUMS / 16), x_empty = x_full + X_STAGES;
        weights = x_empty + X_STAGES, found = weights + 3, done = found + 2;
        first = done + 2, last = first + 1, meet = last + 1, ready = meet + 1;
        offsets = reinterpret_cast<int*>(ready + 2);  // and tables at a multiple of 16 bytes
        tables = reinterpret_cast<float*>(offsets + 2 * Tile::X_ROWS);
    }
};
