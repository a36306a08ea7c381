// reduce_mask.cu: from a mask to the list of active blocks, in one launch.
//   active(n, hi, wi) = pooled mask[n, h0 .. h0 + BH, w0 .. w0 + BW] > tol    max, or sum / area
//   indices = the active (n, hi, wi) in raster order, -1 past the count;  bin_counts = their number
// Source: Ren et al. 2018, section 3.1.  Python: sbnet_cupy/ops/reduce_mask.py
//
// The candidate blocks of the raster are cut into words of `batch` (up to 32), whose flags are one
// 32-bit number. Each thread block takes `words` consecutive ones:
//   1. pool      a warp finds the corners of a word's candidates, one a lane, and then pools them
//                with LANES lanes each; large blocks are pooled by the whole thread block
//   2. publish   the number of flags set goes to workspace[1 + blockIdx], tagged with the epoch
//   3. look back the thread block waits for the counts of those before it and adds them: its place
//   4. write     rows in raster order; inactive candidates fill the tail with -1 from the far end
// No atomics and no second launch: the order is the raster's by construction. The workspace is
// never cleared: a count is valid when its tag is this launch's epoch, which the last thread block
// advances when all have published. Thread blocks wait only for lower-numbered ones, which the
// hardware starts first. Launch: 256 threads, `words` words per thread block.
#include "async_copy.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr u32 ALL = 0xffffffffu;  // lanes of a warp

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

// Sizes [N, H, W] of the mask; each side is under 2^30, the product need not be.
struct Image {
    int N, H, W;
};

// A candidate block: its corner, and the offset in the mask of column 0 of its first row. A block
// with no pixel in the image has its corner at (H, W).
struct Candidate {
    i64 row;
    int h0, w0;
};

struct Raster {
    i64 off_h, off_w, str_h, str_w;
    int count_h, count_w;

    template <int BH, int BW>
    DEVICE Candidate find(int id, const Image& image) const {
        const int per_image = count_h * count_w, n = id / per_image, rest = id - n * per_image;
        const int hi = rest / count_w, wi = rest - hi * count_w;
        const i64 h0 = off_h + str_h * hi, w0 = off_w + str_w * wi;
        if (h0 <= -BH || h0 >= image.H || w0 <= -BW || w0 >= image.W)
            return Candidate{0, image.H, image.W};
        return Candidate{(static_cast<i64>(n) * image.H + h0) * image.W, static_cast<int>(h0),
                         static_cast<int>(w0)};
    }
};

// The mask is read in words of WORD elements, which divide its rows: a word lies in the image or
// not at all. EXACT: they divide the blocks' rows too. LANES lanes read a candidate together: ACROSS
// of them lie along a row, and each goes down the rows with steps of LANES / ACROSS.
template <typename T, int BH, int BW, bool AVERAGE, int WORD, bool EXACT, int ACROSS, int LANES>
struct Pool {
    using Bits = typename Bytes<WORD * sizeof(T)>::type;
    using Sum = typename Element<T>::Sum;
    static constexpr int PER_ROW = EXACT ? BW / WORD : ceil_div(BW + 2 * (WORD - 1), WORD);
    static constexpr int DOWN = LANES / ACROSS, STEPS_DOWN = ceil_div(BH, DOWN);
    static constexpr int STEPS_ACROSS = ceil_div(PER_ROW, ACROSS), STEPS = STEPS_DOWN * STEPS_ACROSS;
    static constexpr int CHUNK = STEPS_DOWN < 12 ? STEPS_DOWN : 8;  // loads under way at a time
    static constexpr int AT_ONCE = STEPS >= 6 ? 1 : (STEPS >= 3 ? 2 : 4);  // candidates in flight
    const T* mask;
    Image image;
    Raster raster;
    double tol;
    i64 least;
    bool never;

