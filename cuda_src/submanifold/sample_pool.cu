// sample_pool.cu: of each sample the sum, the average or the largest number of each channel over its rows, or that one's row.
//   y[b, c] = sum of x[n, c] over the rows n of sample[n] = b, or their average;  0 of a sample without rows
//   y[b, c] = largest x[n, c], NaN more than any number;  rows[b, c] = the first n that has it, -1 without rows
// A row of no sample 0 ... B - 1 is in no result.
// Python: sbnet_cupy/submanifold/sample_pool.py
// Launches: pool_parts, a thread block for each range of rows (x) and slice of the channels (y), with `lanes` threads, a
//   power of two, side by side on a row; then pool_samples, which puts the ranges together: a thread block for each sample
//   (x) and 32 channels (y), GROUPS threads for each result
// Why: rows of a sample mostly follow each other, so that a range has few samples. It takes one after the other, from its
//   lowest to its highest. The order of sums is decided by the numbers of rows, samples and channels.
#include "core/async_copy.cuh"

constexpr int THREADS = 256, AT_ONCE = 4;                         // rows that are loaded together
constexpr int GROUPS = 16, PART_THREADS = GROUPS * 32, PARTS = 8;  // that are loaded together

// A sum, or the largest number so far and its row, of which -1 is none.
template <bool LARGEST, typename C>
struct Reduced {
    C value;

    static DEVICE Reduced none() { return Reduced{0}; }
    DEVICE void take(C next, int) { value = add(value, next); }
    DEVICE void take(Reduced other) { value = add(value, other.value); }
};
template <typename C>
struct Reduced<true, C> {
    C value;
    int row;

    static DEVICE Reduced none() { return Reduced{0, -1}; }
    DEVICE void take(C next, int its) {  // of a later row
        if (row >= 0 && (next <= value || value != value)) return;
        value = next;
        row = its;
    }
    DEVICE void take(Reduced other) {
        if (other.row < 0) return;
        const bool nan = value != value, nan_too = other.value != other.value;
        const bool same = nan ? nan_too : value == other.value;
        const bool more = nan_too ? !nan : other.value > value;
        if (row < 0 || more || (same && other.row < row)) *this = other;
    }
};
template <typename T, bool LARGEST>
using ReducedOf = Reduced<LARGEST, typename ComputeOf<T>::type>;

