// block_staging.cuh: blocks whose pixels are no whole vectors, moved by 16 bytes all the same.
//   StagedBlock  the image side of a block in shared memory: line by line, each as far from a multiple of 16
//                bytes as it is in the image, so that all but its ends can be moved 16 bytes at a time
//   Walk         the elements of a block in the order of one side, c fastest (LAST) or j, and where the other has them
// A line is what is contiguous in the image: a row of the block, of one channel if that is NCHW.
#pragma once

#include "block_sparse/gather_scatter/block_copy.cuh"

// Bytes to the next row, pixel and channel.
struct ByteSteps {
    int row, pixel, channel;
};

// An element of a block, and where it is on the other side, in bytes.
struct Spot {
    int i, j, c, at;
};

// The elements of a block, in order, from one of them on; MOST of them at most.
template <bool LAST, int BH, int BW, int C, int MOST>
struct Walk {
    const ByteSteps& steps;
    int first;
    Spot spot;  // of the first

    DEVICE Walk(int first_, const ByteSteps& steps_) : steps(steps_), first(first_), spot(find(first_)) {}

    DEVICE Spot find(u32 element) const {
        const u32 row = LAST ? element / (C * BW) : element / BW;
        const int i = LAST ? row : row % BH, j = LAST ? element / C % BW : element % BW, c = LAST ? element % C : row / BH;
        return Spot{i, j, c, i * steps.row + j * steps.pixel + c * steps.channel};
    }
    DEVICE Spot operator[](int e) const {
        if constexpr (MOST > (LAST ? C * BW : BW)) return find(first + e);  // over several rows
        Spot s = spot;
        if (LAST) {
            const int pixels = static_cast<u32>(s.c + e) / C;
            s.c += e - pixels * C, s.j += pixels;
            s.at += e * steps.channel + pixels * (steps.pixel - C * steps.channel);
        } else {
            s.j += e, s.at += e * steps.pixel;
        }
        const bool over = s.j >= BW, past = over && !LAST && s.i + 1 == BH;  // into the next row, plane
        const int plane = spot.i + 1 == BH && !LAST ? steps.channel - BH * steps.row : 0;
        s.at += over ? steps.row - BW * steps.pixel + plane : 0;
        s.j -= over ? BW : 0;
        s.i = past ? 0 : s.i + over;
        s.c += past;
        return s;
    }
};

// A block of the stack: dense.
template <bool LAST, typename T, int BH, int BW, int C>
DEVICE ByteSteps dense_steps() {
    constexpr int ITEM = sizeof(T);
    return LAST ? ByteSteps{BW * C * ITEM, C * ITEM, ITEM} : ByteSteps{BW * ITEM, ITEM, BH * BW * ITEM};
}

template <bool LAST, typename T, int BH, int BW, int C>
struct StagedBlock {
    static constexpr int ITEM = sizeof(T), LANES = 16 / ITEM;
    static constexpr int LINES = LAST ? BH : C * BH, PIXEL = LAST ? C * ITEM : ITEM, LENGTH = BW * PIXEL;
    static constexpr int CHUNKS = ceil_div(LENGTH + 16 - ITEM, 16);  // of 16 bytes, that a line may touch
    // Bytes from a line to the next, besides what the image's rows add to the misalignment: no two lines
    // touch the same chunk.
    static constexpr int APART = ceil_div(LENGTH, 16) * 16 + 16, PLANE = ceil_div(BH * (APART + 15), 16) * 16;
    static constexpr int BYTES = 16 + (LAST ? PLANE : C * (PLANE + 16));
    static_assert(LANES * ITEM == 16, "chunks hold whole elements");

    const u8* images;
    i64 last;         // where the last 16 bytes of the images begin
    int row;          // bytes there
    i64 plane;
    ByteSteps steps;  // here

    DEVICE StagedBlock(const T* x, const Geometry& g)
        : images(reinterpret_cast<const u8*>(x)), last(g.N * g.C * g.H * g.W * ITEM - 16),
          row(static_cast<int>(g.W) * PIXEL), plane(LAST ? 0 : g.H * row),
          steps{APART + (row & 15), PIXEL, LAST ? ITEM : PLANE + static_cast<int>(plane & 15)} {
        last = computed_once(last);
    }

    // How far an address this many bytes into the images is past a multiple of 16.
    DEVICE int past(i64 bytes) const { return static_cast<int>(reinterpret_cast<u64>(images) + bytes) & 15; }
    // Where the first line of a block begins in shared memory.
    DEVICE int first(const Block<BH, BW>& block) const { return past(block.image * ITEM); }

