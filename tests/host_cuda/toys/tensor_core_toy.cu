// tensor_core_toy.cu: toy kernels, one for each wrapper of cuda_src/core/async_copy.cuh, tensor_core.cuh and
// wgmma.cuh, which run on the host and on GPUs; and ways to go wrong with them, which the host must see.
#include "core/wgmma.cuh"

constexpr u32 EVERY_LANE = 0xffffffffu;

// ---- copies ----

// y = x, but zeros from thread `inside` on: a thread copies BYTES, and stores its neighbour's.
template <int BYTES>
__global__ void copies(const u8* x, u8* y, i64 inside) {
    using Vector = typename Bytes<BYTES>::type;
    DYNAMIC_SHARED(Vector, staged);
    const int i = threadIdx.x, other = i ^ 33;
    const u8* from = i < inside ? x + i * BYTES : nullptr;
    if constexpr (BYTES == 16) copy_async_16(staged + i, from, i < inside);
    if constexpr (BYTES == 8) copy_async_8(staged + i, from, i < inside);
    if constexpr (BYTES == 4) copy_async_4(staged + i, from, i < inside);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    reinterpret_cast<Vector*>(y)[other] = staged[other];
}

// y = x, `stages` groups of one vector a thread; WAIT = 1 leaves the latest group under way.
template <int WAIT, bool COMMIT, bool BARRIER>
__global__ void groups(const uint4* x, uint4* y, i64 stages) {
    DYNAMIC_SHARED(uint4, staged);
    const int i = threadIdx.x, n = blockDim.x, other = n - 1 - i;
    for (int s = 0; s < stages; ++s) {
        copy_async_16(staged + s * n + i, x + s * n + i, true);
        if (COMMIT || s + 1 < stages) copy_async_commit();
    }
    if (WAIT >= 0) copy_async_wait<(WAIT < 0 ? 0 : WAIT)>();
    if (BARRIER) __syncthreads();
    for (int s = 0; s < stages; ++s) y[s * n + other] = staged[s * n + other];
}

// Two stages take turns. y[i] = sum of x[step][i], by the thread opposite to the one that copied.
template <bool SECOND_BARRIER>
__global__ void ring(const u32* x, u32* y, i64 steps) {
    DYNAMIC_SHARED(u32, staged);
    const int i = threadIdx.x, n = blockDim.x, other = n - 1 - i;
    u32 sum = 0;
    copy_async_4(staged + i, x + i, true);
    copy_async_commit();
    for (int s = 0; s < steps; ++s) {
        if (s + 1 < steps) copy_async_4(staged + (s + 1) % 2 * n + i, x + (s + 1) * n + i, true);
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        sum += staged[s % 2 * n + other];
        if (SECOND_BARRIER) __syncthreads();
    }
    y[other] = sum;
}

// The source changes while it is being copied.
template <int = 0>
__global__ void changed_source(uint4* x) {
    __shared__ uint4 staged;
    copy_async_16(&staged, x, true);
    x->x += 1;
    copy_async_commit();
    copy_async_wait<0>();
}

template <int = 0>
__global__ void unaligned(const u8* x, i64 shared_offset, i64 global_offset) {
    DYNAMIC_SHARED(u8, staged);
    copy_async_8(staged + shared_offset, x + global_offset, true);
}

// ---- bulk copies ----

// y = x in two halves, one after the other through the same barrier.
template <int = 0>
__global__ void bulk(const u8* x, u8* y, i64 half) {
    DYNAMIC_SHARED(u8, staged);
    __shared__ u64 bar;
    const u32 bytes = static_cast<u32>(half);
    if constexpr (HAS_BULK_COPY) {
        if (threadIdx.x == 0) {
            barrier_init(&bar, 1);
            barrier_init_fence();
        }
        __syncthreads();
    }
    for (u32 phase = 0; phase < 2; ++phase) {
        const u32 begin = phase * bytes;
        if constexpr (HAS_BULK_COPY) {
            if (threadIdx.x == 0) {
                barrier_expect(&bar, bytes);
                bulk_copy(staged + begin, x + begin, bytes / 2, &bar);
                bulk_copy(staged + begin + bytes / 2, x + begin + bytes / 2, bytes / 2, &bar);
            }
            barrier_wait(&bar, phase);
        } else {
            for (u32 i = threadIdx.x; i < bytes; i += blockDim.x) staged[begin + i] = x[begin + i];
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < bytes; i += blockDim.x) y[begin + i] = staged[begin + bytes - 1 - i];
    }
}

