// sparse_scatter.cu: put a block stack back into an image.
//   y[n, h0 + i, w0 + j, c] = blocks[b, i, j, c]            Overwrite
//   y[n, h0 + i, w0 + j, c] += blocks[b, i, j, c]           Add<T>
// Rows past the count, rows that name no image and pixels outside the image are dropped.
// Source: Ren et al. 2018, section 3.2.  Python: sbnet_cupy/block_sparse/gather_scatter/sparse_scatter.py
// scatter_runs, _tiles, _staged: blocks that share no pixels; the mirror images of sparse_gather.cu.
// scatter_link, scatter_overlap: blocks that may. Instead of atomics, whose order would decide the
//   rounding, each stride-sized cell of the image belongs to one thread block, which applies the
//   stack's rows that cover it in ascending order: later rows win, sums are the same every time.
// Launch: 256 threads, persistent grid. See cuda_src/README.md for the pictures.
#include "block_sparse/gather_scatter/block_staging.cuh"

constexpr int THREADS = 256;

struct Overwrite {
    static constexpr bool READS = false;
    template <typename V>
    DEVICE static V combine(V, V value) { return value; }
};

template <typename T>
struct Add {
    static constexpr bool READS = true;
    template <typename V>
    DEVICE static V combine(V old, V value) {
        Elements<T, V> sum(old), term(value);
#pragma unroll
        for (int e = 0; e < Elements<T, V>::COUNT; ++e)
            sum.element[e] = add(sum.element[e], term.element[e]);
        return sum.vector;
    }
};

// ---------------------------------------------------------------------------- no overlap

template <typename V, int BH, int BW, int LANES, int RUNS, int PER_LANE, class F>
__global__ void __launch_bounds__(THREADS, F::READS ? 2 : 4)
    scatter_runs(V* __restrict__ y, const int* __restrict__ bin_counts,
                 const int* __restrict__ indices, const V* __restrict__ blocks, i64 batch, i64 planes,
                 i64 pixel_bytes, i64 element_bytes, i64 M, i64 N, i64 C, i64 H, i64 W, i64 off_h,
                 i64 off_w, i64 str_h, i64 str_w) {
    const Geometry g{M, N, C, H, W, off_h, off_w, str_h, str_w};
    const Runs<BH, BW, sizeof(V), LANES, RUNS, PER_LANE> runs(planes, pixel_bytes, element_bytes);

    overlap_launches();
    const i64 count = active_rows(bin_counts, g);
    runs.visit(runs.total(count), batch, count, indices, g, [&](const Run* run, int lane) {
        V value[RUNS][PER_LANE], old[RUNS][PER_LANE];
#pragma unroll
        for (int q = 0; q < RUNS; ++q)
#pragma unroll
            for (int k = 0; k < PER_LANE; ++k) {
                const int v = lane + k * LANES;
                if (v < run[q].begin || v >= run[q].end) continue;
                value[q][k] = blocks[run[q].stack + v];
                if (F::READS) old[q][k] = y[run[q].image + v];
            }
#pragma unroll
        for (int q = 0; q < RUNS; ++q)
#pragma unroll
            for (int k = 0; k < PER_LANE; ++k) {
                const int v = lane + k * LANES;
                if (v < run[q].begin || v >= run[q].end) continue;
                y[run[q].image + v] = F::READS ? F::combine(old[q][k], value[q][k]) : value[q][k];
            }
    });
}

template <bool IMAGE_LAST, typename T, int FILL, int STORE, int BH, int BW, int PIXELS, int CHANNELS,
          int TILE_THREADS, class F>
