// runtime.cpp: runs a grid on one CPU thread. Blocks one after another, x fastest; in a block every
// CUDA thread is a fiber. Compiled once, without sanitizers, and linked by every kernel library.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>

#include "threads.h"

namespace host_cuda {

uint3 thread_index, block_index;
dim3 block_dim, grid_dim;
unsigned thread_rank;
PendingCopies* copies;
PendingProducts* products;
PendingCopies bulk_copies;

namespace {

constexpr int pause_limit = 10000;

const Launch* launch;
void (*thread_body)(void*);
void* thread_context;
void* shared_memory;
std::string error;

struct {
  unsigned waiting, votes, result;
  const Thread* first;  // of those that wait
} barrier;

// Give up the turn until the scheduler finds the thread ready again.
void wait_as(State state) {
  current->state = state;
  current->fiber.suspend();
}

// If every thread that must arrive is at the barrier, release them all.
bool release_barrier() {
  unsigned excused = launch->strict ? 0 : count_in(State::exited);
  if (barrier.waiting == 0 || barrier.waiting + excused < thread_count) return false;
  for (unsigned i = 0; i < thread_count; ++i)
    if (threads[i].state == State::at_barrier) threads[i].state = State::ready;
  barrier = {0, 0, barrier.votes, nullptr};
  return true;
}

// If every lane in the thread's mask has arrived, run the meeting and release them.
bool release_warp(Thread& thread) {
  unsigned excused = launch->strict ? 0 : lanes_in(thread, State::exited) | ~lanes_of_warp(thread);
  unsigned group = thread.mask & ~excused;
  for (unsigned lane = 0; lane < warp_size; ++lane) {
    if (!(group >> lane & 1)) continue;
    const Thread& other = lane_thread(thread, lane);
    if (other.state != State::in_warp_operation || other.mask != thread.mask) return false;
    if (!same_text(other.operation, thread.operation) || other.meeting != thread.meeting)
      fail("%s (%s) meets %s of %s (%s): lanes of one mask must call the same operation",
           thread.operation, at(thread.site).c_str(), other.operation, name(other).c_str(),
           at(other.site).c_str());
  }
  void* lanes[warp_size] = {};
  for (unsigned lane = 0; lane < warp_size; ++lane)
    if (group >> lane & 1) lanes[lane] = lane_thread(thread, lane).mine;
  if (thread.meeting) thread.meeting(lanes);
  for (unsigned lane = 0; lane < warp_size; ++lane) {
    if (!(group >> lane & 1)) continue;
    Thread& other = lane_thread(thread, lane);
    other.state = State::ready;
    other.came = group;
  }
  return true;
}

// Hardware does not wait for exited threads: a barrier or meeting may now be complete.
void release_after_exit(const Thread& thread) {
  release_barrier();
  for (unsigned lane = 0; lane < warp_size; ++lane)
    if (lanes_in(thread, State::in_warp_operation) >> lane & 1)
      release_warp(lane_thread(thread, lane));
}

void thread_main() {
  current->fiber.entered();
  thread_body(thread_context);
  if (!current->products.products.empty()) fail("ends before %zu of its products", current->products.products.size());
  current->state = State::exited;
  if (!launch->strict) release_after_exit(*current);
  current->fiber.finish();
}

void run_block() {
  barrier = {};
  bulk_copies = {};
  for (unsigned i = 0; i < thread_count; ++i) {
    threads[i].state = State::ready;
    threads[i].copies = {};
    threads[i].products = {};
    threads[i].fiber.start(thread_main);
  }
  for (int idle_passes = 0; count_in(State::exited) < thread_count;) {
    bool progress = false, paused = false;
    for (unsigned i = 0; i < thread_count; ++i) {
      current = &threads[launch->reversed ? thread_count - 1 - i : i];
      if (current->state != State::ready && current->state != State::paused) continue;
      current->state = State::running;
      thread_index = current->index;
      thread_rank = current->rank;
      copies = &current->copies;
      products = &current->products;
      current->fiber.resume();
      if (!error.empty()) return;
      (current->state == State::paused ? paused : progress) = true;
    }
    idle_passes = progress ? 0 : idle_passes + 1;
    if (!progress && (!paused || idle_passes > pause_limit)) {
      error = describe_deadlock();
      return;
    }
  }
  if (!bulk_copies.copies.empty())
    error = format("block (%u, %u, %u) ended before %zu of its bulk copies were complete",
                   block_index.x, block_index.y, block_index.z, bulk_copies.copies.size());
}

void prepare_threads() {
  block_dim = dim3(launch->block[0], launch->block[1], launch->block[2]);
  grid_dim = dim3(launch->grid[0], launch->grid[1], launch->grid[2]);
  thread_count = block_dim.x * block_dim.y * block_dim.z;
  while (threads.size() < thread_count) threads.emplace_back();
  for (unsigned i = 0; i < thread_count; ++i) {
    unsigned row = i / block_dim.x;
    threads[i].index = {i % block_dim.x, row % block_dim.y, row / block_dim.y};
    threads[i].rank = i;
  }
}

// No block may rely on what an earlier block, or the loader, left in shared memory.
void prepare_shared() {
  size_t bytes = launch->dynamic_shared_bytes;
  if (posix_memalign(&shared_memory, 128, bytes)) abort();
  memset(shared_memory, poison, bytes);
  for (size_t i = 0; i < launch->shared_variable_count; ++i)
    memset(launch->shared_variables[i].address, poison, launch->shared_variables[i].bytes);
}

}  // namespace

void fail(const char* pattern, ...) {
  va_list values;
  va_start(values, pattern);
  std::string what = format_list(pattern, values);
  va_end(values);
  error = format("block (%u, %u, %u), ", block_index.x, block_index.y, block_index.z) +
          name(*current) + " " + what;
  current->fiber.suspend();
  abort();  // never resumed
}

unsigned block_barrier(bool predicate, const char* operation, Site site) {
  current->operation = operation;
  current->site = site;
  current->mask = 0;
  if (!barrier.first) barrier.first = current;
  if (launch->strict && !same_place(*barrier.first, *current))
    fail("is in %s (%s) while %s waits in %s (%s): a divergent barrier", operation,
         at(site).c_str(), name(*barrier.first).c_str(), barrier.first->operation,
         at(barrier.first->site).c_str());
  ++barrier.waiting;
  barrier.votes += predicate;
  if (!release_barrier()) wait_as(State::at_barrier);
  current->state = State::running;
  return barrier.result;
}

void pause_thread() {
  current->operation = "a pause";
  wait_as(State::paused);
}

void* dynamic_shared() { return shared_memory; }

unsigned warp_collective(unsigned mask, const char* operation, Site site, void* mine,
                         Meeting meeting) {
  current->operation = operation;
  current->site = site;
  current->mask = mask;
  current->mine = mine;
  current->meeting = meeting;
  unsigned gone = mask & (lanes_in(*current, State::exited) | ~lanes_of_warp(*current));
  if (!(mask >> lane() & 1))
    fail("calls %s (%s) with mask 0x%08x, which leaves out its own lane %u", operation,
         at(site).c_str(), mask, lane());
  if (launch->strict && gone)
    fail("calls %s (%s) with mask 0x%08x, of which lanes 0x%08x have exited or never were",
         operation, at(site).c_str(), mask, gone);
  current->state = State::in_warp_operation;
  if (!release_warp(*current)) wait_as(State::in_warp_operation);
  current->state = State::running;
  return current->came;
}

const char* run_grid(const Launch& requested, void (*body)(void*), void* context) {
  launch = &requested;
  thread_body = body;
  thread_context = context;
  error.clear();
  prepare_threads();
  for (unsigned z = 0; z < grid_dim.z && error.empty(); ++z)
    for (unsigned y = 0; y < grid_dim.y && error.empty(); ++y)
      for (unsigned x = 0; x < grid_dim.x && error.empty(); ++x) {
        block_index = {x, y, z};
        prepare_shared();
        run_block();
        free(shared_memory);
      }
  if (error.empty()) return nullptr;
  threads.clear();  // stacks of threads that never finished
  return error.c_str();
}

}  // namespace host_cuda
