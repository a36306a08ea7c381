// site_tree.cuh: a set of sites as a tree of 64-bit words, in which the row of a site is found without a search.
//   key      the coordinates of a site as one number, whose order is leaf order (sbnet_cupy/submanifold/keys.py); its
//            lowest 6 bits say which of the 64 cells of a leaf it is
//   word     64 neighbours: a bit for each that is there, and how many there are in the words before this one
//   levels   level 0 has a word for each value of the highest bits of a key. Bit b of a word leads to word number
//            `before + popcount(bits below b)` of the next level; in the last level that is the number of the site.
// Sites are numbered in the order of their keys, so that the tree depends on the set of sites alone.
// Source: bit masks of OpenVDB's nodes (Museth 2013, ACM Transactions on Graphics 32), ranks by popcounts.
#pragma once

#include "core/async_copy.cuh"

constexpr int AXES = 4;  // of a grid, at most

// A grid of D axes: key = (number of the leaf, cell in the leaf). Leaves are numbered sample by sample, the last axis fastest,
// as the keys of NumPy's path order them, but with no gaps, so that level 0 has few words.
template <int D>
struct Grid {
    i64 limit[AXES + 1];   // of the sample and of each axis
    i64 leaves[AXES + 1];  // beside each other: samples, and leaves of each axis

    // Bits of a coordinate that tell the cell in a leaf: 64; 8x8; 4x4x4; 4x4x2x2.
    static DEVICE constexpr int low(int axis) { return axis == 0 ? 0 : D == 4 ? (axis < 3 ? 2 : 1) : 6 / D; }

    // The key of a site, or -1 where it lies outside the grid.
    DEVICE i64 key(const i64 (&at)[D + 1]) const {
        u64 high = 0, cell = 0;
        bool inside = true;
#pragma unroll
        for (int axis = 0; axis <= D; ++axis) {
            inside &= static_cast<u64>(at[axis]) < static_cast<u64>(limit[axis]);
            high = high * static_cast<u64>(leaves[axis]) + (static_cast<u64>(at[axis]) >> low(axis));
            cell = cell << low(axis) | (static_cast<u64>(at[axis]) & ((1u << low(axis)) - 1));
        }
        return inside ? static_cast<i64>(high << 6 | cell) : -1;
    }
};
#define GRID_PARAMETERS                                                                                               \
    i64 limit0, i64 limit1, i64 limit2, i64 limit3, i64 limit4, i64 leaves0, i64 leaves1, i64 leaves2, i64 leaves3,   \
        i64 leaves4
#define GRID {limit0, limit1, limit2, limit3, limit4}, {leaves0, leaves1, leaves2, leaves3, leaves4}

// A convolution's window: site p of the result reads p * stride - padding + r * dilation for the cells r of the kernel.
struct Window {
    i64 kernel[AXES], stride[AXES], dilation[AXES], padding[AXES];

    // The place that p reads, on one axis; there always is one.
    DEVICE bool read_by(i64 p, i64 r, int axis, i64& place) const {
        place = p * stride[axis] - padding[axis] + r * dilation[axis];
        return true;
    }
    // The place of the result that reads p; whether there is one.
    DEVICE bool reader_of(i64 p, i64 r, int axis, i64& place) const {
        const i64 from_start = p + padding[axis] - r * dilation[axis];
        if (from_start < 0) return false;
        place = divide(from_start, stride[axis]);
        return place * stride[axis] == from_start;
    }
    // The same with no dilation, counted back from the last window that may read p; whether it does.
    DEVICE bool reader_number(i64 p, i64 number, int axis, i64& place) const {
        const i64 from_start = p + padding[axis];
        place = divide(from_start, stride[axis]) - number;
        return place >= 0 && from_start - place * stride[axis] < kernel[axis];
    }
    template <bool READERS>
    DEVICE bool place_of(i64 p, i64 r, int axis, i64& place) const {
        return READERS ? reader_of(p, r, axis, place) : read_by(p, r, axis, place);
    }
};
#define WINDOW_PARAMETERS                                                                                             \
    i64 k0, i64 k1, i64 k2, i64 k3, i64 s0, i64 s1, i64 s2, i64 s3, i64 d0, i64 d1, i64 d2, i64 d3, i64 p0, i64 p1,   \
        i64 p2, i64 p3
#define WINDOW {k0, k1, k2, k3}, {s0, s1, s2, s3}, {d0, d1, d2, d3}, {p0, p1, p2, p3}

// Rows (sample, *position) of coordinates; of a list with spare rows only those below the count hold a site.
template <typename I, int D>
struct Rows {
    const I* __restrict__ rows;     // [n, 1 + D]
    const int* __restrict__ count;  // [1], or null: all rows
    // Load a row; whether it holds a site. A list with no count may hold anything.
    DEVICE bool load(i64 row, i64 (&site)[D + 1]) const {
#pragma unroll
        for (int axis = 0; axis <= D; ++axis) site[axis] = static_cast<i64>(rows[row * (D + 1) + axis]);
        return !count || (row < *count && site[0] >= 0);
    }
};

struct SiteTree {
    i64 top, level_words;  // words of level 0, and for each of the others
    int levels;

    DEVICE i64 first(int level) const { return level == 0 ? 0 : top + (level - 1) * level_words; }
    // Which bit of its word a key is at a level.
    DEVICE int bit_of(i64 key, int level) const { return static_cast<int>(key >> 6 * (levels - 1 - level)) & 63; }

    static DEVICE u64 bits(const uint4& word) { return static_cast<u64>(word.y) << 32 | word.x; }
    // The number of bit `bit` of a word among all of its level, or -1 where it is not set.
    static DEVICE i64 number(const uint4& word, int bit) {
        const u64 set = bits(word);
        return set >> bit & 1 ? static_cast<i64>(word.z) + __popcll(set & ((1ull << bit) - 1)) : -1;
    }
    // Which word of a level holds a key, for levels whose words before are complete; -1 where there is none.
    DEVICE i64 word_at(const uint4* __restrict__ words, i64 key, int level) const {
        i64 at = key >> (6 * levels);
        for (int above = 0; above < level && at >= 0; ++above)
            at = number(words[first(above) + at], bit_of(key, above));
        return at < 0 ? -1 : first(level) + at;
    }
};
