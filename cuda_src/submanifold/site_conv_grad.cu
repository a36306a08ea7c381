// site_conv_grad.cu: the gradient of the weights of a convolution over a kernel map.
//   dw[t, c, k] = sum(x[rows[t, m], c] * dy[m, k])      over the rows m of dy at which tap t reads a row
// Source: Graham et al. 2018, arXiv:1711.10275; the sums over shares of the rows are those of a split-K matrix product.
// Python: sbnet_cupy/submanifold/site_conv_grad.py; launched by site_conv_grad_launch.py
// site_weight_grad:      products on tensor cores; a thread block for each share of the rows, tap and tile of BC channels of
//                        x and BK of dy.
// site_weight_grad_pipelined (site_conv_grad_pipelined.cuh): the same by wgmma, where some warps copy.
// site_weight_grad_fma:  products by fused multiply-add, for groups and for numbers that tensor cores do not take; 256
//                        threads for each share, tap and tile of outputs.
// sum_shares:            adds the shares up and rounds; 256 threads, PARTS for each V outputs.
// A thread block lists the pairs of rows of its tap, so that rows without it cost nothing. Which rows a share has depends on
// shapes alone, and shares are added in their order: same bits on every run.
#include "core/tensor_core.cuh"
#include "dense/activation.cuh"
#include "submanifold/site_conv_grad_pipelined.cuh"

// Begin to copy 16 bytes of a row from channel c on; zeros past channel C, and where row is negative.
template <bool VECTOR, typename T>
DEVICE void copy_channels(u8* to, const T* __restrict__ from, int row, int c, int C) {
    const bool there = row >= 0 && c < C;
    const T* const at = from + (there ? static_cast<i64>(row) * C + c : 0);
    if constexpr (VECTOR) {
        copy_async_16(to, at, there);
    } else {
        Elements<T, uint4> value(zero<uint4>());
#pragma unroll
        for (int e = 0; e < static_cast<int>(16 / sizeof(T)); ++e)
            if (there && c + e < C) value.element[e] = at[e];
        *reinterpret_cast<uint4*>(to) = value.vector;
    }
}

// Rows of COLUMNS numbers in shared memory, with room between them so that numbers below each other lie in other banks.
template <typename T, int COLUMNS, int THREADS, bool VECTOR>
struct Rows {
    static constexpr int LANES = 16 / sizeof(T), VECTORS = COLUMNS / LANES, AT_ONCE = THREADS / VECTORS;
    static constexpr int PITCH = COLUMNS * sizeof(T) + (sizeof(T) == 4 ? 32 : 16);

    // Begin to copy ROWS rows, those of the list from place `first` on, of which there are `left`.
    template <int ROWS, int SIZE>
    static DEVICE void copy(u8* to, const T* __restrict__ from, const int* list, int first, int left, int c0, int C) {
        const int vector = threadIdx.x % VECTORS, own = threadIdx.x / VECTORS;
#pragma unroll
        for (int r = 0; r < ROWS; r += AT_ONCE) {
            const int i = r + own;
            if (ROWS % AT_ONCE && i >= ROWS) break;
            const int row = i < left ? list[(first + i) % SIZE] : -1;
            copy_channels<VECTOR>(to + i * PITCH + vector * 16, from, row, c0 + vector * LANES, C);
        }
    }
};

