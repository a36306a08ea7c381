// stack_pool.cuh: what max and average pooling of a stack share: a thread for each vector of channels of each window.
#pragma once

#include "block_sparse/stack/block_table.cuh"
#include "core/async_copy.cuh"

constexpr int POOL_THREADS = 256;
constexpr int IN_NO_BLOCK = -1, OUTSIDE = -2;  // what stands for a pixel that is 0, or that is none of the image

// Sizes of a pooling; fine is the stage of x, coarse that of y.
struct Pooling {
    int width;                 // vectors of a pixel
    int bh, bw, H, W;          // block and image of the fine stage
    int ph, pw;                // block of the coarse stage
    int R, S, SH, SW, DH, DW;  // window, strides, dilation
    int top, left, bottom, right;
};

// A vector of y: of pixel (p, q) of the block in a row of the stack.
struct Pooled {
    int row, p, q, v;
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
        return Pooled{row, p, in_block - p * g.pw, v - pixels * g.width, table.block(row)};
    }
    // The pixel of x at (y, x) from the corner of a block, or IN_NO_BLOCK, or OUTSIDE.
    DEVICE int find(const Pooled& to, int y, int x) const {
        const int dh = down.of(y + above * g.bh) - above, dw = across.of(x + beside * g.bw) - beside;
        const int hi = to.block.hi + dh, wi = to.block.wi + dw;
        const bool inside = static_cast<u32>(to.block.hi * g.bh + y) < static_cast<u32>(g.H) &&
                            static_cast<u32>(to.block.wi * g.bw + x) < static_cast<u32>(g.W);
        int row = to.row;
        if (dh != 0 || dw != 0) row = table.row(inside ? to.block.n : -1, hi, wi);  // most windows lie in one block
        const int pixel = (row * g.bh + y - dh * g.bh) * g.bw + x - dw * g.bw;
        return !inside ? OUTSIDE : row < 0 ? IN_NO_BLOCK : pixel;
    }
};

// Call visit(vector) for each pixel of the image in the window of each vector of y, row by row, and store(vector) what
// `result` makes of it. Template arguments R and S are the window's, or 0 where it is known when the kernel runs.
//   Window      what a window's pixels are gathered in: begin(to), visit(V, number of the tap), result(vector of y) -> V
//   settled     no kernel ahead that may still run writes the table
//   clear_rows  rows of y past the count become 0
template <int R, int S, typename V, typename Window>
DEVICE void pool_windows(const V* __restrict__ x, const int* __restrict__ bin_counts, const int* __restrict__ indices,
                         const int* __restrict__ grid, V* __restrict__ y, i64 M, i64 N, i64 GH, i64 GW, const Pooling& g,
                         bool settled, bool clear_rows, Window window) {
    constexpr int ROWS = R ? R : 1, TAPS = S ? S : 4;  // whose pixels are loaded together
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
        if (to.block.n < 0) {
            wait();
            y[i0 + threadIdx.x] = zero<V>();
            continue;
        }
        const int h0 = to.p * g.SH - g.top, w0 = to.q * g.SW - g.left;
        Window its = window;
        its.begin(to);
        for (int r0 = 0; r0 < (R ? R : g.R); r0 += ROWS)
            for (int s0 = 0; s0 < (S ? S : g.S); s0 += TAPS) {
                int from[ROWS][TAPS];
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
#pragma unroll
                    for (int s = 0; s < TAPS; ++s)
                        from[r][s] = S || s0 + s < g.S
                                         ? windows.find(to, h0 + (r0 + r) * g.DH, w0 + (s0 + s) * g.DW) : OUTSIDE;
                wait();
                const V* const pixels = loaded_later(x);
                V values[ROWS][TAPS];
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
#pragma unroll
                    for (int s = 0; s < TAPS; ++s) {
                        values[r][s] = zero<V>();
                        if (from[r][s] >= 0) values[r][s] = pixels[static_cast<i64>(from[r][s]) * g.width + to.v];
                    }
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
#pragma unroll
                    for (int s = 0; s < TAPS; ++s)
                        if (from[r][s] != OUTSIDE) its.visit(values[r][s], (r0 + r) * (S ? S : g.S) + s0 + s);
            }
        y[i0 + threadIdx.x] = its.result(i0 + threadIdx.x);
    }
    wait();
    if (clear_rows) clear_rest<false>(y, all, M * g.ph * g.pw * g.width);
}
