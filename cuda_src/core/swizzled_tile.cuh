// swizzled_tile.cuh: the product of two tiles in shared memory, D[BM][BN] += A[BM][k] * B[BN][k].
// A row of a tile is 128 bytes of k: 64 numbers of 2 bytes, or 32 floats. It is 8 units of 16 bytes, and unit u of
// row r lies at place u ^ (r % 8), so that units in a column lie in different banks. That is the 128-byte swizzle of
// wgmma; ldmatrix reads the same tiles.
//   TileMma    the product by mma.sync, warp by warp, on any tensor core; GroupedMma: by groups that share k
//   TileWgmma  the same by wgmma, four warps together, on compute capability 9.0
// A warp holds acc[MT][NT][4]: MT groups of 16 rows, NT groups of 8 columns, as mma.sync leaves them (tensor_core.cuh).
#pragma once

#include "core/wgmma.cuh"

constexpr int TILE_ROW = 128;  // bytes

// Where unit `unit` of row `row` lies in its tile, in bytes.
DEVICE int swizzled(int row, int unit) { return row * TILE_ROW + ((unit ^ (row & 7)) << 4); }

// Four floats in shared memory to tf32, in place.
DEVICE void round_four(u8* shared) {
    float4& four = *reinterpret_cast<float4*>(shared);
    four = make_float4(__uint_as_float(to_tf32(four.x)), __uint_as_float(to_tf32(four.y)),
                       __uint_as_float(to_tf32(four.z)), __uint_as_float(to_tf32(four.w)));
}

// Where a lane finds what it passes of 16 rows of B from row `column` on, for step 0; step s is at that ^ 32 s.
DEVICE int right_offset(int column) {
    const int lane = threadIdx.x % 32;
    return swizzled(column + lane / 16 * 8 + lane % 8, lane / 8 % 2);
}
// A warp's fragments of a step of 32 bytes of k, of 8 NT rows of B.
template <int NT>
DEVICE void load_right(u32 (&right)[NT][2], const u8* at) {
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
        u32 two[4];
        ldmatrix_x4(two, at + n * 8 * TILE_ROW);
        right[n][0] = two[0], right[n][1] = two[1], right[n + 1][0] = two[2], right[n + 1][1] = two[3];
    }
}
// The products of these fragments with those of 16 rows of A.
template <typename T, int NT>
DEVICE void multiply_step(float (&acc)[NT][4], const u32 (&left)[4], const u32 (&right)[NT][2]) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        if constexpr (Same<T, float>::value)
            mma_1688_tf32(acc[n], left, right[n][0], right[n][1]);
        else
            mma_16816<T>(acc[n], left, right[n][0], right[n][1]);
    }
}

// A step of K, 32 bytes, of a patch: how many rows further its rows begin, and which unit of 16 bytes of them is its first.
struct PatchStep {
    int shift, unit;
};

// WK groups of WM x WN warps: those of a group share the rows and the columns; each group has its part of k.
template <typename T, int BM, int BN, int WM_, int WN_, int WK>
struct GroupedMma {
    static constexpr int WM = WM_, WN = WN_, THREADS = WM * WN * WK * 32, MT = BM / WM / 16, NT = BN / WN / 8;
    static constexpr bool ASYNC = false;
    static_assert(MT * WM * 16 == BM && NT * WN * 8 == BN && NT % 4 == 0, "warps share the tile evenly");

    static DEVICE int row(int m) { return (threadIdx.x / 32 % WM * MT + m) * 16; }
    static DEVICE int column() {
        const int warp = threadIdx.x / 32 / WM;
        return (WK == 1 ? warp : warp % WN) * (NT * 8);
    }

