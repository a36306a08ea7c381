// pending_copies.h: copies that have begun but not landed. Part of runtime.h.
#pragma once

#include <stddef.h>
#include <string.h>

#include <utility>
#include <vector>

namespace host_cuda {

constexpr int poison = 0xff;  // NaN as a float of any width, -1 as an integer

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

struct Copy {
  char* to;
  const char* from;  // null: zeros
  size_t bytes;
  unsigned group;       // of cp.async: number of groups committed before
  const void* barrier;  // of bulk copies and stores
  std::vector<char> value;
  bool sent = false;  // by a store, of another block or this one

  void land() const {
    if (from && memcmp(from, value.data(), bytes))
      fail("copies global memory that was written before the copy was complete");
    memcpy(to, value.data(), bytes);
  }
};

struct PendingCopies {
  std::vector<Copy> copies;
  unsigned groups = 0;  // committed

  void begin(void* to, const void* from, size_t bytes, const void* barrier = nullptr) {
    std::vector<char> value(bytes);
    if (from) memcpy(value.data(), from, bytes);
    memset(to, poison, bytes);
    copies.push_back({static_cast<char*>(to), static_cast<const char*>(from), bytes, groups,
                      barrier, std::move(value)});
  }

  // A store, which another block may send.
  void send(void* to, const void* value, size_t bytes, const void* barrier) {
    auto first = static_cast<const char*>(value);
    memset(to, poison, bytes);
    copies.push_back({static_cast<char*>(to), nullptr, bytes, groups, barrier,
                      {first, first + bytes}, true});
  }

  template <class Chosen>
  void land_if(Chosen chosen) {
    size_t kept = 0;
    for (size_t i = 0; i < copies.size(); ++i) {
      if (chosen(copies[i]))
        copies[i].land();
      else if (kept++ != i)
        copies[kept - 1] = std::move(copies[i]);
    }
    copies.erase(copies.begin() + kept, copies.end());
  }
};

}  // namespace host_cuda
