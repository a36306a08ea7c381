// threads.h: the threads of the running blocks, what each waits for, and how to say so.
// Part of runtime.cpp, which alone includes it.
#pragma once

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <deque>
#include <string>

#include "fiber.h"
#include "runtime.h"

namespace host_cuda {
namespace {

enum class State { ready, running, paused, at_barrier, at_cluster_barrier, in_warp_operation, exited };

struct Thread;

struct Block {
  uint3 index;
  unsigned rank, first_thread;  // in its cluster; in `threads`
  unsigned exited;              // threads
  char* shared;  // dynamic shared memory
  PendingCopies bulk_copies;
  struct {
    unsigned waiting, votes, result;
    const Thread* first;  // of those that wait
  } barrier;
};

struct Thread {
  Fiber fiber;
  Block* block;
  uint3 index;
  unsigned rank;  // in its block
  State state;
  // While it waits:
  const char* operation;
  Site site;
  unsigned mask;
  void* mine;
  Meeting meeting;
  unsigned came;  // the lanes it met
  PendingCopies copies;
  PendingProducts products;
  bool arrived;         // at the cluster's barrier, and has not waited since
  unsigned arrived_in;  // which phase of it
};

std::deque<Block> blocks;    // those that run: one, or a cluster
std::deque<Thread> threads;  // of these blocks, one after another; kept for later launches
unsigned thread_count;       // of a block
Thread* current;

// ---- which threads ----

unsigned threads_of_all() { return thread_count * unsigned(blocks.size()); }

Thread& lane_thread(const Thread& thread, unsigned lane) {
  return threads[thread.block->first_thread + thread.rank / warp_size * warp_size + lane];
}

unsigned lanes_of_warp(const Thread& thread) {
  unsigned present = thread_count - thread.rank / warp_size * warp_size;
  return present >= warp_size ? full_warp : (1u << present) - 1;
}

// The lanes of the thread's warp that are in `state`.
unsigned lanes_in(const Thread& thread, State state) {
  unsigned lanes = 0;
  for (unsigned lane = 0; lane < warp_size; ++lane)
    if (lanes_of_warp(thread) >> lane & 1)
      lanes |= unsigned(lane_thread(thread, lane).state == state) << lane;
  return lanes;
}

unsigned count_in(const Block& block, State state) {
  unsigned count = 0;
  for (unsigned i = 0; i < thread_count; ++i)
    count += threads[block.first_thread + i].state == state;
  return count;
}

bool has_exited(const Block& block) { return block.exited == thread_count; }

// ---- messages ----

std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));
std::string format_list(const char* pattern, va_list values) {
  char text[1024];
  vsnprintf(text, sizeof text, pattern, values);
  return text;
}
std::string format(const char* pattern, ...) {
  va_list values;
  va_start(values, pattern);
  std::string text = format_list(pattern, values);
  va_end(values);
  return text;
}

std::string at(Site site) {
  const char* slash = strrchr(site.file, '/');
  return format("%s:%d", slash ? slash + 1 : site.file, site.line);
}

std::string name(const Thread& thread) {
  return format("thread (%u, %u, %u)", thread.index.x, thread.index.y, thread.index.z);
}

std::string name(const Block& block) {
  return format("block (%u, %u, %u)", block.index.x, block.index.y, block.index.z);
}

bool same_text(const char* a, const char* b) { return a == b || !strcmp(a, b); }

bool same_place(const Thread& a, const Thread& b) {
  return a.site.line == b.site.line && same_text(a.site.file, b.site.file);
}

// No thread of a block can go on. Say which wait where: one line for each place and mask.
std::string describe_waiting(const Block& block) {
  std::string text = format("deadlock in %s of %u threads", name(block).c_str(), thread_count);
  if (block.exited) text += format("; %u have exited", block.exited);
  auto begin = threads.begin() + block.first_thread, end = begin + thread_count;
  std::deque<const Thread*> groups;
  for (auto thread = begin; thread != end; ++thread) {
    bool waits = thread->state == State::at_barrier || thread->state == State::at_cluster_barrier ||
                 thread->state == State::in_warp_operation;
    bool known = false;
    for (const Thread* other : groups)
      known |= same_place(*other, *thread) && other->mask == thread->mask;
    if (waits && !known) groups.push_back(&*thread);
  }
  for (const Thread* first : groups) {
    unsigned waiting = 0;
    for (auto thread = begin; thread != end; ++thread)
      waiting += thread->state == first->state && same_place(*thread, *first) &&
                 thread->mask == first->mask;
    text += format("\n  %u wait in %s (%s), the first is %s", waiting, first->operation,
                   at(first->site).c_str(), name(*first).c_str());
    if (first->state == State::in_warp_operation)
      text += format("; mask 0x%08x, of which lanes 0x%08x have exited", first->mask,
                     first->mask & lanes_in(*first, State::exited));
  }
  if (unsigned paused = count_in(block, State::paused))
    text += format("\n  %u poll memory", paused);
  return text;
}

// The same of all that run.
std::string describe_deadlock() {
  std::string text;
  for (const Block& block : blocks)
    text += (text.empty() ? "" : "\n") + (has_exited(block) ? name(block) + " has exited"
                                                            : describe_waiting(block));
  return text;
}

}  // namespace
}  // namespace host_cuda
