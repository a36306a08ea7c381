// common.cuh: the vocabulary of all kernels. No other headers are needed, so NVRTC compiles fast.
//   Numbers    i64, u32..., Half, BFloat16, Complex<T>; to_compute / from_compute; add
//   Vectors    Bytes<N>::type, an unsigned type of N bytes that moves as one access
//   Host       with SBNET_HOST defined the same sources build with g++ (tests/host_cuda)
#pragma once

using i64 = long long;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define DEVICE __device__ __forceinline__

#ifdef SBNET_HOST
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(host_cuda::dynamic_shared())
#else
#define DYNAMIC_SHARED(type, name)                       \
    extern __shared__ __align__(16) unsigned char name##_bytes[]; \
    type* name = reinterpret_cast<type*>(name##_bytes)
#endif

// ---------------------------------------------------------------------------- numbers

// Storage of the 16-bit floats; arithmetic happens in float.
struct Half {
    u16 bits;
};
struct BFloat16 {
    u16 bits;
};
template <typename T>
struct Complex {
    T re, im;
};

DEVICE u32 bits_of(float value) { return __float_as_uint(value); }

DEVICE float half_to_float(Half value) {
#ifdef SBNET_HOST
    const u32 sign = (value.bits & 0x8000u) << 16, exponent = (value.bits >> 10) & 31u,
              fraction = value.bits & 0x3ffu;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | (fraction << 13));
    if (exponent) return __uint_as_float(sign | ((exponent + 112) << 23) | (fraction << 13));
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;  // subnormal
    return sign ? -magnitude : magnitude;
#else
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
    return result;
#endif
}

DEVICE Half float_to_half(float value) {  // to nearest, ties to even
#ifdef SBNET_HOST
    const u32 all = bits_of(value), sign = (all >> 16) & 0x8000u, magnitude = all & 0x7fffffffu;
    u32 result;
    if (magnitude > 0x7f800000u) {
        result = 0x7e00u;  // NaN
    } else if (magnitude >= 0x477ff000u) {
        result = 0x7c00u;  // rounds to infinity
    } else if (magnitude < 0x38800000u) {  // subnormal: the float unit rounds it for us
        result = bits_of(__uint_as_float(magnitude) + 0.5f) - bits_of(0.5f);
    } else {
        result = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    }
    return Half{static_cast<u16>(sign | result)};
#else
    Half result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
#endif
}

DEVICE float bfloat16_to_float(BFloat16 value) {
    return __uint_as_float(static_cast<u32>(value.bits) << 16);
}

DEVICE BFloat16 float_to_bfloat16(float value) {  // to nearest, ties to even
#if !defined(SBNET_HOST) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    BFloat16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
#else
    const u32 all = bits_of(value);
    if ((all & 0x7fffffffu) > 0x7f800000u) return BFloat16{static_cast<u16>((all >> 16) | 0x40u)};
    return BFloat16{static_cast<u16>((all + 0x7fffu + ((all >> 16) & 1u)) >> 16)};
#endif
}

// The type a number is computed in, and the way there and back.
template <typename T>
struct ComputeOf {
    using type = float;
};
template <>
struct ComputeOf<double> {
    using type = double;
};

template <typename C>
DEVICE C to_compute(Half value) { return static_cast<C>(half_to_float(value)); }
template <typename C>
DEVICE C to_compute(BFloat16 value) { return static_cast<C>(bfloat16_to_float(value)); }
template <typename C, typename T>
DEVICE C to_compute(T value) { return static_cast<C>(value); }

template <typename T, typename C>
struct FromCompute {
    static DEVICE T convert(C value) { return static_cast<T>(value); }
};
template <typename C>
struct FromCompute<Half, C> {
    static DEVICE Half convert(C value) { return float_to_half(static_cast<float>(value)); }
};
template <typename C>
struct FromCompute<BFloat16, C> {
    static DEVICE BFloat16 convert(C value) { return float_to_bfloat16(static_cast<float>(value)); }
};
template <typename T, typename C>
DEVICE T from_compute(C value) { return FromCompute<T, C>::convert(value); }

