// coordinate_map.cu: the distinct sites of rows of coordinates, in leaf order, and the tree that finds them.
//   rank(site) = number of distinct sites whose key is smaller; indices[rank] = site; inverse[i] = rank(row i) or -1
// Rows may also be candidates: every place that the window of a convolution relates to a site (KIND).
// Source: see site_tree.cuh.  Python: sbnet_cupy/submanifold/coordinate_map.py; launched by map_kernels.py
// Launches of 256 threads; each a persistent grid, but for rank_words, which takes WORDS words a thread block:
//   clear_sites                               zeros, and -1 for sites of which no row was seen yet
//   for each level: mark_sites, rank_words    bits of its words; how many there are before each
//   place_sites                               which rows belong to a site; the sites
// Why: a rank in the sorted list needs no sort, only bits and popcounts. All atomics are on integers and commute, so that the
// results depend on the rows alone.
#include "submanifold/running_sum.cuh"
#include "submanifold/site_tree.cuh"

constexpr int THREADS = 256;  // of a thread block
constexpr i64 FEW_WORDS = 1 << 17;
enum Kind { GIVEN, READERS, READ };  // the rows themselves; the places that read them; the places that they read

// How many candidates a row has on each axis: cells of the kernel, or, with no dilation, windows that may read a site.
struct Candidates {
    i64 of_axis[AXES];
};
#define CANDIDATES_PARAMETERS i64 c0, i64 c1, i64 c2, i64 c3
#define CANDIDATES {c0, c1, c2, c3}

// Candidate number i of rows and a window: number i / n of row i % n. Whether it is a site; its coordinates, of which
// those that are no site may lie outside the grid.
template <typename I, int D, int KIND>
DEVICE bool candidate(const Rows<I, D>& rows, i64 n, const Window& window, const Candidates& candidates, i64 i,
                      i64 (&site)[D + 1]) {
    if constexpr (KIND == GIVEN) return rows.load(i, site);
    i64 number = divide(i, n);
    if (!rows.load(i - number * n, site)) return false;
    bool exists = true;
#pragma unroll
    for (int axis = D - 1; axis >= 0; --axis) {
        const i64 before = divide(number, candidates.of_axis[axis]), r = number - before * candidates.of_axis[axis];
        number = before;
        i64& place = site[axis + 1];
        if (KIND == READERS && window.dilation[axis] == 1)
            exists &= window.reader_number(place, r, axis, place);
        else
            exists &= window.template place_of<KIND == READERS>(place, r, axis, place);
    }
    return exists;
}

// words = 0; winners = -1; status = 0.
template <typename V>
__global__ void __launch_bounds__(THREADS)
    clear_sites(V* __restrict__ words, int* __restrict__ winners, int* __restrict__ status, i64 word_count,
                i64 winner_count) {
    overlap_launches();
    const i64 first = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x, step = static_cast<i64>(gridDim.x) * THREADS;
    for (i64 i = first; i < word_count; i += step) words[i] = zero<V>();
    for (i64 i = first; i < winner_count; i += step) winners[i] = -1;
    if (first == 0) *status = 0;
}

// Set the bits of all candidates in the words of a level. In the last level a bit that was set already is a site that is
// listed twice.
template <typename I, int D, int KIND>
__global__ void __launch_bounds__(THREADS)
    mark_sites(const I* __restrict__ indices,     // [n, 1 + D]
               const int* __restrict__ count,     // [1] or null
               u64* __restrict__ words,           // [top + (levels - 1) * level_words][2]
               int* __restrict__ status,          // [1]: 2 is added for duplicates, if they are looked for
               i64 n, i64 each, i64 top, i64 level_words, i64 levels, i64 level, i64 look_for_duplicates, GRID_PARAMETERS,
               WINDOW_PARAMETERS, CANDIDATES_PARAMETERS) {
    overlap_launches(indices, count);
    const Grid<D> grid{GRID};
    const Window window{WINDOW};
    const Candidates candidates{CANDIDATES};
    const SiteTree tree{top, level_words, static_cast<int>(levels)};
    const Rows<I, D> rows{indices, count};
    const int own = static_cast<int>(level);
    const i64 step = static_cast<i64>(gridDim.x) * THREADS;
    for (i64 i = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x; i < n * each; i += step) {
        i64 site[D + 1];
        const bool exists = candidate<I, D, KIND>(rows, n, window, candidates, i, site);
        const i64 key = exists ? grid.key(site) : -1;
        if (key < 0) continue;
        const i64 word = tree.word_at(reinterpret_cast<const uint4*>(words), key, own);
        const u64 bit = 1ull << tree.bit_of(key, own);
        const u64 before = atomicOr(words + 2 * word, bit);
        if (look_for_duplicates && before & bit) atomicOr(status, 2);
    }
}

// How many words of a level to look at: `most`, or as many as bits are set in the level above. The others are zeros, and of few
// words all are looked at sooner than it is known how many there are.
DEVICE i64 words_of(const int* totals, i64 level, i64 most) {
    return level == 0 || most <= FEW_WORDS ? most : clamp(totals[level - 1], 0, most);
}

