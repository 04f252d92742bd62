#include "base/blocked_threads.h"

#include <pthread.h>

#include <mutex>

namespace farandole {
namespace {

struct Table {
  std::mutex mutex;  // guards the rest
  std::vector<std::pair<uint64_t, uint64_t>> waits;
  uint64_t next = 1;
};
Table& table() {
  static auto* const all = new Table;  // threads may outlive static objects
  return *all;
}

}  // namespace

BlockedThread::BlockedThread() {
  const std::lock_guard lock(table().mutex);
  wait_ = table().next++;
  table().waits.emplace_back(static_cast<uint64_t>(::pthread_self()), wait_);
}

BlockedThread::~BlockedThread() {
  const std::lock_guard lock(table().mutex);
  std::erase_if(table().waits, [&](const auto& w) { return w.second == wait_; });
}

std::vector<std::pair<uint64_t, uint64_t>> BlockedThread::all() {
  const std::lock_guard lock(table().mutex);
  return table().waits;
}

}  // namespace farandole
