// stack_pool.cuh: what max and average pooling of a stack share: a thread for each vector of channels of each window.
#pragma once

#include "block_sparse/stack/block_table.cuh"
#include "core/async_copy.cuh"

constexpr int POOL_THREADS = 256;
constexpr int SOME_TAPS = 9;  // of a window that are loaded together, and found, where its size is not known
constexpr int IN_NO_BLOCK = -1, OUTSIDE = -2;  // what stands for a pixel that is 0, or that is none of the image

// Thread blocks that a multiprocessor must hold: fewer where many pixels are found together.
DEVICE constexpr int pool_blocks(int taps) { return taps > SOME_TAPS ? 2 : 3; }

// Sizes of a pooling; fine is the stage of x, coarse that of y.
struct Pooling {
    int width;                 // vectors of a pixel
    int bh, bw, H, W;          // block and image of the fine stage
    int ph, pw;                // block of the coarse stage
    int R, S, SH, SW, DH, DW;  // window, strides, dilation
    int top, left, bottom, right;
    int outside = OUTSIDE;  // what pixels around the image are
    int pitch_in = 0, pitch_out = 0;  // vectors from a pixel of x to the next, and of y, if PITCHED
};

// A vector of y: of pixel (p, q) of the block in a row of the stack, which is the stack's pixel `pixel`.
struct Pooled {
    int row, p, q, v, pixel;
    BlockTable::Block block;
};

// Windows and their pixels.
struct Windows {
    const BlockTable& table;
    const Pooling& g;
    Divisor down, across, line, size, width;
    int above, beside;  // blocks that a window can reach upwards and to the left

    DEVICE Windows(const BlockTable& table, const Pooling& g)
        : table(table), g(g), down(g.bh), across(g.bw), line(g.pw), size(g.ph * g.pw), width(g.width),
          above(g.top > 0 ? ceil_div(g.top, g.bh) : 0), beside(g.left > 0 ? ceil_div(g.left, g.bw) : 0) {}

    // How often n, of less than `d` plus the threads of a thread block, holds d.
    static DEVICE int times(int n, const Divisor& d) {
        return static_cast<int>(d.d) >= POOL_THREADS ? n >= static_cast<int>(d.d) : d.of(n);
    }
    // Vector number i0 + threadIdx.x of y; i0 is the same for all threads.
    DEVICE Pooled at(i64 i0) const {
        const i64 pixel0 = divide(i0, g.width), row0 = divide(pixel0, g.ph * g.pw);
        const int v = static_cast<int>(i0 - pixel0 * g.width) + static_cast<int>(threadIdx.x), pixels = times(v, width);
        const int number = static_cast<int>(pixel0 - row0 * g.ph * g.pw) + pixels, rows = times(number, size);
        const int in_block = number - rows * g.ph * g.pw;
        const int p = g.ph * g.pw <= 1 << 16 ? line.of(in_block) : in_block / g.pw;
        const int row = static_cast<int>(row0) + rows;
        return Pooled{row, p, in_block - p * g.pw, v - pixels * g.width, static_cast<int>(pixel0) + pixels, table.block(row)};
    }
    // The pixel of x at (y, x) from the corner of a block, or IN_NO_BLOCK, or what pixels around the image are.
    DEVICE int find(const Pooled& to, int y, int x) const {
        const int dh = down.of(y + above * g.bh) - above, dw = across.of(x + beside * g.bw) - beside;
        const int hi = to.block.hi + dh, wi = to.block.wi + dw;
        const bool inside = static_cast<u32>(to.block.hi * g.bh + y) < static_cast<u32>(g.H) &&
                            static_cast<u32>(to.block.wi * g.bw + x) < static_cast<u32>(g.W);
        int row = to.row;
        if (dh != 0 || dw != 0) row = table.row(inside ? to.block.n : -1, hi, wi);  // most windows lie in one block
        const int pixel = (row * g.bh + y - dh * g.bh) * g.bw + x - dw * g.bw;
        return !inside ? g.outside : row < 0 ? IN_NO_BLOCK : pixel;
    }
};

