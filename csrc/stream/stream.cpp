#include "stream/stream.h"

#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "base/fault.h"
#include "base/log.h"
#include "control/control_mesh.h"
#include "stream/bytes_begun.h"
#include "stream/message_agreement.h"
#include "stream/page_agreement.h"

namespace farandole {
namespace {

constexpr auto kInsidePatience = std::chrono::seconds(1);
constexpr auto kComparePatience = std::chrono::milliseconds(250);
constexpr Duration kReportPatience = std::chrono::seconds(1);   // its writer may have been killed
constexpr Duration kVerdictPatience = std::chrono::seconds(5);  // of hosts that lose each other

/// Keeps memory that something outside of this process may still use.
void keep_for_ever(const std::shared_ptr<const void>& memory) {
  if (memory) new auto(memory);
}

StreamMemory memory_of(const EngineView& around, const Membership& membership) {
  const Host& host = *around.host;
  StreamMemory memory;
  memory.rank = membership.rank;
  memory.members = membership.members;
  memory.pages.assign(membership.members.size(), nullptr);
  memory.segment = host.segment;
  memory.fate = stream_key(membership.key, kFateNumber);
  for (const int member : membership.members)
    memory.processes.push_back(host.peers[static_cast<size_t>(member)].info.pid);
  memory.foreign = host.foreign.allowed;
  memory.prefers_foreign = host.foreign.preferred;
  memory.demands_foreign = host.foreign.demanded;
  memory.abort = membership.abort;
  return memory;
}

}  // namespace

uint64_t stream_key(uint64_t group_key, uint64_t number) {
  uint64_t h = (group_key ^ (number + 0x9e3779b97f4a7c15)) * 0xff51afd7ed558ccd;
  h ^= h >> 33;
  return h | 1;  // 0 means a free directory entry
}

Stream::Stream(const EngineView& around, const Membership& membership, std::string label,
               uint64_t key, uint32_t first_sequence, Connect agree_over)
    : around_(around),
      membership_(membership),
      label_(std::move(label)),
      key_(key),
      memory_(memory_of(around, membership)),
      sequence_(first_sequence) {
  if (agree_over)
    agreement_ = std::make_unique<MessageAgreement>(memory_, std::move(agree_over), key_,
                                                    first_sequence, *around_.host->mesh);
  else
    agreement_ = std::make_unique<PageAgreement>(memory_, *around_.arena, key_, first_sequence);
}

// ---- the life of an operation ----

Progress Stream::poll(TimePoint until) {
  bool moved = false;
  for (;;) {
    if (phase_ == Phase::resting) {
      if (queue_.empty()) return moved ? Progress::moved : Progress::idle;
      moved = true;
      if (drop_refused()) continue;
      begin();
    }
    const bool runs = phase_ == Phase::running;  // other phases take no time worth a look
    const Progress progress = guarded_advance(until);
    if (progress == Progress::idle) return moved ? Progress::moved : Progress::idle;
    moved = true;
    if (progress == Progress::finished && phase_ == Phase::resting) continue;
    if (progress == Progress::moved && runs && has_come(until)) return Progress::moved;
  }
}

Progress Stream::guarded_advance(TimePoint until) {
  try {
    if (phase_ != Phase::leaving && membership_.detector->failed() && !compares_on()) {
      if (backend_ != nullptr) backend_->abort();
      enter(Phase::leaving);
      leaving_since_ = now();
    }
    return advance(until);
  } catch (const Error& error) {
    fail_group(error);
    return Progress::moved;
  } catch (const std::exception& error) {
    fail_group(Error(ErrorCode::internal, std::string("in ") + title() + ": " + error.what()));
    return Progress::moved;
  }
}

Progress Stream::advance(TimePoint until) {
  switch (phase_) {
    case Phase::resting:
      return Progress::idle;
    case Phase::opening:
      if (!agreement_->open() || look_at_gate() || held_back()) return Progress::idle;
      start();
      return Progress::moved;
    case Phase::agreeing:
      return agree();
    case Phase::running:
      return run(until);
    case Phase::describing:
      return describe_mine();
    case Phase::comparing:
      return compare_all();
    case Phase::leaving:
      return leave();
  }
  return Progress::idle;
}

/// Drops the front operation if its bundle was refused. It takes no number, on any rank.
bool Stream::drop_refused() {
  const std::shared_ptr<Bundle>& bundle = operation().bundle;
  if (!bundle || !bundle->refused()) return false;
  queue_.front()->error = bundle->refused();
  give_back();
  return true;
}

/// Finishes the front request, whose error is set.
void Stream::give_back() {
  std::shared_ptr<Request> request = std::move(queue_.front());
  queue_.pop_front();
  request->finished.store(true, std::memory_order_release);  // partner: Handle::done
  finished_.push_back(std::move(request));
}

void Stream::begin() {
  started_ = TimePoint{};  // stamped by the first look around: most operations end before it
  take_number();
}

/// Takes a number for the front operation, or for its next piece.
void Stream::take_number() {
  enter(Phase::opening);
  ++sequence_;
  held_since_ = leaving_since_ = TimePoint{};
  shut_ = mixed_ = false;
  idle_looks_ = 0;
  backend_ = nullptr;
}

/// True while this rank's own input has not come.
bool Stream::look_at_gate() {
  const std::shared_ptr<Gate>& gate = running().gate;
  return shut_ = gate && !gate->is_open();
}

/// Only where a test has given the transport a latency.
bool Stream::held_back() {
  if (!fault_latency_armed()) return false;
  const TimePoint when = now();
  if (held_since_ == TimePoint{}) held_since_ = when;
  return when - held_since_ < fault_latency(operation().name);
}

Backend& Stream::backend_for(const Operation& operation) {
  for (const auto& backend : backends_)
    if (backend->can_run(operation)) return *backend;
  return *backends_.front();
}

void Stream::require_backend(const Operation& o) const {
  for (const auto& backend : backends_)
    if (backend->can_run(o)) return;
  std::string others;
  for (const auto& backend : backends_) {
    try {
      backend->refuse(o);
    } catch (const Error& refusal) {  // knows of its own ways alone
      throw Error(refusal.code(), refusal.verdict(), refusal.where(), refusal.advice() + others);
    }
    others += "; " + backend->ways_for(o);
  }
  throw Error(ErrorCode::invalid_argument,
              "these ranks run " + std::string(name_of(o.kind)) + " by other ways alone" + others);
}

void Stream::start() {
  const Operation& o = running();
  if (folds(o.kind)) reductions_begun.fetch_add(1, std::memory_order_relaxed);
  bytes_begun.fetch_add(o.input.bytes(), std::memory_order_relaxed);
  memory_.ticket = progress(sequence_, o.hash != 0 ? o.hash : hash_of(o));
  backend_ = o.on_devices ? &o.on_devices->backend() : &backend_for(o);
  backend_->start(o, sequence_);
  fault_point("stream.post");
  agreement_->post(memory_.ticket, backend_->eager_data());
  enter(backend_->agrees_in_data() ? Phase::running : Phase::agreeing);
}

/// Compares posts now and then while data that carry the agreement do not come.
bool Stream::sees_difference() {
  if (++idle_looks_ < kLooksBetweenPosts) return false;
  idle_looks_ = 0;
  return agreement_->compare() == Posts::different;
}

Progress Stream::agree() {
  switch (agreement_->compare()) {
    case Posts::waiting:
      return Progress::idle;
    case Posts::different:
      backend_->abort();
      enter(Phase::describing);
      return Progress::moved;
    case Posts::same:
      break;
  }
  try {
    backend_->arrived(agreement_->data());
    backend_->agreed();
  } catch (const Error& refusal) {  // the same on every rank
    backend_->abort();
    finish(refusal);
    return Progress::finished;
  }
  enter(Phase::running);
  return Progress::moved;
}

Progress Stream::run(TimePoint until) {
  const Progress progress = backend_->poll(until);
  if (progress == Progress::finished) {
    // A rank that learns of the failure takes its buffers back, while we may still have read them:
    // data count only when the group was alive after the last of them was read.
    std::atomic_thread_fence(std::memory_order_acquire);  // partner: FailureDetector::report
    if (membership_.detector->failed()) return Progress::moved;
    if (const std::string why = backend_->declined(); !why.empty())
      return go_by_host(why, operation().on_devices->piece());
    if (pieces_) return next_piece();
    finish(std::nullopt);
  } else if (progress == Progress::idle && backend_->agrees_in_data() && sees_difference()) {
    backend_->abort();
    enter(Phase::describing);
    return Progress::moved;
  }
  return progress;
}

/// Starts anew by the host, under the next number, on all ranks. A named algorithm is refused.
Progress Stream::go_by_host(const std::string& why, size_t piece) {
  Operation& o = queue_.front()->operation;
  const std::shared_ptr<OnDevices> before = std::exchange(o.on_devices, nullptr);
  if (before && before->is_named()) {
    finish(Error(ErrorCode::invalid_argument,
                 title() + " cannot go by '" + o.algorithm + "': " + why));
    return Progress::finished;
  }
  agreement_->complete(sequence_);
  auto on_devices = before ? before->go_by_host(o, piece) : nullptr;
  if (piece > 0)
    pieces_.emplace(o, Cut(o.kind, shape_of(o, memory_.rank, memory_.size()), piece),
                    std::move(on_devices));
  o.hash = 0;
  take_number();
  return Progress::moved;
}

Progress Stream::next_piece() {
  if (pieces_->is_first()) way_of_pieces_ = backend_->way();
  if (!pieces_->next()) {
    finish(std::nullopt);
    return Progress::finished;
  }
  agreement_->complete(sequence_);
  take_number();
  return Progress::moved;
}

void Stream::finish(std::optional<Error> error) {
  agreement_->complete(sequence_);
  std::string_view path = backend_ != nullptr ? backend_->way() : "";
  if (pieces_) path = std::exchange(way_of_pieces_, "");
  // NOLINTNEXTLINE(bugprone-suspicious-stringview-data-usage): names are literals
  last_way_.store(path.data(), std::memory_order_relaxed);
  queue_.front()->error = std::move(error);
  if (logs(LogLevel::debug))
    log(LogLevel::debug, title() + (queue_.front()->error ? " failed" : " went by ") +
                             std::string(queue_.front()->error ? "" : path) +
                             (pieces_ ? " in pieces" : ""));
  pieces_.reset();
  enter(Phase::resting);
  give_back();
  backend_ = nullptr;
}

// ---- the ranks disagree: everybody shows what it has started, and the operation is refused ----

Progress Stream::describe_mine() {
  const std::shared_ptr<Bundle>& bundle = operation().bundle;
  agreement_->describe(farandole::describe(running()),
                       bundle ? std::span(bundle->arrays()) : std::span<const BundledArray>());
  enter(Phase::comparing);
  return Progress::moved;
}

/// The group has failed meanwhile. A difference that is known counts in any case. Else a rank may
/// have compared sooner and ended because of it: then the missing descriptions are on their way.
bool Stream::compares_on() {
  if (phase_ != Phase::comparing) return false;
  if (queue_.front()->error) return true;
  if (!agreement_->others_may_settle_first()) return false;
  if (leaving_since_ == TimePoint{}) leaving_since_ = now();
  return now() - leaving_since_ < kComparePatience;
}

Progress Stream::compare_all() {
  std::optional<Error>& refused = queue_.front()->error;
  if (!refused && !mixed_) {
    const auto all = agreement_->described();
    if (!all) return Progress::idle;
    refused = disagreement(*all, memory_.members);
    mixed_ = !refused && !lie_alike(*all);
    piece_ = common_piece(*all);
    if (!refused && !mixed_)
      throw Error(ErrorCode::internal,
                  "ranks disagree on " + title() + ", but what they started looks the same");
    fault_point("stream.compare");
    return Progress::moved;
  }
  if (!agreement_->settled() && !membership_.detector->failed()) return Progress::idle;
  if (mixed_) return go_by_host("not all ranks' arrays lie on devices", piece_);
  if (const auto& bundle = operation().bundle) bundle->refuse(*refused);
  finish(std::move(refused));
  return Progress::finished;
}

// ---- the group has failed ----

void Stream::fail_group(const Error& error) {
  Context where = error.where();
  if (where.operation.empty()) where.operation = title();
  if (where.tensor.empty() && !queue_.empty()) where.tensor = operation().name;
  membership_.detector->report(Error(error.code(), error.verdict(), where, error.advice()));
}

/// Peers may be writing into the buffers of the operation in flight; they are given back to their
/// owner only when nobody is inside any more.
bool Stream::others_are_out() {
  bool out = true;
  for (int r = 0; r < memory_.size(); ++r) {
    if (r == memory_.rank || !agreement_->is_inside(r)) continue;
    const int world_rank = memory_.members[static_cast<size_t>(r)];
    if ((*around_.dead)[static_cast<size_t>(world_rank)]) continue;
    out = false;
    const HostPeer& peer = around_.host->peers[static_cast<size_t>(world_rank)];
    if (now() - leaving_since_ < kInsidePatience || !peer.process) continue;
    log(LogLevel::error, around_.host->name_and_state_of(world_rank) +
                             " is inside this rank's memory after its group failed; killing it");
    ::syscall(SYS_pidfd_send_signal, peer.process.get(), SIGKILL, nullptr, 0);
    leaving_since_ = now();
  }
  return out;
}

Progress Stream::leave() {
  std::optional<Error> verdict = membership_.detector->verdict();
  const Duration patience = around_.host->mesh ? kVerdictPatience : kReportPatience;
  if (!verdict && now() - leaving_since_ > patience)
    verdict = Error(ErrorCode::aborted, title() +
                                            " failed, but the rank that reported why did not "
                                            "finish its report");
  const Held held = backend_ != nullptr ? backend_->let_go() : Held::no;
  if (!verdict || !others_are_out() || held == Held::for_now) return Progress::idle;
  if (held == Held::for_ever) keep_for_ever(running().keepalive);
  finish(std::move(verdict));
  return Progress::finished;
}

}  // namespace farandole
