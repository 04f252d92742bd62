#include "stream/stream.h"

#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <new>
#include <utility>

#include "base/fault.h"
#include "base/log.h"

namespace farandole {
namespace {

constexpr auto kInsidePatience = std::chrono::seconds(1);
constexpr auto kReportPatience = std::chrono::seconds(1);  // its writer may have been killed

}  // namespace

uint64_t stream_key(uint64_t group_key, uint64_t number) {
  uint64_t h = (group_key ^ (number + 0x9e3779b97f4a7c15)) * 0xff51afd7ed558ccd;
  h ^= h >> 33;
  return h | 1;  // 0 means a free directory entry
}

Stream::Stream(const EngineView& around, const Membership& membership, std::string label,
               uint64_t key, uint32_t first_sequence)
    : around_(around),
      membership_(membership),
      label_(std::move(label)),
      key_(key),
      sequence_(first_sequence) {
  memory_.rank = membership_.rank;
  memory_.members = membership_.members;
  memory_.pages.assign(membership_.members.size(), nullptr);
  memory_.segment = around_.host->segment;
  for (const int member : membership_.members)
    memory_.processes.push_back(around_.host->peers[static_cast<size_t>(member)].info.pid);
  memory_.foreign = around_.host->foreign.allowed;
  memory_.prefers_foreign = around_.host->foreign.preferred;
  memory_.demands_foreign = around_.host->foreign.demanded;
  memory_.abort = membership_.abort;
  std::byte* page = around_.arena->allocate(sizeof(StreamPage) + staging_bytes(memory_.size()));
  memory_.pages[static_cast<size_t>(memory_.rank)] = new (page) StreamPage(sequence_);
  memory_.segment->publish(around_.host->rank, key_, *memory_.segment->offset_of(page, 1));
}

Stream::~Stream() {
  // The page itself is given back when all peers have closed theirs (Engine::sweep).
  memory_.segment->close(around_.host->rank, key_);
}

ClosedPage Stream::leave_behind() const {
  ClosedPage page{key_, reinterpret_cast<std::byte*>(&memory_.mine()), {}};
  for (size_t r = 0; r < memory_.pages.size(); ++r)
    if (static_cast<int>(r) != memory_.rank)
      page.readers.push_back({memory_.members[r], memory_.pages[r] != nullptr});
  return page;
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
    const Progress progress = guarded_advance(until);
    if (progress == Progress::idle) return moved ? Progress::moved : Progress::idle;
    moved = true;
    if (progress == Progress::finished && phase_ == Phase::resting) continue;
    if (progress == Progress::moved && now() >= until) return Progress::moved;
  }
}

