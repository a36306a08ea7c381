// block_table.cuh: where the pixels of an image lie in a stack of blocks.
// A stack is [M, BH, BW, C]: row m holds the block (n, hi, wi) = indices[m] of an image of H x W pixels, cut into blocks
// of BH x BW. grid[n, hi, wi] is the row of a block, or -1. An image whose sides are no multiple of the block's has
// blocks that stick out; what lies in memory for their outer pixels is never used.
#pragma once

#include "core/common.cuh"

struct BlockTable {
    const int* __restrict__ indices;  // [M, 3]: n, hi, wi
    const int* __restrict__ grid;     // [N, GH, GW]
    int N, GH, GW;
    int rows;  // of the stack that are in use: no more than the count, nor than M

    // The block in a row of the stack; n < 0 where there is none.
    struct Block {
        int n, hi, wi;
    };
    // (Both load something whatever is asked, so that several searches are under way together.)
    DEVICE Block block(int row) const { return checked(row, listed(indices, row < rows ? row : 0)); }
    // The same in two steps: what a row of the list holds, whatever that is; and the block, once it is known which rows are in use.
    static DEVICE Block listed(const int* __restrict__ indices, int row) {
        const int* const at = indices + static_cast<i64>(row) * 3;
        return Block{at[0], at[1], at[2]};
    }
    DEVICE Block checked(int row, Block b) const {
        const bool inside = row < rows && static_cast<u32>(b.n) < static_cast<u32>(N) &&
                            static_cast<u32>(b.hi) < static_cast<u32>(GH) && static_cast<u32>(b.wi) < static_cast<u32>(GW);
        return inside ? b : Block{-1, 0, 0};
    }
    // The row of the stack of a block of the image; -1 where it is not active.
    DEVICE int row(int n, int hi, int wi) const {
        const bool inside = static_cast<u32>(n) < static_cast<u32>(N) && static_cast<u32>(hi) < static_cast<u32>(GH) &&
                            static_cast<u32>(wi) < static_cast<u32>(GW);
        const int found = grid[inside ? (static_cast<i64>(n) * GH + hi) * GW + wi : 0];
        return inside && static_cast<u32>(found) < static_cast<u32>(rows) ? found : -1;
    }
};

// Division by a number that is known when the kernel begins, exact where n * d < 2^32.
struct Divisor {
    u32 d, reciprocal;
    DEVICE explicit Divisor(int d) : d(d), reciprocal(d > 1 ? 0xffffffffu / static_cast<u32>(d) + 1 : 0) {}
    DEVICE int of(int n) const {
        return d == 1 ? n : static_cast<int>(static_cast<u64>(static_cast<u32>(n)) * reciprocal >> 32);
    }
};

// Write zeros to elements `from` up to `to` of y, of which VECTOR says that they are whole vectors of 16 bytes: the rows past
// the count. All threads of the grid share the work.
template <bool VECTOR, typename T>
DEVICE void clear_rest(T* __restrict__ y, i64 from, i64 to) {
    constexpr int LANES = VECTOR ? 16 / sizeof(T) : 1;
    const i64 block = static_cast<i64>(blockIdx.y) * gridDim.x + blockIdx.x;
    const i64 step = static_cast<i64>(gridDim.x) * gridDim.y * blockDim.x * LANES;
#pragma unroll 1  // (or the compiler divides by the step: a call)
    for (i64 i = from + (block * blockDim.x + threadIdx.x) * LANES; i < to; i += step) {
        if constexpr (VECTOR)
            *reinterpret_cast<uint4*>(y + i) = zero<uint4>();
        else
            y[i] = zero<T>();
    }
}
