// sparse_gather.cu: copy active blocks out of an image.
//   blocks[b, i, j, c] = f(x[n, h0 + i, w0 + j, c])     0 outside the image and past the count
// Source: Ren et al. 2018, section 3.2.  Python: sbnet_cupy/block_sparse/gather_scatter/sparse_gather.py
// gather_runs:  same layout on both sides. LANES threads copy a run of PER_LANE vectors each, RUNS runs
//               at a time, so that several loads are in flight before the first store.
// gather_tiles: the layout changes (IMAGE_LAST: NHWC image to NCHW blocks). One thread block transposes
//               PIXELS x CHANNELS in shared memory; with LINE it stores whole planes as one line.
// gather_staged: either way, pixels that are no whole vectors. GROUP blocks at a time pass through shared
//               memory, read by 16 bytes and stored by VECTOR bytes.
// Launch: 256 threads, or TILE_THREADS; persistent grid. See cuda_src/README.md for the pictures.
#include "dense/activation.cuh"
#include "block_sparse/gather_scatter/block_staging.cuh"

constexpr int THREADS = 256;

// ---------------------------------------------------------------------------- f

struct Move {
    using Parameter = float;
    static constexpr bool USES_CHANNEL = false;
    DEVICE Move(const float*, const float*) {}
    template <typename V>
    DEVICE V operator()(V value, int, int) const { return value; }
};

// activation(x * scale + shift), multiply and add rounded separately as NumPy does.
template <typename T, typename S, int ACTIVATION>
struct Affine {
    using Parameter = S;
    using Compute = typename ComputeOf<T>::type;
    static constexpr bool USES_CHANNEL = true;
    const S *scale, *shift;  // [C], or null

    DEVICE Affine(const S* scale_, const S* shift_) : scale(scale_), shift(shift_) {}

    // What changes no number, -0 neither, where there is no table.
    DEVICE Compute scale_of(int channel) const {
        return scale ? to_compute<Compute>(scale[channel]) : static_cast<Compute>(1);
    }
    DEVICE Compute shift_of(int channel) const {
        return shift ? to_compute<Compute>(shift[channel]) : static_cast<Compute>(-0.0);
    }
    DEVICE static T apply(T value, Compute scale, Compute shift) {
        return from_compute<T>(activate<ACTIVATION>(add(multiply(to_compute<Compute>(value), scale), shift)));
    }

    // Element e of the vector is of channel + e * step.
    template <typename V>
    DEVICE V operator()(V value, int channel, int step) const {
        Elements<T, V> elements(value);
#pragma unroll
        for (int e = 0; e < Elements<T, V>::COUNT; ++e) {
            const int c = channel + e * step;
            elements.element[e] = apply(elements.element[e], scale_of(c), shift_of(c));
        }
        return elements.vector;
    }
};

// ---------------------------------------------------------------------------- kernels

template <typename V, int BH, int BW, int LANES, int RUNS, int PER_LANE, class F>
__global__ void __launch_bounds__(THREADS, F::USES_CHANNEL ? 2 : 4)
    gather_runs(const V* __restrict__ x, const int* __restrict__ bin_counts,
                const int* __restrict__ indices, V* __restrict__ blocks,
                const typename F::Parameter* __restrict__ scale,
                const typename F::Parameter* __restrict__ shift, i64 batch, i64 planes,
                i64 pixel_bytes, i64 element_bytes, i64 M, i64 N, i64 C, i64 H, i64 W, i64 off_h,
                i64 off_w, i64 str_h, i64 str_w) {
    const Geometry g{M, N, C, H, W, off_h, off_w, str_h, str_w};
    const F f(scale, shift);
    const Runs<BH, BW, sizeof(V), LANES, RUNS, PER_LANE> runs(planes, pixel_bytes, element_bytes);
    [[maybe_unused]] const bool by_plane = planes > 1 || C == 1;  // one channel all along a run
    [[maybe_unused]] int hop[PER_LANE];  // channels from a run's first element to this lane's vectors
    if constexpr (F::USES_CHANNEL)
#pragma unroll
        for (int k = 0; k < PER_LANE; ++k)
            hop[k] = static_cast<int>((threadIdx.x % LANES + k * LANES) *
                                      static_cast<u32>(sizeof(V) / element_bytes) % static_cast<u32>(C));

    overlap_launches();
    runs.visit(runs.total(M), batch, active_rows(bin_counts, g), indices, g, [&](const Run* run, int lane) {
        V value[RUNS][PER_LANE];
#pragma unroll
        for (int q = 0; q < RUNS; ++q)
#pragma unroll
            for (int k = 0; k < PER_LANE; ++k) {
                const int v = lane + k * LANES;
                value[q][k] = v >= run[q].begin && v < run[q].end ? x[run[q].image + v] : zero<V>();
            }
#pragma unroll
        for (int q = 0; q < RUNS; ++q)
#pragma unroll
            for (int k = 0; k < PER_LANE; ++k) {
                const int v = lane + k * LANES;
                if (v >= run[q].last) continue;
                if constexpr (F::USES_CHANNEL) {
                    if (v >= run[q].begin && v < run[q].end) {
                        int channel = run[q].channel + (by_plane ? 0 : hop[k]);
                        if (channel >= C) channel -= static_cast<int>(C);
                        value[q][k] = f(value[q][k], channel, by_plane ? 0 : 1);
                    }
                }
                blocks[run[q].stack + v] = value[q][k];
            }
    });
}

