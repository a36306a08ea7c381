// stack_halo.cu: the blocks of a stack with a rim of pixels around them, from their neighbours.
//   y[m, i, j, c] = x at (i - top, j - left) of block m, c
// A position outside block m lies in its neighbours, which the table finds; what lies in no active block is 0. A position
// outside the image is FILL: 0, the lowest value, or a pixel of the image: the nearest, its mirror image, or that of an
// image that repeats itself. Rows of y past the count are not written, or become 0.
// Python: sbnet_cupy/block_sparse/stack/stack_halo.py, which launches it through stack_launch.py
// A group of LANES threads moves a pixel of y at a time, by vectors V of channels, and has AT_ONCE pixels in flight. Of
// pixels over 128 bytes each thread, which has to find where they lie, moves several vectors.
#include "core/async_copy.cuh"
#include "block_sparse/stack/block_table.cuh"

enum Fill { ZERO, LOWEST, NEAREST, MIRROR, REPEAT };

// The position in an axis of `size` pixels that stands for `at`, or -1 for a fill value.
template <int FILL>
DEVICE int standing_for(int at, int size) {
    if (static_cast<u32>(at) < static_cast<u32>(size)) return at;
    if constexpr (FILL == NEAREST) return at < 0 ? 0 : size - 1;
    if constexpr (FILL == MIRROR) {  // 2 1 [0 1 2 3] 2 1
        const int period = max(2 * (size - 1), 1), rest = at % period, place = rest < 0 ? rest + period : rest;
        return place < size ? place : period - place;
    }
    if constexpr (FILL == REPEAT) {
        const int rest = at % size;
        return rest < 0 ? rest + size : rest;
    }
    return -1;
}

constexpr int NOWHERE = -1;  // in place of a block: a fill value

// An axis of an image in blocks of `each` pixels.
struct Axis {
    int each, size, before;  // pixels: of a block, of the image, of the rim ahead of a block
    bool near;               // whether rims reach no further than the neighbours

    DEVICE Axis(int each, int size, int before, int all)
        : each(each), size(size), before(before), near(before <= each && all - before <= 2 * each) {}

    struct Place {
        int block, pixel;
    };
    // Where the pixel lies that is number i of a block with its rim.
    template <int FILL>
    DEVICE Place place(int block, int i) const {
        const int at = standing_for<FILL>(block * each + i - before, size);
        if (at < 0) return Place{NOWHERE, 0};
        const int here = at - block * each;
        int further = (here >= each) - (here < 0);
        if (FILL > NEAREST || !near) further = static_cast<int>(static_cast<u32>(at) / static_cast<u32>(each)) - block;
        return Place{block + further, here - further * each};
    }
};

// Thread blocks for which a multiprocessor has registers without a spill, where the compiler would make room for more; 0: it
// chooses.
template <int FILL>
constexpr int RESIDENT = DEVICE_ARCHITECTURE != 900 ? 3 : FILL > NEAREST ? 4 : 0;

template <typename V, int LANES, int FILL>
__global__ void __launch_bounds__(256, RESIDENT<FILL>)
    stack_halo(const V* __restrict__ x, const int* __restrict__ bin_counts, const int* __restrict__ indices,
               const int* __restrict__ grid, V* __restrict__ y, i64 M, i64 N, i64 GH, i64 GW, i64 vectors, i64 bh,
               i64 bw, i64 H, i64 W, i64 oh, i64 ow, i64 top, i64 left, i64 lowest, i64 clear_rows) {
    constexpr int AT_ONCE = 4, GROUPS = 256 / LANES;
    const auto narrow = [](i64 value) { return static_cast<int>(value); };
    overlap_launches();
    const int rows = narrow(clamp(*bin_counts, 0, M));
    const BlockTable table{indices, grid, narrow(N), narrow(GH), narrow(GW), rows};
    const int BH = narrow(bh), BW = narrow(bw), OW = narrow(ow), size = narrow(oh * ow);
    const Axis down(BH, narrow(H), narrow(top), narrow(oh)), across(BW, narrow(W), narrow(left), OW);
    const Divisor blocks(size), lines(OW);
    const bool few = size < GROUPS * AT_ONCE, exact = static_cast<i64>(size) * OW < 1ll << 32;
    if (clear_rows) clear_rest<false>(y, static_cast<i64>(rows) * size * vectors, M * size * vectors);
    const int group = threadIdx.x / LANES;
    const i64 pixels = static_cast<i64>(rows) * size;
    Elements<u32, uint4> pattern(zero<uint4>());
    if constexpr (FILL == LOWEST)  // its bytes are repeated in `lowest`
        for (int e = 0; e < 4; ++e) pattern.element[e] = static_cast<u32>(static_cast<u64>(lowest) >> (e % 2 * 32));
    const V fill = *reinterpret_cast<const V*>(&pattern);

    for (i64 p0 = static_cast<i64>(blockIdx.x) * (GROUPS * AT_ONCE); p0 < pixels;
         p0 += static_cast<i64>(gridDim.x) * (GROUPS * AT_ONCE)) {
        const i64 row0 = divide(p0, size);
        const int first = narrow(p0 - row0 * size);
        i64 from[AT_ONCE];  // vectors, -1 for zeros and -2 for the fill value
#pragma unroll
        for (int a = 0; a < AT_ONCE; ++a) {
            const i64 p = p0 + a * GROUPS + group;
            from[a] = -1;
            if (p >= pixels) continue;
            const int number = first + a * GROUPS + group, further = few ? blocks.of(number) : number >= size;
            const int row = narrow(row0) + further, at = number - further * size;
            const int i = exact ? lines.of(at) : at / OW, j = at - i * OW;
            const BlockTable::Block block = table.block(row);
            if (block.n < 0) continue;
            const Axis::Place y = down.template place<FILL>(block.hi, i), x = across.template place<FILL>(block.wi, j);
            if (y.block == NOWHERE || x.block == NOWHERE) {
                from[a] = -2;
                continue;
            }
            const int found = y.block == block.hi && x.block == block.wi ? row : table.row(block.n, y.block, x.block);
            if (found >= 0) from[a] = ((static_cast<i64>(found) * BH + y.pixel) * BW + x.pixel) * vectors;
        }
#pragma unroll 2
        for (int v = recomputed(threadIdx.x) % LANES; v < vectors; v += LANES) {
            V values[AT_ONCE];
#pragma unroll
            for (int a = 0; a < AT_ONCE; ++a)
                values[a] = from[a] >= 0 ? x[from[a] + v] : from[a] == -1 ? zero<V>() : fill;
#pragma unroll
            for (int a = 0; a < AT_ONCE; ++a) {
                const i64 p = p0 + a * GROUPS + group;
                if (p < pixels) y[p * vectors + v] = values[a];
            }
        }
    }
}
