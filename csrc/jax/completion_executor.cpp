#include "jax/completion_executor.h"

#include <thread>

#include "base/quiet_thread.h"

namespace farandole {
namespace {

// More calls are never in flight: errands beyond wait for a courier to come home.
constexpr size_t kMostHired = 64;

}  // namespace

CompletionExecutor& CompletionExecutor::all() {
  static auto* const executor = new CompletionExecutor;  // its threads may outlive static objects
  return *executor;
}

void CompletionExecutor::send(Errand errand) {
  const std::lock_guard lock(mutex_);
  errands_.push_back(std::move(errand));
  if (errands_.size() > at_home_ && hired_ < kMostHired) hire();
  wanted_.notify_one();
}

void CompletionExecutor::hire() {
  start_quiet_thread("farandole-jax", [this] { serve(); }).detach();
  ++hired_;
}

void CompletionExecutor::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    ++at_home_;
    wanted_.wait(lock, [this] { return !errands_.empty(); });
    --at_home_;
    const Errand errand = std::move(errands_.front());
    errands_.pop_front();
    lock.unlock();
    errand();
    lock.lock();
  }
}

}  // namespace farandole