// a + b as NumPy adds two elements of a dtype: integers wrap, bool is "or", 16-bit floats go
// through float and round once.
DEVICE bool add(bool a, bool b) { return a || b; }
DEVICE Half add(Half a, Half b) {
    return float_to_half(__fadd_rn(half_to_float(a), half_to_float(b)));
}
DEVICE BFloat16 add(BFloat16 a, BFloat16 b) {
    return float_to_bfloat16(__fadd_rn(bfloat16_to_float(a), bfloat16_to_float(b)));
}
DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
DEVICE double add(double a, double b) { return __dadd_rn(a, b); }
template <typename T>
DEVICE Complex<T> add(Complex<T> a, Complex<T> b) {
    return Complex<T>{add(a.re, b.re), add(a.im, b.im)};
}
template <typename T>
DEVICE T add(T a, T b) {  // integers; unsigned arithmetic, because signed overflow is undefined
    return static_cast<T>(static_cast<u64>(a) + static_cast<u64>(b));
}

// ---------------------------------------------------------------------------- vectors

template <int N>
struct Bytes;
template <>
struct Bytes<1> {
    using type = u8;
};
template <>
struct Bytes<2> {
    using type = u16;
};
template <>
struct Bytes<4> {
    using type = u32;
};
template <>
struct Bytes<8> {
    using type = uint2;
};
template <>
struct Bytes<16> {
    using type = uint4;
};

// The elements of type T inside a vector V.
template <typename T, typename V>
union Elements {
    static constexpr int COUNT = sizeof(V) / sizeof(T);
    static_assert(sizeof(V) % sizeof(T) == 0, "a vector holds whole elements");
    V vector;
    T element[COUNT];
    DEVICE Elements() {}
    DEVICE explicit Elements(V value) : vector(value) {}
};

template <typename V>
DEVICE V zero() {
    return V{};
}

template <typename A, typename B>
struct Same {
    static constexpr bool value = false;
};
template <typename A>
struct Same<A, A> {
    static constexpr bool value = true;
};

// ---------------------------------------------------------------------------- integers

template <typename T>
__host__ __device__ constexpr T ceil_div(T a, T b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int min_of(int a, int b) { return a < b ? a : b; }

// a / b for a >= 0 and 0 < b < 2^31. Numbers under 2^32 use the fast 32-bit division; others are
// divided bit by bit, in place: the compiler's 64-bit division is a function call, which spills.
DEVICE i64 divide(i64 a, i64 b) {
    const u32 high = static_cast<u32>(static_cast<u64>(a) >> 32), low = static_cast<u32>(a);
    const u32 divisor = static_cast<u32>(b);
    if (high == 0) return low / divisor;
    u64 quotient = high / divisor;
    u32 rest = high % divisor;
#pragma unroll 1
    for (int bit = 31; bit >= 0; --bit) {
        rest = rest * 2 + (low >> bit & 1u);
        quotient *= 2;
        if (rest >= divisor) {
            rest -= divisor;
            ++quotient;
        }
    }
    return static_cast<i64>(quotient);
}

// The same number, in a way that keeps what is derived from it out of loop-invariant registers:
// a few integer instructions again cost less than the thread blocks that registers crowd out.
DEVICE int recomputed(int value) {
#ifndef SBNET_HOST
    asm volatile("" : "+r"(value));
#endif
    return value;
}

// The same number, in a way that keeps the compiler from computing it again wherever it is used.
DEVICE i64 computed_once(i64 value) {
#ifndef SBNET_HOST
    asm volatile("" : "+l"(value));
#endif
    return value;
}

DEVICE i64 clamp(i64 value, i64 low, i64 high) {
    return value < low ? low : (value > high ? high : value);
}
