// sparse_gather.cu: copy active blocks out of an image.
//   blocks[b, i, j, c] = f(x[n, h0 + i, w0 + j, c])     0 outside the image and past the count
// Source: Ren et al. 2018, section 3.2.  Python: sbnet_cupy/ops/sparse_gather.py
// gather_runs:  same layout on both sides. LANES threads copy a run of COLS vectors each, RUNS runs
//               at a time, so that several loads are in flight before the first store.
// gather_tiles: the layout changes (IMAGE_LAST: NHWC image to NCHW blocks). One thread block turns
//               TP pixels x VC vectors of channels in shared memory.
// Launch: 256 threads, persistent grid. See cuda_src/README.md for the pictures.
#include "block_copy.cuh"

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

    DEVICE static float multiply(float a, float b) { return __fmul_rn(a, b); }
    DEVICE static double multiply(double a, double b) { return __dmul_rn(a, b); }

    // Element e of the vector is of channel + e * step.
    template <typename V>
    DEVICE V operator()(V value, int channel, int step) const {
        Elements<T, V> elements(value);
#pragma unroll
        for (int e = 0; e < Elements<T, V>::COUNT; ++e) {
            Compute t = to_compute<Compute>(elements.element[e]);
            if (scale) t = multiply(t, to_compute<Compute>(scale[channel + e * step]));
            if (shift) t = add(t, to_compute<Compute>(shift[channel + e * step]));
            elements.element[e] = from_compute<T>(activate(t));
        }
        return elements.vector;
    }

    DEVICE static Compute activate(Compute t) {
        if constexpr (ACTIVATION == 1) return t < 0 ? Compute(0) : t;  // relu; NaN stays NaN
        if constexpr (ACTIVATION == 2) return t / (Compute(1) + exp(-t));  // silu
        if constexpr (ACTIVATION == 3) return t * Compute(0.5) * (Compute(1) + erf(t * Compute(0.70710678118654752440)));
        return t;
    }
};

// ---------------------------------------------------------------------------- kernels

template <typename V, int BH, int BW, int LANES, int RUNS, int COLS, class F>
__global__ void __launch_bounds__(THREADS, 5)
    gather_runs(const V* __restrict__ x, const int* __restrict__ bin_counts,
                const int* __restrict__ indices, V* __restrict__ blocks,
                const typename F::Parameter* __restrict__ scale,
                const typename F::Parameter* __restrict__ shift, i64 batch, i64 planes,
                i64 pixel_bytes, i64 element_bytes, i64 M, i64 N, i64 C, i64 H, i64 W, i64 off_h,
                i64 off_w, i64 str_h, i64 str_w) {
    const Geometry g{M, N, C, H, W, off_h, off_w, str_h, str_w};
    const F f(scale, shift);
    const Runs<BH, BW, sizeof(V), LANES, RUNS, COLS> runs(planes, pixel_bytes, element_bytes);
    [[maybe_unused]] const bool by_plane = planes > 1;
    [[maybe_unused]] int hop[COLS];  // channels from a run's first element to this lane's vectors
    if constexpr (F::USES_CHANNEL)
#pragma unroll
        for (int k = 0; k < COLS; ++k)
            hop[k] = static_cast<int>((threadIdx.x % LANES + k * LANES) *
                                      static_cast<u32>(sizeof(V) / element_bytes) % static_cast<u32>(C));

    runs.visit(runs.total(M), batch, active_rows(bin_counts, g), indices, g, [&](const Run* run, int lane) {
        V value[RUNS][COLS];
#pragma unroll
        for (int q = 0; q < RUNS; ++q)
#pragma unroll
            for (int k = 0; k < COLS; ++k) {
                const int v = lane + k * LANES;
                value[q][k] = v >= run[q].begin && v < run[q].end ? x[run[q].image + v] : zero<V>();
            }
#pragma unroll
        for (int q = 0; q < RUNS; ++q)
#pragma unroll
            for (int k = 0; k < COLS; ++k) {
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

template <bool IMAGE_LAST, typename T, typename V, int BH, int BW, int TP, int VC, int G, class F>
__global__ void __launch_bounds__(THREADS)
    gather_tiles(const T* __restrict__ x, const int* __restrict__ bin_counts,
                 const int* __restrict__ indices, T* __restrict__ blocks,
                 const typename F::Parameter* __restrict__ scale,
                 const typename F::Parameter* __restrict__ shift, i64 M, i64 N, i64 C, i64 H, i64 W,
                 i64 off_h, i64 off_w, i64 str_h, i64 str_w) {
    using Shape = Tile<T, V, BH, BW, TP, VC, THREADS>;
    using Group = typename Bytes<G * sizeof(T)>::type;
    __shared__ __align__(16) T shared[Shape::TC * Shape::PITCH];
    const Geometry g{M, N, C, H, W, off_h, off_w, str_h, str_w};
    const F f(scale, shift);
    const i64 count = active_rows(bin_counts, g);
    const i64 channel_tiles = ceil_div<i64>(C, Shape::TC);
    const i64 tiles = M * Shape::PIXEL_TILES * channel_tiles;

    for (i64 t = blockIdx.x; t < tiles; t += gridDim.x) {
        const i64 bp = divide(t, channel_tiles), b = divide(bp, Shape::PIXEL_TILES);
        const Shape tile{static_cast<int>(bp - b * Shape::PIXEL_TILES) * TP,
                         static_cast<int>(t - bp * channel_tiles) * Shape::TC,
                         static_cast<int>(C)};
        const ImageSide<IMAGE_LAST, BH, BW> image(corner_of(b, count, indices, g), g);
        const StackSide<!IMAGE_LAST, BH, BW> stack(b, g);
        if constexpr (IMAGE_LAST) {
            V value[Shape::VECTOR_SLOTS];
            tile.vectors([&](int slot, int p, int c, int) {
                const i64 at = image.at(p, c);
                value[slot] = at >= 0 ? *reinterpret_cast<const V*>(x + at) : zero<V>();
            });
            tile.vectors([&](int slot, int p, int c, int position) {
                if (F::USES_CHANNEL && image.at(p, c) >= 0) value[slot] = f(value[slot], c, 1);
                const Elements<T, V> elements(value[slot]);
#pragma unroll
                for (int e = 0; e < Shape::L; ++e) shared[position + e * Shape::PITCH] = elements.element[e];
            });
            __syncthreads();
            tile.template groups<G>([&](int, int p, int c, int position) {
                *reinterpret_cast<Group*>(blocks + stack.at(p, c)) =
                    *reinterpret_cast<const Group*>(shared + position);
            });
        } else {
            T value[Shape::group_slots(1)];
            tile.template groups<1>([&](int slot, int p, int c, int) {
                const i64 at = image.at(p, c);
                value[slot] = at >= 0 ? x[at] : zero<T>();
            });
            tile.template groups<1>([&](int slot, int p, int c, int position) {
                if (F::USES_CHANNEL && image.at(p, c) >= 0) value[slot] = f(value[slot], c, 1);
                shared[position] = value[slot];
            });
            __syncthreads();
            tile.vectors([&](int, int p, int c, int position) {
                Elements<T, V> elements;
#pragma unroll
                for (int e = 0; e < Shape::L; ++e) elements.element[e] = shared[position + e * Shape::PITCH];
                *reinterpret_cast<V*>(blocks + stack.at(p, c)) = elements.vector;
            });
        }
        __syncthreads();  // the next tile reuses the shared memory
    }
}
