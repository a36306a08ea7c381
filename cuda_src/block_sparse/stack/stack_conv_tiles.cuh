// stack_conv_tiles.cuh: the tiles that stack_conv_pipelined.cuh computes: their order (Rounds), what a thread block holds of
// one (PipelineMemory), and how thread blocks of a cluster share the sums of one (SharedSums).
#pragma once

#include "block_sparse/stack/stack_conv.cuh"

// Tiles in the order in which thread blocks take them, `step` at a time. If so few are left for the last round that there are
// thread blocks for each of their parts, these tiles are cut into up to PARTS, a number of rows each: the round is as much
// shorter, and each sum is made as before.
template <int BM, int PARTS>
struct Rounds {
    int across, whole, parts, count;  // tiles side by side; tiles that are not cut, and parts of the others; all together
    DEVICE Rounds(int tiles, int across, int step) : across(across), whole(tiles), parts(1), count(tiles) {
        if constexpr (PARTS > 1) {
            const int rest = static_cast<int>(static_cast<u32>(tiles) % static_cast<u32>(step));
            parts = PARTS;
            while (parts > 1 && rest * parts > step) parts = parts % 2 ? 1 : parts / 2;
            whole = tiles - rest, count = whole + rest * parts;
        }
    }
    struct Tile {
        int p0, k0, height;  // first pixel and output channel; rows
    };
    template <int BN>
    DEVICE Tile tile(int number) const {
        int tile = number, part = 0, height = BM;
        if (PARTS > 1 && number >= whole) {
            const int cut = (number - whole) / parts;
            tile = whole + cut, part = number - whole - cut * parts, height = BM / parts;
        }
        const int tile_m = tile / across;
        return Tile{tile_m * BM + part * height, (tile - tile_m * across) * BN, height};
    }
};

// The sums that a thread block gets from those of its cluster: each sends rows of its tile to each. [SPLIT][ROWS][PITCH]
// floats. Of the COUNT floats of a vector of channels, those that four lanes store at once lie side by side.
template <int BM, int BN, int SPLIT, int COUNT>
struct SharedSums {
    static constexpr int ROWS = ceil_div(BM, SPLIT), PITCH = BN + 16, BYTES = SPLIT * ROWS * PITCH * 4;
    static DEVICE int first_row(int rank) { return BM * rank / SPLIT; }
    static DEVICE int rank_of(int row) { return ((row + 1) * SPLIT - 1) / BM; }
    // Four floats `quarter` of the vector at a column, of a row of the thread block's own.
    static DEVICE int place(int from, int row, int column, int quarter) {
        return (from * ROWS + row) * PITCH + column / (4 * COUNT) * (4 * COUNT) + quarter * 16 + column / COUNT % 4 * 4;
    }
};

// Shared memory, from a multiple of 1024 bytes on. BYTES are those of RESULTS staged results, or of shared sums.
template <int BM, int BN, int STAGES, int RESULTS, int BYTES>
struct PipelineMemory {
    static constexpr int A = BM * TILE_ROW, B = BN * TILE_ROW, STAGE = A + B;
    u8 *ring, *results;
    float *scale, *bias;
    u64 *full, *empty;                  // of each stage
    u64 *result_full, *result_empty;    // of each staged result
    u64 *copiers, *multipliers;         // barriers among themselves
    int* inside;               // [BM]
    int* offsets;              // [taps][BM]: pixels of the stack, or -1
    DEVICE explicit PipelineMemory(u8* unaligned) {
        ring = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
        results = ring + STAGES * STAGE;
        scale = reinterpret_cast<float*>(results + BYTES);
        bias = scale + BN;
        full = reinterpret_cast<u64*>(bias + BN), empty = full + STAGES;
        result_full = empty + STAGES, result_empty = result_full + RESULTS;
        copiers = result_empty + RESULTS, multipliers = copiers + 1;
        inside = reinterpret_cast<int*>(multipliers + 1);
        offsets = inside + BM;
    }
};
