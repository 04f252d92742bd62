#include "transport/buffer_pool.h"

#include <algorithm>
#include <atomic>
#include <bit>

namespace farandole {
namespace {

constexpr size_t kSmallest = 64 << 10;
constexpr size_t kMostKept = 8;

}  // namespace

std::shared_ptr<std::byte> BufferPool::borrow(size_t bytes) {
  const std::lock_guard lock(mutex_);
  for (auto& [have, memory] : kept_) {
    if (memory.use_count() > 1 || have < bytes) continue;
    std::atomic_thread_fence(std::memory_order_acquire);  // partner: the last owner letting go
    return memory;
  }
  const size_t room = std::bit_ceil(std::max(bytes, kSmallest));
  std::shared_ptr<std::byte> memory(arena_->allocate(room),
                                    [arena = arena_](std::byte* p) { arena->release(p); });
  if (kept_.size() == kMostKept)  // too small, all that are not lent
    std::erase_if(kept_, [](const auto& kept) { return kept.second.use_count() == 1; });
  if (kept_.size() < kMostKept) kept_.emplace_back(room, memory);
  return memory;
}

}  // namespace farandole
