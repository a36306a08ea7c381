// pending_products.h: products that have begun but not ended, of wgmma. Part of runtime.h.
#pragma once

#include <functional>
#include <utility>
#include <vector>

namespace host_cuda {

// Those of one thread. A product runs as late as possible, when the thread waits for it, and reads
// shared memory then: what is written there too early, or read from its sums, is wrong in the result.
struct PendingProducts {
  struct Product {
    unsigned group;  // number of groups committed before
    std::function<void()> run;
  };
  std::vector<Product> products;
  unsigned groups = 0;  // committed

  void begin(std::function<void()> run) { products.push_back({groups, std::move(run)}); }

  void wait(unsigned under_way) {
    size_t ended = 0;
    while (ended < products.size() && products[ended].group + under_way < groups)
      products[ended++].run();
    products.erase(products.begin(), products.begin() + ended);
  }
};

}  // namespace host_cuda
