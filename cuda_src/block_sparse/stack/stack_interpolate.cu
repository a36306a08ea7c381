// stack_interpolate.cu: the images of a stack of blocks with more, or fewer, pixels.
//   y[m, p, q, c] = x at (s(p), s(q)) of the image of block m, c,   s(p) = (p + before) * step - after
// with p and q counted from the corner of the image, and s clamped to it: the pixel at floor(s), or the mean of the two
// pixels around s along each axis, in the shares of their nearness. Pixels in no active block are 0. Rows that are no
// block are 0; rows past the count are not written, or become 0. With IMAGES x is not a stack, but small images. PITCHED: x
// and y may be some channels of other stacks, whose pixels have more of them.
// Source: PyTorch's interpolate on images that are 0 outside of the active blocks. Positions are in float, as there.
// Python: sbnet_cupy/block_sparse/stack/stack_interpolate.py
// Launch: persistent grid of 256 threads; a thread block takes tiles of `lines` x `columns` pixels of y, 256 at most;
//         stack_interpolate_lines: of `lines` whole lines of a block.
// Why:    a thread finds the pixels of x around one pixel of y, for all its channels: 21 channels are 21 vectors of two
//         bytes, and to search for each of them took seven times as long. Then a thread goes down the lines of one column and
//         vector: where y is larger, lines in a row lie between the same pixels of x, which are loaded and mixed across once.
//         Vectors of a line are written in the order of memory.
//         Where channels make no wide vectors and y is larger, stack_interpolate_lines mixes each line of x across once, in
//         shared memory, whatever pixel its numbers belong to; lines of y are mixed of these, and written, 16 bytes at a time,
//         or, of a y that is a part of another stack, the widest vectors of a pixel.
#include "block_sparse/stack/block_table.cuh"
#include "core/async_copy.cuh"

constexpr int THREADS = 256;

// The two pixels around a position along an axis, and the share of the second.
struct Between {
    int low, high;
    float share;
    DEVICE Between(int pixel, float step, float before, float after, int size) {
        const float at = __fmul_rn(static_cast<float>(pixel) + before, step) - after;
        const float last = static_cast<float>(size - 1), source = at < 0.0f ? 0.0f : at > last ? last : at;
        low = static_cast<int>(source);
        high = low + 1 < size ? low + 1 : low;
        share = source - static_cast<float>(low);
    }
};

// Where a pixel of y reads x: 16 bytes, and 8, for one load each.
template <int SIDE>
struct alignas(16) Around {
    int from[SIDE][SIDE];  // the pixels of the stack x around it; -1 is 0
    float down, across;    // the shares of the second line, and of the second column
};

// The mean of two numbers; one that has no share does not count, whatever it is.
DEVICE float mix(float first, float second, float share) {
    return share == 0.0f ? first : __fmaf_rn(share, second, __fmul_rn(1.0f - share, first));
}

