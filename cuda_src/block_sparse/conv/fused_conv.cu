// fused_conv.cu: a convolution at the active blocks only, from image to image.
//   y[n, p, q, k] = activation(scale[k] * sum(x[n, p * SH - top + r, q * SW - left + s, c] * w[r, s, c, k])
//                              + bias[k] + residual[n, p, q, k])     at pixels (p, q) of active blocks
// Source: the implicit matrix product of cuDNN (Chetlur et al. 2014, arXiv:1410.0759), with the
// block list of SBNet.  Python: sbnet_cupy/block_sparse/conv/fused_conv.py
// fused_conv:   a thread block takes tiles of TH x TW outputs x NS channels, one after another. The
//               tile's input and the weights go to shared memory (halo_tile.cuh), an engine
//               multiplies them, and lanes write the image.
// pack_weights: lays weights, scale and bias out as fused_conv stages them, once for many calls. Thread blocks past the
//               slices write the result's background, if there is an image.
// Launch: WM * WN * WK warps; grid (blocks of the list, persistent; slices; tiles of a block). See cuda_src/README.md for the pictures.
#include "dense/activation.cuh"
#include "block_sparse/background.cuh"
#include "block_sparse/conv/engines.cuh"
#include "block_sparse/tile_scheduler.cuh"

// ---------------------------------------------------------------------------- packed weights

// For each slice of NS output channels: scale and bias as float[2][NS], and for each chunk of input
// channels 2 * STEPS units x NS channels x 16 bytes.
template <class H, int NS>
struct Slice {
    static constexpr int TABLES = 2 * NS * 4, CHUNK = H::STEPS * 2 * NS * 16;
    static __host__ __device__ i64 bytes(i64 chunks) { return TABLES + chunks * CHUNK; }
};

template <typename T, int PLANES, int NS, int WN, int R, int S, bool ROUND, typename Table>
__global__ void __launch_bounds__(256)
    pack_weights(const T* __restrict__ w, const Table* __restrict__ scale, const Table* __restrict__ bias,
                 u8* __restrict__ packed, const u8* __restrict__ base, u8* __restrict__ image,  // or null
                 i64 slices, i64 chunks, i64 C, i64 K, i64 step_r, i64 step_s, i64 step_c, i64 step_k,
                 i64 image_bytes) {
    using H = Halo<8, 8, R, S, 1, 1, PLANES>;  // the order of K, whatever the tile
    constexpr int LANES = 16 / sizeof(T);
    const i64 units = chunks * (H::STEPS * 2 * NS), slice = blockIdx.y;
    if (slice >= slices) {
        const i64 number = (slice - slices) * gridDim.x + blockIdx.x;
        if (image) write_background(base, image, image_bytes, number, (gridDim.y - slices) * gridDim.x);
        return;
    }
    u8* const out = packed + slice * Slice<H, NS>::bytes(chunks);
    const i64 i = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
    if (i < 2 * NS) {
        const i64 k = slice * NS + i % NS;
        const Table* table = i < NS ? scale : bias;
        reinterpret_cast<float*>(out)[i] = k < K && table ? to_compute<float>(table[k]) : i < NS ? 1.0f : 0.0f;
    }
    if (i >= units) return;
    const int column = static_cast<int>(i % NS), u = static_cast<int>(i / NS % (H::STEPS * 2));
    const i64 chunk = i / (H::STEPS * 2 * NS);
    const i64 k = slice * NS + ChannelOrder<T, NS / 8 / WN>::channel(column);
    const Unit<H> unit(u);
    Elements<T, uint4> value(zero<uint4>());
#pragma unroll
    for (int e = 0; e < LANES; ++e) {
        const i64 c = (chunk * PLANES + unit.plane) * LANES + e;
        if (u < H::UNITS && c < C && k < K)
            value.element[e] = w[unit.tap / S * step_r + unit.tap % S * step_s + c * step_c + k * step_k];
        if constexpr (ROUND) value.element[e] = __uint_as_float(to_tf32(value.element[e]));
    }
    reinterpret_cast<uint4*>(out + Slice<H, NS>::TABLES)[i] = value.vector;
}

// ---------------------------------------------------------------------------- sizes