// `expected` bytes announced by `arrivals` arrivals, `sent` on their way, `parity` waited for.
template <bool INIT, bool WAIT>
__global__ void bulk_wrong(const u8* x, u8* y, i64 expected, i64 arrivals, i64 sent, i64 offset, i64 parity) {
    DYNAMIC_SHARED(u8, staged);
    __shared__ u64 bar;
    if (threadIdx.x == 0) {
        if (INIT) barrier_init(&bar, 1);
        barrier_init_fence();
        for (i64 i = 0; i < arrivals; ++i) barrier_expect(&bar, static_cast<u32>(expected));
        if (sent) bulk_copy(staged, x + offset, static_cast<u32>(sent), &bar);
    }
    __syncthreads();
    if (WAIT) barrier_wait(&bar, static_cast<u32>(parity));
    y[threadIdx.x] = staged[threadIdx.x];
}

// ---- fragments and products, of one warp ----

// registers[lane][m] = what ldmatrix brings of x[32][8]; lane l passes row l * 5 % 32.
template <int COUNT, bool TRANSPOSED>
__global__ void matrices(const u16* x, u32* registers) {
    __shared__ __align__(16) u16 rows[32 * 8];
    for (int i = threadIdx.x; i < 32 * 8; i += 32) rows[i] = x[i];
    __syncthreads();
    u32 r[COUNT];
    const u16* row = rows + threadIdx.x * 5 % 32 * 8;
    if constexpr (COUNT == 4 && TRANSPOSED) ldmatrix_x4_trans(r, row);
    if constexpr (COUNT == 4 && !TRANSPOSED) ldmatrix_x4(r, row);
    if constexpr (COUNT == 2 && TRANSPOSED) ldmatrix_x2_trans(r, row);
    if constexpr (COUNT == 2 && !TRANSPOSED) ldmatrix_x2(r, row);
    for (int m = 0; m < COUNT; ++m) registers[threadIdx.x * COUNT + m] = r[m];
}

DEVICE int place_in_d(int i) { return (threadIdx.x / 4 + i / 2 * 8) * 8 + threadIdx.x % 4 * 2 + i % 2; }

// d[16][8] += a * b. a is [16][16] (TRANSPOSED: [k][row]), b is [8][16], [column][k] (TRANSPOSED: [k][column]).
template <class T, bool TRANSPOSED, bool SHUFFLES>
__global__ void product(const T* a, const T* b, float* d) {
    __shared__ __align__(16) T of_a[16 * 16], of_b[8 * 16];
    const int lane = threadIdx.x;
    copy_async_16(of_a + lane * 8, a + lane * 8, true);
    if (lane < 16) copy_async_16(of_b + lane * 8, b + lane * 8, true);
    copy_async_commit();
    dependent_wait();
    copy_async_wait<0>();
    __syncwarp();
    u32 fa[4], fb[2];
    float sum[4];
    for (int i = 0; i < 4; ++i) sum[i] = d[place_in_d(i)];
    if constexpr (TRANSPOSED) {  // quarters: rows 0, rows 8, then the same with k + 8
        ldmatrix_x4_trans(fa, of_a + (lane / 16 * 8 + lane % 8) * 16 + lane / 8 % 2 * 8);
        ldmatrix_x2_trans(fb, of_b + lane % 16 * 8);
    } else {
        ldmatrix_x4(fa, of_a + lane % 16 * 16 + lane / 16 * 8);
        ldmatrix_x2(fb, of_b + lane % 8 * 16 + lane / 8 % 2 * 8);
    }
    if constexpr (SHUFFLES)
        mma_by_shuffles<Packed<T>>(sum, fa, fb[0], fb[1]);
    else
        mma_16816<T>(sum, fa, fb[0], fb[1]);
    dependent_launch();
    for (int i = 0; i < 4; ++i) d[place_in_d(i)] = sum[i];
}