__global__ void __launch_bounds__(TILE_THREADS, (F::READS ? 768 : 1024) / TILE_THREADS)
    scatter_tiles(T* __restrict__ y, const int* __restrict__ bin_counts,
                  const int* __restrict__ indices, const T* __restrict__ blocks, i64 M, i64 N,
                  i64 C, i64 H, i64 W, i64 off_h, i64 off_w, i64 str_h, i64 str_w) {
    // A row is a channel of an NCHW stack, or a pixel of an NHWC stack: what is contiguous there.
    using Shape = Tile<BH, BW, PIXELS, CHANNELS>;
    using Matrix = SharedTranspose<T, IMAGE_LAST ? CHANNELS : PIXELS, IMAGE_LAST ? PIXELS : CHANNELS, FILL, STORE, TILE_THREADS>;
    using V = typename Matrix::V;
    DYNAMIC_SHARED(u8, shared);
    const Geometry g{M, N, C, H, W, off_h, off_w, str_h, str_w};
    const auto of_image = image_steps<IMAGE_LAST>(g);
    const auto of_stack = stack_steps<!IMAGE_LAST, BH, BW>(g);
    T* const matrix = reinterpret_cast<T*>(shared);

    overlap_launches();
    const i64 count = active_rows(bin_counts, g);
    for_each_tile<Shape, false, BH, BW>(count, count, indices, of_image, g,
    [&](const Shape& tile) {
        const T* const from = blocks + (tile.block.stack + of_stack.at(0, tile.p0, tile.c0));
        Matrix::fill(matrix, [&](int row, int column) {
            const int p = IMAGE_LAST ? column : row, c = IMAGE_LAST ? row : column;
            return Source<T>{from + of_stack.at(0, p, c), tile.holds(p, c)};
        });
    },
    [&](const Shape& tile) {
        const i64 to = tile.block.image + of_image.at(0, 0, tile.c0);
        V old[Matrix::HELD];
        // The vector of a row and column of the matrix, or null outside the image.
        const auto target = [&](int row, int column) -> V* {
            const int p = IMAGE_LAST ? column : row, c = IMAGE_LAST ? row : column;
            if (!tile.inside(p, c)) return nullptr;
            return reinterpret_cast<V*>(y + (to + of_image.at(tile.row(p), tile.column(p), c)));
        };
        Matrix::empty(matrix, [&](int slot, int row, int column) {
            if constexpr (F::READS)
                if (const V* const from = target(row, column)) old[slot] = *from;
        }, [&](int slot, int row, int column, V vector) {
            if (V* const at = target(row, column)) *at = F::READS ? F::combine(old[slot], vector) : vector;
        });
    },
    Nothing{});
}

template <bool IMAGE_LAST, bool STACK_LAST, typename T, int BH, int BW, int CHANNELS, int GROUP, int FILL,
          int COPY_THREADS, class F>