struct Problem : Blocks {
    int C, H, W, K, top, left;  // of images; output channels; padding
    int chunks;                 // of input channels
    bool channels_last;
};

// ---------------------------------------------------------------------------- staging

// Visit what this thread stages of a tile: visit(row, column of the input tile, plane).
template <class H, int THREADS, bool PIXELS_FIRST, class Visit>
DEVICE void for_each_vector(Visit visit) {
#pragma unroll 4
    for (int i = threadIdx.x; i < H::IH * H::IW * H::PLANES; i += THREADS) {
        const int plane = PIXELS_FIRST ? i / (H::IH * H::IW) : i % H::PLANES;
        const int pixel = PIXELS_FIRST ? i % (H::IH * H::IW) : i / H::PLANES;
        visit(pixel / H::IW, pixel % H::IW, plane);
    }
}

// x of one tile and one chunk of channels into shared memory: 16 bytes at a time if VECTOR (NHWC of
// whole vectors), else element by element from any layout. Zeros outside the image.
template <typename T, class H, int THREADS, bool VECTOR, bool ROUND>
struct Stage {
    static DEVICE void load(u8* shared, const T* __restrict__ x, const Tile& tile, int chunk, const Problem& g) {
        constexpr int LANES = 16 / sizeof(T);
        const int y0 = tile.p * H::SH - g.top, x0 = tile.q * H::SW - g.left, c0 = chunk * (H::PLANES * LANES);
        const int rows = tile.rows > 0 ? g.H : 0;  // nothing is inside a tile without pixels
        const i64 pixel_step = VECTOR || g.channels_last ? g.C : 1;
        const i64 channel_step = VECTOR || g.channels_last ? 1 : static_cast<i64>(g.H) * g.W;
        const i64 row_step = pixel_step * g.W;
        const T* const corner = x + static_cast<i64>(tile.n) * g.C * g.H * g.W + y0 * row_step + x0 * pixel_step;
        for_each_vector<H, THREADS, !VECTOR>([&](int row, int column, int plane) {
            const int c = c0 + plane * LANES;
            const bool inside = static_cast<u32>(y0 + row) < static_cast<u32>(rows) &&
                                static_cast<u32>(x0 + column) < static_cast<u32>(g.W) && c < g.C;
            const T* const from = corner + (row * row_step + column * pixel_step + c * channel_step);
            u8* const to = shared + plane * H::PLANE + H::at(row, column);
            if constexpr (VECTOR) {
                copy_async_16(to, inside ? from : x, inside);
            } else {
                Elements<T, uint4> value(zero<uint4>());
#pragma unroll
                for (int e = 0; e < LANES; ++e)
                    if (inside && c + e < g.C) value.element[e] = from[e * channel_step];
                *reinterpret_cast<uint4*>(to) = value.vector;
                if constexpr (ROUND) round_to_tf32(to);
            }
        });
    }
    // After this thread's own copies have landed, before the barrier.
    static DEVICE void finish(u8* shared) {
        if constexpr (VECTOR && ROUND)
            for_each_vector<H, THREADS, false>([&](int row, int column, int plane) {
                round_to_tf32(shared + plane * H::PLANE + H::at(row, column));
            });
    }
};

// ---------------------------------------------------------------------------- the kernel

// Dynamic shared memory of fused_conv, in bytes from its begin: tables, weights, input tiles, a plane of
// zeros, sums of K workers, a barrier.
template <class Product, class H, int NS, int WK, int STAGES, bool RESIDENT>
struct Memory {
    static constexpr bool HAS_ZEROS = Product::WANTS_FENCE && H::LAST_ALONE;
    static constexpr int WEIGHTS = Slice<H, NS>::TABLES;
    static constexpr int INPUTS = WEIGHTS + (RESIDENT ? 1 : STAGES) * Slice<H, NS>::CHUNK;
    static constexpr int ZEROS = INPUTS + STAGES * H::BYTES, PARTIALS = ZEROS + (HAS_ZEROS ? H::PLANE : 0);
    static constexpr int BARRIER = PARTIALS + (WK - 1) * (H::TH * H::TW * NS * 4), BYTES = BARRIER + 16;
};