    // Only the steps of 32 bytes of k whose bit is set in `steps`.
    static DEVICE void multiply(float (&acc)[MT][NT][4], const u8* a, const u8* b, u32 steps = 15) {
        const int lane = threadIdx.x % 32;
        int rows[MT];
#pragma unroll
        for (int m = 0; m < MT; ++m) rows[m] = row(m) + lane % 16;
        multiply_rows(acc, a, rows, b, steps);
    }
    // The row of a patch (patch_rows of stack_conv_patch.cu) that this lane passes of the 16 from `row` on of a cell.
    static DEVICE int patch_row(int cell, int row, int pitch) {
        const int lane = threadIdx.x % 32;
        return cell + (row + lane % 16) / 8 * pitch + lane % 8;
    }
    static DEVICE void multiply_patch(float (&acc)[MT][NT][4], const u8* a, const int (&cells)[MT], int shift, int,
                                      const u8* b) {
        int rows[MT];
#pragma unroll
        for (int m = 0; m < MT; ++m) rows[m] = cells[m] + shift;
        multiply_rows(acc, a, rows, b);
    }
    // The same of single steps of K, each with its own shift, from step `first` of B on.
    template <int STEPS>
    static DEVICE void multiply_steps(float (&acc)[MT][NT][4], const u8* a, const int (&cells)[MT],
                                      const PatchStep (&steps)[STEPS], int, const u8* b, int first) {
        const int lane = threadIdx.x % 32, b_at = right_offset(column());
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            u32 right[NT][2];
            load_right(right, b + (b_at ^ (first + step) * 32));
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                u32 left[4];
                ldmatrix_x4(left, a + swizzled(cells[m] + steps[step].shift, steps[step].unit + lane / 16));
                multiply_step<T>(acc[m], left, right);
            }
        }
    }

private:
    // rows[m]: the row of A that this lane passes of 16.
    static DEVICE void multiply_rows(float (&acc)[MT][NT][4], const u8* a, const int (&rows)[MT], const u8* b,
                                     u32 steps = 15) {
        const int lane = threadIdx.x % 32, b_at = right_offset(column());
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            if (!(steps >> step & 1)) continue;
            u32 right[NT][2];
            load_right(right, b + (b_at ^ step * 32));
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                u32 left[4];
                ldmatrix_x4(left, a + swizzled(rows[m], 2 * step + lane / 16));
                multiply_step<T>(acc[m], left, right);
            }
        }
    }
};
template <typename T, int BM, int BN, int WM, int WN>
struct TileMma : GroupedMma<T, BM, BN, WM, WN, 1> {};

// WM x WN groups of four warps share the rows, 64 at a time, and the columns.
template <typename T, int BM, int BN, int WM_, int WN_>
struct TileWgmma {
    static constexpr int WM = WM_, WN = WN_, THREADS = WM * WN * 128, MT = BM / WM / 64, NT = BN / WN / 8;
    static constexpr bool ASYNC = true;
    static_assert(MT * WM * 64 == BM && NT * WN * 8 == BN && NT % 4 == 0, "warps share the tile evenly");

    static DEVICE int group() { return threadIdx.x / 128; }
    static DEVICE int group_in_warp() { return WM * WN == 1 ? 0 : __shfl_sync(0xffffffffu, group(), 0); }
    static DEVICE int row(int m) { return (group() % WM * MT + m) * 64 + threadIdx.x / 32 % 4 * 16; }
    static DEVICE int column() { return group() / WM * (NT * 8); }

    // Where this group's parts of A and B lie, as multiply_at takes it: addresses in 16 bytes, the same in all lanes.
    static DEVICE u32 left(u32 a) { return (a + group_in_warp() % WM * (MT * 64 * TILE_ROW)) >> 4; }
    static DEVICE u32 right(u32 b) { return (b + group_in_warp() / WM * (NT * 8 * TILE_ROW)) >> 4; }
    // Only the first COUNT times 64 rows of those that the group has.
    template <int COUNT = MT>
    static DEVICE void multiply_at(float (&acc)[MT][NT][4], u32 left, u32 right) {
        const u64 rest = swizzled_descriptor(0);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
            for (int m = 0; m < COUNT; ++m)
                Wgmma<T, NT * 8>::shared(&acc[m][0][0], rest + left + m * (64 * TILE_ROW / 16) + step * 2,
                                         rest + right + step * 2);
        wgmma_commit();
    }

