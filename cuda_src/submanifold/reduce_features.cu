// reduce_features.cu: the rows of a list that belong to each site, in their order, and sums of their features.
//   order[j], site[j]    the rows of the list and their sites, sorted by site; rows with no site come last, in any order, with the
//                        number `sites`
//   starts[s]            where the rows of site s begin; those of the last one end where the next would begin
//   out[s, c] = sum or mean of features[order[j], c] over the rows j of site s
// Python: sbnet_cupy/submanifold/reduce_features.py and row_lists.py
// Launches: start_lists of SITES sites for each thread block; list_rows and order_lists, a thread for each row;
//   sum_rows, a warp for each site, with LANES channels side by side
// Why: rows come into the list of their site in any order, by atomics, and are put in order there: most sites have few rows. So no
// sum depends on the order in which threads run. A site with r rows takes r * r comparisons, spread over the GPU, to put in order,
// and r additions one after the other.
#include "core/async_copy.cuh"
#include "submanifold/running_sum.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, PASSES = 8, SITES = THREADS * PASSES;
constexpr u32 EVERY = 0xffffffffu;

// Where the rows of each site begin, and those with no site.
template <typename I>
__global__ void __launch_bounds__(THREADS)
    start_lists(const I* __restrict__ numbers,  // [sites]: how many rows each has, less one
                u64* __restrict__ sums,         // [gridDim.x], 0 before
                I* __restrict__ starts,         // [sites + 1]
                I* __restrict__ cursors,        // [sites + 1]: the same
                i64 sites) {
    __shared__ int parts[WARPS];
    overlap_launches(numbers);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 first = static_cast<i64>(blockIdx.x) * SITES + warp * (32 * PASSES) + lane;
    int rows[PASSES], own = 0;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const i64 s = first + pass * 32;
        own += rows[pass] = s < sites ? numbers[s] + 1 : 0;
    }
    int before = sum_before_block<THREADS>(sums, sum_of_block<THREADS>(own, parts), parts);
    own = sum_of_warp(own);
    __syncthreads();
    if (lane == 0) parts[warp] = own;
    __syncthreads();
    for (int w = 0; w < warp; ++w) before += parts[w];
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const i64 s = first + pass * 32;
        const int up_to = before + sum_up_to_lane(rows[pass]);
        if (s < sites) starts[s] = cursors[s] = up_to - rows[pass];
        if (s == sites - 1) starts[sites] = cursors[sites] = up_to;
        before = __shfl_sync(EVERY, up_to, 31);
    }
}

template <typename I>
__global__ void __launch_bounds__(THREADS)
    list_rows(const I* __restrict__ inverse,  // [n]
              I* cursors,                     // [sites + 1]: where the next row of each site goes
              I* __restrict__ listed,         // [n]: rows by site, in any order
              I* __restrict__ site,           // [n]
              i64 n, i64 sites) {
    overlap_launches(inverse);
    const i64 row = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    const i64 its = row < n ? inverse[row] : -1;
    const bool has_site = static_cast<u64>(its) < static_cast<u64>(sites);
    const u32 others = __ballot_sync(EVERY, row < n && !has_site), lane = threadIdx.x % 32;
    int place = 0;
    if (has_site) place = atomicAdd(cursors + its, 1);
    if (others) {  // once for a warp: there may be many
        const int leader = __ffs(others) - 1;
        int begin = 0;
        if (lane == static_cast<u32>(leader)) begin = atomicAdd(cursors + sites, __popc(others));
        begin = __shfl_sync(EVERY, begin, leader);
        if (!has_site) place = begin + __popc(others & ((1u << lane) - 1));
    }
    if (row >= n) return;
    listed[place] = static_cast<I>(row);
    site[place] = static_cast<I>(has_site ? its : sites);
}

// A thread finds the place of its row in the list; threads of a warp whose list is long look at it together.
template <typename I>
__global__ void __launch_bounds__(THREADS)
    order_lists(const I* __restrict__ listed, const I* __restrict__ site, const I* __restrict__ starts, I* __restrict__ order,
                i64 n, i64 sites) {
    constexpr int LONG = 64, NO_ROW = 0x7fffffff;
    overlap_launches(listed, site, starts);
    const i64 place = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    const int lane = threadIdx.x % 32, row = place < n ? listed[place] : NO_ROW, its = place < n ? site[place] : -1;
    int begin = static_cast<int>(place), end = begin, before = 0;
    if (its >= 0 && its < sites) begin = starts[its], end = starts[its + 1];
    const bool is_long = end - begin > LONG;
    if (!is_long)
#pragma unroll 8
        for (int other = begin; other < end; ++other) before += listed[other] < row;
    for (u32 left = __ballot_sync(EVERY, is_long); left;) {
        const int leader = __ffs(left) - 1;
        const int first = __shfl_sync(EVERY, begin, leader), last = __shfl_sync(EVERY, end, leader);
        const bool is_mine = is_long && begin == first;
        int smaller = 0;
        for (int others = first; others < last; others += 32) {
            const int other = others + lane < last ? listed[others + lane] : NO_ROW;
#pragma unroll
            for (int k = 0; k < 32; ++k) smaller += __shfl_sync(EVERY, other, k) < row;
        }
        if (is_mine) before = smaller;
        left &= ~__ballot_sync(EVERY, is_mine);
    }
    if (place < n) order[begin + before] = row;
}

template <typename T, int LANES>
__global__ void __launch_bounds__(THREADS)
    sum_rows(const T* __restrict__ features,   // [n, C]
             const int* __restrict__ order,    // [n]
             const int* __restrict__ site,     // [n]
             const int* __restrict__ starts,   // [sites + 1]
             T* __restrict__ out,              // [sites, C]
             i64 n, i64 sites, i64 C, i64 mean) {
    using Compute = typename ComputeOf<T>::type;
    constexpr int ROWS = 32 / LANES;  // that are loaded at once, and added one after another
    overlap_launches(features, order, site, starts);
    const i64 s = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (s >= sites) return;
    const int begin = starts[s], end = starts[s + 1];
    const bool rows = begin >= 0 && begin < n && end <= n && site[begin] == s && end > begin;  // else it is past the count
    const u32 first = begin, last = rows ? end : begin;
    for (i64 c0 = 0; c0 < C; c0 += LANES) {
        const i64 c = c0 + lane % LANES;
        Compute sum = 0;
#pragma unroll 2
        for (u32 j0 = first; j0 < last; j0 += ROWS) {
            const u32 j = j0 + lane / LANES;
            const u32 left = last - j0;
            const int row = j < last ? order[j] : -1;
            const Compute value = row >= 0 && row < n && c < C ? to_compute<Compute>(features[static_cast<i64>(row) * C + c]) : Compute(0);
#pragma unroll
            for (u32 r = 0; r < ROWS; ++r) {
                const Compute next = __shfl_sync(EVERY, value, r * LANES + lane % LANES);
                if (r < left) sum = r > 0 || j0 > first ? sum + next : next;  // also where the first one is -0
            }
        }
        if (mean && last > first) sum /= static_cast<Compute>(last - first);
        if (lane < LANES && c < C) out[s * C + c] = from_compute<T>(sum);
    }
}
