// unit_packing.cuh: where the weights of a residual unit lie, packed and in shared memory.
//   Unit3            sizes of a unit, and offsets of its tables, weights and activations
//   Behind           what lies behind them in shared memory
//   pack_bottleneck  the kernel that lays weights and tables out as they are staged; thread blocks past those of a
//                    cluster write the result's background, if there is an image
#pragma once

#include "block_sparse/background.cuh"
#include "block_sparse/conv/halo_tile.cuh"

// Cin in CHUNKS of 64 bytes, MID bottleneck channels, both rounded up; SLICE output channels are
// made at a time. What one thread block of a cluster holds.
template <typename T, int CHUNKS_, int MID_, int TH_, int TW_, int CLUSTER_, int SLICE_, int PIECES_ = 1>
struct Unit3 {
    static constexpr int CHUNKS = CHUNKS_, MID = MID_, TH = TH_, TW = TW_, CLUSTER = CLUSTER_, SLICE = SLICE_;
    static constexpr int PIECES = PIECES_;  // of a tile: one below the other, each with its own rim
    static constexpr int LANES = 16 / sizeof(T);
    static constexpr int CIN = CHUNKS * 4 * LANES, NS = MID / CLUSTER, OUT = CIN / CLUSTER, PARTS = OUT / SLICE;
    static constexpr int PLANES = MID / LANES;
    using Rim = Halo<TH, TW, 3, 3, 1, 1, PLANES, PIECES>;  // h1
    using Middle = Halo<TH, TW, 1, 1, 1, 1, PLANES>;       // h2
    static constexpr int RIM = Rim::IH * Rim::IW, TILE = TH * TW;
    static_assert(NS % 8 == 0 && OUT % SLICE == 0 && MID % LANES == 0, "parts of whole groups");

    // Packed weights of one block of the cluster, and shared memory, in bytes from their begin.
    static constexpr int TABLES = (2 * CIN + 4 * NS) * 4;
    static constexpr int W1 = TABLES, W2 = W1 + CHUNKS * 4 * NS * 16, W3 = W2 + Rim::STEPS * 2 * NS * 16;
    static constexpr int W3_PART = Middle::STEPS * 2 * SLICE * 16, PACKED = W3 + PARTS * W3_PART;
    static constexpr int H1 = PACKED, H2 = H1 + Rim::BYTES, ZEROS = H2 + Middle::BYTES;
    static constexpr int PARTIALS = ZEROS + (Rim::LAST_ALONE || Middle::LAST_ALONE ? Rim::PLANE : 0);
};

// What lies behind it: sums of workers that share the K of the first product, or of the second, 16 bytes
// each; then three barriers.
template <class U, int WARPS, int WK1, int WK2>
struct Behind {
    static constexpr int WM1 = WARPS / WK1, TILES1 = ceil_div(U::RIM, 16), TURNS1 = ceil_div(TILES1, WM1);
    static constexpr int PARTS1 = (WK1 - 1) * WM1 * TURNS1 * (U::NS / 8) * 32, PARTS2 = (WK2 - 1) * U::TILE * U::NS / 4;
    static constexpr int BARRIERS = U::PARTIALS + (PARTS1 > PARTS2 ? PARTS1 : PARTS2) * 16, BYTES = BARRIERS + 3 * 8;
};

// ---------------------------------------------------------------------------- packed weights

// Bottleneck channels that fill up MID are 0 whatever x holds, infinities included: their weights are 1
// and their scale is -1, so that relu sees the negative of a sum of numbers >= 0. NaN alone comes through,
// and reaches every channel anyway. With weights of 0 an infinity would become NaN.
//
// The words of a lane's 16 bytes of x are its fragments of two steps of K: in a chunk of 64 bytes,
// word t of unit `u` (0..3) holds the numbers of word 4 t + u of the image.
template <class U, typename T, bool ROUND>
DEVICE uint4 pack_unit(const T* __restrict__ w, i64 u, int column, i64 C, i64 K, i64 first_column) {
    constexpr int PER_WORD = 4 / sizeof(T);
    Elements<T, uint4> value(zero<uint4>());
#pragma unroll
    for (int e = 0; e < U::LANES; ++e) {
        const int t = e / PER_WORD;
        const i64 c = u / 4 * (4 * U::LANES) + (4 * t + u % 4) * PER_WORD + e % PER_WORD;
        if (first_column + column >= K)
            value.element[e] = from_compute<T>(1.0f);
        else if (c < C)
            value.element[e] = w[c * K + first_column + column];
        if constexpr (ROUND) value.element[e] = __uint_as_float(to_tf32(value.element[e]));
    }
    return value.vector;
}