// words[i].before = bits that are set in the words before, where any is set in this one; totals[level] = bits in all.
template <int WORDS>
__global__ void __launch_bounds__(THREADS)
    rank_words(uint4* __restrict__ words,  // of the level
               u64* __restrict__ sums,    // [gridDim.x], 0 before
               int* __restrict__ totals, i64 level, i64 most) {
    constexpr int PASSES = WORDS / THREADS;
    __shared__ int parts[THREADS / 32];
    overlap_launches();
    const i64 words_there = words_of(totals, level, most);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    // A warp has 32 neighbouring words in each pass.
    const i64 first = static_cast<i64>(blockIdx.x) * WORDS + warp * (WORDS * 32 / THREADS) + lane;
    int set[PASSES], own = 0;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const i64 i = first + pass * 32;
        own += set[pass] = i < words_there ? __popcll(SiteTree::bits(words[i])) : 0;
    }
    int before = sum_before_block<THREADS>(sums, sum_of_block<THREADS>(own, parts), parts);
    own = sum_of_warp(own);
    __syncthreads();
    if (lane == 0) parts[warp] = own;
    __syncthreads();
    int all = before;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) {
        if (w < warp) before += parts[w];
        all += parts[w];
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int up_to = sum_up_to_lane(set[pass], lane);
        const i64 i = first + pass * 32;
        if (set[pass]) reinterpret_cast<u32*>(words + i)[2] = static_cast<u32>(before + up_to - set[pass]);
        before += __shfl_sync(0xffffffffu, up_to, 31);
    }
    if (threadIdx.x == 0 && blockIdx.x == gridDim.x - 1) totals[level] = all;
}

template <int D>
DEVICE bool none_negative(const i64 (&site)[D + 1]) {
    bool result = true;
#pragma unroll
    for (int axis = 0; axis <= D; ++axis) result &= site[axis] >= 0;
    return result;
}

enum Chosen { FIRST, LAST, NUMBER };  // of the rows of a site: which one, or how many there are, less one

// Give each site its coordinates, and what is chosen of the rows listed for it; give each row its site. Rows of the list past
// the last site have coordinates of -1.
template <typename I, int D, int KIND>
__global__ void __launch_bounds__(THREADS)
    place_sites(const I* __restrict__ given,       // [n, 1 + D]
                const int* __restrict__ count,     // [1] or null
                const uint4* __restrict__ words,   // the tree
                const int* __restrict__ total,     // [1]: sites, also those that the list has no room for
                int* __restrict__ status,          // [1]: 1 is added for rows, and places, past the end of the grid
                int* __restrict__ indices,         // [capacity, 1 + D], or null with `valid`
                int* __restrict__ winners,         // [capacity]: what is chosen of the rows of each site; or null
                u8* __restrict__ valid,            // [capacity]: 1 where there is a site; or null
                int* __restrict__ inverse,         // [n] or null
                u8* __restrict__ held,             // [n]: 1 where the row given holds a site; or null
                i64 n, i64 each, i64 top, i64 level_words, i64 levels, i64 capacity, i64 chosen, GRID_PARAMETERS,
                WINDOW_PARAMETERS, CANDIDATES_PARAMETERS) {
    overlap_launches(given, count, words, total);
    const Grid<D> grid{GRID};
    const Window window{WINDOW};
    const Candidates candidates{CANDIDATES};
    const SiteTree tree{top, level_words, static_cast<int>(levels)};
    const Rows<I, D> rows{given, count};
    const i64 first = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x, step = static_cast<i64>(gridDim.x) * THREADS;
    if (valid) {
        const i64 sites = *total;
        for (i64 i = first; i < capacity; i += step) {
            valid[i] = i < sites;
            if (i < sites) continue;
#pragma unroll
            for (int axis = 0; axis <= D; ++axis) indices[i * (D + 1) + axis] = -1;
        }
    }
    for (i64 i = first; i < n * each; i += step) {
        i64 site[D + 1];
        const bool exists = candidate<I, D, KIND>(rows, n, window, candidates, i, site);
        if (held) held[i] = exists;
        const i64 key = exists ? grid.key(site) : -1;
        i64 rank = -1;
        if (key >= 0) rank = SiteTree::number(words[tree.word_at(words, key, tree.levels - 1)], tree.bit_of(key, tree.levels - 1));
        if (rank >= capacity) rank = -1;
        if (exists && key < 0 && (KIND == GIVEN || none_negative<D>(site))) atomicOr(status, 1);
        if (inverse) inverse[i] = static_cast<int>(rank);
        if (rank < 0) continue;
        if (indices)  // rows of one site all write the same
#pragma unroll
            for (int axis = 0; axis <= D; ++axis) indices[rank * (D + 1) + axis] = static_cast<int>(site[axis]);
        if (winners && chosen == NUMBER)
            atomicAdd(winners + rank, 1);  // from -1 on
        else if (winners && chosen == LAST)
            atomicMax(winners + rank, static_cast<int>(i));
        else if (winners)
            atomicMin(reinterpret_cast<u32*>(winners) + rank, static_cast<u32>(i));  // -1 is the largest
    }
}
