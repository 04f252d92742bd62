#include "group/any_source.h"

#include <utility>

#include "base/log.h"
#include "base/seconds_text.h"
#include "control/control_mesh.h"
#include "control/hung.h"

namespace farandole {
namespace {

constexpr auto kBetweenWarnings = std::chrono::seconds(60);

}  // namespace

AnySource::AnySource(Engine& engine, Membership group, std::shared_ptr<Pairs> pairs)
    : engine_(engine), group_(std::move(group)), pairs_(std::move(pairs)) {}

std::shared_ptr<const int> AnySource::submit(std::shared_ptr<Request> request, int tag) {
  auto source = std::make_shared<int>(-1);
  {
    const std::lock_guard lock(mutex_);
    pending_.push_back({std::move(request), source, tag});
    waiting_.store(true, std::memory_order_release);
  }
  engine_.hold_on();
  engine_.wake();
  return source;
}

void AnySource::close() {
  const std::lock_guard lock(mutex_);
  for (; !pending_.empty(); pending_.pop_front()) engine_.let_go();
  waiting_.store(false, std::memory_order_relaxed);
}

bool AnySource::poll(TimePoint) {
  if (!waiting_.load(std::memory_order_acquire)) return false;
  const std::lock_guard lock(mutex_);
  const size_t before = pending_.size();
  std::erase_if(pending_, [&](Pending& pending) {
    try {
      return begin(pending);
    } catch (const Error& error) {  // no room for another stream
      fail(pending, error);
      return true;
    }
  });
  for (size_t i = pending_.size(); i < before; ++i) engine_.let_go();
  waiting_.store(!pending_.empty(), std::memory_order_relaxed);
  return pending_.size() < before;
}

/// True when a sender was found. Requests of one tag come by in the order of submission; a stream
/// that has taken one is busy, and is not offered to the next.
bool AnySource::begin(Pending& pending) {
  const int size = static_cast<int>(group_.members.size());
  for (int i = 0; i < size; ++i) {
    const int peer = (next_ + i) % size;
    if (peer == group_.rank) continue;
    const std::shared_ptr<Stream> stream = stream_of(peer, pending.tag);
    if (!stream || stream->ahead().empty()) continue;
    *pending.source = peer;
    next_ = (peer + 1) % size;
    engine_.launch(stream, std::move(pending.request));
    return true;
  }
  return false;
}

/// Opened when the peer has opened its end: it then finds ours, and begins.
std::shared_ptr<Stream> AnySource::stream_of(int peer, int tag) {
  const Pair pair{peer, group_.rank, tag};
  if (auto known = pairs_->known(pair)) return known;
  const int world_rank = group_.members[static_cast<size_t>(peer)];
  const uint64_t key = key_of(peer, tag);
  const Host& host = engine_.host();
  const bool opened = host.is_here(world_rank)
                          ? host.segment->find(world_rank, key).has_value()
                          : host.mesh->told(key, world_rank).progress.has_value();
  return opened ? pairs_->stream(engine_, group_, pair) : nullptr;
}

/// Those elsewhere show nothing by themselves.
void AnySource::ask_elsewhere(int tag) {
  const Host& host = engine_.host();
  const uint64_t fate = stream_key(group_.key, kFateNumber);
  for (int peer = 0; peer < static_cast<int>(group_.members.size()); ++peer) {
    const int world_rank = group_.members[static_cast<size_t>(peer)];
    if (host.is_here(world_rank)) continue;
    host.mesh->ask(key_of(peer, tag), fate, world_rank);
  }
}

/// The key of the stream of what the peer sends here.
uint64_t AnySource::key_of(int peer, int tag) const {
  return stream_key(group_.key, number_of({peer, group_.rank, tag}, group_.members.size()));
}

/// Whether the peer has closed the group: it sends nothing that it has not begun.
bool AnySource::has_closed(int peer, int tag) const {
  const int world_rank = group_.members[static_cast<size_t>(peer)];
  const Host& host = engine_.host();
  return host.is_here(world_rank)
             ? host.segment->has_closed(world_rank, stream_key(group_.key, kFateNumber))
             : host.mesh->told(key_of(peer, tag), world_rank).closed;
}

// ---- now and then ----

void AnySource::look_around(TimePoint when) {
  if (!waiting_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex_);
  std::erase_if(pending_, [&](Pending& pending) {
    const auto error = failure_of(pending, when);
    if (!error) {
      ask_elsewhere(pending.tag);
      return false;
    }
    fail(pending, *error);
    engine_.let_go();
    return true;
  });
  waiting_.store(!pending_.empty(), std::memory_order_relaxed);
}

void AnySource::list_waits(WaitList& list) const {
  if (!waiting_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex_);
  for (const Pending& pending : pending_) {
    Wait wait;
    wait.key = group_.key;
    wait.sequence = static_cast<uint64_t>(pending.tag);
    const bool all_fit = group_.members.size() <= Wait::kRanks + 1;  // else it may be one of these
    wait.kind = all_fit ? Wait::any : Wait::moving;
    for (const int r : group_.members)
      if (r != engine_.host().rank) wait.need(r);
    list.add(wait, title(pending));
  }
}

void AnySource::fail_waits(const Error& error) {
  if (waiting_.load(std::memory_order_acquire)) group_.detector->report(error);
}

std::string AnySource::others() const {
  std::string text;
  for (const int r : group_.members) {
    if (r == engine_.host().rank) continue;
    text += "; " + engine_.host().name_and_state_of(r) + engine_.view().waits->doing(r);
  }
  return text;
}

/// A failure is the whole group's, as with any operation.
std::optional<Error> AnySource::failure_of(Pending& pending, TimePoint when) {
  Operation& o = pending.request->operation;
  if (pending.started == TimePoint{}) {
    pending.started = when;
    pending.next_warning = when + engine_.view().warn_after;
    if (o.timeout > Duration::zero()) o.deadline.at = std::min(o.deadline.at, when + o.timeout);
  }
  FailureDetector& detector = *group_.detector;
  if (!detector.failed()) {
    if (const auto error = absence(pending.tag, title(pending)))
      detector.report(*error);
    else if (o.deadline.passed(when))
      detector.report(stalled(pending, when));
  }
  if (detector.failed()) return detector.verdict();
  if (when >= pending.next_warning) {
    log(LogLevel::warning, title(pending) + " has waited " + seconds_text(when - pending.started) +
                               "; no rank has sent anything with this tag" + others() +
                               engine_.view().waits->suspicion(when));
    pending.next_warning = when + kBetweenWarnings;
  }
  return std::nullopt;
}

/// A rank that died might have been the sender. One that left in good order, or closed the group,
/// was not, as long as there are others.
std::optional<Error> AnySource::absence(int tag, const std::string& title) const {
  const EngineView view = engine_.view();
  std::optional<Error> left;
  bool others = false;
  for (int peer = 0; peer < static_cast<int>(group_.members.size()); ++peer) {
    const int member = group_.members[static_cast<size_t>(peer)];
    const bool mine = peer == group_.rank;
    Context where;
    where.operation = title;
    auto error = absence_of(view, member, where);
    if (error && (mine || !has_left(view, member))) return error;
    if (!error && !mine && has_closed(peer, tag))
      error = closing_of(view, member, group_.group, std::move(where));
    others |= !error && !mine;
    if (error) left = std::move(error);
  }
  return others ? std::nullopt : left;
}

Error AnySource::stalled(const Pending& pending, TimePoint when) const {
  Context where;
  where.operation = title(pending);
  where.tensor = pending.request->operation.name;
  const std::string waited = title(pending) + " on rank " + std::to_string(engine_.host().rank) +
                             " was not complete after " + seconds_text(when - pending.started);
  if (auto hung = hung_among(engine_.host(), group_.members, waited, where)) return *hung;
  where.rank = engine_.host().rank;
  where.evidence = "no rank has sent it anything with this tag" + others();
  return Error(ErrorCode::stalled, waited, std::move(where),
               "send as many messages as are received, with the same tags");
}

std::string AnySource::title(const Pending& pending) const {
  const std::string& name = pending.request->operation.name;
  return "recv" + (name.empty() ? name : " '" + name + "'") + " from any rank, tag " +
         std::to_string(pending.tag);
}

void AnySource::fail(Pending& pending, const Error& error) {
  const std::shared_ptr<Request> request = std::move(pending.request);
  request->error = error;
  request->finished.store(true, std::memory_order_release);  // partner: Handle::done
  engine_.note_finished();
  if (request->operation.completion)
    engine_.complete([request] { request->operation.completion(&*request->error); });
}

}  // namespace farandole
