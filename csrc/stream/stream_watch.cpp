// A stream's reports: ranks it waits for, warnings, verdicts about its peers, its part of a trace.
#include <algorithm>

#include "base/fixed_text.h"
#include "base/log.h"
#include "base/seconds_text.h"
#include "control/hung.h"
#include "control/wait_watch.h"
#include "stream/stream.h"

namespace farandole {
namespace {

constexpr auto kShortestPhase = std::chrono::microseconds(1);  // that a trace shows
constexpr auto kBetweenStopLooks = std::chrono::seconds(1);
constexpr auto kBetweenClosingLooks = std::chrono::milliseconds(100);  // at long directories

constexpr std::string_view kPhases[] = {"resting",    "opening",   "agreeing", "running",
                                        "describing", "comparing", "leaving"};

}  // namespace

// ---- now and then ----

bool Stream::needs(int r) const { return r != memory_.rank && !has_completed(r); }

bool Stream::has_begun(int r) const {
  const auto newest = agreement_->begun(r);
  return newest && static_cast<int32_t>(*newest - sequence_) >= 0;
}

bool Stream::has_completed(int r) const {
  const auto newest = agreement_->completed(r);
  return newest && static_cast<int32_t>(*newest - sequence_) >= 0;
}

std::vector<int> Stream::waiting_for() const {
  std::vector<int> late;
  for (int r = 0; r < memory_.size(); ++r) {
    // While pages are missing, those that are there wait for them as this rank does.
    if (r == memory_.rank || (phase_ == Phase::opening && agreement_->has_opened(r))) continue;
    if (!has_begun(r)) late.push_back(r);
  }
  return late;
}

bool Stream::awaits_ranks() const { return phase_ != Phase::resting && !waiting_for().empty(); }

std::vector<int> Stream::lacking() const {
  if (phase_ == Phase::running) return backend_->lacking();
  return phase_ == Phase::comparing ? agreement_->silent() : std::vector<int>();
}

/// Ranks that are stopped are to blame. If none is, ranks whose data others lack are, but not those
/// that lack data themselves. Ranks may be slow to show which data they lack if many share a core.
std::vector<int> Stream::culprits() const {
  std::vector<int> stopped = all_but(memory_, [&](int r) {
    return !needs(r) || !around_.host->stands_still(memory_.members[static_cast<size_t>(r)]);
  });
  if (!stopped.empty()) return stopped;
  const std::vector<int> direct = lacking();
  std::vector<int> next = direct, found;
  std::vector<bool> seen(memory_.members.size());
  seen[static_cast<size_t>(memory_.rank)] = true;
  while (!next.empty()) {
    const int r = next.back();
    next.pop_back();
    if (seen[static_cast<size_t>(r)]) continue;
    seen[static_cast<size_t>(r)] = true;
    const std::vector<int> theirs = agreement_->holdups_of(r);
    if (theirs.empty()) found.push_back(r);
    next.insert(next.end(), theirs.begin(), theirs.end());
  }
  std::sort(found.begin(), found.end());
  return found.empty() ? direct : found;
}

std::vector<int> Stream::ahead() {
  std::vector<int> ranks;
  if (busy()) return ranks;
  agreement_->open();
  for (int r = 0; r < memory_.size(); ++r) {
    const auto newest = agreement_->begun(r);
    if (r != memory_.rank && newest && static_cast<int32_t>(*newest - sequence_) > 0)
      ranks.push_back(memory_.members[static_cast<size_t>(r)]);
  }
  return ranks;
}

std::string Stream::title() const {
  const Operation& o = operation();
  std::string text = std::string(name_of(o.kind)) + " #" + std::to_string(sequence_);
  if (!o.name.empty()) text += " '" + o.name + "'";
  if (!label_.empty()) text += (is_between_two(o.kind) ? " " : " of ") + label_;
  return text;
}

void Stream::list_waits(WaitList& list) const {
  if (phase_ == Phase::resting && queue_.empty()) return;
  Wait wait;
  wait.key = key_;
  wait.sequence = sequence_;
  const bool stands =
      phase_ == Phase::opening || phase_ == Phase::agreeing || phase_ == Phase::running;
  if (stands)
    for (const int r : waiting_for()) wait.need(memory_.members[static_cast<size_t>(r)]);
  if (wait.count > 0) wait.kind = Wait::all;
  std::string text = title();
  if (const Operation& o = operation(); o.count > 0)
    text += " of " + std::to_string(o.count) + " x " + std::string(name_of(o.input.dtype));
  list.add(wait, text);
}

std::string Stream::who(int r) const {
  const int world_rank = memory_.members[static_cast<size_t>(r)];
  return around_.host->name_and_state_of(world_rank) + around_.waits->doing(world_rank);
}

void Stream::look_around(TimePoint when) {
  if (phase_ == Phase::resting || phase_ == Phase::leaving) return;
  if (started_ == TimePoint{}) {
    started_ = when;
    next_warning_ = when + around_.warn_after;
    next_stop_look_ = when + kUntilStopsCount;
    next_closing_look_ = when + kBetweenClosingLooks;
    Operation& o = queue_.front()->operation;
    if (o.timeout > Duration::zero()) o.deadline.at = std::min(o.deadline.at, when + o.timeout);
  }
  idle_looks_ = kLooksBetweenPosts;  // a rank that has just been woken looks at everything
  for (int r = 0; r < memory_.size(); ++r)
    if (needs(r) || r == memory_.rank) check_members(r);
  if (when >= next_closing_look_) check_closings(when);
  agreement_->show_holdups(lacking(), when);
  const bool minded = phase_ == Phase::running && backend_->minds_deadline();
  if (operation().deadline.passed(when) && !minded && !membership_.detector->failed()) {
    membership_.detector->report(stalled(when));
  } else if (when >= next_warning_ || waits_for_a_stopped_one(when)) {
    warn(when);
    next_warning_ = next_stop_look_ = when + std::chrono::seconds(60);
  }
}

bool Stream::waits_for_a_stopped_one(TimePoint when) {
  if (when < next_stop_look_ || shut_) return false;
  next_stop_look_ = when + kBetweenStopLooks;
  return !stopped_among(*around_.host, needed()).empty();
}

/// The world ranks that have not done their share.
std::vector<int> Stream::needed() const {
  std::vector<int> ranks = all_but(memory_, [&](int r) { return !needs(r); });
  for (int& r : ranks) r = memory_.members[static_cast<size_t>(r)];
  return ranks;
}

void Stream::check_members(int r) {
  const int world_rank = memory_.members[static_cast<size_t>(r)];
  if (!is_absent(around_, world_rank) || !agreement_->knows_all_of(r)) return;
  // It did its share, and left between two looks (partner: Engine::leave).
  if (r != memory_.rank && !needs(r)) return;
  Context where;
  where.sequence = sequence_;
  where.operation = title();
  where.tensor = operation().name;
  // An operation by name has an order, and so is here, once all ranks have submitted it.
  const bool submitted =
      r == memory_.rank || has_begun(r) || key_ == stream_key(membership_.key, kNamesNumber);
  membership_.detector->report(*absence_of(around_, world_rank, std::move(where), submitted));
}

/// A member that has closed the group begins nothing more. What it had begun before goes on.
void Stream::check_closings(TimePoint when) {
  next_closing_look_ = when + kBetweenClosingLooks;
  for (int r = 0; r < memory_.size(); ++r) {
    if (r == memory_.rank || !agreement_->has_closed(r)) continue;
    agreement_->open();  // once it has closed the group, what it began is there to be seen
    if (has_begun(r)) continue;
    Context where;
    where.sequence = sequence_;
    where.operation = title();
    where.tensor = operation().name;
    const int world_rank = memory_.members[static_cast<size_t>(r)];
    if (const auto error = closing_of(around_, world_rank, membership_.group, std::move(where)))
      membership_.detector->report(*error);
  }
}

void Stream::warn(TimePoint when) {
  std::string text = title() + " has waited " + seconds_text(when - started_);
  if (shut_) return log(LogLevel::warning, text + " for " + running().gate->awaited());
  if (const auto stopped = stopped_among(*around_.host, needed()); !stopped.empty()) {
    text += " for ranks that are stopped:";
    for (const int r : stopped) text += " " + around_.host->name_and_state_of(r) + ";";
    text.pop_back();
    return log(LogLevel::warning, text);
  }
  std::vector<int> ranks = waiting_for();
  text += ranks.empty() ? " for data" : " for ranks that have not submitted it:";
  if (ranks.empty()) {
    ranks = culprits();
    if (!ranks.empty()) text += " of";
  }
  for (size_t i = 0; i < ranks.size(); ++i) text += (i > 0 ? "; " : " ") + who(ranks[i]);
  log(LogLevel::warning, text + around_.waits->suspicion(when));
}

Error Stream::stalled(TimePoint when) const {
  if (shut_) return stalled_here(when);
  Context where;
  where.operation = title();
  where.tensor = operation().name;
  where.sequence = sequence_;
  const std::string waited = title() + " was not complete after " + seconds_text(when - started_);
  if (auto hung = hung_among(*around_.host, needed(), waited, where)) return *hung;
  std::vector<int> missing = waiting_for();
  const bool submitted = missing.empty();
  if (submitted) missing = culprits();
  std::vector<int> world;
  std::string states;
  for (const int r : missing) {
    world.push_back(memory_.members[static_cast<size_t>(r)]);
    states += (states.empty() ? "" : "; ") + around_.host->name_of(world.back()) + " is " +
              around_.host->state_of(world.back()) + around_.waits->doing(world.back(), " and ");
  }
  if (!world.empty()) where = around_.host->about(world.front(), std::move(where));
  where.values = {{"missing", world}};
  if (submitted) states += states.empty() ? "data stopped moving" : "";
  where.evidence = states + (submitted ? "; all ranks have submitted it" : "");
  std::string verdict = waited;
  if (!world.empty())
    verdict += (submitted ? "; data are missing of " : "; not submitted by ") + name_ranks(world);
  return Error(
      ErrorCode::stalled, verdict, std::move(where),
      submitted
          ? "look at what the ranks are doing, or allow more time by timeout= or FARANDOLE_TIMEOUT"
          : "");
}

/// This rank's own input did not come.
Error Stream::stalled_here(TimePoint when) const {
  Context where;
  where.operation = title();
  where.tensor = operation().name;
  where.sequence = sequence_;
  const int mine = memory_.members[static_cast<size_t>(memory_.rank)];
  where.rank = mine;
  where.values = {{"missing", {mine}}};
  return Error(ErrorCode::stalled,
               title() + " was not complete after " + seconds_text(when - started_) + "; " +
                   name_ranks({mine}) + " waits for " + running().gate->awaited(),
               std::move(where), "look at what that rank's device is doing");
}

std::string Stream::describe() const {
  std::string text = (label_.empty() ? std::string("program order") : label_) + ": " +
                     std::string(kPhases[static_cast<size_t>(phase_)]);
  if (phase_ == Phase::resting) return text;
  text += " " + title();
  const std::vector<int> late = waiting_for();
  if (!late.empty()) text += ", waits for ranks " + describe_ranks(late);
  return text;
}

// ---- what a trace shows ----

void Stream::enter(Phase next) {
  if (Trace* const on = trace(); on != nullptr) [[unlikely]]
    trace_phase(on, next);
  phase_ = next;
}

void Stream::trace_phase(Trace* trace, Phase next) {
  const TimePoint when = now();
  if (phase_ == Phase::resting) {
    if (traced_ != trace) track_ = trace->track(track_name(), key_);
    traced_ = trace;
    begun_ = when;
  } else if (traced_ != trace) {
    return;  // tracing began in the middle of this operation
  } else if (when - phase_begun_ >= kShortestPhase) {
    TraceEvent event;
    event.kind = TraceKind::phase;
    event.track = track_;
    event.sequence = sequence_;
    event.begin = phase_begun_;
    event.end = when;
    copy_cut(kPhases[static_cast<size_t>(phase_)], event.label);
    traced_->record(event);
  }
  phase_begun_ = when;
  if (next == Phase::resting) trace_operation(when);
}

void Stream::trace_operation(TimePoint end) const {
  const Request& request = *queue_.front();
  const Operation& o = request.operation;
  TraceEvent event;
  event.kind = TraceKind::operation;
  event.track = track_;
  event.sequence = sequence_;
  event.count = request.error ? 1 : 0;
  event.begin = begun_;
  event.end = end;
  event.launched = request.submitted != TimePoint{} ? request.submitted : begun_;
  event.bytes = o.input.count > 0 ? o.input.bytes() : o.output.bytes();
  copy_cut(name_of(o.kind), event.label);
  copy_cut(last_way(), event.path);
  copy_cut(o.name, event.name);
  traced_->record(event);
}

std::string Stream::track_name() const {
  if (!label_.empty()) return label_;
  return membership_.members.size() == around_.host->peers.size()
             ? "program order"
             : "program order of ranks " + describe_ranks(membership_.members);
}

}  // namespace farandole
