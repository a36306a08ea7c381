// block_copy.cuh: how gather and scatter find their way between an image and a block stack.
//   stack[b][i][j][c]  <->  image[n][h0 + i][w0 + j][c]    (n, hi, wi) = indices[b]
//                            h0 = off_h + str_h * hi,  w0 = off_w + str_w * wi
// Two ways to move:
//   runs   both sides have the same layout: block rows are contiguous in both, so a group of lanes
//          moves a run of a row with wide accesses and no shared memory.
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
// has a single plane of C channels). It has `last` vectors in the stack; those of [begin, end) lie
// inside the image. `channel` is that of its first element.
struct Run {
    i64 image, stack;
    int last, begin, end, channel;
};

// A warp finds `batch` runs at once, one a lane, and then its lanes move them together: the index
// arithmetic is paid once a run and not once a lane. LANES lanes move a run, COLS vectors each.
template <int BH, int BW, int VECTOR, int LANES, int RUNS, int COLS>
struct Runs {
    static constexpr int SPAN = LANES * COLS;
    static constexpr int AT_ONCE = 32 / LANES * RUNS;  // runs that a warp has in flight
    static_assert(SPAN < 1024 && AT_ONCE <= 32, "bounds are packed into 10 bits, batches into a warp");

    i64 planes;
    int pixel_bytes, element_bytes, segments;

    DEVICE Runs(i64 planes_, i64 pixel_bytes_, i64 element_bytes_)
        : planes(planes_),
          pixel_bytes(static_cast<int>(pixel_bytes_)),
          element_bytes(static_cast<int>(element_bytes_)),
          segments(ceil_div(in_vectors(BW), SPAN)) {}

    DEVICE int in_vectors(i64 pixels) const { return static_cast<int>(pixels) * pixel_bytes / VECTOR; }

    DEVICE i64 total(i64 blocks) const { return blocks * planes * BH * segments; }

    // Run number `index` of [b][plane][i][segment], below total(g.M).
    DEVICE Run find(i64 index, i64 count, const int* indices, const Geometry& g) const {
        const i64 row = divide(index, segments), bp = divide(row, BH), b = divide(bp, planes);
        const i64 plane = bp - b * planes;
        const int i = static_cast<int>(row - bp * BH);
        const int first = static_cast<int>(index - row * segments) * SPAN;
        const Corner corner = corner_of(b, count, indices, g);
        const int width = in_vectors(BW);
        Run run{0, row * width + first, min(SPAN, width - first), 0, 0, 0};
        const i64 h = corner.h0 + i;
        if (corner.n >= 0 && h >= 0 && h < g.H) {
            const i64 pixel = ((corner.n * planes + plane) * g.H + h) * g.W + corner.w0;
            run.image = pixel * pixel_bytes / VECTOR + first;
            run.begin = min(max(in_vectors(clamp(-corner.w0, 0, BW)) - first, 0), run.last);
            run.end = min(max(in_vectors(clamp(g.W - corner.w0, 0, BW)) - first, 0), run.last);
        }
        const u32 element = static_cast<u32>(first) * (VECTOR / element_bytes);
        run.channel = static_cast<int>(planes > 1 ? plane : element % static_cast<u32>(g.C));
        return run;
    }

    // The run that lane `source` found.
    DEVICE static Run broadcast(const Run& mine, int source) {
        const u32 packed = static_cast<u32>(mine.last) | static_cast<u32>(mine.begin) << 10 |
                           static_cast<u32>(mine.end) << 20;
        const u32 bounds = __shfl_sync(0xffffffffu, packed, source);
        return Run{__shfl_sync(0xffffffffu, mine.image, source),
                   __shfl_sync(0xffffffffu, mine.stack, source),
                   static_cast<int>(bounds & 1023u),
                   static_cast<int>(bounds >> 10 & 1023u),
                   static_cast<int>(bounds >> 20),
                   __shfl_sync(0xffffffffu, mine.channel, source)};
    }

    // Calls body(run[RUNS], lane within the group) for this thread's share of the first `runs`.
    template <class Body>
    DEVICE void visit(i64 runs, i64 batch, i64 count, const int* indices, const Geometry& g,
                      Body body) const {
        const int lane = threadIdx.x & 31, group = lane / LANES;
        const i64 warps_per_block = blockDim.x / 32, stride = gridDim.x * warps_per_block * batch;
        for (i64 base = (blockIdx.x * warps_per_block + threadIdx.x / 32) * batch; base < runs;
             base += stride) {
            Run mine{0, 0, 0, 0, 0, 0};
            if (lane < batch && base + lane < runs) mine = find(base + lane, count, indices, g);
            for (int pass = 0; pass < batch; pass += AT_ONCE) {
                Run run[RUNS];
#pragma unroll
                for (int q = 0; q < RUNS; ++q) run[q] = broadcast(mine, pass + q * (32 / LANES) + group);
                body(run, lane % LANES);
            }
        }
    }
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
