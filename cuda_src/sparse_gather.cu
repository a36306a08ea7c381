// sparse_gather.cu: copy active blocks out of an image.
//   blocks[b, i, j, c] = f(x[n, h0 + i, w0 + j, c])     0 outside the image and past the count
// Source: Ren et al. 2018, section 3.2.  Python: sbnet_cupy/ops/sparse_gather.py
// gather_runs:  same layout on both sides. LANES threads copy a run of COLS vectors each, RUNS runs
//               at a time, so that several loads are in flight before the first store.
// gather_tiles: the layout changes (IMAGE_LAST: NHWC image to NCHW blocks). One thread block turns
//               TI x TJ pixels x VC vectors of channels in shared memory.
// Launch: 256 threads, persistent grid. See cuda_src/README.md for the pictures.
#include "activation.cuh"
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

    // Element e of the vector is of channel + e * step.
    template <typename V>
    DEVICE V operator()(V value, int channel, int step) const {
        Elements<T, V> elements(value);
#pragma unroll
        for (int e = 0; e < Elements<T, V>::COUNT; ++e) {
            Compute t = to_compute<Compute>(elements.element[e]);
            if (scale) t = multiply(t, to_compute<Compute>(scale[channel + e * step]));
            if (shift) t = add(t, to_compute<Compute>(shift[channel + e * step]));
            elements.element[e] = from_compute<T>(activate<ACTIVATION>(t));
        }
        return elements.vector;
    }
};

// ---------------------------------------------------------------------------- kernels

template <typename V, int BH, int BW, int LANES, int RUNS, int COLS, class F>
__global__ void __launch_bounds__(THREADS, F::USES_CHANNEL ? 2 : 4)
    gather_runs(const V* __restrict__ x, const int* __restrict__ bin_counts,
                const int* __restrict__ indices, V* __restrict__ blocks,
                const typename F::Parameter* __restrict__ scale,
                const typename F::Parameter* __restrict__ shift, i64 batch, i64 planes,
                i64 pixel_bytes, i64 element_bytes, i64 M, i64 N, i64 C, i64 H, i64 W, i64 off_h,
                i64 off_w, i64 str_h, i64 str_w) {
    overlap_launches();
    const Geometry g{M, N, C, H, W, off_h, off_w, str_h, str_w};
    const F f(scale, shift);
    const Runs<BH, BW, sizeof(V), LANES, RUNS, COLS> runs(planes, pixel_bytes, element_bytes);
    [[maybe_unused]] const bool by_plane = planes > 1 || C == 1;  // one channel all along a run
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

template <bool IMAGE_LAST, typename T, typename V, int BH, int BW, int TI, int TJ, int VC, int G, int TILE_THREADS,
          class F>
__global__ void __launch_bounds__(TILE_THREADS, 3)
    gather_tiles(const T* __restrict__ x, const int* __restrict__ bin_counts,
                 const int* __restrict__ indices, T* __restrict__ blocks,
                 const typename F::Parameter* __restrict__ scale,
                 const typename F::Parameter* __restrict__ shift, i64 M, i64 N, i64 C, i64 H, i64 W,
                 i64 off_h, i64 off_w, i64 str_h, i64 str_w) {
    using Shape = Tile<T, V, BH, BW, TI, TJ, VC, TILE_THREADS>;
    using Group = typename Bytes<G * sizeof(T)>::type;
    __shared__ __align__(16) T shared[Shape::TC * Shape::PITCH];
    overlap_launches();
    const Geometry g{M, N, C, H, W, off_h, off_w, str_h, str_w};
    const F f(scale, shift);
    const auto of_image = image_steps<IMAGE_LAST>(g);
    const auto of_stack = stack_steps<!IMAGE_LAST, BH, BW>(g);

    for_each_tile<Shape, true, BH, BW>(M, active_rows(bin_counts, g), indices, of_image, g,
                                 [&](const Block<BH, BW>& block, const Shape& tile) {
        const i64 from = block.image + of_image.at(tile.i0, tile.j0, tile.c0);
        T* const to = blocks + block.stack + of_stack.at(tile.i0, tile.j0, tile.c0);
        const auto inside = [&](int i, int j, int c) {
            return tile.full || (tile.holds(i, j, c) && block.has(tile.i0 + i, tile.j0 + j));
        };
        if constexpr (IMAGE_LAST) {
            V value[Shape::VECTOR_SLOTS];
            Shape::vectors([&](int slot, int i, int j, int c, int) {
                value[slot] = inside(i, j, c) ? *reinterpret_cast<const V*>(x + (from + of_image.at(i, j, c)))
                                              : zero<V>();
            });
            Shape::vectors([&](int slot, int i, int j, int c, int position) {
                if (F::USES_CHANNEL && inside(i, j, c)) value[slot] = f(value[slot], tile.c0 + c, 1);
                const Elements<T, V> elements(value[slot]);
#pragma unroll
                for (int e = 0; e < Shape::L; ++e) shared[position + e * Shape::PITCH] = elements.element[e];
            });
            __syncthreads();
            Shape::template groups<G>([&](int slot, int i, int j, int c, int position) {
                if (tile.holds(i, j, c))
                    *reinterpret_cast<Group*>(to + of_stack.at(i, j, c)) =
                        *reinterpret_cast<const Group*>(shared + position);
            });
        } else {
            T value[Shape::group_slots(1)];
            Shape::template groups<1>([&](int slot, int i, int j, int c, int) {
                value[slot] = inside(i, j, c) ? x[from + of_image.at(i, j, c)] : zero<T>();
            });
            Shape::template groups<1>([&](int slot, int i, int j, int c, int position) {
                if (F::USES_CHANNEL && inside(i, j, c)) value[slot] = f(value[slot], tile.c0 + c, 1);
                shared[position] = value[slot];
            });
            __syncthreads();
            Shape::vectors([&](int slot, int i, int j, int c, int position) {
                if (!tile.holds(i, j, c)) return;
                Elements<T, V> elements;
#pragma unroll
                for (int e = 0; e < Shape::L; ++e) elements.element[e] = shared[position + e * Shape::PITCH];
                *reinterpret_cast<V*>(to + of_stack.at(i, j, c)) = elements.vector;
            });
        }
        __syncthreads();  // the next tile reuses the shared memory
    });
}
