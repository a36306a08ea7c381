// kernel_map.cu: which row of the source each row of the target reads, at each tap of a window.
//   rows[t, m] = row of the source at  target[m] * stride - padding + r(t) * dilation,  or -1
// READERS: the same relation backwards, row of the source p with  target[m] = p * stride - padding + r(t) * dilation.
// Source: see site_tree.cuh.  Python: sbnet_cupy/submanifold/kernel_map.py; launched by map_kernels.py
// Launch: find_near_rows has ROWS rows of the target in a thread block: for many rows, and windows of several places that reach
// over two leaves on each axis at most. find_rows has 256 rows of the target in blockIdx.x, and in blockIdx.y the lines of the
// window: its cells that differ on the last axis only. A thread goes along a line. transpose_rows has a thread for each entry.
// Why: for many rows the words of all leaves that a window meets are loaded once; then a line is a run of bits. For few, some
// places of a line are looked up at once, each by loads of its own: a thread waits for one load a level.
#include "submanifold/site_tree.cuh"

constexpr int TOGETHER = 3;  // places of a line

template <int D, bool READERS>
__global__ void __launch_bounds__(256, 4)
    find_rows(const int* __restrict__ target,    // [M, 1 + D]
              const int* __restrict__ count,     // [1]
              const uint4* __restrict__ words,   // the tree of the source
              const int* __restrict__ order,     // [N]: the row of each site, or null where they are in order
              int* __restrict__ rows,            // [taps, M]
              i64 M, i64 N, i64 top, i64 level_words, i64 levels, GRID_PARAMETERS, WINDOW_PARAMETERS) {
    overlap_launches(target, count, words, order);
    const Grid<D> grid{GRID};
    const Window window{WINDOW};
    const SiteTree tree{top, level_words, static_cast<int>(levels)};
    const i64 m = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x, line = blockIdx.y, along = window.kernel[D - 1];
    if (m >= M) return;
    i64 own[D + 1], place[D + 1];
    bool exists = Rows<int, D>{target, count}.load(m, own);
    place[0] = own[0];
    i64 rest = line;
#pragma unroll
    for (int axis = D - 2; axis >= 0; --axis) {
        const i64 before = divide(rest, window.kernel[axis]), r = rest - before * window.kernel[axis];
        rest = before;
        exists = exists && window.template place_of<READERS>(own[axis + 1], r, axis, place[axis + 1]);
    }
    for (i64 first = 0; first < along; first += TOGETHER) {
        i64 keys[TOGETHER], at[TOGETHER];  // the word that has a place, in the level at hand
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const bool reads = exists && first + i < along && window.template place_of<READERS>(own[D], first + i, D - 1, place[D]);
            keys[i] = reads ? grid.key(place) : -1;
            at[i] = keys[i] < 0 ? -1 : keys[i] >> (6 * tree.levels);
        }
        for (int level = 0; level < tree.levels; ++level) {
            uint4 word[TOGETHER];
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) word[i] = words[tree.first(level) + (at[i] < 0 ? 0 : at[i])];
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i)
                at[i] = at[i] < 0 ? -1 : SiteTree::number(word[i], tree.bit_of(keys[i], level));
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i)
            if (at[i] >= N) at[i] = -1;
        if (order && N > 0) {
            int row[TOGETHER];
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) row[i] = order[at[i] < 0 ? 0 : at[i]];
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i)
                if (at[i] >= 0) at[i] = row[i];
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i)
            if (first + i < along) rows[(line * along + first + i) * M + m] = static_cast<int>(at[i]);
    }
}

// The same, but for READERS, where the places that a row reads lie in two leaves on each axis at most. For two axes and more.
//   SLICES   threads for each row: the leaves are dealt to them, then runs of TOGETHER cells of the window's lines
template <int D, int ROWS, int SLICES>
__global__ void __launch_bounds__(ROWS * SLICES)
    find_near_rows(const int* __restrict__ target, const int* __restrict__ count, const uint4* __restrict__ words,
                   const int* __restrict__ order, int* __restrict__ rows,  // as for find_rows
                   i64 M, i64 N, i64 top, i64 level_words, i64 levels, GRID_PARAMETERS, WINDOW_PARAMETERS) {
    overlap_launches(target, count, words, order);
    constexpr int LEAVES = 1 << D, EACH = (LEAVES + SLICES - 1) / SLICES;
    static_assert(D > 1, "a line of a leaf fits 32 bits");
    constexpr int LOW[] = {Grid<D>::low(1), Grid<D>::low(D < 2 ? 1 : 2), Grid<D>::low(D < 3 ? 1 : 3), Grid<D>::low(D)};
    constexpr int LAST = D - 1, CELLS = 1 << Grid<D>::low(D);
    DYNAMIC_SHARED(uint4, found);  // [LEAVES][ROWS]: the word of each leaf
    const Grid<D> grid{GRID};
    const Window window{WINDOW};
    const SiteTree tree{top, level_words, static_cast<int>(levels)};
    const int t = threadIdx.x % ROWS, slice = threadIdx.x / ROWS;
    const i64 m = static_cast<i64>(blockIdx.x) * ROWS + t;
    i64 own[D + 1] = {};
    const bool exists = m < M && Rows<int, D>{target, count}.load(m, own) && own[0] < grid.limit[0];
    // Of the leaf that has the lowest place: its number. On each axis: the cell of that place in it; whether the leaf and the next
    // one are in the grid and may be read; numbers from one to the next.
    i64 number = own[0], step[D];
    int begin[D];
    bool inside[D][2];
#pragma unroll
    for (int axis = 0; axis < D; ++axis) {
        const i64 reach = (window.kernel[axis] - 1) * window.dilation[axis];
        const i64 low = own[axis + 1] * window.stride[axis] - window.padding[axis];
        const int leaf = static_cast<int>(low) == low ? static_cast<int>(low) >> LOW[axis] : -2;  // or far outside
        const u32 leaves = static_cast<u32>(grid.leaves[axis + 1]);
        begin[axis] = static_cast<int>(low) & ((1 << LOW[axis]) - 1);
        inside[axis][0] = static_cast<u32>(leaf) < leaves;
        inside[axis][1] = (begin[axis] + static_cast<int>(reach)) >> LOW[axis] && static_cast<u32>(leaf + 1) < leaves;
        number = number * leaves + leaf;
    }
    step[LAST] = 1;
#pragma unroll
    for (int axis = D - 2; axis >= 0; --axis) step[axis] = step[axis + 1] * grid.leaves[axis + 2];

    i64 numbers[EACH], at[EACH];  // of leaves; the word that has one, in the level at hand
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int which = slice + i * SLICES;
        bool here = exists && which < LEAVES;
        numbers[i] = number;
#pragma unroll
        for (int axis = 0; axis < D; ++axis) {
            const bool next = which >> (LAST - axis) & 1;
            here &= next ? inside[axis][1] : inside[axis][0];
            if (next) numbers[i] += step[axis];
        }
        at[i] = here ? numbers[i] >> 6 * (tree.levels - 1) : -1;
    }
