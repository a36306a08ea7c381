// unit_products.cuh: the three products of a pre-activation residual unit, for pixels of images and of stacks.
//   y = x + w3 * a3(w2 * a2(w1 * a1(x)))     a_i(t) = relu(t * scale_i + shift_i), w2 3 x 3
// A thread block takes tiles of TH x TW pixels, one after another:
//     1  h1 = a2(w1 * a1(x)) over the tile and a rim of one pixel. A comes from global memory straight
//        into registers. Zero where there is no pixel: that is the padding of the 3 x 3 convolution.
//     2  h2 = a3(w2 * h1) over the tile, by an engine of engines.cuh
//     3  y = x + w3 * h2
// h1 and h2 stay in shared memory; x is read once (and its middle again, from the cache).
// A CLUSTER of thread blocks may share a tile: each has a part of the weights, makes a part of the
// channels of h1, h2 and y, and stores its h1 and h2 in all of them.
// Where pixels lie says a class Pixels (image_pixels.cuh, stack_pixels.cuh):
//   take()           go to the tile at hand; any() says whether there is another one
//   inside(q)        whether pixel number q of the tile with its rim, in raster order, is there to be read
//   rim_pixel(q)     where it lies, in pixels of from(x)
//   middle(p)        where pixel number p of the tile itself lies
//   look(), keep()   between products: find where the next tile's pixels lie, and keep that for take()
#pragma once

#include "core/cluster.cuh"
#include "dense/activation.cuh"
#include "block_sparse/bottleneck/unit_packing.cuh"
#include "block_sparse/conv/engines.cuh"

// Pixel of a tile: whether its result is stored, whether x is there to be read (0 is stored where not), and where.
struct Spot {
    bool stored, real;
    i64 pixel;
};

// relu(t * scale + shift) of a lane's 16 bytes of x, as fragments of A: four words. TIGHT: scale and
// shift are of type T too, else float.
template <typename T, bool TIGHT, bool ROUND>
DEVICE void activate_words(u32 (&words)[4], uint4 x, const u8* scale, const u8* shift) {
    if constexpr (TIGHT) {
        const uint4 a = *reinterpret_cast<const uint4*>(scale), b = *reinterpret_cast<const uint4*>(shift);
        words[0] = fma_relu<T>(x.x, a.x, b.x), words[1] = fma_relu<T>(x.y, a.y, b.y);
        words[2] = fma_relu<T>(x.z, a.z, b.z), words[3] = fma_relu<T>(x.w, a.w, b.w);
    } else {
        constexpr int LANES = 16 / sizeof(T);
        const Elements<T, uint4> in(x);
        float sums[LANES];
#pragma unroll
        for (int e = 0; e < LANES; e += 4) {
            const float4 a = *reinterpret_cast<const float4*>(scale + 4 * e);
            const float4 b = *reinterpret_cast<const float4*>(shift + 4 * e);
            sums[e] = __fmaf_rn(to_compute<float>(in.element[e]), a.x, b.x);
            sums[e + 1] = __fmaf_rn(to_compute<float>(in.element[e + 1]), a.y, b.y);
            sums[e + 2] = __fmaf_rn(to_compute<float>(in.element[e + 2]), a.z, b.z);
            sums[e + 3] = __fmaf_rn(to_compute<float>(in.element[e + 3]), a.w, b.w);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (sizeof(T) == 2)
                words[i] = pack<T, 1>(sums[2 * i], sums[2 * i + 1]);
            else
                words[i] = ROUND ? to_tf32(relu(sums[i])) : bits_of(relu(sums[i]));
        }
    }
}

// Two steps of K with A in registers: `low` of rows l / 4, `high` of rows l / 4 + 8.
template <typename T, int NT, bool GROUP>
DEVICE void multiply_chunk(float (&acc)[NT][4], const u32 (&low)[4], const u32 (&high)[4], const u8* w) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        const u32 a[4] = {low[2 * step], high[2 * step], low[2 * step + 1], high[2 * step + 1]};
        if constexpr (GROUP) {
            Wgmma<T, NT * 8>::registers(&acc[0][0], a,
                                        matrix_descriptor(shared_address(w) + step * NT * 256, NT * 128, 128));
        } else {
            u32 b[NT][2];
            load_weights<NT, NT * 8>(b, w + step * NT * 256);
#pragma unroll
            for (int n = 0; n < NT; ++n) multiply_accumulate<T>(acc[n], a, b[n][0], b[n][1]);
        }
    }
}

