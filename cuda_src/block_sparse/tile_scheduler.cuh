// tile_scheduler.cuh: the tiles that a thread block takes of the listed blocks, one after another.
#pragma once
#include "core/common.cuh"

struct Blocks {
    int M, N, P, Q;                            // rows of the list; images; their outputs
    int block_h, block_w, blocks_h, blocks_w;  // size of a block, and how many there are
};

// A tile: image n, outputs from (p, q), of which rows x columns count; none if rows <= 0.
struct Tile {
    int n, p, q, rows, columns;
};

// Blocks of the list one after another, every `stride`-th, and of each the same tile: number
// blockIdx.z in raster order. The index row of the next block is on its way.
template <int TH, int TW>
struct Tiles {
    const Blocks& g;
    const int* indices;
    int row, total, stride, i, j;  // of the list; the tile in its block
    int next_n, next_h, next_w;

    DEVICE Tiles(const Blocks& g_, const int* indices_, int first, int stride_)
        : g(g_), indices(indices_), row(first), total(g_.M), stride(stride_) {
        look();
        const int across = ceil_div(g.block_w, TW), tile = blockIdx.z;
        i = tile / across * TH;
        j = tile % across * TW;
    }
    DEVICE void limit(int count) { total = min(count, g.M); }
    DEVICE bool any() const { return row < total; }
    DEVICE void look() {
        if (row >= total) return;
        const int* index = indices + 3 * static_cast<i64>(row);
        next_n = index[0], next_h = index[1], next_w = index[2];
    }
    // The tile at hand; then move on.
    DEVICE Tile take() {
        Tile tile{0, 0, 0, 0, 0};
        if (next_n >= 0 && next_n < g.N && next_h >= 0 && next_h < g.blocks_h && next_w >= 0 && next_w < g.blocks_w) {
            tile.n = next_n, tile.p = next_h * g.block_h + i, tile.q = next_w * g.block_w + j;
            tile.rows = min(TH, min(g.block_h - i, g.P - tile.p));
            tile.columns = min(TW, min(g.block_w - j, g.Q - tile.q));
        }
        row += stride;
        look();
        return tile;
    }
};
