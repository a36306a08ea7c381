// sums.cu: toy kernels, each right, for the tests of the host shim.

#ifdef SBNET_HOST
#define DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(host_cuda::dynamic_shared())
#endif

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

// sums[b] = sum of block b's part of x[n]: shuffles in each warp, then shared memory.
template <class T, int THREADS>
__global__ void __launch_bounds__(THREADS)
    block_sum(const T* __restrict__ x, T* __restrict__ sums, long long n) {
  __shared__ T partial[THREADS / 32];
  long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
  T value = warp_sum(i < n ? x[i] : T(0));
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  value = warp_sum(threadIdx.x < THREADS / 32 ? partial[threadIdx.x] : T(0));
  if (threadIdx.x == 0) sums[blockIdx.x] = value;
}

// y[i] = scale * x[n - 1 - i] for one block, through dynamic shared memory.
template <bool ADD>
__global__ void reverse(const double* x, double* y, long long n, double scale) {
  DYNAMIC_SHARED(double, staged);
  int i = threadIdx.x;
  if (i < n) staged[i] = x[i];
  __syncthreads();
  if (i >= n) return;
  double value = scale * staged[n - 1 - i];
  y[i] = ADD ? y[i] + value : value;
}

// order[k] = linear index of the k-th block that ran; ids[...] = who each thread is.
__global__ void who(int* order, int* ids, int* counter) {
  int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  if (thread == 0) order[atomicAdd(counter, 1)] = block;
  int threads = blockDim.x * blockDim.y * blockDim.z;
  ids[block * threads + thread] = int(threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z);
}

// What shared memory holds before anyone writes it.
template <int N>
__global__ void unset(unsigned char* bytes) {
  __shared__ unsigned char fixed[N];
  DYNAMIC_SHARED(unsigned char, dynamic);
  for (int i = 0; i < N; ++i) {
    bytes[(2 * blockIdx.x + 0) * N + i] = fixed[i];
    bytes[(2 * blockIdx.x + 1) * N + i] = dynamic[i];
    fixed[i] = dynamic[i] = 7;
  }
}