    // Calls body(elements, which), bit e of `which` telling whether element e belongs to the block.
    // A lane's loads come first and unconditionally (of the mask's first word where there is nothing
    // to read), so that they are all under way before the first is looked at.
    template <class Body>
    DEVICE void visit(const Candidate& block, Body body) const {
        const int lane = threadIdx.x % LANES, across = lane % ACROSS, down = lane / ACROSS;
        const int i_begin = max(-block.h0, 0), i_end = min(image.H - block.h0, BH);
        const int left = max(block.w0, 0), right = min(block.w0 + BW, image.W);
#pragma unroll
        for (int k = 0; k < STEPS_ACROSS; ++k) {
            const int word = k * ACROSS + across;
            const int column = EXACT ? block.w0 + word * WORD : (block.w0 & ~(WORD - 1)) + word * WORD;
            const int from = min(max(left - column, 0), WORD), to = min(max(right - column, 0), WORD);
            const u32 which = word < PER_ROW && from < to ? ((1u << to) - 1) & ~((1u << from) - 1) : 0;
            const T* const start = mask + (block.row + column);
            for (int first = 0; first < STEPS_DOWN; first += CHUNK) {
                Bits value[CHUNK];
                u32 wanted[CHUNK];
#pragma unroll
                for (int s = 0; s < CHUNK; ++s) {
                    const int i = (first + s) * DOWN + down;
                    wanted[s] = i >= i_begin && i < i_end ? which : 0;
                    value[s] = *reinterpret_cast<const Bits*>(
                        wanted[s] ? start + static_cast<i64>(i) * image.W : mask);
                }
#pragma unroll
                for (int s = 0; s < CHUNK; ++s) body(Elements<T, Bits>(value[s]), wanted[s]);
            }
        }
    }

    // Whether a byte of `which` is not 0, four bytes at a time.
    DEVICE static u32 set_bytes(const Elements<T, Bits>& word, u32 which) {
        const Elements<u32, Bits> quads(word.vector);
        u32 found = 0;
#pragma unroll
        for (int q = 0; q < Elements<u32, Bits>::COUNT; ++q) {
            // The four bits of `which` spread to four bytes: 0b1011 -> 0xff00ffff.
            const u32 bytes = ((which >> 4 * q & 15u) * 0x00204081u & 0x01010101u) * 255u;
            found |= quads.element[q] & (EXACT ? ~0u : bytes);
        }
        return which ? found : 0;
    }

    DEVICE bool any(const Candidate& block) const {
        u32 found = 0;
        if constexpr (Same<T, u8>::value && sizeof(Bits) >= 4)
            if (least == 1) {  // bool, and bytes over a tol of 0
                visit(block, [&](const Elements<T, Bits>& word, u32 which) {
                    found |= set_bytes(word, which);
                });
                return found && !never;
            }
        visit(block, [&](const Elements<T, Bits>& word, u32 which) {
            u32 hits = 0;
#pragma unroll
            for (int e = 0; e < WORD; ++e)
                hits |= Element<T>::exceeds(word.element[e], tol, least) ? 1u << e : 0u;
            found |= hits & which;
        });
        return found && !never;
    }
    DEVICE Sum sum(const Candidate& block) const {
        Sum total = 0;
        visit(block, [&](const Elements<T, Bits>& word, u32 which) {
#pragma unroll
            for (int e = 0; e < WORD; ++e)
                if (which >> e & 1u) total += Element<T>::term(word.element[e]);
        });
        return total;
    }
    DEVICE bool exceeds(Sum total) const {
        return static_cast<double>(total) / (static_cast<double>(BH) * BW) > tol;
    }

