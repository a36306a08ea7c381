// halo_tile.cuh: a tile of the image in shared memory, and the order of a product's K.
//   Halo       where the pixels of a tile and of its rim lie: planes of 16 bytes of channels
//                 plane 0: pixel 0 | pixel 1 | ...      16 bytes each: 8 or 4 channels
//                 plane 1: pixel 0 | pixel 1 | ...
//              A kernel's tap is a shift of the address, so that no im2col matrix is ever made.
//   Unit       which tap and plane a unit of K is: 16 bytes of one tap's channels. A step of K is two
//              units, 32 bytes.
//   ChannelOrder  in which order output channels are stored
// The products are in engines.cuh.
#pragma once

#include "core/tensor_core.cuh"

template <int TH_, int TW_, int R_, int S_, int SH_, int SW_, int PLANES_, int PIECES_ = 1>
struct Halo {
    static constexpr int TH = TH_, TW = TW_, R = R_, S = S_, SH = SH_, SW = SW_, PLANES = PLANES_, PIECES = PIECES_;
    // A tile of several pieces has them one below the other, each with a rim of its own.
    static constexpr int PIECE_H = TH / PIECES, PIECE_IH = (PIECE_H - 1) * SH + R;
    static constexpr int IH = PIECES * PIECE_IH, IW = (TW - 1) * SW + S;  // pixels read
    static_assert(PIECES * PIECE_H == TH, "pieces of whole lines");
    // Columns of equal x % SW lie together, so that neighbouring outputs read neighbouring pixels.
    static constexpr int COLUMNS = ceil_div(IW, SW), PITCH = COLUMNS * SW;
    static constexpr int PLANE = ((IH * PITCH + 6) / 8 * 8 + 1) * 16;  // odd: planes start in different banks
    static constexpr int BYTES = PLANES * PLANE;

    static constexpr int TAPS = R * S, UNITS = TAPS * PLANES, STEPS = ceil_div(UNITS, 2);
    static constexpr int PAIRS = PLANES / 2;       // steps of a tap; a last plane pairs up across taps
    static constexpr bool LAST_ALONE = UNITS % 2;  // the last step has one unit

    static __host__ __device__ constexpr int at(int row, int column) {
        return (row * PITCH + column % SW * COLUMNS + column / SW) * 16;
    }
    static __host__ __device__ constexpr int tap(int t) { return at(t / S, t % S); }
    // Pixel p of the tile, in raster order: where its window begins.
    static __host__ __device__ constexpr int window(int p) {
        if (PIECES == 1) return (p / TW * SH * PITCH + p % TW) * 16;
        const int line = p / TW;
        return ((line / PIECE_H * PIECE_IH + line % PIECE_H * SH) * PITCH + p % TW) * 16;
    }
};

// Which tap and plane unit number u of K is: pairs of planes tap by tap, then the last planes.
template <class H>
struct Unit {
    int tap, plane;
    __host__ __device__ explicit Unit(int u) {
        const int paired = 2 * H::PAIRS;
        const bool last = u >= H::TAPS * paired;
        tap = last ? u - H::TAPS * paired : u / paired;
        plane = last ? H::PLANES - 1 : u % paired;
    }
};

// Channels are stored so that a lane's results are neighbours: of GROUPS groups of 8 columns, a lane
// holds two columns each, and these are 2 * GROUPS channels in a row.
template <typename T, int NT>
struct ChannelOrder {
    static constexpr int VECTOR = 16 / sizeof(T) / 2;  // groups that fill 16 bytes
    static constexpr int GROUPS = NT % VECTOR == 0 ? VECTOR : NT % 2 == 0 && VECTOR > 1 ? 2 : 1;
    static __host__ __device__ constexpr int channel(int column) {
        const int n = column / 8, t = column % 8 / 2, e = column % 2;
        return n / GROUPS * (8 * GROUPS) + t * (2 * GROUPS) + n % GROUPS * 2 + e;
    }
};

// Four floats in shared memory, in place.
DEVICE void round_to_tf32(void* shared) {
    float4& four = *static_cast<float4*>(shared);
    four = make_float4(__uint_as_float(to_tf32(four.x)), __uint_as_float(to_tf32(four.y)),
                       __uint_as_float(to_tf32(four.z)), __uint_as_float(to_tf32(four.w)));
}
