// site_conv.cu: a convolution over a kernel map, from rows of features to rows of features.
//   y[m, k] = activation(scale[k] * sum(x[rows[t, m], c] * w[t, c, k]) + bias[k] + residual[m, k])
// over the taps t at which row m reads a row; 0 where m is no valid row.
// Source: the implicit matrix product of cuDNN (Chetlur et al. 2014, arXiv:1410.0759), with gathered rows.
// Python: sbnet_cupy/submanifold/site_conv.py; launched by site_conv_launch.py
// pack_site_weights:  lays weights, scale and bias out as site_conv stages them.
// site_conv:          products on tensor cores; a persistent grid, a thread block for each tile of BM rows and BN channels.
// site_conv_fma:      products by fused multiply-add, for groups and for numbers that tensor cores do not take; a persistent
//                     grid of 256 threads, each with V channels of ROWS rows.
// K of the product is the list of units, 16 bytes of channels of a tap, tap after tap, cut into chunks of 8 units. Sums are
// made in that order, whatever tile a row is in. A tile leaves out the chunks that none of its rows has, and a warp those
// that none of its own rows has.
#include "dense/tile_result.cuh"

constexpr int PANEL = 64, PANEL_CHUNK = PANEL * TILE_ROW;  // output channels that are packed together

// The units of K.
struct Units {
    int taps, per_tap, chunks;
    DEVICE Units(i64 taps, i64 C, int lanes)
        : taps(static_cast<int>(taps)), per_tap(static_cast<int>(ceil_div<i64>(C, lanes))),
          chunks(static_cast<int>(ceil_div<i64>(taps * per_tap, 8))) {}
    DEVICE int tap(int unit) const { return static_cast<int>(static_cast<u32>(unit) / static_cast<u32>(per_tap)); }
};

// Packed: scale and bias, float[2][64 * panels]; then for each panel of 64 output channels its chunks of 64 rows x 128
// bytes, swizzled.
template <typename T, bool ROUND>
__global__ void __launch_bounds__(256)
    pack_site_weights(const T* __restrict__ w,          // [taps, C, K]
                      const float* __restrict__ scale,  // [K] or null
                      const float* __restrict__ bias,   // [K] or null
                      u8* __restrict__ packed, i64 taps, i64 C, i64 K) {
    constexpr int LANES = 16 / sizeof(T);
    const Units units(taps, C, LANES);
    const i64 panels = ceil_div<i64>(K, PANEL), first = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
    const i64 step = static_cast<i64>(gridDim.x) * 256;
    for (i64 i = first; i < 2 * PANEL * panels; i += step) {
        const bool is_scale = i < PANEL * panels;
        const i64 k = is_scale ? i : i - PANEL * panels;
        const float* const table = is_scale ? scale : bias;
        reinterpret_cast<float*>(packed)[i] = k < K && table ? table[k] : is_scale ? 1.0f : 0.0f;
    }
    u8* const panel_bytes = packed + 2 * PANEL * panels * 4;
    for (i64 i = first; i < panels * units.chunks * (PANEL * 8); i += step) {
        const int u = static_cast<int>(i % 8), column = static_cast<int>(i / 8 % PANEL);
        const i64 slice = divide(i, 8 * PANEL), panel = divide(slice, units.chunks);
        const int unit = static_cast<int>(slice - panel * units.chunks) * 8 + u, tap = units.tap(unit);
        const i64 k = panel * PANEL + ChannelOrder<T>::channel(column);
        Elements<T, uint4> value(zero<uint4>());
#pragma unroll
        for (int e = 0; e < LANES; ++e) {
            const i64 c = static_cast<i64>(unit - tap * units.per_tap) * LANES + e;
            if (tap < units.taps && c < C && k < K) value.element[e] = w[(tap * C + c) * K + k];
            if constexpr (ROUND) value.element[e] = __uint_as_float(to_tf32(value.element[e]));
        }
        *reinterpret_cast<uint4*>(panel_bytes + slice * PANEL_CHUNK + swizzled(column, u)) = value.vector;
    }
}

