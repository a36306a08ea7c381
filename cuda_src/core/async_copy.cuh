// async_copy.cuh: copies from global to shared memory, past the registers, while the thread goes on.
//   Copies     copy_async_16/8/4, commit, wait: each thread its own
//   Bulk       bulk_copy and its barrier: one thread, any number of bytes (compute capability 9.0)
//   Launches   dependent_wait, dependent_launch: overlap with the kernel before and after
// Source: cp.async, mbarrier, cp.async.bulk and griddepcontrol of NVIDIA's PTX ISA. Compute capability
// 7.5 copies at once. On the host a copy lands as late as it may (tests/host_cuda/async_copy.h).
#pragma once

#include "core/common.cuh"

#ifdef __CUDA_ARCH__
#define DEVICE_ARCHITECTURE __CUDA_ARCH__  // 100 * major + 10 * minor
#else
#define DEVICE_ARCHITECTURE 0
#endif
#ifdef SBNET_HOST
constexpr bool HAS_BULK_COPY = true;
#else
constexpr bool HAS_BULK_COPY = DEVICE_ARCHITECTURE >= 900;
#endif

// The address in the window of shared memory, as PTX takes it. On the host: its low 32 bits.
DEVICE u32 shared_address(const void* pointer) {
#ifdef SBNET_HOST
    return static_cast<u32>(reinterpret_cast<u64>(pointer));
#else
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
#endif
}

// A place in shared memory, as instructions take it: that of a pointer, which is converted where it is used, by some ten
// instructions; or found once, before it is needed: the same place in all lanes of the warp, or each lane's own.
struct SharedPlace {
#ifdef SBNET_HOST
    u8* at;
    SharedPlace(void* pointer) : at(static_cast<u8*>(pointer)) {}
    static SharedPlace found(void* pointer) { return pointer; }
    static SharedPlace found_by_each(void* pointer) { return pointer; }
    u64* barrier() const { return reinterpret_cast<u64*>(at); }
#else
    u32 at;
    DEVICE SharedPlace(void* pointer) : at(shared_address(pointer)) {}
    static DEVICE SharedPlace found(void* pointer) {
        SharedPlace place(pointer);
        place.at = __shfl_sync(0xffffffffu, place.at, 0);
        return place;
    }
    static DEVICE SharedPlace found_by_each(void* pointer) {
        SharedPlace place(pointer);
        asm volatile("" : "+r"(place.at));
        return place;
    }
#endif
    DEVICE SharedPlace operator+(int bytes) const {
        SharedPlace place(*this);
        place.at += bytes;
        return place;
    }
};

// ---------------------------------------------------------------------------- copies

// Begin to copy BYTES (4, 8 or 16, aligned to as many) into shared memory, or zeros if not inside;
// then nothing is read. Seen by this thread after copy_async_wait, by others after a barrier too.
template <int BYTES>
DEVICE void copy_async(void* shared, const void* global, bool inside) {
#ifdef SBNET_HOST
    host_cuda::copy_later(shared, global, BYTES, inside);
#elif DEVICE_ARCHITECTURE >= 800
    const u32 to = shared_address(shared), read = inside ? BYTES : 0;
    if constexpr (BYTES == 16)  // past the L1 cache too
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(read));
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;"
                     ::"r"(to), "l"(global), "r"(read), "n"(BYTES));
#else
    using Vector = typename Bytes<BYTES>::type;
    *static_cast<Vector*>(shared) = inside ? *static_cast<const Vector*>(global) : zero<Vector>();
