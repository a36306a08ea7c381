// engines.cuh: the product of a tile (halo_tile.cuh) with a kernel's weights.
//   Weights    core matrices: for each unit of K and 8 output channels, 8 rows of 16 bytes.
//   MmaSync    the product by mma.sync, warp by warp, on any tensor core
//   WarpGroup  the same by wgmma, four warps together, on compute capability 9.0
//   Fma        the same in IEEE float, without tensor cores
// All three leave D as mma.sync does: of 16 pixels x 8 channels, lane l holds rows l / 4 and
// l / 4 + 8, columns l % 4 * 2 and the next.
#pragma once

#include "block_sparse/conv/halo_tile.cuh"
#include "core/wgmma.cuh"

// Do all steps of K: step(x, second, w) with where the first unit's pixels are, how far the second
// unit's are from them, and where the weights are; alone(x, w) for a last step of one unit. WK
// workers share the planes of each tap. UNROLLED taps have addresses that are constants; steps of many
// instructions gain nothing by it, and their loads, drawn together, would spill registers.
template <class H, int WK, int STEP_BYTES, bool UNROLLED, class Step, class Alone>
DEVICE void for_each_step(int wk, Step step, Alone alone) {
    static_assert(WK == 1 || (H::PLANES % 2 == 0 && H::PAIRS % WK == 0), "WK workers share pairs of planes");
    constexpr int MINE = H::PAIRS / WK;
    [[maybe_unused]] constexpr int TAPS_AT_ONCE = UNROLLED && H::TAPS * MINE <= 64 ? H::TAPS : 1;
#pragma unroll TAPS_AT_ONCE
    for (int t = 0; t < H::TAPS; ++t)
#pragma unroll
        for (int j = 0; j < MINE; ++j) {
            const int pair = wk * MINE + j;
            step(H::tap(t) + 2 * pair * H::PLANE, H::PLANE, (t * H::PAIRS + pair) * STEP_BYTES);
        }
    if constexpr (H::PLANES % 2) {
        constexpr int DONE = H::TAPS * H::PAIRS, LAST = (H::PLANES - 1) * H::PLANE;
#pragma unroll
        for (int i = 0; i < H::TAPS / 2; ++i)
            step(LAST + H::tap(2 * i), H::tap(2 * i + 1) - H::tap(2 * i), (DONE + i) * STEP_BYTES);
        if constexpr (H::LAST_ALONE) alone(LAST + H::tap(H::TAPS - 1), (H::STEPS - 1) * STEP_BYTES);
    }
}

template <typename T>
DEVICE void multiply_accumulate(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (Same<T, float>::value)
        mma_1688_tf32(d, a, b0, b1);
    else
        mma_16816<T>(d, a, b0, b1);
}

// b0 and b1 of NT groups of 8 channels, of a step of weights of NS channels; `w` is the first one's.
template <int NT, int NS>
DEVICE void load_weights(u32 (&b)[NT][2], const u8* w) {
    const int lane = threadIdx.x % 32;
    const u8* row = w + lane / 8 % 2 * (NS * 16) + lane % 8 * 16;
#pragma unroll
    for (int n = 0; n + 1 < NT; n += 2) {
        u32 two[4];
        ldmatrix_x4(two, row + (n + lane / 16) * 128);
        b[n][0] = two[0], b[n][1] = two[1], b[n + 1][0] = two[2], b[n + 1][1] = two[3];
    }
    if constexpr (NT % 2) ldmatrix_x2(b[NT - 1], row + (NT - 1) * 128);
}

// Each engine: TH * TW pixels x NS channels by WM x WN x WK warps (the last share K). A warp holds
// acc[MT][NT][4]: MT groups of 16 pixels x NT groups of 8 channels.
template <typename T, class H, int NS, int WM, int WN, int WK>
struct MmaSync {
    static constexpr int MT = H::TH * H::TW / 16 / WM, NT = NS / 8 / WN;
    static constexpr bool WANTS_FENCE = false;
    static_assert(MT * 16 * WM == H::TH * H::TW && NT * 8 * WN == NS, "warps share the tile evenly");

    static DEVICE int pixel(int wm, int m, int row) { return (wm * MT + m) * 16 + row; }

    static DEVICE void taps(float (&acc)[MT][NT][4], const u8* x, const u8* w, const u8*, int wm, int wn, int wk) {
        const int lane = threadIdx.x % 32;
        const u8* rows[MT];
#pragma unroll
        for (int m = 0; m < MT; ++m) rows[m] = x + H::window(pixel(wm, m, lane % 16));
        w += wn * NT * 128;
        for_each_step<H, WK, NS * 32, true>(
            wk,
            [&](int at, int second, int weights) {
                const int mine = at + (lane >= 16 ? second : 0);
                u32 b[NT][2];
                load_weights<NT, NS>(b, w + weights);
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    u32 a[4];
                    ldmatrix_x4(a, rows[m] + mine);
#pragma unroll
                    for (int n = 0; n < NT; ++n) multiply_accumulate<T>(acc[m][n], a, b[n][0], b[n][1]);
                }
            },
            [&](int at, int weights) {
                u32 b[NT][2];
                load_weights<NT, NS>(b, w + weights);
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    u32 left[2];
                    ldmatrix_x2(left, rows[m] + at);
                    const u32 a[4] = {left[0], left[1], 0, 0};
#pragma unroll
                    for (int n = 0; n < NT; ++n) multiply_accumulate<T>(acc[m][n], a, b[n][0], b[n][1]);
                }
            });
    }
};

