// background.cuh: what an image shows outside of active blocks, written by a kernel ahead of the one that computes blocks.
#pragma once

#include "core/common.cuh"

constexpr int BACKGROUND_THREADS = 256;

// Copy `base`, or zeros where it is null, to `image`: thread block `number` of `count` does its share. Both begin at
// multiples of 16 bytes.
DEVICE void write_background(const u8* __restrict__ base, u8* __restrict__ image, i64 bytes, i64 number, i64 count) {
    constexpr int AT_ONCE = 4;
    const i64 vectors = bytes / 16;
    const uint4* const from = reinterpret_cast<const uint4*>(base);
    uint4* const to = reinterpret_cast<uint4*>(image);
    for (i64 first = number * (BACKGROUND_THREADS * AT_ONCE) + threadIdx.x; first < vectors;
         first += count * (BACKGROUND_THREADS * AT_ONCE)) {
        uint4 values[AT_ONCE];
#pragma unroll
        for (int a = 0; a < AT_ONCE; ++a) {
            const i64 at = first + a * BACKGROUND_THREADS;
            values[a] = base && at < vectors ? from[at] : zero<uint4>();
        }
#pragma unroll
        for (int a = 0; a < AT_ONCE; ++a) {
            const i64 at = first + a * BACKGROUND_THREADS;
            if (at < vectors) __stcs(to + at, values[a]);
        }
    }
    const i64 rest = vectors * 16 + threadIdx.x;
    if (number == 0 && rest < bytes) image[rest] = base ? base[rest] : u8(0);
}
