// wgmma.cuh: Hopper's matrix instruction, issued by four warps together. Only for sm_90a; emulated on the host.
//   D[64][N] += A[64][32 bytes] * B[32 bytes][N]   A from shared memory or registers, B from shared
// A and B lie in shared memory as core matrices: 8 rows of 16 bytes, 128 bytes in a row. A lane of
// warp w holds of D what mma.sync would give it for rows 16 w and up (tensor_core.cuh).
//   D[64][N] += A[16][64]^T * B[16][N]   of numbers of 2 bytes, those of the same k next to each other in memory
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
// The same of a sixteenth of an address that shared memory has: only the lower word is computed.
DEVICE u64 swizzled_descriptor_at(u32 sixteenth) {
    const u64 rest = swizzled_descriptor(0);
    return rest >> 32 << 32 | (static_cast<u32>(rest) + sixteenth);
}

// A or B transposed: a row of 128 bytes has 64 numbers along M or N of one k, in the 128-byte swizzle. The next 64 are
// `along_columns` bytes on, the next 8 k 1024 bytes.
DEVICE u64 transposed_descriptor(u32 address, u32 along_columns) {
    return static_cast<u64>((address & 0x3ffffu) >> 4) | static_cast<u64>(along_columns >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

template <typename T, int N>
struct Wgmma;
template <typename T, int N>
struct TransposedWgmma;

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
// The same with both transposed.
#define TRANSPOSED_WGMMA(T, TYPES, N, REGISTERS, OPERANDS, P0, P1)                                        \
    template <>                                                                                           \
    struct TransposedWgmma<T, N> {                                                                        \
        DEVICE static void shared(float* d, u64 a, u64 b) {                                               \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16" TYPES " {" REGISTERS "}, %" #P0     \
                         ", %" #P1 ", 1, 1, 1, 1, 1;"                                                     \
                         : OPERANDS                                                                       \
                         : "l"(a), "l"(b));                                                               \
        }                                                                                                 \
    };
#define TRANSPOSED_WGMMA_OF(T, TYPES)                                                                     \
    TRANSPOSED_WGMMA(T, TYPES, 64, R32, D8(d, 0) COMMA D8(d, 8) COMMA D8(d, 16) COMMA D8(d, 24), 32, 33)   \
    TRANSPOSED_WGMMA(T, TYPES, 128, R64,                                                                  \
                     D8(d, 0) COMMA D8(d, 8) COMMA D8(d, 16) COMMA D8(d, 24) COMMA D8(d, 32) COMMA D8(d, 40) \
                         COMMA D8(d, 48) COMMA D8(d, 56),                                                 \
                     64, 65)
TRANSPOSED_WGMMA_OF(Half, ".f32.f16.f16")
TRANSPOSED_WGMMA_OF(BFloat16, ".f32.bf16.bf16")
WGMMA_OF(Half, 16, ".f32.f16.f16", ", 1, 1, 1, 0, 0;", ", 1, 1, 1, 0;")
WGMMA_OF(BFloat16, 16, ".f32.bf16.bf16", ", 1, 1, 1, 0, 0;", ", 1, 1, 1, 0;")
WGMMA_OF(float, 8, ".f32.tf32.tf32", ", 1, 1, 1;", ", 1, 1, 1;")

#elif defined(SBNET_HOST)

// The same numbers, k after k in float. A product reads shared memory when the thread waits for it, as late as it may.
DEVICE void wgmma_fence() {}
DEVICE void wgmma_commit() { ++host_cuda::products->groups; }
template <int COUNT = 0>
DEVICE void wgmma_wait() {
    host_cuda::products->wait(COUNT);
    __syncwarp();  // a warp waits as one: what one lane then lets be overwritten, no other lane reads any more
}

// Numbers in shared memory, by their descriptor. A tile of a launch has less than the 256 KiB that it tells apart.
template <typename T>
struct HostOperand {
    u64 descriptor;
    bool transposed = false;
    float at(int row, int k) const {
        constexpr u32 WHERE = 0x3ffffu;
        const u32 along_k = (descriptor >> 16 & 0x3fffu) << 4, along_rows = (descriptor >> 32 & 0x3fffu) << 4;
        const u32 byte = static_cast<u32>(k * sizeof(T)), begin = static_cast<u32>(descriptor & 0x3fffu) << 4;
        u32 place = begin + static_cast<u32>(row / 8) * along_rows;
        const bool swizzled = descriptor >> 62 == 1;
        if (transposed) {
            if (!swizzled) host_cuda::fail("multiplies transposed operands without the 128-byte swizzle");
            place = begin + static_cast<u32>(row / 64) * along_k + static_cast<u32>(k / 8) * along_rows;
            place += static_cast<u32>(k % 8 * 128 + row % 64 * static_cast<int>(sizeof(T)));
        } else if (swizzled) {
            place += static_cast<u32>(row % 8) * 128 + byte;
        } else {
            place += byte / 16 * along_k + static_cast<u32>(row % 8) * 16 + byte % 16;
        }
        if (swizzled) place ^= (place >> 7 & 7) << 4;
        const u8* const memory = static_cast<const u8*>(host_cuda::dynamic_shared());
        const T value = *reinterpret_cast<const T*>(memory + ((place - shared_address(memory)) & WHERE));
        if constexpr (Same<T, float>::value)
            return TF32::number(bits_of(value), 0);
        else
            return to_compute<float>(value);
    }
};

template <typename T>
struct HostNumber : Packed<T> {};
template <>
struct HostNumber<float> : TF32 {};

template <typename T, int N>
struct Wgmma {
    using Number = HostNumber<T>;
    static constexpr int K = 32 / sizeof(T), PER_HALF = K / 2, PER_REGISTER = Number::PER_REGISTER;
    struct Warp {
        u32 rows[32][4];  // A of all lanes
    };

    // `a(row, k)` is a number of A, of the warp's sixteen rows.
    template <class A>
    static void begin(float* d, u64 b, A a, bool transposed = false) {
        const int lane = static_cast<int>(threadIdx.x % 32);
        host_cuda::products->begin([=] {
            const HostOperand<T> columns{b, transposed};
            for (int n = 0; n < N; n += 8)
                for (int e = 0; e < 4; ++e) {
                    float& sum = d[n / 2 + e];
                    const int row = lane / 4 + e / 2 * 8, column = n + lane % 4 * 2 + e % 2;
                    for (int k = 0; k < K; ++k) sum = __fmaf_rn(a(row, k), columns.at(column, k), sum);
                }
        });
    }
    static void same(u64 value, const char* operation, host_cuda::Site site) {
        const auto all = host_cuda::warp_exchange(host_cuda::full_warp, value, operation, site);
        for (int lane = 0; lane < 32; ++lane)
            if (all.from(lane) != value) host_cuda::fail("passes a descriptor to %s that is another one in lane %d", operation, lane);
    }
    static void shared(float* d, u64 a, u64 b, bool transposed = false, host_cuda::Site site = host_cuda::Site::here()) {
        same(a, "wgmma", site), same(b, "wgmma", site);
        const int first = static_cast<int>(threadIdx.x / 32 % 4 * 16);
        const HostOperand<T> rows{a, transposed};
        begin(d, b, [=](int row, int k) { return rows.at(first + row, k); }, transposed);
    }
    static void registers(float* d, const u32* a, u64 b, host_cuda::Site site = host_cuda::Site::here()) {
        same(b, "wgmma", site);
        Warp mine;
        for (int i = 0; i < 4; ++i) {
            const auto all = host_cuda::warp_exchange(host_cuda::full_warp, a[i], "wgmma", site);
            for (int lane = 0; lane < 32; ++lane) mine.rows[lane][i] = all.from(lane);
        }
        begin(d, b, [=](int row, int k) {
            const int lane = row % 8 * 4 + k % PER_HALF / PER_REGISTER;
            return Number::number(mine.rows[lane][k / PER_HALF * 2 + row / 8], k % PER_REGISTER);
        });
    }
};

template <typename T, int N>
struct TransposedWgmma {
    static void shared(float* d, u64 a, u64 b, host_cuda::Site site = host_cuda::Site::here()) {
        Wgmma<T, N>::shared(d, a, b, true, site);
    }
};

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
template <typename T, int N>
struct TransposedWgmma {
    DEVICE static void shared(float*, u64, u64) {}
};

#endif
