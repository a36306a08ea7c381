// stack_global_pool.cu: the sum, mean or maximum of each channel of each image, or of its windows, from its active blocks.
//   y[n, c] = (sum x[m, i, j, c]) / divisor   or   max x[m, i, j, c]
// over the pixels (i, j) of the image in the active blocks m of image n; the maximum counts 0 where a pixel of the image
// is in no active block. An image without pixels gives 0. With WINDOWS there is one result for each of the P x Q windows
// of adaptive pooling, y[n, p, q, c]: window p has lines floor(p * H / P) to ceil((p + 1) * H / P), and the divisor is
// the number of its pixels. x may be some channels of another stack, whose pixels have more of them.
// Source: global and adaptive pooling on images that are 0 outside of the active blocks.
// Python: sbnet_cupy/block_sparse/stack/stack_global_pool.py; launched by stack_pool_launch.py
// Launch: a thread block of 256 threads for each image, or window, each LANES vectors of channels, and each of `parts`
// ranges of its blocks. The thread blocks of CLUSTER parts are a cluster and put them together; without clusters, and of more parts,
// stack_global_pool_parts does so.
// Why: the blocks of an image are those that the grid has, in its order, whatever the order of the list. A thread block
// first lists the active ones in shared memory; the threads then take their pixels in turn, so that sums are in an
// order that the sizes and the mask decide: those of a warp are put together by a tree, then the warps' in their order.
#include "block_sparse/stack/block_table.cuh"
#include "core/cluster.cuh"
#include "core/warp_sum.cuh"

enum Mode { SUM, MAXIMUM };

template <int MODE, typename C>
DEVICE C combine(C a, C b) {
    if constexpr (MODE == SUM) return a + b;
    return a > b || a != a ? a : b;
}
template <int MODE, typename C>
DEVICE C identity() {
    return MODE == SUM ? static_cast<C>(0) : static_cast<C>(-__uint_as_float(0x7f800000u));
}

template <typename T, int MODE, typename C>
DEVICE T finished(C value, bool empty, double divisor) {
    if (empty) value = 0;
    return from_compute<T>(MODE == SUM ? value / static_cast<C>(divisor) : value);
}

constexpr int POOL_THREADS = 256, EACH = 8, CHUNK = POOL_THREADS * EACH;  // blocks that are listed at once

// Pixels of an image, from the first to those past the last.
struct Window {
    i64 top, left, bottom, right;

    DEVICE double pixels() const { return static_cast<double>(bottom - top) * (right - left); }
};

// Window `number` of the P x Q windows of an image; without WINDOWS all of it.
template <bool WINDOWS>
DEVICE Window window_of(i64 number, i64 P, i64 Q, i64 H, i64 W) {
    if constexpr (!WINDOWS) return Window{0, 0, H, W};
    const i64 p = divide(number, Q), q = number - p * Q;
    return Window{divide(p * H, P), divide(q * W, Q), divide((p + 1) * H + P - 1, P), divide((q + 1) * W + Q - 1, Q)};
}

// An active block: its row of the stack, and which of its lines and columns are of the window.
struct Listed {
    int row, lines, columns;
};

// Which of `size` lines from line `corner` of the image on are from `first` to before `last`: the number of those before
// `last`, and, in the high half, of those before `first`.
template <bool WINDOWS>
DEVICE int lines_of(i64 corner, int size, i64 first, i64 last) {
    const auto before = [&](i64 end) { return static_cast<int>(clamp(end - corner, 0, size)); };
    return (WINDOWS ? before(first) << 16 : 0) | before(last);
}

template <bool WINDOWS>
DEVICE bool is_among(int line, int lines) {
    return WINDOWS ? line < (lines & 0xffff) && line >= lines >> 16 : line < lines;
}

// The number of threads' items before those of this thread; `total` becomes that of all. `counts` is of 8 ints.
DEVICE int before_mine(int mine, int* counts, int& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int sum = sum_up_to_lane(mine, lane);
    if (lane == 31) counts[warp] = sum;
    __syncthreads();
    int before = sum - mine;
    total = 0;
#pragma unroll
    for (int w = 0; w < POOL_THREADS / 32; ++w) {
        if (w < warp) before += counts[w];
        total += counts[w];
    }
    return before;
}

