// The thread that polls the engine, and how other threads wait.
//
// The thread that holds the token drives; it is taken with try-lock. A waiter takes it when it is
// free and drives until its operation is complete, so a small synchronous collective never changes
// thread. The progress thread drives only while no thread waits: at once with a core to spare, else
// only when no thread has taken a turn for 5 ms.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "base/clock.h"
#include "engine/handle.h"

namespace farandole {

enum class ProgressMode { automatic, thread, caller };

/// The threads that may poll, where something under the engine allows few: then there is no
/// progress thread, and operations go on only while a thread of the program waits.
struct FewThreads {
  std::optional<std::thread::id> only;  // none: any one that waits
  std::string why;
};

struct Crowding {
  bool spare = false;    // more cores than ranks on this host
  bool crowded = false;  // fewer
};

class Driver {
 public:
  Driver(Engine& engine, Duration spin, Crowding crowding, ProgressMode mode, bool threads,
         std::optional<FewThreads> few = std::nullopt);
  ~Driver();

  /// Drives until the flag is set; false when `until` passes first. `what`: for a trace. The
  /// thread that sets the flag then calls note_finished().
  bool wait(const std::atomic<bool>& finished, std::string_view what, Deadline until);
  bool wait(const Request& request, Deadline until) {
    const Operation& o = request.operation;
    return wait(request.finished, o.name.empty() ? name_of(o.kind) : std::string_view(o.name),
                until);
  }
  /// A turn in a gradient hook, at most: it ends as soon as nothing moves. With 50 us a bucket of
  /// some MiB took a hook per 50 us of folding, and less was hidden (docs/benchmarking.md,
  /// Overlap).
  static constexpr Duration kTurn = std::chrono::milliseconds(1);
  /// A bounded turn, if nobody else drives.
  void turn(Duration at_most);
  /// Runs `body` as the thread that drives; false, and nothing is done, when another one does.
  template <typename Body>
  bool with_token(Body body) {
    if (!take()) return false;
    const bool done = body();
    release();
    return done;
  }
  /// Called when a thread stops driving or waiting: the progress thread takes the operations in
  /// flight, unless another thread waits.
  void hand_over();
  /// Throws Error(invalid_argument) where this thread may not poll, and so cannot wait.
  void require_waiter() const;
  /// The same where operations do not go on while nobody waits, which `what` needs.
  void require_progress(std::string_view what) const;
  /// More ranks than cores: a rank that spins keeps another from running.
  bool crowded() const { return crowding_.crowded; }
  /// An operation was submitted that nobody waits for yet.
  void note_submission();
  /// Any thread: from now on (+1) an operation is in flight that nobody will ever drive, or it is
  /// no more (-1). While there is one, the progress thread starts at once.
  void count_unattended(int by);
  /// Requests have finished: wakes those who wait for them. By the thread that polls.
  void note_finished();
  /// Ends the progress thread.
  void stop();

 private:
  bool may_poll() const { return !few_ || !few_->only || few_->only == std::this_thread::get_id(); }
  bool take() {
    return may_poll() && !taken_.load(std::memory_order_relaxed) && !taken_.exchange(true);
  }
  void release();
  template <typename Done>
  void drive(Done done, Deadline until, int longer);
  void note_idle(TimePoint since);
  void sleep(const std::atomic<bool>& finished, Deadline until);
  void progress_main();
  bool await_work();
  bool nobody_drives();
  void step_aside();

  Engine& engine_;
  const Duration spin_;
  const Crowding crowding_;
  const bool starts_at_once_;  // the progress thread
  const std::optional<FewThreads> few_;

  std::atomic<bool> taken_{false};
  std::atomic<int> attended_{0};            // threads in wait(), which hand over when they leave
  std::atomic<int> waiters_{0};             // those of them that sleep
  std::atomic<bool> thread_drives_{false};  // the token is the progress thread's
  std::atomic<uint64_t> turns_{0};          // turns taken by anyone, to see that somebody drives
  std::atomic<bool> thread_sleeps_{false};
  std::atomic<bool> thread_holds_back_{false};  // it sees for a while whether somebody else drives
  std::atomic<int> unattended_{0};

  std::mutex mutex_;  // guards nothing but sleeping
  std::condition_variable waiter_wakes_;
  std::condition_variable thread_wakes_;
  std::atomic<bool> stopping_{false};  // set under the mutex; read by the driving thread without
  std::thread thread_;
};

}  // namespace farandole
