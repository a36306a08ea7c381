// running_sum.cuh: how much of something the thread blocks before this one have, in one launch.
// Source: decoupled look-back (Merrill, Garland 2016, NVIDIA NVR-2016-002), without its chain: each thread block publishes its own
// sum, and adds up those of all before it.
#pragma once

#include "core/warp_sum.cuh"

// The sum over a thread block, the same in all threads. `parts` is shared memory for a number of each warp.
template <int THREADS>
DEVICE int sum_of_block(int value, int* parts) {
    const int warp = threadIdx.x / 32, sum = sum_of_warp(value);
    __syncthreads();  // others may still read what was there
    if (threadIdx.x % 32 == 0) parts[warp] = sum;
    __syncthreads();
    int total = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) total += parts[w];
    return total;
}

// The sum over the thread blocks before this one. Each publishes its own, with a one above the number, and waits for those before
// it, which were begun before it. `sums` has a number for each, 0 before the launch.
template <int THREADS>
DEVICE int sum_before_block(u64* sums, int of_block, int* parts) {
    if (threadIdx.x == 0) *const_cast<volatile u64*>(sums + blockIdx.x) = 1ull << 32 | static_cast<u32>(of_block);
    int before = 0;
    for (u32 other = threadIdx.x; other < blockIdx.x; other += THREADS) {
        u64 published;
        do published = *const_cast<volatile u64*>(sums + other);
        while (!(published >> 32));
        before += static_cast<int>(static_cast<u32>(published));
    }
    return sum_of_block<THREADS>(before, parts);
}
