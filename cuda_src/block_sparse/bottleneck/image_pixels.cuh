// image_pixels.cuh: the pixels of a tile of an image, for unit_products.cuh.
#pragma once

#include "block_sparse/bottleneck/unit_products.cuh"
#include "block_sparse/tile_scheduler.cuh"

template <class U>
struct ImagePixels {
    static constexpr int TW = U::TW, IW = U::Rim::IW;
    Tiles<U::TH, U::TW> tiles;
    int H, W;
    Tile tile;

    DEVICE ImagePixels(const Blocks& g, const int* indices, int first, int stride)
        : tiles(g, indices, first, stride), H(g.P), W(g.Q) {}
    DEVICE bool any() const { return tiles.any(); }
    DEVICE void take() { tile = tiles.take(); }
    template <typename P>
    DEVICE P* from(P* images, int C) const { return images + static_cast<i64>(tile.n) * H * W * C; }
    DEVICE bool inside(int q) const {
        return tile.rows > 0 && q < U::RIM && static_cast<u32>(line(q)) < static_cast<u32>(H) &&
               static_cast<u32>(column(q)) < static_cast<u32>(W);
    }
    DEVICE i64 rim_pixel(int q) const { return static_cast<i64>(line(q)) * W + column(q); }
    DEVICE int line(int q) const { return tile.p - 1 + q / IW; }
    DEVICE int column(int q) const { return tile.q - 1 + q % IW; }
    DEVICE Spot middle(int p) const {
        const int i = p / TW, j = p % TW;
        const bool real = i < tile.rows && j < tile.columns;
        return Spot{real, real, static_cast<i64>(tile.p + i) * W + tile.q + j};
    }
    DEVICE void look() const {}
    DEVICE void keep() const {}
};
