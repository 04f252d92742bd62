#include "jax/completion_executor.h"

#include <pthread.h>
#include <signal.h>

#include <thread>

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
  // Signals are for the program's own threads.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([this] { serve(); }).detach();
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  ++hired_;
}

void CompletionExecutor::serve() {
  ::pthread_setname_np(::pthread_self(), "farandole-jax");
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