// Weights of a plain convolution, HWIO, in the order of K of halo_tile.cuh.
template <class H, typename T, bool ROUND>
DEVICE uint4 pack_tap(const T* __restrict__ w, int u, i64 k, i64 C, i64 K) {
    constexpr int LANES = 16 / sizeof(T);
    const Unit<H> unit(u);
    Elements<T, uint4> value(zero<uint4>());
#pragma unroll
    for (int e = 0; e < LANES; ++e) {
        const i64 c = unit.plane * LANES + e;
        if (u < H::UNITS && k >= K)
            value.element[e] = from_compute<T>(1.0f);
        else if (u < H::UNITS && c < C)
            value.element[e] = w[(unit.tap * C + c) * K + k];
        if constexpr (ROUND) value.element[e] = __uint_as_float(to_tf32(value.element[e]));
    }
    return value.vector;
}

template <typename T, int CHUNKS, int MID, int CLUSTER, int SLICE, bool TIGHT, bool ROUND, typename Table>
__global__ void __launch_bounds__(256)
    pack_bottleneck(const T* __restrict__ w1, const T* __restrict__ w2, const T* __restrict__ w3,
                    const Table* __restrict__ scale1, const Table* __restrict__ shift1,
                    const Table* __restrict__ scale2, const Table* __restrict__ shift2,
                    const Table* __restrict__ scale3, const Table* __restrict__ shift3, u8* __restrict__ packed,
                    const u8* __restrict__ base, u8* __restrict__ image,  // or null
                    i64 C, i64 Cmid, i64 image_bytes) {
    using U = Unit3<T, CHUNKS, MID, 8, 8, CLUSTER, SLICE>;  // packed the same for every tile
    using Channels = ChannelOrder<T, SLICE / 8>;
    const int rank = blockIdx.y, i = blockIdx.x * 256 + threadIdx.x;
    if (rank >= CLUSTER) {
        const i64 number = static_cast<i64>(rank - CLUSTER) * gridDim.x + blockIdx.x;
        if (image) write_background(base, image, image_bytes, number, static_cast<i64>(gridDim.y - CLUSTER) * gridDim.x);
        return;
    }
    u8* const out = packed + static_cast<i64>(rank) * U::PACKED;
    const auto table = [&](int at, const Table* values, i64 first, int count, i64 limit, float beyond = 0.0f) {
        if (i < count)
            reinterpret_cast<float*>(out)[at + i] = first + i < limit ? to_compute<float>(values[first + i]) : beyond;
    };
    if constexpr (TIGHT) {  // each in the first half of its place
        if (i < U::CIN) {
            reinterpret_cast<T*>(out)[i] = from_compute<T>(i < C ? to_compute<float>(scale1[i]) : 0.0f);
            reinterpret_cast<T*>(out)[2 * U::CIN + i] = from_compute<T>(i < C ? to_compute<float>(shift1[i]) : 0.0f);
        }
    } else {
        table(0, scale1, 0, U::CIN, C);
        table(U::CIN, shift1, 0, U::CIN, C);
    }
    table(2 * U::CIN, scale2, rank * U::NS, U::NS, Cmid, -1.0f);
    table(2 * U::CIN + U::NS, shift2, rank * U::NS, U::NS, Cmid);
    table(2 * U::CIN + 2 * U::NS, scale3, rank * U::NS, U::NS, Cmid, -1.0f);
    table(2 * U::CIN + 3 * U::NS, shift3, rank * U::NS, U::NS, Cmid);
    const int vector = i * 16 + U::W1;
    if (vector >= U::PACKED) return;
    uint4 value;
    if (vector < U::W2) {
        const int at = (vector - U::W1) / 16;
        value = pack_unit<U, T, ROUND>(w1, at / U::NS, at % U::NS, C, Cmid, rank * U::NS);
    } else if (vector < U::W3) {
        const int at = (vector - U::W2) / 16;
        value = pack_tap<typename U::Rim, T, ROUND>(w2, at / U::NS, rank * U::NS + at % U::NS, Cmid, Cmid);
    } else {
        const int at = (vector - U::W3) / 16, part = at / (U::W3_PART / 16), inner = at % (U::W3_PART / 16);
        const int k = rank * U::OUT + part * SLICE + Channels::channel(inner % SLICE);
        value = pack_tap<typename U::Middle, T, ROUND>(w3, inner / SLICE, k, Cmid, C);
    }
    *reinterpret_cast<uint4*>(out + vector) = value;
}
