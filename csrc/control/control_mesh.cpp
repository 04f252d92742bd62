#include "control/control_mesh.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/fixed_text.h"
#include "base/log.h"
#include "base/quiet_thread.h"
#include "control/control_messages.h"
#include "control/control_tags.h"
#include "control/farewell.h"

namespace farandole {
namespace {

constexpr auto kLastWords = std::chrono::milliseconds(500);
constexpr auto kSlept = std::chrono::seconds(1);  // this thread itself, which then knows nothing
constexpr auto kStall = std::chrono::milliseconds(100);  // longer than a turn takes

/// The error of a rank that cannot be reached, with the rank's host and pid.
Error of_host(const Error& error, const Host& host, int rank) {
  Context where = host.about(rank, error.where());
  where.evidence += "; rank " + std::to_string(where.rank) + " is pid " +
                    std::to_string(where.pid) + " on " + where.host;
  return Error(error.code(), error.verdict(), std::move(where), error.advice());
}

}  // namespace

ControlMesh::ControlMesh(std::shared_ptr<Segment> segment, int rank, std::vector<bool> here,
                         std::shared_ptr<TcpDoor> door, ControlMeshOptions options)
    : segment_(std::move(segment)),
      rank_(rank),
      door_(std::move(door)),
      options_(options),
      epoll_(checked(::epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      wake_(std::make_shared<Fd>(make_event_fd())) {
  open_more_files();  // one for each rank, and more for data
  for (int r = 0; r < static_cast<int>(here.size()); ++r) {
    peers_.push_back(std::make_unique<Peer>());
    peers_.back()->here = here[static_cast<size_t>(r)];
    if (r != rank_) peers_.back()->arrival = door_->await(lane_with(r));
  }
}

ControlMesh::~ControlMesh() {
  stopping_.store(true);
  ring(wake_->get());
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
    while (!host.share_one(static_cast<int>(other.host), r)) ++other.host;
    if (!other.arrival) continue;
    other.open = true;
    begin_on(r, std::move(std::exchange(other.arrival, nullptr)->connection));
    await_next(r);
  }
  watch(epoll_.get(), wake_->get(), EPOLLIN, kWake);
  watch_ends();
  awake_ = last_turn_ = now();
  thread_ = start_quiet_thread("farandole-ctl", [this] { main(); });
}

void ControlMesh::close_descriptors() {
  door_->close_descriptors();  // a child that keeps it open answers for a rank that is dead
  epoll_.reset();
  wake_->reset();
  launcher_.reset();
  clock_.close();
  doorbell_.reset();
  for (const auto& other : peers_) {
    other->line.close_descriptor();
    if (other->broken) other->broken->knock.reset();
    other->process.reset();
  }
}

// ---- the thread ----

void ControlMesh::main() {
  while (!stopping_.load()) {
    const TimePoint when = last_turn_ = now();
    if (when >= next_beat_) {
      next_beat_ = when + kBeat;
      for (int r = 0; r < static_cast<int>(peers_.size()); ++r) watch_traffic(r);
      for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
        if (is_silent(r)) lose(r, Loss::silent);
        if (is_stuck(r)) begin_break(r);
      }
      const Lock lock(mutex_);
      for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
        if (peer(r).open && !peer(r).line.has_unsent()) send_beat(r);
      tell_lost_sight();
      watch_stops();
    }
    flush_all();
    bool more = look(time_to_next());
    while (more) more = look(0);
    mend();
    settle_reports();
  }
  settle_reports();
  // Messages that are still queued are sent, as far as the other ranks take them.
  const Deadline until = Deadline::after(kLastWords);
  for (;;) {
    flush_all();
    {
      const Lock lock(mutex_);
      if (!has_outgoing() || until.passed(now())) return;
    }
    look(1);
    mend();
  }
}

/// In milliseconds.
int ControlMesh::time_to_next() const {
  const Duration left = std::min(next_beat_, mend_until_) - now();
  return static_cast<int>(
      std::max<int64_t>(0, std::chrono::ceil<std::chrono::milliseconds>(left).count()));
}

/// True when there may be more to be read at once.
bool ControlMesh::look(int timeout_ms) {
  constexpr int kAtOnce = 64;
  epoll_event events[kAtOnce];
  const TimePoint before = now();
  forgive(before - awake_);
  const int n = ::epoll_wait(epoll_.get(), events, kAtOnce, timeout_ms);
  awake_ = now();
  forgive(awake_ - before - std::chrono::milliseconds(timeout_ms));
  for (int i = 0; i < n; ++i) {
    const uint64_t tag = events[i].data.u64;
    if (tag == kWake)
      silence(wake_->get());
    else if (tag == kLauncher)
      hear_launcher();
    else if (tag >= kKnock)
      hear_knock(static_cast<int>(tag - kKnock));
    else if (tag >= kProcess)
      note_end(static_cast<int>(tag - kProcess));
    else
      read(static_cast<int>(tag));
  }
  return n == kAtOnce;
}

/// A thread that stood still has not listened, so it must not count others as silent.
void ControlMesh::forgive(Duration stall) {
  const TimePoint when = now();
  for (int r = 0; stall > kStall && r < static_cast<int>(peers_.size()); ++r) {
    Peer& other = peer(r);
    if (other.broken) other.broken->since += stall;
    if (stall < kSlept) continue;
    if (other.distrust.empty()) other.heard = other.acknowledged = other.answered = when;
    note_heard(r);
  }
}

bool ControlMesh::has_outgoing() const {
  return std::ranges::any_of(peers_, [](const auto& p) { return p->open && p->line.has_unsent(); });
}

void ControlMesh::flush_all() {
  std::vector<int> broken;
  {
    const Lock lock(mutex_);
    for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
      if (peer(r).line.is_open() && !peer(r).line.flush()) broken.push_back(r);
  }
  for (const int r : broken) read(r);  // messages that it sent before count
}

void ControlMesh::read(int rank) {
  Peer& from = peer(rank);
  while (from.line.is_open()) {
    const ssize_t count = from.line.receive();
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return;
    if (count <= 0) return note_break(rank, count < 0 ? errno : from.line.error());
    if (!distrust(rank).empty()) {
      from.line.forget();
      continue;
    }
    from.heard = now();
    try {
      taken("a control message", rank, rank_, [&] { take_messages(rank); });
    } catch (const Error& error) {
      stop_reading(rank, error);
    }
  }
}

std::string ControlMesh::distrust(int rank) const {
  const Lock lock(mutex_);
  return peer(rank).distrust;
}

/// The rank takes part in nothing more. Its connection stays, and it is still told how things end:
/// else it would take this rank for dead.
void ControlMesh::stop_reading(int rank, const Error& error) {
  Peer& odd = peer(rank);
  odd.line.forget();
  odd.heard = TimePoint{};
  odd.finished.store(true, std::memory_order_release);
  {
    const Lock lock(mutex_);
    odd.distrust = error.verdict();
    odd.line.keep_no_more();
    tell_lost_sight();
  }
  odd.lost.store(true, std::memory_order_release);
  ring(doorbell_.get());
}

void ControlMesh::take_messages(int rank) {
  while (const auto message = peer(rank).line.next()) {
    WireReader from(*message);
    take(rank, from);
    from.end();
  }
}

void ControlMesh::take(int rank, WireReader& from) {
  switch (from.get_enum(ControlFrame::death)) {
    case ControlFrame::resume:
      return take_resume(rank, from);
    case ControlFrame::beat:
      return take_beat(rank, from);
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
    case ControlFrame::stops:
      return take_stops(rank, from);
    case ControlFrame::death:
      return take_death(from);
  }
}

// ---- who is there ----

void ControlMesh::take_resume(int rank, WireReader& from) {
  const auto told = get_message<ResumeMessage>(from);
  {
    const Lock lock(mutex_);
    peer(rank).line.resume(told.taken);
  }
  note_mended(rank);
}

void ControlMesh::take_beat(int rank, WireReader& from) {
  const auto told = get_message<BeatMessage>(from);
  const Lock lock(mutex_);
  peer(rank).line.acknowledge(told.taken);
}

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

/// Stores the rank's progress before it marks the rank as finished, which makes that final.
void ControlMesh::take_state(int rank, WireReader& from) {
  auto told = get_message<StateMessage>(from);
  if (told.state > static_cast<uint64_t>(RankState::gone) ||
      told.farewell > static_cast<uint64_t>(FarewellState::known))
    WireReader::malformed("a state of " + std::to_string(told.state));
  {
    const Lock lock(mutex_);
    for (ProgressOfStream& stream : told.streams)
      answers_[{stream.key, rank}].progress = std::move(stream.progress);
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

// ---- with mutex_ held ----

void ControlMesh::send(int rank, FrameWriter frame) {
  peer(rank).line.send(std::move(frame));
  ring(wake_->get());
}

/// Says that this rank is there. A beat to rank 0 on another host also asks for the time there.
void ControlMesh::send_beat(int rank) {
  const bool asks = rank == 0 && !peer(0).here;
  const uint64_t taken = peer(rank).line.taken();
  send(rank, asks ? frame_of<PingMessage>(taken, nanoseconds_now()) : frame_of<BeatMessage>(taken));
}

}  // namespace farandole
