// The threads of this process that wait for an operation without a deadline of that wait's own.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace farandole {

/// While one lives, its thread waits. Made once a wait has taken a while: it takes a lock.
class BlockedThread {
 public:
  BlockedThread();
  ~BlockedThread();
  BlockedThread(const BlockedThread&) = delete;
  BlockedThread& operator=(const BlockedThread&) = delete;

  /// (pthread_self(), which wait it is) of each.
  static std::vector<std::pair<uint64_t, uint64_t>> all();

 private:
  uint64_t wait_;
};

}  // namespace farandole