// V: a vector of numbers T. Of each part and sample there is what its channels come to, then, of all, how many rows.
template <typename T, typename V, bool LARGEST>
__global__ void __launch_bounds__(THREADS, 2)
    pool_parts(const V* __restrict__ x,                         // [N, width]
               const int* __restrict__ sample,                  // [N]
               ReducedOf<T, LARGEST>* __restrict__ found,       // [parts, B, C], then int [parts, B]
               i64 N, i64 B, i64 parts, i64 rows_of_part, i64 width, i64 lanes) {
    using C = typename ComputeOf<T>::type;
    using Own = ReducedOf<T, LARGEST>;
    constexpr int COUNT = Elements<T, V>::COUNT;
    __shared__ Own others[THREADS * COUNT];
    __shared__ int low, high, rows;
    overlap_launches(x, sample);
    const int each = static_cast<int>(lanes), group = threadIdx.x / each, groups = THREADS / each;
    const i64 part = blockIdx.x, first = part * rows_of_part, last = first + rows_of_part < N ? first + rows_of_part : N;
    const i64 v = static_cast<i64>(blockIdx.y) * each + threadIdx.x % each;
    const bool is_leader = blockIdx.y == 0;  // counts the rows
    Own* const of_part = found + part * B * width * COUNT;
    int* const counts = reinterpret_cast<int*>(found + parts * B * width * COUNT) + part * B;

    if (threadIdx.x == 0) low = static_cast<int>(B), high = -1;
    __syncthreads();
    int least = static_cast<int>(B), most = -1;
    bool strays = false;  // rows of no sample
    for (i64 n = first + threadIdx.x; n < last; n += THREADS) {
        const int own = sample[n];
        const bool is_one = own >= 0 && own < B;
        strays |= !is_one;
        if (is_one && own < least) least = own;
        if (is_one && own > most) most = own;
    }
    if (most >= 0) atomicMin(&low, least), atomicMax(&high, most);
    strays = __syncthreads_or(strays);
    const int begin = low, end = high;
    const bool is_one = begin == end && !strays;  // all rows are of one sample

    for (i64 b = threadIdx.x; is_leader && b < B; b += THREADS)
        if (b < begin || b > end) counts[b] = 0;
    for (i64 b = group; v < width && b < B; b += groups) {
        if (b >= begin && b <= end) continue;
#pragma unroll
        for (int e = 0; e < COUNT; ++e) of_part[(b * width + v) * COUNT + e] = Own::none();
    }
    for (int b = begin; b <= end; ++b) {
        Own own[COUNT];
#pragma unroll
        for (int e = 0; e < COUNT; ++e) own[e] = Own::none();
        int number = 0;
        for (i64 n0 = first + group; n0 < last; n0 += groups * AT_ONCE) {
            bool mine[AT_ONCE];
            Elements<T, V> loaded[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                mine[i] = n0 + i * groups < last && (is_one || sample[n0 + i * groups] == b);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                number += mine[i];
                mine[i] = mine[i] && v < width;
                if (mine[i]) loaded[i].vector = x[(n0 + i * groups) * width + v];
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (!mine[i]) continue;
#pragma unroll
                for (int e = 0; e < COUNT; ++e)
                    own[e].take(to_compute<C>(loaded[i].element[e]), static_cast<int>(n0 + i * groups));
            }
        }
        if (threadIdx.x == 0) rows = 0;
#pragma unroll
        for (int e = 0; e < COUNT; ++e) others[e * THREADS + threadIdx.x] = own[e];
        __syncthreads();
        if (threadIdx.x % each == 0) atomicAdd(&rows, number);
        for (int half = groups / 2; half > 0; half /= 2) {
            if (group < half) {
#pragma unroll
                for (int e = 0; e < COUNT; ++e) {
                    const int at = e * THREADS + threadIdx.x;
                    others[at].take(others[at + half * each]);
                }
            }
            __syncthreads();
        }
        if (group == 0 && v < width) {
#pragma unroll
            for (int e = 0; e < COUNT; ++e) of_part[(b * width + v) * COUNT + e] = others[e * THREADS + threadIdx.x];
        }
        if (threadIdx.x == 0 && is_leader) counts[b] = rows;
        __syncthreads();  // before the next sample's are written
    }
}

// R: T, of numbers, or int, of rows.
template <typename T, bool LARGEST, typename R>
__global__ void __launch_bounds__(PART_THREADS, 1)
    pool_samples(const ReducedOf<T, LARGEST>* __restrict__ found,  // [parts, B, C], then int [parts, B]
                 R* __restrict__ y,                                // [B, C]
                 i64 B, i64 parts, i64 channels, i64 mean) {
    using C = typename ComputeOf<T>::type;
    using Own = ReducedOf<T, LARGEST>;
    __shared__ Own others[GROUPS][32];
    __shared__ int numbers[GROUPS];
    overlap_launches(found);
    const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
    const i64 b = blockIdx.x, c = static_cast<i64>(blockIdx.y) * 32 + lane;
    const int* const counts = reinterpret_cast<const int*>(found + parts * B * channels);
    Own own = Own::none();
    int number = 0;
    for (i64 part0 = group; part0 < parts; part0 += GROUPS * PARTS) {
        Own its[PARTS];
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            const i64 part = part0 + p * GROUPS;
            its[p] = part < parts && c < channels ? found[(part * B + b) * channels + c] : Own::none();
            if (mean && part < parts) number += counts[part * B + b];
        }
#pragma unroll
        for (int p = 0; p < PARTS; ++p) own.take(its[p]);
    }
    others[group][lane] = own;
    if (lane == 0) numbers[group] = number;
    __syncthreads();
    if (group > 0 || c >= channels) return;
#pragma unroll
    for (int g = 1; g < GROUPS; ++g) {
        own.take(others[g][lane]);
        number += numbers[g];
    }
    if (mean && number > 1) own.value /= static_cast<C>(number);
    if constexpr (Same<R, int>::value) y[b * channels + c] = own.row;
    else y[b * channels + c] = from_compute<T>(own.value);
}
