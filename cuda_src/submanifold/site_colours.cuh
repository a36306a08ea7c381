// site_colours.cuh: which of eight colours the rows of a kernel map have, and how a tile deals with rows by colour.
// A colour is a sum of a site's coordinates, each with a factor, modulo 8: a tap adds the same to the colour of every row. Rows
// of unlike colours therefore read rows of unlike colours, at each tap. In a tile's shared memory the rows of a colour lie in
// banks of their own (site_conv_tiles.cuh), so that eight rows of eight colours are loaded at once.
// Source: skewed storage (Budnik and Kuck 1971).
#pragma once

#include "core/common.cuh"

constexpr int COLOURS = 8;

struct SiteColours {
    static constexpr int MOST_AXES = 4;
    const int* __restrict__ indices;  // [rows][1 + axes]: sample and place
    i64 factors;                      // of the axes, 4 bits each, 0 for none
    DEVICE u32 factor(int axis) const { return static_cast<u32>(factors >> 4 * axis & 15); }
    DEVICE int of(i64 row) const {
        int axes = 0;
#pragma unroll
        for (int a = 0; a < MOST_AXES; ++a) axes += factor(a) != 0;
        const int* const place = indices + row * (1 + axes) + 1;
        u32 sum = 0;
#pragma unroll
        for (int a = 0; a < MOST_AXES; ++a) sum += (a < axes ? static_cast<u32>(place[a]) : 0) * factor(a);
        return static_cast<int>(sum % COLOURS);
    }
};

// How many lanes before this one have its colour, of those that have one (`there`). tally[c]: how many lanes have colour c.
DEVICE int count_before(int colour, bool there, int* tally) {
    const int lane = threadIdx.x % 32;
    u32 same = __ballot_sync(0xffffffffu, there), lanes = same;  // of the colour; of the colour that is the number of the lane
#pragma unroll
    for (int bit = 1; bit < COLOURS; bit *= 2) {
        const u32 set = __ballot_sync(0xffffffffu, colour & bit);
        same &= colour & bit ? set : ~set;
        lanes &= lane & bit ? set : ~set;
    }
    if (lane < COLOURS) tally[lane] = __popc(lanes);
    return __popc(same & ((1u << lane) - 1));
}

// Where a row comes among 64: first one of each colour, then the second ones, and so on. `before` rows have its colour and come
// first; counts[c] + counts[COLOURS + c] have colour c.
DEVICE int place_in_turn(int colour, int before, const int* counts) {
    int place = 0;
#pragma unroll 1  // registers are few
    for (int c = 0; c < COLOURS; ++c) place += min(counts[c] + counts[COLOURS + c], before + (c < colour));
    return place;
}

// Numbers of rows, of which those of colour c are c, c + 8, c + 16, ... There are `most` for each colour. Rows of a colour that
// has more take numbers of others that are left over.
struct ColouredNumbers {
    const int* counts;  // of each colour
    int most;
    // That of the row of a colour with so many before it.
    DEVICE int number(int colour, int before) const {
        if (before < most) return before * COLOURS + colour;
        int left = before - most;
#pragma unroll 1
        for (int c = 0; c < colour; ++c) left += max(counts[c] - most, 0);
#pragma unroll 1
        for (int c = 0; c < COLOURS; ++c) {
            const int unused = max(most - counts[c], 0);
            if (left < unused) return (counts[c] + left) * COLOURS + c;
            left -= unused;
        }
        return 0;  // there are no more rows than numbers
    }
    DEVICE bool is_full() const {  // whether a colour has more rows than numbers
        bool full = false;
#pragma unroll
        for (int c = 0; c < COLOURS; ++c) full |= counts[c] > most;
        return full;
    }
    // All are below this.
    DEVICE int end() const {
        int longest = 0;
#pragma unroll
        for (int c = 0; c < COLOURS; ++c) longest = max(longest, counts[c]);
        return min(longest, most) * COLOURS;
    }
};