//   BC, BK       channels of x and of dy in a tile; WC x WK warps share it, WR of them the rows of a stage
//   VECTOR_IN    rows of x are whole vectors of 16 bytes, aligned; VECTOR_OUT: those of dy
template <typename T, int BC, int BK, int WC, int WK, int WR, int ROWS, int STAGES, bool VECTOR_IN, bool VECTOR_OUT>
__global__ void __launch_bounds__(WC * WK * WR * 32, DEVICE_ARCHITECTURE < 800 ? 1 : 512 / (WC * WK * WR * 32))
    site_weight_grad(const T* __restrict__ x,        // [N, C]
                     const T* __restrict__ dy,       // [M, K]
                     const int* __restrict__ rows,   // [taps, M]
                     float* __restrict__ partial,    // [middle_shares + shares * (taps - 1), C, K]
                     i64 N, i64 M, i64 taps, i64 C, i64 K, i64 shares, i64 middle_shares) {
    constexpr int THREADS = WC * WK * WR * 32, MT = BC / WC / 16, NT = BK / WK / 8, AHEAD = STAGES - 1;
    constexpr bool FLOAT = sizeof(T) == 4;
    constexpr int DEPTH = FLOAT ? 8 : 16;  // rows of a product
    using Left = Rows<T, BC, THREADS, VECTOR_IN>;
    using Right = Rows<T, BK, THREADS, VECTOR_OUT>;
    using List = Pairs<THREADS>;
    constexpr int A = ROWS * Left::PITCH, STAGE = A + ROWS * Right::PITCH;
    static_assert(MT * WC * 16 == BC && NT * WK * 8 == BK && NT % 2 == 0, "warps share the tile evenly");
    static_assert(ROWS % (WR * DEPTH) == 0 && ROWS <= List::WINDOW, "and the rows");

    dependent_wait(x, dy, rows);
    DYNAMIC_SHARED(u8, ring);
    const int channels = static_cast<int>(C), channels_out = static_cast<int>(K);
    const int tiles_k = ceil_div(channels_out, BK), tiles = ceil_div(channels, BC) * tiles_k;
    const Work work(tiles, taps, shares, middle_shares, M);
    const int tile = static_cast<int>(work.tile), c0 = tile / tiles_k * BC, k0 = tile % tiles_k * BK;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int own_c = warp % WC * (MT * 16), own_k = warp / WC % WK * (NT * 8), own_part = warp / (WC * WK);
    List pairs(reinterpret_cast<int*>(ring + STAGES * STAGE), rows + work.tap * M, N, work.begin, work.end);

    int begun = 0;  // pairs whose copies have begun
    const auto copy_next = [&](int slot) {
        pairs.list(begun + ROWS);
        if (begun < pairs.listed) {
            u8* const at = ring + slot * STAGE;
            const int left = pairs.listed - begun;
            Left::template copy<ROWS, List::SIZE>(at, x, pairs.source, begun, left, c0, channels);
            Right::template copy<ROWS, List::SIZE>(at + A, dy, pairs.target, begun, left, k0, channels_out);
            begun += ROWS;
        }
        copy_async_commit();
    };
    float acc[MT][NT][4];
    clear(acc);
#pragma unroll 1
    for (int s = 0; s < AHEAD; ++s) copy_next(s);
    int slot = 0, fill = AHEAD;
#pragma unroll 1
    for (int done = 0; done < begun; done += ROWS) {
        copy_async_wait<AHEAD - 1>();
        __syncthreads();
        copy_next(fill);
        const u8 *const a = ring + slot * STAGE, *const b = a + A;
#pragma unroll
        for (int step = 0; step < ROWS / DEPTH / WR; ++step) {
            const int first = (step * WR + own_part) * DEPTH;
            u32 left[MT][4], right[NT][2];
            if constexpr (FLOAT) {
                const u8* const a_at = a + (first + lane % 4) * Left::PITCH + (own_c + lane / 4) * 4;
                const u8* const b_at = b + (first + lane % 4) * Right::PITCH + (own_k + lane / 4) * 4;
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        right[n][i] = tf32_factor(*reinterpret_cast<const float*>(b_at + i * (4 * Right::PITCH) + n * 32));
#pragma unroll
                for (int m = 0; m < MT; ++m)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        left[m][i] = tf32_factor(*reinterpret_cast<const float*>(a_at + i / 2 * (4 * Left::PITCH) + m * 64 + i % 2 * 32));
            } else {
                const u8* const a_at = a + (first + lane / 16 * 8 + lane % 8) * Left::PITCH + (own_c + lane / 8 % 2 * 8) * 2;
                const u8* const b_at = b + (first + lane % 16) * Right::PITCH + (own_k + lane / 16 * 8) * 2;
#pragma unroll
                for (int n = 0; n < NT; n += 2) {
                    u32 two[4];
                    ldmatrix_x4_trans(two, b_at + n * 16);
                    right[n][0] = two[0], right[n][1] = two[1], right[n + 1][0] = two[2], right[n + 1][1] = two[3];
                }
#pragma unroll
                for (int m = 0; m < MT; ++m) ldmatrix_x4_trans(left[m], a_at + m * 32);
            }
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    if constexpr (FLOAT)
                        mma_1688_tf32(acc[m][n], left[m], right[n][0], right[n][1]);
                    else
                        mma_16816<T>(acc[m][n], left[m], right[n][0], right[n][1]);
                }
        }
        if (++slot == STAGES) slot = 0;
        if (++fill == STAGES) fill = 0;
    }
    copy_async_wait<0>();
    dependent_launch();  // not sooner: thread blocks of what follows would take places of these

    if constexpr (WR > 1) {  // warps of the same tile add their sums, in order
        constexpr int EACH = MT * NT * 4 * 32;
        float* const sums = reinterpret_cast<float*>(ring) + warp % (WC * WK) * EACH + lane;
        constexpr int NEXT = WC * WK * EACH;
        __syncthreads();
        if (own_part) {
#pragma unroll
            for (int i = 0; i < MT * NT * 4; ++i) sums[(own_part - 1) * NEXT + i * 32] = acc[i / 4 / NT][i / 4 % NT][i % 4];
        }
        __syncthreads();
        if (own_part) return;
#pragma unroll
        for (int other = 0; other < WR - 1; ++other)
#pragma unroll
            for (int i = 0; i < MT * NT * 4; ++i) acc[i / 4 / NT][i / 4 % NT][i % 4] += sums[other * NEXT + i * 32];
    }
    store_sums<16>(acc, partial + Work::slice(tiles) * C * K, c0 + own_c, k0 + own_k, channels, channels_out);
}

