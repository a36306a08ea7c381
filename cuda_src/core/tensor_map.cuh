// tensor_map.cuh: boxes of an array in global memory that one instruction brings to shared memory.
// A TensorMap describes an array of three axes, the innermost first, and the size of a box; it is a parameter of a kernel,
// `const __grid_constant__`. sbnet_cupy/core/tensor_map.py makes it. What a box has outside of the array becomes 0.
// A row of a box has 128 bytes, and rows lie in shared memory in the 128-byte swizzle (swizzled_tile.cuh).
// Source: cp.async.bulk.tensor of NVIDIA's PTX ISA. Compute capability 9.0 and newer, and the host.
#pragma once

#include "core/async_copy.cuh"

#ifdef SBNET_HOST
using TensorMap = host_cuda::TensorMap;
#else
struct alignas(64) TensorMap {  // CUtensorMap
    u8 opaque[128];
};
#endif

// Begin to copy the box whose first element is (inner, across, down), to a multiple of 128 bytes. The barrier expects the
// bytes of a whole box, wherever it lies. The swizzle is that of addresses: bits 7 to 9 say how a row's units lie, whichever
// row of the box it is. So a box of fewer than 8 rows, or one in the middle of a tile, may begin at any row.
DEVICE void copy_box(SharedPlace shared, const TensorMap& map, int inner, int across, int down, SharedPlace bar) {
#ifdef SBNET_HOST
    host_cuda::begin_box(shared.at, map, inner, across, down, bar.barrier());
#elif DEVICE_ARCHITECTURE >= 900
    asm volatile("cp.async.bulk.tensor.3d." BULK_COPIES_TO
                 ".global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(shared.at), "l"(&map), "r"(inner), "r"(across), "r"(down), "r"(bar.at) : "memory");
#else
    __trap();
#endif
}

// Have the map itself brought to where the copy engine reads it.
DEVICE void prefetch_map(const TensorMap& map) {
#if !defined(SBNET_HOST) && DEVICE_ARCHITECTURE >= 900
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}
