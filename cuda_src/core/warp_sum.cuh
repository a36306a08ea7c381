// warp_sum.cuh: sums over the lanes of a warp.
#pragma once

#include "core/common.cuh"

// The sum over all lanes, the same in each.
DEVICE int sum_of_warp(int value) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(0xffffffffu, value, d);
    return value;
}

// The sum over the lanes up to this one.
DEVICE int sum_up_to_lane(int value, int lane = static_cast<int>(threadIdx.x) % 32) {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, value, d);
        if (lane >= d) value += other;
    }
    return value;
}