// Rows of a tile are rows of y in their order.
struct SiteRows {
    i64 p0, M;
    const u8* __restrict__ valid;
    DEVICE int pixel(int row) const { return p0 + row < M ? static_cast<int>(p0 + row) : -1; }
    DEVICE bool is_inside(int row) const { return p0 + row < M && (!valid || valid[p0 + row]); }
};

// Begin to copy 16 bytes of channels, from channel c of a row of x on; zeros past channel C, and where row is negative.
template <bool VECTOR, typename T>
DEVICE void copy_row(u8* to, const T* __restrict__ x, int row, int c, i64 C) {
    const T* const from = x + (row < 0 ? 0 : row * C + c);
    if constexpr (VECTOR) {
        copy_async_16(to, from, row >= 0);
    } else {
        Elements<T, uint4> value(zero<uint4>());
#pragma unroll
        for (int e = 0; e < static_cast<int>(16 / sizeof(T)); ++e)
            if (row >= 0 && c + e < C) value.element[e] = from[e];
        *reinterpret_cast<uint4*>(to) = value.vector;
    }
}

// Thread blocks for which a multiprocessor has registers: as many as there are without a spill.
template <typename T, int BM, int BN, int THREADS>
constexpr int RESIDENT = DEVICE_ARCHITECTURE < 800                 ? 1
                         : THREADS < 256                           ? 384 / THREADS
                         : sizeof(T) == 2 && BM * BN < 128 * 128 ? 2
                                                                   : 1;

