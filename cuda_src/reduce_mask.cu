// reduce_mask.cu: from a mask to the list of active blocks, in one launch.
//   active(n, hi, wi) = pooled mask[n, h0 .. h0 + BH, w0 .. w0 + BW] > tol    max, or sum / area
//   indices = the active (n, hi, wi) in raster order, -1 past the count;  bin_counts = their number
// Source: Ren et al. 2018, section 3.1.  Python: sbnet_cupy/ops/reduce_mask.py
//
// Each thread block takes `chunk` consecutive candidate blocks of the raster:
//   1. pool      a team of TEAM warps pools one candidate after another -> one flag byte each
//   2. publish   the number of flags set goes to workspace[1 + blockIdx], tagged with the epoch
//   3. look back the thread block waits for the counts of those before it and adds them: its place
//   4. write     rows in raster order; inactive candidates fill the tail with -1 from the far end
// No atomics and no second launch: the order is the raster's by construction. The workspace is
// never cleared: a count is valid when its tag is this launch's epoch, which the last thread block
// advances when all have published. Thread blocks wait only for lower-numbered ones, which the
// hardware starts first. Launch: 256 threads, one candidate chunk per thread block.
#include "common.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

// ---------------------------------------------------------------------------- comparing, summing

// What "value > tol" and "sum" mean for an element type. Integers compare with the whole number
// `least` (active when value >= least; never when `never`), floats with tol rounded to their type.
template <typename T>
struct Element {  // integers
    using Sum = i64;
    DEVICE static bool exceeds(T value, double, i64 least) { return value >= static_cast<T>(least); }
    DEVICE static Sum term(T value) { return static_cast<i64>(value); }
};
template <>
struct Element<i64> {
    using Sum = double;
    DEVICE static bool exceeds(i64 value, double, i64 least) { return value >= least; }
    DEVICE static Sum term(i64 value) { return static_cast<double>(value); }
};
template <>
struct Element<u64> {
    using Sum = double;
    DEVICE static bool exceeds(u64 value, double, i64 least) { return value >= static_cast<u64>(least); }
    DEVICE static Sum term(u64 value) { return static_cast<double>(value); }
};
template <typename T>
struct FloatElement {
    using Sum = double;
    using Compute = typename ComputeOf<T>::type;
    DEVICE static bool exceeds(T value, double tol, i64) {
        return to_compute<Compute>(value) > static_cast<Compute>(tol);
    }
    DEVICE static Sum term(T value) { return static_cast<double>(to_compute<Compute>(value)); }
};
template <>
struct Element<Half> : FloatElement<Half> {};
template <>
struct Element<BFloat16> : FloatElement<BFloat16> {};
template <>
struct Element<float> : FloatElement<float> {};
template <>
struct Element<double> : FloatElement<double> {};

// ---------------------------------------------------------------------------- pooling

// The mask is read in words of WORD elements. EXACT: rows of blocks and of the image begin and end
// at word boundaries, and a word may be 16 bytes. Otherwise small elements are read as 4-byte words
// of the whole array, and those that stick out of the row are left out.
template <typename T, int WORD>
struct Words {
    using Bits = typename Bytes<WORD * sizeof(T)>::type;

    // Elements [first, first + WORD) of the mask, which has `total`; first is a multiple of WORD.
    DEVICE static Elements<T, Bits> load(const T* mask, i64 first, i64 total) {
        if (first + WORD <= total)
            return Elements<T, Bits>(*reinterpret_cast<const Bits*>(mask + first));
        Elements<T, Bits> word(zero<Bits>());
#pragma unroll
        for (int e = 0; e < WORD; ++e)
            if (first + e < total) word.element[e] = mask[first + e];
        return word;
    }
};

// Sizes [N, H, W] of the mask; one side is under 2^31, the product need not be.
struct Image {
    int N, H, W;
};

