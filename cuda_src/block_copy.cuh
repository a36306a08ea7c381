// block_copy.cuh: how gather and scatter find their way between an image and a block stack.
//   stack[b][i][j][c]  <->  image[n][h0 + i][w0 + j][c]    (n, hi, wi) = indices[b]
//                            h0 = off_h + str_h * hi,  w0 = off_w + str_w * wi
// Two ways to move:
//   rows   both sides have the same layout: block rows are contiguous runs in both, so a group of
//          lanes copies one row with wide accesses and no shared memory.
//   tiles  the layout changes: a tile of pixels x channels turns in shared memory.
// Every launch is a persistent grid; the number of active blocks is read on the device.
#pragma once
#include "common.cuh"

// Geometry of one launch; every kernel takes these as trailing arguments.
struct Geometry {
    i64 M;             // rows of the stack
    i64 N, C, H, W;    // image
    i64 off_h, off_w, str_h, str_w;
};

// The corner of block b, or n < 0 where the row is past the count or names no image.
struct Corner {
    i64 n, h0, w0;
};

DEVICE Corner corner_of(i64 b, i64 count, const int* indices, const Geometry& g) {
    if (b >= count) return Corner{-1, 0, 0};
    const int* row = indices + 3 * b;
    const i64 n = row[0];
    return Corner{n < g.N ? n : -1, g.off_h + g.str_h * row[1], g.off_w + g.str_w * row[2]};
}

DEVICE i64 active_rows(const int* bin_counts, const Geometry& g) {
    return clamp(*bin_counts, 0, g.M);
}

// ---------------------------------------------------------------------------- rows

// One row i of a block in one plane (a channel of NCHW; NHWC has a single plane of C channels).
// Offsets and the range [begin, end) that lies inside the image count vectors.
struct Row {
    i64 image, stack;
    int begin, end;
    i64 plane;
    bool exists;
};

// Visits rows first, first + step, ... of [b][plane][i]; carries instead of divisions.
template <int BH, int BW, int VECTOR>
class RowWalk {
  public:
    DEVICE RowWalk(i64 first, i64 step, i64 planes, int pixel_bytes)
        : planes_(planes), pixel_bytes_(pixel_bytes) {
        split(first, b_, plane_, i_);
        split(step, step_b_, step_plane_, step_i_);
    }

    DEVICE Row next(i64 count, const int* indices, const Geometry& g) {
        Row row{0, 0, 0, 0, plane_, b_ < g.M};
        if (row.exists) {
            row.stack = ((b_ * planes_ + plane_) * BH + i_) * width();
            const Corner corner = corner_of(b_, count, indices, g);
            const i64 h = corner.h0 + i_;
            if (corner.n >= 0 && h >= 0 && h < g.H) {
                row.begin = in_vectors(clamp(-corner.w0, 0, BW));
                row.end = in_vectors(clamp(g.W - corner.w0, 0, BW));
                const i64 pixel = ((corner.n * planes_ + plane_) * g.H + h) * g.W + corner.w0;
                row.image = pixel * pixel_bytes_ / VECTOR;
            }
        }
        advance();
        return row;
    }

    DEVICE int width() const { return in_vectors(BW); }

  private:
    DEVICE int in_vectors(i64 count) const {
        return static_cast<int>(count) * pixel_bytes_ / VECTOR;
    }
    DEVICE void split(i64 index, i64& b, i64& plane, int& i) const {
        const i64 rest = index / BH;
        i = static_cast<int>(index - rest * BH);
        b = rest / planes_;
        plane = rest - b * planes_;
    }
    DEVICE void advance() {
        i_ += step_i_;
        if (i_ >= BH) {
            i_ -= BH;
            ++plane_;
        }
        plane_ += step_plane_;
        if (plane_ >= planes_) {
            plane_ -= planes_;
            ++b_;
        }
        b_ += step_b_;
    }
    i64 planes_, b_, plane_, step_b_, step_plane_;
    int pixel_bytes_, i_, step_i_;
};

// ---------------------------------------------------------------------------- tiles

