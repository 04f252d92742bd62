// Memory that all ranks map, lent to the packs of fused operations: a program's steps need the same
// again.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "transport/segment.h"

namespace farandole {

class BufferPool {
 public:
  explicit BufferPool(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}
  /// Any thread. Goes back with its last owner.
  std::shared_ptr<std::byte> borrow(size_t bytes);

 private:
  std::shared_ptr<Arena> arena_;
  std::mutex mutex_;                                                 // guards kept_
  std::vector<std::pair<size_t, std::shared_ptr<std::byte>>> kept_;  // bytes; lent while shared
};

}  // namespace farandole
