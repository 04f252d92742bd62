#include "engine/driver.h"

#include <sched.h>

#include <algorithm>

#include "base/quiet_thread.h"
#include "base/relax.h"
#include "engine/engine.h"

namespace farandole {
namespace {

constexpr auto kBackstop = std::chrono::milliseconds(5);  // without a turn of anyone
constexpr auto kLongestPark = std::chrono::milliseconds(100);
constexpr int kTurnsBetweenClocks = 32;
constexpr int kFirstLooks = 4;  // before a waiter reads the clock
constexpr int kLooksBetweenClocks = 32;
// So often at least a waiter looks before it parks, unless it takes long: where an MPI gives its
// core away in each of its calls, and others want it, a look takes a fraction of a second, and only
// a parked rank watches the others.
constexpr int kFewestLooks = 64;
constexpr Duration kLongestLooks = std::chrono::milliseconds(10);
constexpr Duration kCountedWait = std::chrono::microseconds(2);
// Times as long, where nothing wakes a rank: MPI moves bytes inside of a call, some 100 us at once.
constexpr int kLongerSpin = 20;

/// Twice soon, to notice looks that take long, and then rarely.
bool reads_clock_after(int looks) {
  return looks == kFirstLooks || looks == 2 * kFirstLooks || looks % kLooksBetweenClocks == 0;
}

}  // namespace

Driver::Driver(Engine& engine, Duration spin, Crowding crowding, ProgressMode mode, bool threads,
               std::optional<FewThreads> few)
    : engine_(engine),
      spin_(spin),
      crowding_(crowding),
      starts_at_once_(mode == ProgressMode::thread ||
                      (mode == ProgressMode::automatic && crowding.spare)),
      few_(std::move(few)) {
  if (!threads || few_) return;
  thread_ = start_quiet_thread("farandole", [this] { progress_main(); });
}

Driver::~Driver() { stop(); }

void Driver::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_.store(true);
    thread_wakes_.notify_all();
  }
  engine_.wake();
  if (thread_.joinable()) thread_.join();
}

// ---- the token ----

void Driver::release() {
  engine_.end_idle();   // who drives next waits anew
  taken_.store(false);  // seq_cst; partner: sleep, which publishes itself and then looks again
  if (waiters_.load() > 0) {
    const std::lock_guard lock(mutex_);
    waiter_wakes_.notify_all();
  }
  engine_.run_completions();
}

void Driver::require_waiter() const {
  if (may_poll()) return;
  throw Error(ErrorCode::invalid_argument,
              "this thread cannot wait for operations, only the main thread can: " + few_->why);
}

void Driver::require_progress(std::string_view what) const {
  if (!few_) return;
  throw Error(ErrorCode::invalid_argument,
              std::string(what) +
                  " needs operations to go on while no thread waits for them, and here they do "
                  "not: " +
                  few_->why);
}

void Driver::hand_over() {
  if (engine_.needs_driving() && waiters_.load() == 0) note_submission();
}

bool Driver::wait(const std::atomic<bool>& finished, std::string_view what, Deadline until) {
  require_waiter();
  const TraceSpan waiting(engine_.trace(), TraceKind::wait, what);
  const auto done = [&] { return finished.load(std::memory_order_acquire); };
  bool in_time = true;
  attended_.fetch_add(1);
  while (in_time && !done()) {
    if (take()) {
      drive(done, until, crowding_.crowded || !engine_.has_to_ask() ? 1 : kLongerSpin);
      release();
    } else {
      sleep(finished, until);
    }
    in_time = done() || !until.passed(now());
  }
  attended_.fetch_sub(1);  // seq_cst, then hand_over; partner: step_aside
  hand_over();
  return in_time;
}

void Driver::sleep(const std::atomic<bool>& finished, Deadline until) {
  std::unique_lock lock(mutex_);
  ++waiters_;                                 // seq_cst; partners: release, note_finished
  if (thread_drives_.load()) engine_.wake();  // it hands the token over
  if (!finished.load() && taken_.load()) {
    const Duration most = std::min<Duration>(kLongestPark, until.left(now()));
    waiter_wakes_.wait_for(lock, most);
  }
  --waiters_;
}

void Driver::note_finished() {
  std::atomic_thread_fence(std::memory_order_seq_cst);  // partner: sleep
  if (waiters_.load(std::memory_order_relaxed) == 0) return;
  const std::lock_guard lock(mutex_);
  waiter_wakes_.notify_all();
}

