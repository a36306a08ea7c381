// vector_types.h: CUDA's built-in vector types with their alignment, make_* functions, and dim3.
#pragma once

#define HOST_CUDA_VECTORS(T, name, align2, align4)                                             \
  struct alignas(align2) name##2 { T x, y; };                                                  \
  struct name##3 { T x, y, z; };                                                               \
  struct alignas(align4) name##4 { T x, y, z, w; };                                            \
  constexpr name##2 make_##name##2(T x, T y) { return {x, y}; }                                \
  constexpr name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                        \
  constexpr name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

HOST_CUDA_VECTORS(signed char, char, 2, 4)
HOST_CUDA_VECTORS(unsigned char, uchar, 2, 4)
HOST_CUDA_VECTORS(short, short, 4, 8)
HOST_CUDA_VECTORS(unsigned short, ushort, 4, 8)
HOST_CUDA_VECTORS(int, int, 8, 16)
HOST_CUDA_VECTORS(unsigned int, uint, 8, 16)
HOST_CUDA_VECTORS(float, float, 8, 16)
#undef HOST_CUDA_VECTORS

// Of the 8-byte types only the 2-vectors: CUDA 13 deprecates the 4-vectors' alignment of 16.
#define HOST_CUDA_VECTOR2(T, name)                \
  struct alignas(16) name##2 { T x, y; };         \
  constexpr name##2 make_##name##2(T x, T y) { return {x, y}; }

HOST_CUDA_VECTOR2(long long, longlong)
HOST_CUDA_VECTOR2(unsigned long long, ulonglong)
HOST_CUDA_VECTOR2(double, double)
#undef HOST_CUDA_VECTOR2

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
