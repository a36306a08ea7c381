// stack_pool.cuh: what max and average pooling of a stack share: a thread for each vector of channels of each window.
#pragma once

#include "block_sparse/stack/block_table.cuh"
#include "core/async_copy.cuh"

// Sizes of a pooling; fine is the stage of x, coarse that of y.
struct Pooling {
    int M, N, GH, GW, width;     // width: vectors of a pixel
    int bh, bw, H, W;            // block and image of the fine stage
    int ph, pw;                  // block of the coarse stage
    int R, S, SH, SW, DH, DW;    // window, strides, dilation
    int top, left, bottom, right;
};

// Call visit(vector) for each pixel of the image in a window; pixels in no active block are 0.
template <typename V, typename Visit>
DEVICE void visit_window(const V* __restrict__ x, const BlockTable& table, const Pooling& g, int row,
                         const BlockTable::Block& block, int h0, int w0, int v, Visit visit) {
    for (int r = 0; r < g.R; ++r) {
        const int h = h0 + r * g.DH;
        if (static_cast<u32>(h) >= static_cast<u32>(g.H)) continue;
        const int hi = h / g.bh;
        for (int s = 0; s < g.S; ++s) {
            const int w = w0 + s * g.DW;
            if (static_cast<u32>(w) >= static_cast<u32>(g.W)) continue;
            const int wi = w / g.bw;
            const int from = hi == block.hi && wi == block.wi ? row : table.row(block.n, hi, wi);
            const i64 pixel = (static_cast<i64>(from) * g.bh + (h - hi * g.bh)) * g.bw + (w - wi * g.bw);
            visit(from < 0 ? zero<V>() : x[pixel * g.width + v]);
        }
    }
}

// Call pool(result vector's place, row, block, h0, w0, v) for each vector of y that is of a block; the others become 0.
template <typename V, typename Pool>
DEVICE void for_each_window(V* __restrict__ y, const BlockTable& table, const Pooling& g, Pool pool) {
    const i64 all = static_cast<i64>(g.M) * g.ph * g.pw * g.width;
    for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < all;
         i += static_cast<i64>(gridDim.x) * blockDim.x) {
        const i64 pixel = divide(i, g.width), line = divide(pixel, g.pw);
        const int v = static_cast<int>(i - pixel * g.width), q = static_cast<int>(pixel - line * g.pw);
        const int row = static_cast<int>(divide(line, g.ph)), p = static_cast<int>(line - static_cast<i64>(row) * g.ph);
        const BlockTable::Block block = table.block(row);
        if (block.n < 0) {
            y[i] = zero<V>();
            continue;
        }
        const int h0 = block.hi * g.bh + p * g.SH - g.top, w0 = block.wi * g.bw + q * g.SW - g.left;
        y[i] = pool(row, block, h0, w0, v);
    }
}
