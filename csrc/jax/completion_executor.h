// Threads that see calls through to their end: a courier drives the engine until the call is over,
// as any waiting thread does, and completes XLA's future.
//
// To complete a future may run the program that waited for it, on the same thread, for as long as
// that has work. No call waits for a courier that is away on such an errand: with no other at home,
// one more is hired.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace farandole {

class CompletionExecutor {
 public:
  using Errand = std::function<void()>;

  /// The threads of this process; they end with it.
  static CompletionExecutor& all();
  /// Any thread; waits for nobody.
  void send(Errand errand);

 private:
  void hire();
  void serve();

  std::mutex mutex_;  // guards everything below
  std::condition_variable wanted_;
  std::deque<Errand> errands_;
  size_t at_home_ = 0;
  size_t hired_ = 0;
};

}  // namespace farandole
