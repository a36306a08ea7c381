// runtime.cpp: runs a grid on one CPU thread. Blocks one after another, x fastest, or so many at a
// time as a cluster has; in a block every CUDA thread is a fiber. Compiled once, without sanitizers,
// and linked by every kernel library.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>

#include "threads.h"

namespace host_cuda {

uint3 thread_index, block_index;
dim3 block_dim, grid_dim;
unsigned thread_rank, cluster_rank, cluster_size;
PendingCopies *copies, *bulk_copies;
PendingProducts* products;

namespace {

constexpr int pause_limit = 10000;

const Launch* launch;
void (*thread_body)(void*);
void* thread_context;
std::string error;

struct {
  unsigned phase, arrived;
} cluster_barrier;

// Give up the turn until the scheduler finds the thread ready again.
void wait_as(State state) {
  current->state = state;
  current->fiber.suspend();
}

// If every thread that must arrive is at the barrier, release them all.
bool release_barrier(Block& block) {
  unsigned excused = launch->strict ? 0 : block.exited;
  auto& barrier = block.barrier;
  if (barrier.waiting == 0 || barrier.waiting + excused < thread_count) return false;
  for (unsigned i = 0; i < thread_count; ++i) {
    Thread& thread = threads[block.first_thread + i];
    if (thread.state == State::at_barrier) thread.state = State::ready;
  }
  barrier = {0, 0, barrier.votes, nullptr};
  return true;
}

bool has_arrived(const Thread& thread) {
  return thread.arrived && thread.arrived_in == cluster_barrier.phase;
}

// If every thread that must has arrived at the cluster's barrier, release those that wait there.
void release_cluster_barrier() {
  unsigned excused = 0, all = threads_of_all();
  if (!launch->strict)
    for (unsigned i = 0; i < all; ++i)
      excused += threads[i].state == State::exited && !has_arrived(threads[i]);
  if (cluster_barrier.arrived == 0 || cluster_barrier.arrived + excused < all) return;
  for (unsigned i = 0; i < all; ++i)
    if (threads[i].state == State::at_cluster_barrier) threads[i].state = State::ready;
  cluster_barrier = {cluster_barrier.phase + 1, 0};
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
  release_barrier(*thread.block);
  release_cluster_barrier();
  for (unsigned lane = 0; lane < warp_size; ++lane)
    if (lanes_in(thread, State::in_warp_operation) >> lane & 1)
      release_warp(lane_thread(thread, lane));
}

void thread_main() {
  current->fiber.entered();
  thread_body(thread_context);
  if (!current->products.products.empty()) fail("ends before %zu of its products", current->products.products.size());
  current->state = State::exited;
  ++current->block->exited;
  if (!launch->strict) release_after_exit(*current);
  current->fiber.finish();
}

void take_turn(Thread& thread) {
  current = &thread;
  thread.state = State::running;
  thread_index = thread.index;
  thread_rank = thread.rank;
  block_index = thread.block->index;
  cluster_rank = thread.block->rank;
  copies = &thread.copies;
  products = &thread.products;
  bulk_copies = &thread.block->bulk_copies;
  thread.fiber.resume();
}

void run_blocks() {
  cluster_barrier = {};
  unsigned all = threads_of_all();
  for (unsigned i = 0; i < all; ++i) {
    threads[i].state = State::ready;
    threads[i].copies = {};
    threads[i].products = {};
    threads[i].arrived = false;
    threads[i].fiber.start(thread_main);
  }
  for (int idle_passes = 0;;) {
    bool progress = false, paused = false, left = false;
    for (unsigned i = 0; i < all; ++i) {
      Thread& thread = threads[launch->reversed ? all - 1 - i : i];
      if (thread.state == State::ready || thread.state == State::paused) {
        take_turn(thread);
        if (!error.empty()) return;
        (thread.state == State::paused ? paused : progress) = true;
      }
      left |= thread.state != State::exited;
    }
    if (!left) break;
    idle_passes = progress ? 0 : idle_passes + 1;
    if (!progress && (!paused || idle_passes > pause_limit)) {
      error = describe_deadlock();
      return;
    }
  }
  for (const Block& block : blocks) {
    size_t sent = 0, pending = block.bulk_copies.copies.size();
    for (const Copy& copy : block.bulk_copies.copies) sent += copy.sent;
    if (sent)
      error = format("%s ended before %zu stores sent to it had landed: nobody waited for them",
                     name(block).c_str(), sent);
    else if (pending)
      error = format("%s ended before %zu of its bulk copies were complete", name(block).c_str(),
                     pending);
    if (!error.empty()) return;
  }
}

void prepare_threads() {
  block_dim = dim3(launch->block[0], launch->block[1], launch->block[2]);
  grid_dim = dim3(launch->grid[0], launch->grid[1], launch->grid[2]);
  cluster_size = launch->cluster;
  thread_count = block_dim.x * block_dim.y * block_dim.z;
  blocks.resize(cluster_size);
  while (threads.size() < threads_of_all()) threads.emplace_back();
  for (unsigned i = 0; i < threads_of_all(); ++i) {
    unsigned rank = i % thread_count, row = rank / block_dim.x;
    threads[i].index = {rank % block_dim.x, row % block_dim.y, row / block_dim.y};
    threads[i].rank = rank;
    threads[i].block = &blocks[i / thread_count];
  }
}

// No block may rely on what an earlier block, or the loader, left in shared memory.
void prepare_blocks(uint3 first) {
  size_t bytes = launch->dynamic_shared_bytes;
  for (unsigned rank = 0; rank < cluster_size; ++rank) {
    void* memory;
    if (posix_memalign(&memory, cluster_size > 1 ? 1024 : 128, bytes)) abort();
    memset(memory, poison, bytes);
    uint3 index = {first.x + rank, first.y, first.z};
    blocks[rank] = {index, rank, rank * thread_count, 0, static_cast<char*>(memory), {}, {}};
  }
  for (size_t i = 0; i < launch->shared_variable_count; ++i)
    memset(launch->shared_variables[i].address, poison, launch->shared_variables[i].bytes);
}

}  // namespace

void fail(const char* pattern, ...) {
  va_list values;
  va_start(values, pattern);
  std::string what = format_list(pattern, values);
  va_end(values);
  error = name(*current->block) + ", " + name(*current) + " " + what;
  current->fiber.suspend();
  abort();  // never resumed
}

unsigned block_barrier(bool predicate, const char* operation, Site site) {
  current->operation = operation;
  current->site = site;
  current->mask = 0;
  auto& barrier = current->block->barrier;
  if (!barrier.first) barrier.first = current;
  if (launch->strict && !same_place(*barrier.first, *current))
    fail("is in %s (%s) while %s waits in %s (%s): a divergent barrier", operation,
         at(site).c_str(), name(*barrier.first).c_str(), barrier.first->operation,
         at(barrier.first->site).c_str());
  ++barrier.waiting;
  barrier.votes += predicate;
  if (!release_barrier(*current->block)) wait_as(State::at_barrier);
  current->state = State::running;
  return barrier.result;
}

void pause_thread() {
  current->operation = "a pause";
  wait_as(State::paused);
}

void* dynamic_shared() { return current->block->shared; }

OtherBlock in_block(const void* shared, unsigned rank) {
  size_t bytes = launch->dynamic_shared_bytes;
  size_t offset = static_cast<const char*>(shared) - current->block->shared;
  if (offset >= bytes)
    fail("passes %p, which is not in its dynamic shared memory, to reach that of another block",
         shared);
  if (rank >= cluster_size) fail("reaches for block %u of a cluster of %u", rank, cluster_size);
  Block& block = blocks[rank];
  if (&block != current->block && cluster_barrier.phase == 0)
    fail("reaches for the shared memory of %s, which may not have begun: no barrier of the cluster "
         "has been passed", name(block).c_str());
  if (has_exited(block))
    fail("reaches for the shared memory of %s, which has exited", name(block).c_str());
  return {block.shared + offset, &block.bulk_copies};
}

void cluster_arrive(Site site) {
  if (current->arrived)
    fail("arrives at the barrier of the cluster (%s) a second time without having waited",
         at(site).c_str());
  current->arrived = true;
  current->arrived_in = cluster_barrier.phase;
  ++cluster_barrier.arrived;
  release_cluster_barrier();
}

void cluster_wait(Site site) {
  if (!current->arrived)
    fail("waits at the barrier of the cluster (%s) without having arrived", at(site).c_str());
  current->operation = "the barrier of the cluster";
  current->site = site;
  current->mask = 0;
  if (has_arrived(*current)) wait_as(State::at_cluster_barrier);
  current->state = State::running;
  current->arrived = false;
}

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
      for (unsigned x = 0; x < grid_dim.x && error.empty(); x += cluster_size) {
        prepare_blocks({x, y, z});
        run_blocks();
        for (Block& block : blocks) free(block.shared);
      }
  if (error.empty()) return nullptr;
  threads.clear();  // stacks of threads that never finished
  return error.c_str();
}

}  // namespace host_cuda
