#include "devices/replay_watch.h"

#include <thread>
#include <utility>

#include "base/log.h"
#include "control/absence.h"
#include "engine/fork.h"

namespace farandole {
namespace {

constexpr auto kUntilAbsenteesAreMissed = std::chrono::seconds(1);  // who had come before it left
constexpr auto kBetweenDrains = std::chrono::milliseconds(20);
constexpr auto kNapAtTheEnd = std::chrono::microseconds(200);

}  // namespace

ReplayWatch::ReplayWatch(Engine& engine, const Membership& membership,
                         std::shared_ptr<DeviceExchange> exchange, Duration timeout)
    : engine_(engine),
      around_(engine.view()),
      membership_(membership),
      exchange_(std::move(exchange)),
      timeout_(timeout),
      watch_(engine, membership, exchange_) {}

ReplayWatch::~ReplayWatch() {
  if (!in_child()) end();
}

void ReplayWatch::end() {
  if (std::exchange(ended_, true) || titles_.empty()) return;
  try {
    wait_at_the_end();
  } catch (const Error&) {  // NOLINT: nothing ends in a context that is lost
  }
  if (const auto wrong = difference(exchange_->captured().state()); wrong && !reported_)
    log(LogLevel::error, wrong->what());
  watch_.end();
  exchange_->give_up_graphs();
}

void ReplayWatch::wait_at_the_end() {
  const TimePoint begin = now();
  while (!idle() && !membership_.detector->failed()) {
    exchange_->look_for_loss();
    const Duration waited = now() - begin;
    if (waited > kUntilAbsenteesAreMissed) report_absentee_at_the_end();
    if (timeout_ > Duration::zero() && waited > timeout_) return;
    std::this_thread::sleep_for(kNapAtTheEnd);
  }
}

/// The engine does not look any more by now.
void ReplayWatch::report_absentee_at_the_end() {
  for (const int member : membership_.members)
    if (member != engine_.host().rank)
      if (const auto absence =
              absence_of(engine_.host(), member, "while a CUDA graph waited for it"))
        return report(*absence);
}

uint32_t ReplayWatch::add(std::string title) {
  engine_.keep_driving();
  titles_.push_back(std::move(title));
  return static_cast<uint32_t>(titles_.size() - 1);
}

bool ReplayWatch::idle() const {
  const CudaGraphState state = exchange_->captured().state();
  return state.begun == state.ended;
}

void ReplayWatch::report(const Error& error) {
  reported_ = true;
  membership_.detector->report(error);
  engine_.wake_everyone();
}

void ReplayWatch::poll() {
  if (titles_.empty()) return;
  watch_.poll();
  if (!reported_ && exchange_->captured().is_wrong())
    report(*difference(exchange_->captured().state()));
}

void ReplayWatch::look_around(TimePoint when) {
  if (titles_.empty()) return;
  see(exchange_->captured().state(), when);
  if (!membership_.detector->failed()) {
    if (!watch_.idle() && when - seen_at_ > kUntilAbsenteesAreMissed)
      if (const auto absent = absentee()) report(*absent);
  } else if (when >= next_drain_) {  // also what begins later, and what was never seen to begin
    next_drain_ = when + kBetweenDrains;
    try {
      exchange_->drain();
    } catch (const Error&) {  // NOLINT: nothing waits in a context that is lost
    }
  }
  watch_.look_around(when);
}

std::optional<Error> ReplayWatch::difference(const CudaGraphState& state) const {
  Context where;
  if (state.differs >= 0) {
    const int other = membership_.members[static_cast<size_t>(state.differs)];
    where.operation = title_of(state.own);
    return Error(ErrorCode::mismatch,
                 "ranks replay collectives of CUDA graphs in different orders: rank " +
                     std::to_string(engine_.host().rank) + " was at " + title_of(state.own) +
                     ", rank " + std::to_string(other) + " at " + title_of(state.theirs),
                 where, "launch the same graphs in the same order on all ranks");
  }
  if (!state.overlaps) return std::nullopt;
  where.operation = title_of(state.at);
  return Error(ErrorCode::invalid_argument,
               "two CUDA graphs with collectives of one group ran at the same time on rank " +
                   std::to_string(engine_.host().rank) + ": " + title_of(state.at) +
                   " began while another one had not ended",
               where, "launch them in one stream, or capture each with a group of its own (split)");
}

/// A rank that has died or left comes to no replay any more.
std::optional<Error> ReplayWatch::absentee() const {
  for (const int member : membership_.members) {
    if (member == engine_.host().rank) continue;
    Context where;
    where.operation = replay_of(exchange_->captured().state().at);
    if (auto absence = absence_of(around_, member, where)) return absence;
  }
  return std::nullopt;
}

/// Hands a replay that has begun to the watch, which waits for it.
void ReplayWatch::see(const CudaGraphState& state, TimePoint when) {
  if (state.begun == state.ended || state.begun == seen_) return;
  seen_ = state.begun;
  seen_at_ = when;
  watch_.add(
      {.number = seen_,
       .title = replay_of(state.at),
       .trace = nullptr,
       .shown = {},
       .deadline = timeout_ > Duration::zero() ? Deadline{when + timeout_} : Deadline::never(),
       .timeout = {},
       .way = std::nullopt,
       .moments = nullptr,
       .kept = nullptr,
       .seen = when});
}

std::string ReplayWatch::replay_of(uint32_t number) const {
  return "a replay of " + title_of(number);
}

const std::string& ReplayWatch::title_of(uint32_t number) const {
  static const std::string unknown = "a collective";
  return number < titles_.size() ? titles_[number] : unknown;
}

}  // namespace farandole