template <typename T, class H, int NS, int WM, int WN, int WK>
struct Fma {
    static constexpr int MT = H::TH * H::TW / 16 / WM, NT = NS / 8 / WN;
    static constexpr bool WANTS_FENCE = false;
    static_assert(MT * 16 * WM == H::TH * H::TW && NT * 8 * WN == NS, "warps share the tile evenly");
    static_assert(Same<T, float>::value, "16-bit numbers have tensor cores");

    static DEVICE int pixel(int wm, int m, int row) { return (wm * MT + m) * 16 + row; }

    static DEVICE void taps(float (&acc)[MT][NT][4], const u8* x, const u8* w, const u8*, int wm, int wn, int wk) {
        const int lane = threadIdx.x % 32;
        const u8* rows[MT][2];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) rows[m][h] = x + H::window(pixel(wm, m, lane / 4 + 8 * h));
        w += wn * NT * 128 + lane % 4 * 32;
        const auto unit = [&](int at, int weights) {
            float4 a[MT][2];
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) a[m][h] = *reinterpret_cast<const float4*>(rows[m][h] + at);
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float4 b = *reinterpret_cast<const float4*>(w + weights + n * 128 + e * 16);
#pragma unroll
                    for (int m = 0; m < MT; ++m)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            float& sum = acc[m][n][2 * h + e];
                            sum = __fmaf_rn(a[m][h].x, b.x, sum);
                            sum = __fmaf_rn(a[m][h].y, b.y, sum);
                            sum = __fmaf_rn(a[m][h].z, b.z, sum);
                            sum = __fmaf_rn(a[m][h].w, b.w, sum);
                        }
                }
        };
        for_each_step<H, WK, NS * 32, false>(
            wk,
            [&](int at, int second, int weights) {
                unit(at, weights);
                unit(at + second, weights + NS * 16);
            },
            unit);
    }
};

// A group of four warps multiplies 8 x 8 pixels. `zeros` is a plane of zeros behind all x.
template <typename T, class H, int NS, int WM, int WN, int WK>
struct WarpGroup {
    static constexpr int MT = 1, NT = NS / 8 / WN;
    static constexpr bool WANTS_FENCE = true;
    static_assert(H::TH % 8 == 0 && H::TW % 8 == 0 && WM * 16 == H::TH * H::TW, "a warp has 16 pixels");
    static_assert(NT * 8 * WN == NS, "warps share the channels evenly");
    static_assert(H::PLANES % 2 == 0 || H::SW == 1, "the second unit of a step lies behind the first");

    static DEVICE int corner(int wm) {  // of the four warps' 8 x 8 pixels
        const int block = wm / 4;
        return block / (H::TW / 8) * 8 * H::TW + block % (H::TW / 8) * 8;
    }
    static DEVICE int pixel(int wm, int, int row) {
        const int p = wm % 4 * 16 + row;
        return corner(wm) + p / 8 * H::TW + p % 8;
    }

    static DEVICE void taps(float (&acc)[MT][NT][4], const u8* x, const u8* w, const u8* zeros, int wm, int wn, int wk) {
        constexpr int ROWS = H::SH * H::PITCH * 16;
        const u32 a = shared_address(x) + H::window(corner(wm)), b = shared_address(w) + wn * NT * 128;
        const u32 zero = shared_address(zeros);
        float* d = &acc[0][0][0];
        wgmma_fence();
        for_each_step<H, WK, NS * 32, true>(
            wk,
            [&](int at, int second, int weights) {
                Wgmma<T, NT * 8>::shared(d, matrix_descriptor(a + at, second, ROWS),
                                         matrix_descriptor(b + weights, NS * 16, 128));
            },
            [&](int at, int weights) {
                Wgmma<T, NT * 8>::shared(d, matrix_descriptor(a + at, zero - (a + at), ROWS),
                                         matrix_descriptor(b + weights, NS * 16, 128));
            });
        wgmma_commit();
        wgmma_wait();
    }
};

// WK workers have summed parts of K; those of the first get the whole.
template <int WORKERS, int WK, int MT, int NT>
DEVICE void sum_partials(float (&acc)[MT][NT][4], float4* partials, int worker, int wk) {
    const int lane = threadIdx.x % 32;
    const auto place = [&](int k, int m, int n) {
        return ((((k - 1) * WORKERS + worker) * MT + m) * NT + n) * 32 + lane;
    };
    if (wk > 0)
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
                partials[place(wk, m, n)] = make_float4(acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]);
    __syncthreads();
    if (wk == 0)
#pragma unroll
        for (int k = 1; k < WK; ++k)
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const float4 part = partials[place(k, m, n)];
                    acc[m][n][0] += part.x, acc[m][n][1] += part.y;
                    acc[m][n][2] += part.z, acc[m][n][3] += part.w;
                }
}