// A warp's results to the image, from channel k0 on; scale and bias are those of its channels, the
// bias `slice` floats behind.
template <bool VECTOR, int ACTIVATION, int TW, typename T, int MT, int NT, class Pixel>
DEVICE void store(const float (&acc)[MT][NT][4], const float* scale, int slice, const T* __restrict__ residual,
                  T* __restrict__ y, const Tile& tile, int k0, const Problem& g, Pixel pixel) {
    constexpr int GROUPS = ChannelOrder<T, NT>::GROUPS, COUNT = 2 * GROUPS;
    using Vector = typename Bytes<COUNT * sizeof(T)>::type;
    const int lane = recomputed(threadIdx.x % 32);  // (or places are kept in registers, from tile to tile)
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = pixel(m, lane / 4 + 8 * half), i = at / TW, j = at % TW;
            if (i >= tile.rows || j >= tile.columns) continue;
            const bool together = VECTOR || g.channels_last;
            const i64 size = static_cast<i64>(g.P) * g.Q, step = together ? 1 : size;
            const i64 place = static_cast<i64>(tile.p + i) * g.Q + tile.q + j;
            const i64 origin = tile.n * size * g.K + (together ? place * g.K : place);
#pragma unroll
            for (int group = 0; group < NT / GROUPS; ++group) {
                const int first = group * 8 * GROUPS + lane % 4 * COUNT;
                const int k = k0 + first;
                const i64 to = origin + k * step;
                Elements<T, Vector> add_to(zero<Vector>()), result(zero<Vector>());
                if constexpr (VECTOR) {
                    if (k >= g.K) continue;
                    if (residual) add_to.vector = *reinterpret_cast<const Vector*>(residual + to);
                }
#pragma unroll
                for (int e = 0; e < COUNT; ++e) {
                    const float sum = acc[m][group * GROUPS + e / 2][2 * half + e % 2];
                    float value = __fmaf_rn(sum, scale[first + e], scale[slice + first + e]);
                    if constexpr (VECTOR) {
                        if (residual) value += to_compute<float>(add_to.element[e]);
                        result.element[e] = from_compute<T>(activate<ACTIVATION>(value));
                    } else if (k + e < g.K) {
                        if (residual) value += to_compute<float>(residual[to + e * step]);
                        y[to + e * step] = from_compute<T>(activate<ACTIVATION>(value));
                    }
                }
                if constexpr (VECTOR) *reinterpret_cast<Vector*>(y + to) = result.vector;
            }
        }
}

template <template <typename, class, int, int, int, int> class Engine, typename T, int PLANES, int NS, int TH,
          int TW, int R, int S, int SH, int SW, int WM, int WN, int WK, int STAGES, bool RESIDENT, bool VECTOR_IN,
          bool VECTOR_OUT, bool ROUND, int ACTIVATION, int BLOCKS, bool BULK>
