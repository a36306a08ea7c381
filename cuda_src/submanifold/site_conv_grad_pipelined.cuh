// site_conv_grad_pipelined.cuh: the gradient of the weights of site_conv_grad.cu, where some warps copy and the others multiply.
// Source: warps of different roles as in CUTLASS (Thakkar et al. 2023); see site_conv_pipelined.cuh.
// Python: sbnet_cupy/submanifold/site_conv_grad.py; launched by site_conv_grad_launch.py
// Compute capability 9.0 alone, numbers of 2 bytes. Rows of x and dy are whole vectors of 16 bytes, aligned.
// Launch: a thread block for each share of the rows, tap and tile of BC channels of x and BK of dy.
// Why: a row of a stage has the channels of one pair, but the product sums over pairs. wgmma reads such operands as they lie;
// for mma.sync ldmatrix has to transpose them, and each thread lists, copies and multiplies in turn.
#pragma once

#include "core/pipeline.cuh"
#include "core/swizzled_tile.cuh"
#include "submanifold/site_pairs.cuh"
#include "submanifold/split_wgmma.cuh"

constexpr int GRAD_COPIERS = 128;                     // threads that copy
constexpr int GRAD_PAIRS = 64;                        // of rows, in a stage
constexpr int GRAD_PANEL = 64;                        // channels that lie side by side
constexpr int GRAD_PANEL_BYTES = GRAD_PAIRS * TILE_ROW;

// The threads that copy, the last of a thread block of MULTIPLIERS more.
template <int MULTIPLIERS>
struct Copiers : Meeting {
    DEVICE explicit Copiers(u64* bar) : Meeting(bar) {}
    static DEVICE int thread() { return threadIdx.x - MULTIPLIERS; }
};