/// A wait counts while somebody waits: a thread of the program's, or a framework's graph. Data that
/// move beside the program's work are no wait of it.
void Driver::note_idle(TimePoint since) {
  if (attended_.load(std::memory_order_relaxed) > 0 ||
      unattended_.load(std::memory_order_relaxed) > 0)
    engine_.note_idle(since);
}

/// Polls until done, or until there are completions to be run: spins while there is a core for
/// every rank, yields when there is not, and parks when nothing has moved for a while; `longer`:
/// the first time since it has.
template <typename Done>
void Driver::drive(Done done, Deadline until, int longer) {
  TimePoint idle_since{};
  bool has_parked = false;
  int looks = 0;
  while (!done() && !engine_.has_completions()) {
    if (engine_.poll(TimePoint::min())) {  // one piece a turn
      looks = 0;
      has_parked = false;
      const uint64_t turns = turns_.fetch_add(1, std::memory_order_relaxed);
      if (turns % kTurnsBetweenClocks == 0 && until.passed(now())) return;  // others may be busy
      continue;
    }
    if (done() || engine_.has_completions()) return;
    if (crowding_.crowded)
      ::sched_yield();
    else
      relax();
    if (!reads_clock_after(++looks)) continue;
    const TimePoint when = now();
    if (until.passed(when)) return;
    if (looks == kFirstLooks) idle_since = when;
    const Duration spin = has_parked ? spin_ : longer * spin_;
    const Duration at_least = looks < kFewestLooks ? std::max(spin, kLongestLooks) : spin;
    const bool parks = when - idle_since >= at_least;
    if (parks || when - idle_since >= kCountedWait) note_idle(idle_since);
    if (!parks) continue;
    engine_.park(std::min<Duration>(kLongestPark, until.left(when)));
    has_parked = true;
    looks = 0;
  }
}

void Driver::turn(Duration at_most) {
  if (!take()) return;
  const TimePoint until = now() + at_most;
  while (engine_.poll(until) && now() < until) {
  }
  turns_.fetch_add(1, std::memory_order_relaxed);
  release();
  if (starts_at_once_) hand_over();
}

// ---- the progress thread ----

void Driver::note_submission() {
  if (!thread_sleeps_.load()) return;  // partner: progress_main publishes it before it looks
  const std::lock_guard lock(mutex_);
  thread_wakes_.notify_one();
}

void Driver::count_unattended(int by) {
  unattended_.fetch_add(by);  // seq_cst; partner: nobody_drives, which publishes itself and looks
  if (by < 0 || !thread_holds_back_.load()) return;
  const std::lock_guard lock(mutex_);
  thread_wakes_.notify_one();
}

/// Sleeps while nothing has to be driven; false at the end.
bool Driver::await_work() {
  std::unique_lock lock(mutex_);
  thread_sleeps_.store(true);
  while (!stopping_.load() && !engine_.needs_driving()) thread_wakes_.wait(lock);
  thread_sleeps_.store(false);
  return !stopping_.load();
}

/// With no core to spare, true once nobody has taken a turn for a while.
bool Driver::nobody_drives() {
  if (starts_at_once_ || unattended_.load(std::memory_order_relaxed) > 0) return true;
  const uint64_t before = turns_.load(std::memory_order_relaxed);
  std::unique_lock lock(mutex_);
  thread_holds_back_.store(true);
  thread_wakes_.wait_for(lock, kBackstop,
                         [&] { return stopping_.load() || unattended_.load() > 0; });
  thread_holds_back_.store(false);
  return unattended_.load() > 0 || turns_.load(std::memory_order_relaxed) == before;
}

/// Leaves the driving to the waiters until one of them hands it over; a turn's end is told nobody.
void Driver::step_aside() {
  std::unique_lock lock(mutex_);
  thread_sleeps_.store(true);  // seq_cst; partner: hand_over, which looks at it last
  if (!stopping_.load() && (waiters_.load() > 0 || taken_.load()))
    thread_wakes_.wait_for(lock, attended_.load() > 0 ? kLongestPark : kBackstop);
  thread_sleeps_.store(false);
}

void Driver::progress_main() {
  while (await_work()) {
    if (!nobody_drives()) continue;
    if (waiters_.load() > 0 || !take()) {
      step_aside();
      continue;
    }
    const auto enough = [&] {
      return waiters_.load() > 0 || !engine_.needs_driving() || stopping_.load();
    };
    do {  // completions are run in between
      thread_drives_.store(true);
      drive(enough, Deadline::never(), 1);
      thread_drives_.store(false);
      release();
    } while (!enough() && take());
  }
}

}  // namespace farandole
