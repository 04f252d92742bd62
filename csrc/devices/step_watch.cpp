#include "devices/step_watch.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/log.h"
#include "control/absence.h"
#include "devices/staged_copies.h"
#include "engine/fork.h"

namespace farandole {
namespace {

/// How often a device is asked whether it is lost, and flags are written where ranks have failed.
constexpr auto kBetweenStepLooks = std::chrono::milliseconds(20);
constexpr auto kNapBetweenLooks = std::chrono::microseconds(200);

/// Its timeout counts from the first look around.
void see(StepInFlight& step, TimePoint when) {
  if (step.seen != TimePoint{}) return;
  step.seen = when;
  if (step.timeout > Duration::zero())
    step.deadline.at = std::min(step.deadline.at, when + step.timeout);
}

}  // namespace

StepWatch::StepWatch(Engine& engine, Membership membership,
                     std::shared_ptr<DeviceExchange> exchange)
    : engine_(engine),
      around_(engine.view()),
      membership_(std::move(membership)),
      exchange_(std::move(exchange)),
      late_(around_, membership_, exchange_) {}

StepWatch::~StepWatch() {
  if (!in_child()) end();
}

void StepWatch::end() {
  // Nobody is there to flush it with.
  if (exchange_ && membership_.detector->failed()) exchange_->abort_nccl();
  for (poll(); !in_flight_.empty(); poll()) {
    const TimePoint when = now();
    StepInFlight& first = in_flight_.front();
    see(first, when);
    const bool late = first.deadline.passed(when);
    if (late || !first.number || membership_.detector->failed() || somebody_has_died()) {
      if (late)
        log(LogLevel::error, first.title + " was not complete on device " +
                                 std::to_string(exchange_->ordinal()) +
                                 " when its rank ended: its result means nothing");
      break;  // the exchange drains
    }
    try {
      exchange_->look_for_loss();
    } catch (const Error&) {  // NOLINT: nothing waits there any more
      break;
    }
    std::this_thread::sleep_for(kNapBetweenLooks);
  }
  for (; !in_flight_.empty(); in_flight_.pop_front()) {
    exchange_->keep(std::move(in_flight_.front().kept));
    engine_.let_go();
  }
}

void StepWatch::add(StepInFlight step) {
  in_flight_.push_back(std::move(step));
  engine_.hold_on();
}

void StepWatch::launched(uint32_t number) {
  if (!in_flight_.empty()) in_flight_.back().number = number;  // none is of a device that is lost
}

void StepWatch::drop_newest() {
  if (in_flight_.empty() || in_flight_.back().number) return;
  exchange_->keep(std::move(in_flight_.back().kept));
  in_flight_.pop_back();
  engine_.let_go();
}

void StepWatch::poll() {
  if (!in_flight_.empty())
    for (size_t n = drop_complete(); n > 0; --n) engine_.let_go();
}

/// A thread that polls reads a word, so most operations need no bell, which costs driver calls.
void StepWatch::before_park() {
  if (in_flight_.empty()) return;
  StepInFlight& first = in_flight_.front();
  if (first.rings || !first.number || !first.moments) return;
  first.rings = true;
  try {
    exchange_->ring_after(*first.moments);
  } catch (const Error&) {  // NOLINT: a device that is lost is found by the next look around
  }
}

/// How many there were.
size_t StepWatch::drop_complete() {
  size_t dropped = 0;
  for (; !in_flight_.empty(); ++dropped) {
    const std::optional<uint32_t> number = in_flight_.front().number;
    if (!number || !exchange_->is_complete(*number)) break;
    if (in_flight_.front().trace != nullptr) [[unlikely]]
      trace(in_flight_.front());
    in_flight_.pop_front();
  }
  return dropped;
}

/// By the device's own clock.
void StepWatch::trace(const StepInFlight& step) {
  CudaTimes times{};
  try {
    times = DeviceExchange::times_of(*step.moments);
  } catch (const Error&) {  // NOLINT: it was not traced from its begin, or the device is lost
    return;
  }
  const auto at = [](int64_t nanoseconds) {
    return TimePoint(std::chrono::nanoseconds(nanoseconds));
  };
  TraceEvent event = step.shown;
  event.launched = at(times.ready);
  // One begins after the other has ended, also where the two clocks were compared in between.
  event.begin = std::max(at(times.begun), traced_until_);
  event.end = traced_until_ = std::max(at(times.complete), event.begin);
  step.trace->record(event);
}

void StepWatch::look_around(TimePoint when) {
  if (in_flight_.empty() || when < next_look_) return;
  next_look_ = when + kBetweenStepLooks;
  if (!membership_.detector->failed()) look_for_failure(when);
  if (membership_.detector->failed()) drain();
}

void StepWatch::look_for_failure(TimePoint when) {
  for (StepInFlight& step : in_flight_) see(step, when);
  std::optional<Error> failure;
  try {
    exchange_->look_for_loss();
    look_for_the_dead();
    exchange_->look_for_nccl_failure();
    failure = look_for_the_late(when);
    if (!failure) return;
  } catch (const Error& error) {
    const bool own = error.code() != ErrorCode::peer_lost;
    failure = own ? during(on_rank(error, engine_.host().rank)) : error;
  }
  membership_.detector->report(*failure);
  engine_.wake_everyone();
}

/// Operations run one after the other: the first one holds up any that is late.
std::optional<Error> StepWatch::look_for_the_late(TimePoint when) {
  const auto late = std::ranges::find_if(
      in_flight_, [&](const StepInFlight& step) { return step.deadline.passed(when); });
  if (late != in_flight_.end())
    return late_.look({late->title, when - late->seen, in_flight_.front().way}, when);
  late_.forget();
  return std::nullopt;
}

/// Names the first operation in flight: it has failed, or is nearest to what has.
Error StepWatch::during(const Error& error) const {
  Context where = error.where();
  if (where.operation.empty()) where.operation = in_flight_.front().title;
  return {error.code(), error.verdict(), where, error.advice()};
}

/// Ranks that have left are not missed: they waited for their devices before.
void StepWatch::look_for_the_dead() {
  for (const int member : membership_.members) {
    if (member == engine_.host().rank || has_left(around_, member)) continue;
    Context where;
    where.operation = in_flight_.front().title;
    if (const auto absence = absence_of(around_, member, where)) throw Error(*absence);
  }
}

bool StepWatch::somebody_has_died() const {
  return std::ranges::any_of(membership_.members, [&](int member) {
    if (member == engine_.host().rank) return false;
    const auto absence = absence_of(engine_.host(), member, "");
    return absence && absence->code() == ErrorCode::peer_lost;
  });
}

void StepWatch::drain() noexcept {
  try {
    exchange_->look_for_loss();
  } catch (const Error&) {  // NOLINT: nothing waits there; its steps are never complete
    for (; !in_flight_.empty(); in_flight_.pop_front()) engine_.let_go();
    return;
  }
  try {
    exchange_->drain();
  } catch (const Error&) {  // NOLINT: at the next look again
  }
}

}  // namespace farandole
