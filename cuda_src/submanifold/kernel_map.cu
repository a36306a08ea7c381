// kernel_map.cu: which row of the source each row of the target reads, at each tap of a window.
//   rows[t, m] = row of the source at  target[m] * stride - padding + r(t) * dilation,  or -1
// READERS: the same relation backwards, row of the source p with  target[m] = p * stride - padding + r(t) * dilation.
// Source: see site_tree.cuh.  Python: sbnet_cupy/submanifold/kernel_map.py; launched by map_kernels.py
// Launch: find_rows has 256 rows of the target in blockIdx.x, and in blockIdx.y the lines of the window: its cells that
// differ on the last axis only. A thread goes along a line. transpose_rows has a thread for each entry.
// Why: the cells of a line lie in one or two leaves, whose word is loaded once; then a neighbour is a bit test.
#include "submanifold/site_tree.cuh"

template <int D, bool READERS>
__global__ void __launch_bounds__(256, 4)
    find_rows(const int* __restrict__ target,    // [M, 1 + D]
              const int* __restrict__ count,     // [1]
              const uint4* __restrict__ words,   // the tree of the source
              const int* __restrict__ order,     // [N]: the row of each site, or null where they are in order
              int* __restrict__ rows,            // [taps, M]
              i64 M, i64 N, i64 top, i64 level_words, i64 levels, GRID_PARAMETERS, WINDOW_PARAMETERS) {
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
    i64 leaf = -1;  // whose word is at hand
    uint4 word = zero<uint4>();
    for (i64 r = 0; r < along; ++r) {
        i64 row = -1;
        if (exists && window.template place_of<READERS>(own[D], r, D - 1, place[D])) {
            const i64 key = grid.key(place);
            if (key >= 0 && key >> 6 != leaf) {
                leaf = key >> 6;
                const i64 at = tree.word_at(words, key, tree.levels - 1);
                word = at < 0 ? zero<uint4>() : words[at];
            }
            if (key >= 0) row = SiteTree::number(word, static_cast<int>(key) & 63);
            if (row >= N) row = -1;
            if (row >= 0 && order) row = order[row];
        }
        rows[(line * along + r) * M + m] = static_cast<int>(row);
    }
}

// transposed[t, rows[t, m]] = m. If several rows of the target read one row at a tap, the last of them counts.
// transposed holds -1 before.
template <typename I>
__global__ void __launch_bounds__(256)
    transpose_rows(const I* __restrict__ rows, I* __restrict__ transposed, i64 M, i64 N) {
    const i64 m = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x, tap = blockIdx.y;
    if (m >= M) return;
    const I row = rows[tap * M + m];
    if (row >= 0 && row < N) atomicMax(transposed + tap * N + row, static_cast<I>(m));
}