// Calls body(value) for this thread's share of the block's pixels that lie in the image.
template <typename T, int BH, int BW, int WORD, bool EXACT, int TEAM, class Body>
DEVICE void visit(const T* mask, const Image& image, int n, i64 h0, i64 w0, Body body) {
    constexpr int PER_ROW = EXACT ? BW / WORD : ceil_div(BW + WORD - 1, WORD);
    constexpr int SLOTS = ceil_div(BH * PER_ROW, TEAM * 32);
    [[maybe_unused]] constexpr int UNROLL = SLOTS < 12 ? SLOTS : 8;
    const int thread = threadIdx.x % (TEAM * 32);
    const int i_begin = static_cast<int>(clamp(-h0, 0, BH)), j_begin = static_cast<int>(clamp(-w0, 0, BW));
    const int i_end = static_cast<int>(clamp(image.H - h0, 0, BH));
    const int j_end = static_cast<int>(clamp(image.W - w0, 0, BW));
    if (j_begin >= j_end) return;
    const i64 origin = (static_cast<i64>(n) * image.H + h0) * image.W + w0;
    const i64 total = static_cast<i64>(image.N) * image.H * image.W;
#pragma unroll UNROLL
    for (int slot = 0; slot < SLOTS; ++slot) {
        const int index = slot * TEAM * 32 + thread;
        const int i = index / PER_ROW, k = index - i * PER_ROW;
        if (i < i_begin || i >= i_end) continue;
        const i64 row = origin + static_cast<i64>(i) * image.W;
        if constexpr (EXACT) {
            if (k * WORD < j_begin || k * WORD >= j_end) continue;
            const auto word = Words<T, WORD>::load(mask, row + k * WORD, total);
#pragma unroll
            for (int e = 0; e < WORD; ++e) body(word.element[e]);
        } else {
            const i64 begin = row + j_begin, first = begin / WORD * WORD + k * WORD;
            const int low = static_cast<int>(begin - first), high = static_cast<int>(row + j_end - first);
            if (high <= 0) continue;
            const auto word = Words<T, WORD>::load(mask, first, total);
#pragma unroll
            for (int e = 0; e < WORD; ++e)
                if (e >= low && e < high) body(word.element[e]);
        }
    }
}

// ---------------------------------------------------------------------------- counting

// Inclusive sum over the thread block; `scratch` holds WARPS + 1 ints. Returns this thread's
// inclusive sum and leaves the total in `total`.
DEVICE int inclusive_sum(int value, int* scratch, int& total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, value, d);
        if (lane >= d) value += other;
    }
    __syncthreads();  // scratch may still be read from an earlier call
    if (lane == 31) scratch[warp] = value;
    __syncthreads();
    int before = 0;
    total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        if (w < warp) before += scratch[w];
        total += scratch[w];
    }
    return value + before;
}

DEVICE void publish(u64* slot, u64 value) { *const_cast<volatile u64*>(slot) = value; }

// The count that thread block `slot` published in this epoch; waits until it is there.
DEVICE int await_count(const u64* slot, u32 epoch) {
    u64 value = *const_cast<const volatile u64*>(slot);
    while (static_cast<u32>(value >> 32) != epoch) value = *const_cast<const volatile u64*>(slot);
    return static_cast<int>(static_cast<u32>(value));
}

// ---------------------------------------------------------------------------- kernel

