// site_conv.cu: a convolution over a kernel map, from rows of features to rows of features.
//   y[m, k] = activation(scale[k] * sum(x[rows[t, m], c] * w[t, c, k]) + bias[k] + residual[m, k])
// over the taps t at which row m reads a row; 0 where m is no valid row.
// Source: the implicit matrix product of cuDNN (Chetlur et al. 2014, arXiv:1410.0759), with gathered rows.
// Python: sbnet_cupy/submanifold/site_conv.py; launched by site_conv_launch.py
// pack_site_weights:  lays weights, scale and bias out as site_conv stages them.
// site_conv:          products on tensor cores; a persistent grid, a thread block for each tile of BM rows and BN channels.
// site_conv_fma:      products by fused multiply-add, for groups and for numbers that tensor cores do not take; a persistent
//                     grid of 256 threads, each with V channels of ROWS rows.
// pack_site_weights lets the next launch begin once all before have ended; those that multiply wait before they read what it
// has packed.
// site_conv_pipelined.cuh has the same for wide sums, where some warps copy and others multiply, site_conv_shared.cuh where thread
// blocks share tiles; site_conv_tiles.cuh by tiles that read each row once; site_conv_once.cuh for few sites, where a tile copies
// all that it reads at once.
#include "submanifold/site_conv_once.cuh"
#include "submanifold/site_conv_shared.cuh"
#include "submanifold/site_conv_tiles.cuh"

// V: the type of scale and bias. The steps of a tap are a multiple of `whole`. Weight [tap, c, k] is number `start` + tap *
// tap_step + c * c_step + k * k_step of w, which may so be those of the transposed convolution.
template <typename T, typename V, bool ROUND>
__global__ void __launch_bounds__(256)
    pack_site_weights(const T* __restrict__ w,      // taps * C * K numbers
                      const V* __restrict__ scale,  // [K] or null
                      const V* __restrict__ bias,   // [K] or null
                      u8* __restrict__ packed, i64 taps, i64 C, i64 K, i64 whole, i64 start, i64 tap_step, i64 c_step,
                      i64 k_step) {
    constexpr int LANES = 16 / sizeof(T);
    overlap_launches(w, scale, bias);
    const Steps steps(taps, C, K, LANES, static_cast<int>(whole));
    const i64 panels = steps.panels, first = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
    const i64 step = static_cast<i64>(gridDim.x) * 256;
    for (i64 i = first; i < 2 * PANEL * panels; i += step) {
        const bool is_scale = i < PANEL * panels;
        const i64 k = is_scale ? i : i - PANEL * panels;
        const V* const table = is_scale ? scale : bias;
        reinterpret_cast<float*>(packed)[i] = k < K && table ? to_compute<float>(table[k]) : is_scale ? 1.0f : 0.0f;
    }
    u8* const panel_bytes = packed + 2 * PANEL * panels * 4;
    for (i64 i = first; i < panels * steps.chunks * (PANEL * 8); i += step) {
        const int u = static_cast<int>(i % 8), column = static_cast<int>(i / 8 % PANEL);
        const i64 slice = divide(i, 8 * PANEL), panel = divide(slice, steps.chunks);
        const int number = static_cast<int>(slice - panel * steps.chunks) * 4 + u / 2;
        const int tap = static_cast<int>(static_cast<u32>(number) / static_cast<u32>(steps.per_tap));
        const int c0 = ((number - tap * steps.per_tap) * 2 + u % 2) * LANES;
        const i64 k = panel * PANEL + ChannelOrder<T>::channel(column);
        Elements<T, uint4> value(zero<uint4>());
#pragma unroll
        for (int e = 0; e < LANES; ++e) {
            const i64 c = c0 + e;
            if (tap < steps.taps && c < C && k < K) value.element[e] = w[start + tap * tap_step + c * c_step + k * k_step];
            if constexpr (ROUND) value.element[e] = __uint_as_float(to_tf32(value.element[e]));
        }
        *reinterpret_cast<uint4*>(panel_bytes + slice * PANEL_CHUNK + swizzled(column, u)) = value.vector;
    }
}

// Thread blocks for which a multiprocessor has registers: as many as there are without a spill.
template <typename T, int BM, int BN, int THREADS>
constexpr int RESIDENT = DEVICE_ARCHITECTURE < 800                 ? 1
                         : THREADS < 256                           ? 384 / THREADS
                         : sizeof(T) == 2 && BM * BN < 128 * 128 ? 2
                                                                   : 1;

//   VECTOR_IN    rows of x are whole vectors of 16 bytes, aligned; VECTOR_OUT: those of y and the residual
//   CACHED       rows of x come through the L1 cache
//   ROUND        x is float, rounded to tf32 in shared memory
template <typename T, int BM, int BN, int WM, int WN, int STAGES, bool VECTOR_IN, bool VECTOR_OUT, bool CACHED,
          bool ROUND, int ACTIVATION>