// Threads for which a multiprocessor has registers without a spill.
template <class F>
constexpr int RESIDENT = F::USES_CHANNEL && DEVICE_ARCHITECTURE < 900 ? 896 : 1024;

template <bool IMAGE_LAST, typename T, int FILL, int STORE, int BH, int BW, int PIXELS, int CHANNELS,
          int TILE_THREADS, int LINE, class F>
__global__ void __launch_bounds__(TILE_THREADS, RESIDENT<F> / TILE_THREADS)
    gather_tiles(const T* __restrict__ x, const int* __restrict__ bin_counts,
                 const int* __restrict__ indices, T* __restrict__ blocks,
                 const typename F::Parameter* __restrict__ scale,
                 const typename F::Parameter* __restrict__ shift, i64 M, i64 N, i64 C, i64 H, i64 W,
                 i64 off_h, i64 off_w, i64 str_h, i64 str_w) {
    // A row is a pixel of an NHWC image, or a channel of an NCHW image: what is contiguous there.
    // With LINE the tile's part of the stack is one line: it is put together in shared memory and
    // stored by vectors of LINE bytes.
    static_assert(LINE == 0 || (IMAGE_LAST && PIXELS == BH * BW), "whole planes follow each other");
    using Shape = Tile<BH, BW, PIXELS, CHANNELS>;
    using Matrix = SharedTranspose<T, IMAGE_LAST ? PIXELS : CHANNELS, IMAGE_LAST ? CHANNELS : PIXELS, FILL, STORE, TILE_THREADS>;
    DYNAMIC_SHARED(u8, shared);
    const Geometry g{M, N, C, H, W, off_h, off_w, str_h, str_w};
    const F f(scale, shift);
    const auto of_image = image_steps<IMAGE_LAST>(g);
    const auto of_stack = stack_steps<!IMAGE_LAST, BH, BW>(g);
    T* const matrix = reinterpret_cast<T*>(shared);
    T* const line = reinterpret_cast<T*>(shared + Matrix::BYTES);

    overlap_launches();
    for_each_tile<Shape, true, BH, BW>(M, active_rows(bin_counts, g), indices, of_image, g,
    [&](const Shape& tile) {
        const T* const from = x + (tile.block.image + of_image.at(0, 0, tile.c0));
        Matrix::fill(matrix, [&](int row, int column) {
            const int p = IMAGE_LAST ? row : column, c = IMAGE_LAST ? column : row;
            return Source<T>{from + of_image.at(tile.row(p), tile.column(p), c), tile.inside(p, c)};
        });
    },
    [&](const Shape& tile) {
        T* const to = LINE > 0 ? line : blocks + (tile.block.stack + of_stack.at(0, tile.p0, tile.c0));
        Matrix::empty(matrix, Nothing{}, [&](int, int row, int column, typename Matrix::V vector) {
            const int p = IMAGE_LAST ? row : column, c = IMAGE_LAST ? column : row;
            if (!tile.holds(p, c)) return;
            if constexpr (F::USES_CHANNEL) {
                const Elements<T, typename Matrix::V> zeros(vector);
                Elements<T, typename Matrix::V> result(f(vector, tile.c0 + c, IMAGE_LAST ? 0 : 1));
                if (!tile.full)
#pragma unroll
                    for (int e = 0; e < Matrix::RUN; ++e)
                        if (!tile.inside(IMAGE_LAST ? p + e : p, c)) result.element[e] = zeros.element[e];
                vector = result.vector;
            }
            *reinterpret_cast<typename Matrix::V*>(to + of_stack.at(0, p, c)) = vector;
        });
    },
    [&](const Shape& tile) {
        if constexpr (LINE > 0) {
            using Vector = typename Bytes<LINE>::type;
            const auto to = reinterpret_cast<Vector*>(blocks + (tile.block.stack + of_stack.at(0, 0, tile.c0)));
            constexpr int CHANNEL = BH * BW * sizeof(T);
            const int vectors = min(CHANNELS, tile.C - tile.c0) * CHANNEL / LINE;
#pragma unroll 4
            for (int v = threadIdx.x; v < vectors; v += TILE_THREADS)
                to[v] = reinterpret_cast<const Vector*>(line)[v];
        }
    });
}

