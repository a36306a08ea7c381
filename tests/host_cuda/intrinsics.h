// intrinsics.h: the CUDA functions that kernels call, for the host.
//
// It has only the functions that the kernels use or may soon use. Each behaves as CUDA documents it;
// what CUDA leaves undefined (a shuffle from a lane outside its mask, a width that is not a power of
// two) is an error.
#pragma once


#include <type_traits>

#include "runtime.h"

// ---- barriers and fences ----

inline void __syncthreads(host_cuda::Site site = host_cuda::Site::here()) {
  host_cuda::block_barrier(false, "__syncthreads", site);
}
inline int __syncthreads_count(int predicate, host_cuda::Site site = host_cuda::Site::here()) {
  return int(host_cuda::block_barrier(predicate != 0, "__syncthreads_count", site));
}
inline int __syncthreads_or(int predicate, host_cuda::Site site = host_cuda::Site::here()) {
  return host_cuda::block_barrier(predicate != 0, "__syncthreads_or", site) > 0;
}
inline int __syncthreads_and(int predicate, host_cuda::Site site = host_cuda::Site::here()) {
  return host_cuda::block_barrier(predicate == 0, "__syncthreads_and", site) == 0;
}
inline void __syncwarp(unsigned mask = host_cuda::full_warp,
                       host_cuda::Site site = host_cuda::Site::here()) {
  host_cuda::warp_collective(mask, "__syncwarp", site, nullptr, nullptr);
}
inline void __threadfence_block() {}  // one CPU thread: memory is always in order
inline void __threadfence() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { host_cuda::pause_thread(); }
[[noreturn]] inline void __trap() { host_cuda::fail("calls __trap"); }

// ---- shuffles and votes ----

namespace host_cuda {

// `pick(lane, first, last)` names the source lane; outside first..last a lane keeps its own value.
template <class T, class Pick>
T shuffle(unsigned mask, T value, int width, const char* operation, Site site, Pick pick) {
  static_assert(std::is_arithmetic<T>::value && (sizeof(T) == 4 || sizeof(T) == 8),
                "shuffles move numbers of 4 or 8 bytes");
  if (width < 1 || width > 32 || (width & (width - 1)))
    fail("calls %s with width %d, which is no power of two up to 32", operation, width);
  unsigned first = lane() & ~(unsigned(width) - 1);
  unsigned source = pick(lane(), first, first + unsigned(width) - 1);
  return warp_exchange(mask, value, operation, site).from(source);
}

}  // namespace host_cuda

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              host_cuda::Site site = host_cuda::Site::here()) {
  return host_cuda::shuffle(mask, value, width, "__shfl_sync", site,
                            [=](unsigned, unsigned first, unsigned last) {
                              return first + (unsigned(source) & (last - first));
                            });
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 host_cuda::Site site = host_cuda::Site::here()) {
  return host_cuda::shuffle(mask, value, width, "__shfl_up_sync", site,
                            [=](unsigned lane, unsigned first, unsigned) {
                              return lane - first >= delta % 32 ? lane - delta % 32 : lane;
                            });
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   host_cuda::Site site = host_cuda::Site::here()) {
  return host_cuda::shuffle(mask, value, width, "__shfl_down_sync", site,
                            [=](unsigned lane, unsigned, unsigned last) {
                              return lane + delta % 32 <= last ? lane + delta % 32 : lane;
                            });
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                  host_cuda::Site site = host_cuda::Site::here()) {
  return host_cuda::shuffle(mask, value, width, "__shfl_xor_sync", site,
                            [=](unsigned lane, unsigned, unsigned last) {
                              unsigned source = lane ^ (unsigned(lane_mask) % 32);
                              return source <= last ? source : lane;
                            });
}

namespace host_cuda {

inline unsigned vote(unsigned mask, int predicate, const char* operation, Site site) {
  WarpValues<bool> all = warp_exchange(mask, predicate != 0, operation, site);
  unsigned lanes = 0;
  for (unsigned i = 0; i < warp_size; ++i) lanes |= unsigned(all.values[i]) << i;
  return lanes;
}

}  // namespace host_cuda

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              host_cuda::Site site = host_cuda::Site::here()) {
  return host_cuda::vote(mask, predicate, "__ballot_sync", site);
}
inline int __any_sync(unsigned mask, int predicate,
                      host_cuda::Site site = host_cuda::Site::here()) {
  return host_cuda::vote(mask, predicate, "__any_sync", site) != 0;
}
inline int __all_sync(unsigned mask, int predicate,
                      host_cuda::Site site = host_cuda::Site::here()) {
  return host_cuda::vote(mask, predicate == 0, "__all_sync", site) == 0;
}

// ---- atomics: plain code, since threads take turns ----

namespace host_cuda {

template <class T>
struct Same {
  using type = T;  // Same<T>::type is not deduced: atomicAdd(&counter, 1) takes T from the pointer
};
template <class T, class... Allowed>
constexpr bool one_of = (std::is_same_v<T, Allowed> || ...);

template <class T>
T replace(T* address, T value) {
  T old = *address;
  *address = value;
  return old;
}

}  // namespace host_cuda

#define HOST_CUDA_ATOMIC(name, result, ...)                                                  \
  template <class T>                                                                         \
  T name(T* address, typename host_cuda::Same<T>::type value) {                              \
    static_assert(host_cuda::one_of<T, __VA_ARGS__>, #name " does not exist for this type"); \
    T old = *address;                                                                        \
    return host_cuda::replace(address, result);                                              \
  }
using HostCudaU64 = unsigned long long;
HOST_CUDA_ATOMIC(atomicMax, old < value ? value : old, int, unsigned, long long, HostCudaU64)
HOST_CUDA_ATOMIC(atomicMin, value < old ? value : old, int, unsigned, long long, HostCudaU64)
HOST_CUDA_ATOMIC(atomicAnd, old & value, int, unsigned, HostCudaU64)
HOST_CUDA_ATOMIC(atomicOr, old | value, int, unsigned, HostCudaU64)
HOST_CUDA_ATOMIC(atomicXor, old ^ value, int, unsigned, HostCudaU64)
HOST_CUDA_ATOMIC(atomicExch, (void(old), value), int, unsigned, HostCudaU64, float)
#undef HOST_CUDA_ATOMIC

template <class T>
T atomicAdd(T* address, typename host_cuda::Same<T>::type value) {
  static_assert(host_cuda::one_of<T, int, unsigned, HostCudaU64, float, double>,
                "atomicAdd does not exist for this type");
  if constexpr (std::is_same_v<T, int>)  // wraps around, which plain + must not
    return host_cuda::replace(address, int(unsigned(*address) + unsigned(value)));
  else
    return host_cuda::replace(address, T(*address + value));
}
template <class T>
T atomicSub(T* address, typename host_cuda::Same<T>::type value) {
  static_assert(host_cuda::one_of<T, int, unsigned>, "atomicSub does not exist for this type");
  return host_cuda::replace(address, T(unsigned(*address) - unsigned(value)));
}
template <class T>
T atomicCAS(T* address, typename host_cuda::Same<T>::type compare,
            typename host_cuda::Same<T>::type value) {
  static_assert(host_cuda::one_of<T, int, unsigned, unsigned short, HostCudaU64>,
                "atomicCAS does not exist for this type");
  return host_cuda::replace(address, *address == compare ? value : *address);
}