//   VECTOR_IN    rows of x are whole vectors of 16 bytes, aligned; VECTOR_OUT: those of y and the residual
//   ROUND        x is float, rounded to tf32 in shared memory
template <typename T, int BM, int BN, int WM, int WN, int STAGES, bool VECTOR_IN, bool VECTOR_OUT, bool ROUND, int ACTIVATION>
__global__ void __launch_bounds__(WM * WN * 32, RESIDENT<T, BM, BN, WM * WN * 32>)
    site_conv(const T* __restrict__ x,         // [N, C]
              const u8* __restrict__ packed,
              const int* __restrict__ rows,    // [taps, M]
              const u8* __restrict__ valid,    // [M] or null: all rows
              const T* __restrict__ residual,  // [M, K] or null
              T* __restrict__ y,               // [M, K]
              i64 N, i64 M, i64 taps, i64 C, i64 K) {
    using Product = TileMma<T, BM, BN, WM, WN>;
    constexpr int THREADS = Product::THREADS, MT = Product::MT, NT = Product::NT, LANES = 16 / sizeof(T);
    constexpr int A = BM * TILE_ROW, STAGE = A + BN * TILE_ROW, AHEAD = STAGES - 1, GROUP = BM / WM;
    constexpr int PASS = THREADS / 8, PASSES = BM / PASS;  // rows that all threads copy at once
    static_assert(BM % PASS == 0 && PASS % 8 == 0 && AHEAD >= 1, "threads share the rows evenly");
    static_assert(GROUP % 32 == 0 && WM <= 8, "32 neighbouring rows belong to one group of warps");

    DYNAMIC_SHARED(u8, ring);
    float* const scale = reinterpret_cast<float*>(ring + STAGES * STAGE);
    float* const bias = scale + BN;
    int* const sources = reinterpret_cast<int*>(bias + BN);         // [taps][BM]: rows of x, or -1
    int* const groups = sources + taps * BM;                        // [taps]: a bit for each group of warps that has the tap
    int* const list = groups + taps;                                // [chunks]: chunks that there are, and their groups
    __shared__ int listed;

    const Units units(taps, C, LANES);
    const int channels_out = static_cast<int>(K), panels = ceil_div(channels_out, PANEL), across = ceil_div(channels_out, BN);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own_unit = threadIdx.x % 8, own_row = threadIdx.x / 8;
    const int to = swizzled(own_row, own_unit);  // PASS is a multiple of 8: the same place in every pass
    const i64 tiles = ceil_div<i64>(M, BM) * across;
    for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const i64 tile_m = divide(tile, across), p0 = tile_m * BM;
        const int k0 = static_cast<int>(tile - tile_m * across) * BN;
        for (int i = threadIdx.x; i < 2 * BN; i += THREADS) {
            const int k = k0 + i % BN;
            const float* const its = reinterpret_cast<const float*>(packed) + (i < BN ? 0 : panels * PANEL);
            scale[i] = k < K ? its[k] : 0.0f;
        }
        for (int tap = warp; tap < units.taps; tap += THREADS / 32) {
            int its_groups = 0;
#pragma unroll
            for (int r = 0; r < BM; r += 32) {
                const i64 m = p0 + r + lane;
                int row = m < M ? rows[tap * M + m] : -1;
                if (row >= N) row = -1;
                sources[tap * BM + r + lane] = row;
                if (__any_sync(0xffffffffu, row >= 0)) its_groups |= 1 << r / GROUP;
            }
            if (lane == 0) groups[tap] = its_groups;
        }
        __syncthreads();
        if (warp == 0) {
            int count = 0;
            for (int first = 0; first < units.chunks; first += 32) {
                const int chunk = first + lane;
                int its_groups = 0;
                if (chunk < units.chunks)
                    for (int tap = units.tap(chunk * 8); tap <= units.tap(chunk * 8 + 7) && tap < units.taps; ++tap)
                        its_groups |= groups[tap];
                const u32 there = __ballot_sync(0xffffffffu, its_groups != 0);
                if (its_groups) list[count + __popc(there & ((1u << lane) - 1))] = chunk << 8 | its_groups;
                count += __popc(there);
            }
            if (lane == 0) listed = count;
        }
        __syncthreads();

        const int count = listed;
        // Of a panel that BN covers in part: the rows from k0 % PANEL on.
        const u8* const weights = packed + static_cast<i64>(panels) * (2 * PANEL * 4) +
                                  static_cast<i64>(k0 / PANEL) * units.chunks * PANEL_CHUNK + k0 % PANEL * TILE_ROW;
        const auto copy_next = [&](int i, int slot) {
            u8* const at = ring + slot * STAGE;
            const int chunk = list[i] >> 8;
#pragma unroll
            for (int b = threadIdx.x * 16; b < BN * TILE_ROW; b += THREADS * 16) {
                const int panel = b / PANEL_CHUNK;
                const bool there = k0 / PANEL + panel < panels;
                const u32 from = static_cast<u32>((panel * units.chunks + chunk) * PANEL_CHUNK + b % PANEL_CHUNK);
                copy_async_16(at + A + b, weights + (there ? from : 0), there);
            }
            const int unit = chunk * 8 + own_unit, tap = units.tap(unit);
            const bool real = tap < units.taps;
            const int* const its = sources + (real ? tap : 0) * BM + own_row;
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass)
                copy_row<VECTOR_IN>(at + to + pass * (PASS * TILE_ROW), x, real ? its[pass * PASS] : -1,
                                    (unit - tap * units.per_tap) * LANES, C);
        };
