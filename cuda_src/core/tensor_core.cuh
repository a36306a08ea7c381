// tensor_core.cuh: the vocabulary of kernels that multiply on tensor cores.
//   Fragments  ldmatrix_*: 8x8 matrices of 16-bit numbers from shared memory into a warp's registers
//   Products   mma_16816 (Half, BFloat16), mma_1688_tf32: d += a * b, summed in float
//   Copies     as in async_copy.cuh
// Source: ldmatrix and mma of NVIDIA's PTX ISA. They are of the whole warp: all 32 lanes call. What
// an architecture lacks is emulated, and so is everything on the host.
#pragma once

#include "core/async_copy.cuh"

// ---------------------------------------------------------------------------- ldmatrix

// COUNT matrices of 8 x 8 numbers of 16 bits. Lane l passes the address of row l % 8 of matrix
// l / 8: 16 bytes, aligned to 16; lanes past the last matrix pass any such address. Then in r[m], of
// matrix m, low half first:
//   plain       lane l holds row l / 4, columns l % 4 * 2 and the next
//   transposed  lane l holds column l / 4, rows l % 4 * 2 and the next
#ifdef SBNET_HOST
template <bool TRANSPOSED, int COUNT>
void ldmatrix(u32 (&r)[COUNT], const void* row, const char* operation, host_cuda::Site site) {
    struct Lane {
        const void* row;
        u32* r;
    } mine{row, r};
    host_cuda::warp_meet(mine, operation, site, [](Lane* const* lanes) {
        for (int l = 0; l < 32; ++l) host_cuda::check_aligned(lanes[l]->row, 16, "ldmatrix: a row");
        for (int m = 0; m < COUNT; ++m)
            for (int l = 0; l < 32; ++l) {
                u32 pair = 0;
                for (int e = 0; e < 2; ++e) {
                    const int along = l % 4 * 2 + e, across = l / 4;
                    const int i = TRANSPOSED ? along : across, j = TRANSPOSED ? across : along;
                    pair |= u32(static_cast<const u16*>(lanes[8 * m + i]->row)[j]) << (16 * e);
                }
                lanes[l]->r[m] = pair;
            }
    });
}
DEVICE void ldmatrix_x4(u32 (&r)[4], const void* row, host_cuda::Site site = host_cuda::Site::here()) {
    ldmatrix<false>(r, row, "ldmatrix_x4", site);
}
DEVICE void ldmatrix_x2(u32 (&r)[2], const void* row, host_cuda::Site site = host_cuda::Site::here()) {
    ldmatrix<false>(r, row, "ldmatrix_x2", site);
}
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const void* row, host_cuda::Site site = host_cuda::Site::here()) {
    ldmatrix<true>(r, row, "ldmatrix_x4_trans", site);
}
DEVICE void ldmatrix_x2_trans(u32 (&r)[2], const void* row, host_cuda::Site site = host_cuda::Site::here()) {
    ldmatrix<true>(r, row, "ldmatrix_x2_trans", site);
}
#else
DEVICE void ldmatrix_x4(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)));
}
DEVICE void ldmatrix_x2(u32 (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(row)));
}
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)));
}
DEVICE void ldmatrix_x2_trans(u32 (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(row)));
}
#endif

// ---------------------------------------------------------------------------- products

// d[16, 8] += a[16, K] * b[K, 8], K = 16 for 16-bit numbers and 8 for tf32. Of lane l, with
// g = l / 4 and t = l % 4; a register holds two 16-bit numbers, of neighbouring k, low half first.
//
//   16-bit   a        k = 2t, 2t+1   2t+8, 2t+9        b        n = g            d        n = 2t  2t+1
//            row g      a[0]         a[2]              k 2t ..    b0             row g      d[0]  d[1]
//            row g+8    a[1]         a[3]              k 2t+8 ..  b1             row g+8    d[2]  d[3]
//
//   tf32     a        k = t          t+4               b        n = g            d as above
//            row g      a[0]         a[2]              k t        b0
//            row g+8    a[1]         a[3]              k t+4      b1
//
// ldmatrix_x4 of a's 8 x 8 quarters (top left, bottom left, top right, bottom right) gives a[0..3];
// ldmatrix_x2 of b stored [n, k], or ldmatrix_x2_trans of b stored [k, n], gives b0, b1.

