// threads.h: the threads of the running block, what each waits for, and how to say so.
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

enum class State { ready, running, paused, at_barrier, in_warp_operation, exited };

struct Thread {
  Fiber fiber;
  uint3 index;
  unsigned rank;
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
};

std::deque<Thread> threads;  // of the running block; kept for later launches
unsigned thread_count;
Thread* current;

// ---- which threads ----

Thread& lane_thread(const Thread& thread, unsigned lane) {
  return threads[thread.rank / warp_size * warp_size + lane];
}

// The lanes of the thread's warp that are in `state`.
unsigned lanes_in(const Thread& thread, State state) {
  unsigned lanes = 0;
  unsigned first = thread.rank / warp_size * warp_size;
  for (unsigned i = first; i < first + warp_size && i < thread_count; ++i)
    lanes |= unsigned(threads[i].state == state) << (i - first);
  return lanes;
}

unsigned lanes_of_warp(const Thread& thread) {
  unsigned present = thread_count - thread.rank / warp_size * warp_size;
  return present >= warp_size ? full_warp : (1u << present) - 1;
}

unsigned count_in(State state) {
  unsigned count = 0;
  for (unsigned i = 0; i < thread_count; ++i) count += threads[i].state == state;
  return count;
}

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

bool same_text(const char* a, const char* b) { return a == b || !strcmp(a, b); }

bool same_place(const Thread& a, const Thread& b) {
  return a.site.line == b.site.line && same_text(a.site.file, b.site.file);
}

// No thread can go on. Say which wait where: one line for each place and mask.
std::string describe_deadlock() {
  std::string text = format("deadlock in block (%u, %u, %u) of %u threads", block_index.x,
                            block_index.y, block_index.z, thread_count);
  if (unsigned exited = count_in(State::exited)) text += format("; %u have exited", exited);
  std::deque<const Thread*> groups;
  for (unsigned i = 0; i < thread_count; ++i) {
    const Thread& thread = threads[i];
    bool waits = thread.state == State::at_barrier || thread.state == State::in_warp_operation;
    bool known = false;
    for (const Thread* other : groups)
      known |= same_place(*other, thread) && other->mask == thread.mask;
    if (waits && !known) groups.push_back(&thread);
  }
  for (const Thread* first : groups) {
    unsigned waiting = 0;
    for (unsigned i = 0; i < thread_count; ++i)
      waiting += threads[i].state == first->state && same_place(threads[i], *first) &&
                 threads[i].mask == first->mask;
    text += format("\n  %u wait in %s (%s), the first is %s", waiting, first->operation,
                   at(first->site).c_str(), name(*first).c_str());
    if (first->state == State::in_warp_operation)
      text += format("; mask 0x%08x, of which lanes 0x%08x have exited", first->mask,
                     first->mask & lanes_in(*first, State::exited));
  }
  if (unsigned paused = count_in(State::paused)) text += format("\n  %u poll memory", paused);
  return text;
}

}  // namespace
}  // namespace host_cuda