__global__ void __launch_bounds__(COPY_THREADS, 1024 / COPY_THREADS)
    scatter_staged(T* y, const int* __restrict__ bin_counts,
                   const int* __restrict__ indices, const T* __restrict__ blocks, i64 M, i64 N,
                    i64 C, i64 H, i64 W, i64 off_h, i64 off_w, i64 str_h, i64 str_w) {
    using Image = StagedBlock<IMAGE_LAST, T, BH, BW, CHANNELS>;
    constexpr int ITEM = sizeof(T), BYTES = BH * BW * CHANNELS * ITEM, LANES = Image::LANES;
    static_assert(BYTES % FILL == 0, "a block has whole vectors");
    DYNAMIC_SHARED(u8, shared);
    auto* const found = reinterpret_cast<Block<BH, BW>*>(shared);
    u8* const staged = shared + 2 * GROUP * sizeof(Block<BH, BW>);  // of the image, where it is read
    u8* const stack = staged + (F::READS ? GROUP * Image::BYTES : 0);
    const Geometry g{M, N, C, H, W, off_h, off_w, str_h, str_w};
    const Image image(y, g);
    const ByteSteps dense = dense_steps<STACK_LAST, T, BH, BW, CHANNELS>();

    overlap_launches();
    const i64 count = active_rows(bin_counts, g);
    for_each_group<GROUP, IMAGE_LAST>(found, count, count, indices, g,
    [&](const Block<BH, BW>* block, i64 row, int held) {
        const u8* const from = reinterpret_cast<const u8*>(blocks) + row * BYTES;
        for (int at = threadIdx.x * FILL; at < held * BYTES; at += COPY_THREADS * FILL) {
            if constexpr (FILL >= 4)
                copy_async<FILL>(stack + at, from + at, true);
            else
                *reinterpret_cast<T*>(stack + at) = *reinterpret_cast<const T*>(from + at);
        }
        if constexpr (F::READS) image.template fill<COPY_THREADS, false>(staged, block, held);
    },
    [&](const Block<BH, BW>* block, i64, int held) {
        image.template for_each_chunk<COPY_THREADS>(block, held, [&](const typename Image::Chunk& chunk) {
            if (chunk.begin >= chunk.end) return;
            u8* const to = reinterpret_cast<u8*>(y) + chunk.image;
            const u8 *const mine = stack + chunk.which * BYTES, *const old = staged + chunk.shared;
            const Walk<IMAGE_LAST, BH, BW, CHANNELS, LANES> walk((chunk.line * Image::LENGTH + chunk.begin) / ITEM, dense);
            const auto element = [&](int e) {  // number e of those that this thread writes
                const T value = *reinterpret_cast<const T*>(mine + walk[e].at);
                if constexpr (!F::READS) return value;
                return F::combine(*reinterpret_cast<const T*>(old + chunk.begin - chunk.low + e * ITEM), value);
            };
            if (chunk.whole()) {
                Elements<T, uint4> result;
#pragma unroll
                for (int e = 0; e < LANES; ++e) result.element[e] = element(e);
                *reinterpret_cast<uint4*>(to) = result.vector;
            } else {
                T* const elements = reinterpret_cast<T*>(to + chunk.begin - chunk.low);
                for (int e = 0; e < (chunk.end - chunk.begin) / ITEM; ++e) elements[e] = element(e);
            }
        });
    });
}

// ---------------------------------------------------------------------------- overlap

// The stride-sized cells that can hold the corner of a block that meets the image.
struct Cells {
    i64 first_h, first_w, count_h, count_w;
};

DEVICE i64 cell_of(const Cells& cells, i64 n, i64 hi, i64 wi) {
    const i64 i = hi - cells.first_h, j = wi - cells.first_w;
    if (i < 0 || i >= cells.count_h || j < 0 || j >= cells.count_w) return -1;
    return (n * cells.count_h + i) * cells.count_w + j;
}

// Chain the rows of the stack by cell: heads[cell] (-1 at first) -> next[row] -> ... -> -1.
// The order within a chain is whatever the hardware makes it; scatter_overlap does not use it.
template <int = 0>
__global__ void __launch_bounds__(THREADS)
    scatter_link(const int* __restrict__ bin_counts, const int* __restrict__ indices,
                 int* __restrict__ heads, int* __restrict__ next, i64 M, i64 N, i64 first_h,
                 i64 first_w, i64 count_h, i64 count_w) {
    const Cells cells{first_h, first_w, count_h, count_w};
    const i64 count = clamp(*bin_counts, 0, M);
    const i64 step = static_cast<i64>(gridDim.x) * THREADS;
    for (i64 b = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x; b < count; b += step) {
        const i64 n = indices[3 * b];
        const i64 cell = n >= 0 && n < N ? cell_of(cells, n, indices[3 * b + 1], indices[3 * b + 2]) : -1;
        if (cell >= 0) next[b] = atomicExch(heads + cell, static_cast<int>(b));
    }
}

