#include "devices/replay_watch.h"

#include <utility>

#include "control/absence.h"
#include "engine/fork.h"

namespace farandole {
namespace {

constexpr auto kUntilLeaversAreMissed = std::chrono::seconds(1);

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
  if (!in_child() && !titles_.empty()) see(exchange_->graph_state(), now());
}

uint32_t ReplayWatch::add(std::string title) {
  engine_.keep_driving();
  titles_.push_back(std::move(title));
  return static_cast<uint32_t>(titles_.size() - 1);
}

bool ReplayWatch::idle() const {
  if (titles_.empty()) return true;
  const CudaGraphState state = exchange_->graph_state();
  return state.begun == state.ended;
}

void ReplayWatch::look_around(TimePoint when) {
  if (titles_.empty()) return;
  const CudaGraphState state = exchange_->graph_state();
  see(state, when);
  if (!membership_.detector->failed()) {
    std::optional<Error> wrong = difference(state);
    if (!wrong && !watch_.idle()) wrong = somebody_left(when);
    if (wrong) {
      membership_.detector->report(*wrong);
      engine_.wake_everyone();
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
  if (state.overlaps == 0) return std::nullopt;
  where.operation = title_of(state.at);
  return Error(ErrorCode::invalid_argument,
               "two CUDA graphs with collectives of one group ran at the same time on rank " +
                   std::to_string(engine_.host().rank) + ": " + title_of(state.at) +
                   " began while another one had not ended",
               where, "launch them in one stream, or capture each with a group of its own (split)");
}

/// A rank that has left had waited for its own replays: it comes to no other one.
std::optional<Error> ReplayWatch::somebody_left(TimePoint when) const {
  if (when - seen_at_ < kUntilLeaversAreMissed) return std::nullopt;
  for (const int member : membership_.members) {
    if (member == engine_.host().rank || !has_left(around_, member)) continue;
    Context where;
    where.operation = replay_of(exchange_->graph_state().at);
    if (auto absence = absence_of(around_, member, where)) return absence;
  }
  return std::nullopt;
}

/// What is being replayed, for the watch to wait for.
void ReplayWatch::see(const CudaGraphState& state, TimePoint when) {
  if (state.begun == state.ended || state.begun == seen_) return;
  seen_ = state.begun;
  seen_at_ = when;
  watch_.add(
      {.number = seen_,
       .title = replay_of(state.at),
       .deadline = timeout_ > Duration::zero() ? Deadline{when + timeout_} : Deadline::never(),
       .timeout = {},
       .moments = nullptr,
       .kept = nullptr});
}

std::string ReplayWatch::replay_of(uint32_t number) const {
  return "a replay of " + title_of(number);
}

const std::string& ReplayWatch::title_of(uint32_t number) const {
  static const std::string unknown = "a collective";
  return number < titles_.size() ? titles_[number] : unknown;
}

}  // namespace farandole