// Call visit(vector) for each pixel of the image in the window of each vector of y, row by row, and store(vector) what
// `result` makes of it. Template arguments R and S are the window's, or 0 where it is known when the kernel runs.
//   Window      what a window's pixels are gathered in: begin(to), visit(V, number of the tap), result(vector of y) -> V
//   settled     no kernel ahead that may still run writes the table
//   clear_rows  rows of y past the count become 0: of a y that is no part of another stack
//   PITCHED     x and y may be parts of other stacks, whose pixels have more channels
template <int R, int S, bool PITCHED = false, typename V, typename Window>
DEVICE void pool_windows(const V* __restrict__ x, const int* __restrict__ bin_counts, const int* __restrict__ indices,
                         const int* __restrict__ grid, V* __restrict__ y, i64 M, i64 N, i64 GH, i64 GW, const Pooling& g,
                         bool settled, bool clear_rows, Window window) {
    constexpr int TOGETHER = R ? R * S : SOME_TAPS;  // taps that are found together
    constexpr int LOADED = TOGETHER < SOME_TAPS ? TOGETHER : SOME_TAPS;
    const int across = S ? S : g.S, taps = R ? R * S : g.R * g.S;
    const auto narrow = [](i64 value) { return static_cast<int>(value); };
    begin_launch(settled);
    bool waited = !settled;
    const auto wait = [&] {  // before x, and the memory of y
        if (!waited) dependent_wait();
        waited = true;
    };
    const int rows = narrow(clamp(*bin_counts, 0, M));
    const BlockTable table{indices, grid, narrow(N), narrow(GH), narrow(GW), rows};
    const Windows windows(table, g);
    const i64 all = static_cast<i64>(rows) * g.ph * g.pw * g.width;
    for (i64 i0 = static_cast<i64>(blockIdx.x) * POOL_THREADS; i0 < all; i0 += static_cast<i64>(gridDim.x) * POOL_THREADS) {
        if (i0 + threadIdx.x >= all) break;
        const Pooled to = windows.at(i0);
        const i64 at = PITCHED ? static_cast<i64>(to.pixel) * g.pitch_out + to.v : i0 + threadIdx.x;
        if (to.block.n < 0) {
            wait();
            y[at] = zero<V>();
            continue;
        }
        const int h0 = to.p * g.SH - g.top, w0 = to.q * g.SW - g.left;
        Window its = window;
        its.begin(to);
        for (int first = 0, r = 0, s = 0; first < taps; first += TOGETHER) {
            int from[TOGETHER];
#pragma unroll
            for (int t = 0; t < TOGETHER; ++t) {
                from[t] = R || first + t < taps ? windows.find(to, h0 + r * g.DH, w0 + s * g.DW) : OUTSIDE;
                if (++s == across) s = 0, ++r;
            }
            wait();
            const V* const pixels = loaded_later(x);
            const int apart = PITCHED ? g.pitch_in : g.width;
#pragma unroll
            for (int t0 = 0; t0 < TOGETHER; t0 += LOADED) {
                V values[LOADED];
#pragma unroll
                for (int t = t0; t < t0 + LOADED && t < TOGETHER; ++t) {
                    values[t - t0] = zero<V>();
                    if (from[t] >= 0) values[t - t0] = pixels[static_cast<i64>(from[t]) * apart + to.v];
                }
#pragma unroll
                for (int t = t0; t < t0 + LOADED && t < TOGETHER; ++t)
                    if (from[t] != OUTSIDE) its.visit(values[t - t0], first + t);
            }
        }
        y[at] = its.result(i0 + threadIdx.x);
    }
    wait();
    if (clear_rows) clear_rest<false>(y, all, M * g.ph * g.pw * g.width);
}
