// block_table.cu: the row of the active block at each place of a grid of blocks, or -1.
//   grid[n, hi, wi] = the largest m below the count with indices[m] == (n, hi, wi), or -1
// Source: the inverse of the list of Ren et al. 2018, section 3.1.
// Python: sbnet_cupy/block_sparse/stack/block_table.py
// Launch: THREADS threads; each thread block owns `share` places, fills them with -1, and then reads the
//         whole list for rows that lie there. One thread block serves the networks of ordinary images.
// Why:    fill and scatter in one launch need no barrier across the GPU, and the list may be in any order:
//         a row that is no place of the grid writes nothing, and of equal rows the largest stays.
#include "core/async_copy.cuh"

template <int THREADS>
__global__ void __launch_bounds__(THREADS)
    block_table(const int* __restrict__ count,    // [1]
                const int* __restrict__ indices,  // [rows, 3]
                int* __restrict__ grid,           // [N, hb, wb]
                i64 rows, i64 N, i64 hb, i64 wb, i64 share) {
    overlap_launches();
    const i64 first = blockIdx.x * share;
    const i64 end = min(first + share, N * hb * wb);
    for (i64 place = first + threadIdx.x; place < end; place += THREADS) grid[place] = -1;
    __syncthreads();
    const i64 active = clamp(count[0], 0, rows);
    for (i64 row = threadIdx.x; row < active; row += THREADS) {
        const i64 n = indices[3 * row], hi = indices[3 * row + 1], wi = indices[3 * row + 2];
        if (n < 0 || n >= N || hi < 0 || hi >= hb || wi < 0 || wi >= wb) continue;
        const i64 place = (n * hb + hi) * wb + wi;
        if (place >= first && place < end) atomicMax(grid + place, static_cast<int>(row));
    }
}
