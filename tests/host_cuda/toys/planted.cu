// planted.cu: toy kernels with one bug each, which the tests of the host shim must see found.

#ifdef SBNET_HOST
#define DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(host_cuda::dynamic_shared())
#endif

// ---- for the sanitizers ----

__global__ void write_global(float* x, long long i) { x[i] = 1; }

__global__ void read_global(const float* x, float* y, long long i) { y[0] = x[i]; }

template <int N>
__global__ void shared_index(float* y, long long i) {
  __shared__ float values[N];
  values[i] = 1;
  y[0] = values[i];
}

template <int N>
__global__ void shared_pointer(float* y, long long i) {
  __shared__ float values[N];
  float* volatile hidden = values;  // so that only the address tells
  float* p = hidden;
  p[i] = 1;
  y[0] = p[i];
}

__global__ void dynamic_overflow(float* y, long long i) {
  DYNAMIC_SHARED(float, values);
  values[i] = 1;
  y[0] = values[i];
}

__global__ void local_overflow(float* y, long long i) {
  float values[4] = {};
  float* volatile hidden = values;  // so that only the address tells
  float* p = hidden;
  p[i] = 1;
  __syncthreads();
  y[0] = p[i];
}

__global__ void late_copy(const float* x, float* y, long long i) {
  __shared__ float value;
  host_cuda::copy_later(&value, x + i, sizeof(float), true);
  host_cuda::commit_copies();
  host_cuda::wait_for_copies(0);
  y[0] = value;
}

__global__ void signed_overflow(int* y, long long a) { y[0] = int(a) + int(a); }

__global__ void misaligned(const unsigned char* x, unsigned* y, long long i) {
  y[0] = *reinterpret_cast<const unsigned*>(x + i);
}

// ---- always found ----

__global__ void barrier_in_branch(int* y) {
  if (threadIdx.x % 2) __syncthreads();
  y[threadIdx.x] = 1;
}

__global__ void barrier_in_both_branches(int* y) {
  if (threadIdx.x % 2) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  y[threadIdx.x] = 1;
}

__global__ void barrier_against_shuffle(int* y) {
  int value = threadIdx.x;
  if (threadIdx.x == 5) {
    __syncthreads();
  } else {
    value = __shfl_sync(0xffffffffu, value, 0);
  }
  y[threadIdx.x] = value;
}

__global__ void exited_lane(int* y) {
  if (threadIdx.x == 3) return;
  y[threadIdx.x] = __shfl_xor_sync(0xffffffffu, int(threadIdx.x), 1);
}

__global__ void foreign_mask(int* y) {
  y[threadIdx.x] = __shfl_sync(0x0000ffffu, int(threadIdx.x), 0);
}

__global__ void outside_mask(int* y) {
  if (threadIdx.x < 16) y[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, int(threadIdx.x), 16);
}

__global__ void mixed_operations(int* y) {
  if (threadIdx.x < 16) {
    y[threadIdx.x] = __any_sync(0xffffffffu, 1);
  } else {
    y[threadIdx.x] = __all_sync(0xffffffffu, 1);
  }
}

__global__ void odd_width(int* y) {
  y[threadIdx.x] = __shfl_sync(0xffffffffu, int(threadIdx.x), 0, 12);
}

__global__ void trap(int* y) {
  if (y[threadIdx.x] == 0 && threadIdx.x == 7) __trap();
}

__global__ void endless_poll(int* y) {
  volatile int* flag = y;
  while (*flag == 0) __nanosleep(100);
}

// Right in one order of threads, wrong in the other: a barrier is missing.
__global__ void missing_barrier(int* y) {
  __shared__ int values[64];
  values[threadIdx.x] = threadIdx.x;
  y[threadIdx.x] = values[threadIdx.x ? threadIdx.x - 1 : 0];
}