#pragma unroll 1
        for (int s = 0; s < AHEAD; ++s) {
            if (s < count) copy_next(s, s);
            copy_async_commit();
        }
        const Result<T, SiteRows> result{residual, y, scale, bias, {p0, M, valid}, k0, channels_out};
        if (residual) result.template prefetch<BM, BN>(threadIdx.x, THREADS);

        float acc[MT][NT][4];
        clear(acc);
        int slot = 0, fill = AHEAD;
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            copy_async_wait<AHEAD - 1>();
            if constexpr (ROUND)  // what this thread has copied
                for (int pass = 0; pass < PASSES; ++pass) round_four(ring + slot * STAGE + to + pass * (PASS * TILE_ROW));
            __syncthreads();
            if (i + AHEAD < count) copy_next(i + AHEAD, fill);
            copy_async_commit();
            if (list[i] >> warp % WM & 1) Product::multiply(acc, ring + slot * STAGE, ring + slot * STAGE + A);
            if (++slot == STAGES) slot = 0;
            if (++fill == STAGES) fill = 0;
        }
        copy_async_wait<0>();
        result.template store<ACTIVATION, VECTOR_OUT, Product>(acc);
        __syncthreads();
    }
}

DEVICE float add_product(float sum, float a, float b) { return __fmaf_rn(a, b, sum); }
DEVICE double add_product(double sum, double a, double b) { return __fma_rn(a, b, sum); }

// Sums tap by tap, channel by channel. A tap that a row does not have adds nothing to its sum, whatever the weights.
template <typename T, int V, int ROWS, int ACTIVATION>
__global__ void __launch_bounds__(256)
    site_conv_fma(const T* __restrict__ x,                                // [N, C]
                  const T* __restrict__ w,                                // [taps, C / groups, K]
                  const int* __restrict__ rows,                           // [taps, M]
                  const u8* __restrict__ valid,                           // [M] or null: all rows
                  const typename ComputeOf<T>::type* __restrict__ scale,  // [K] or null
                  const typename ComputeOf<T>::type* __restrict__ bias,   // [K] or null
                  const T* __restrict__ residual,                         // [M, K] or null
                  T* __restrict__ y,                                      // [M, K]
                  i64 N, i64 M, i64 taps, i64 C, i64 K, i64 groups) {
    using Compute = typename ComputeOf<T>::type;
    using Vector = typename Bytes<V * sizeof(T)>::type;
    const i64 vectors = divide(K, V), per_group = divide(C, groups), out_per_group = divide(K, groups);
    const i64 total = ceil_div<i64>(M, ROWS) * vectors, step = static_cast<i64>(gridDim.x) * 256;
    for (i64 i = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x; i < total; i += step) {
        const i64 block = divide(i, vectors), k = (i - block * vectors) * V, m0 = block * ROWS;
        const T* const channels = x + divide(k, out_per_group) * per_group;
        Compute sums[ROWS][V] = {};
        for (i64 tap = 0; tap < taps; ++tap) {
            const T* from[ROWS];
            bool any = false;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int row = m0 + r < M ? rows[tap * M + m0 + r] : -1;
                from[r] = row >= 0 && row < N ? channels + row * C : nullptr;
                any |= from[r] != nullptr;
            }
            if (!any) continue;
            const T* weights = w + tap * per_group * K + k;
            for (i64 c = 0; c < per_group; ++c, weights += K) {
                const Elements<T, Vector> weight(*reinterpret_cast<const Vector*>(weights));
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    if (!from[r]) continue;
                    const Compute value = to_compute<Compute>(from[r][c]);
#pragma unroll
                    for (int v = 0; v < V; ++v)
                        sums[r][v] = add_product(sums[r][v], value, to_compute<Compute>(weight.element[v]));
                }
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (m0 + r >= M) break;
            const i64 at = (m0 + r) * K + k;
            Elements<T, Vector> result(zero<Vector>()), addend(zero<Vector>());
            if (!valid || valid[m0 + r]) {
                if (residual) addend.vector = *reinterpret_cast<const Vector*>(residual + at);
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    Compute value = sums[r][v];
                    if (scale) value = multiply(value, scale[k + v]);
                    if (bias) value += bias[k + v];
                    if (residual) value += to_compute<Compute>(addend.element[v]);
                    result.element[v] = from_compute<T>(activate<ACTIVATION>(value));
                }
            }
            *reinterpret_cast<Vector*>(y + at) = result.vector;
        }
    }
}