// relu of two neighbouring channels of a pixel, or zeros, into planes of 16 bytes, in every block of
// the cluster.
template <typename T, int CLUSTER, bool ROUND>
DEVICE void store_pair(u8* plane0, int plane_bytes, int pixel, int channel, float a, float b, bool real) {
    constexpr int LANES = 16 / sizeof(T);
    u8* const at = plane0 + channel / LANES * plane_bytes + pixel * 16 + channel % LANES * sizeof(T);
    if constexpr (sizeof(T) == 4) {
        const u32 first = ROUND ? to_tf32(relu(a)) : bits_of(relu(a)), second = ROUND ? to_tf32(relu(b)) : bits_of(relu(b));
        Cluster<CLUSTER>::store(reinterpret_cast<uint2*>(at), make_uint2(real ? first : 0, real ? second : 0));
    } else {
        const u32 pair = pack<T, 1>(a, b);
        Cluster<CLUSTER>::store(reinterpret_cast<u32*>(at), real ? pair : 0);
    }
}

// What a warp adds its sums of NT groups of channels to, from channel k0 on: x of its pixels.
template <class Pixels, typename T, int MT, int NT>
struct Residual {
    static constexpr int GROUPS = ChannelOrder<T, NT>::GROUPS, COUNT = 2 * GROUPS;
    using Vector = typename Bytes<COUNT * sizeof(T)>::type;
    Vector x[MT][2][NT / GROUPS];

    // visit(m, half, group, spot, offset of its channels) for all pixels whose result is stored
    template <class Number, class Visit>
    static DEVICE void for_each(const Pixels& pixels, int C, int k0, int lane, Number number, Visit visit) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Spot spot = pixels.middle(number(m, lane / 4 + 8 * half));
                const i64 origin = spot.pixel * C;
#pragma unroll
                for (int group = 0; group < NT / GROUPS; ++group) {
                    const int k = k0 + group * 8 * GROUPS + lane % 4 * COUNT;
                    if (spot.stored && k < C) visit(m, half, group, spot, origin + k);
                }
            }
    }
    template <class Number>
    DEVICE void load(const T* __restrict__ from, const Pixels& pixels, int C, int k0, int lane, Number number) {
        for_each(pixels, C, k0, lane, number, [&](int m, int half, int group, const Spot& spot, i64 at) {
            if (spot.real) x[m][half][group] = __ldg(reinterpret_cast<const Vector*>(from + at));
        });
    }
    template <class Number>
    DEVICE void add_and_store(const float (&acc)[MT][NT][4], T* __restrict__ to, const Pixels& pixels, int C, int k0,
                              int lane, Number number) const {
        for_each(pixels, C, k0, lane, number, [&](int m, int half, int group, const Spot& spot, i64 at) {
            Elements<T, Vector> value(spot.real ? x[m][half][group] : zero<Vector>());
#pragma unroll
            for (int e = 0; e < COUNT; ++e) {
                const float sum = acc[m][group * GROUPS + e / 2][2 * half + e % 2];
                value.element[e] = from_compute<T>(to_compute<float>(value.element[e]) + (spot.real ? sum : 0.0f));
            }
            *reinterpret_cast<Vector*>(to + at) = value.vector;
        });
    }
};

// Wait for one of three groups of packed weights (tables and w1; w2; w3), the first time round.
template <bool BULK>
struct Arrival {
    u64* barriers;
    bool pending;
    template <int GROUP>
    DEVICE void wait() const {
        if (!pending) return;
        if constexpr (BULK) {
            barrier_wait(barriers + GROUP, 0);
        } else {
            copy_async_wait<2 - GROUP>();
            __syncthreads();
        }
    }
};

