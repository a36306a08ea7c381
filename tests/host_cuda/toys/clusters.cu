// clusters.cu: toy kernels whose blocks form a cluster: right ones, then some with one bug each.

#ifdef SBNET_HOST
#define DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(host_cuda::dynamic_shared())
#endif

using u64 = unsigned long long;

inline void sync_cluster() {
  host_cuda::cluster_arrive();
  host_cuda::cluster_wait();
}
inline unsigned rank() { return host_cuda::cluster_rank; }
inline unsigned size() { return host_cuda::cluster_size; }

// y[block][thread] sums up, later ones doubled, the x of this thread and of the first one in every block of
// the cluster, in rounds: by loads, stores and stores that count at a barrier, which must agree. Shared
// memory: u64 at 0, from 16 on float4 [blocks], then float [1 + blocks][threads].
__global__ void exchange(const float* x, float* y, long long rounds) {
  DYNAMIC_SHARED(char, shared);
  u64* bar = reinterpret_cast<u64*>(shared);
  float4* sent = reinterpret_cast<float4*>(shared + 16);
  int threads = blockDim.x, thread = threadIdx.x, i = blockIdx.x * threads + thread;
  float* mine = reinterpret_cast<float*>(sent + size());
  float* stored = mine + threads;
  if (thread == 0) host_cuda::barrier_init(bar, 1);
  __syncthreads();
  host_cuda::cluster_arrive();  // the barrier is there
  float total = 0;
  for (int round = 0; round < rounds; ++round) {
    mine[thread] = x[i] * (round + 1);
    host_cuda::cluster_wait();  // nobody reads what was sent and stored in the last round
    for (unsigned r = 0; r < size(); ++r)
      host_cuda::map_to_block(stored, r)[rank() * threads + thread] = mine[thread];
    if (thread == 0) {
      host_cuda::barrier_expect(bar, 16 * size());
      float4 four = {float(rank()), float(round), x[i], -1};
      for (unsigned r = 0; r < size(); ++r) host_cuda::store_later(sent + rank(), &four, bar, r);
    }
    sync_cluster();
    host_cuda::barrier_wait(bar, round % 2);
    for (unsigned r = 0; r < size(); ++r) {
      float loaded = host_cuda::map_to_block(mine, r)[thread];
      bool right = loaded == stored[r * threads + thread] && sent[r].x == r && sent[r].y == round &&
                   sent[r].w == -1;
      total = total / 2 + (right ? loaded + sent[r].z : NAN);
    }
    sync_cluster();  // others have loaded what is mine
    host_cuda::cluster_arrive();
  }
  host_cuda::cluster_wait();
  y[i] = total;
}

// order[k] = the k-th block that had a turn.
__global__ void turns(int* order, int* counter) {
  if (threadIdx.x == 0) order[atomicAdd(counter, 1)] = blockIdx.x;
  sync_cluster();
}

// Block 1 leaves while block 0 goes through barriers.
__global__ void leaves_early(int* y) {
  sync_cluster();
  if (rank() == 1) return;
  sync_cluster();
  y[threadIdx.x] = 1;
}

// The last one of a cluster: block (1, 0, 0) of two.
__global__ void block_barrier_in_branch(int* y) {
  sync_cluster();
  if (rank() == 1 && threadIdx.x % 2) __syncthreads();
  y[threadIdx.x] = 1;
}

__global__ void arrives_twice(int* y) {
  host_cuda::cluster_arrive();
  if (rank() == 1 && threadIdx.x == 3) host_cuda::cluster_arrive();
  host_cuda::cluster_wait();
}

__global__ void waits_without_having_arrived(int* y) {
  sync_cluster();
  host_cuda::cluster_wait();
}

__global__ void one_never_arrives(int* y) {
  if (rank() == 1) {
    __syncthreads();
    while (*static_cast<volatile int*>(y) == 0) __nanosleep(100);
  }
  sync_cluster();
}

__global__ void reaches_elsewhere(int* y) {
  int own = 0;
  sync_cluster();
  *host_cuda::map_to_block(&own, 1) = 1;
}

__global__ void reaches_too_far(int* y) {
  DYNAMIC_SHARED(int, shared);
  sync_cluster();
  *host_cuda::map_to_block(shared, size()) = 1;
}

__global__ void reaches_too_early(int* y) {
  DYNAMIC_SHARED(int, shared);
  __syncthreads();
  *host_cuda::map_to_block(shared, 1 - rank()) = 1;
  sync_cluster();
}

// Thread 0 of each block sends a vector to the other block, of which SENT bytes are expected.
template <int SENT, bool INITIALISED, bool WAITS>
__device__ void send(int* y) {
  DYNAMIC_SHARED(u64, bar);
  float4* place = reinterpret_cast<float4*>(bar + 2);
  if (INITIALISED && threadIdx.x == 0) {
    host_cuda::barrier_init(bar, 1);
    host_cuda::barrier_expect(bar, SENT);
  }
  sync_cluster();
  float4 four = {1, 2, 3, 4};
  if (threadIdx.x == 0) host_cuda::store_later(place, &four, bar, 1 - rank());
  if (WAITS) host_cuda::barrier_wait(bar, 0);
  y[threadIdx.x] = int(place->y);
  sync_cluster();
}
__global__ void sends_and_waits(int* y) { send<16, true, true>(y); }
__global__ void nobody_waits(int* y) { send<16, true, false>(y); }
__global__ void sends_too_little(int* y) { send<32, true, true>(y); }
__global__ void sends_too_much(int* y) { send<8, true, true>(y); }
__global__ void sends_without_a_barrier(int* y) { send<16, false, true>(y); }

__global__ void sends_to_who_has_exited(int* y) {
  DYNAMIC_SHARED(u64, bar);
  if (threadIdx.x == 0) host_cuda::barrier_init(bar, 1);
  sync_cluster();
  if (rank() == 1) return;
  for (int i = 0; i < 3; ++i) __nanosleep(100);
  float4 four = {1, 2, 3, 4};
  host_cuda::store_later(reinterpret_cast<float4*>(bar + 2), &four, bar, 1);
}

__global__ void reads_what_it_did_not_wait_for(int* y) {
  DYNAMIC_SHARED(u64, bar);
  int* place = reinterpret_cast<int*>(bar + 2);
  if (threadIdx.x == 0) {
    host_cuda::barrier_init(bar, 1);
    host_cuda::barrier_expect(bar, 16);
  }
  sync_cluster();
  int4 four = {5, 6, 7, 8};
  if (threadIdx.x == 0) host_cuda::store_later(place, &four, bar, 1 - rank());
  sync_cluster();
  int early = *place;
  __syncthreads();
  host_cuda::barrier_wait(bar, 0);
  y[64 * blockIdx.x + threadIdx.x] = early * 100 + *place;
  sync_cluster();
}

__global__ void has_static_memory(int* y) {
  __shared__ int value;
  value = 1;
  __syncthreads();
  y[threadIdx.x] = value;
}
