// stack_conv_tiles.cuh: the tiles that stack_conv_pipelined.cuh computes: their order (Rounds), what a thread block holds of
// one (PipelineMemory), and how thread blocks of a cluster share the sums of one (SharedSums, finish_in_cluster).
#pragma once

#include "block_sparse/stack/stack_conv.cuh"
#include "core/cluster.cuh"

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

// Each row of sums goes to the thread block of the cluster that finishes it, which adds up what it gets in the order of
// ranks, as SharedSums `sums` that count at `bar`. THREADS threads, which hold `acc`, call this.
template <int ACTIVATION, bool VECTOR_OUT, int THREADS, int BM, int BN, int SPLIT, class Product, typename T, class Rows,
          int LIES, int MT, int NT>
DEVICE void finish_in_cluster(const float (&acc)[MT][NT][4], const Result<T, Rows, LIES>& result, float* sums, u64* bar,
                              u32 phase, int rank) {
    constexpr int LANES = 16 / sizeof(T), VECTORS = BN / LANES;
    using Team = Cluster<SPLIT>;
    using Sums = SharedSums<BM, BN, SPLIT, LANES>;
    const int from = Sums::first_row(rank), to = Sums::first_row(rank + 1), K = result.K;
    if (threadIdx.x == 0) barrier_expect(bar, (to - from) * BN * SPLIT * 4);
    __syncwarp();
    Team::wait();  // all have read the last tile's sums
    result.template for_each_sum<Product>(acc, [&](int row, int column, const float (&values)[LANES]) {
        const int its_rank = Sums::rank_of(row), its_row = row - Sums::first_row(its_rank);
#pragma unroll
        for (int e = 0; e < LANES / 4; ++e)
            Team::send(reinterpret_cast<float4*>(sums + Sums::place(rank, its_row, column, e)),
                       make_float4(values[4 * e], values[4 * e + 1], values[4 * e + 2], values[4 * e + 3]), bar, its_rank);
    });
    const auto add_to = [&](int i) {
        const int p = result.rows.pixel(from + i / VECTORS), k = result.k0 + i % VECTORS * LANES;
        return residual_at<VECTOR_OUT>(result.residual, result.added(p) + k, p >= 0 && k < K);
    };
    uint4 addend = zero<uint4>();
    if (static_cast<int>(threadIdx.x) < (to - from) * VECTORS) addend = add_to(threadIdx.x);
    Team::wait_for_all(bar, phase);
    for (int i = threadIdx.x; i < (to - from) * VECTORS; i += THREADS) {
        const int row = i / VECTORS, column = i % VECTORS * LANES, p = result.rows.pixel(from + row);
        if (i >= THREADS) addend = add_to(i);
        float total[LANES];
#pragma unroll
        for (int e = 0; e < LANES / 4; ++e) {
            float4 sum = *reinterpret_cast<const float4*>(sums + Sums::place(0, row, column, e));
#pragma unroll
            for (int q = 1; q < SPLIT; ++q) {
                const float4 part = *reinterpret_cast<const float4*>(sums + Sums::place(q, row, column, e));
                sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
            }
            total[4 * e] = sum.x, total[4 * e + 1] = sum.y, total[4 * e + 2] = sum.z, total[4 * e + 3] = sum.w;
        }
        if (p >= 0)
            finish<T, ACTIVATION, VECTOR_OUT, true>(total, result.scale + column, result.bias + column, addend, result.residual,
                                                    result.y, result.stored(p) + result.channel(result.k0 + column),
                                                    K - result.k0 - column, result.rows.is_inside(from + row),
                                                    result.template last_of<ACTIVATION>(column));
    }
    __syncwarp();
}

// Shared memory, from a multiple of 1024 bytes on. BYTES are those of RESULTS staged results, or of shared sums; FOUND is how
// many tiles' pixels may be found before their results are stored, 0 if those who store them find them.
template <int BM, int BN, int STAGES, int RESULTS, int BYTES, int FOUND = 0, int TABLES = 2>
struct PipelineMemory {
    static constexpr int A = BM * TILE_ROW, B = BN * TILE_ROW, STAGE = A + B;
    u8 *ring, *results;
    float *scale, *bias;                // and the other tables behind them
    u64 *full, *empty;                  // of each stage
    u64 *result_full, *result_empty;    // of each staged result
    u64 *found_full, *found_empty;      // of the pixels of each tile that is found
    u64 *copiers, *multipliers;         // barriers among themselves
    int* inside;               // [BM], or of each tile that is found
    int* offsets;              // [taps][BM]: pixels of the stack, or -1
    DEVICE explicit PipelineMemory(u8* unaligned) {
        ring = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
        results = ring + STAGES * STAGE;
        scale = reinterpret_cast<float*>(results + BYTES);
        bias = scale + BN;
        full = reinterpret_cast<u64*>(scale + TABLES * BN), empty = full + STAGES;
        result_full = empty + STAGES, result_empty = result_full + RESULTS;
        found_full = result_empty + RESULTS, found_empty = found_full + FOUND;
        copiers = found_empty + FOUND, multipliers = copiers + 1;
        inside = reinterpret_cast<int*>(multipliers + 1);
        offsets = inside + (FOUND > 0 ? FOUND : 1) * BM;
    }
};