    // Begins the product; wgmma_wait ends it.
    template <int COUNT = MT>
    static DEVICE void multiply(float (&acc)[MT][NT][4], const u8* a, const u8* b) {
        const u32 left = __shfl_sync(0xffffffffu, shared_address(a) + group() % WM * (MT * 64 * TILE_ROW), 0);
        const u32 right = __shfl_sync(0xffffffffu, shared_address(b) + group() / WM * (NT * 8 * TILE_ROW), 0);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
            for (int m = 0; m < COUNT; ++m)
                Wgmma<T, NT * 8>::shared(&acc[m][0][0],
                                         swizzled_descriptor(left + m * (64 * TILE_ROW) + step * 32),
                                         swizzled_descriptor(right + step * 32));
        wgmma_commit();
    }
    // The same of floats, which become TF32 on the way to registers. The last product before ends meanwhile. `rows` are those of
    // two steps, one of which is loaded while the other is multiplied: the last one still is at the end.
    template <int COUNT = MT>
    static DEVICE void multiply_rounded(float (&acc)[MT][NT][4], u32 (&rows)[2][MT][4], const u8* a, const u8* b) {
        const u64 columns = swizzled_descriptor(__shfl_sync(0xffffffffu, shared_address(b) + group() / WM * (NT * 8 * TILE_ROW), 0));
        const int lane = threadIdx.x % 32, place = swizzled(row(0) + lane % 16, lane / 16);
        const auto load = [&](int step) {
#pragma unroll
            for (int m = 0; m < COUNT; ++m) {
                u32(&four)[4] = rows[step % 2][m];
                ldmatrix_x4(four, a + m * (64 * TILE_ROW) + (place ^ step * 32));
#pragma unroll
                for (u32& number : four) number = tf32_factor(__uint_as_float(number));
            }
        };
        load(0);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            wgmma_fence();
#pragma unroll
            for (int m = 0; m < COUNT; ++m)
                Wgmma<T, NT * 8>::registers(&acc[m][0][0], rows[step % 2][m], columns + step * 2);
            wgmma_commit();
            wgmma_wait<1>();
            if (step < 3) load(step + 1);
        }
    }
    // The same of a patch: cell m begins at row cells[m] + shift, and its rows of 8 pixels lie `pitch` rows apart.
    static DEVICE int patch_row(int cell, int, int) { return cell; }
    static DEVICE void multiply_patch(float (&acc)[MT][NT][4], const u8* a, const int (&cells)[MT], int shift, int pitch,
                                      const u8* b) {
        const u32 right = __shfl_sync(0xffffffffu, shared_address(b) + group() / WM * (NT * 8 * TILE_ROW), 0);
        u32 left[MT];
#pragma unroll
        for (int m = 0; m < MT; ++m)
            left[m] = __shfl_sync(0xffffffffu, shared_address(a) + (cells[m] + shift) * TILE_ROW, 0);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
            for (int m = 0; m < MT; ++m)
                Wgmma<T, NT * 8>::shared(&acc[m][0][0], swizzled_descriptor(left[m] + step * 32, pitch * TILE_ROW),
                                         swizzled_descriptor(right + step * 32));
        wgmma_commit();
    }
    // The same of single steps of K, each with its own shift, from step `first` of B on.
    template <int STEPS>
    static DEVICE void multiply_steps(float (&acc)[MT][NT][4], const u8* a, const int (&cells)[MT],
                                      const PatchStep (&steps)[STEPS], int pitch, const u8* b, int first) {
        const u32 right = shared_address(b) + group() / WM * (NT * 8 * TILE_ROW) + first * 32;
        u32 left[MT], at[STEPS];
#pragma unroll
        for (int m = 0; m < MT; ++m) left[m] = __shfl_sync(0xffffffffu, shared_address(a) + cells[m] * TILE_ROW, 0);
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
            at[step] = __shfl_sync(0xffffffffu, steps[step].shift * TILE_ROW + steps[step].unit * 16, 0);
        const u32 columns = __shfl_sync(0xffffffffu, right, 0);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int m = 0; m < MT; ++m)
                Wgmma<T, NT * 8>::shared(&acc[m][0][0], swizzled_descriptor(left[m] + at[step], pitch * TILE_ROW),
                                         swizzled_descriptor(columns + step * 32));
        wgmma_commit();
    }
};
