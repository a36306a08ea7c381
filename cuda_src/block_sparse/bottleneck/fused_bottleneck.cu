// fused_bottleneck.cu: a pre-activation residual unit at the active blocks, in one kernel.
//   y = x + w3 * a3(w2 * a2(w1 * a1(x)))     a_i(t) = relu(t * scale_i + shift_i), w2 3 x 3
// Source: He et al. 2016, arXiv:1603.05027; Ren et al. 2018.  Python: sbnet_cupy/block_sparse/bottleneck/fused_bottleneck.py
// fused_bottleneck: tiles of the image, computed as unit_products.cuh says. stack_bottleneck.cu has the same for a stack.
// pack_bottleneck (unit_packing.cuh) lays weights and tables out as they are staged, once for many calls.
// Launch: WARPS warps; grid (blocks of the list x CLUSTER, persistent; 1; tiles of a block).
#include "block_sparse/bottleneck/image_pixels.cuh"

template <template <typename, class, int, int, int, int> class Engine, typename T, int CHUNKS, int MID, int TH, int TW,
          int CLUSTER, int WARPS, int WK1, int WM2, int WN2, int WK2, int WM3, int SLICE, int AHEAD, bool TIGHT,
          bool ROUND, int BLOCKS, bool BULK>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS)
    fused_bottleneck(const T* __restrict__ x,              // [N, H, W, C]
                     const u8* __restrict__ packed,        // [CLUSTER, Unit3::PACKED]
                     const int* __restrict__ bin_counts,   // [1]
                     const int* __restrict__ indices,      // [M, 3]
                     T* __restrict__ y,                    // [N, H, W, C]
                     i64 M, i64 N, i64 C_, i64 H_, i64 W_, i64 block_h, i64 block_w, i64 blocks_h, i64 blocks_w) {
    using U = Unit3<T, CHUNKS, MID, TH, TW, CLUSTER, SLICE>;
    DYNAMIC_SHARED(u8, shared);
    u64* const barriers = reinterpret_cast<u64*>(shared + Behind<U, WARPS, WK1, WK2>::BARRIERS);
    const auto narrow = [](i64 value) { return static_cast<int>(value); };
    const int C = narrow(C_), H = narrow(H_), W = narrow(W_);
    const Blocks g{narrow(M), narrow(N), H, W, narrow(block_h), narrow(block_w), narrow(blocks_h), narrow(blocks_w)};

    dependent_wait();
    ImagePixels<U> pixels(g, indices, blockIdx.x / CLUSTER, gridDim.x / CLUSTER);
    pixels.tiles.limit(*bin_counts);
    dependent_launch();
    if (!pixels.any()) return;  // the whole cluster leaves together

    begin_weights<U, WARPS * 32, BULK>(shared, packed + static_cast<i64>(Cluster<CLUSTER>::rank()) * U::PACKED, barriers);
    compute_unit<Engine, U, T, WARPS, WK1, WM2, WN2, WK2, WM3, AHEAD, TIGHT, ROUND, BULK>(pixels, x, y, C, shared);
}
