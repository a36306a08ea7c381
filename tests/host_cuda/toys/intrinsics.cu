// intrinsics.cu: toy kernels that call CUDA's functions, for the tests of the host shim.

// out[operation][lane]; `mask` names the lanes that call, the others keep -1.
template <int WIDTH>
__global__ void shuffles(int* out, long long mask, long long argument) {
  unsigned lane = threadIdx.x;
  if (!(mask >> lane & 1)) return;
  unsigned m = (unsigned)mask;
  int value = 100 + lane;
  out[0 * 32 + lane] = __shfl_sync(m, value, (int)argument, WIDTH);
  out[1 * 32 + lane] = __shfl_up_sync(m, value, (unsigned)argument, WIDTH);
  out[2 * 32 + lane] = __shfl_down_sync(m, value, (unsigned)argument, WIDTH);
  out[3 * 32 + lane] = __shfl_xor_sync(m, value, (int)argument, WIDTH);
}

template <class T>
__global__ void shuffle_type(const T* x, T* y) {
  y[threadIdx.x] = __shfl_xor_sync(0xffffffffu, x[threadIdx.x], 1);
  __syncwarp();
}

__global__ void votes(const int* predicates, int* out) {
  int p = predicates[threadIdx.x];
  int* mine = out + 6 * threadIdx.x;
  mine[0] = int(__ballot_sync(0xffffffffu, p));
  mine[1] = __any_sync(0xffffffffu, p);
  mine[2] = __all_sync(0xffffffffu, p);
  mine[3] = __syncthreads_count(p);
  mine[4] = __syncthreads_or(p);
  mine[5] = __syncthreads_and(p);
}

// Two halves of a warp work apart, each with its own mask and its own number of steps.
__global__ void halves(int* out) {
  bool low = threadIdx.x < 16;
  unsigned mask = low ? 0x0000ffffu : 0xffff0000u;
  int value = threadIdx.x;
  for (int i = 0; i < (low ? 3 : 7); ++i) value += __shfl_xor_sync(mask, value, 1);
  __syncwarp();
  out[threadIdx.x] = value;
}

__global__ void bits(unsigned* out, long long a, long long b) {
  unsigned x = (unsigned)a, y = (unsigned)b;
  int k = 0;
  out[k++] = __popc(x);
  out[k++] = __ffs(int(x));
  out[k++] = __clz(int(x));
  out[k++] = __brev(x);
  out[k++] = __funnelshift_r(x, y, 36);
  out[k++] = __funnelshift_l(x, y, 36);
  out[k++] = __byte_perm(x, y, 0x7041);
  out[k++] = __umulhi(x, y);
  out[k++] = __float_as_uint(__uint_as_float(x));
  out[k++] = __clz(0) + __clzll(1) + __popcll(-1LL) + __ffsll(0);
  out[k++] = min(3, 4u) + max(-1, 2) + unsigned(max(0.5f, NAN) * 2);
}

__global__ void atomics(int* i, unsigned* u, unsigned long long* l, float* f) {
  atomicAdd(i, 1);
  atomicMax(i + 1, int(threadIdx.x));
  atomicMin(i + 2, -int(threadIdx.x));
  atomicCAS(i + 3, int(threadIdx.x), int(threadIdx.x) + 1);
  atomicOr(u, 1u << threadIdx.x % 32);
  atomicExch(u + 1, threadIdx.x);
  atomicSub(u + 2, 1);
  atomicAdd(l, 1ull << 40);
  atomicAdd(f, 0.5f);
}

struct alignas(8) Fragment {
  unsigned char row;
  float value;
};

// The primitive that warp-wide instructions are emulated with: every lane sees every lane's value.
__global__ void exchange(float* out) {
  Fragment mine = {(unsigned char)(31 - threadIdx.x), float(threadIdx.x) / 2};
  auto all = host_cuda::warp_exchange(host_cuda::full_warp, mine, "exchange");
  float sum = 0;
  for (unsigned lane = 0; lane < 32; ++lane) sum += all.from(lane).row * all.from(lane).value;
  out[threadIdx.x] = sum;
}

template <class T>
__global__ void copy_vectors(const T* x, T* y) {
  static_assert(alignof(T) == sizeof(T), "one access");
  T value = __ldg(x + threadIdx.x);
  __stcs(y + threadIdx.x, value);
}
