// mask_reader.cuh: how a mask is read for reduce_mask.
//   Element   what "value > tol" and "sum" mean for an element type
//   Reader    goes down some rows of a line, by wide words of a thread or by 32 columns of a warp
#pragma once

#include "core/async_copy.cuh"

constexpr u32 ALL = 0xffffffffu;  // lanes of a warp, bits of a word

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

// ---------------------------------------------------------------------------- reading

// Sizes [N, H, W] of the mask; each side is under 2^30, the product need not be.
struct Image {
    int N, H, W;
};

// Candidate (hi, wi) of an image covers rows off_h + str_h * hi + [0, BH), and columns likewise.
struct Raster {
    i64 off_h, off_w, str_h, str_w;
    int count_h, count_w;
};

// The columns [begin, end) of the mask that a thread block reads, and how many words hold them in a
// row; `slots` of those have a place of their own in shared memory, from column `base` on.
struct Extent {
    int begin, end, base, words, slots;

    DEVICE bool folded() const { return slots < words; }  // there is one candidate, and one sum of all
    // Bit e: whether column + e is one of them. A word is never wholly beside them.
    DEVICE u32 which(int column) const {
        return (ALL << max(begin - column, 0)) & (ALL >> max(32 - (end - column), 0));
    }
};

// A part of a line: rows from, from + step, ... under `to` of image n, words of one slot.
struct Part {
    int n, from, to, step, line, slot, row;  // row: which line and which part of it
};

// A thread reads words of WORD elements, which divide the mask's rows; or, with LANES, one column, and
// its warp 32 neighbouring ones, which may begin anywhere. NONZERO: of bytes, where any but 0 exceeds
// the threshold.
template <typename T, int BH, int WORD, bool LANES, bool NONZERO>
struct Reader {
    using Bits = typename Bytes<WORD * sizeof(T)>::type;
    using Word = Elements<T, Bits>;
    using Sum = typename Element<T>::Sum;
    static constexpr bool QUADS = NONZERO && WORD >= 4;
    // Loads under way at a time, all but the last time.
    static constexpr int MOST = LANES ? (sizeof(T) == 8 ? 12 : 20) : (sizeof(Bits) == 16 ? 6 : 8);
    static constexpr int CHUNK = ceil_div(BH, ceil_div(BH, MOST));
    const T* mask;
    Image image;
    double tol;
    i64 least;

    // Calls body(word) for the words of a part that begin at `column` of a row.
    template <class Body>
    DEVICE void visit(const Part& part, int column, Body body) const {
        const T* const start = mask + (static_cast<i64>(part.n) * image.H * image.W + column);
        for (int first = part.from; first < part.to; first += CHUNK * part.step) {
            Bits value[CHUNK];
#pragma unroll
            for (int s = 0; s < CHUNK; ++s) {
                const int i = first + s * part.step;
                if (i < part.to)
                    value[s] = *reinterpret_cast<const Bits*>(start + static_cast<i64>(i) * image.W);
            }
#pragma unroll
            for (int s = 0; s < CHUNK; ++s)
                if (first + s * part.step < part.to) body(Word(value[s]));
        }
    }

    // Bit b: whether byte b is not 0. The product brings the bytes' lowest bits to the top four.
    DEVICE static u32 set_bytes(u32 quad) {
        const u32 high = (((quad & 0x7f7f7f7fu) + 0x7f7f7f7fu) | quad) & 0x80808080u;
        return ((high >> 7) * 0x10204080u) >> 28;
    }

    // Bit e: whether an element of column + e exceeds the threshold in a row of the part.
    DEVICE u32 exceeding(const Part& part, int column) const {
        u32 found = 0;
        if constexpr (QUADS) {
            Elements<u32, Bits> all(zero<Bits>());
            visit(part, column, [&](const Word& next) {
                const Elements<u32, Bits> quads(next.vector);
#pragma unroll
                for (int q = 0; q < WORD / 4; ++q) all.element[q] |= quads.element[q];
            });
#pragma unroll
            for (int q = 0; q < WORD / 4; ++q) found |= set_bytes(all.element[q]) << 4 * q;
        } else {
            const i64 lowest = NONZERO ? 1 : least;
            visit(part, column, [&](const Word& next) {
#pragma unroll
                for (int e = 0; e < WORD; ++e)
                    found |= Element<T>::exceeds(next.element[e], tol, lowest) ? 1u << e : 0u;
            });
        }
        return found;
    }

    // Likewise of the warp's columns, the same in all lanes. The part is the same too.
    DEVICE u32 exceeding_lanes(const Part& part, const Extent& extent, int column) const {
        const int mine = column + static_cast<int>(threadIdx.x & 31);
        return __ballot_sync(ALL, mine < extent.end && exceeding(part, mine));
    }

    // Adds to totals[e] what the rows hold in column + e, for the bits set in `which`.
    DEVICE void add(const Part& part, int column, u32 which, Sum* totals) const {
        visit(part, column, [&](const Word& next) {
#pragma unroll
            for (int e = 0; e < WORD; ++e)
                if (which >> e & 1u) totals[e] += Element<T>::term(next.element[e]);
        });
    }
};
