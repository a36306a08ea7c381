// reduce_mask.cu: from a mask to the list of active blocks, in one launch.
//   active(n, hi, wi) = pooled mask[n, h0 .. h0 + BH, w0 .. w0 + BW] > tol    max, or sum / area
//   indices = the active (n, hi, wi) in raster order, -1 past the count;  bin_counts = their number
// Source: Ren et al. 2018, section 3.1.  Python: sbnet_cupy/block_sparse/mask/reduce_mask.py
//
// A line is a row of candidate blocks: all of them cover the same rows of the mask. Each thread block
// takes `lines` consecutive ones, or `span` consecutive candidates of one:
//   1. read      down some rows of a line, a thread in wide words or, where the mask is small or its
//                rows begin anywhere, a warp in 32 columns; what they find goes to shared memory: a
//                bit for each column of pixels (max), or a sum (average)
//   2. flags     a candidate looks at the columns that it covers; 32 flags make a word
//   3. count     the thread block's place in the list is the number of flags set before it: none, where
//                it is alone; TOGETHER of them in a cluster tell each other; else (0) each publishes
//                its own in workspace[1 + blockIdx], tagged with the epoch, and waits for those before
//   4. write     rows in raster order; inactive candidates fill the tail with -1 from the far end
// No second launch, and the order is the raster's by construction. The workspace is never cleared: a
// count is valid when its tag is this launch's epoch, which the last thread block advances when all
// have published. Thread blocks wait only for lower-numbered ones, which the hardware starts first.
// A small mask is a matter of latency: what can be known before the mask is there is computed before
// the wait for the kernel ahead, and no barrier is passed that need not be.
#include "block_sparse/mask/mask_reader.cuh"
#include "block_sparse/mask/ordered_count.cuh"

// ---------------------------------------------------------------------------- columns

// The columns [low, high) of a line; first and last are their words of bits, of which `from` and `to`
// belong to them.
struct Segment {
    int line, low, high, first, last;
    u32 from, to;

    DEVICE Segment() {}
    DEVICE Segment(int line_, int low_, int high_, int pitch)
        : line(line_), low(low_), high(high_), first(line_ * pitch), last(first), from(0), to(0) {
        if (low >= high) return;
        from = ALL << low % 32;
        to = ALL >> (31 - (high - 1) % 32);
        last = first + (high - 1) / 32;
        first += low / 32;
        if (first == last) from = to = from & to;
    }
};

// What a thread block keeps of its lines in shared memory, `pitch` for each: words of bits (max), or
// sums, of which each of `parts` threads has its own (average).
template <typename Sum, bool AVERAGE>
struct Columns {
    u32* bits;
    Sum* sums;
    int pitch, parts;

    // Columns 16 apart, of neighbouring candidates, lie in different banks.
    DEVICE static int skewed(int column) { return column + (column >> 4); }
    // For so many columns: of words, or of sums.
    static __host__ __device__ constexpr int pitch_of(int stored) {
        return AVERAGE ? stored + (stored >> 4) + 1 : ceil_div(stored, 32);
    }

    // Set the bits of columns at, at + 1, ..., which lie in one word.
    DEVICE void set(int line, int at, u32 found) const {
        if (found) atomicOr(bits + line * pitch + at / 32, found << at % 32);
    }

    // Whether a segment's columns pool to more than tol over `area` pixels.
    DEVICE bool exceed(const Segment& segment, double area, double tol) const {
        if constexpr (AVERAGE) {
            Sum total = 0;
            for (int part = 0; part < parts; ++part) {
                const Sum* const of_part = sums + (segment.line * parts + part) * pitch;
                for (int column = segment.low; column < segment.high; ++column) total += of_part[skewed(column)];
            }
            return static_cast<double>(total) / area > tol;
        } else {
            u32 found = (bits[segment.first] & segment.from) | (bits[segment.last] & segment.to);
            for (int w = segment.first + 1; w < segment.last; ++w) found |= bits[w];
            return found != 0;
        }
    }
};

// ---------------------------------------------------------------------------- kernel

