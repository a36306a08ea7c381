// block_copy.cuh: how gather and scatter find their way between an image and a block stack.
//   stack[b][i][j][c]  <->  image[n][h0 + i][w0 + j][c]    (n, hi, wi) = indices[b]
//                            h0 = off_h + str_h * hi,  w0 = off_w + str_w * wi
// Three ways to move:
//   runs   both sides have the same layout: block rows are contiguous in both, so a group of lanes
//          moves a run of a row with wide accesses and no shared memory.
//   tiles  the layout changes: a tile of pixels x channels is transposed in shared memory (shared_transpose.cuh).
//   staged  pixels are no whole vectors: blocks pass through shared memory (block_staging.cuh).
// Every launch is a persistent grid; the number of active blocks is read on the device.
#pragma once
#include "core/shared_transpose.cuh"

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

// Row b of the indices.
struct Index {
    int n, hi, wi;
};

// b must be under g.M.
DEVICE Index index_of(i64 b, const int* indices) {
    const int* row = indices + 3 * b;
    return Index{row[0], row[1], row[2]};
}

template <int BH, int BW>
DEVICE Corner corner_of(const Index& k, i64 b, i64 count, const Geometry& g) {
    const i64 h0 = g.off_h + g.str_h * k.hi, w0 = g.off_w + g.str_w * k.wi;
    const bool meets = b < count && k.n >= 0 && k.n < g.N && h0 > -BH && h0 < g.H && w0 > -BW && w0 < g.W;
    return meets ? Corner{k.n, h0, w0} : Corner{-1, 0, 0};
}

// b must be under g.M. The row is read before the count is looked at: the two loads overlap.
template <int BH, int BW>
DEVICE Corner corner_of(i64 b, i64 count, const int* indices, const Geometry& g) {
    return corner_of<BH, BW>(index_of(b, indices), b, count, g);
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
// arithmetic is paid once a run and not once a lane. LANES lanes move a run, PER_LANE vectors each.
template <int BH, int BW, int VECTOR, int LANES, int RUNS, int PER_LANE>
struct Runs {
    static constexpr int SPAN = LANES * PER_LANE;
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

    DEVICE Block() {}
    // (Or the size of an image is kept in registers, from block to block.)
    template <bool LAST>
    DEVICE Block(i64 b, const Corner& k, const Steps<LAST>& steps, const Geometry& g)
        : image(computed_once(k.n * g.C) * g.H * g.W + k.h0 * steps.row + k.w0 * static_cast<i64>(steps.pixel)),
          stack(b * g.C * (BH * BW)),
          i_begin(static_cast<int>(clamp(-k.h0, 0, BH))),
          i_end(k.n < 0 ? 0 : static_cast<int>(clamp(g.H - k.h0, 0, BH))),
          j_begin(static_cast<int>(clamp(-k.w0, 0, BW))),
          j_end(static_cast<int>(clamp(g.W - k.w0, 0, BW))) {}

    DEVICE bool whole() const { return ((i_end - i_begin - BH) | (j_end - j_begin - BW)) == 0; }
    DEVICE bool has(int i, int j) const {
        return (i >= i_begin) & (i < i_end) & (j >= j_begin) & (j < j_end);
    }
};

// A tile: PIXELS consecutive pixels of a block, row after row, by CHANNELS.
template <int BH, int BW, int PIXELS, int CHANNELS>
struct Tile {
    static constexpr int AREA = BH * BW, ACROSS = CHANNELS, TILES = ceil_div(AREA, PIXELS);

    Block<BH, BW> block;
    int p0, c0, C;  // its first pixel and channel; channels there are
    bool full;      // it lies inside the block, its channels and the image

    DEVICE Tile() {}
    DEVICE Tile(const Block<BH, BW>& of, int number, int c, i64 channels)
        : block(of), p0(number * PIXELS), c0(c), C(static_cast<int>(channels)),
          full(of.whole() && p0 + PIXELS <= AREA && c0 + CHANNELS <= C) {}

    // Of the tile's pixel p and channel c: its place in the block, whether the block has it, and the image.
    DEVICE int row(int p) const { return (p0 + p) / BW; }
    DEVICE int column(int p) const { return (p0 + p) % BW; }
    DEVICE bool holds(int p, int c) const {
        return full || ((AREA % PIXELS == 0 || p0 + p < AREA) && c0 + c < C);
    }
    DEVICE bool inside(int p, int c) const { return full || (holds(p, c) && block.has(row(p), column(p))); }
};

// For this thread block's share of the tiles of `blocks` stack rows, channel tiles of the same pixels
// first, calls fill(tile); when its copies have come, empty(tile); when all threads have done that and
// the copies of the next tile are on their way, finish(tile). A share is consecutive tiles; or every
// gridDim-th with SPREAD, so that thread blocks that run at the same time read neighbouring pixels of the
// image (for gather that is worth more). The index row of the next block is read a tile ahead.
template <class Shape, bool SPREAD, int BH, int BW, bool LAST, class Fill, class Empty, class Finish>
DEVICE void for_each_tile(i64 blocks, i64 count, const int* indices, const Steps<LAST>& image_step,
                          const Geometry& g, Fill fill, Empty empty, Finish finish) {
    const int channel_tiles = ceil_div(static_cast<int>(g.C), Shape::ACROSS);
    const int listed = static_cast<int>(count);  // not looked at without SPREAD: then all rows are
    const int per_block = channel_tiles * Shape::TILES;
    const i64 tiles = blocks * per_block;
    i64 t = blockIdx.x, step = gridDim.x, end = tiles;
    if (!SPREAD) {
        const i64 share = divide(tiles, gridDim.x), extra = tiles - share * gridDim.x;
        t = blockIdx.x * share + min(static_cast<i64>(blockIdx.x), extra);
        step = 1;
        end = t + share + (blockIdx.x < extra ? 1 : 0);
    }
    if (t >= end) return;
    Shape tile;
    i64 b = divide(t, per_block);
    Index index = index_of(b, indices);
    Block<BH, BW> block;
    for (bool first = true, fresh = true; t < end; t += step, first = false) {
        if (fresh) block = Block<BH, BW>(b, corner_of<BH, BW>(index, b, SPREAD ? listed : b + 1, g), image_step, g);
        const int rest = static_cast<int>(t - b * per_block), number = rest / channel_tiles;
        const Shape next(block, number, (rest - number * channel_tiles) * Shape::ACROSS, g.C);
        if (t + step < end) {
            const i64 ahead = divide(t + step, per_block);
            fresh = ahead != b, b = ahead;
            if (fresh) index = index_of(b, indices);
        }
        fill(next);
        copy_async_commit();
        if (!first) finish(tile);
        tile = next;
        copy_async_wait<0>();
        __syncthreads();
        empty(tile);
        __syncthreads();  // the shared memory may be filled again
    }
    finish(tile);
}
