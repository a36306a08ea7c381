// block_copy.cuh: how gather and scatter find their way between an image and a block stack.
//   stack[b][i][j][c]  <->  image[n][h0 + i][w0 + j][c]    (n, hi, wi) = indices[b]
//                            h0 = off_h + str_h * hi,  w0 = off_w + str_w * wi
// Two ways to move:
//   runs   both sides have the same layout: block rows are contiguous in both, so a group of lanes
//          moves a run of a row with wide accesses and no shared memory.
//   tiles  the layout changes: a tile of pixels x channels turns in shared memory.
// Every launch is a persistent grid; the number of active blocks is read on the device.
#pragma once
#include "async_copy.cuh"

// Geometry of one launch; every kernel takes these as trailing arguments.
struct Geometry {
    i64 M;             // rows of the stack
    i64 N, C, H, W;    // image
    i64 off_h, off_w, str_h, str_w;
};

// The corner of a block, or n < 0 where its row is past the count or no pixel of it is in an image.
struct Corner {
    i64 n, h0, w0;
};

// b must be under g.M. The row is read before the count is looked at: the two loads overlap.
template <int BH, int BW>
DEVICE Corner corner_of(i64 b, i64 count, const int* indices, const Geometry& g) {
    const int* row = indices + 3 * b;
    const int n = row[0], hi = row[1], wi = row[2];
    const i64 h0 = g.off_h + g.str_h * hi, w0 = g.off_w + g.str_w * wi;
    const bool meets = b < count && n >= 0 && n < g.N && h0 > -BH && h0 < g.H && w0 > -BW && w0 < g.W;
    return meets ? Corner{n, h0, w0} : Corner{-1, 0, 0};
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
        const i64 row = segments == 1 ? index : divide(index, segments), bp = divide(row, BH);
        const i64 b = planes == 1 ? bp : divide(bp, planes);
        const i64 plane = bp - b * planes;
        const int i = static_cast<int>(row - bp * BH);
        const int first = static_cast<int>(index - row * segments) * SPAN;
        const Corner corner = corner_of<BH, BW>(b, count, indices, g);
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

// Steps through one side of the copy, in elements. Channels are contiguous where LAST. A row of the
// image and a block have fewer than 2^31 elements.
template <bool LAST>
struct Steps {
    int row, pixel;
    i64 channel;
    DEVICE i64 at(int i, int j, int c) const {
        return static_cast<i64>(i) * row + (LAST ? j * pixel + c : j + c * channel);
    }
};

template <bool LAST>
DEVICE Steps<LAST> image_steps(const Geometry& g) {
    const int W = static_cast<int>(g.W), C = static_cast<int>(g.C);
    return LAST ? Steps<LAST>{W * C, C, 1} : Steps<LAST>{W, 1, g.H * g.W};
}

template <bool LAST, int BH, int BW>
DEVICE Steps<LAST> stack_steps(const Geometry& g) {
    const int C = static_cast<int>(g.C);
    return LAST ? Steps<LAST>{BW * C, C, 1} : Steps<LAST>{BW, 1, BH * BW};
}

// A block: where its pixel (0, 0), channel 0 lies on both sides, and which of its pixels the image
// has. The image offset may point outside; only pixels of the image are ever added to it.
template <int BH, int BW>
struct Block {
    i64 image, stack;
    int i_begin, i_end, j_begin, j_end;

    template <bool LAST>
    DEVICE Block(i64 b, const Corner& k, const Steps<LAST>& steps, const Geometry& g)
        : image(k.n * g.C * g.H * g.W + k.h0 * steps.row + k.w0 * static_cast<i64>(steps.pixel)),
          stack(b * g.C * (BH * BW)),
          i_begin(static_cast<int>(clamp(-k.h0, 0, BH))),
          i_end(k.n < 0 ? 0 : static_cast<int>(clamp(g.H - k.h0, 0, BH))),
          j_begin(static_cast<int>(clamp(-k.w0, 0, BW))),
          j_end(static_cast<int>(clamp(g.W - k.w0, 0, BW))) {}

    DEVICE bool has(int i, int j) const {
        return i >= i_begin && i < i_end && j >= j_begin && j < j_end;
    }
};

// A tile of TI x TJ pixels x TC channels in shared memory, channel-major. The thread block fills it
// and empties it, by vectors of channels (where channels are contiguous) or groups of G pixels
// (where pixels are). Units of UNIT pixels are permuted by the channel's vector number, so that
// neither a warp's column accesses nor its row accesses meet in a bank.
template <typename T, typename V, int BH, int BW, int TI, int TJ, int VC, int THREADS>
struct Tile {
    static constexpr int L = Elements<T, V>::COUNT;  // channels per vector
    static constexpr int TC = VC * L, PIXELS = TI * TJ, ROWS = TI, COLUMNS = TJ;
    static constexpr int TILES_J = ceil_div(BW, TJ), TILES = ceil_div(BH, TI) * TILES_J;
    static constexpr int UNIT = sizeof(T) <= 4 ? 4 : 16 / sizeof(T);
    static constexpr int PITCH = ceil_div(PIXELS, 8 * UNIT) * 8 * UNIT;
    static constexpr int VECTOR_SLOTS = ceil_div(PIXELS * VC, THREADS);
    __host__ __device__ static constexpr int group_slots(int G) {
        return ceil_div(TC * ceil_div(PIXELS, G), THREADS);
    }
    static_assert(TJ == BW || TI == 1, "the pixels of a tile are contiguous in the block");

    int i0, j0, c0, C;  // corner of the tile in the block; channels there are
    bool full;          // the tile lies inside the block and the image, and has all its channels

    DEVICE Tile(int i, int j, int c, i64 channels, const Block<BH, BW>& block)
        : i0(i), j0(j), c0(c), C(static_cast<int>(channels)),
          full(c + TC <= C && i + TI <= BH && j + TJ <= BW && block.has(i, j) &&
               block.has(i + TI - 1, j + TJ - 1)) {}

    // Position in shared memory of the tile's pixel p in its channel c = vector * L + e.
    DEVICE static int position(int p, int c, int vector) {
        return c * PITCH + ((p / UNIT) ^ (vector & 7)) * UNIT + p % UNIT;
    }
    DEVICE bool holds(int i, int j, int c) const {
        return full || (i0 + i < BH && j0 + j < BW && c0 + c < C);
    }

    // Visit the vectors of this thread in any tile: body(slot, i, j, c, position), in coordinates
    // of the tile. The position of the vector's element e is e * PITCH further.
    template <class Body>
    DEVICE static void vectors(Body body) {
        const int thread = recomputed(threadIdx.x);
#pragma unroll
        for (int slot = 0; slot < VECTOR_SLOTS; ++slot) {
            const int index = slot * THREADS + thread;
            const int p = index / VC, vector = index - p * VC, c = vector * L;
            if (p < PIXELS) body(slot, p / TJ, p % TJ, c, position(p, c, vector));
        }
    }
    // Visit the groups of G pixels of this thread: body(slot, i, j, c, position).
    template <int G, class Body>
    DEVICE static void groups(Body body) {
        static_assert(UNIT % G == 0 && PIXELS % G == 0, "a group is never cut by the tile");
        static_assert(TI == 1 ? BW % G == 0 : BH * BW % G == 0, "nor by the block");
        constexpr int PER_ROW = PIXELS / G;
        const int thread = recomputed(threadIdx.x);
#pragma unroll
        for (int slot = 0; slot < group_slots(G); ++slot) {
            const int index = slot * THREADS + thread;
            const int c = index / PER_ROW, p = (index - c * PER_ROW) * G;
            if (c < TC) body(slot, p / TJ, p % TJ, c, position(p, c, c / L));
        }
    }
};

// Calls body(block, tile) for this thread block's share of the tiles of `blocks` stack rows, channel
// tiles of the same pixels first. A share is consecutive tiles, so that a block's corner is looked
// up once; or every gridDim-th with SPREAD and several channel tiles, so that thread blocks that run
// at the same time read whole pixels together (for gather that is worth more).
template <class Shape, bool SPREAD, int BH, int BW, bool LAST, class Body>
DEVICE void for_each_tile(i64 blocks, i64 count, const int* indices, const Steps<LAST>& image_step,
                          const Geometry& g, Body body) {
    const int channel_tiles = ceil_div(static_cast<int>(g.C), Shape::TC);
    const int per_block = channel_tiles * Shape::TILES;
    const i64 tiles = blocks * per_block;
    i64 t = blockIdx.x, step = gridDim.x, end = tiles;
    if (!SPREAD || channel_tiles == 1) {
        const i64 share = divide(tiles, gridDim.x), extra = tiles - share * gridDim.x;
        t = blockIdx.x * share + min(static_cast<i64>(blockIdx.x), extra);
        step = 1;
        end = t + share + (blockIdx.x < extra ? 1 : 0);
    }
    Block<BH, BW> block(-1, Corner{-1, 0, 0}, image_step, g);
    for (i64 current = -1; t < end; t += step) {
        const i64 b = divide(t, per_block);
        if (b != current)
            block = Block<BH, BW>(b, corner_of<BH, BW>(b, count, indices, g), image_step, g);
        current = b;
        const int rest = static_cast<int>(t - b * per_block), place = rest / channel_tiles;
        body(block, Shape(place / Shape::TILES_J * Shape::ROWS, place % Shape::TILES_J * Shape::COLUMNS,
                          (rest - place * channel_tiles) * Shape::TC, g.C, block));
    }
}
