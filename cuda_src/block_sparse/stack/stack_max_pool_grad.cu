// stack_max_pool_grad.cu: the maximum of each window of a stack of blocks and which of its pixels has it, and the gradient.
//   choice[m, p, q, c] = r * S + s of the first largest pixel;  NaN is larger than all
//   dx[m, i, j, c] = sum of grad over the windows of the result's image that chose the pixel
// in float, in the order of the taps, rounded once; 0 outside of the images, in rows that are no block and past the count.
// Source: the transpose of the choice that the maximum makes.
// Python: sbnet_cupy/block_sparse/stack/stack_max_pool_grad.py; launched by stack_pool_launch.py
// Launch: persistent grid of 256 threads; a thread takes a vector of channels of one window, or of one pixel, at a time.
// Why: a pixel looks at the few windows that hold it; nothing is added by several threads.
#include "block_sparse/stack/stack_pool.cuh"

template <typename T, typename V>
struct Chosen {
    static constexpr int COUNT = Elements<T, V>::COUNT;
    using Choice = typename Bytes<COUNT>::type;
    Choice* choices;
    Elements<T, V> best;
    Elements<u8, Choice> taps;
    bool none;

    DEVICE explicit Chosen(Choice* choices) : choices(choices), best(zero<V>()), taps(zero<Choice>()), none(true) {}
    DEVICE void begin(const Pooled&) {}
    DEVICE void visit(V vector, int tap) {
        using C = typename ComputeOf<T>::type;
        const Elements<T, V> values(vector);
#pragma unroll
        for (int e = 0; e < COUNT; ++e) {
            const C old = to_compute<C>(best.element[e]), value = to_compute<C>(values.element[e]);
            if (none || value > old || (value != value && old == old)) {
                best.element[e] = values.element[e];
                taps.element[e] = static_cast<u8>(tap);
            }
        }
        none = false;
    }
    DEVICE V result(i64 at) const {
        choices[at] = taps.vector;
        return best.vector;
    }
};

template <typename T, typename V, int KR, int KS>
__global__ void __launch_bounds__(POOL_THREADS, 2)
    stack_max_pool_choice(const V* __restrict__ x,            // [M, bh, bw, width]
                          const int* __restrict__ bin_counts,  // [1]
                          const int* __restrict__ indices,     // [M, 3]
                          const int* __restrict__ grid,        // [N, GH, GW]
                          V* __restrict__ y,                   // [M, ph, pw, width]
                          typename Chosen<T, V>::Choice* __restrict__ choices,  // the same, of bytes
                          i64 M, i64 N, i64 GH, i64 GW, i64 width, i64 bh, i64 bw, i64 H, i64 W, i64 ph, i64 pw, i64 R,
                          i64 S, i64 SH, i64 SW, i64 DH, i64 DW, i64 top, i64 left, i64 settled, i64 clear_rows) {
    const auto narrow = [](i64 value) { return static_cast<int>(value); };
    const Pooling g{narrow(width), narrow(bh), narrow(bw), narrow(H),  narrow(W),   narrow(ph),   narrow(pw), narrow(R),
                    narrow(S),     narrow(SH), narrow(SW), narrow(DH), narrow(DW), narrow(top), narrow(left), 0, 0};
    pool_windows<KR, KS>(x, bin_counts, indices, grid, y, M, N, GH, GW, g, settled, clear_rows, Chosen<T, V>(choices));
}

// Along an axis: the windows that hold a pixel, as the blocks that they are of and their places there.
struct Holders {
    int stride, dilation, reach, length, each;  // reach: from the first tap to the last; length: windows; each: of a block
    Divisor strides, dilations, blocks;

    DEVICE Holders(int taps, int stride, int dilation, int length, int each)
        : stride(stride), dilation(dilation), reach((taps - 1) * dilation), length(length), each(each), strides(stride),
          dilations(dilation), blocks(each) {}

    struct Holder {
        int tap, block, place;  // tap < 0: none
    };
    // The last window whose first tap is no later than the pixel `at`, or a negative number. Those before it have larger taps.
    DEVICE int last(int at) const { return at < 0 ? -1 : strides.of_any(at); }
    DEVICE bool reaches(int window, int at) const { return window >= 0 && at - window * stride <= reach; }
    DEVICE Holder holder(int window, int at) const {
        const int away = at - window * stride, tap = dilations.of(max(away, 0));
        if (!reaches(window, at) || window >= length || tap * dilation != away) return Holder{-1, 0, 0};
        const int block = blocks.of_any(window);
        return Holder{tap, block, window - block * each};
    }
};

