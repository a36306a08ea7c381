// site_turns.cuh: how tiles are dealt out to thread blocks: deal_tiles writes it, site_conv_pipelined reads it.
//   turns[round, block], for tiles of 128 rows and then for tiles of 256: a tile, HALF_TILE + the number of half a tile, or NO_TILE
#pragma once

#include "core/common.cuh"

constexpr int NO_TILE = 65535, HALF_TILE = 1 << 15;

// Where the turns begin of tiles of so many rows, in maps of M rows dealt out to `shares` thread blocks.
DEVICE i64 first_turn(int rows, i64 M, i64 shares) {
    return rows == 128 ? 0 : ceil_div<i64>(ceil_div<i64>(M, 128), shares) * shares;
}
