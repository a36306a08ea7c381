// async_copy.h: copies into shared memory that land later: cp.async, and bulk copies on a barrier.
//
// A copy lands as late as possible: when the thread waits for it. Until then its destination in
// shared memory holds poison, so that code that reads too early, or that still needed the old
// contents, computes nonsense. Global memory is read at the start of the copy; it is an error if it
// has changed when the copy lands.
#pragma once

#include <stdint.h>
#include <string.h>

#include <vector>

#include "runtime.h"

namespace host_cuda {

inline void check_aligned(const void* address, size_t bytes, const char* what) {
  if (uintptr_t(address) % bytes)
    fail("passes %p: %s must be aligned to %zu bytes", address, what, bytes);
}

// ---- cp.async: each thread waits for its own copies ----

inline void copy_later(void* shared, const void* global, size_t bytes, bool inside) {
  check_aligned(shared, bytes, "copy_async: the place in shared memory");
  check_aligned(global, bytes, "copy_async: the place in global memory");
  copies->begin(shared, inside ? global : nullptr, bytes);
}

inline void commit_copies() { ++copies->groups; }

inline void wait_for_copies(unsigned under_way) {
  copies->land_if([=](const Copy& copy) { return copy.group + under_way < copies->groups; });
}

// ---- bulk copies: threads wait at the copy's barrier ----

// The 8 bytes of a barrier in shared memory.
struct Barrier {
  uint64_t phase : 1, count : 20, pending : 20;
  int64_t bytes : 23;  // announced but not yet landed
};
static_assert(sizeof(Barrier) == 8, "as large as an mbarrier");
constexpr unsigned max_barrier_count = (1 << 20) - 1;  // also what poison looks like

inline Barrier load_barrier(const unsigned long long* address) {
  check_aligned(address, 8, "a barrier");
  Barrier barrier;
  memcpy(&barrier, address, sizeof barrier);
  if (barrier.count == max_barrier_count || barrier.count == 0)
    fail("uses a barrier that nobody initialised");
  return barrier;
}

// All threads arrived and all bytes landed: the next phase begins.
inline void store_barrier(unsigned long long* address, Barrier barrier) {
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.phase ^= 1;
    barrier.pending = barrier.count;
  }
  memcpy(address, &barrier, sizeof barrier);
}

inline void barrier_init(unsigned long long* address, unsigned count) {
  check_aligned(address, 8, "a barrier");
  if (count == 0 || count >= max_barrier_count) fail("initialises a barrier for %u arrivals", count);
  Barrier barrier{0, count, count, 0};
  memcpy(address, &barrier, sizeof barrier);
}

inline void barrier_expect(unsigned long long* address, unsigned bytes) {
  Barrier barrier = load_barrier(address);
  if (barrier.pending == 0) fail("arrives at a barrier more often than its count");
  barrier.pending = barrier.pending - 1;
  barrier.bytes = barrier.bytes + bytes;
  store_barrier(address, barrier);
}

inline void bulk_copy(void* shared, const void* global, unsigned bytes,
                      unsigned long long* address) {
  load_barrier(address);
  check_aligned(shared, 16, "bulk_copy: the place in shared memory");
  check_aligned(global, 16, "bulk_copy: the place in global memory");
  if (bytes == 0 || bytes % 16) fail("bulk_copy: bytes must be a multiple of 16, got %u", bytes);
  bulk_copies->begin(shared, global, bytes, address);
}

// An array of three axes, the innermost first, and a box of it: launcher.py makes it.
struct alignas(64) TensorMap {
  const char* data;
  long long sizes[3], strides[2];  // elements; bytes, of the second and the third axis
  long long box[3], itemsize;
  char unused[48];
};
static_assert(sizeof(TensorMap) == 128, "as large as a CUtensorMap");

// A box from (inner, across, down) on; zeros outside of the array. Rows of 128 bytes, in the 128-byte swizzle.
inline void begin_box(void* shared, const TensorMap& map, int inner, int across, int down,
                     unsigned long long* address) {
  load_barrier(address);
  check_aligned(shared, 128, "copy_box: the place in shared memory");
  check_aligned(map.data, 16, "copy_box: the array");
  if (map.box[0] * map.itemsize != 128) fail("copy_box: a row of a box must have 128 bytes");
  for (int row = 0; row < map.box[1] * map.box[2]; ++row) {
    long long j = across + row % map.box[1], i = down + row / map.box[1];
    bool there = j >= 0 && j < map.sizes[1] && i >= 0 && i < map.sizes[2];
    for (int unit = 0; unit < 8; ++unit) {
      long long c = inner + unit * (16 / map.itemsize);
      bool inside = there && c >= 0 && c < map.sizes[0];
      if (inside && c + 16 / map.itemsize > map.sizes[0])
        fail("copy_box: on the host, the innermost axis must be whole vectors of 16 bytes");
      const char* from = map.data + i * map.strides[1] + j * map.strides[0] + c * map.itemsize;
      char* to = static_cast<char*>(shared) + row * 128;
      to += (unit ^ (uintptr_t(to) / 128 % 8)) << 4;  // the swizzle is that of addresses
      bulk_copies->begin(to, inside ? from : nullptr, 16, address);
    }
  }
}

inline void barrier_wait(unsigned long long* address, unsigned parity) {
  if (parity > 1) fail("waits for the phase of parity %u, which is neither 0 nor 1", parity);
  for (;; pause_thread()) {
    Barrier barrier = load_barrier(address);
    if (barrier.phase != parity) return;
    if (barrier.pending) continue;
    bulk_copies->land_if([&](const Copy& copy) {
      bool mine = copy.barrier == address;
      if (mine) barrier.bytes = barrier.bytes - int64_t(copy.bytes);
      return mine;
    });
    if (barrier.bytes < 0) fail("gets more bytes at a barrier than it was told to expect");
    store_barrier(address, barrier);
    if (barrier.bytes == 0) return;
  }
}

}  // namespace host_cuda