// mask [N, H, W]; bin_counts [1]; indices [capacity, 3]; workspace [1 + gridDim] (epoch, counts),
// unused unless TOGETHER is 0; places [N, count_h, count_w], the row of each candidate or -1, or null.
// Shared memory: columns_bytes for Columns, then the words of flags.
template <typename T, int BH, int BW, bool AVERAGE, int WORD, bool LANES, bool NONZERO, int THREADS, int TOGETHER>
DEVICE void list_active(const T* __restrict__ mask, int* __restrict__ bin_counts, int* __restrict__ indices,
                        int* __restrict__ places, u64* workspace, i64 N, i64 H, i64 W, i64 count_h, i64 count_w,
                        i64 off_h, i64 off_w, i64 str_h, i64 str_w, double tol, i64 least, i64 never, i64 capacity,
                        i64 lines, i64 span, i64 down, i64 slots, i64 columns_bytes, i64 fill) {
    using Sum = typename Element<T>::Sum;
    using Group = Cluster<TOGETHER ? TOGETHER : 1>;
    constexpr int WARPS = THREADS / 32;
    constexpr int STEP = LANES ? 32 : WORD;     // columns that are read together
    constexpr int READERS = LANES ? WARPS : THREADS;  // by whom
    static_assert(!LANES || (WORD == 1 && !AVERAGE), "a bit of each lane makes a word");
    DYNAMIC_SHARED(u32, shared);
    __shared__ int scratch[WARPS];
    __shared__ u32 launch_epoch;
    int* const counts = counts_of_cluster<TOGETHER ? TOGETHER : 1>();
    if constexpr (TOGETHER > 1) Group::arrive();     // waited for before the first count is sent
    const Image image{static_cast<int>(N), static_cast<int>(H), static_cast<int>(W)};
    const Raster raster{off_h, off_w, str_h, str_w, static_cast<int>(count_h), static_cast<int>(count_w)};
    const Reader<T, BH, WORD, LANES, NONZERO> reader{mask, image, tol, least};
    const int all_lines = image.N * raster.count_h, candidates = all_lines * raster.count_w;
    const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;

    // This thread block: candidates [first, first + left) of the raster, `in_line` in each line.
    const int per_line = ceil_div(raster.count_w, static_cast<int>(span));  // thread blocks
    const int group = blockIdx.x / per_line, line0 = group * static_cast<int>(lines);
    const int my_lines = min(max(all_lines - line0, 0), static_cast<int>(lines));
    const int wi0 = (blockIdx.x - group * per_line) * static_cast<int>(span);
    const int in_line = min(raster.count_w - wi0, static_cast<int>(span));
    const int left = my_lines * in_line, flag_words = ceil_div(left, 32);
    const int first = line0 * raster.count_w + wi0;

    const i64 corner = raster.off_w + raster.str_w * wi0;
    const int begin = static_cast<int>(clamp(corner, 0, W));
    const int end = static_cast<int>(clamp(corner + raster.str_w * (in_line - 1) + BW, begin, W));
    const int base = LANES ? begin : begin & ~(WORD - 1);
    const int words = begin < end ? ceil_div(end - base, STEP) : 0;
    const Extent extent{begin, end, base, words, min(words, static_cast<int>(slots))};
    const int stored = extent.slots * STEP, parts = static_cast<int>(down);
    const Columns<Sum, AVERAGE> columns{shared, reinterpret_cast<Sum*>(shared),
                                        Columns<Sum, AVERAGE>::pitch_of(stored), parts};
    u32* const flags = shared + columns_bytes / 4;
    if constexpr (!AVERAGE)
        for (int w = thread; w < my_lines * columns.pitch; w += THREADS) shared[w] = 0;

    // What to read, and what to look at.
    const int items = my_lines * parts * extent.slots;
    const auto part_of = [&](int item) {
        Part part;
        part.row = item / extent.slots;
        part.slot = item - part.row * extent.slots;
        part.line = part.row / parts;
        const int line = line0 + part.line;
        part.n = line / raster.count_h;
        const i64 h0 = raster.off_h + raster.str_h * (line - part.n * raster.count_h);
        part.from = static_cast<int>(clamp(h0, 0, H)) + part.row - part.line * parts;
        part.to = static_cast<int>(clamp(h0 + BH, 0, H));
        part.step = parts;
        return part;
    };
    struct Found {
        int n, hi, wi;
    };
    const auto candidate_of = [&](int k, Segment& segment) {  // k < left
        const int line = k / in_line;
        Found found;
        found.n = (line0 + line) / raster.count_h;
        found.hi = line0 + line - found.n * raster.count_h;
        found.wi = wi0 + k - line * in_line;
        const i64 w0 = raster.off_w + raster.str_w * found.wi;
        const int low = static_cast<int>(clamp(w0, begin, end)) - base;
        const int high = static_cast<int>(clamp(w0 + BW, begin, end)) - base;
        segment = extent.folded() ? Segment(line, 0, stored, columns.pitch) : Segment(line, low, high, columns.pitch);
        return found;
    };
    Part part{};
    const int reader_of = LANES ? warp : thread;
    if (reader_of < items) part = part_of(reader_of);
    Segment segment(0, 0, 0, 0);
    Found candidate{};
    if (thread < left) candidate = candidate_of(thread, segment);
    if constexpr (!AVERAGE) __syncthreads();
    overlap_launches();
    u64 old_epoch = 0;  // used once the mask is read, not to wait for it twice
    if (TOGETHER == 0 && thread == 0) old_epoch = workspace[0];

    // 1. read
    const bool gaps = raster.str_w > BW;
    for (int item = reader_of; item < items; item += READERS) {
        if (item >= READERS) part = part_of(item);
        Sum totals[AVERAGE ? WORD : 1] = {};
        for (int word = part.slot; word < extent.words; word += extent.slots) {
            const int column = base + word * STEP;
            if (gaps) {  // between candidates there may be nothing to read
                const i64 past = column + STEP - 1 - raster.off_w;
                if (past - divide(past, raster.str_w) * raster.str_w >= BW + STEP - 1) continue;
            }
            if constexpr (AVERAGE) {
                reader.add(part, column, extent.which(column), totals);
            } else if constexpr (LANES) {
                const u32 found = reader.exceeding_lanes(part, extent, column);
                if (lane == 0) columns.set(part.line, part.slot * STEP, found);
            } else {
                columns.set(part.line, part.slot * STEP, reader.exceeding(part, column) & extent.which(column));
            }
        }
        if constexpr (AVERAGE)
#pragma unroll
            for (int e = 0; e < WORD; ++e)
                columns.sums[part.row * columns.pitch + columns.skewed(part.slot * WORD + e)] = totals[e];
    }
    if (TOGETHER == 0 && thread == 0) launch_epoch = static_cast<u32>(old_epoch) + 1;
    __syncthreads();

    // 2. flags
    for (int k = thread; k < flag_words * 32; k += THREADS) {
        if (k >= THREADS && k < left) candidate_of(k, segment);
        const bool active = k < left && !never && columns.exceed(segment, static_cast<double>(BH) * BW, tol);
        const u32 votes = __ballot_sync(ALL, active);
        if (lane == 0) flags[k / 32] = votes;
    }
    __syncthreads();

    // 3. count
    const int each = ceil_div(flag_words, WARPS), from = min(warp * each, flag_words);
    const Counted counted(flags, flag_words, from);
    const int total = counted.all;
    int before = 0;  // flags set in the thread blocks before this one
    if constexpr (TOGETHER == 0) {
        const u32 epoch = launch_epoch;
        if (thread == 0)
            publish(workspace + 1 + blockIdx.x, (static_cast<u64>(epoch) << 32) | static_cast<u32>(total));
        before = look_back<THREADS>(workspace + 1, epoch, scratch);
        if (blockIdx.x == gridDim.x - 1 && thread == 0)
            publish(workspace, epoch);  // all have published, so all have read the old epoch
    } else if constexpr (TOGETHER > 1) {
        Group::wait();  // the others are there
        if (thread == 0) Group::store(counts + Group::rank(), total);
        Group::sync();
        before = warp_sum(lane < Group::rank() ? counts[lane] : 0);
    }
    const bool last = blockIdx.x == gridDim.x - 1;
    if (last && thread == 0) *bin_counts = before + total;

    // 4. write
    int place = before + counted.before;  // in the list, of a word's first flag
    for (int w = from; w < min(from + each, flag_words); ++w) {
        const int k = w * 32 + lane, id = first + k;
        const u32 word = flags[w];
        const i64 mine = place + __popc(word & ((1u << lane) - 1));
        place += __popc(word);
        if (k >= left) continue;
        i64 at = mine;
        Found found{-1, -1, -1};
        if (places) places[id] = word >> lane & 1u && mine < capacity ? static_cast<int>(mine) : -1;
        if (word >> lane & 1u) {
            found = k == thread ? candidate : candidate_of(k, segment);
        } else {  // the q-th inactive candidate fills the q-th row from the end
            if (!fill || capacity < candidates) continue;
            at = candidates - 1 - (id - mine);
        }
        if (at < capacity) {
            int* row = indices + 3 * at;
            row[0] = found.n, row[1] = found.hi, row[2] = found.wi;
        }
    }
    if (!fill) return;
    // Rows that no candidate can reach, and with a small capacity the whole tail.
    i64 row = candidates + static_cast<i64>(blockIdx.x) * THREADS + thread;
    i64 step = static_cast<i64>(gridDim.x) * THREADS;
    if (capacity < candidates) {
        if (!last) return;
        row = before + total + static_cast<i64>(thread);
        step = THREADS;
    }
    for (; row < capacity; row += step) indices[3 * row] = indices[3 * row + 1] = indices[3 * row + 2] = -1;
}