// d[16][8] += a[16][8] * b[8][8], both rounded to tf32.
template <bool SHUFFLES>
__global__ void product_tf32(const float* a, const float* b, float* d) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    u32 fa[4];
    float sum[4];
    for (int i = 0; i < 4; ++i) {
        fa[i] = to_tf32(a[(g + i % 2 * 8) * 8 + t + i / 2 * 4]);
        sum[i] = d[place_in_d(i)];
    }
    const u32 b0 = to_tf32(b[t * 8 + g]), b1 = to_tf32(b[(t + 4) * 8 + g]);
    if constexpr (SHUFFLES)
        mma_by_shuffles<TF32>(sum, fa, b0, b1);
    else
        mma_1688_tf32(sum, fa, b0, b1);
    for (int i = 0; i < 4; ++i) d[place_in_d(i)] = sum[i];
}

template <int = 0>
__global__ void rounded(const float* x, u32* y, i64 n) {
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) y[i] = to_tf32(x[i]);
}

template <int = 0>
__global__ void addresses(u32* y) {
    __shared__ u64 values[64];
    y[threadIdx.x] = shared_address(values + threadIdx.x) - shared_address(values);
}

template <int = 0>
__global__ void unaligned_row(const u16* x) {
    u32 r[2];
    ldmatrix_x2(r, x + threadIdx.x);
}

// Not all lanes take part. HOW: 0 half of them have left, 1 half are at a shuffle, 2 at another mma.
template <int HOW>
__global__ void lanes_apart(float* y) {
    float d[4] = {};
    const u32 a[4] = {};
    if (threadIdx.x % 32 < 16) {
        mma_16816<Half>(d, a, 0, 0);
    } else {
        if constexpr (HOW == 0) return;
        if constexpr (HOW == 1) d[0] = __shfl_sync(EVERY_LANE, d[0], 0);
        if constexpr (HOW == 2) mma_16816<BFloat16>(d, a, 0, 0);
    }
    y[threadIdx.x] = d[0];
}

// d[64][N] = a[64][32 bytes] * b[N][32 bytes], transposed; a from registers or, as b, from shared memory, in rows of 128 bytes
// in their swizzle or in core matrices. WRONG: 1 sums are read before they are there, 2 b is written before it was
// read, 3 lane 5 has another descriptor, 4 nobody waits.
template <typename T, int N, bool REGISTERS, bool SWIZZLED, int WRONG>
__global__ void four_warps(const T* a, const T* b, float* d) {
    constexpr int K = 32 / sizeof(T), PER = 16 / sizeof(T);
    DYNAMIC_SHARED(u8, unaligned);
    u8* const shared = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    u8* const columns = shared + 64 * 128;
    const auto place = [&](int row, int k) {
        const int byte = k * static_cast<int>(sizeof(T));
        if (SWIZZLED) return row * 128 + (byte ^ (row % 8 << 4));
        return row / 8 * 256 + byte / 16 * 128 + row % 8 * 16 + byte % 16;
    };
    for (int i = threadIdx.x; i < 64 * K; i += 128) *reinterpret_cast<T*>(shared + place(i / K, i % K)) = a[i];
    for (int i = threadIdx.x; i < N * K; i += 128) *reinterpret_cast<T*>(columns + place(i / K, i % K)) = b[i];
    shared_fence();
    __syncthreads();

    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    u64 left = SWIZZLED ? swizzled_descriptor(shared_address(shared)) : matrix_descriptor(shared_address(shared), 128, 256);
    u64 right = SWIZZLED ? swizzled_descriptor(shared_address(columns)) : matrix_descriptor(shared_address(columns), 128, 256);
    if (WRONG == 3 && lane == 5) right += 8;
    float sums[N / 2] = {};
    u32 rows[4];
    for (int i = 0; i < 4; ++i) {
        const int its_row = row + i % 2 * 8, k = i / 2 * PER + lane % 4 * (4 / static_cast<int>(sizeof(T)));
        rows[i] = *reinterpret_cast<const u32*>(shared + place(its_row, k));
    }
    wgmma_fence();
    if constexpr (REGISTERS)
        Wgmma<T, N>::registers(sums, rows, right);
    else
        Wgmma<T, N>::shared(sums, left, right);
    wgmma_commit();
    if (WRONG == 2) *reinterpret_cast<T*>(columns + place(threadIdx.x % N, 0)) = T{};
    if (WRONG != 1 && WRONG != 4) wgmma_wait();
    for (int n = 0; n < N; n += 8)
        for (int e = 0; e < 4; ++e) d[(row + e / 2 * 8) * N + n + lane % 4 * 2 + e % 2] = sums[n / 2 + e];
    if (WRONG == 1) wgmma_wait();
}