template <typename T, typename V, int KR, int KS>
__global__ void __launch_bounds__(POOL_THREADS, 4)
    stack_max_pool_grad(const V* __restrict__ grad,                                    // [M, ph, pw, width]
                        const typename Chosen<T, V>::Choice* __restrict__ choices,      // the same, of bytes
                        const int* __restrict__ bin_counts, const int* __restrict__ indices, const int* __restrict__ grid,
                        V* __restrict__ dx,  // [M, bh, bw, width]
                        i64 M, i64 N, i64 GH, i64 GW, i64 width, i64 bh, i64 bw, i64 H, i64 W, i64 ph, i64 pw, i64 R,
                        i64 S, i64 SH, i64 SW, i64 DH, i64 DW, i64 top, i64 left, i64 OH, i64 OW) {
    using C = typename ComputeOf<T>::type;
    constexpr int COUNT = Elements<T, V>::COUNT;
    const auto narrow = [](i64 value) { return static_cast<int>(value); };
    overlap_launches();
    constexpr int AT_ONCE = 2;  // windows of a line whose gradients are loaded together
    const int rows = narrow(clamp(*bin_counts, 0, M)), PH = narrow(ph), PW = narrow(pw);
    const int taps_down = KR ? KR : narrow(R), taps_across = KS ? KS : narrow(S);
    const BlockTable table{indices, grid, narrow(N), narrow(GH), narrow(GW), rows};
    const Pooling g{narrow(width), narrow(bh), narrow(bw), narrow(H), narrow(W), narrow(bh), narrow(bw), 1, 1, 1, 1, 1, 1,
                    0, 0, 0, 0};  // of pixels in place of windows
    const Windows pixels(table, g);
    const Holders down(taps_down, narrow(SH), narrow(DH), narrow(OH), PH);
    const Holders across(taps_across, narrow(SW), narrow(DW), narrow(OW), PW);
    const i64 all = static_cast<i64>(rows) * bh * bw * width;
    for (i64 i0 = static_cast<i64>(blockIdx.x) * POOL_THREADS; i0 < all; i0 += static_cast<i64>(gridDim.x) * POOL_THREADS) {
        if (i0 + threadIdx.x >= all) break;
        const Pooled at = pixels.at(i0);
        const int line = at.block.hi * g.bh + at.p, column = at.block.wi * g.bw + at.q;
        C sums[COUNT];
#pragma unroll
        for (int e = 0; e < COUNT; ++e) sums[e] = 0;
        if (at.block.n >= 0 && line < g.H && column < g.W) {
            const int y = line + narrow(top), x = column + narrow(left);
            for (int h = down.last(y); down.reaches(h, y); --h) {
                const Holders::Holder above = down.holder(h, y);
                if (above.tap < 0) continue;
                for (int w = across.last(x); across.reaches(w, x); w -= AT_ONCE) {
                    int taps[AT_ONCE];
                    i64 from[AT_ONCE];
#pragma unroll
                    for (int k = 0; k < AT_ONCE; ++k) {
                        const Holders::Holder beside = across.holder(w - k, x);
                        int row = at.row;
                        if (above.block != at.block.hi || beside.block != at.block.wi)
                            row = table.row(beside.tap < 0 ? -1 : at.block.n, above.block, beside.block);
                        taps[k] = beside.tap < 0 || row < 0 ? -1 : above.tap * taps_across + beside.tap;
                        from[k] = ((static_cast<i64>(row) * PH + above.place) * PW + beside.place) * width + at.v;
                    }
                    Elements<u8, typename Chosen<T, V>::Choice> chosen[AT_ONCE];
                    Elements<T, V> given[AT_ONCE];
#pragma unroll
                    for (int k = 0; k < AT_ONCE; ++k)
                        if (taps[k] >= 0) {
                            chosen[k].vector = choices[from[k]];
                            given[k].vector = grad[from[k]];
                        }
#pragma unroll
                    for (int k = 0; k < AT_ONCE; ++k)
#pragma unroll
                        for (int e = 0; e < COUNT; ++e)
                            if (taps[k] >= 0 && chosen[k].element[e] == taps[k]) sums[e] += to_compute<C>(given[k].element[e]);
                }
            }
        }
        Elements<T, V> result;
#pragma unroll
        for (int e = 0; e < COUNT; ++e) result.element[e] = from_compute<T>(sums[e]);
        dx[i0 + threadIdx.x] = result.vector;
    }
    clear_rest<false>(dx, all, M * bh * bw * width);
}
