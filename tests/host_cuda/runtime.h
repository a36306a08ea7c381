// runtime.h: what a kernel on the host needs of the scheduler in runtime.cpp.
//
// One fiber per CUDA thread; the threads of a block take turns on one CPU thread, and a thread
// gives up its turn only where it waits: at a block barrier or in a warp operation. All else in the
// shim (shuffles, votes, later cp.async and mma) is written on the two primitives here:
//   block_barrier(predicate)        all threads of the block meet; how many predicates were true
//   warp_exchange(mask, value)      the lanes of a mask meet; every lane gets every lane's value
// A wrapper in common.cuh for an instruction of a whole warp has a host body like
//   auto all = host_cuda::warp_exchange(host_cuda::full_warp, Fragments{a, b}, "mma");
//   ... all.from(lane).a ...
#pragma once

#include <stddef.h>

#include <type_traits>

#include "vector_types.h"

namespace host_cuda {

constexpr unsigned warp_size = 32;
constexpr unsigned full_warp = 0xffffffffu;

// Where in the source a thread waits, for error messages. As a default argument it is the caller's.
struct Site {
  const char* file;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// The thread that has the turn. Set by the scheduler before each turn.
extern uint3 thread_index, block_index;
extern dim3 block_dim, grid_dim;
extern unsigned thread_rank;  // x fastest
inline unsigned lane() { return thread_rank % warp_size; }

// Report an error of the running thread: it and its launch end, and Python raises the message.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Wait for all threads of the block; return how many of them gave a true predicate.
unsigned block_barrier(bool predicate, const char* operation, Site site);

// Let the other threads run. For loops that poll memory; endless polling is reported.
void pause_thread();

// The block's dynamic shared memory: 128-byte aligned, fresh for each block, every byte 0xff.
void* dynamic_shared();

// Wait for the lanes of `mask`; `received[l]` becomes what lane l has in `sent`. Return the lanes
// that came: all of `mask` if strict, else those that have not exited. Use warp_exchange.
unsigned warp_collective(unsigned mask, const char* operation, Site site, const void* sent,
                         size_t bytes, void* received);

template <class T>
struct WarpValues {
  unsigned mask;          // lanes that came
  T values[warp_size]{};  // zero for a lane that did not

  const T& from(unsigned source) const {
    if (!(mask >> source & 1)) fail("reads lane %u, but only lanes 0x%08x came", source, mask);
    return values[source];
  }
};

// Every lane of `mask` gives a value and gets all of them. `operation` is the name for messages.
template <class T>
WarpValues<T> warp_exchange(unsigned mask, const T& value, const char* operation,
                            Site site = Site::here()) {
  static_assert(std::is_trivially_copyable<T>::value, "lanes exchange plain values");
  WarpValues<T> all{mask};
  all.mask = warp_collective(mask, operation, site, &value, sizeof(T), all.values);
  return all;
}

// ---- launching ----

struct Region {
  void* address;
  size_t bytes;
};

// As launcher.py fills it.
struct Launch {
  unsigned grid[3], block[3];
  size_t dynamic_shared_bytes;
  const Region* shared_variables;  // the kernel's static __shared__ variables
  size_t shared_variable_count;
  unsigned strict;    // a barrier that an exited thread misses, or met at two places, is an error
  unsigned reversed;  // threads take turns from last to first
};

// Run `body(context)` once for each thread of the grid. Return null, or a message if it failed.
const char* run_grid(const Launch& launch, void (*body)(void*), void* context);

}  // namespace host_cuda
