// ordered_count.cuh: a thread block's place in a list, which is the count of all thread blocks before it.
//   Counted      flags set in some words
//   look_back    counts that the thread blocks before have published in global memory, tagged with an epoch
//   counts_of_cluster    where thread blocks of a cluster tell each other theirs
#pragma once

#include "block_sparse/mask/mask_reader.cuh"
#include "core/cluster.cuh"

DEVICE int warp_sum(int value) {
#if DEVICE_ARCHITECTURE >= 800
    return static_cast<int>(__reduce_add_sync(ALL, static_cast<u32>(value)));
#else
#pragma unroll
    for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(ALL, value, d);
    return value;
#endif
}

// Flags set in all words, and in those before word `end`: the same in all lanes of the warp.
struct Counted {
    int all, before;
    DEVICE Counted(const u32* flags, int words, int end) {
        int sums[2] = {0, 0};
        for (int w = threadIdx.x & 31; w < words; w += 32) {
            const int set = __popc(flags[w]);
            sums[0] += set;
            sums[1] += w < end ? set : 0;
        }
        all = warp_sum(sums[0]);
        before = warp_sum(sums[1]);
    }
};

// One 64-bit store carries tag and count, so that no fence is needed.
DEVICE void publish(u64* slot, u64 value) { *const_cast<volatile u64*>(slot) = value; }

// The count that thread block `slot` published in this epoch; waits until it is there.
DEVICE int await_count(const u64* slot, u32 epoch) {
    u64 value = *const_cast<const volatile u64*>(slot);
    while (static_cast<u32>(value >> 32) != epoch) value = *const_cast<const volatile u64*>(slot);
    return static_cast<int>(static_cast<u32>(value));
}

// What the thread blocks before this one have published, the same in all threads; one barrier.
template <int THREADS>
DEVICE int look_back(const u64* counts, u32 epoch, int* scratch) {
    int waited = 0;
    for (u32 other = threadIdx.x; other < blockIdx.x; other += THREADS)
        waited += await_count(counts + other, epoch);
    waited = warp_sum(waited);
    const int lane = threadIdx.x & 31;
    if (lane == 0) scratch[threadIdx.x / 32] = waited;
    __syncthreads();
    return warp_sum(lane < THREADS / 32 ? scratch[lane] : 0);
}

// The flags of each thread block of a cluster, in the shared memory of each.
template <int COUNT>
DEVICE int* counts_of_cluster() {
    __shared__ int counts[COUNT];
    return counts;
}