// Load numbers from shared memory, four at once where that many divide their place.
template <int COUNT>
DEVICE void load_numbers(float (&numbers)[COUNT], const float* from) {
    if constexpr (COUNT % 4 == 0) {
#pragma unroll
        for (int e = 0; e < COUNT; e += 4) {
            const float4 four = *reinterpret_cast<const float4*>(from + e);
            numbers[e] = four.x, numbers[e + 1] = four.y, numbers[e + 2] = four.z, numbers[e + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int e = 0; e < COUNT; ++e) numbers[e] = from[e];
    }
}

// Tiles of whole lines: the sums are those of the kernel below, in the same order.
template <typename T, typename V, bool PITCHED>
__global__ void __launch_bounds__(THREADS, 4)
    stack_interpolate_lines(const T* __restrict__ x,              // [M, bh, bw, C], its pixels pitch_in elements apart
                            const int* __restrict__ bin_counts,   // [1]
                            const int* __restrict__ indices,      // [M, 3]
                            const int* __restrict__ grid,         // [N, GH, GW]
                            V* __restrict__ y,                    // [M, ph, pw * C / COUNT], `width` vectors side by side
                            i64 M, i64 N, i64 GH, i64 GW, i64 C, i64 bh, i64 bw, i64 H, i64 W, i64 ph, i64 pw,
                            double step_h, double step_w, double before, double after, i64 lines, i64 old_lines,
                            i64 old_columns, i64 settled, i64 clear_rows, i64 pitch_in, i64 pitch_out, i64 width) {
    constexpr int COUNT = Elements<T, V>::COUNT;
    const auto narrow = [](i64 value) { return static_cast<int>(value); };
    const int old_h = narrow(bh), old_w = narrow(bw), new_h = narrow(ph), new_w = narrow(pw), channels = narrow(C);
    const int tall = narrow(lines), line = new_w * channels, vectors = line / COUNT, most = narrow(old_lines), wide = narrow(old_columns);
    DYNAMIC_SHARED(float, means);  // [old_lines, pw, C], of two columns of x each
    Between* const downs = reinterpret_cast<Between*>(means + ceil_div(most * line, 4) * 4);  // [lines], from the first line
    Between* const acrosses = downs + tall;                                                  // [pw], from the first column
    int* const from = reinterpret_cast<int*>(acrosses + new_w);  // [old_lines, old_columns]: pixels of the stack; -1 is 0
    begin_launch(settled);
    bool waited = !settled;
    const int thread = threadIdx.x, rows = narrow(clamp(*bin_counts, 0, M)), tiles = ceil_div(new_h, tall);
    const BlockTable table{indices, grid, narrow(N), narrow(GH), narrow(GW), rows};
    const float lead = static_cast<float>(before), back = static_cast<float>(after);
    const float step_down = static_cast<float>(step_h), step_across = static_cast<float>(step_w);
    const int side_by_side = PITCHED ? narrow(width) : vectors;
    const Divisor by_channels(channels), by_line(vectors), by_width(side_by_side);
    const i64 all = static_cast<i64>(rows) * tiles;
    for (i64 tile = blockIdx.x; tile < all; tile += gridDim.x) {
        const int of_row = narrow(tile) / tiles, p0 = (narrow(tile) - of_row * tiles) * tall, its_lines = min(tall, new_h - p0);
        const BlockTable::Block block = table.block(of_row);
        const auto down = [&](int l) { return Between(block.hi * new_h + p0 + l, step_down, lead, back, narrow(H)); };
        const auto across = [&](int q) { return Between(block.wi * new_w + q, step_across, lead, back, narrow(W)); };
        const int h0 = down(0).low, its_old = min(down(its_lines - 1).high - h0 + 1, most);
        const int w0 = across(0).low, its_wide = min(across(new_w - 1).high - w0 + 1, wide);
        for (int i = thread; i < its_lines; i += THREADS) {
            Between at = down(i);
            at.low -= h0, at.high -= h0;
            downs[i] = at;
        }
        for (int i = thread; i < new_w; i += THREADS) {
            Between at = across(i);
            at.low -= w0, at.high -= w0;
            acrosses[i] = at;
        }
        for (int i = thread; i < its_old * its_wide; i += THREADS) {
            const int r = i / its_wide, h = h0 + r, w = w0 + i - r * its_wide, hi = h / old_h, wi = w / old_w;
            const int row = table.row(block.n, hi, wi);
            from[r * wide + w - w0] = row < 0 ? -1 : (row * old_h + h - hi * old_h) * old_w + w - wi * old_w;
        }
        __syncthreads();
        if (!waited) dependent_wait();
        waited = true;
        const T* const stack = loaded_later(x);
        const int apart_in = PITCHED ? narrow(pitch_in) : channels;
        for (int e = thread; e < line; e += THREADS) {
            const int q = by_channels.of(e), c = e - q * channels;
            const Between at = acrosses[q];
#pragma unroll 4
            for (int r = 0; r < its_old; ++r) {
                const int first = from[r * wide + at.low], second = from[r * wide + at.high];
                const T low = first < 0 ? zero<T>() : stack[static_cast<i64>(first) * apart_in + c];
                const T high = second < 0 ? zero<T>() : stack[static_cast<i64>(second) * apart_in + c];
                means[r * line + e] = mix(to_compute<float>(low), to_compute<float>(high), at.share);
            }
        }
        __syncthreads();
        const i64 apart = PITCHED ? vectors / side_by_side * pitch_out : vectors;  // from a line of y to the next
        V* const to = y + (static_cast<i64>(of_row) * new_h + p0) * apart;
        // The vectors of a line, and if these are few, parts of the lines, are shared out.
        const int parts = max(1, min(its_lines, THREADS / vectors)), part = ceil_div(its_lines, parts);
        for (int i = thread; i < vectors * parts; i += THREADS) {
            const int number = by_line.of(i), v = i - number * vectors, end = min(its_lines, (number + 1) * part);
            const int pixel = PITCHED ? by_width.of(v) : 0;  // or 0 where all of a line lies side by side
            const i64 in_line = PITCHED ? pixel * pitch_out + v - pixel * side_by_side : v;
            float first[COUNT], second[COUNT];
            int above = -1, below = -1;
            for (int l = number * part; l < end; ++l) {
                const Between at = downs[l];
                if (at.low != above) load_numbers(first, means + at.low * line + v * COUNT);
                if (at.high != below) load_numbers(second, means + at.high * line + v * COUNT);
                above = at.low, below = at.high;
                Elements<T, V> result;
#pragma unroll
                for (int e = 0; e < COUNT; ++e) result.element[e] = from_compute<T>(mix(first[e], second[e], at.share));
                to[l * apart + in_line] = result.vector;
            }
        }
        __syncthreads();  // all of it may be written again
    }
    if (!waited) dependent_wait();
    if (clear_rows) {
        const i64 size = static_cast<i64>(new_h) * vectors;
        clear_rest<false>(y, rows * size, M * size);
    }
}

template <typename T, typename V, bool LINEAR, bool IMAGES, bool PITCHED>
__global__ void __launch_bounds__(THREADS, 3)
    stack_interpolate(const V* __restrict__ x,             // [M, bh, bw, width], pixels pitch_in apart, or [N, H, W, width]
                      const int* __restrict__ bin_counts,   // [1]
                      const int* __restrict__ indices,      // [M, 3]
                      const int* __restrict__ grid,         // [N, GH, GW]
                      V* __restrict__ y,                    // [M, ph, pw, width], its pixels pitch_out vectors apart
                      i64 M, i64 N, i64 GH, i64 GW, i64 width, i64 bh, i64 bw, i64 H, i64 W, i64 ph, i64 pw,
                      double step_h, double step_w, double before, double after, i64 lines, i64 columns, i64 settled,
                      i64 clear_rows, i64 pitch_in, i64 pitch_out) {
    constexpr int COUNT = Elements<T, V>::COUNT, SIDE = LINEAR ? 2 : 1;
    __shared__ Around<SIDE> around[THREADS];  // each pixel of the tile
    const auto narrow = [](i64 value) { return static_cast<int>(value); };
    begin_launch(settled);
    bool waited = !settled;
    const int thread = threadIdx.x, vectors = narrow(width), rows = narrow(clamp(*bin_counts, 0, M));
    const BlockTable table{indices, grid, narrow(N), narrow(GH), narrow(GW), rows};
    const int old_h = narrow(bh), old_w = narrow(bw), new_h = narrow(ph), new_w = narrow(pw), size = new_h * new_w;
    const float lead = static_cast<float>(before), back = static_cast<float>(after);
    const int tall = narrow(lines), wide = narrow(columns), down_tiles = ceil_div(new_h, tall), across_tiles = ceil_div(new_w, wide);
    const i64 all = static_cast<i64>(rows) * down_tiles * across_tiles;
    for (i64 tile = blockIdx.x; tile < all; tile += gridDim.x) {
        const int of_row = narrow(tile) / (down_tiles * across_tiles), in_row = narrow(tile) - of_row * down_tiles * across_tiles;
        const int p0 = in_row / across_tiles * tall, q0 = in_row % across_tiles * wide;
        const int its_lines = min(tall, new_h - p0), its_columns = min(wide, new_w - q0);
        if (thread < its_lines * its_columns) {
            const int line = thread / its_columns;
            const BlockTable::Block block = table.block(of_row);
            const int p = p0 + line, q = q0 + thread - line * its_columns;
            const Between down(block.hi * new_h + p, static_cast<float>(step_h), lead, back, narrow(H));
            const Between across(block.wi * new_w + q, static_cast<float>(step_w), lead, back, narrow(W));
            Around<SIDE> its;
#pragma unroll
            for (int r = 0; r < SIDE; ++r)
#pragma unroll
                for (int s = 0; s < SIDE; ++s) {
                    const int h = r ? down.high : down.low, w = s ? across.high : across.low;
                    if constexpr (IMAGES) {
                        its.from[r][s] = block.n < 0 ? -1 : (block.n * narrow(H) + h) * narrow(W) + w;
                        continue;
                    }
                    const int hi = h / old_h, wi = w / old_w, row = table.row(block.n, hi, wi);
                    its.from[r][s] = row < 0 ? -1 : (row * old_h + h - hi * old_h) * old_w + w - wi * old_w;
                }
            its.down = down.share, its.across = across.share;
            around[thread] = its;
        }
        __syncthreads();
        if (!waited) dependent_wait();
        waited = true;
        const V* const stack = loaded_later(x);
        const i64 apart_in = PITCHED ? pitch_in : width;
        const i64 apart = PITCHED ? pitch_out : width;
        V* const to = y + (static_cast<i64>(of_row) * size + static_cast<i64>(p0) * new_w + q0) * apart;
        // The vectors of a line, and if these are few, parts of the lines, are shared out.
        const int items = its_columns * vectors, parts = max(1, min(its_lines, THREADS / items)), part = ceil_div(its_lines, parts);
        for (int i = thread; i < items * parts; i += THREADS) {
            const int number = i / items, item = i - number * items, column = item / vectors, v = item - column * vectors;
            const int end = min(its_lines, (number + 1) * part);
            int from[SIDE][SIDE];
            Elements<T, V> result(zero<V>());
            float across[2][COUNT];  // the means of two columns, of the line above and the line below
            for (int line = number * part; line < end; ++line) {
                const Around<SIDE> its = around[line * its_columns + column];
                bool same = line > number * part;
#pragma unroll
                for (int r = 0; r < SIDE; ++r)
#pragma unroll
                    for (int s = 0; s < SIDE; ++s) same = same && from[r][s] == its.from[r][s], from[r][s] = its.from[r][s];
                if (!same) {
                    Elements<T, V> values[SIDE][SIDE];
#pragma unroll
                    for (int r = 0; r < SIDE; ++r)
#pragma unroll
                        for (int s = 0; s < SIDE; ++s)
                            values[r][s].vector = from[r][s] < 0 ? zero<V>() : stack[from[r][s] * apart_in + v];
                    if constexpr (LINEAR) {
#pragma unroll
                        for (int e = 0; e < COUNT; ++e)
#pragma unroll
                            for (int r = 0; r < 2; ++r)
                                across[r][e] = mix(to_compute<float>(values[r][0].element[e]),
                                                   to_compute<float>(values[r][1].element[e]), its.across);
                    } else {
                        result = values[0][0];
                    }
                }
                if constexpr (LINEAR) {
#pragma unroll
                    for (int e = 0; e < COUNT; ++e) result.element[e] = from_compute<T>(mix(across[0][e], across[1][e], its.down));
                }
                to[static_cast<i64>(line) * new_w * apart + (PITCHED ? column * apart + v : item)] = result.vector;
            }
        }
        __syncthreads();  // the table of pixels may be written again
    }
    if (!waited) dependent_wait();
    if (clear_rows) clear_rest<false>(y, static_cast<i64>(rows) * size * width, M * size * width);
}
