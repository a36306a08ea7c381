// arithmetic.h: CUDA's bit, integer and floating-point functions, and cached loads and stores.
//
// The C library brings expf, erff, tanhf, fmaxf, fmaf, isnan and so on.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

// ---- bits ----

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (x >> i & 1) << (31 - i);
  return reversed;
}
inline unsigned long long __brevll(unsigned long long x) {
  return (unsigned long long)__brev(unsigned(x)) << 32 | __brev(unsigned(x >> 32));
}
// high:low as one number, shifted; the low or the high half of it.
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) >> (shift % 32));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return unsigned(((uint64_t(high) << 32 | low) << (shift % 32)) >> 32);
}
// Byte i of the result is byte (selector nibble i, its low three bits) of y:x.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  uint64_t bytes = uint64_t(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned byte = selector >> (4 * i) & 7;
    result |= unsigned(bytes >> (8 * byte) & 0xff) << (8 * i);
  }
  return result;
}

// ---- integers ----

inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}

// For two integers, or two floating-point numbers (of which a NaN loses).
template <class A, class B>
auto min(A a, B b) {
  static_assert(std::is_integral_v<A> == std::is_integral_v<B>, "min of an integer and a float");
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_integral_v<T>)
    return T(a) < T(b) ? T(a) : T(b);
  else
    return T(fmin(T(a), T(b)));
}
template <class A, class B>
auto max(A a, B b) {
  static_assert(std::is_integral_v<A> == std::is_integral_v<B>, "max of an integer and a float");
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_integral_v<T>)
    return T(a) < T(b) ? T(b) : T(a);
  else
    return T(fmax(T(a), T(b)));
}

// ---- floating point. The file is compiled with -ffp-contract=off: nothing fuses by itself ----

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __frcp_rn(float a) { return 1 / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float a) { return a > 0 ? fminf(a, 1) : 0; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float rsqrtf(float a) { return 1 / sqrtf(a); }
inline double rsqrt(double a) { return 1 / sqrt(a); }
#define __expf(a) expf(a)  // glibc declares functions of these names
#define __logf(a) logf(a)

// ---- the bits of a number as another type ----

namespace host_cuda {

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace host_cuda

inline int __float_as_int(float a) { return host_cuda::bits_as<int>(a); }
inline unsigned __float_as_uint(float a) { return host_cuda::bits_as<unsigned>(a); }
inline float __int_as_float(int a) { return host_cuda::bits_as<float>(a); }
inline float __uint_as_float(unsigned a) { return host_cuda::bits_as<float>(a); }
inline long long __double_as_longlong(double a) { return host_cuda::bits_as<long long>(a); }
inline double __longlong_as_double(long long a) { return host_cuda::bits_as<double>(a); }

// ---- loads and stores with a cache hint: here just loads and stores ----

template <class T> T __ldg(const T* address) { return *address; }
template <class T> T __ldca(const T* address) { return *address; }
template <class T> T __ldcg(const T* address) { return *address; }
template <class T> T __ldcs(const T* address) { return *address; }
template <class T> void __stcg(T* address, T value) { *address = value; }
template <class T> void __stcs(T* address, T value) { *address = value; }
