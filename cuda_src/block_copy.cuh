// block_copy.cuh: how gather and scatter find their way between an image and a block stack.
//   stack[b][i][j][c]  <->  image[n][h0 + i][w0 + j][c]    (n, hi, wi) = indices[b]
//                            h0 = off_h + str_h * hi,  w0 = off_w + str_w * wi
// Two ways to move:
//   runs   both sides have the same layout: block rows are contiguous in both, so a group of lanes
//          copies a run of a row with wide accesses and no shared memory.
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

// b must be under g.M. The row is read before the count is looked at: the two loads overlap.
DEVICE Corner corner_of(i64 b, i64 count, const int* indices, const Geometry& g) {
    const int* row = indices + 3 * b;
    const int n = row[0], hi = row[1], wi = row[2];
    return Corner{b < count && n < g.N ? n : -1, g.off_h + g.str_h * hi, g.off_w + g.str_w * wi};
}

DEVICE i64 active_rows(const int* bin_counts, const Geometry& g) {
    return clamp(*bin_counts, 0, g.M);
}

// ---------------------------------------------------------------------------- runs

// A run: up to SPAN consecutive vectors of row i of a block in one plane (a channel of NCHW; NHWC
// has a single plane of C channels). Offsets are those of the row, in vectors; the run covers
// [first, last) of it, of which [begin, end) lies inside the image.
struct Run {
    i64 image, stack, plane;
    int first, last, begin, end;
};

// Visits runs start, start + step, ... of [b][plane][i][segment]; carries instead of divisions.
template <int BH, int BW, int VECTOR, int SPAN>
class RunWalk {
  public:
    DEVICE RunWalk(i64 start, i64 step, i64 planes, int pixel_bytes)
        : planes_(planes), pixel_bytes_(pixel_bytes), segments_(ceil_div(in_vectors(BW), SPAN)) {
        split(start, b_, plane_, i_, segment_);
        split(step, step_b_, step_plane_, step_i_, step_segment_);
    }

    // The current run, then one step on. Past the stack's last row the run is empty.
    DEVICE Run next(i64 count, const int* indices, const Geometry& g) {
        Run run{0, 0, plane_, 0, 0, 0, 0};
        if (b_ < g.M) {
            const Corner corner = corner_of(b_, count, indices, g);
            const int width = in_vectors(BW);
            run.first = segment_ * SPAN;
            run.last = min(width, run.first + SPAN);
            run.stack = ((b_ * planes_ + plane_) * BH + i_) * width;
            const i64 h = corner.h0 + i_;
            if (corner.n >= 0 && h >= 0 && h < g.H) {
                run.begin = max(run.first, in_vectors(clamp(-corner.w0, 0, BW)));
                run.end = min(run.last, in_vectors(clamp(g.W - corner.w0, 0, BW)));
                const i64 pixel = ((corner.n * planes_ + plane_) * g.H + h) * g.W + corner.w0;
                run.image = pixel * pixel_bytes_ / VECTOR;
            }
        }
        advance();
        return run;
    }

    DEVICE i64 runs(i64 blocks) const { return blocks * planes_ * BH * segments_; }

  private:
    DEVICE int in_vectors(i64 count) const {
        return static_cast<int>(count) * pixel_bytes_ / VECTOR;
    }
    DEVICE void split(i64 index, i64& b, i64& plane, int& i, int& segment) const {
        i64 rest = divide(index, segments_);
        segment = static_cast<int>(index - rest * segments_);
        const i64 row = rest;
        rest = divide(row, BH);
        i = static_cast<int>(row - rest * BH);
        b = divide(rest, planes_);
        plane = rest - b * planes_;
    }
    DEVICE void advance() {
        segment_ += step_segment_;
        if (segment_ >= segments_) {
            segment_ -= segments_;
            ++i_;
        }
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
    int pixel_bytes_, segments_, i_, segment_, step_i_, step_segment_;
};

// ---------------------------------------------------------------------------- tiles

// Where the pixels of block k lie in an image, in elements, and which of them exist.
template <bool LAST, int BH, int BW>
struct ImageSide {
    i64 base, row_step, channel_step;
    int pixel_step, i_begin, i_end, j_begin, j_end;

