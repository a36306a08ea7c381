// kernel_map.cu: which row of the source each row of the target reads, at each tap of a window.
//   rows[t, m] = row of the source at  target[m] * stride - padding + r(t) * dilation,  or -1
// READERS: the same relation backwards, row of the source p with  target[m] = p * stride - padding + r(t) * dilation.
// Source: see site_tree.cuh.  Python: sbnet_cupy/submanifold/kernel_map.py; launched by map_kernels.py
// Launch: find_near_rows has a thread for each row of the target: for many rows, and windows that reach over two leaves on
// each axis at most. find_rows has 256 rows of the target in blockIdx.x, and in blockIdx.y the lines of the window: its cells that
// differ on the last axis only. A thread goes along a line. transpose_rows has a thread for each entry.
// Why: for many rows the words of all leaves that a window meets are loaded once; then a neighbour is a bit test. For few, some
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

// The same where the places that a row reads lie in two leaves on each axis at most.
template <int D, bool READERS, int THREADS>
__global__ void __launch_bounds__(THREADS)
    find_near_rows(const int* __restrict__ target, const int* __restrict__ count, const uint4* __restrict__ words,
                   const int* __restrict__ order, int* __restrict__ rows,  // as for find_rows
                   i64 M, i64 N, i64 top, i64 level_words, i64 levels, GRID_PARAMETERS, WINDOW_PARAMETERS) {
    overlap_launches(target, count, words, order);
    constexpr int LEAVES = 1 << D;
    __shared__ uint4 found[LEAVES][THREADS];  // the word of each leaf; a thread reads its own
    const Grid<D> grid{GRID};
    const Window window{WINDOW};
    const SiteTree tree{top, level_words, static_cast<int>(levels)};
    const i64 m = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    if (m >= M) return;
    i64 own[D + 1], leaf[D + 1];  // the leaves at the lower end
    const bool exists = Rows<int, D>{target, count}.load(m, own);
    bool across[D + 1] = {};  // whether places lie beyond them
    leaf[0] = own[0];
#pragma unroll
    for (int axis = 0; axis < D; ++axis) {
        i64 low, high;
        window.template ends_of<READERS>(own[axis + 1], axis, low, high);
        leaf[axis + 1] = low >> Grid<D>::low(axis + 1);
        across[axis + 1] = high >> Grid<D>::low(axis + 1) > leaf[axis + 1];
    }
    i64 keys[LEAVES], at[LEAVES];
#pragma unroll
    for (int i = 0; i < LEAVES; ++i) {
        i64 place[D + 1];
        bool here = exists;
        place[0] = leaf[0];
#pragma unroll
        for (int axis = 1; axis <= D; ++axis) {
            const int beyond = i >> (D - axis) & 1;
            here = here && (!beyond || across[axis]);
            place[axis] = (leaf[axis] + beyond) * (1 << Grid<D>::low(axis));  // also where they are negative
        }
        keys[i] = here ? grid.key(place) : -1;
        at[i] = keys[i] < 0 ? -1 : keys[i] >> (6 * tree.levels);
    }
    for (int level = 0; level < tree.levels - 1; ++level)
#pragma unroll
        for (int i = 0; i < LEAVES; ++i)
            if (at[i] >= 0) at[i] = SiteTree::number(words[tree.first(level) + at[i]], tree.bit_of(keys[i], level));
#pragma unroll
    for (int i = 0; i < LEAVES; ++i)
        found[i][threadIdx.x] = at[i] < 0 ? zero<uint4>() : words[tree.first(tree.levels - 1) + at[i]];

    // Add where cell r of the window lies on an axis to the number of its leaf and to the cell in it; whether it reads there.
    const auto locate = [&](int axis, i64 r, int& number, int& cell) {
        constexpr int AXIS_BITS[] = {Grid<D>::low(1), Grid<D>::low(D < 2 ? 1 : 2), Grid<D>::low(D < 3 ? 1 : 3), Grid<D>::low(D)};
        const int bits = AXIS_BITS[axis];
        i64 place;
        if (!window.template place_of<READERS>(own[axis + 1], r, axis, place)) return false;
        number = number << 1 | static_cast<int>((place >> bits) - leaf[axis + 1]);
        cell = cell << bits | (static_cast<int>(place) & ((1 << bits) - 1));
        return true;
    };
    int r[D] = {};
    i64 taps = 1;
#pragma unroll
    for (int axis = 0; axis < D; ++axis) taps *= window.kernel[axis];
    for (i64 tap = 0; tap < taps;) {
        bool reads = exists;
        int number = 0, cell = 0;  // of the leaf; in it
#pragma unroll
        for (int axis = 0; axis < D - 1; ++axis) reads &= locate(axis, r[axis], number, cell);
        for (int last = 0; last < window.kernel[D - 1]; ++last, ++tap) {
            int its = number, its_cell = cell, row = -1;
            if (reads && locate(D - 1, last, its, its_cell)) {
                const i64 site = SiteTree::number(found[its][threadIdx.x], its_cell);
                if (site >= 0 && site < N) row = order ? order[site] : static_cast<int>(site);
            }
            rows[tap * M + m] = row;
        }
#pragma unroll
        for (int axis = D - 2; axis >= 0; --axis) {
            if (++r[axis] < window.kernel[axis]) break;
            r[axis] = 0;
        }
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
