// wgmma.cuh: Hopper's matrix instruction, issued by four warps together. Only for sm_90a.
//   D[64][N] += A[64][32 bytes] * B[32 bytes][N]   A from shared memory or registers, B from shared
// A and B lie in shared memory as core matrices: 8 rows of 16 bytes, 128 bytes in a row. A lane of
// warp w holds of D what mma.sync would give it for rows 16 w and up (tensor_core.cuh).
#pragma once
#include "core/tensor_core.cuh"

// Where core matrices begin, and how many bytes lie between two along K and between two along rows.
DEVICE u64 matrix_descriptor(u32 address, u32 along_k, u32 along_rows) {
    return static_cast<u64>((address & 0x3ffffu) >> 4) | static_cast<u64>(along_k >> 4) << 16 |
           static_cast<u64>(along_rows >> 4) << 32;
}

// The same for rows of 128 bytes in the 128-byte swizzle, 8 rows after each other and `along_rows` bytes from each 8 to
// the next. The swizzle is that of addresses: the first row may be any. A step along K of 32 bytes is 32 bytes in the
// address.
DEVICE u64 swizzled_descriptor(u32 address, u32 along_rows = 1024) {
    return static_cast<u64>((address & 0x3ffffu) >> 4) | 1ull << 16 | static_cast<u64>(along_rows >> 4) << 32 | 1ull << 62;
}

template <typename T, int N>
struct Wgmma;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(SBNET_HOST)

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Wait until at most the COUNT latest groups of products are under way.
template <int COUNT = 0>
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(COUNT) : "memory"); }

// D as operands: eight registers, from register number i of the array and of the instruction.
#define D8(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R8_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define R8_8 "%8, %9, %10, %11, %12, %13, %14, %15"
#define R8_16 "%16, %17, %18, %19, %20, %21, %22, %23"
#define R8_24 "%24, %25, %26, %27, %28, %29, %30, %31"
#define R8_32 "%32, %33, %34, %35, %36, %37, %38, %39"
#define R8_40 "%40, %41, %42, %43, %44, %45, %46, %47"
#define R8_48 "%48, %49, %50, %51, %52, %53, %54, %55"
#define R8_56 "%56, %57, %58, %59, %60, %61, %62, %63"

// One specialisation: type T, K elements in 32 bytes, N columns; D's registers, their operands, and
// the operand numbers after them. The tail ends the immediates: transposition, for 16 bits only.
#define WGMMA(T, K, TYPES, TAIL_SHARED, TAIL_REGISTERS, N, REGISTERS, OPERANDS, P0, P1, P2, P3, P4)   \
    template <>                                                                                       \
    struct Wgmma<T, N> {                                                                              \
        DEVICE static void shared(float* d, u64 a, u64 b) {                                           \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k" #K TYPES " {" REGISTERS "}, %" #P0 \
                         ", %" #P1 TAIL_SHARED                                                        \
                         : OPERANDS                                                                   \
                         : "l"(a), "l"(b));                                                           \
        }                                                                                             \
        DEVICE static void registers(float* d, const u32* a, u64 b) {                                 \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k" #K TYPES " {" REGISTERS "}, {%" #P0 \
                         ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 TAIL_REGISTERS                      \
                         : OPERANDS                                                                   \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                       \
        }                                                                                             \
    };
#define R16 R8_0 ", " R8_8
#define R24 R16 ", " R8_16
#define R32 R24 ", " R8_24
#define R40 R32 ", " R8_32
#define R48 R40 ", " R8_40
#define R64 R48 ", " R8_48 ", " R8_56
#define WGMMA_OF(T, K, TYPES, S, R)                                                               \
    WGMMA(T, K, TYPES, S, R, 8, "%0, %1, %2, %3", D4(d, 0), 4, 5, 6, 7, 8)                         \
    WGMMA(T, K, TYPES, S, R, 16, R8_0, D8(d, 0), 8, 9, 10, 11, 12)                                 \
    WGMMA(T, K, TYPES, S, R, 24, R8_0 ", %8, %9, %10, %11", D8(d, 0) COMMA D4(d, 8), 12, 13, 14, 15, 16) \
    WGMMA(T, K, TYPES, S, R, 32, R16, D8(d, 0) COMMA D8(d, 8), 16, 17, 18, 19, 20)                 \
    WGMMA(T, K, TYPES, S, R, 48, R24, D8(d, 0) COMMA D8(d, 8) COMMA D8(d, 16), 24, 25, 26, 27, 28) \
    WGMMA(T, K, TYPES, S, R, 64, R32, D8(d, 0) COMMA D8(d, 8) COMMA D8(d, 16) COMMA D8(d, 24), 32, 33, 34, 35, 36) \
    WGMMA(T, K, TYPES, S, R, 96, R48,                                                              \
          D8(d, 0) COMMA D8(d, 8) COMMA D8(d, 16) COMMA D8(d, 24) COMMA D8(d, 32) COMMA D8(d, 40), \
          48, 49, 50, 51, 52)                                                                      \
    WGMMA(T, K, TYPES, S, R, 128, R64,                                                             \
          D8(d, 0) COMMA D8(d, 8) COMMA D8(d, 16) COMMA D8(d, 24) COMMA D8(d, 32) COMMA D8(d, 40)  \
              COMMA D8(d, 48) COMMA D8(d, 56),                                                     \
          64, 65, 66, 67, 68)
#define COMMA ,
WGMMA_OF(Half, 16, ".f32.f16.f16", ", 1, 1, 1, 0, 0;", ", 1, 1, 1, 0;")
WGMMA_OF(BFloat16, 16, ".f32.bf16.bf16", ", 1, 1, 1, 0, 0;", ", 1, 1, 1, 0;")
WGMMA_OF(float, 8, ".f32.tf32.tf32", ", 1, 1, 1;", ", 1, 1, 1;")

#else  // kernels that use it are not launched; they only have to compile

DEVICE void wgmma_fence() {}
DEVICE void wgmma_commit() {}
template <int COUNT = 0>
DEVICE void wgmma_wait() {}
template <typename T, int N>
struct Wgmma {
    DEVICE static void shared(float*, u64, u64) {}
    DEVICE static void registers(float*, const u32*, u64) {}
};

#endif
