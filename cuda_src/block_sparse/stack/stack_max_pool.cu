// stack_max_pool.cu: the maximum of each window of a stack of blocks.
//   y[m, p, q, c] = max x at (p * SH - top + r * DH, q * SW - left + s * DW) of block m, c
// over the pixels of the image in the window, and, if asked for, 0 for those around it; those in no active block are 0.
// NaN is larger than all. A window without a pixel of the image gives 0, and so do rows that are no block. Rows past the
// count are not written, or become 0. PITCHED: x and y may be some channels of other stacks, whose pixels have more.
// Source: max pooling on images that are 0 outside of the active blocks.
// Python: sbnet_cupy/block_sparse/stack/stack_max_pool.py; launched by stack_pool_launch.py
// Launch: persistent grid of 256 threads; a thread takes a vector of channels of one window at a time.
// Why: windows overlap by a pixel or two, which the first-level cache still holds; most of their pixels are of their own
// block, so that few look into the table. All pixels of a window of known size are loaded before the first is compared.
#include "block_sparse/stack/stack_pool.cuh"

// The larger of the elements of two vectors; NaN is larger than all.
template <typename T, typename V>
struct Larger {
    static DEVICE V of(V a, V b) {
        using C = typename ComputeOf<T>::type;
        const Elements<T, V> right(b);
        Elements<T, V> best(a);
#pragma unroll
        for (int e = 0; e < Elements<T, V>::COUNT; ++e) {
            const C old = to_compute<C>(best.element[e]), value = to_compute<C>(right.element[e]);
            if (!(old > value || old != old)) best.element[e] = right.element[e];
        }
        return best.vector;
    }
};
#if !defined(SBNET_HOST) && DEVICE_ARCHITECTURE >= 800
DEVICE u32 larger_pair(Half, u32 a, u32 b) {
    u32 result;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
DEVICE u32 larger_pair(BFloat16, u32 a, u32 b) {
    u32 result;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
template <typename T>
struct LargerPairs {  // two 16-bit floats by one instruction
    static DEVICE uint4 of(uint4 a, uint4 b) {
        return uint4{larger_pair(T{}, a.x, b.x), larger_pair(T{}, a.y, b.y), larger_pair(T{}, a.z, b.z),
                     larger_pair(T{}, a.w, b.w)};
    }
};
template <>
struct Larger<Half, uint4> : LargerPairs<Half> {};
template <>
struct Larger<BFloat16, uint4> : LargerPairs<BFloat16> {};
#endif

template <typename T, typename V>
struct Maximum {
    V best;
    bool none;
    DEVICE void begin(const Pooled&) { best = zero<V>(), none = true; }
    DEVICE void visit(V value, int) {
        best = none ? value : Larger<T, V>::of(best, value);
        none = false;
    }
    DEVICE V result(i64) const { return best; }
};

template <typename T, typename V, int KR, int KS, bool PITCHED>
__global__ void __launch_bounds__(POOL_THREADS, pool_blocks(KR * KS))
    stack_max_pool(const V* __restrict__ x,            // [M, bh, bw, width], its pixels pitch_in vectors apart
                   const int* __restrict__ bin_counts,  // [1]
                   const int* __restrict__ indices,     // [M, 3]
                   const int* __restrict__ grid,        // [N, GH, GW]
                   V* __restrict__ y,                   // [M, ph, pw, width], its pixels pitch_out vectors apart
                   i64 M, i64 N, i64 GH, i64 GW, i64 width, i64 bh, i64 bw, i64 H, i64 W, i64 ph, i64 pw, i64 R, i64 S,
                   i64 SH, i64 SW, i64 DH, i64 DW, i64 top, i64 left, i64 zeros_around, i64 settled, i64 clear_rows,
                   i64 pitch_in, i64 pitch_out) {
    const auto narrow = [](i64 value) { return static_cast<int>(value); };
    const Pooling g{narrow(width), narrow(bh), narrow(bw), narrow(H),  narrow(W),   narrow(ph),   narrow(pw), narrow(R),
                    narrow(S),     narrow(SH), narrow(SW), narrow(DH), narrow(DW), narrow(top), narrow(left), 0, 0,
                    zeros_around ? IN_NO_BLOCK : OUTSIDE, narrow(pitch_in), narrow(pitch_out)};
    pool_windows<KR, KS, PITCHED>(x, bin_counts, indices, grid, y, M, N, GH, GW, g, settled, clear_rows, Maximum<T, V>{});
}
