// cluster.h: shared memory of the other blocks of a cluster (distributed shared memory).
//
// Plain loads and stores of it act at once. A store that counts at a barrier (st.async) lands as late
// as possible: when somebody waits at the barrier. Until then its destination holds poison.
#pragma once

#include "async_copy.h"
#include "runtime.h"

namespace host_cuda {

// The same place in the shared memory of the block of this rank, as mapa finds it.
template <class T>
T* map_to_block(T* shared, unsigned rank) {
  return static_cast<T*>(in_block(shared, rank).shared);
}

// st.async of 16 bytes to the same place of a block, which count at its barrier, at the place of `barrier`.
inline void store_later(void* shared, const void* value, const unsigned long long* barrier,
                        unsigned rank) {
  OtherBlock block = in_block(shared, rank);
  const unsigned long long* its_barrier = map_to_block(barrier, rank);
  load_barrier(its_barrier);
  check_aligned(block.shared, 16, "st.async: the place in shared memory");
  block.bulk_copies->send(block.shared, value, 16, its_barrier);
}

}  // namespace host_cuda