__global__ void __launch_bounds__(WM * WN * WK * 32, BLOCKS)
    fused_conv(const T* __restrict__ x, const u8* __restrict__ packed, const T* __restrict__ residual,
               const int* __restrict__ bin_counts, const int* __restrict__ indices, T* __restrict__ y, i64 M,
               i64 N, i64 C, i64 H_, i64 W_, i64 K, i64 P, i64 Q, i64 block_h, i64 block_w, i64 blocks_h,
               i64 blocks_w, i64 top, i64 left, i64 chunks, i64 channels_last) {
    using H = Halo<TH, TW, R, S, SH, SW, PLANES>;
    using Product = Engine<T, H, NS, WM, WN, WK>;
    constexpr int THREADS = WM * WN * WK * 32, MT = Product::MT, NT = Product::NT;
    using Packed = Slice<H, NS>;
    using Input = Stage<T, H, THREADS, VECTOR_IN, ROUND>;
    using At = Memory<Product, H, NS, WK, STAGES, RESIDENT>;

    DYNAMIC_SHARED(u8, shared);
    const float* const tables = reinterpret_cast<const float*>(shared);
    u8* const weights = shared + At::WEIGHTS;
    u8* const inputs = shared + At::INPUTS;
    u8* const zeros = shared + At::ZEROS;
    float4* const partials = reinterpret_cast<float4*>(shared + At::PARTIALS);
    u64* const arrived = reinterpret_cast<u64*>(shared + At::BARRIER);

    const auto narrow = [](i64 value) { return static_cast<int>(value); };
    const Problem g{{narrow(M), narrow(N), narrow(P), narrow(Q), narrow(block_h), narrow(block_w),
                     narrow(blocks_h), narrow(blocks_w)},
                    narrow(C), narrow(H_), narrow(W_), narrow(K), narrow(top), narrow(left), narrow(chunks),
                    channels_last != 0};
    const int warp = threadIdx.x / 32;
    const int wm = warp % WM, wn = warp / WM % WN, wk = warp / (WM * WN);
    const int slice = blockIdx.y;  // of output channels
    const u8* const mine = packed + slice * Packed::bytes(g.chunks);

    dependent_wait();
    Tiles<TH, TW> tiles(g, indices, blockIdx.x, gridDim.x);
    tiles.limit(*bin_counts);
    dependent_launch();
    if (!tiles.any()) return;

    // Tables, and resident weights, once.
    constexpr int ONCE = RESIDENT ? Packed::TABLES + Packed::CHUNK : Packed::TABLES;
    if constexpr (BULK) {
        if (threadIdx.x == 0) {
            barrier_init(arrived, 1);
            barrier_init_fence();
            barrier_expect(arrived, ONCE);
            bulk_copy(shared, mine, ONCE, arrived);
        }
    } else {
        for (int i = threadIdx.x * 16; i < ONCE; i += THREADS * 16) copy_async_16(shared + i, mine + i, true);
    }
    if constexpr (At::HAS_ZEROS)
        for (int i = threadIdx.x * 16; i < H::PLANE; i += THREADS * 16)
            *reinterpret_cast<uint4*>(zeros + i) = zero<uint4>();

    struct Work {
        Tile tile;
        int chunk;
        bool any;
    };
    const auto stage = [&](const Work& work, int slot) {
        Input::load(inputs + slot * H::BYTES, x, work.tile, work.chunk, g);
        if constexpr (!RESIDENT) {
            const u8* const from = mine + Packed::TABLES + static_cast<i64>(work.chunk) * Packed::CHUNK;
            for (int i = threadIdx.x * 16; i < Packed::CHUNK; i += THREADS * 16)
                copy_async_16(weights + slot * Packed::CHUNK + i, from + i, true);
        }
    };
    Work now{tiles.take(), 0, true};
    stage(now, 0);
    copy_async_commit();

    float acc[MT][NT][4];
    int slot = 0;
    for (bool first = true;; first = false) {
        Work next{now.tile, now.chunk + 1, true};
        if (RESIDENT || next.chunk == g.chunks) {
            next.any = tiles.any();
            next.chunk = 0;
            if (next.any) next.tile = tiles.take();
        }
        if constexpr (STAGES == 2) {  // the next load runs during this product
            if (next.any) stage(next, slot ^ 1);
            copy_async_commit();
        }
        copy_async_wait<STAGES - 1>();
        Input::finish(inputs + slot * H::BYTES);
        if constexpr (Product::WANTS_FENCE) shared_fence();
        __syncthreads();
        if (BULK && first) barrier_wait(arrived, 0);

        if (now.chunk == 0) clear(acc);
        Product::taps(acc, inputs + slot * H::BYTES, RESIDENT ? weights : weights + slot * Packed::CHUNK, zeros,
                      wm, wn, wk);
        if (next.chunk == 0) {  // that was the tile's last chunk
            if constexpr (WK > 1) sum_partials<WM * WN, WK>(acc, partials, wn * WM + wm, wk);
            if (wk == 0)
                store<VECTOR_OUT, ACTIVATION, TW>(acc, tables + wn * NT * 8, NS, residual, y, now.tile,
                                                  slice * NS + wn * NT * 8, g,
                                                  [&](int m, int row) { return Product::pixel(wm, m, row); });
        }
        if (!next.any) break;
        __syncthreads();  // the slot may be filled again
        if constexpr (STAGES == 2) {
            slot ^= 1;
        } else {
            stage(next, 0);
            copy_async_commit();
        }
        now = next;
    }
}