DEVICE float add_product(float sum, float a, float b) { return __fmaf_rn(a, b, sum); }
DEVICE double add_product(double sum, double a, double b) { return __fma_rn(a, b, sum); }

// A thread sums TC channels of x by V of dy over every (256 / lanes)th pair of its share; those of the same outputs add
// theirs up in order.
template <typename T, int TC, int V>
__global__ void __launch_bounds__(256, 2)
    site_weight_grad_fma(const T* __restrict__ x,                                // [N, C]
                         const T* __restrict__ dy,                               // [M, K]
                         const int* __restrict__ rows,                           // [taps, M]
                         // [middle_shares + shares * (taps - 1), C / groups, K]
                         typename ComputeOf<T>::type* __restrict__ partial, i64 N, i64 M, i64 taps, i64 C, i64 K, i64 groups,
                         i64 shares, i64 middle_shares, i64 lanes) {
    using Compute = typename ComputeOf<T>::type;
    using Vector = typename Bytes<V * sizeof(T)>::type;
    using List = Pairs<256>;
    constexpr int SUMS = TC * V;
    DYNAMIC_SHARED(u8, shared);  // the list, then the sums
    dependent_wait(x, dy, rows);
    const int across = static_cast<int>(lanes), parts = 256 / across, own = threadIdx.x % across, part = threadIdx.x / across;
    const i64 per_group = divide(C, groups), out_per_group = divide(K, groups), vectors = divide(K, V);
    const i64 units = divide(per_group, TC) * vectors, tiles = ceil_div<i64>(units, lanes);
    const Work work(tiles, taps, shares, middle_shares, M);
    const i64 unit = work.tile * lanes + own, row = divide(unit, vectors);
    const i64 k = (unit - row * vectors) * V, c = row * TC;
    const bool active = unit < units;
    const T* const left = x + divide(active ? k : 0, out_per_group) * per_group + (active ? c : 0);
    const T* const right = dy + (active ? k : 0);

    List pairs(reinterpret_cast<int*>(shared), rows + work.tap * M, N, work.begin, work.end);
    Compute sums[TC][V] = {};
    for (int done = 0;;) {
        pairs.list(done + 1);
        if (done == pairs.listed) break;
#pragma unroll 2
        for (int i = done + part; i < pairs.listed; i += parts) {
            const T* const from = left + pairs.source[i % List::SIZE] * C;
            const Elements<T, Vector> grad(*reinterpret_cast<const Vector*>(right + pairs.target[i % List::SIZE] * K));
            Compute values[TC];
#pragma unroll
            for (int e = 0; e < TC; ++e) values[e] = to_compute<Compute>(from[e]);
#pragma unroll
            for (int v = 0; v < V; ++v) {
                const Compute value = to_compute<Compute>(grad.element[v]);
#pragma unroll
                for (int e = 0; e < TC; ++e) sums[e][v] = add_product(sums[e][v], values[e], value);
            }
        }
        done = pairs.listed;
    }
    dependent_launch();
    if (parts > 1) {
        Compute* const all = reinterpret_cast<Compute*>(shared);  // [SUMS][256]
        __syncthreads();
#pragma unroll
        for (int i = 0; i < SUMS; ++i) all[i * 256 + threadIdx.x] = sums[i / V][i % V];
        __syncthreads();
        if (part) return;
        for (int other = 1; other < parts; ++other)
#pragma unroll
            for (int i = 0; i < SUMS; ++i) sums[i / V][i % V] += all[i * 256 + other * across + own];
    }
    if (!active) return;
    Compute* const to = partial + (Work::slice(tiles) * per_group + c) * K + k;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) to[i / V * K + i % V] = sums[i / V][i % V];
}

