// pipeline.cuh: threads of a thread block that copy for others that multiply.
#pragma once

#include "core/async_copy.cuh"

// Threads that meet again and again at a barrier in shared memory.
struct Meeting {
    u64* bar;
    u32 phase = 0;
    DEVICE explicit Meeting(u64* bar) : bar(bar) {}
    DEVICE void sync() {
        barrier_arrive(bar);
        barrier_wait(bar, phase);
        phase ^= 1;
    }
};

// A ring's next stage, and the parity of its round.
template <int STAGES>
struct Stage {
    int slot = 0;
    u32 phase = 0;
    DEVICE void advance() {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
};

// How THREADS threads that multiply say that they have read a stage: all of them, or, where tensor cores read it from
// shared memory, one for its warp.
template <int THREADS, bool BY_WARP>
struct Readers {
    static constexpr int COUNT = BY_WARP ? THREADS / 32 : THREADS;  // that arrive
    static DEVICE void release(u64* empty) {
        if constexpr (BY_WARP) __syncwarp();
        if (!BY_WARP || threadIdx.x % 32 == 0) barrier_arrive(empty);
    }
    // A note of the stage, for all lanes: one reads it, which arrives at the barrier behind which it is overwritten.
    static DEVICE int read(const int* note) {
        return __shfl_sync(0xffffffffu, threadIdx.x % 32 == 0 ? *note : 0, 0);
    }
};

// Give registers of this group of four warps back, or take more, up to COUNT a thread (a multiple of 8). Where COUNT is 0,
// and on other architectures, nothing happens.
template <int COUNT>
DEVICE void give_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(SBNET_HOST)
    if constexpr (COUNT > 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
template <int COUNT>
DEVICE void take_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(SBNET_HOST)
    if constexpr (COUNT > 0) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
