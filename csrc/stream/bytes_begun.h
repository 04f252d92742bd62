// Bytes that operations have begun to exchange, to tell programs that reduce gradients by hand from
// those that reduce none.
#pragma once

#include <atomic>
#include <cstdint>

namespace farandole {

/// In this process, in any group: by all operations, and by those of steps of reducers.
inline std::atomic<uint64_t> bytes_begun{0}, bytes_begun_in_steps{0};

/// By all others.
inline uint64_t bytes_begun_by_hand() {
  const uint64_t in_steps = bytes_begun_in_steps.load(std::memory_order_relaxed);
  const uint64_t all = bytes_begun.load(std::memory_order_relaxed);
  return all > in_steps ? all - in_steps : 0;
}

}  // namespace farandole