// The smallest row after `after` in the chains of cells [hi - reach_h, hi] x [wi - reach_w, wi],
// found by one warp; 0x7fffffff when there is none.
DEVICE int next_row(int after, const int* heads, const int* next, const Cells& cells, i64 n, i64 hi,
                    i64 wi, int reach_h, int reach_w) {
    int best = 0x7fffffff;
    const int lane = threadIdx.x & 31, candidates = (reach_h + 1) * (reach_w + 1);
    for (int k = lane; k < candidates; k += 32) {
        const i64 cell = cell_of(cells, n, hi - k / (reach_w + 1), wi - k % (reach_w + 1));
        if (cell < 0) continue;
        for (int row = heads[cell]; row >= 0; row = next[row])
            if (row > after && row < best) best = row;
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) best = min(best, __shfl_xor_sync(0xffffffffu, best, d));
    return best;
}

// One thread block per cell of the image; a pixel has `pixel` elements in each of `planes` planes.
// Element k of pixel (i, j) of block b lies at b * block + plane * plane_step + (i * BW + j) *
// pixel_step + k * element_step of the stack.
template <typename T, int BH, int BW, class F>
__global__ void __launch_bounds__(THREADS)
    scatter_overlap(T* __restrict__ y, const int* __restrict__ indices, const T* __restrict__ blocks,
                    const int* __restrict__ heads, const int* __restrict__ next, i64 planes,
                    i64 pixel, i64 plane_step, i64 pixel_step, i64 element_step, i64 N, i64 H, i64 W,
                    i64 off_h, i64 off_w, i64 str_h, i64 str_w, i64 first_h, i64 first_w,
                    i64 count_h, i64 count_w, i64 reach_h, i64 reach_w) {
    __shared__ int chosen;
    const Cells cells{first_h, first_w, count_h, count_w};
    const i64 block = BH * BW * planes * pixel;
    // A cell past the last corner still holds pixels of blocks before it.
    const i64 regions_h = count_h + reach_h, regions_w = count_w + reach_w;
    for (i64 t = blockIdx.x; t < N * regions_h * regions_w; t += gridDim.x) {
        const i64 n = t / (regions_h * regions_w), rest = t - n * regions_h * regions_w;
        const i64 hi = first_h + rest / regions_w, wi = first_w + rest % regions_w;
        const i64 cell_h = off_h + str_h * hi, cell_w = off_w + str_w * wi;
        for (int after = -1;;) {
            if (threadIdx.x < 32) {
                const int row = next_row(after, heads, next, cells, n, hi, wi,
                                         static_cast<int>(reach_h), static_cast<int>(reach_w));
                if (threadIdx.x == 0) chosen = row;
            }
            __syncthreads();
            const int b = chosen;
            __syncthreads();
            if (b == 0x7fffffff) break;
            after = b;
            // The part of block b that lies in this cell and in the image.
            const i64 h0 = off_h + str_h * indices[3 * b + 1], w0 = off_w + str_w * indices[3 * b + 2];
            const i64 h_begin = max(max(h0, cell_h), 0LL);
            const i64 h_end = min(min(h0 + BH, cell_h + str_h), H);
            const i64 w_begin = max(max(w0, cell_w), 0LL);
            const i64 w_end = min(min(w0 + BW, cell_w + str_w), W);
            if (h_begin >= h_end || w_begin >= w_end) continue;
            const u32 span = static_cast<u32>((w_end - w_begin) * pixel);
            const u32 lines = static_cast<u32>(h_end - h_begin);
            for (i64 plane = 0; plane < planes; ++plane)
                for (u32 e = threadIdx.x; e < span * lines; e += THREADS) {
                    const u32 i = e / span, v = e - i * span;
                    const u32 j = v / static_cast<u32>(pixel), k = v - j * static_cast<u32>(pixel);
                    const i64 h = h_begin + i, w = w_begin + j;
                    const i64 at = (((n * planes + plane) * H + h) * W + w) * pixel + k;
                    const i64 from = b * block + plane * plane_step +
                                     ((h - h0) * BW + (w - w0)) * pixel_step + k * element_step;
                    y[at] = F::READS ? F::combine(y[at], blocks[from]) : blocks[from];
                }
        }
    }
}