// mask [N, H, W]; bin_counts [1]; indices [capacity, 3]; workspace [1 + gridDim] (epoch, counts)
template <typename T, int BH, int BW, bool AVERAGE, int WORD, bool EXACT, int TEAM>
__global__ void __launch_bounds__(THREADS)
    reduce_mask(const T* __restrict__ mask, int* __restrict__ bin_counts, int* __restrict__ indices,
                u64* workspace, i64 N, i64 H, i64 W, i64 count_h, i64 count_w, i64 off_h,
                i64 off_w, i64 str_h, i64 str_w, double tol, i64 least, i64 never, i64 capacity,
                i64 chunk, i64 fill) {
    DYNAMIC_SHARED(u8, flags);  // [chunk]
    __shared__ int scratch[WARPS];
    __shared__ u32 launch_epoch;
    __shared__ typename Element<T>::Sum partial[WARPS];
    const Image image{static_cast<int>(N), static_cast<int>(H), static_cast<int>(W)};
    const int candidates = static_cast<int>(N * count_h * count_w);
    const int first = static_cast<int>(blockIdx.x * chunk);
    const int size = min(static_cast<int>(chunk), candidates - first);
    const int per_image = static_cast<int>(count_h * count_w), per_row = static_cast<int>(count_w);
    if (threadIdx.x == 0) launch_epoch = static_cast<u32>(workspace[0]) + 1;

    // 1. pool
    constexpr int TEAMS = WARPS / TEAM;
    const int team = threadIdx.x / (TEAM * 32), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int k = team; k < ceil_div(size, TEAMS) * TEAMS; k += TEAMS) {
        const int id = first + k, n = id / per_image, rest = id - n * per_image;
        const int hi = rest / per_row, wi = rest - hi * per_row;
        const i64 h0 = off_h + str_h * hi, w0 = off_w + str_w * wi;
        bool active = false;
        if constexpr (!AVERAGE) {
            bool any = false;
            if (k < size && !never)
                visit<T, BH, BW, WORD, EXACT, TEAM>(mask, image, n, h0, w0, [&](T value) {
                    any |= Element<T>::exceeds(value, tol, least);
                });
            if constexpr (TEAM == 1)
                active = __any_sync(0xffffffffu, any);
            else if constexpr (TEAM == WARPS)
                active = __syncthreads_or(any);
        } else {
            typename Element<T>::Sum sum = 0;
            if (k < size)
                visit<T, BH, BW, WORD, EXACT, TEAM>(mask, image, n, h0, w0,
                                                [&](T value) { sum += Element<T>::term(value); });
#pragma unroll
            for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
            if constexpr (TEAM > 1) {
                __syncthreads();  // partial may still be read
                if (lane == 0) partial[warp] = sum;
                __syncthreads();
                sum = 0;
#pragma unroll
                for (int w = 0; w < TEAM; ++w) sum += partial[w];
            }
            active = static_cast<double>(sum) / (static_cast<double>(BH) * BW) > tol;
        }
        if (k < size && threadIdx.x % (TEAM * 32) == 0) flags[k] = active;
    }
    __syncthreads();

    // 2. publish
    const int per_thread = ceil_div(size, THREADS), from = min(static_cast<int>(threadIdx.x) * per_thread, size);
    const int to = min(from + per_thread, size);
    int mine = 0, total = 0;
    for (int k = from; k < to; ++k) mine += flags[k];
    const int end = inclusive_sum(mine, scratch, total);
    const u32 epoch = launch_epoch;
    if (threadIdx.x == 0)
        publish(workspace + 1 + blockIdx.x, (static_cast<u64>(epoch) << 32) | static_cast<u32>(total));

    // 3. look back
    int waited = 0, before = 0;
    for (u32 other = threadIdx.x; other < blockIdx.x; other += THREADS)
        waited += await_count(workspace + 1 + other, epoch);
    inclusive_sum(waited, scratch, before);
    const bool last = blockIdx.x == gridDim.x - 1;
    if (last && threadIdx.x == 0) {
        *bin_counts = before + total;
        publish(workspace, epoch);  // all have published, so all have read the old epoch
    }

    // 4. write
    i64 place = before + end - mine;
    for (int k = from; k < to; ++k) {
        const int id = first + k;
        i64 at = place;
        int n = -1, hi = -1, wi = -1;
        if (flags[k]) {
            n = id / per_image;
            hi = (id - n * per_image) / per_row;
            wi = id - n * per_image - hi * per_row;
            ++place;
        } else {  // the q-th inactive candidate fills the q-th row from the end
            if (!fill || capacity < candidates) continue;
            at = candidates - 1 - (id - place);
        }
        if (at < capacity) {
            int* row = indices + 3 * at;
            row[0] = n, row[1] = hi, row[2] = wi;
        }
    }
    if (!fill) return;
    // Rows that no candidate can reach, and with a small capacity the whole tail.
    i64 tail = candidates, step = static_cast<i64>(gridDim.x) * THREADS;
    i64 row = tail + static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    if (capacity < candidates) {
        if (!last) return;
        row = before + total + static_cast<i64>(threadIdx.x);
        step = THREADS;
    }
    for (; row < capacity; row += step) indices[3 * row] = indices[3 * row + 1] = indices[3 * row + 2] = -1;
}