#endif
}
DEVICE void copy_async_16(void* shared, const void* global, bool inside) {
    copy_async<16>(shared, global, inside);
}
// 16 bytes, or zeros where `offset` is negative: the test is one instruction. CACHED: through the L1 cache, for vectors
// that a thread block copies several times.
template <bool CACHED>
DEVICE void copy_async_16_unless_negative(SharedPlace shared, const void* global, int offset) {
#if !defined(SBNET_HOST) && DEVICE_ARCHITECTURE >= 800
    if constexpr (CACHED)
        asm volatile("{\n.reg .pred p;\nsetp.lt.s32 p, %2, 0;\ncp.async.ca.shared.global [%0], [%1], 16, p;\n}"
                     ::"r"(shared.at), "l"(global), "r"(offset));
    else
        asm volatile("{\n.reg .pred p;\nsetp.lt.s32 p, %2, 0;\ncp.async.cg.shared.global [%0], [%1], 16, p;\n}"
                     ::"r"(shared.at), "l"(global), "r"(offset));
#elif defined(SBNET_HOST)
    copy_async<16>(shared.at, global, offset >= 0);
#else
    copy_async<16>(__cvta_shared_to_generic(shared.at), global, offset >= 0);
#endif
}
DEVICE void copy_async_8(void* shared, const void* global, bool inside) {
    copy_async<8>(shared, global, inside);
}
DEVICE void copy_async_4(void* shared, const void* global, bool inside) {
    copy_async<4>(shared, global, inside);
}

// Bring the 128 bytes at an address into the L2 cache.
DEVICE void prefetch(const void* global) {
#if !defined(SBNET_HOST) && DEVICE_ARCHITECTURE >= 800
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
#endif
}

// Close the group of this thread's copies since the last commit; it may be empty.
DEVICE void copy_async_commit() {
#ifdef SBNET_HOST
    host_cuda::commit_copies();
#elif DEVICE_ARCHITECTURE >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until at most the N latest groups of this thread are under way.
template <int N>
DEVICE void copy_async_wait() {
#ifdef SBNET_HOST
    host_cuda::wait_for_copies(N);
#elif DEVICE_ARCHITECTURE >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// Have the line of memory at this address brought to the L2 cache.
DEVICE void prefetch_line(const void* global) {
#if !defined(SBNET_HOST) && DEVICE_ARCHITECTURE >= 800
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
#endif
}

// The same for a range of bytes, a multiple of 16 from a multiple of 16 on; compute capability 9.0.
DEVICE void prefetch_bulk(const void* global, u32 bytes) {
#if !defined(SBNET_HOST) && DEVICE_ARCHITECTURE >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
#endif
}

// ---------------------------------------------------------------------------- bulk copies

// Where HAS_BULK_COPY; elsewhere they trap. The barrier is 8 bytes of shared memory. One thread:
//   barrier_init(bar, 1); barrier_init_fence();                             then __syncthreads
//   barrier_expect(bar, bytes); bulk_copy(...) once or more, `bytes` in all
// and whoever reads the bytes:  barrier_wait(bar, phase)     phase 0, then 1, 0, 1, ...

// `count` calls of barrier_expect, and the bytes they announce, complete a phase.
DEVICE void barrier_init(u64* bar, u32 count) {
#ifdef SBNET_HOST
    host_cuda::barrier_init(bar, count);
#elif DEVICE_ARCHITECTURE >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count) : "memory");
#else
    __trap();
#endif
}

// Show the initialised barrier, and what this thread wrote to shared memory, to the copy engine.
DEVICE void barrier_init_fence() {
#ifdef SBNET_HOST
#elif DEVICE_ARCHITECTURE >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
    __trap();
#endif
}

// What was written to shared memory, and is seen by this thread, becomes visible to the copy engine and to wgmma.
DEVICE void shared_fence() {
#if DEVICE_ARCHITECTURE >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Arrive at the barrier and announce bytes that bulk copies will bring in this phase.
DEVICE void barrier_expect(SharedPlace bar, u32 bytes) {
#ifdef SBNET_HOST
    host_cuda::barrier_expect(bar.barrier(), bytes);
#elif DEVICE_ARCHITECTURE >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar.at), "r"(bytes) : "memory");
#else
    __trap();
#endif
}

// Arrive at the barrier; what this thread wrote before is seen by those who wait.
DEVICE void barrier_arrive(SharedPlace bar) {
#ifdef SBNET_HOST
    host_cuda::barrier_expect(bar.barrier(), 0);
#elif DEVICE_ARCHITECTURE >= 900
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar.at) : "memory");
#else
    __trap();
#endif
}

// Arrive at the barrier once all copies of this thread so far (copy_async_*) have landed; do not wait for that.
DEVICE void copies_arrive(SharedPlace bar) {
#ifdef SBNET_HOST
    host_cuda::commit_copies();
    host_cuda::wait_for_copies(0);
    host_cuda::barrier_expect(bar.barrier(), 0);
#elif DEVICE_ARCHITECTURE >= 900
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar.at) : "memory");
#else
    __trap();