    DEVICE ImageSide(const Corner& k, const Geometry& g)
        : base((LAST ? ((k.n * g.H + k.h0) * g.W + k.w0) * g.C : (k.n * g.C * g.H + k.h0) * g.W + k.w0)),
          row_step(LAST ? g.W * g.C : g.W),
          channel_step(LAST ? 1 : g.H * g.W),
          pixel_step(LAST ? static_cast<int>(g.C) : 1),
          i_begin(static_cast<int>(clamp(-k.h0, 0, BH))),
          i_end(k.n < 0 ? 0 : static_cast<int>(clamp(g.H - k.h0, 0, BH))),
          j_begin(static_cast<int>(clamp(-k.w0, 0, BW))),
          j_end(static_cast<int>(clamp(g.W - k.w0, 0, BW))) {}

    // Offset of pixel p (= i * BW + j of the block), channel c; -1 where there is none.
    DEVICE i64 at(int p, int c) const {
        const int i = p / BW, j = p - i * BW;
        if (i < i_begin || i >= i_end || j < j_begin || j >= j_end) return -1;
        return base + i * row_step + j * static_cast<i64>(pixel_step) + c * channel_step;
    }
};

// The same for a block of the stack, where all pixels exist.
template <bool LAST, int BH, int BW>
struct StackSide {
    i64 base, C;
    DEVICE StackSide(i64 b, const Geometry& g) : base(b * g.C * BH * BW), C(g.C) {}
    DEVICE i64 at(int p, int c) const {
        return base + (LAST ? p * C + c : c * static_cast<i64>(BH * BW) + p);
    }
};

// A tile of TP pixels x TC channels in shared memory, channel-major. THREADS threads fill it and
// empty it, by vectors of channels (where channels are contiguous) or groups of G pixels (where
// pixels are). Units of UNIT pixels are permuted by the channel's vector number, so that neither a
// warp's column accesses nor its row accesses meet in a bank.
template <typename T, typename V, int BH, int BW, int TP, int VC, int THREADS>
struct Tile {
    static constexpr int L = Elements<T, V>::COUNT;  // channels per vector
    static constexpr int TC = VC * L;                // channels per tile
    static constexpr int PIXELS = BH * BW;
    static constexpr int PIXEL_TILES = ceil_div(PIXELS, TP);
    static constexpr int UNIT = sizeof(T) <= 4 ? 4 : 16 / sizeof(T);
    static constexpr int PITCH = ceil_div(TP, 8 * UNIT) * 8 * UNIT;
    static constexpr int VECTOR_SLOTS = ceil_div(TP * VC, THREADS);
    __host__ __device__ static constexpr int group_slots(int G) {
        return ceil_div(TC * ceil_div(TP, G), THREADS);
    }

    int p0, c0, C;

    // Position in shared memory of pixel p of the tile in channel c = vector * L + e.
    DEVICE static int position(int p, int c, int vector) {
        return c * PITCH + ((p / UNIT) ^ (vector & 7)) * UNIT + p % UNIT;
    }

    // Visit the vectors of this thread: body(slot, p, c, position). The position of the vector's
    // element e is e * PITCH further.
    template <class Body>
    DEVICE void vectors(Body body) const {
#pragma unroll
        for (int slot = 0; slot < VECTOR_SLOTS; ++slot) {
            const int index = slot * THREADS + static_cast<int>(threadIdx.x);
            const int p = index / VC, vector = index - p * VC, c = vector * L;
            if (p < TP && p0 + p < PIXELS && c0 + c < C)
                body(slot, p0 + p, c0 + c, position(p, c, vector));
        }
    }
    // Visit the groups of G pixels of this thread: body(slot, p, c, position).
    template <int G, class Body>
    DEVICE void groups(Body body) const {
        static_assert(UNIT % G == 0 && TP % G == 0 && PIXELS % G == 0, "a group is never cut");
        constexpr int PER_ROW = TP / G;
#pragma unroll
        for (int slot = 0; slot < group_slots(G); ++slot) {
            const int index = slot * THREADS + static_cast<int>(threadIdx.x);
            const int c = index / PER_ROW, p = (index - c * PER_ROW) * G;
            if (c < TC && p0 + p < PIXELS && c0 + c < C)
                body(slot, p0 + p, c0 + c, position(p, c, c / L));
        }
    }
};
