// cuda_on_host.h: lets g++ compile a kernel file of cuda_src and run its kernels on the CPU.
//
//   runtime.h                         barriers, exchanges in a warp, errors: the base of the rest
//   runtime.cpp, threads.h, fiber.h   the scheduler behind it
//   vector_types.h                    uint4, float2, ... and dim3
//   pending_copies.h, async_copy.h    cp.async and bulk copies, which land when waited for
//   cluster.h                         shared memory of the other blocks of a cluster
//   pending_products.h                products of wgmma, which end when waited for
//   intrinsics.h                      barriers, shuffles, votes, atomics
//   arithmetic.h                      bits, min and max, rounding, bit casts, cached loads
//   this file                         CUDA's keywords and variables, and the launch of a kernel
//
// It finds wrong results, reads and writes out of bounds, undefined arithmetic (both under the
// sanitizers), divergent barriers, warp operations that a lane misses, and shared memory used
// before it was set or before the copy into it was waited for. What it cannot do:
//   - Races, because threads take turns. Running them in reverse order, as launcher.py can, shows some.
//   - Loops that poll memory which another thread of the block, or a later block, writes: they hang,
//     unless they call __nanosleep, which lets the others run and is counted.
//   - Bounds inside one NumPy buffer: an argument that is a slice has no guard bytes of its own.
//   - __shared__ in a __device__ function works, but holds what the last block left there.
//   - Clusters of kernels that have __shared__ variables: of these there is one copy. launcher.py
//     refuses them, but runs the blocks of such a kernel one after another, as those of any other.
//   - __activemask, textures.
#pragma once

#include <math.h>  // libstdc++'s: with overloads of isnan, abs, ... for every type, as CUDA has
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <utility>

#include "runtime.h"
#include "vector_types.h"
// After the standard headers, which use some of these names too.
#include "arithmetic.h"
#include "intrinsics.h"
#include "async_copy.h"
#include "cluster.h"

#define __host__
#define __device__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
// `static` gives a kernel template internal linkage. Without it AddressSanitizer would put no
// guard bytes around its shared variables.
#define __global__ static __attribute__((unused))
// Blocks run one after another, so one copy is enough; in a cluster it would not be.
#define __shared__ static

#define threadIdx (static_cast<const uint3&>(host_cuda::thread_index))
#define blockIdx (static_cast<const uint3&>(host_cuda::block_index))
#define blockDim (static_cast<const dim3&>(host_cuda::block_dim))
#define gridDim (static_cast<const dim3&>(host_cuda::grid_dim))
constexpr int warpSize = host_cuda::warp_size;

namespace host_cuda {

// One letter for each kernel parameter, which launcher.py checks the arguments against:
// r pointer to const, w pointer to what the kernel may write, i long long, d double, m tensor map.
template <class P>
constexpr char parameter_letter() {
  if constexpr (std::is_pointer_v<P>) {
    return std::is_const_v<std::remove_pointer_t<P>> ? 'r' : 'w';
  } else if constexpr (std::is_same_v<P, TensorMap>) {
    return 'm';
  } else {
    static_assert(std::is_same_v<P, long long> || std::is_same_v<P, double>,
                  "kernel parameters are pointers, long long, double or tensor maps");
    return std::is_same_v<P, double> ? 'd' : 'i';
  }
}

template <class... P>
const char* signature(void (*)(P...)) {
  static const char letters[] = {parameter_letter<P>()..., '\0'};
  return letters;
}

template <class... P, size_t... I>
void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<P*>(arguments[I])...);
}

template <class... P>
const char* run(void (*kernel)(P...), void** arguments, const Launch& launch) {
  auto body = [&] { call(kernel, arguments, std::index_sequence_for<P...>()); };
  return run_grid(launch, [](void* context) { (*static_cast<decltype(body)*>(context))(); }, &body);
}

}  // namespace host_cuda

// What launcher.py calls. The kernel comes last: its template arguments hold commas.
#define HOST_CUDA_ENTRY(number, ...)                                                          \
  extern "C" __attribute__((visibility("default"))) const char* run_##number(                 \
      void** arguments, const host_cuda::Launch* launch) {                                    \
    return host_cuda::run(&__VA_ARGS__, arguments, *launch);                                  \
  }                                                                                           \
  extern "C" __attribute__((visibility("default"))) const char* signature_##number() {        \
    return host_cuda::signature(&__VA_ARGS__);                                                \
  }                                                                                           \
  extern "C" __attribute__((visibility("default"))) void* address_##number() {                \
    return reinterpret_cast<void*>(&__VA_ARGS__);                                             \
  }