    // 16 bytes that a line of block `which` touches, from byte `low` of the line on; those from `begin` to
    // `end` are the line's, and lie in the image.
    struct Chunk {
        int which, line, low, begin, end;
        int shared;   // where it lies in shared memory
        i64 image;    // and in the images
        bool inside;  // all that is the line's lies in the image
        DEVICE bool whole() const { return begin == low && end == low + 16; }
    };

    // Visit this thread's chunks of so many blocks.
    template <int THREADS, class Body>
    DEVICE void for_each_chunk(const Block<BH, BW>* blocks, int count, Body body) const {
        const u32 all = count * (LINES * CHUNKS);
#pragma unroll 1
        for (u32 index = threadIdx.x; index < all; index += THREADS) {
            const u32 number = index / CHUNKS;
            Chunk chunk;
            chunk.which = number / LINES, chunk.line = number % LINES;
            const int i = LAST ? chunk.line : chunk.line % BH, c = LAST ? 0 : chunk.line / BH;
            const Block<BH, BW>& block = blocks[chunk.which];
            const i64 start = block.image * ITEM + static_cast<i64>(i) * row + (LAST ? 0 : c * plane);
            chunk.low = static_cast<int>(index % CHUNKS) * 16 - past(start);
            if (chunk.low >= LENGTH) continue;
            chunk.image = start + chunk.low;
            chunk.shared = chunk.which * BYTES + first(block) + i * steps.row + chunk.low + (LAST ? 0 : c * steps.channel);
            const int begin = max(chunk.low, 0), end = min(chunk.low + 16, LENGTH);
            chunk.begin = begin, chunk.end = end;
            if (!block.whole()) {
                const bool any = i >= block.i_begin && i < block.i_end;
                chunk.begin = max(begin, block.j_begin * PIXEL);
                chunk.end = any ? min(end, block.j_end * PIXEL) : chunk.begin;
            }
            chunk.inside = chunk.begin == begin && chunk.end == end;
            body(chunk);
        }
    }

    // Begin to copy the lines of so many blocks; zeros outside the image, if they are wanted.
    template <int THREADS, bool ZEROS>
    DEVICE void fill(u8* shared, const Block<BH, BW>* blocks, int count) const {
        for_each_chunk<THREADS>(blocks, count, [&](const Chunk& chunk) {
            u8* const to = shared + chunk.shared;
            const u8* const from = images + chunk.image;
            if (chunk.inside && chunk.image >= 0 && chunk.image <= last) {
                copy_async_16(to, from, true);  // what lies beside the line comes along
            } else if (ZEROS || chunk.begin < chunk.end) {
#pragma unroll
                for (int e = 0; e < LANES; ++e) {
                    const int at = chunk.low + e * ITEM;
                    T value = zero<T>();
                    if (at >= chunk.begin && at < chunk.end) value = *reinterpret_cast<const T*>(from + e * ITEM);
                    *reinterpret_cast<T*>(to + e * ITEM) = value;
                }
            }
        });
    }
};

// For this thread block's share of `rows` rows of the stack, GROUP at a time: fill(blocks, first row, how
// many); when all copies have come, empty of the same. While they come, the next blocks are found.
// `blocks` are 2 * GROUP in shared memory.
template <int GROUP, bool LAST, int BH, int BW, class Fill, class Empty>
DEVICE void for_each_group(Block<BH, BW>* blocks, i64 rows, i64 count, const int* indices, const Geometry& g,
                           Fill fill, Empty empty) {
    const auto find = [&](Block<BH, BW>* to, i64 first) {
        const i64 b = first + threadIdx.x;
        if (threadIdx.x < GROUP && b < rows)
            to[threadIdx.x] = Block<BH, BW>(b, corner_of<BH, BW>(b, count, indices, g), image_steps<LAST>(g), g);
    };
    const i64 step = static_cast<i64>(gridDim.x) * GROUP;
    i64 row = static_cast<i64>(blockIdx.x) * GROUP;
    find(blocks, row);
    __syncthreads();
    for (int now = 0; row < rows; row += step, now = GROUP - now) {
        const int held = static_cast<int>(min(static_cast<i64>(GROUP), rows - row));
        fill(blocks + now, row, held);
        copy_async_commit();
        find(blocks + (GROUP - now), row + step);
        copy_async_wait<0>();
        __syncthreads();
        empty(blocks + now, row, held);
        __syncthreads();  // the memory may be filled again
    }
}
