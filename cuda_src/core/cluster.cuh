// cluster.cuh: thread blocks that share one tile, through each other's shared memory.
// COUNT blocks in a row of the grid are a cluster; compute capability 9.0, elsewhere they trap. With COUNT == 1
// everything is as in a plain launch, on any GPU and on the host. On the host the blocks of a cluster run together, if
// the launch says so, and their shared memory is dynamic (tests/host_cuda/cluster.h). Else they run one after the
// other: what is stored to all of them reaches those of higher rank, if it lies in shared memory of a __device__
// function, which is the same for all.
#pragma once
#include "core/async_copy.cuh"

template <int COUNT>
struct Cluster {
    static DEVICE int rank() { return COUNT == 1 ? 0 : blockIdx.x % COUNT; }

#ifdef SBNET_HOST
    // Whether the blocks of the cluster run together.
    static bool together() {
        const int launched = host_cuda::cluster_size;
        if (launched > 1 && launched != COUNT)
            host_cuda::fail("runs code of a cluster of %d in a launch in clusters of %d", COUNT, launched);
        return launched > 1;
    }
#endif

    // Every thread of every block of the cluster has come, and sees what was stored before.
    static DEVICE void sync() {
#ifdef SBNET_HOST
        if (together())
            host_cuda::cluster_arrive(), host_cuda::cluster_wait();
        else
            __syncthreads();
#else
        if constexpr (COUNT == 1) __syncthreads();
        if constexpr (COUNT > 1) {
#if DEVICE_ARCHITECTURE >= 900
            asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
            __trap();
#endif
        }
#endif
    }

    // sync() in two halves: the first says that this thread has loaded, and stored, what it will.
    static DEVICE void leave() {
#ifdef SBNET_HOST
        if (together()) host_cuda::cluster_arrive();
#elif DEVICE_ARCHITECTURE >= 900
        if constexpr (COUNT > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
    }

    // The same, of which the first only says that this block is there.
    static DEVICE void arrive() {
#ifdef SBNET_HOST
        if (together()) host_cuda::cluster_arrive();
#elif DEVICE_ARCHITECTURE >= 900
        if constexpr (COUNT > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
    }
    static DEVICE void wait() {
#ifdef SBNET_HOST
        if (together()) host_cuda::cluster_wait();
#elif DEVICE_ARCHITECTURE >= 900
        if constexpr (COUNT > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
    }

    // Store to the same place of the shared memory of one block of the cluster. The bytes count towards the phase of its
    // barrier, at the same place as `bar` here: who waits for it, by wait_for_all, sees them.
    static DEVICE void send(float4* shared, float4 value, u64* bar, int rank) {
#ifdef SBNET_HOST
        if (!together()) __trap();
        host_cuda::store_later(shared, &value, bar, rank);
#elif DEVICE_ARCHITECTURE >= 900
        if constexpr (COUNT > 1) {
            u32 there, its_bar;  // found once for all sends to a block, and so not volatile
            asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(shared)), "r"(rank));
            asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(its_bar) : "r"(shared_address(bar)), "r"(rank));
            asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                         ::"r"(there), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(its_bar) : "memory");
        }
#else
        __trap();
#endif
    }
    static DEVICE void wait_for_all(u64* bar, u32 phase) {
#ifdef SBNET_HOST
        if (!together()) __trap();
        host_cuda::barrier_wait(bar, phase);
#elif DEVICE_ARCHITECTURE >= 900
        u32 done;
        do {
            asm volatile("{\n.reg .pred p;\n"
                         "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                         "selp.u32 %0, 1, 0, p;\n}"
                         : "=r"(done) : "r"(shared_address(bar)), "r"(phase) : "memory");
        } while (!done);
#else
        __trap();
#endif
    }

    // Load a number of 4 or 8 bytes from the same place of the shared memory of one block of the cluster.
    template <typename V>
    static DEVICE V load_number(const V* shared, int rank) {
#ifdef SBNET_HOST
        if (together()) return *host_cuda::map_to_block(shared, rank);
#elif DEVICE_ARCHITECTURE >= 900
        if constexpr (COUNT > 1) {
            u32 there;
            asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(shared)), "r"(rank));
            if constexpr (sizeof(V) == 8) {
                u64 bits;
                asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(bits) : "r"(there) : "memory");
                return __longlong_as_double(static_cast<long long>(bits));
            } else {
                u32 bits;
                asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(bits) : "r"(there) : "memory");
                return __uint_as_float(bits);
            }
        }
#endif
        return *shared;
    }

    // Store to the same place of the shared memory of every block of the cluster.
    template <typename V>
    static DEVICE void store(V* shared, V value) {
#ifdef SBNET_HOST
        if (together())
            for (int rank = 0; rank < COUNT; ++rank) *host_cuda::map_to_block(shared, rank) = value;
        else
            *shared = value;
#else
        if constexpr (COUNT == 1) *shared = value;
#if DEVICE_ARCHITECTURE >= 900
        if constexpr (COUNT > 1) {
            const u32 here = static_cast<u32>(__cvta_generic_to_shared(shared));
#pragma unroll
            for (int rank = 0; rank < COUNT; ++rank) {
                u32 there;
                asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
                if constexpr (sizeof(V) == 8)
                    asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};" ::"r"(there), "r"(value.x), "r"(value.y)
                                 : "memory");
                else
                    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(there), "r"(value) : "memory");
            }
        }
#endif
#endif
    }
};
