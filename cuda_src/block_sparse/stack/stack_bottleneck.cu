// stack_bottleneck.cu: a pre-activation residual unit from a stack of blocks to a stack of blocks, in one kernel.
//   y = x + w3 * a3(w2 * a2(w1 * a1(x)))     a_i(t) = relu(t * scale_i + shift_i), w2 3 x 3
// h1 = a2(...) is 0 in blocks that are not active and outside the image, as the border of a "same" convolution is. Pixels
// of y outside the image become 0. Rows of y past the count are not written, or become 0.
// Source: He et al. 2016, arXiv:1603.05027; Ren et al. 2018.  Python: sbnet_cupy/block_sparse/stack/stack_bottleneck.py; which
// instance: stack_bottleneck_plan.py
// The products are those of fused_bottleneck.cu, in unit_products.cuh; stack_pixels.cuh finds their pixels. Weights are packed
// by pack_bottleneck. Where no block has a whole tile of pixels, a tile is PIECES blocks, each with a rim of its own.
// Launch: WARPS warps; a persistent grid of tiles x CLUSTER thread blocks.
#include "block_sparse/stack/stack_pixels.cuh"

//   TH, TW   of a tile: all its pieces, one below the other
//   settled  no kernel that still runs writes packed weights, count or table: they are read before those ahead have ended
template <template <typename, class, int, int, int, int> class Engine, typename T, int CHUNKS, int MID, int TH, int TW,
          int PIECES, int CLUSTER, int WARPS, int WK1, int WM2, int WN2, int WK2, int WM3, int SLICE, int AHEAD,
          bool TIGHT, bool ROUND, int BLOCKS, bool BULK>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS)
    stack_bottleneck(const T* __restrict__ x,             // [M, bh, bw, C]
                     const u8* __restrict__ packed,       // [CLUSTER, Unit3::PACKED]
                     const int* __restrict__ bin_counts,  // [1]
                     const int* __restrict__ indices,     // [M, 3]
                     const int* __restrict__ grid,        // [N, GH, GW]
                     T* __restrict__ y,                   // [M, bh, bw, C]
                     i64 M, i64 N, i64 GH, i64 GW, i64 C, i64 bh, i64 bw, i64 H, i64 W, i64 settled, i64 clear_rows) {
    using U = Unit3<T, CHUNKS, MID, TH, TW, CLUSTER, SLICE, PIECES>;
    using Rest = Behind<U, WARPS, WK1, WK2>;
    using Pixels = StackPixels<U, WARPS * 32>;
    DYNAMIC_SHARED(u8, shared);
    u64* const barriers = reinterpret_cast<u64*>(shared + Rest::BARRIERS);
    const auto narrow = [](i64 value) { return static_cast<int>(value); };

    begin_launch(settled);
    const int rows = narrow(clamp(*bin_counts, 0, M));
    const BlockTable table{indices, grid, narrow(N), narrow(GH), narrow(GW), rows};
    Pixels pixels(table, narrow(bh), narrow(bw), narrow(H), narrow(W), blockIdx.x / CLUSTER, gridDim.x / CLUSTER,
                  shared + Rest::BYTES);
    if (pixels.any()) {  // the same in the whole cluster
        const u8* const mine = packed + static_cast<i64>(Cluster<CLUSTER>::rank()) * U::PACKED;
        begin_weights<U, WARPS * 32, BULK>(shared, mine, barriers);
        pixels.look();
        pixels.keep();
        if (settled) dependent_wait();
        compute_unit<Engine, U, T, WARPS, WK1, WM2, WN2, WK2, WM3, AHEAD, TIGHT, ROUND, BULK>(
            pixels, loaded_later(x), y, narrow(C), shared);
    } else if (settled) {
        dependent_wait();  // who waits for this kernel waits for those ahead, too
    }
    if (clear_rows) clear_rest<true>(y, static_cast<i64>(rows) * bh * bw * C, M * bh * bw * C);
}
