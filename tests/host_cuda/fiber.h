// fiber.h: runs a function on its own stack, and switches to it and back.
//
// On x86-64 a switch takes a dozen instructions. Elsewhere, or with HOST_CUDA_UCONTEXT, ucontext is
// used, which makes a system call at each switch. AddressSanitizer is told of each switch; otherwise
// it would report the new stack pointer as a stack overflow.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#include <new>

#ifdef HOST_CUDA_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
inline void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
inline void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
inline void __asan_unpoison_memory_region(const volatile void*, size_t) {}
#endif

#if defined(__x86_64__) && !defined(HOST_CUDA_UCONTEXT)

// Push the callee-saved registers, swap stacks, pop the other side's.
extern "C" void host_cuda_switch(void** saved_stack_pointer, void* next_stack_pointer);
asm(R"(
.text
.type host_cuda_switch, @function
host_cuda_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size host_cuda_switch, . - host_cuda_switch
)");

struct Context {
  void* stack_pointer = nullptr;

  void start(char* stack, size_t bytes, void (*entry)()) {
    // What host_cuda_switch pops: six registers, then `entry`, which finds no caller above it.
    void** top = reinterpret_cast<void**>(stack + bytes);
    top[-1] = nullptr;
    top[-2] = reinterpret_cast<void*>(entry);
    for (int i = 3; i <= 8; ++i) top[-i] = nullptr;
    stack_pointer = top - 8;
  }
  static void change(Context& from, Context& to) {
    host_cuda_switch(&from.stack_pointer, to.stack_pointer);
  }
};

#else

#include <ucontext.h>

struct Context {
  ucontext_t state;

  void start(char* stack, size_t bytes, void (*entry)()) {
    getcontext(&state);
    state.uc_stack.ss_sp = stack;
    state.uc_stack.ss_size = bytes;
    state.uc_link = nullptr;
    makecontext(&state, entry, 0);
  }
  static void change(Context& from, Context& to) { swapcontext(&from.state, &to.state); }
};

#endif

class Fiber {
 public:
  Fiber() {
    // Pages use memory only once touched. The lowest one is protected, so an overflow faults.
    void* memory = mmap(nullptr, guard_bytes + stack_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory, guard_bytes, PROT_NONE);
    stack_ = static_cast<char*>(memory) + guard_bytes;
  }
  ~Fiber() {
    __asan_unpoison_memory_region(stack_, stack_bytes);  // frames of a fiber that never finished
    munmap(stack_ - guard_bytes, guard_bytes + stack_bytes);
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The next resume() calls `entry`, which must call entered() first and finish() last.
  void start(void (*entry)()) { context_.start(stack_, stack_bytes, entry); }

  // Called from outside: runs the fiber until it suspends or finishes.
  void resume() {
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, stack_, stack_bytes);
    Context::change(outside_, context_);
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
  }

  // Called from inside.
  void entered() {
    __sanitizer_finish_switch_fiber(nullptr, &outside_stack_, &outside_stack_bytes_);
  }
  void suspend() {
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, outside_stack_, outside_stack_bytes_);
    Context::change(context_, outside_);
    __sanitizer_finish_switch_fiber(fake_stack, &outside_stack_, &outside_stack_bytes_);
  }
  void finish() {
    __sanitizer_start_switch_fiber(nullptr, outside_stack_, outside_stack_bytes_);
    Context::change(context_, outside_);
  }

 private:
  static constexpr size_t guard_bytes = 4 << 10;
  static constexpr size_t stack_bytes = 256 << 10;

  char* stack_;
  Context context_, outside_;
  const void* outside_stack_ = nullptr;
  size_t outside_stack_bytes_ = 0;
};
