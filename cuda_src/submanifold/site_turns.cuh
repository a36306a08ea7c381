// site_turns.cuh: which tiles of a convolution a thread block computes, so that all thread blocks have about as much to do.
// Tiles with many taps take longer than tiles with few. Sorted by how many they have, most first, they go to the thread blocks
// in order, then in reverse, and so on: who got a longer one gets a shorter one next.
#pragma once

#include "submanifold/site_product.cuh"

constexpr int MOST_TURNS = 64;     // of a thread block
constexpr int MOST_SORTED = 8192;  // tiles: more are not sorted, and differ less in sum

// The turns of this thread block, in shared memory: those that multiply have no registers for them.
struct Turns {
    int* numbers;  // how many there are, of tiles; whether they are listed
    u16* listed;   // [MOST_TURNS], if so; else they are in order
    static constexpr int BYTES = 8 + MOST_TURNS * 2;
    DEVICE explicit Turns(int* at) : numbers(at), listed(reinterpret_cast<u16*>(at + 2)) {}
    DEVICE int count() const { return numbers[0]; }
    DEVICE int tile(int turn) const { return numbers[1] ? listed[turn] : static_cast<int>(blockIdx.x + turn * gridDim.x); }
};

// Find the turns of this thread block, in a kernel for `tiles` tiles. All threads call it; a barrier must follow. cost(tile) is a
// number of up to `most`. `scratch` is shared memory for MOST_SORTED + 128 bytes, free after that barrier.
template <class Cost>
DEVICE void share_tiles(const Turns& its, int tiles, int most, u8* scratch, const Cost& cost) {
    constexpr int BINS = 32;
    const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    const int count = block < tiles ? ceil_div(tiles - block, blocks) : 0;
    const bool sorted = tiles > blocks && tiles <= MOST_SORTED && ceil_div(tiles, blocks) <= MOST_TURNS;
    if (threadIdx.x == 0 && !sorted) its.numbers[0] = count, its.numbers[1] = 0;
    if (!sorted) return;
    int* const sizes = reinterpret_cast<int*>(scratch + MOST_SORTED);  // of the bins
    if (threadIdx.x < BINS) sizes[threadIdx.x] = 0;
    __syncthreads();
    for (int tile = threadIdx.x; tile < tiles; tile += blockDim.x) {
        const int bin = BINS - 1 - cost(tile) * (BINS - 1) / most;  // of the longest: 0
        scratch[tile] = static_cast<u8>(bin);
        atomicAdd(sizes + bin, 1);
    }
    __syncthreads();
    const int lane = threadIdx.x % 32, rows = ceil_div(tiles, blocks);
    int turns = 0;
    for (int row = 0; row < rows; ++row) {
        int rank = row * blocks + (row % 2 ? blocks - 1 - block : block);
        if (rank >= tiles) continue;
        const int turn = turns++;
        if (turn % (blockDim.x / 32) != threadIdx.x / 32) continue;  // another warp's
        int bin = 0;
        while (rank >= sizes[bin]) rank -= sizes[bin++];
        for (int from = 0; from < tiles; from += 32) {  // the one before which `rank` others have the same bin
            const u32 same = __ballot_sync(0xffffffffu, from + lane < tiles && scratch[from + lane] == bin);
            if (rank >= __popc(same)) {
                rank -= __popc(same);
                continue;
            }
            if (same >> lane & 1 && __popc(same & ((1u << lane) - 1)) == rank) its.listed[turn] = static_cast<u16>(from + lane);
            break;
        }
    }
    if (threadIdx.x == 0) its.numbers[0] = turns, its.numbers[1] = 1;
}
