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
#include "control/control_messages.h"
#include "control/control_tags.h"
#include "control/farewell.h"

namespace farandole {
namespace {

constexpr uint64_t kControlKey = 0x636f'6e74'726f'6c21;  // of no stream: stream_key() is odd, too,
constexpr int kControlLane = kMostTcpLanes - 1;          // but opens only a backend's few lanes
constexpr auto kBeat = std::chrono::milliseconds(250);
// For a host that answers nothing, not even as a kernel does. The beat before it takes its time,
// too: all others know within 2 s.
constexpr int kVanishedMs = 1500;
constexpr size_t kLargestFrame = 1 << 20;
constexpr auto kLastWords = std::chrono::milliseconds(500);
constexpr auto kSlept = std::chrono::seconds(1);  // this thread itself, which then knows nothing

bool means_silence(int error) {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH ||
         error == EHOSTDOWN || error == ENETDOWN;
}

/// Why that rank cannot be reached, with where it is.
Error of_host(const Error& error, const Host& host, int rank) {
  Context where = host.about(rank, error.where());
  where.evidence += "; rank " + std::to_string(where.rank) + " is pid " +
                    std::to_string(where.pid) + " on " + where.host;
  return Error(error.code(), error.verdict(), std::move(where), error.advice());
}

}  // namespace

ControlMesh::ControlMesh(std::shared_ptr<Segment> segment, int rank, std::vector<bool> here,
                         std::shared_ptr<TcpDoor> door, bool hides)
    : segment_(std::move(segment)),
      rank_(rank),
      door_(std::move(door)),
      hides_(hides),
      epoll_(checked(::epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      wake_(make_event_fd()) {
  open_more_files();  // one for each rank, and more for data
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

void ControlMesh::meet(const Host& host, Deadline deadline,
                       const std::function<void()>& interrupted) {
  doorbell_ = copy_of(host.peers[static_cast<size_t>(rank_)].doorbell);
  for (int looks = 1;; ++looks) {
    std::vector<int> missing;
    for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
      const auto& arrival = peer(r).arrival;
      if (!arrival) continue;
      if (!arrival->here.load(std::memory_order_acquire))
        missing.push_back(r);
      else if (arrival->error)
        throw arrival->error->where().rank == rank_ ? Error(*arrival->error)
                                                    : of_host(*arrival->error, host, r);
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
    const HostPeer& known = host.peers[static_cast<size_t>(r)];
    if (r != rank_ && known.process) other.process = copy_of(known.process);
    other.pid = known.info.pid;
    if (!other.arrival) continue;
    other.socket = std::move(other.arrival->connection.socket);
    other.seals.emplace(other.arrival->connection.keys, hides_);
    other.arrival.reset();
    other.open = true;
    other.heard = now();
    ::setsockopt(other.socket.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &kVanishedMs,
                 sizeof kVanishedMs);
    watch(epoll_.get(), other.socket.get(), EPOLLIN, static_cast<uint64_t>(r));
  }
  watch(epoll_.get(), wake_.get(), EPOLLIN, kWake);
  watch_ends();
  last_turn_ = now();
  thread_ = start_quiet_thread("farandole-ctl", [this] { main(); });
}

void ControlMesh::close_descriptors() {
  epoll_.reset();
  wake_.reset();
  launcher_.reset();
  clock_.close();
  doorbell_.reset();
  for (const auto& other : peers_) {
    other->socket.reset();
    other->process.reset();
  }
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
      tell_lost_sight();
    }
    flush_all();
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next_beat_ - now()).count();
    bool more = look(static_cast<int>(std::max<int64_t>(0, left)));
    while (more) more = look(0);
    forgive_silence();
    settle_reports();
  }
  settle_reports();
  // What was to be told is told, as far as the others take it.
  const Deadline until = Deadline::after(kLastWords);
  for (;;) {
    flush_all();
    const Lock lock(mutex_);
    if (!has_outgoing() || until.passed(now())) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

/// True when there may be more to be read at once.
bool ControlMesh::look(int timeout_ms) {
  constexpr int kAtOnce = 64;
  epoll_event events[kAtOnce];
  const int n = ::epoll_wait(epoll_.get(), events, kAtOnce, timeout_ms);
  for (int i = 0; i < n; ++i) {
    const uint64_t tag = events[i].data.u64;
    if (tag == kWake)
      silence(wake_.get());
    else if (tag == kLauncher)
      hear_launcher();
    else if (tag >= kProcess)
      note_end(static_cast<int>(tag - kProcess));
    else
      read(static_cast<int>(tag));
  }
  return n == kAtOnce;
}

/// Who has stood still has not listened.
void ControlMesh::forgive_silence() {
  const TimePoint when = now();
  if (when - last_turn_ > kSlept)
    for (const auto& other : peers_)
      if (other->distrust.empty()) other->heard = when;
  last_turn_ = when;
}

bool ControlMesh::has_outgoing() const {
  return std::ranges::any_of(peers_, [](const auto& p) { return p->open && !p->outgoing.empty(); });
}

/// False: the connection is broken.
bool ControlMesh::flush(Peer& to) {
  while (!to.outgoing.empty()) {
    const std::vector<std::byte>& front = to.outgoing.front();
    const ssize_t count = ::send(to.socket.get(), front.data() + to.sent, front.size() - to.sent,
                                 MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return true;  // the next beat tries again
    if (count < 0) {
      to.error = errno;
      return false;
    }
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
      lose(rank, count < 0 ? errno : from.error);
      return;
    }
    if (!distrust(rank).empty()) continue;
    from.heard = now();
    from.coming.insert(from.coming.end(), chunk, chunk + count);
    try {
      taken("a control message", rank, rank_, [&] { take_frames(rank); });
    } catch (const Error& error) {
      stop_reading(rank, error);
    }
  }
}

std::string ControlMesh::distrust(int rank) const {
  const Lock lock(mutex_);
  return peer(rank).distrust;
}

/// It takes part in nothing more. It is still told how things end: else it would take this rank for
/// dead, whose connection has ended.
void ControlMesh::stop_reading(int rank, const Error& error) {
  Peer& odd = peer(rank);
  odd.coming.clear();
  odd.heard = TimePoint{};
  odd.finished.store(true, std::memory_order_release);
  {
    const Lock lock(mutex_);
    odd.distrust = error.verdict();
    tell_lost_sight();
  }
  odd.lost.store(true, std::memory_order_release);
  ring(doorbell_.get());
}

void ControlMesh::take_frames(int rank) {
  std::vector<std::byte>& coming = peer(rank).coming;
  size_t at = 0;
  uint32_t length = 0;
  while (coming.size() - at >= sizeof length) {
    std::memcpy(&length, coming.data() + at, sizeof length);
    if (length > kLargestFrame)
      WireReader::malformed("a control message of " + std::to_string(length) + " bytes");
    const size_t whole = length + Seals::kBytes;
    if (coming.size() - at - sizeof length < whole) break;
    const auto sealed = std::span(coming).subspan(at + sizeof length, whole);
    if (!peer(rank).seals->in.opens(sealed)) WireReader::malformed(kBrokenSeal);
    WireReader from(sealed.first(length));
    take(rank, from);
    from.end();
    at += sizeof length + whole;
  }
  coming.erase(coming.begin(), coming.begin() + static_cast<std::ptrdiff_t>(at));
}

void ControlMesh::take(int rank, WireReader& from) {
  switch (from.get_enum(ControlFrame::death)) {
    case ControlFrame::beat:
      return;
    case ControlFrame::ping:
      return answer_ping(rank, from);
    case ControlFrame::pong:
      return take_pong(from);
    case ControlFrame::state:
      return take_state(rank, from);
    case ControlFrame::report:
      return take_report(rank, from);
    case ControlFrame::verdict:
      return take_verdict(rank, from);
    case ControlFrame::question:
      return answer_question(rank, from);
    case ControlFrame::answer:
      return take_answer(rank, from);
    case ControlFrame::look:
      return answer_look(rank, from);
    case ControlFrame::waits:
      return take_waits_of(rank, from);
    case ControlFrame::deadlock:
      return take_deadlock(from);
    case ControlFrame::lost_sight:
      return take_lost_sight(rank, from);
    case ControlFrame::death:
      return take_death(from);
  }
}

// ---- who is there ----

FrameWriter ControlMesh::state_frame() const {
  const RankPage& page = segment_->page(rank_);
  StateMessage message;
  message.state = page.state.value.load(std::memory_order_acquire);
  message.farewell = page.farewell.state.load(std::memory_order_acquire);
  message.exit_code = page.farewell.exit_code;
  message.what = text_in(page.farewell.what);
  message.place = text_in(page.farewell.place);
  for (const auto& [key, progress] : streams_) message.streams.push_back({key, progress});
  FrameWriter frame;
  frame.put(StateMessage::kTag);
  put_message(frame, message);
  return frame;
}

void ControlMesh::tell_state() {
  const Lock lock(mutex_);
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
    if (peer(r).open) send(r, state_frame());
  if (segment_->state_of(rank_) >= RankState::leaving) close_ear();  // another world's, if any
}

void ControlMesh::tell_last_state() {
  tell_state();
  const Deadline until = Deadline::after(kLastWords);
  while (!until.passed(now())) {  // its thread sends it, and finds out who is gone
    {
      const Lock lock(mutex_);
      if (!has_outgoing()) return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

/// What it has done is known before it is known that it does nothing more.
void ControlMesh::take_state(int rank, WireReader& from) {
  auto told = get_message<StateMessage>(from);
  if (told.state > static_cast<uint64_t>(RankState::gone) ||
      told.farewell > static_cast<uint64_t>(FarewellState::known))
    WireReader::malformed("a state of " + std::to_string(told.state));
  {
    const Lock lock(mutex_);
    for (ProgressOfStream& stream : told.streams)
      answers_[{stream.key, rank}] = std::move(stream.progress);
  }
  const bool last = told.state >= static_cast<uint64_t>(RankState::leaving) ||
                    told.farewell == static_cast<uint64_t>(FarewellState::known);
  peer(rank).finished.store(last, std::memory_order_release);
  if (peer(rank).here) {  // its page says the rest
    ring(doorbell_.get());
    return;
  }
  RankPage& page = segment_->page(rank);
  Farewell& farewell = page.farewell;
  const uint64_t before = farewell.state.load(std::memory_order_relaxed);
  if (before == static_cast<uint64_t>(FarewellState::none))
    farewell.since = now().time_since_epoch().count();  // by our clock
  if (before != static_cast<uint64_t>(FarewellState::known)) {
    farewell.exit_code = told.exit_code;
    copy_cut(told.what, farewell.what);
    copy_cut(told.place, farewell.place);
  }
  farewell.state.store(told.farewell, std::memory_order_release);
  page.state.value.store(told.state, std::memory_order_release);
  ring(doorbell_.get());
}

void ControlMesh::lose(int rank, int error) {
  Peer& gone = peer(rank);
  // Whoever was to say last of all how it ends has ended before.
  const bool left = segment_->state_of(rank) >= RankState::leaving && !is_ending(*segment_, rank);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, gone.socket.get(), nullptr);
  if (!gone.here && left) segment_->show_state(rank, RankState::gone);
  gone.finished.store(true, std::memory_order_release);
  const bool silent = !left && means_silence(error);
  gone.silent.store(silent, std::memory_order_release);  // before it is known that it is lost
  gone.lost.store(!left, std::memory_order_release);
  {
    const Lock lock(mutex_);
    gone.open = false;
    gone.outgoing.clear();
    gone.socket.reset();
    if (silent) tell_lost_sight();
  }
  ring(doorbell_.get());
}

// ---- with mutex_ held ----

void ControlMesh::send(int rank, FrameWriter frame) {
  Peer& to = peer(rank);
  to.seals->out.close(to.outgoing.emplace_back(frame.take_frame()));
  ring(wake_.get());
}

/// That this rank is there. Of rank 0's clock it learns by that, if its host has another one.
void ControlMesh::send_beat(int rank) {
  const bool asks = rank == 0 && !peer(0).here;
  send(rank, asks ? frame_of<PingMessage>(nanoseconds_now()) : frame_of<BeatMessage>());
}

}  // namespace farandole