Progress Stream::guarded_advance(TimePoint until) {
  try {
    if (phase_ != Phase::leaving && membership_.detector->failed()) {
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
      if (!open_pages() || held_back()) return Progress::idle;
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

/// One of a bundle whose first operation was refused. It takes no number: on no rank does it.
bool Stream::drop_refused() {
  const std::shared_ptr<Bundle>& bundle = operation().bundle;
  if (!bundle || !bundle->refused()) return false;
  queue_.front()->error = bundle->refused();
  std::shared_ptr<Request> request = std::move(queue_.front());
  queue_.pop_front();
  request->finished.store(true, std::memory_order_release);  // partner: Handle::done
  finished_.push_back(std::move(request));
  return true;
}

void Stream::begin() {
  ++sequence_;
  held_since_ = TimePoint{};
  started_ = TimePoint{};  // stamped by the first look around: most operations end before it
  idle_looks_ = 0;
  backend_ = nullptr;
  enter(Phase::opening);
}

/// Peers open the stream when they come to it; until then their pages are not to be found.
bool Stream::open_pages() {
  if (pages_open_) return true;
  pages_open_ = true;
  for (size_t r = 0; r < memory_.pages.size(); ++r) {
    if (memory_.pages[r] != nullptr) continue;
    const auto offset = memory_.segment->find(memory_.members[r], key_);
    if (offset)
      memory_.pages[r] = std::launder(reinterpret_cast<StreamPage*>(memory_.segment->at(*offset)));
    else
      pages_open_ = false;  // the others are looked for nevertheless: waiting_for() names the late
  }
  return pages_open_;
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
  const Operation& o = operation();
  memory_.ticket = progress(sequence_, o.hash != 0 ? o.hash : hash_of(o));
  backend_ = &backend_for(o);
  backend_->start(o, sequence_);
  fault_point("stream.post");
  memory_.mine().entry.posted.store(memory_.ticket, std::memory_order_release);
  enter(backend_->agrees_in_data() ? Phase::running : Phase::agreeing);
}

/// While data that would bring the agreement do not come.
bool Stream::sees_difference() {
  if (++idle_looks_ < kLooksBetweenPosts) return false;
  idle_looks_ = 0;
  return compare_posts(memory_) == Posts::different;
}

Progress Stream::agree() {
  switch (compare_posts(memory_)) {
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
    finish(std::nullopt);
  } else if (progress == Progress::idle && backend_->agrees_in_data() && sees_difference()) {
    backend_->abort();
    enter(Phase::describing);
    return Progress::moved;
  }
  return progress;
}

void Stream::finish(std::optional<Error> error) {
  publish(memory_.mine().completed, progress(sequence_, 0));
  const std::string_view path = backend_ != nullptr ? backend_->way() : "";
  // NOLINTNEXTLINE(bugprone-suspicious-stringview-data-usage): names are literals
  last_path_.store(path.data(), std::memory_order_relaxed);
  queue_.front()->error = std::move(error);
  if (logs(LogLevel::debug))
    log(LogLevel::debug, title() + (queue_.front()->error ? " failed" : " went by ") +
                             std::string(queue_.front()->error ? "" : path));
  enter(Phase::resting);
  std::shared_ptr<Request> request = std::move(queue_.front());
  queue_.pop_front();
  request->finished.store(true, std::memory_order_release);  // partner: Handle::done
  finished_.push_back(std::move(request));
  backend_ = nullptr;
}

// ---- the ranks disagree: everybody shows what it has started, and the operation is refused ----

Progress Stream::describe_mine() {
  Descriptor mine = farandole::describe(operation());
  show_arrays(mine);
  memory_.mine().descriptor = mine;
  publish(memory_.mine().described, progress(sequence_, 0));
  enter(Phase::comparing);
  return Progress::moved;
}

/// As many as there are: they do not fit into the page.
void Stream::show_arrays(Descriptor& descriptor) {
  const std::shared_ptr<Bundle>& bundle = operation().bundle;
  if (!bundle || bundle->arrays().empty()) return;
  const size_t bytes = bundle->arrays().size() * sizeof(BundledArray);
  shown_arrays_ = around_.arena->allocate(bytes);
  std::memcpy(shown_arrays_, bundle->arrays().data(), bytes);
  descriptor.arrays_at = *memory_.segment->offset_of(shown_arrays_, bytes);
}

Shown Stream::shown_by(int r) const {
  Shown shown{memory_.page(r).descriptor, {}};
  if (shown.descriptor.arrays_at == 0) return shown;
  shown.arrays.resize(shown.descriptor.arrays);
  std::memcpy(shown.arrays.data(), memory_.segment->at(shown.descriptor.arrays_at),
              shown.arrays.size() * sizeof(BundledArray));
  return shown;
}

Progress Stream::compare_all() {
  const uint64_t target = progress(sequence_, 0);
  StreamPage& mine = memory_.mine();
  if (!reached(mine.compared, target)) {
    for (int r = 0; r < memory_.size(); ++r)
      if (!reached(memory_.page(r).described, target)) return Progress::idle;
    std::vector<Shown> all;
    for (int r = 0; r < memory_.size(); ++r) all.push_back(shown_by(r));
    queue_.front()->error = disagreement(all, memory_.members);
    if (!queue_.front()->error)
      throw Error(ErrorCode::internal,
                  "ranks disagree on " + title() + ", but what they started looks the same");
    publish(mine.compared, target);
    return Progress::moved;
  }
  for (int r = 0; r < memory_.size(); ++r)  // nobody may overwrite what another still reads
    if (!reached(memory_.page(r).compared, target)) return Progress::idle;
  if (shown_arrays_ != nullptr) around_.arena->release(std::exchange(shown_arrays_, nullptr));
  if (const auto& bundle = operation().bundle) bundle->refuse(*queue_.front()->error);
  finish(std::move(queue_.front()->error));
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
    StreamPage* page = memory_.pages[static_cast<size_t>(r)];
    if (r == memory_.rank || page == nullptr) continue;
    if (page->inside.value.load(std::memory_order_seq_cst) == 0) continue;
    const int world_rank = memory_.members[static_cast<size_t>(r)];
    if ((*around_.dead)[static_cast<size_t>(world_rank)]) continue;
    out = false;
    const HostPeer& peer = around_.host->peers[static_cast<size_t>(world_rank)];
    if (now() - leaving_since_ < kInsidePatience || !peer.process) continue;
    log(LogLevel::error, "rank " + std::to_string(world_rank) + " (pid " +
                             std::to_string(peer.info.pid) + ", " + process_state(peer.info.pid) +
                             ") is inside this rank's memory after its group failed; killing it");
    ::syscall(SYS_pidfd_send_signal, peer.process.get(), SIGKILL, nullptr, 0);
    leaving_since_ = now();
  }
  return out;
}

Progress Stream::leave() {
  std::optional<Error> verdict = membership_.detector->verdict();
  if (!verdict && now() - leaving_since_ > kReportPatience)
    verdict = Error(ErrorCode::aborted, title() +
                                            " failed, but the rank that reported why did not "
                                            "finish its report");
  if (!verdict || !others_are_out()) return Progress::idle;
  finish(std::move(verdict));
  return Progress::finished;
}

}  // namespace farandole