template <typename T, typename V, int LANES, int MODE, int CLUSTER, bool WINDOWS>
__global__ void __launch_bounds__(POOL_THREADS, 2)
    stack_global_pool(const V* __restrict__ x,             // [M, bh, bw, width], its pixels pitch_in vectors apart
                      const int* __restrict__ bin_counts,   // [1]
                      const int* __restrict__ grid,         // [N, GH, GW]
                      typename ComputeOf<T>::type* __restrict__ sums_of_parts,  // [N, P, Q, parts, channels], or null
                      T* __restrict__ y,                    // [N, P, Q, channels]
                      i64 M, i64 N, i64 GH, i64 GW, i64 width, i64 bh, i64 bw, i64 H, i64 W, i64 P, i64 Q, i64 parts,
                      double divisor, i64 settled, i64 pitch_in) {
    using C = typename ComputeOf<T>::type;
    using Parts = Cluster<CLUSTER>;
    constexpr int COUNT = Elements<T, V>::COUNT, GROUPS = POOL_THREADS / LANES, AT_ONCE = 4;
    constexpr int IN_WARP = LANES < 32 ? 32 / LANES : 1, ROWS = GROUPS / IN_WARP, SUMS = LANES * COUNT;
    __shared__ Listed listed[CHUNK];
    __shared__ C sums[ROWS * SUMS];  // of each warp, or of each group where it is wider
    __shared__ int counts[POOL_THREADS / 32], zeros;
    const auto narrow = [](i64 value) { return static_cast<int>(value); };
    const int BH = narrow(bh), BW = narrow(bw), pixels = BH * BW;
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, slices = ceil_div(narrow(width), LANES);
    const i64 channels = width * COUNT, of_image = WINDOWS ? P * Q : 1;
    begin_launch(settled);
    bool waited = !settled;
    const int rows = narrow(clamp(*bin_counts, 0, M));

    for (i64 item = blockIdx.x; item < N * of_image * parts * slices; item += gridDim.x) {
        const i64 slice = divide(item, parts), number = divide(slice, slices), part = item - slice * parts;
        const i64 n = WINDOWS ? divide(number, of_image) : number;
        const Window window = window_of<WINDOWS>(number - n * of_image, P, Q, H, W);
        const int top = WINDOWS ? narrow(divide(window.top, BH)) : 0, left = WINDOWS ? narrow(divide(window.left, BW)) : 0;  // blocks of the window
        const int down = WINDOWS ? narrow(divide(window.bottom + BH - 1, BH)) - top : narrow(GH);
        const int across = WINDOWS ? narrow(divide(window.right + BW - 1, BW)) - left : narrow(GW);
        const i64 places = static_cast<i64>(down) * across;
        const int* const blocks = grid + (n * GH + top) * GW + left;
        const int v = narrow(slice - number * slices) * LANES + lane;
        const i64 first = divide(places * part, parts), last = divide(places * (part + 1), parts);
        C mine[COUNT];
#pragma unroll
        for (int e = 0; e < COUNT; ++e) mine[e] = identity<MODE, C>();
        if (threadIdx.x == 0) zeros = 0;
        __syncthreads();

        for (i64 place0 = first; place0 < last; place0 += CHUNK) {
            int found[EACH];
            const i64 begin = place0 + threadIdx.x * EACH;
            if constexpr (!WINDOWS)  // the blocks of a whole image lie in a row, so that they are loaded at once
#pragma unroll
                for (int e = 0; e < EACH; ++e) found[e] = begin + e < last ? blocks[begin + e] : -1;
            int hi = narrow(divide(begin, across)), wi = narrow(begin - static_cast<i64>(hi) * across), active = 0;
            if constexpr (WINDOWS)
#pragma unroll
                for (int e = 0, line = hi, column = wi; e < EACH; ++e) {
                    found[e] = begin + e < last ? blocks[line * GW + column] : -1;
                    if (++column == across) column = 0, ++line;
                }
            Listed its[EACH];
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
                its[e].row = static_cast<u32>(found[e]) < static_cast<u32>(rows) ? found[e] : -1;
                its[e].lines = lines_of<WINDOWS>(static_cast<i64>(top + hi) * BH, BH, window.top, window.bottom);
                its[e].columns = lines_of<WINDOWS>(static_cast<i64>(left + wi) * BW, BW, window.left, window.right);
                if (MODE == MAXIMUM && its[e].row < 0 && begin + e < last && its[e].lines > 0 && its[e].columns > 0)
                    zeros = 1;
                active += its[e].row >= 0;
                if (++wi == across) wi = 0, ++hi;
            }
            int total;
            int at = before_mine(active, counts, total);
#pragma unroll
            for (int e = 0; e < EACH; ++e)
                if (its[e].row >= 0) listed[at++] = its[e];
            __syncthreads();
            if (!waited) dependent_wait();
            waited = true;
            const V* const stack = loaded_later(x);

            const i64 all = static_cast<i64>(total) * pixels;
            for (i64 i0 = group; v < width && i0 < all; i0 += GROUPS * AT_ONCE) {
                V values[AT_ONCE];
                bool inside[AT_ONCE];
#pragma unroll
                for (int a = 0; a < AT_ONCE; ++a) {
                    const i64 i = i0 + a * GROUPS;
                    values[a] = zero<V>();
                    inside[a] = i < all;
                    if (!inside[a]) continue;
                    const int number = narrow(divide(i, pixels)), pixel = narrow(i - static_cast<i64>(number) * pixels);
                    const Listed block = listed[number];
                    if (block.lines != BH || block.columns != BW) {
                        const int line = pixel / BW;
                        inside[a] = is_among<WINDOWS>(line, block.lines) && is_among<WINDOWS>(pixel - line * BW, block.columns);
                    }
                    if (inside[a]) values[a] = stack[(static_cast<i64>(block.row) * pixels + pixel) * pitch_in + v];
                }
#pragma unroll
                for (int a = 0; a < AT_ONCE; ++a) {
                    if (!inside[a]) continue;
                    const Elements<T, V> vector(values[a]);
#pragma unroll
                    for (int e = 0; e < COUNT; ++e) mine[e] = combine<MODE>(mine[e], to_compute<C>(vector.element[e]));
                }
            }
            __syncthreads();  // before the list is written again
        }

#pragma unroll
        for (int distance = 16; distance >= LANES; distance /= 2)
#pragma unroll
            for (int e = 0; e < COUNT; ++e)
                mine[e] = combine<MODE>(mine[e], __shfl_xor_sync(0xffffffffu, mine[e], distance));
        if (group % IN_WARP == 0)
#pragma unroll
            for (int e = 0; e < COUNT; ++e) sums[group / IN_WARP * SUMS + lane * COUNT + e] = mine[e];
        __syncthreads();
        if (!waited) dependent_wait();
        waited = true;
        const auto own = [&](int i) {
            C value = sums[i];
#pragma unroll
            for (int r = 1; r < ROWS; ++r) value = combine<MODE>(value, sums[r * SUMS + i]);
            return MODE == MAXIMUM && zeros ? combine<MODE>(value, static_cast<C>(0)) : value;
        };
        if constexpr (CLUSTER > 1) {
            static_assert(SUMS <= POOL_THREADS, "a thread has one sum");
            if (threadIdx.x < SUMS) sums[threadIdx.x] = own(threadIdx.x);
            Parts::sync();
        }
        for (int i = threadIdx.x; i < SUMS && (CLUSTER == 1 || part == 0); i += POOL_THREADS) {
            const i64 c = static_cast<i64>(v - lane) * COUNT + i;
            if (c >= channels) break;
            C value;
            if constexpr (CLUSTER > 1) {
                C each[CLUSTER];
#pragma unroll
                for (int q = 0; q < CLUSTER; ++q) each[q] = Parts::load_number(sums + i, q);
                value = identity<MODE, C>();
#pragma unroll
                for (int q = 0; q < CLUSTER; ++q) value = combine<MODE>(value, each[q]);
            } else {
                value = own(i);
            }
            if (sums_of_parts)
                sums_of_parts[(number * parts + part) * channels + c] = value;
            else
                y[number * channels + c] = finished<T, MODE>(value, H * W == 0, WINDOWS ? window.pixels() : divisor);
        }
        Parts::sync();  // before the sums are written again
    }
    if (!waited) dependent_wait();
}

// Put the parts of each image or window together, in their order.
template <typename T, int MODE, bool WINDOWS>
__global__ void __launch_bounds__(POOL_THREADS)
    stack_global_pool_parts(const typename ComputeOf<T>::type* __restrict__ sums_of_parts, T* __restrict__ y, i64 N,
                            i64 channels, i64 H, i64 W, i64 P, i64 Q, i64 parts, double divisor) {
    using C = typename ComputeOf<T>::type;
    overlap_launches();
    const i64 of_image = WINDOWS ? P * Q : 1;
    for (i64 i = static_cast<i64>(blockIdx.x) * POOL_THREADS + threadIdx.x; i < N * of_image * channels;
         i += static_cast<i64>(gridDim.x) * POOL_THREADS) {
        const i64 number = divide(i, channels), c = i - number * channels;
        C value = identity<MODE, C>();
#pragma unroll 8
        for (i64 part = 0; part < parts; ++part)
            value = combine<MODE>(value, sums_of_parts[(number * parts + part) * channels + c]);
        if constexpr (WINDOWS) divisor = window_of<true>(number - divide(number, of_image) * of_image, P, Q, H, W).pixels();
        y[i] = finished<T, MODE>(value, H * W == 0, divisor);
    }
}
