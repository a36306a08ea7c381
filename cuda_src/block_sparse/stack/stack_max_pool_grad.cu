// stack_max_pool_grad.cu: the maximum of each window of a stack of blocks and which of its pixels has it, and the gradient.
//   choice[m, p, q, c] = r * S + s of the first largest pixel;  NaN is larger than all
//   dx[m, i, j, c] = sum of grad over the windows of the result's image that chose the pixel
// in float, in the order of the taps, rounded once; 0 outside of the images, in rows that are no block and past the count.
// Source: the transpose of the choice that the maximum makes.
// Python: sbnet_cupy/block_sparse/stack/stack_max_pool_grad.py; launched by stack_pool_launch.py
// Launch: persistent grid of 256 threads; a thread takes a vector of channels of one window, or two of one pixel, at a time.
// Why: a pixel looks at the few windows that hold it, once for two vectors; nothing is added by several threads.
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

// Along an axis: the windows that hold a pixel. Pixels and windows count from the first ones of the pixel's block.
struct Holders {
    int pad, stride, dilation, reach, length, each, back;  // reach: from the first tap to the last; length: windows of the
    Divisor strides, dilations, blocks;                    // image; each: of a block; back: blocks before, whose may hold it

    DEVICE Holders(int taps, int pad, int stride, int dilation, int length, int each)
        : pad(pad), stride(stride), dilation(dilation), reach((taps - 1) * dilation), length(length), each(each),
          back(ceil_div(reach / stride + 1, each)), strides(stride), dilations(dilation), blocks(each) {}

    // The last window that may hold a pixel. Those before it hold it in larger taps.
    DEVICE int last(int pixel) const { return strides.of(pixel + pad); }
    DEVICE bool reaches(int window, int pixel) const { return pixel + pad - window * stride <= reach; }

    struct Holder {
        int tap, block, place;  // tap < 0: the window is none of the image's, or has no tap there
    };
    DEVICE Holder holder(int window, int pixel, int block) const {
        const int away = pixel + pad - window * stride, tap = dilations.of(away);
        const int further = blocks.of(window + back * each) - back;
        const bool real = static_cast<u32>(block * each + window) < static_cast<u32>(length) && tap * dilation == away;
        return Holder{real ? tap : -1, block + further, window - further * each};
    }
};

template <typename T, typename V, int KR, int KS>
__global__ void __launch_bounds__(POOL_THREADS, 2)
    stack_max_pool_grad(const V* __restrict__ grad,                                    // [M, ph, pw, width]
                        const typename Chosen<T, V>::Choice* __restrict__ choices,      // the same, of bytes
                        const int* __restrict__ bin_counts, const int* __restrict__ indices, const int* __restrict__ grid,
                        V* __restrict__ dx,  // [M, bh, bw, width]
                        i64 M, i64 N, i64 GH, i64 GW, i64 width, i64 bh, i64 bw, i64 H, i64 W, i64 ph, i64 pw, i64 R,
                        i64 S, i64 SH, i64 SW, i64 DH, i64 DW, i64 top, i64 left, i64 OH, i64 OW) {
    using C = typename ComputeOf<T>::type;
    constexpr int COUNT = Elements<T, V>::COUNT;
    constexpr int EACH = 2;  // vectors of a pixel that a thread takes: they are in the same windows
    const auto narrow = [](i64 value) { return static_cast<int>(value); };
    overlap_launches();
    const int rows = narrow(clamp(*bin_counts, 0, M)), PH = narrow(ph), PW = narrow(pw), vectors = narrow(width);
    const int taps_down = KR ? KR : narrow(R), taps_across = KS ? KS : narrow(S), lanes = ceil_div(vectors, EACH);
    const BlockTable table{indices, grid, narrow(N), narrow(GH), narrow(GW), rows};
    const Pooling g{lanes, narrow(bh), narrow(bw), narrow(H), narrow(W), narrow(bh), narrow(bw), 1, 1, 1, 1, 1, 1,
                    0, 0, 0, 0};  // of pixels in place of windows
    const Windows pixels(table, g);
    const Holders down(taps_down, narrow(top), narrow(SH), narrow(DH), narrow(OH), PH);
    const Holders across(taps_across, narrow(left), narrow(SW), narrow(DW), narrow(OW), PW);
    const i64 all = static_cast<i64>(rows) * bh * bw * lanes;
    for (i64 i0 = static_cast<i64>(blockIdx.x) * POOL_THREADS; i0 < all; i0 += static_cast<i64>(gridDim.x) * POOL_THREADS) {
        if (i0 + threadIdx.x >= all) break;
        const Pooled at = pixels.at(i0);
        C sums[EACH][COUNT];
#pragma unroll
        for (int k = 0; k < EACH; ++k)
#pragma unroll
            for (int e = 0; e < COUNT; ++e) sums[k][e] = 0;
        const bool inside = at.block.n >= 0 && at.block.hi * g.bh + at.p < g.H && at.block.wi * g.bw + at.q < g.W;
        for (int h = down.last(at.p); inside && down.reaches(h, at.p); --h) {
            const Holders::Holder above = down.holder(h, at.p, at.block.hi);
            for (int w = across.last(at.q); above.tap >= 0 && across.reaches(w, at.q); --w) {
                const Holders::Holder beside = across.holder(w, at.q, at.block.wi);
                if (beside.tap < 0) continue;
                int row = at.row;
                if (above.block != at.block.hi || beside.block != at.block.wi)
                    row = table.row(at.block.n, above.block, beside.block);
                if (row < 0) continue;
                const i64 from = ((static_cast<i64>(row) * PH + above.place) * PW + beside.place) * width + at.v;
                const int tap = above.tap * taps_across + beside.tap;
                Elements<u8, typename Chosen<T, V>::Choice> chosen[EACH];
                Elements<T, V> given[EACH];
#pragma unroll
                for (int k = 0; k < EACH; ++k) {
                    const bool there = at.v + k * lanes < vectors;
                    chosen[k].vector = there ? choices[from + k * lanes] : zero<typename Chosen<T, V>::Choice>();
                    given[k].vector = there ? grad[from + k * lanes] : zero<V>();
                }
#pragma unroll
                for (int k = 0; k < EACH; ++k)
#pragma unroll
                    for (int e = 0; e < COUNT; ++e)
                        if (chosen[k].element[e] == tap) sums[k][e] += to_compute<C>(given[k].element[e]);
            }
        }
        V* const to = dx + ((static_cast<i64>(at.row) * g.bh + at.p) * g.bw + at.q) * width + at.v;
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            Elements<T, V> result;
#pragma unroll
            for (int e = 0; e < COUNT; ++e) result.element[e] = from_compute<T>(sums[k][e]);
            if (at.v + k * lanes < vectors) to[k * lanes] = result.vector;
        }
    }
    clear_rest<false>(dx, static_cast<i64>(rows) * bh * bw * width, M * bh * bw * width);
}
