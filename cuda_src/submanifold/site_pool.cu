// site_pool.cu: the largest, the sum or the average of the rows that each row of a map reads, and back from the largest.
//   out[m, c] = largest or sum over the taps t of x[rows[t, m], c];  a number that is no row of x is not read
//   dx[n, c] = sum over t of grad_y[m, c], m = back[t, n], where x[n, c] is y[m, c], of equal ones the first or each
// Source: B. Graham's SparseConvNet (max pooling, whose gradient goes to all that are equal).  Python:
// sbnet_cupy/submanifold/site_pool.py, with the launches in site_pool_launch.py
// Launch: a thread for each vector of channels; up to `lanes`, a power of two, stand side by side on a row.
// Why: a table of all taps, rather than a pass for each. Rows of several taps are under way together, and are taken one
//   after the other, so that sums have the bits of a loop.
#include "core/async_copy.cuh"

constexpr int THREADS = 256, AT_ONCE = 4;  // taps whose rows are loaded together
constexpr i64 ONE = 0, VOLUME = 1;         // what sums are divided by; else by how many rows were read

template <typename C>
DEVICE C largest_of(C a, C b) { return a >= b || a != a ? a : b; }  // of NaN the first

template <typename C>
DEVICE bool is_same(C a, C b) { return a == b || (a != a && b != b); }

// V: a vector of numbers T. how: with LARGEST whether there is a floor, of sums one of the numbers above.
template <typename T, typename V, bool LARGEST>
__global__ void __launch_bounds__(THREADS)
    pool_rows(const V* __restrict__ x,         // [N, width]
              const int* __restrict__ rows,    // [taps, M]
              const bool* __restrict__ valid,  // [M]: rows of out that hold a site, the others are 0; or null
              V* __restrict__ out,             // [M, width]
              i64 N, i64 M, i64 taps, i64 width, i64 lanes, i64 how, double floor) {
    using Compute = typename ComputeOf<T>::type;
    using Numbers = Elements<T, V>;
    constexpr int COUNT = Numbers::COUNT;
    overlap_launches(x, rows, valid);
    const u32 each = static_cast<u32>(lanes);
    const i64 m = static_cast<i64>(blockIdx.x) * (THREADS / each) + threadIdx.x / each;
    if (m >= M) return;
    const bool is_site = valid == nullptr || valid[m];
    for (i64 v = threadIdx.x % each; v < width; v += each) {
        Compute value[COUNT] = {};
        i64 read = 0;
        for (i64 t0 = 0; is_site && t0 < taps; t0 += AT_ONCE) {
            int row[AT_ONCE];
            Numbers loaded[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) row[i] = t0 + i < taps ? rows[(t0 + i) * M + m] : -1;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (row[i] >= N) row[i] = -1;
                if (row[i] >= 0) loaded[i].vector = x[row[i] * width + v];
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (row[i] < 0) continue;
#pragma unroll
                for (int e = 0; e < COUNT; ++e) {
                    const Compute next = to_compute<Compute>(loaded[i].element[e]);
                    if (!LARGEST) value[e] = add(value[e], next);
                    else value[e] = read > 0 ? largest_of(value[e], next) : next;
                }
                ++read;
            }
        }
        const i64 number = how == ONE ? 1 : how == VOLUME ? taps : read;
        Numbers result;
#pragma unroll
        for (int e = 0; e < COUNT; ++e) {
            if (LARGEST) {
                if (read == 0) value[e] = how ? static_cast<Compute>(floor) : Compute(0);
                if (how && is_site) value[e] = largest_of(value[e], static_cast<Compute>(floor));
            } else if (number > 1) {
                value[e] /= static_cast<Compute>(number);
            }
            result.element[e] = from_compute<T>(is_site ? value[e] : Compute(0));
        }
        out[m * width + v] = result.vector;
    }
}

// FIRST: of equal ones the first tap has the gradient, else each.
template <typename T, typename V, bool FIRST>
__global__ void __launch_bounds__(THREADS)
    pool_max_grad(const V* __restrict__ grad_y,   // [M, width]
                  const V* __restrict__ x,        // [N, width]
                  const V* __restrict__ y,        // [M, width]
                  const int* __restrict__ rows,   // [taps, M]
                  const int* __restrict__ back,   // [taps, N]: the rows that read each row of x
                  V* __restrict__ dx,             // [N, width]
                  i64 N, i64 M, i64 taps, i64 width, i64 lanes) {
    using Compute = typename ComputeOf<T>::type;
    using Numbers = Elements<T, V>;
    constexpr int COUNT = Numbers::COUNT;
    overlap_launches(grad_y, x, y, rows, back);
    const u32 each = static_cast<u32>(lanes);
    const i64 n = static_cast<i64>(blockIdx.x) * (THREADS / each) + threadIdx.x / each;
    if (n >= N) return;
    for (i64 v = threadIdx.x % each; v < width; v += each) {
        const Numbers own(x[n * width + v]);
        Compute total[COUNT] = {};
        for (i64 t = 0; t < taps; ++t) {
            const int m = back[t * N + n];
            if (m < 0 || m >= M) continue;
            const Numbers largest(y[m * width + v]);
            u32 mine = 0;  // a bit for each number that this row gave the window
#pragma unroll
            for (int e = 0; e < COUNT; ++e) {
                if (is_same(to_compute<Compute>(own.element[e]), to_compute<Compute>(largest.element[e]))) mine |= 1u << e;
            }
            for (i64 before = 0; FIRST && mine && before < t; ++before) {
                const int row = rows[before * M + m];
                if (row < 0 || row >= N) continue;
                const Numbers other(x[row * width + v]);
#pragma unroll
                for (int e = 0; e < COUNT; ++e) {
                    if (is_same(to_compute<Compute>(other.element[e]), to_compute<Compute>(largest.element[e]))) mine &= ~(1u << e);
                }
            }
            if (!mine) continue;
            const Numbers grad(grad_y[m * width + v]);
#pragma unroll
            for (int e = 0; e < COUNT; ++e) {
                if (mine >> e & 1) total[e] = add(total[e], to_compute<Compute>(grad.element[e]));
            }
        }
        Numbers result;
#pragma unroll
        for (int e = 0; e < COUNT; ++e) result.element[e] = from_compute<T>(total[e]);
        dx[n * width + v] = result.vector;
    }
}
