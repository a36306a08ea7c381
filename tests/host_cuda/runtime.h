// runtime.h: what kernels on the host use of the scheduler in runtime.cpp.
//
// One fiber per CUDA thread; the threads of a block, or of a cluster of blocks, take turns on one CPU
// thread, and a thread gives up its turn only where it waits: at a barrier or in a warp operation.
// Everything else in the shim (shuffles, votes, mma) is built on the primitives here:
//   block_barrier(predicate)        all threads of the block meet; returns how many predicates were true
//   warp_exchange(mask, value)      the lanes of a mask meet; every lane gets every lane's value
//   warp_meet(value, body)          a whole warp meets; the last lane to arrive runs the body for all
// The host body of an instruction of a whole warp, as in cuda_src/core/tensor_core.cuh, is one warp_meet.
#pragma once

#include <stddef.h>

#include <type_traits>

#include "pending_copies.h"
#include "pending_products.h"
#include "vector_types.h"

namespace host_cuda {

constexpr unsigned warp_size = 32;
constexpr unsigned full_warp = 0xffffffffu;

// Where in the source a thread waits, for error messages. As a default argument: the caller's place.
struct Site {
  const char* file;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// The thread whose turn it is. Set by the scheduler before each turn.
extern uint3 thread_index, block_index;
extern dim3 block_dim, grid_dim;
extern unsigned thread_rank;  // x fastest
extern unsigned cluster_rank, cluster_size;  // of its block in its cluster; 0 and 1 in a plain launch
inline unsigned lane() { return thread_rank % warp_size; }

// Report an error of the running thread: the launch ends, and Python raises the message.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Copies that have begun: cp.async of the running thread; bulk copies of its block, and stores that
// other blocks send to it.
extern PendingCopies* copies;
extern PendingCopies* bulk_copies;

// Products of the running thread that have begun, of wgmma.
extern PendingProducts* products;

// Wait for all threads of the block; return how many passed a true predicate.
unsigned block_barrier(bool predicate, const char* operation, Site site);

// Let the other threads run. For loops that poll memory; endless polling is reported.
void pause_thread();

// The block's dynamic shared memory: 128-byte aligned, fresh for each block, every byte 0xff. In a
// cluster 1024-byte aligned: what code aligns to that lies at the same offset in all of its blocks.
void* dynamic_shared();

// A block of the cluster as another one sees it: cluster.h.
struct OtherBlock {
  void* shared;  // what was asked for, in its dynamic shared memory
  PendingCopies* bulk_copies;
};

// The same place of dynamic shared memory in the block of this rank, which must have begun, as
// threads know when they have passed a barrier of the cluster, and not ended.
OtherBlock in_block(const void* shared, unsigned rank);

// The two halves of a barrier of the cluster: every thread arrives, and waits until all have.
void cluster_arrive(Site site = Site::here());
void cluster_wait(Site site = Site::here());

// Wait for the lanes of `mask`. The last to arrive runs `meeting`, for which lanes[l] is what lane l
// passed as `mine`, or null if it did not arrive; then all go on. Return the lanes that arrived: all
// of `mask` if strict, otherwise those that have not exited. Use warp_exchange or warp_meet.
using Meeting = void (*)(void* const* lanes);
unsigned warp_collective(unsigned mask, const char* operation, Site site, void* mine,
                         Meeting meeting);

template <class T>
struct WarpValues {
  unsigned mask;          // lanes that arrived
  T values[warp_size]{};  // zero for lanes that did not

  const T& from(unsigned source) const {
    if (!(mask >> source & 1)) fail("reads lane %u, but only lanes 0x%08x came", source, mask);
    return values[source];
  }
};

// Every lane of `mask` passes a value and gets all of them. `operation` is the name for messages.
template <class T>
WarpValues<T> warp_exchange(unsigned mask, const T& value, const char* operation,
                            Site site = Site::here()) {
  static_assert(std::is_trivially_copyable<T>::value, "lanes exchange plain values");
  struct Lane {
    const T& sent;
    WarpValues<T> all;
  } mine{value, {mask}};
  mine.all.mask = warp_collective(mask, operation, site, &mine, [](void* const* lanes) {
    for (unsigned to = 0; to < warp_size; ++to)
      for (unsigned from = 0; from < warp_size; ++from)
        if (lanes[to] && lanes[from])
          static_cast<Lane*>(lanes[to])->all.values[from] = static_cast<Lane*>(lanes[from])->sent;
  });
  return mine.all;
}

// Every lane of the warp passes `mine`; the last to arrive runs body(lanes), where lanes[l] points to
// what lane l passed, and may change it.
template <class T>
void warp_meet(T& mine, const char* operation, Site site,
               void (*body)(std::common_type_t<T>* const* lanes)) {
  struct Lane {
    T* mine;
    decltype(body) run;
  } lane{&mine, body};
  warp_collective(full_warp, operation, site, &lane, [](void* const* lanes) {
    T* all[warp_size];
    for (unsigned i = 0; i < warp_size; ++i) {
      if (!lanes[i]) fail("is in an operation of the whole warp, but lane %u is not", i);
      all[i] = static_cast<Lane*>(lanes[i])->mine;
    }
    static_cast<Lane*>(lanes[0])->run(all);
  });
}

// ---- launching ----

struct Region {
  void* address;
  size_t bytes;
};

// Filled in by launcher.py.
struct Launch {
  unsigned grid[3], block[3];
  size_t dynamic_shared_bytes;
  const Region* shared_variables;  // the kernel's static __shared__ variables
  size_t shared_variable_count;
  unsigned strict;    // error if an exited thread misses a barrier, or threads meet at two of them
  unsigned reversed;  // threads take turns from last to first, and so do blocks of a cluster
  unsigned cluster;   // blocks, consecutive in x, that run at the same time
};

// Run `body(context)` once for each thread of the grid. Return null, or a message if it failed.
const char* run_grid(const Launch& launch, void (*body)(void*), void* context);

}  // namespace host_cuda