__global__ void __launch_bounds__(WM * WN * 32, RESIDENT<T, BM, BN, WM * WN * 32>)
    site_conv(const T* __restrict__ x,         // [N, C]
              const u8* __restrict__ packed,
              const int* __restrict__ rows,    // [taps, M]: in order
              const int* __restrict__ order,   // [M] or null
              const u32* __restrict__ masks,   // [ceil(M / 32)][ceil(taps / 32)]
              const u16*, const int2*,         // turns and cuts, of site_turns.cuh
              const u8* __restrict__ valid,    // [M] or null: all rows
              const T* __restrict__ residual,  // [M, K] or null
              T* __restrict__ y,               // [M, K]
              i64 N, i64 M, i64 taps, i64 C, i64 K, i64) {
    using Product = TileMma<T, BM, BN, WM, WN>;
    constexpr int THREADS = Product::THREADS, MT = Product::MT, NT = Product::NT, LANES = 16 / sizeof(T);
    constexpr int A = BM * TILE_ROW, STAGE = A + BN * TILE_ROW, AHEAD = STAGES - 1;
    constexpr int PASS = THREADS / 8;  // rows that all threads copy at once
    static_assert(BM % PASS == 0 && BN % PASS == 0 && PASS % 8 == 0 && PASS <= ROWS_OF_GROUP && AHEAD >= 1,
                  "threads share the rows evenly");
    static_assert(BM / WM == ROWS_OF_GROUP, "a group of rows belongs to a group of warps");

    DYNAMIC_SHARED(u8, ring);
    float* const scale = reinterpret_cast<float*>(ring + STAGES * STAGE);
    float* const bias = scale + BN;
    int* const places = reinterpret_cast<int*>(bias + BN);  // [BM]
    int* const inside = places + BM;                        // [BM]
    int* const sources = inside + BM;                       // [taps][BM]
    int* const list = sources + taps * BM;                  // [taps]
    u32* const chunk_steps = reinterpret_cast<u32*>(list + taps);  // [chunks]: four bits for each group of rows
    __shared__ int listed;

    const Steps steps(taps, C, K, LANES);
    const SiteTable<BM> table{rows, order, masks, valid, M, steps.taps};
    const int channels_out = static_cast<int>(K), across = ceil_div(channels_out, BN);
    const int warp = threadIdx.x / 32, own_unit = threadIdx.x % 8, own_row = threadIdx.x / 8;
    const int to = swizzled(own_row, own_unit);  // PASS is a multiple of 8: the same place in every pass
    const u8* const weights = steps.weights(packed);
    const i64 tiles = ceil_div<i64>(M, BM) * across;
    for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const i64 tile_m = divide(tile, across), p0 = tile_m * BM;
        const int k0 = static_cast<int>(tile - tile_m * across) * BN;
        if (warp == 0) {
            const int count = table.list(p0, M, list);
            if (threadIdx.x == 0) listed = count;
        }
        table.find_places(p0, M, places, inside, threadIdx.x, THREADS);
        __syncthreads();
        const int taps_here = listed, count = ceil_div(taps_here * steps.per_tap, 4);
        table.copy_sources(p0, list, taps_here, sources, threadIdx.x, THREADS);
        copy_async_commit();
        for (int i = threadIdx.x; i < count; i += THREADS) {
            u32 bits = 0;
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                const int number = static_cast<int>(static_cast<u32>(i * 4 + s) / static_cast<u32>(steps.per_tap));
                const int groups = number < taps_here ? list[number] & 255 : 0;
#pragma unroll
                for (int g = 0; g < BM / ROWS_OF_GROUP; ++g) bits |= static_cast<u32>(groups >> g & 1) << (4 * g + s);
            }
            chunk_steps[i] = bits;
        }
        dependent_wait();  // for the packed weights
        const u8* const tables = loaded_later(packed);
        for (int i = threadIdx.x; i < 2 * BN; i += THREADS) scale[i] = steps.table(tables, i / BN, k0 + i % BN);
        copy_async_wait<0>();
        __syncthreads();

        int number = own_unit / 2 / steps.per_tap, step = own_unit / 2 % steps.per_tap;  // this thread's of the next chunk
        const auto copy_next = [&](int slot) {
            u8* const at = ring + slot * STAGE + to;
            if (number < taps_here) {
                const int tap = list[number] >> 8, all = tap * steps.per_tap + step;  // number of the step
                const u8* const its = weights + static_cast<i64>(all / 4) * PANEL_CHUNK + swizzled(own_row, all % 4 * 2 + own_unit % 2);
#pragma unroll
                for (int n = 0; n < BN; n += PASS) {
                    const int panel = (k0 + n) / PANEL, row = (k0 + n) % PANEL;
                    const bool there = panel < steps.panels;
                    copy_async_16(at + A + n * TILE_ROW,
                                  there ? its + static_cast<i64>(panel) * steps.chunks * PANEL_CHUNK + row * TILE_ROW : weights,
                                  there);
                }
                const int* const from = sources + number * BM + own_row;
                const int groups = list[number];
#pragma unroll
                for (int m = 0; m < BM; m += PASS)
                    if (groups >> m / ROWS_OF_GROUP & 1)
                        copy_row<VECTOR_IN, CACHED>(at + m * TILE_ROW, x, from[m], N, (step * 2 + own_unit % 2) * LANES, C);
            }
            for (step += 4; step >= steps.per_tap; step -= steps.per_tap) ++number;
        };
#pragma unroll 1
        for (int s = 0; s < AHEAD; ++s) {
            if (s < count) copy_next(s);
            copy_async_commit();
        }
        const Result<T, SiteRows> result{residual, y, scale, bias, {places, inside}, k0, channels_out};
        if (residual) result.template prefetch<BM, BN>(threadIdx.x, THREADS);

        float acc[MT][NT][4];
        clear(acc);
        int slot = 0, fill = AHEAD;
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            copy_async_wait<AHEAD - 1>();
            if constexpr (ROUND)  // what this thread has copied
                for (int m = 0; m < BM; m += PASS) round_four(ring + slot * STAGE + to + m * TILE_ROW);
            __syncthreads();
            if (i + AHEAD < count) copy_next(fill);
            copy_async_commit();
            const u32 own = chunk_steps[i] >> (warp % WM * 4) & 15;
            if (own) Product::multiply(acc, ring + slot * STAGE, ring + slot * STAGE + A, own);
            if (++slot == STAGES) slot = 0;
            if (++fill == STAGES) fill = 0;
        }
        copy_async_wait<0>();
        result.template store<ACTIVATION, VECTOR_OUT, false, Product>(acc);
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