#pragma unroll 1
    for (int level = 0; level < tree.levels - 1; ++level)
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (at[i] >= 0)
                at[i] = SiteTree::number(words[tree.first(level) + at[i]],
                                         static_cast<int>(numbers[i] >> 6 * (tree.levels - 2 - level)) & 63);
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (slice + i * SLICES < LEAVES)
            found[(slice + i * SLICES) * ROWS + t] = at[i] < 0 ? zero<uint4>() : words[tree.first(tree.levels - 1) + at[i]];
    if constexpr (SLICES > 1) __syncthreads();
    if (m >= M) return;

    // Where cell r of the window lies on an axis, from where the leaf begins.
    const auto place_of = [&](int axis, int r) { return begin[axis] + r * static_cast<int>(window.dilation[axis]); };
    const int along = static_cast<int>(window.kernel[LAST]), runs = (along + TOGETHER - 1) / TOGETHER;
    int r[D + 1] = {};  // one past the last line; the cells of a line on the other axes; and a run of it
    const auto advance = [&](int by) {
        r[D] += by;
#pragma unroll
        for (int axis = D; axis > 0; --axis) {
            const int size = axis == D ? runs : static_cast<int>(window.kernel[axis - 1]);
#pragma unroll 1
            for (; r[axis] >= size; r[axis] -= size) ++r[axis - 1];
        }
    };
    for (advance(slice); r[0] == 0; advance(SLICES)) {
        int leaf = 0, cell = 0, line = 0;
#pragma unroll
        for (int axis = 0; axis < LAST; ++axis) {
            const int place = place_of(axis, r[axis + 1]);
            leaf = leaf << 1 | place >> LOW[axis];
            cell = cell << LOW[axis] | (place & ((1 << LOW[axis]) - 1));
            line = line * static_cast<int>(window.kernel[axis]) + r[axis + 1];
        }
        u32 bits[2];  // a line of cells in each of two leaves beside each other on the last axis; others follow
        int before[2];  // sites before them
#pragma unroll
        for (int next = 0; next < 2; ++next) {
            const uint4 word = found[(2 * leaf + next) * ROWS + t];
            const u64 set = SiteTree::bits(word);
            const int at_cell = cell * CELLS;
            bits[next] = static_cast<u32>(set >> at_cell);
            before[next] = static_cast<int>(word.z) + __popcll(set & ((1ull << at_cell) - 1));
        }
        const int first = r[D] * TOGETHER;
        int sites[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const int place = place_of(LAST, first + i);
            const bool next = place >> LOW[LAST];
            const u32 its_bits = next ? bits[1] : bits[0], bit = 1u << (place & (CELLS - 1));
            sites[i] = (next ? before[1] : before[0]) + __popc(its_bits & (bit - 1));
            if (first + i >= along || !(its_bits & bit) || sites[i] >= N) sites[i] = -1;
        }
        if (order) {
            int given[TOGETHER];
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) given[i] = sites[i] < 0 ? -1 : order[sites[i]];
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) sites[i] = given[i];
        }
        int* its_rows = rows + static_cast<u64>(static_cast<u32>(line * along + first)) * static_cast<u32>(M) + m;
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i, its_rows += M)
            if (first + i < along) *its_rows = sites[i];
    }
}

// transposed[t, rows[t, m]] = m. If several rows of the target read one row at a tap, the last of them counts.
// transposed holds -1 before.
template <typename I>
__global__ void __launch_bounds__(256)
    transpose_rows(const I* __restrict__ rows, I* __restrict__ transposed, i64 M, i64 N) {
    overlap_launches(rows);
    const i64 m = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x, tap = blockIdx.y;
    if (m >= M) return;
    const I row = rows[tap * M + m];
    if (row >= 0 && row < N) atomicMax(transposed + tap * N + row, static_cast<I>(m));
}