// The 19-bit float of the tensor cores, in the high bits of a float.
struct TF32 {
    static constexpr int PER_REGISTER = 1;
    static DEVICE float number(u32 bits, int) { return __uint_as_float(bits & 0xffffe000u); }
};
template <typename T>
struct Packed {
    static constexpr int PER_REGISTER = 2;
    static DEVICE float number(u32 bits, int i) {
        return to_compute<float>(T{static_cast<u16>(bits >> (16 * i))});
    }
};

// A lane's part of the product, k after k in float. `fetch(i, lane)` is a register of another lane:
// a[i] for i < 4, then b0 and b1. N is Packed<Half>, Packed<BFloat16> or TF32.
template <typename N, class Fetch>
DEVICE void multiply_add(float (&d)[4], int lane, Fetch fetch) {
    const int first_of_rows = lane / 4 * 4, first_of_columns = lane % 4 * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const u32 a0 = fetch(2 * half, first_of_rows + t), a1 = fetch(2 * half + 1, first_of_rows + t);
            const u32 b0 = fetch(4 + half, first_of_columns + t), b1 = fetch(4 + half, first_of_columns + 4 + t);
#pragma unroll
            for (int e = 0; e < N::PER_REGISTER; ++e) {
                const float top = N::number(a0, e), bottom = N::number(a1, e);
                const float left = N::number(b0, e), right = N::number(b1, e);
                d[0] = __fmaf_rn(top, left, d[0]);
                d[1] = __fmaf_rn(top, right, d[1]);
                d[2] = __fmaf_rn(bottom, left, d[2]);
                d[3] = __fmaf_rn(bottom, right, d[3]);
            }
        }
}

// For hardware without the instruction: the lanes fetch by shuffle.
template <typename N>
DEVICE void mma_by_shuffles(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    multiply_add<N>(d, threadIdx.x % 32, [&](int i, int lane) {
        return __shfl_sync(0xffffffffu, i < 4 ? a[i] : i == 4 ? b0 : b1, lane);
    });
}

#ifdef SBNET_HOST
// The same numbers: the last lane to come computes for all.
template <typename N>
void mma_at_once(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const char* operation, host_cuda::Site site) {
    struct Lane {
        float (&d)[4];
        u32 registers[6];
    } mine{d, {a[0], a[1], a[2], a[3], b0, b1}};
    host_cuda::warp_meet(mine, operation, site, [](Lane* const* lanes) {
        for (int l = 0; l < 32; ++l)
            multiply_add<N>(lanes[l]->d, l, [&](int i, int lane) { return lanes[lane]->registers[i]; });
    });
}
#endif

#ifdef SBNET_HOST
template <class T>
DEVICE void mma_16816(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                      host_cuda::Site site = host_cuda::Site::here()) {
    mma_at_once<Packed<T>>(d, a, b0, b1, "mma_16816", site);
}
DEVICE void mma_1688_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                          host_cuda::Site site = host_cuda::Site::here()) {
    mma_at_once<TF32>(d, a, b0, b1, "mma_1688_tf32", site);
}
#else
template <class T>
DEVICE void mma_16816(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    static_assert(Same<T, Half>::value || Same<T, BFloat16>::value, "a 16-bit float");
#if DEVICE_ARCHITECTURE >= 800
    if constexpr (Same<T, Half>::value)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    if constexpr (Same<T, Half>::value) {
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(b0));
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[2]), "r"(a[3]), "r"(b1));
    } else {
        mma_by_shuffles<Packed<T>>(d, a, b0, b1);
    }
#endif
}

// The registers come from to_tf32 or tf32_factor.
DEVICE void mma_1688_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if DEVICE_ARCHITECTURE >= 800
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    mma_by_shuffles<TF32>(d, a, b0, b1);
#endif
}
#endif

// A float rounded to tf32: to nearest, ties away from zero; NaN stays NaN. The low 13 bits of the
// result mean nothing: mma does not look at them.
DEVICE u32 to_tf32(float value) {
#if DEVICE_ARCHITECTURE >= 800
    u32 result;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(value));
    return value == value ? result : 0x7fc00000u;  // the instruction makes infinity of some NaN
#else
    const u32 bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits | 0x400000u) & 0xffffe000u;
    return (bits + 0x1000u) & 0xffffe000u;
#endif
}
// The same for a tensor core alone, by three instructions in place of six: what is infinity without the low bits looks like NaN.
DEVICE u32 tf32_factor(float value) { return value == value ? bits_of(value) + 0x1000u : 0x7fc00000u; }

// A warp's sums before the first product.
template <int MT, int NT>
DEVICE void clear(float (&acc)[MT][NT][4]) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n) acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0.0f;
}