// Threads for which a multiprocessor has registers without a spill.
constexpr int RESIDENT = DEVICE_ARCHITECTURE < 1000 ? 768 : 512;

template <typename T, int BH, int BW, bool AVERAGE, int WORD, bool LANES, bool NONZERO, int THREADS, int TOGETHER>
__global__ void __launch_bounds__(THREADS, RESIDENT / THREADS)
    reduce_mask(const T* __restrict__ mask, int* __restrict__ bin_counts, int* __restrict__ indices,
                u64* workspace, i64 N, i64 H, i64 W, i64 count_h, i64 count_w, i64 off_h,
                i64 off_w, i64 str_h, i64 str_w, double tol, i64 least, i64 never, i64 capacity,
                i64 lines, i64 span, i64 down, i64 slots, i64 columns_bytes, i64 fill) {
    list_active<T, BH, BW, AVERAGE, WORD, LANES, NONZERO, THREADS, TOGETHER>(
        mask, bin_counts, indices, nullptr, workspace, N, H, W, count_h, count_w, off_h, off_w, str_h, str_w, tol,
        least, never, capacity, lines, span, down, slots, columns_bytes, fill);
}

// The same, and the row of each candidate in the list: the table of a network on a stack of blocks.
template <typename T, int BH, int BW, bool AVERAGE, int WORD, bool LANES, bool NONZERO, int THREADS, int TOGETHER>
__global__ void __launch_bounds__(THREADS, RESIDENT / THREADS)
    mask_table(const T* __restrict__ mask, int* __restrict__ bin_counts, int* __restrict__ indices,
               int* __restrict__ places, u64* workspace, i64 N, i64 H, i64 W, i64 count_h, i64 count_w, i64 off_h,
               i64 off_w, i64 str_h, i64 str_w, double tol, i64 least, i64 never, i64 capacity,
               i64 lines, i64 span, i64 down, i64 slots, i64 columns_bytes, i64 fill) {
    list_active<T, BH, BW, AVERAGE, WORD, LANES, NONZERO, THREADS, TOGETHER>(
        mask, bin_counts, indices, places, workspace, N, H, W, count_h, count_w, off_h, off_w, str_h, str_w, tol,
        least, never, capacity, lines, span, down, slots, columns_bytes, fill);
}
