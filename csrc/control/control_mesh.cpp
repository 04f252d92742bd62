#include "control/control_mesh.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/fixed_text.h"
#include "base/log.h"
#include "base/quiet_thread.h"
#include "control/farewell.h"
#include "control/wait_watch.h"
#include "control/waits_elsewhere.h"

namespace farandole {
namespace {

constexpr uint64_t kControlKey = 0x636f'6e74'726f'6c21;  // of no stream: stream_key() is odd, too,
constexpr int kControlLane = kMostTcpLanes - 1;          // but opens only a backend's few lanes
constexpr auto kBeat = std::chrono::milliseconds(250);
constexpr int kVanishedMs = 2000;  // for a host that answers nothing, not even as a kernel does
constexpr size_t kLargestFrame = 1 << 20;
constexpr size_t kMostHoldups = 4;
constexpr auto kLastWords = std::chrono::milliseconds(500);

constexpr uint64_t kWake = ~uint64_t{0};

void put_progress(WireWriter& to, const StreamProgress& progress) {
  to.put(progress.begun);
  to.put(progress.completed);
  const size_t count = std::min(progress.holdups.size(), kMostHoldups);
  to.put_list(std::span<const int>(progress.holdups).first(count));
}

StreamProgress progress_in(WireReader& from) {
  StreamProgress progress;
  progress.begun = from.get<uint32_t>();
  progress.completed = from.get<uint32_t>();
  progress.holdups = from.get_list<int>(kMostHoldups);
  return progress;
}

}  // namespace

ControlMesh::ControlMesh(std::shared_ptr<Segment> segment, int rank, std::vector<bool> here,
                         std::shared_ptr<TcpDoor> door)
    : segment_(std::move(segment)),
      rank_(rank),
      door_(std::move(door)),
      epoll_(checked(::epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      wake_(make_event_fd()) {
  for (int r = 0; r < static_cast<int>(here.size()); ++r) {
    peers_.push_back(std::make_unique<Peer>());
    peers_.back()->here = here[static_cast<size_t>(r)];
    if (r != rank_)
      peers_.back()->arrival =
          door_->await({std::min(r, rank_), std::max(r, rank_), kControlKey, kControlLane});
  }
}

ControlMesh::~ControlMesh() {
  stopping_.store(true);
  ring(wake_.get());
  if (thread_.joinable()) thread_.join();
}

void ControlMesh::meet(int doorbell, Deadline deadline, const std::function<void()>& interrupted) {
  doorbell_ = doorbell;
  for (int looks = 1;; ++looks) {
    std::vector<int> missing;
    for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
      const auto& arrival = peer(r).arrival;
      if (!arrival) continue;
      if (!arrival->here.load(std::memory_order_acquire))
        missing.push_back(r);
      else if (arrival->error)
        throw Error(*arrival->error);
    }
    if (missing.empty()) break;
    if (deadline.passed(now())) {
      Context where;
      where.values = {{"missing", missing}};
      throw Error(ErrorCode::rendezvous,
                  "ranks on other hosts did not connect: " + describe_ranks(missing), where,
                  "look at the logs of these ranks; check that hosts reach each other by TCP at "
                  "the addresses they offer (FARANDOLE_IFACE)");
    }
    if (looks % 100 == 0) interrupted();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
    Peer& other = peer(r);
    if (!other.arrival) continue;
    other.socket = std::move(other.arrival->socket);
    other.arrival.reset();
    other.open = true;
    ::setsockopt(other.socket.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &kVanishedMs,
                 sizeof kVanishedMs);
    watch(epoll_.get(), other.socket.get(), EPOLLIN, static_cast<uint64_t>(r));
  }
  watch(epoll_.get(), wake_.get(), EPOLLIN, kWake);
  thread_ = start_quiet_thread("farandole-ctl", [this] { main(); });
}

void ControlMesh::close_descriptors() {
  epoll_.reset();
  wake_.reset();
  clock_.close();
  for (const auto& other : peers_) other->socket.reset();
}

// ---- the thread ----

void ControlMesh::main() {
  while (!stopping_.load()) {
    const TimePoint when = now();
    if (when >= next_beat_) {
      next_beat_ = when + kBeat;
      const Lock lock(mutex_);
      for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
        if (peer(r).open && peer(r).outgoing.empty()) send_beat(r);
    }
    flush_all();
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next_beat_ - now()).count();
    look(static_cast<int>(std::max<int64_t>(0, left)));
  }
  // What was to be told is told, as far as the others take it.
  const Deadline until = Deadline::after(kLastWords);
  for (;;) {
    flush_all();
    const Lock lock(mutex_);
    const bool all =
        std::ranges::all_of(peers_, [](const auto& p) { return !p->open || p->outgoing.empty(); });
    if (all || until.passed(now())) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void ControlMesh::look(int timeout_ms) {
  epoll_event events[64];
  const int n = ::epoll_wait(epoll_.get(), events, 64, timeout_ms);
  for (int i = 0; i < n; ++i) {
    const uint64_t tag = events[i].data.u64;
    if (tag == kWake)
      silence(wake_.get());
    else
      read(static_cast<int>(tag));
  }
}

/// False: the connection is broken.
bool ControlMesh::flush(Peer& to) {
  while (!to.outgoing.empty()) {
    const std::vector<std::byte>& front = to.outgoing.front();
    const ssize_t count = ::send(to.socket.get(), front.data() + to.sent, front.size() - to.sent,
                                 MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0) return errno == EAGAIN || errno == EINTR;  // the next beat tries again
    to.sent += static_cast<size_t>(count);
    if (to.sent < front.size()) continue;
    to.outgoing.pop_front();
    to.sent = 0;
  }
  return true;
}

void ControlMesh::flush_all() {
  std::vector<int> broken;
  {
    const Lock lock(mutex_);
    for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
      if (peer(r).open && !flush(peer(r))) broken.push_back(r);
  }
  for (const int r : broken) read(r);  // what it has said before counts
}

void ControlMesh::read(int rank) {
  Peer& from = peer(rank);
  if (!from.socket) return;
  for (;;) {
    std::byte chunk[4096];
    const ssize_t count = ::recv(from.socket.get(), chunk, sizeof chunk, MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return;
    if (count <= 0) {
      lose(rank);
      return;
    }
    from.coming.insert(from.coming.end(), chunk, chunk + count);
    try {
      take_frames(rank);
    } catch (const Error& error) {
      log(LogLevel::error, "rank " + std::to_string(rank) + ": " + error.verdict());
      lose(rank);
      return;
    }
  }
}

void ControlMesh::take_frames(int rank) {
  std::vector<std::byte>& coming = peer(rank).coming;
  size_t at = 0;
  uint32_t length = 0;
  while (coming.size() - at >= sizeof length) {
    std::memcpy(&length, coming.data() + at, sizeof length);
    if (length > kLargestFrame)
      WireReader::malformed("a control message of " + std::to_string(length) + " bytes");
    if (coming.size() - at - sizeof length < length) break;
    WireReader from(std::span<const std::byte>(coming).subspan(at + sizeof length, length));
    take(rank, from);
    at += sizeof length + length;
  }
  coming.erase(coming.begin(), coming.begin() + static_cast<std::ptrdiff_t>(at));
}

void ControlMesh::take(int rank, WireReader& from) {
  const auto kind = from.get_enum(Frame::deadlock);
  if (kind == Frame::beat) return;
  if (kind == Frame::ping) return answer_ping(rank, from);
  if (kind == Frame::pong) return take_pong(from);
  if (kind == Frame::state) return take_state(rank, from);
  if (kind == Frame::look) return answer_look(rank, from);
  if (kind == Frame::waits) {
    const TimePoint asked(Duration(from.get<int64_t>()));
    return take_waits(from, asked, segment_->page(rank).board);
  }
  if (kind == Frame::deadlock) {
    const auto stands = from.get<int64_t>();
    put_verdict(segment_->page(rank_).board, decode_record(from), stands);
    return ring(doorbell_);
  }
  const Lock lock(mutex_);
  const auto key = from.get<uint64_t>();
  if (kind == Frame::report) {
    auto members = from.get_list<int>(peers_.size());
    judge({key, std::move(members), decode_record(from), rank_});
  } else if (kind == Frame::verdict) {
    verdicts_.try_emplace(key, decode_record(from));
    deliver(key);
  } else if (kind == Frame::question) {
    const auto mine = streams_.find(key);
    WireWriter answer;
    answer.put(Frame::answer);
    answer.put(key);
    answer.put(static_cast<uint8_t>(mine != streams_.end()));
    if (mine != streams_.end()) put_progress(answer, mine->second);
    send(rank, std::move(answer));
  } else if (from.get<uint8_t>() != 0) {
    answers_[{key, rank}] = progress_in(from);
    ring(doorbell_);
  }
}

// ---- who is there ----

WireWriter ControlMesh::state_frame() const {
  const RankPage& page = segment_->page(rank_);
  WireWriter frame;
  frame.put(Frame::state);
  frame.put(page.state.value.load(std::memory_order_acquire));
  frame.put(page.farewell.state.load(std::memory_order_acquire));
  frame.put(page.farewell.exit_code);
  frame.put_text(text_in(page.farewell.what));
  frame.put_text(text_in(page.farewell.place));
  frame.put(static_cast<uint32_t>(streams_.size()));
  for (const auto& [key, progress] : streams_) {
    frame.put(key);
    put_progress(frame, progress);
  }
  return frame;
}

void ControlMesh::tell_state() {
  const Lock lock(mutex_);
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
    if (peer(r).open) send(r, state_frame());
}

/// What it has done is known before it is known that it does nothing more.
void ControlMesh::take_state(int rank, WireReader& from) {
  const auto state = from.get<uint64_t>();
  const auto farewell_state = from.get<uint64_t>();
  const auto exit_code = from.get<int32_t>();
  const std::string what = from.get_text(sizeof Farewell::what);
  const std::string place = from.get_text(sizeof Farewell::place);
  {
    const Lock lock(mutex_);
    for (auto streams = from.get<uint32_t>(); streams > 0; --streams) {
      const auto key = from.get<uint64_t>();
      answers_[{key, rank}] = progress_in(from);
    }
  }
  const bool last = state >= static_cast<uint64_t>(RankState::leaving) ||
                    farewell_state == static_cast<uint64_t>(FarewellState::known);
  peer(rank).finished.store(last, std::memory_order_release);
  if (peer(rank).here) {  // its page says the rest
    ring(doorbell_);
    return;
  }
  RankPage& page = segment_->page(rank);
  Farewell& farewell = page.farewell;
  if (farewell.state.load(std::memory_order_relaxed) == 0) {
    farewell.exit_code = exit_code;
    farewell.since = now().time_since_epoch().count();  // by our clock
    copy_cut(what, farewell.what);
    copy_cut(place, farewell.place);
  }
  farewell.state.store(farewell_state, std::memory_order_release);
  page.state.value.store(state, std::memory_order_release);
  ring(doorbell_);
}

void ControlMesh::lose(int rank) {
  Peer& gone = peer(rank);
  const bool left = segment_->state_of(rank) >= RankState::leaving;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, gone.socket.get(), nullptr);
  {
    const Lock lock(mutex_);
    gone.open = false;
    gone.outgoing.clear();
    gone.socket.reset();
    std::vector<Report> orphaned;
    std::erase_if(reports_, [&](const Report& report) {
      if (report.judge != rank) return false;
      orphaned.push_back(report);
      return true;
    });
    for (Report& report : orphaned) put_before_judge(std::move(report));
  }
  if (!gone.here && left) segment_->show_state(rank, RankState::gone);
  gone.finished.store(true, std::memory_order_release);
  gone.lost.store(!left, std::memory_order_release);
  ring(doorbell_);
}

// ---- with mutex_ held ----

void ControlMesh::send(int rank, WireWriter frame) {
  peer(rank).outgoing.push_back(framed(frame.take()));
  ring(wake_.get());
}

/// That this rank is there. Of rank 0's clock it learns by that, if its host has another one.
void ControlMesh::send_beat(int rank) {
  const bool asks = rank == 0 && !peer(0).here;
  WireWriter beat;
  beat.put(asks ? Frame::ping : Frame::beat);
  if (asks) beat.put(nanoseconds_now());
  send(rank, std::move(beat));
}

/// The lowest that is there.
int ControlMesh::judge_of(const std::vector<int>& members) const {
  int judge = rank_;
  for (const int member : members)
    if (peer(member).open) judge = std::min(judge, member);
  return judge;
}

void ControlMesh::put_before_judge(Report report) {
  report.judge = judge_of(report.members);
  if (report.judge == rank_) {
    judge(report);
    return;
  }
  WireWriter frame;
  frame.put(Frame::report);
  frame.put(report.key);
  frame.put_list(std::span<const int>(report.members));
  encode(report.record, frame);
  send(report.judge, std::move(frame));
  reports_.push_back(std::move(report));
}

void ControlMesh::judge(const Report& report) {
  const auto [verdict, first] = verdicts_.try_emplace(report.key, report.record);
  for (const int member : report.members) {
    if (member == rank_ || !peer(member).open) continue;
    WireWriter frame;
    frame.put(Frame::verdict);
    frame.put(report.key);
    encode(verdict->second, frame);
    send(member, std::move(frame));
  }
  deliver(report.key);
}

void ControlMesh::deliver(uint64_t key) {
  std::erase_if(reports_, [&](const Report& report) { return report.key == key; });
  const auto verdict = verdicts_.find(key);
  const auto cell = cells_.find(key);
  if (verdict == verdicts_.end() || cell == cells_.end()) return;
  FailureRecord& record = *cell->second;
  if (record.state.value.load(std::memory_order_relaxed) == 2) return;
  record.state.value.store(1, std::memory_order_seq_cst);
  record.record = verdict->second;
  record.state.value.store(2, std::memory_order_seq_cst);  // partners: failed, verdict
  ring(doorbell_);
}

// ---- any thread ----

void ControlMesh::adopt(uint64_t key, std::shared_ptr<FailureRecord> cell) {
  const Lock lock(mutex_);
  cells_[key] = std::move(cell);
  deliver(key);
}

void ControlMesh::drop(uint64_t key) {
  const Lock lock(mutex_);
  cells_.erase(key);
}

void ControlMesh::report(uint64_t key, const std::vector<int>& members, const ErrorRecord& record) {
  const Lock lock(mutex_);
  if (verdicts_.contains(key))
    deliver(key);
  else
    put_before_judge({key, members, record, rank_});
}

}  // namespace farandole
