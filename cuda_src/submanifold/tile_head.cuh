// tile_head.cuh: what a tile of site_tiles.cu has, before its lists.
#pragma once

#include "core/common.cuh"

constexpr int ZERO_ROWS = 8;  // of a tile, before the rows that it reads: numbers of the rows of a map that read none

struct TileHead {
    int* counts;         // taps that some row of the tile has; rounds
    int* list;           // of these taps, in order: tap << 16 | a bit for each 16 rows of the tile that have it
    int* round_entries;  // of each round, its first tap in the list; after the last, how many there are
    int* round_sources;  // the same in the list of the rows that the tile reads
    // Numbers of a head: whole vectors of 16 bytes.
    static DEVICE int ints(int taps) { return ceil_div(3 * taps + 4, 4) * 4; }
    DEVICE TileHead(int* head, int taps)
        : counts(head), list(head + 2), round_entries(list + taps), round_sources(round_entries + taps + 1) {}
};