    // Flags of candidates [id, id + size), size <= 32, pooled by one warp. Same in all its lanes.
    DEVICE u32 by_warp(int id, int size) const {
        constexpr int GROUPS = 32 / LANES;
        const int lane = threadIdx.x & 31;
        Candidate mine{0, image.H, image.W};
        if (lane < size) mine = raster.template find<BH, BW>(id + lane, image);
        u32 flags = 0;
        for (int pass = 0; pass < size; pass += GROUPS * AT_ONCE) {
            using Value = typename Choose<AVERAGE, Sum, bool>::type;
            Value pooled[AT_ONCE];
#pragma unroll
            for (int q = 0; q < AT_ONCE; ++q) {
                const int source = min(pass + q * GROUPS + lane / LANES, 31);
                const Candidate block{__shfl_sync(ALL, mine.row, source), __shfl_sync(ALL, mine.h0, source),
                                      __shfl_sync(ALL, mine.w0, source)};
                if constexpr (AVERAGE)
                    pooled[q] = sum(block);
                else
                    pooled[q] = any(block);
            }
#pragma unroll
            for (int q = 0; q < AT_ONCE; ++q) {
                if constexpr (AVERAGE)
#pragma unroll
                    for (int d = LANES / 2; d > 0; d /= 2) pooled[q] += __shfl_xor_sync(ALL, pooled[q], d);
                bool active;
                if constexpr (AVERAGE)
                    active = exceeds(pooled[q]);
                else
                    active = pooled[q];
                const u32 votes = __ballot_sync(ALL, active);
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) {
                    const int place = pass + q * GROUPS + group;
                    const u32 lanes = votes >> (group * LANES) & (LANES < 32 ? (1u << LANES % 32) - 1 : ALL);
                    if (lanes && place < size) flags |= 1u << place;
                }
            }
        }
        return flags;
    }

    // Flag of candidate id, pooled by the whole thread block. Same in all its threads.
    DEVICE bool by_block(int id, Sum* partial) const {
        const Candidate block = raster.template find<BH, BW>(id, image);
        if constexpr (AVERAGE) {
            Sum total = sum(block);
#pragma unroll
            for (int d = 16; d > 0; d /= 2) total += __shfl_xor_sync(ALL, total, d);
            __syncthreads();  // partial may still be read
            if ((threadIdx.x & 31) == 0) partial[threadIdx.x / 32] = total;
            __syncthreads();
            total = 0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) total += partial[w];
            return exceeds(total);
        } else {
            return __syncthreads_or(any(block));
        }
    }
};

// ---------------------------------------------------------------------------- counting

// Sum of `value` over the threads before this one; the sum over all is left in `total`. `scratch`
// holds WARPS ints; two barriers.
DEVICE int sum_before(int value, int* scratch, int& total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    int sum = value;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(ALL, sum, d);
        if (lane >= d) sum += other;
    }
    __syncthreads();  // scratch may still be read from an earlier call
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    int warps = lane < WARPS ? scratch[lane] : 0;  // inclusive sums of the warps' totals
#pragma unroll
    for (int d = 1; d < WARPS; d *= 2) {
        const int other = __shfl_up_sync(ALL, warps, d);
        if (lane >= d) warps += other;
    }
    total = __shfl_sync(ALL, warps, WARPS - 1);
    const int before = __shfl_sync(ALL, warps, warp ? warp - 1 : 0);
    return sum - value + (warp ? before : 0);
}

// One 64-bit store carries tag and count, so that no fence is needed.
DEVICE void publish(u64* slot, u64 value) { *const_cast<volatile u64*>(slot) = value; }

// The count that thread block `slot` published in this epoch; waits until it is there.
DEVICE int await_count(const u64* slot, u32 epoch) {
    u64 value = *const_cast<const volatile u64*>(slot);
    while (static_cast<u32>(value >> 32) != epoch) value = *const_cast<const volatile u64*>(slot);
    return static_cast<int>(static_cast<u32>(value));
}

// ---------------------------------------------------------------------------- kernel

