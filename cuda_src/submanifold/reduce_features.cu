// reduce_features.cu: the rows of a list that belong to each site, in their order, and sums of their features.
//   order[j], site[j]    the rows of the list and their sites, sorted by site; rows with no site come last, with the number `sites`
//   starts[s]            where the rows of site s begin; those of the last one end where the next would begin
//   out[s, c] = sum or mean of features[order[j], c] over the rows j of site s
// Source: counting_sort.cuh, by 11 bits of the site at a time.  Python: sbnet_cupy/submanifold/reduce_features.py and
// row_lists.py
// Launches: for each digit bin_digits, scan_bins and order_rows of site_order.cu; then
//   list_rows    a thread for each row and site; sum_rows: a warp for each site, with LANES channels side by side
// Why: no sum depends on the order in which threads run, and no site is slow because it has many rows.
#include "submanifold/counting_sort.cuh"

constexpr u32 EVERY = 0xffffffffu;

template <typename I>
__global__ void __launch_bounds__(THREADS)
    list_rows(const I* __restrict__ inverse,  // [n]
              const I* __restrict__ order,    // [n]: the rows as sorted by their sites
              const I* __restrict__ count,    // [1]: how many sites there are, of which `sites` are kept
              I* __restrict__ site,           // [n]
              I* __restrict__ starts,         // [sites + 1]
              i64 n, i64 sites) {
    overlap_launches(inverse, order, count);
    const i64 t = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    const i64 there = *count < sites ? *count : sites;
    if (t > there && t <= sites) starts[t] = static_cast<I>(n);
    if (t >= n) return;
    const i64 own = number_of(inverse, order[t], sites), before = t > 0 ? number_of(inverse, order[t - 1], sites) : -1;
    site[t] = static_cast<I>(own);
    if (own < there && own != before) starts[own] = static_cast<I>(t);
    if (own >= there && before < there) starts[there] = static_cast<I>(t);  // the first row that has no site
    if (own < there && t == n - 1) starts[there] = static_cast<I>(n);
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