#endif
}

// Whether this lane, of a warp whose lanes are all here, is the one that acts for them. Of a branch on that, unlike one on
// the number of the thread, the compiler knows that a single lane takes it, and keeps addresses in uniform registers.
// In such a branch nobody may wait, nor loop. The compiler lets a lane that waits yield; a lane that yields does not hold
// the others back behind the branch; and what they do there overwrites the uniform registers, which all lanes share. So all
// lanes wait for a barrier, and one of them acts.
DEVICE bool elected() {
#if !defined(SBNET_HOST) && DEVICE_ARCHITECTURE >= 900
    u32 one;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(one));
    return one;
#else
    return threadIdx.x % 32 == 0;
#endif
}

// Where bulk copies go: the thread block's own memory. To that of a cluster they would be calls, with a stack, on compute
// capability 12.0; CUDA before 12.8 has no other name for both.
#if DEVICE_ARCHITECTURE >= 1000
#define BULK_COPIES_TO "shared::cta"
#else
#define BULK_COPIES_TO "shared::cluster"
#endif

// Begin to copy bytes, a multiple of 16, between addresses that are multiples of 16.
DEVICE void bulk_copy(SharedPlace shared, const void* global, u32 bytes, SharedPlace bar) {
#ifdef SBNET_HOST
    host_cuda::bulk_copy(shared.at, global, bytes, bar.barrier());
#elif DEVICE_ARCHITECTURE >= 900
    asm volatile("cp.async.bulk." BULK_COPIES_TO ".global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared.at), "l"(global), "r"(bytes), "r"(bar.at) : "memory");
#else
    __trap();
#endif
}

// Wait until the phase of this parity is complete: 0 for the first, 1 for the second, ...
DEVICE void barrier_wait(SharedPlace bar, u32 phase) {
#ifdef SBNET_HOST
    host_cuda::barrier_wait(bar.barrier(), phase);
#elif DEVICE_ARCHITECTURE >= 900
    u32 done;
    do {
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(bar.at), "r"(phase) : "memory");
    } while (!done);
#else
    __trap();
#endif
}

// ---------------------------------------------------------------------------- launches

// Wait for the kernels before this one on the stream, if it was launched to overlap with them.
DEVICE void dependent_wait() {
#if DEVICE_ARCHITECTURE >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Let the next kernel begin, if it was launched to overlap; it sees our results after its wait.
DEVICE void dependent_launch() {
#if DEVICE_ARCHITECTURE >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// First of all in a kernel that may overlap with its neighbours on the stream: begin when the one
// before has ended, and let the one after be brought in early.
DEVICE void overlap_launches() {
    dependent_wait();
    dependent_launch();
}

// The same for a kernel that, if `settled`, calls dependent_wait itself, and before that reads nothing that kernels ahead
// write which may still run. It lets the one after begin at once, which then may run beside several that are ahead of it.
DEVICE void begin_launch(bool settled) {
    if (!settled) dependent_wait();
    dependent_launch();
}

// The same pointer, in a way that keeps loads through it behind a wait: from memory that a kernel only reads the
// compiler loads as early as it likes.
template <typename T>
DEVICE const T* loaded_later(const T* pointer) {
#ifndef SBNET_HOST
    asm volatile("" : "+l"(pointer)::"memory");
#endif
    return pointer;
}

// The same for a kernel that reads these pointers: none of its loads comes before the wait.
template <typename... T>
DEVICE void dependent_wait(const T* __restrict__&... pointers) {
    dependent_wait();
    ((pointers = loaded_later(pointers)), ...);
}
template <typename... T>
DEVICE void overlap_launches(const T* __restrict__&... pointers) {
    dependent_wait(pointers...);
    dependent_launch();
}
