// Threads that see calls through to their end: a courier drives the engine until the call is over,
// as whoever waits does, and completes XLA's future.
//
// Who completes a future may go on with the program that waited for it, for as long as that has
// work. A courier that is away on such an errand holds nobody up: with no other at home, one more
// is hired.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace farandole {

class CompletionExecutor {
 public:
  using Errand = std::function<void()>;

  /// Those of this process; they end with it.
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