// A lane adds every PARTS-th share of V numbers next to each other; then PARTS lanes add their sums.
template <typename T, int V, int PARTS>
__global__ void __launch_bounds__(256)
    sum_shares(const typename ComputeOf<T>::type* __restrict__ partial,  // [middle_shares + shares * (taps - 1), each]
               T* __restrict__ sums,                                     // [taps, each]
               i64 each, i64 taps, i64 shares, i64 middle_shares) {
    using Compute = typename ComputeOf<T>::type;
    using Vector = typename Bytes<V * sizeof(Compute)>::type;
    constexpr int ACROSS = 32 / PARTS;
    overlap_launches(partial);
    const int lane = threadIdx.x % 32, part = lane / ACROSS;
    const i64 i = ((static_cast<i64>(blockIdx.x) * 8 + threadIdx.x / 32) * ACROSS + lane % ACROSS) * V;
    const i64 tap = divide(i, each), middle = divide(taps, 2);
    i64 first = 0, step = 1, all = middle_shares;  // matrices of partial sums
    if (tap != middle) first = middle_shares + (tap < middle ? tap : tap - 1), step = taps - 1, all = shares;
    const Compute* const from = partial + first * each + (i - tap * each);
    Compute sum[V] = {};
    if (tap < taps)
#pragma unroll 4
        for (i64 share = part; share < all; share += PARTS) {
            const Elements<Compute, Vector> its(*reinterpret_cast<const Vector*>(from + share * step * each));
#pragma unroll
            for (int v = 0; v < V; ++v) sum[v] = add(sum[v], its.element[v]);
        }
    Elements<T, typename Bytes<V * sizeof(T)>::type> result;
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
        for (int d = ACROSS; d < 32; d *= 2) sum[v] = add(sum[v], __shfl_xor_sync(0xffffffffu, sum[v], d));
        result.element[v] = from_compute<T>(sum[v]);
    }
    if (part == 0 && tap < taps) *reinterpret_cast<decltype(result.vector)*>(sums + i) = result.vector;
}