// mask [N, H, W]; bin_counts [1]; indices [capacity, 3]; workspace [1 + gridDim] (epoch, counts)
template <typename T, int BH, int BW, bool AVERAGE, int WORD, bool EXACT, int ACROSS, int LANES>
__global__ void __launch_bounds__(THREADS, LANES == THREADS ? 1 : (sizeof(T) == 1 || sizeof(T) == 8) ? 2 : 3)
    reduce_mask(const T* __restrict__ mask, int* __restrict__ bin_counts, int* __restrict__ indices,
                u64* workspace, i64 N, i64 H, i64 W, i64 count_h, i64 count_w, i64 off_h,
                i64 off_w, i64 str_h, i64 str_w, double tol, i64 least, i64 never, i64 capacity,
                i64 batch, i64 words, i64 fill) {
    overlap_launches();
    DYNAMIC_SHARED(u32, flags);           // [words]
    int* const ranks = reinterpret_cast<int*>(flags + words);  // [words]: flags set before a word
    __shared__ int scratch[WARPS];
    __shared__ u32 launch_epoch;
    __shared__ typename Element<T>::Sum partial[WARPS];
    const Image image{static_cast<int>(N), static_cast<int>(H), static_cast<int>(W)};
    const Raster raster{off_h, off_w, str_h, str_w, static_cast<int>(count_h), static_cast<int>(count_w)};
    const Pool<T, BH, BW, AVERAGE, WORD, EXACT, ACROSS, LANES> pool{mask, image, raster,
                                                                    tol,  least, never != 0};
    const int candidates = static_cast<int>(N * count_h * count_w);
    const int per_word = static_cast<int>(batch), lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const i64 first = blockIdx.x * words * batch;  // candidate
    const int left = static_cast<int>(min(words * batch, candidates - first));
    const int my_words = ceil_div(left, per_word);
    if (threadIdx.x == 0) launch_epoch = static_cast<u32>(workspace[0]) + 1;

    // 1. pool
    if constexpr (LANES == THREADS) {
        for (int w = 0; w < my_words; ++w) {  // batch is 1
            const bool active = pool.by_block(static_cast<int>(first) + w, partial);
            if (threadIdx.x == 0) flags[w] = active;
        }
    } else {
        for (int w = warp; w < my_words; w += WARPS) {
            const int size = min(per_word, left - w * per_word);
            const u32 word = pool.by_warp(static_cast<int>(first) + w * per_word, size);
            if (lane == 0) flags[w] = word;
        }
    }
    __syncthreads();

    // 2. publish
    const int per_thread = ceil_div(my_words, THREADS);
    const int from = min(static_cast<int>(threadIdx.x) * per_thread, my_words);
    const int to = min(from + per_thread, my_words);
    int mine = 0, total = 0;
    for (int w = from; w < to; ++w) mine += __popc(flags[w]);
    int rank = sum_before(mine, scratch, total);
    const u32 epoch = launch_epoch;
    if (threadIdx.x == 0)
        publish(workspace + 1 + blockIdx.x, (static_cast<u64>(epoch) << 32) | static_cast<u32>(total));
    for (int w = from; w < to; ++w) {
        ranks[w] = rank;
        rank += __popc(flags[w]);
    }

    // 3. look back
    int waited = 0, before = 0;
    for (u32 other = threadIdx.x; other < blockIdx.x; other += THREADS)
        waited += await_count(workspace + 1 + other, epoch);
    sum_before(waited, scratch, before);  // its barriers also make the ranks visible
    const bool last = blockIdx.x == gridDim.x - 1;
    if (last && threadIdx.x == 0) {
        *bin_counts = before + total;
        publish(workspace, epoch);  // all have published, so all have read the old epoch
    }

    // 4. write
    for (int w = warp; w < my_words; w += WARPS) {
        if (lane >= per_word || w * per_word + lane >= left) continue;
        const int id = static_cast<int>(first) + w * per_word + lane;
        const u32 word = flags[w];
        const i64 place = before + ranks[w] + __popc(word & ((1u << lane) - 1));
        i64 at = place;
        int n = -1, hi = -1, wi = -1;
        if (word >> lane & 1u) {
            const int per_image = raster.count_h * raster.count_w;
            n = id / per_image;
            hi = (id - n * per_image) / raster.count_w;
            wi = id - n * per_image - hi * raster.count_w;
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
    i64 row = candidates + static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    i64 step = static_cast<i64>(gridDim.x) * THREADS;
    if (capacity < candidates) {
        if (!last) return;
        row = before + total + static_cast<i64>(threadIdx.x);
        step = THREADS;
    }
    for (; row < capacity; row += step) indices[3 * row] = indices[3 * row + 1] = indices[3 * row + 2] = -1;
}
