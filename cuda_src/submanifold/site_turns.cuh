// site_turns.cuh: how tiles are dealt out to thread blocks: deal_tiles writes it, site_conv_pipelined.cuh and site_conv_shared.cuh
// read it.
//   turns[round, block], for tiles of 128 rows and then for tiles of 256: a tile, HALF_TILE + the number of half a tile, or NO_TILE
//   cuts[share], for tiles of SHARED_ROWS: the tile in which the work of thread block `share` begins, and how many taps of
//     this tile come before it; cuts[shares] is the number of tiles, and 0
#pragma once

#include "core/common.cuh"

constexpr int NO_TILE = 65535, HALF_TILE = 1 << 15;
constexpr int SHARED_ROWS = 128, ALL_TAPS = 1 << 30;  // of a tile that may be cut; more than there are

// Where the turns begin of tiles of so many rows, in maps of M rows dealt out to `shares` thread blocks.
DEVICE i64 first_turn(int rows, i64 M, i64 shares) {
    return rows == 128 ? 0 : ceil_div<i64>(ceil_div<i64>(M, 128), shares) * shares;
}

// The number of a part in memory. A share has at most two for each `column` of BN output channels: one that begins a tile, and one
// that follows a cut.
DEVICE int part_of(int share, bool begins, int column, int shares) { return (column * shares + share) * 2 + begins; }
