// stack_pixels.cuh: the pixels of tiles of a stack of blocks, for unit_products.cuh.
#pragma once

#include "block_sparse/bottleneck/unit_products.cuh"
#include "block_sparse/stack/block_table.cuh"

// A tile is PIECES pieces of blocks, which are numbered along the rows of blocks, block by block. Where the pixels of a
// piece and of its rim lie is looked up once, by all threads, and kept in shared memory for the three products:
//   a pixel of the stack                    the number of the pixel
//   a pixel of the piece outside its image  -2 - its number: x is not read there, and 0 is stored
//   any other                               -1
// Pixels of the next tile are found while those at hand are in use, so there is room for two tiles.
template <class U, int THREADS>
struct StackPixels {
    static constexpr int PH = U::Rim::PIECE_H, PW = U::TW, PIECES = U::PIECES;
    static constexpr int IH = U::Rim::PIECE_IH, IW = U::Rim::IW;
    static constexpr int ROWS = ceil_div(U::RIM, 64) * 64;  // that four warps may ask for together
    static constexpr int EACH = ceil_div(ROWS, THREADS), BYTES = 2 * ROWS * 4;

    const BlockTable& table;
    int bh, bw, H, W, across, per_block, pieces;
    int next, stride, tiles;
    int* offsets;    // of the tile at hand
    int* elsewhere;  // of the next one
    int found[EACH];

    DEVICE StackPixels(const BlockTable& table, int bh, int bw, int H, int W, int first, int stride, u8* shared)
        : table(table), bh(bh), bw(bw), H(H), W(W), across(bw / PW), per_block(bh / PH * across),
          pieces(table.rows * per_block), next(first), stride(stride), tiles(ceil_div(pieces, PIECES)),
          offsets(reinterpret_cast<int*>(shared)), elsewhere(offsets + ROWS) {}
    DEVICE bool any() const { return next < tiles; }
    DEVICE void take() {
        int* const kept = elsewhere;
        elsewhere = offsets, offsets = kept;
        next += stride;
    }
    template <typename P>
    DEVICE P* from(P* stack, int) const { return stack; }
    DEVICE bool inside(int q) const { return offsets[q] >= 0; }
    DEVICE i64 rim_pixel(int q) const { return offsets[q]; }
    DEVICE Spot middle(int p) const {
        const int line = p / PW, centre = (line / PH * IH + line % PH + 1) * IW + p % PW + 1;
        const int offset = offsets[centre];
        return Spot{offset != -1, offset >= 0, offset < 0 ? -2 - offset : offset};
    }
    DEVICE void look() {
        if (!any()) return;
        const int thread = recomputed(threadIdx.x);  // (or lines and columns are kept in registers)
#pragma unroll
        for (int e = 0; e < EACH; ++e) found[e] = search(thread + e * THREADS);
    }
    DEVICE void keep() const {
        if (!any()) return;
#pragma unroll
        for (int e = 0; e < EACH; ++e)
            if (threadIdx.x + e * THREADS < ROWS) elsewhere[threadIdx.x + e * THREADS] = found[e];
    }

    // Where pixel number q of the next tile lies.
    DEVICE int search(int q) const {
        const int part = q / (IH * IW), piece = next * PIECES + part;
        const int row = per_block == 1 ? piece : piece / per_block, rest = piece - row * per_block;
        const int lines = per_block == 1 ? 0 : rest / across;
        int i = lines * PH + q / IW % IH - 1, j = (rest - lines * across) * PW + q % IW - 1;
        const BlockTable::Block block = table.block(row);
        const int down = i < 0 ? -1 : i >= bh, right = j < 0 ? -1 : j >= bw;
        i -= down * bh, j -= right * bw;
        const int hi = block.hi + down, wi = block.wi + right;
        const bool there = q < U::RIM && piece < pieces, own = there && down == 0 && right == 0;
        const bool inside = there && block.n >= 0 && static_cast<u32>(hi * bh + i) < static_cast<u32>(H) &&
                            static_cast<u32>(wi * bw + j) < static_cast<u32>(W);
        const int neighbour = table.row(inside && !own ? block.n : -1, hi, wi);
        const int its_row = own ? row : neighbour, pixel = (its_row * bh + i) * bw + j;
        return inside && its_row >= 0 ? pixel : own ? -2 - pixel : -1;
    }
};