//   BC, BK       channels of x and of dy in a tile; WC x WK groups of four warps share it, WR of them the pairs of a stage
//   BLOCKS       thread blocks that a multiprocessor is to hold
template <typename T, int BC, int BK, int WC, int WK, int WR, int STAGES, int BLOCKS>
__global__ void __launch_bounds__(WC * WK * WR * 128 + GRAD_COPIERS, BLOCKS)
    site_weight_grad_pipelined(const T* __restrict__ x,   // the parameters of site_weight_grad
                               const T* __restrict__ dy, const int* __restrict__ rows, float* __restrict__ partial, i64 N,
                               i64 M, i64 taps, i64 C, i64 K, i64 shares, i64 middle_shares) {
    constexpr int MULTIPLIERS = WC * WK * WR * 128, MT = BC / WC / 64, NT = BK / WK / 8;
    constexpr int LEFT = BC / GRAD_PANEL, RIGHT = BK / GRAD_PANEL, A = LEFT * GRAD_PANEL_BYTES;
    constexpr int STAGE = A + RIGHT * GRAD_PANEL_BYTES, LANES = 16 / sizeof(T);
    constexpr int PASS = GRAD_COPIERS / 8, PASSES = GRAD_PAIRS / PASS;
    constexpr bool SHIFTED = MT * NT >= 32;  // registers, to those that multiply
    constexpr int LAST = 1, SOME = 2;        // notes of a stage: the last one; there are pairs in it
    using List = Pairs<GRAD_COPIERS, Copiers<MULTIPLIERS>>;
    using ItsReaders = Readers<MULTIPLIERS, true>;
    static_assert(MT * WC * 64 == BC && NT * WK * 8 == BK, "groups share the tile evenly");
    static_assert(WR == 1 || (WR == 2 && WC * WK == 1), "two groups share the pairs of a whole tile");
    static_assert(sizeof(T) * GRAD_PANEL == TILE_ROW && NT % 8 == 0, "groups have whole panels");
    static_assert((WR - 1) * BC * BK * 4 <= STAGES * STAGE, "the ring holds the sums of the second group");

    DYNAMIC_SHARED(u8, unaligned);
    u8* const ring = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    u64 *const full = reinterpret_cast<u64*>(ring + STAGES * STAGE), *const empty = full + STAGES;
    u64 *const copiers = empty + STAGES, *const multipliers = copiers + 1;
    int *const notes = reinterpret_cast<int*>(multipliers + 1), *const listed = notes + STAGES;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + s, GRAD_COPIERS + 1);
            barrier_init(empty + s, ItsReaders::COUNT);
        }
        barrier_init(copiers, GRAD_COPIERS);
        barrier_init(multipliers, MULTIPLIERS);
        barrier_init_fence();
    }
    const int channels = static_cast<int>(C), channels_out = static_cast<int>(K);
    const int tiles_k = ceil_div(channels_out, BK), tiles = ceil_div(channels, BC) * tiles_k;
    const Work work(tiles, taps, shares, middle_shares, M);
    const int tile = static_cast<int>(work.tile), c0 = tile / tiles_k * BC, k0 = tile % tiles_k * BK;
    Stage<STAGES> stage;
    __syncthreads();
    dependent_wait(x, dy, rows);

    if (threadIdx.x >= MULTIPLIERS) {
        give_registers<SHIFTED ? 96 : 0>();
        const int thread = threadIdx.x - MULTIPLIERS, unit = thread % 8, own = thread / 8;
        const int left_row = channels / LANES, right_row = channels_out / LANES;  // vectors
        u8* const to = ring + swizzled(own, unit);  // in the first stage; the same place in every pass
        List pairs(listed, rows + work.tap * M, N, work.begin, work.end, Copiers<MULTIPLIERS>(copiers));
        bool more = true;
        for (int begun = 0; more; begun += GRAD_PAIRS) {
            pairs.list(begun + GRAD_PAIRS + 1);
            more = begun + GRAD_PAIRS < pairs.listed;
            barrier_wait(empty + stage.slot, stage.phase ^ 1);
            u8* const at = to + stage.slot * STAGE;
            if (elected() && thread < 32) {
                notes[stage.slot] = (more ? 0 : LAST) | (begun < pairs.listed ? SOME : 0);
                barrier_arrive(full + stage.slot);
            }
            if (begun < pairs.listed)
#pragma unroll
                for (int r = 0; r < PASSES; ++r) {
                    const int i = begun + r * PASS + own;
                    const bool there = i < pairs.listed;
                    const int source = there ? pairs.source[i % List::SIZE] : -1;
                    const int target = there ? pairs.target[i % List::SIZE] : -1;
                    u8* const row = at + r * PASS * TILE_ROW;
#pragma unroll
                    for (int p = 0; p < LEFT; ++p) {
                        const int c = (c0 + p * GRAD_PANEL) / LANES + unit;
                        const int vector = there && c < left_row ? source * left_row + c : -1;
                        copy_async_16_unless_negative<false>(row + p * GRAD_PANEL_BYTES,
                                                             reinterpret_cast<const uint4*>(x) + static_cast<u32>(vector), vector);
                    }
#pragma unroll
                    for (int p = 0; p < RIGHT; ++p) {
                        const int k = (k0 + p * GRAD_PANEL) / LANES + unit;
                        const int vector = there && k < right_row ? target * right_row + k : -1;
                        copy_async_16_unless_negative<false>(row + A + p * GRAD_PANEL_BYTES,
                                                             reinterpret_cast<const uint4*>(dy) + static_cast<u32>(vector), vector);
                    }
                }
            copies_arrive(full + stage.slot);
            stage.advance();
        }
        dependent_launch();  // not sooner: thread blocks of what follows would take places of these
    } else {
        take_registers<SHIFTED ? 200 : 0>();
        const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
        const int part = WR == 1 ? 0 : group;
        const u32 left_at = WR == 1 ? group % WC * (MT * GRAD_PANEL_BYTES) : 0;
        const u32 right_at = A + (WR == 1 ? group / WC * (NT / 8 * GRAD_PANEL_BYTES) : 0);
        const u32 first = __shfl_sync(0xffffffffu, shared_address(ring), 0);
        float acc[MT][NT][4];
        clear(acc);
        int last = -1;  // a stage that is read
        for (bool more = true; more;) {
            barrier_wait(full + stage.slot, stage.phase);
            const int note = ItsReaders::read(notes + stage.slot);
            more = !(note & LAST);
            if (note & SOME) {
                shared_fence();  // what cp.async wrote, before the tensor cores read it
                const u32 at = first + stage.slot * STAGE;
                wgmma_fence();
#pragma unroll
                for (int step = 0; step < GRAD_PAIRS / 16 / WR; ++step) {
                    const u32 pair = (part * (GRAD_PAIRS / 16 / WR) + step) * (16 * TILE_ROW);
#pragma unroll
                    for (int m = 0; m < MT; ++m)
                        TransposedWgmma<T, NT * 8>::shared(
                            &acc[m][0][0], transposed_descriptor(at + left_at + m * GRAD_PANEL_BYTES + pair, GRAD_PANEL_BYTES),
                            transposed_descriptor(at + right_at + pair, GRAD_PANEL_BYTES));
                }
                wgmma_commit();
                wgmma_wait<1>();
                if (last >= 0) ItsReaders::release(empty + last);
                last = stage.slot;
            }
            stage.advance();
        }
        wgmma_wait<0>();
        if constexpr (WR > 1) {
            Meeting all(multipliers);
            const auto meet = [&] { all.sync(); };
            meet();  // nobody reads the ring any more
            gather_sums<WR>(acc, reinterpret_cast<float4*>(ring), meet);
            if (part > 0) return;
        }
        const int warp = threadIdx.x / 32 % 4;
        store_sums<64>(acc, partial + Work::slice(tiles) * C * K, c0 + (WR == 1 ? group % WC * (MT * 64) : 0) + warp * 16,
                       k0 + (WR == 1 ? group / WC * (NT * 8) : 0), channels, channels_out);
    }
}
