// site_turns.cuh: how tiles are dealt out to thread blocks: deal_tiles writes it, site_conv_pipelined.cuh reads it.
//   turns[round, block], for tiles of 128 rows and then for tiles of 256: a tile, HALF_TILE + the number of half a tile, or NO_TILE
//   cuts[share], for tiles of SHARED_ROWS: the tile in which the taps of a share of the thread blocks begin, and the number of
//     taps of this tile before them; cuts[shares] is the number of tiles, and 0
#pragma once

#include "core/common.cuh"

constexpr int NO_TILE = 65535, HALF_TILE = 1 << 15;
constexpr int SHARED_ROWS = 128, ALL_TAPS = 1 << 30;

// Where the turns begin of tiles of so many rows, in maps of M rows dealt out to `shares` thread blocks.
DEVICE i64 first_turn(int rows, i64 M, i64 shares) {
    return rows == 128 ? 0 : ceil_div<i64>(ceil_div<i64>(M, 128), shares) * shares;
}

// The number of the part of a tile that a share computes: one that begins the tile, or one that follows a cut. A share has one of
// each at most, for each `column` of tiles of output channels.
DEVICE int part_of(int share, bool begins, int column, int shares) { return (column * shares + share) * 2 + begins; }