// One side of a tile: where pixel p (= i * BW + j of the block) and channel c lie, in elements,
// and which pixels exist there.
template <int BH, int BW>
struct Side {
    i64 base, pitch, pixel_step, channel_step;
    int i_begin, i_end, j_begin, j_end;

    DEVICE i64 at(int p, int c) const {
        const int i = p / BW, j = p - i * BW;
        return base + (i * pitch + j) * pixel_step + c * channel_step;
    }
    DEVICE bool has(int p) const {
        const int i = p / BW, j = p - i * BW;
        return i >= i_begin && i < i_end && j >= j_begin && j < j_end;
    }
};

template <bool LAST, int BH, int BW>
DEVICE Side<BH, BW> stack_side(i64 b, const Geometry& g) {
    return Side<BH, BW>{b * g.C * BH * BW, BW, LAST ? g.C : 1, LAST ? 1 : BH * BW, 0, BH, 0, BW};
}

template <bool LAST, int BH, int BW>
DEVICE Side<BH, BW> image_side(const Corner& k, const Geometry& g) {
    if (k.n < 0) return Side<BH, BW>{0, 0, 0, 0, 0, 0, 0, 0};  // no pixel exists
    const i64 pixel = k.h0 * g.W + k.w0, plane = g.H * g.W;
    return Side<BH, BW>{k.n * g.C * plane + (LAST ? pixel * g.C : pixel),
                        g.W,
                        LAST ? g.C : 1,
                        LAST ? 1 : plane,
                        static_cast<int>(clamp(-k.h0, 0, BH)),
                        static_cast<int>(clamp(g.H - k.h0, 0, BH)),
                        static_cast<int>(clamp(-k.w0, 0, BW)),
                        static_cast<int>(clamp(g.W - k.w0, 0, BW))};
}

// A tile of TP pixels x TC channels in shared memory, channel-major. THREADS threads fill it and
// empty it, by vectors of channels (where channels are contiguous) or groups of G pixels (where
// pixels are). fill and empty call back with (slot, p, c, exists) for each access.
template <typename T, typename V, int BH, int BW, int TP, int VC, int THREADS>
struct Tile {
    static constexpr int L = Elements<T, V>::COUNT;   // channels per vector
    static constexpr int TC = VC * L;                 // channels per tile
    static constexpr int PIXELS = BH * BW;
    static constexpr int PIXEL_TILES = ceil_div(PIXELS, TP);
    // Row length 2 mod 8 (4 mod 8 for bytes) spreads a warp's column accesses over the banks and
    // keeps groups of pixels aligned.
    static constexpr int PITCH = TP + ((sizeof(T) == 1 ? 4 : 2) - TP % 8 + 8) % 8;
    static constexpr int VECTOR_SLOTS = ceil_div(TP * VC, THREADS);
    __host__ __device__ static constexpr int group_slots(int G) { return ceil_div(TC * (TP / G), THREADS); }

    int p0, c0, C;

    // Visit the vectors of this thread: body(slot, p, c, tile_offset).
    template <class Body>
    DEVICE void vectors(Body body) const {
#pragma unroll
        for (int slot = 0; slot < VECTOR_SLOTS; ++slot) {
            const int index = slot * THREADS + static_cast<int>(threadIdx.x);
            const int p = index / VC, c = (index - p * VC) * L;
            if (p < TP && p0 + p < PIXELS && c0 + c < C) body(slot, p0 + p, c0 + c, c * PITCH + p);
        }
    }
    // Visit the groups of G pixels of this thread: body(slot, p, c, tile_offset).
    template <int G, class Body>
    DEVICE void groups(Body body) const {
        static_assert(TP % G == 0 && PITCH % G == 0, "groups must not straddle rows");
        constexpr int PER_ROW = TP / G;
#pragma unroll
        for (int slot = 0; slot < group_slots(G); ++slot) {
            const int index = slot * THREADS + static_cast<int>(threadIdx.x);
            const int c = index / PER_ROW, p = (index - c * PER_ROW) * G;
            if (c < TC && p0 + p < PIXELS && c0 + c < C) body(slot, p0 + p, c0 + c, c * PITCH + p);
        }
    }
};