template <typename C>
struct alignas(2 * sizeof(C)) Pair {
    C scale, shift;
};

template <bool IMAGE_LAST, bool STACK_LAST, typename T, int BH, int BW, int CHANNELS, int GROUP, int VECTOR,
          int COPY_THREADS, class F>
__global__ void __launch_bounds__(COPY_THREADS, 1024 / COPY_THREADS)
    gather_staged(const T* __restrict__ x, const int* __restrict__ bin_counts,
                  const int* __restrict__ indices, T* __restrict__ blocks,
                  const typename F::Parameter* __restrict__ scale,
                  const typename F::Parameter* __restrict__ shift, i64 M, i64 N, i64 C, i64 H, i64 W,
                  i64 off_h, i64 off_w, i64 str_h, i64 str_w) {
    using Image = StagedBlock<IMAGE_LAST, T, BH, BW, CHANNELS>;
    using V = typename Bytes<VECTOR>::type;
    constexpr int RUN = VECTOR / sizeof(T), VECTORS = BH * BW * CHANNELS / RUN;
    static_assert(VECTORS * RUN == BH * BW * CHANNELS, "a block has whole vectors");
    DYNAMIC_SHARED(u8, shared);
    auto* const found = reinterpret_cast<Block<BH, BW>*>(shared);
    u8* const staged = shared + 2 * GROUP * sizeof(Block<BH, BW>);
    [[maybe_unused]] u8* const tables = staged + GROUP * Image::BYTES;  // scale and shift of each channel
    const Geometry g{M, N, C, H, W, off_h, off_w, str_h, str_w};
    const Image image(x, g);

    overlap_launches();
    if constexpr (F::USES_CHANNEL) {
        const F f(scale, shift);
        for (int c = threadIdx.x; c < CHANNELS; c += COPY_THREADS)
            reinterpret_cast<Pair<typename F::Compute>*>(tables)[c] = {f.scale_of(c), f.shift_of(c)};
    }
    for_each_group<GROUP, IMAGE_LAST>(found, M, active_rows(bin_counts, g), indices, g,
    [&](const Block<BH, BW>* block, i64, int held) {
        image.template fill<COPY_THREADS, true>(staged, block, held);
    },
    [&](const Block<BH, BW>* block, i64 row, int held) {
        V* const to = reinterpret_cast<V*>(blocks) + row * VECTORS;
        const u32 vectors = held * VECTORS;
        for (u32 v = threadIdx.x; v < vectors; v += COPY_THREADS) {
            const int which = v / VECTORS;
            const u8* const from = staged + which * Image::BYTES + image.first(block[which]);
            const Walk<STACK_LAST, BH, BW, CHANNELS, RUN> walk(v % VECTORS * RUN, image.steps);
            Elements<T, V> value;
            const auto make = [&](bool all) {  // apply f to all, or to what the image has
#pragma unroll
                for (int e = 0; e < RUN; ++e) {
                    const Spot spot = walk[e];
                    T element = *reinterpret_cast<const T*>(from + spot.at);
                    if constexpr (F::USES_CHANNEL) {
                        const auto pair = reinterpret_cast<const Pair<typename F::Compute>*>(tables)[spot.c];
                        const T computed = F::apply(element, pair.scale, pair.shift);
                        if (all || block[which].has(spot.i, spot.j)) element = computed;
                    }
                    value.element[e] = element;
                }
            };
            if (!F::USES_CHANNEL || block[which].whole())
                make(true);
            else
                make(false);
            to[v] = value.vector;
        }
    });
}
