// stack_channels.cuh: channels side by side of a pixel, for kernels of which stacks may differ in dtype.
#pragma once

#include "core/common.cuh"

// V elements, read and written by vectors of 16 bytes at most: 8 of 32 bits are as many as 8 of 16 bits, of twice the bytes.
template <typename T, int V>
struct Channels {
    using Vector = typename Bytes<V * sizeof(T) <= 16 ? V * sizeof(T) : 16>::type;
    static constexpr int OF_VECTOR = sizeof(Vector) / sizeof(T), VECTORS = V / OF_VECTOR;
    Elements<T, Vector> part[VECTORS];

    DEVICE void fill(T value) {
#pragma unroll
        for (int e = 0; e < V; ++e) set(e, value);
    }
    DEVICE void load(const T* __restrict__ from) {
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) part[k].vector = reinterpret_cast<const Vector*>(from)[k];
    }
    DEVICE void store(T* __restrict__ to) const {
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) reinterpret_cast<Vector*>(to)[k] = part[k].vector;
    }
    DEVICE float get(int e) const { return to_compute<float>(part[e / OF_VECTOR].element[e % OF_VECTOR]); }
    DEVICE void set(int e, T value) { part[e / OF_VECTOR].element[e % OF_VECTOR] = value; }
};