// Copy the packed weights of a thread block of the cluster to shared memory, in three groups.
template <class U, int THREADS, bool BULK>
DEVICE void begin_weights(u8* shared, const u8* packed, u64* barriers) {
    constexpr int begin[4] = {0, U::W2, U::W3, U::PACKED};
    if constexpr (BULK) {
        if (threadIdx.x == 0) {
#pragma unroll
            for (int i = 0; i < 3; ++i) barrier_init(barriers + i, 1);
            barrier_init_fence();
#pragma unroll
            for (int i = 0; i < 3; ++i) {
                barrier_expect(barriers + i, begin[i + 1] - begin[i]);
                bulk_copy(shared + begin[i], packed + begin[i], begin[i + 1] - begin[i], barriers + i);
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            for (int at = begin[i] + threadIdx.x * 16; at < begin[i + 1]; at += THREADS * 16)
                copy_async_16(shared + at, packed + at, true);
            copy_async_commit();
        }
    }
}

// Compute the unit at all tiles of this thread block, or of its cluster, whose weights begin_weights copies. Template
// arguments as those of the kernels; `shared` begins as Unit3 and Behind say.
template <template <typename, class, int, int, int, int> class Engine, class U, typename T, int WARPS, int WK1, int WM2,
          int WN2, int WK2, int WM3, int AHEAD, bool TIGHT, bool ROUND, bool BULK, class Pixels>
DEVICE void compute_unit(Pixels& pixels, const T* __restrict__ x, T* __restrict__ y, int C, u8* shared) {
    constexpr int CLUSTER = U::CLUSTER, SLICE = U::SLICE;
    using Rim = typename U::Rim;
    using Second = Engine<T, Rim, U::NS, WM2, WN2, WK2>;
    using Third = Engine<T, typename U::Middle, SLICE, WM3, 1, 1>;
    constexpr bool GROUP = Second::WANTS_FENCE;
    // Whether addresses are found again for each tile: kept, they spill registers; elsewhere more would spill.
    constexpr bool AGAIN = TIGHT || GROUP || DEVICE_ARCHITECTURE < 1000;
    using Rest = Behind<U, WARPS, WK1, WK2>;
    constexpr int THREADS = WARPS * 32, NS = U::NS, NT1 = NS / 8, MINE1 = U::CHUNKS / WK1;
    constexpr int WM1 = Rest::WM1, TILES1 = Rest::TILES1, TURNS1 = Rest::TURNS1;
    static_assert(WM1 * WK1 == WARPS && MINE1 * WK1 == U::CHUNKS, "warps share pixels and chunks evenly");
    static_assert(WM2 * WN2 * WK2 == WARPS && WARPS % WM3 == 0, "warps share the products evenly");
    static_assert(!GROUP || (WM1 % 4 == 0 && WM2 % 4 == 0 && WM3 % 4 == 0), "four warps multiply together");
    static_assert(!GROUP || U::PIECES == 1, "wgmma takes eight lines of eight pixels in a row");

    const float* const tables = reinterpret_cast<const float*>(shared);
    const float *const table2 = tables + 2 * U::CIN, *const table3 = table2 + 2 * NS;
    float4* const partials = reinterpret_cast<float4*>(shared + U::PARTIALS);
    u64* const barriers = reinterpret_cast<u64*>(shared + Rest::BARRIERS);
    const int warp = threadIdx.x / 32;
    const int rank = Cluster<CLUSTER>::rank();

    if constexpr (GROUP && U::PARTIALS > U::ZEROS)
        for (int i = threadIdx.x * 16; i < Rim::PLANE; i += THREADS * 16)
            *reinterpret_cast<uint4*>(shared + U::ZEROS + i) = zero<uint4>();
    __syncthreads();               // the barriers are there
    Cluster<CLUSTER>::arrive();  // h1 may be stored to other blocks once they have all come here

    for (Arrival<BULK> arrival{barriers, true};; arrival.pending = false) {
        const int same = threadIdx.x % 32, lane = AGAIN ? recomputed(same) : same, row = lane / 4, t = lane % 4;
        pixels.take();
        const T* const image = pixels.from(x, C);

        // ---- 1: h1 = a2(w1 * a1(x))
        {
            const int wm = warp % WM1, wk = warp / WM1;
            float acc[WK1 > 1 ? TURNS1 : 1][NT1][4];
            const auto finish = [&](const float (&sum)[NT1][4], int tile16) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int q = tile16 * 16 + row + 8 * half;
                    if (q >= U::RIM) continue;
                    const bool real = pixels.inside(q);
#pragma unroll
                    for (int n = 0; n < NT1; ++n) {
                        const int c = n * 8 + 2 * t;
                        const float2 scale = *reinterpret_cast<const float2*>(table2 + c);
                        const float2 shift = *reinterpret_cast<const float2*>(table2 + NS + c);
                        store_pair<T, CLUSTER, ROUND>(shared + U::H1, Rim::PLANE, q, rank * NS + c,
                                                      __fmaf_rn(sum[n][2 * half], scale.x, shift.x),
                                                      __fmaf_rn(sum[n][2 * half + 1], scale.y, shift.y), real);
                    }
                }
            };
#pragma unroll
            for (int turn = 0; turn < TURNS1; ++turn) {
                const int tile16 = turn * WM1 + wm;
                float(&sum)[NT1][4] = acc[WK1 > 1 ? turn : 0];
#pragma unroll
                for (int n = 0; n < NT1; ++n) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0.0f;
                const bool work = (GROUP ? tile16 / 4 * 4 : tile16) < TILES1;
                if (work) {
                    const int q[2] = {tile16 * 16 + row, tile16 * 16 + row + 8};
                    const T* from[2];
                    bool real[2];
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        real[h] = pixels.inside(q[h]);
                        from[h] = image + pixels.rim_pixel(q[h]) * C + t * U::LANES;
                    }
#pragma unroll
                    for (int first = 0; first < MINE1; first += AHEAD) {
                        uint4 value[AHEAD][2];
#pragma unroll
                        for (int k = 0; k < AHEAD; ++k)
#pragma unroll
                            for (int h = 0; h < 2; ++h) {
                                const int c = (wk * MINE1 + first + k) * (4 * U::LANES);
                                const bool load = first + k < MINE1 && real[h] && c + t * U::LANES < C;
                                value[k][h] = load ? __ldg(reinterpret_cast<const uint4*>(from[h] + c)) : zero<uint4>();
                            }
                        if (turn == 0 && first == 0) arrival.template wait<0>();
                        u32 words[AHEAD][2][4];
#pragma unroll
                        for (int k = 0; k < AHEAD; ++k)
                            if (first + k < MINE1) {
                                constexpr int BYTES = TIGHT ? sizeof(T) : 4;  // of an entry of the tables
                                const u8* scale =
                                    shared + ((wk * MINE1 + first + k) * (4 * U::LANES) + t * U::LANES) * BYTES;
#pragma unroll
                                for (int h = 0; h < 2; ++h)
                                    activate_words<T, TIGHT, ROUND>(words[k][h], value[k][h], scale, scale + 4 * U::CIN);
                            }
                        if constexpr (GROUP) wgmma_fence();
#pragma unroll
                        for (int k = 0; k < AHEAD; ++k)
                            if (first + k < MINE1)
                                multiply_chunk<T, NT1, GROUP>(sum, words[k][0], words[k][1],
                                                              shared + U::W1 + (wk * MINE1 + first + k) * (64 * NS));
                        if constexpr (GROUP) {
                            wgmma_commit();
                            wgmma_wait();
                        }
                    }
                } else if (turn == 0) {
                    arrival.template wait<0>();
                }
                if (turn == 0 && arrival.pending) Cluster<CLUSTER>::wait();
                if constexpr (WK1 == 1)
                    if (work) finish(sum, tile16);
            }
            if constexpr (WK1 > 1) {
                sum_partials<WM1, WK1>(acc, partials, wm, wk);
                if (wk == 0)
#pragma unroll
                    for (int turn = 0; turn < TURNS1; ++turn)
                        if (turn * WM1 + wm < TILES1) finish(acc[turn], turn * WM1 + wm);
            }
        }
        if constexpr (GROUP) shared_fence();
        Cluster<CLUSTER>::sync();
        arrival.template wait<1>();
        pixels.look();

        // ---- 2: h2 = a3(w2 * h1)
        {
            const int wm = warp % WM2, wn = warp / WM2 % WN2, wk = warp / (WM2 * WN2);
            float acc[Second::MT][Second::NT][4];
            clear(acc);
            Second::taps(acc, shared + U::H1, shared + U::W2, shared + U::ZEROS, wm, wn, wk);
            if constexpr (WK2 > 1) sum_partials<WM2 * WN2, WK2>(acc, partials, wn * WM2 + wm, wk);
            if (wk == 0)
#pragma unroll
                for (int m = 0; m < Second::MT; ++m)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int p = Second::pixel(wm, m, row + 8 * half);
#pragma unroll
                        for (int n = 0; n < Second::NT; ++n) {
                            const int c = (wn * Second::NT + n) * 8 + 2 * t;
                            const float2 scale = *reinterpret_cast<const float2*>(table3 + c);
                            const float2 shift = *reinterpret_cast<const float2*>(table3 + NS + c);
                            store_pair<T, CLUSTER, ROUND>(shared + U::H2, U::Middle::PLANE, p, rank * NS + c,
                                                          __fmaf_rn(acc[m][n][2 * half], scale.x, shift.x),
                                                          __fmaf_rn(acc[m][n][2 * half + 1], scale.y, shift.y), true);
                        }
                    }
        }
        pixels.keep();
        // ---- 3: y = x + w3 * h2, SLICE channels at a time; x is fetched ahead of the product
        {
            // Where the rest is kept, this one is not: with it 12 warps spill registers by NVRTC 13.5.
            const int wm = (AGAIN ? warp : recomputed(warp)) % WM3;
            const auto number = [&](int m, int r) { return Third::pixel(wm, m, r); };
            Residual<Pixels, T, Third::MT, Third::NT> residual;
            int part = warp / WM3;
            if (part < U::PARTS) residual.load(image, pixels, C, rank * U::OUT + part * SLICE, lane, number);
            if constexpr (GROUP) shared_fence();
            Cluster<CLUSTER>::sync();
            arrival.template wait<2>();
#pragma unroll 1
            for (; part < U::PARTS; part += WARPS / WM3) {
                const int k0 = rank * U::OUT + part * SLICE;
                float acc[Third::MT][Third::NT][4];
                clear(acc);
                Third::taps(acc, shared + U::H2, shared + U::W3 + part * U::W3_PART, shared + U::ZEROS, wm, 0, 0);
                residual.add_and_store(acc, pixels.from(y, C), pixels, C, k0, lane, number);
                if (part + WARPS / WM3 < U::PARTS)
                    residual.load(image, pixels, C, k0 + WARPS / WM3 * SLICE, lane, number);
            }
        }
        if (!pixels.any()) break;
    }
}
