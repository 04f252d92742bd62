// Failures while names wait for their order: deaths, ranks that left, ranks that never come.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/hash.h"
#include "base/log.h"
#include "base/seconds_text.h"
#include "control/hung.h"
#include "named/named.h"

namespace farandole {
namespace {

constexpr auto kBetweenWarnings = std::chrono::seconds(60);
// Time for rank 0 to name missing ranks: before a warning, and before it is blamed itself.
constexpr Duration kGrace = std::chrono::milliseconds(500), kMostGrace = std::chrono::seconds(5);
constexpr size_t kMostNames = 8;  // in one warning

/// "all_reduce 'x' of [3, 4] x float32".
std::string shaped_title(const Signature& signature) {
  std::string text = signature.title();
  if (signature.tensors.empty()) return text;
  if (signature.tensors.size() > 1)
    return text + " of " + std::to_string(signature.tensors.size()) + " tensors";
  text += " of [";
  for (size_t i = 0; i < signature.tensors[0].shape.size(); ++i)
    text += (i > 0 ? ", " : "") + std::to_string(signature.tensors[0].shape[i]);
  return text + "] x " + std::string(name_of(signature.tensors[0].dtype));
}

}  // namespace

void Named::look_around(TimePoint when) {
  if (polled_sets_.empty()) return;
  if (engine_.has_left()) {
    hold_for(holds_listening_, false);
    hold_for(holds_unsent_, false);
  }
  check_ranks();
  if (when < next_check_) return;
  Duration interval = std::min<Duration>(std::chrono::seconds(1), engine_.view().warn_after / 4);
  if (timeout_ > Duration::zero()) interval = std::min<Duration>(interval, timeout_ / 4);
  next_check_ = when + std::max<Duration>(interval, std::chrono::milliseconds(10));
  if (coordinator_) check_missing(when);
  check_requests(when);
}

// ---- what others are shown ----

void Named::list_waits(WaitList& list) const {
  list.begun += begun_;
  if (unfinished_.load(std::memory_order_relaxed) == 0) return;
  const std::lock_guard lock(mutex_);
  if (!joins_.empty()) list.add({}, "join");  // it stands in for itself
  for (const auto& state : polled_sets_) {
    for (const Entries& entries : state->entries)
      for (const auto& [key, entry] : entries) {
        const NamedRequest* request = entry->request;
        if (request == nullptr) continue;
        const Signature& signature = entry->name.signature;
        Hash hash;
        hash.add(std::string_view(signature.key()));
        Wait wait;
        wait.key = hash.value();
        if (!request->ordered) wait.kind = Wait::named;
        // In a large set, only the ranks that rank 0 reports as missing.
        const bool large = state->set.members.size() > Wait::kRanks + 1;
        for (const int r : large && request->told ? request->missing : state->set.members)
          if (r != rank_) wait.need(r);
        list.add(wait, shaped_title(signature));
      }
  }
}

void Named::fail_waits(const Error& error) {
  for (const auto& state : polled_sets_)
    if (state->unordered > 0) state->set.membership.detector->report(error);
}

/// Operations that wait for a dead rank fail on any rank that sees the death. Only rank 0 knows
/// whether a rank that left in good order is missed. Ranks that wait for its order miss rank 0.
void Named::check_ranks() {
  const EngineView view = engine_.view();
  if (coordinator_) {
    int absent = 0;
    for (int r = 0; r < static_cast<int>(links_.size()); ++r) absent += is_absent(view, r);
    if (absent != absent_ranks_) next_check_ = TimePoint{};
    absent_ranks_ = absent;
    if (absent > 0) check_joins();
  }
  for (const auto& state : polled_sets_) {
    if (state->unordered == 0) continue;
    const auto report_absent = [&](int r) {
      Context where;
      where.operation = "the order of operations by name";
      if (const auto error = absence_of(view, r, std::move(where)))
        state->set.membership.detector->report(*error);
    };
    for (const int r : state->set.members)
      if (r == rank_ || !has_left(view, r)) report_absent(r);
    // Messages that rank 0 sent before were read. It serves sets without it until it has gone.
    const bool among = std::ranges::find(state->set.members, 0) != state->set.members.end();
    const bool serves = view.host->segment->state_of(0) == RankState::leaving;
    if (!coordinator_ && (among || !serves || (*view.dead)[0])) report_absent(0);
  }
}

/// Ranks that have joined wait for all others, whatever these do.
void Named::check_joins() {
  const EngineView view = engine_.view();
  for (const int r : coordinator_->not_joined()) {
    Context where;
    where.operation = "join";
    if (const auto error = absence_of(view, r, std::move(where)))
      polled_sets_[0]->set.membership.detector->report(*error);
  }
}

// ---- the waiting rank ----

void Named::check_requests(TimePoint when) {
  const Duration patience = patience_for(engine_.host().is_stopped(0));
  const Duration grace = std::clamp(timeout_ / 2, kGrace, kMostGrace);
  const std::lock_guard lock(mutex_);
  for (const auto& state : polled_sets_) {
    if (state->unordered == 0) continue;
    for (const Entries& entries : state->entries)
      for (const auto& [key, entry] : entries) {
        NamedRequest* request = entry->request;
        if (request == nullptr || request->ordered) continue;
        if (request->since == TimePoint{}) request->since = when;
        for (const int r : request->missing)
          if (is_absent(engine_.view(), r)) {
            Context where;
            where.operation = entry->name.signature.title();
            where.tensor = entry->name.signature.name;
            state->set.membership.detector->report(*absence_of(engine_.view(), r, where));
          }
        const Duration age = when - request->since;
        if (timeout_ > Duration::zero() && age >= timeout_ + (request->told ? kGrace : grace))
          report(*state, entry->name.signature,
                 request->told ? request->missing : std::vector<int>{0}, age, "");
        if (request->told || request->warned || age < patience + kGrace) continue;
        request->warned = true;
        log(LogLevel::warning, entry->name.signature.title() + " has waited " + seconds_text(age) +
                                   " for rank 0, which orders operations by name and has not "
                                   "submitted it: " +
                                   rank_text(0) + engine_.view().waits->suspicion(when));
      }
  }
}

/// Until a warning; `hung`: a rank that is waited for is stopped.
Duration Named::patience_for(bool hung) const {
  const Duration usual = engine_.view().warn_after;
  return hung ? std::min(usual, kUntilStopsCount) : usual;
}

void Named::report(SetState& state, const Signature& signature, const std::vector<int>& missing,
                   Duration age, const std::string& mistake) {
  Context where;
  where.operation = name_of(signature.kind);
  where.tensor = signature.name;
  const std::string waited = signature.title() + " was not complete after " + seconds_text(age);
  if (const auto hung = hung_among(engine_.host(), missing, waited, where))
    return state.set.membership.detector->report(*hung);
  if (!missing.empty()) where = engine_.host().about(missing.front(), std::move(where));
  for (const int r : missing) where.evidence += (where.evidence.empty() ? "" : "; ") + rank_text(r);
  where.evidence += mistake;
  where.values = {{"missing", missing}};
  state.set.membership.detector->report(Error(
      ErrorCode::stalled, waited + "; not submitted by " + name_ranks(missing), std::move(where)));
}

std::string Named::rank_text(int world_rank) const {
  const Host& host = engine_.host();
  return host.name_of(world_rank) + " is " + host.state_of(world_rank) +
         engine_.view().waits->doing(world_rank);
}

// ---- rank 0, which knows who is missing ----

/// The same name as something else, on both sides, is how a mistake looks.
std::string Named::as_something_else(const Signature& signature,
                                     const std::vector<Coordinator::Waiting>& waiting) {
  std::string text;
  for (const Coordinator::Waiting& other : waiting) {
    const bool elsewhere = other.signature->set != signature.set;
    if (other.signature->name != signature.name ||
        (other.signature->kind == signature.kind && !elsewhere))
      continue;
    text += "; " + name_ranks(other.present) + " submitted " + other.signature->title() +
            (elsewhere ? " in another process set" : "");
  }
  return text;
}

void Named::check_missing(TimePoint when) {
  const EngineView view = engine_.view();
  coordinator_->refuse_crossed(when - view.warn_after);
  const std::vector<Coordinator::Waiting> waiting = coordinator_->waiting();
  std::set<int> awaited;
  for (const Coordinator::Waiting& one : waiting)
    if (when - one.since >= kUntilStopsCount)
      awaited.insert(one.missing.begin(), one.missing.end());
  const std::vector<int> stopped = stopped_among(engine_.host(), {awaited.begin(), awaited.end()});
  std::map<uint64_t, TimePoint> next_warning;
  std::map<std::vector<int>, std::vector<const Coordinator::Waiting*>> late;  // by who is missing
  for (const Coordinator::Waiting& one : waiting) {
    const auto known = next_warning_.find(one.arrival);
    const bool told = known != next_warning_.end();
    const bool hung =
        std::ranges::any_of(one.missing, [&](int r) { return std::ranges::count(stopped, r) > 0; });
    const TimePoint due = told ? known->second : one.since + patience_for(hung);
    const bool overdue = timeout_ > Duration::zero() && when - one.since >= timeout_;
    const bool absent = std::ranges::any_of(one.missing, [&](int r) { return is_absent(view, r); });
    if (when >= due) late[one.missing].push_back(&one);
    SetState& state = *polled_sets_[one.signature->set];
    if (overdue && state.set.rank >= 0)  // others than its members tell what they know
      report(state, *one.signature, one.missing, when - one.since,
             as_something_else(*one.signature, waiting));
    else if (when >= due || absent || overdue)
      coordinator_->tell_late(one);
    if (when >= due || told)
      next_warning[one.arrival] = when >= due ? when + kBetweenWarnings : due;
  }
  next_warning_ = std::move(next_warning);
  for (const auto& [missing, names] : late) {
    std::string text;
    for (size_t i = 0; i < names.size() && i < kMostNames; ++i)
      text += (i > 0 ? ", " : "") + names[i]->signature->title();
    if (names.size() > kMostNames)
      text += " and " + std::to_string(names.size() - kMostNames) + " more";
    text += (names.size() > 1 ? " have waited " : " has waited ") +
            seconds_text(when - names.front()->since) + " for ranks that have not submitted ";
    text += names.size() > 1 ? "them:" : "it:";
    for (const int r : missing) text += " " + rank_text(r) + ";";
    text += " submitted by " + describe_ranks(names.front()->present);
    log(LogLevel::warning,
        text + as_something_else(*names.front()->signature, waiting) + view.waits->suspicion(when));
  }
}

}  // namespace farandole
