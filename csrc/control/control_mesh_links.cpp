// Connections to other ranks: begun, broken, made again, or given up (Note [What the end of a
// connection means]). All by the mesh's thread.

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "base/log.h"
#include "control/control_mesh.h"
#include "control/control_tags.h"
#include "control/farewell.h"

namespace farandole {
namespace {

constexpr uint64_t kControlKey = 0x636f'6e74'726f'6c21;  // of no stream: stream_key() is odd, too,
constexpr int kControlLane = kMostTcpLanes - 1;          // but opens only a backend's few lanes
// All is told within half a second, and a rank that lives has taken a connection by then.
constexpr auto kMend = std::chrono::milliseconds(400);
constexpr int kMostDials = 8;

bool means_silence(int error) {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH ||
         error == EHOSTDOWN || error == ENETDOWN;
}

/// The one of a rank's addresses from which its connection comes, else the first: others may lead
/// nowhere.
std::optional<TcpAddress> chosen(const std::vector<std::byte>& shown, int socket) {
  const auto all = TcpAddress::all_from(shown);
  if (!all) return std::nullopt;
  const auto other = TcpAddress::of_peer(socket);
  const auto same = std::ranges::find_if(
      *all, [&](const TcpAddress& one) { return other && one.shares_host_with(*other); });
  return same == all->end() ? all->front() : *same;
}

}  // namespace

// ---- begun ----

TcpLane ControlMesh::lane_with(int rank) const {
  return {std::min(rank, rank_), std::max(rank, rank_), kControlKey, kControlLane};
}

void ControlMesh::begin_on(int rank, TcpConnection connection) {
  Peer& with = peer(rank);
  const Lock lock(mutex_);
  if (with.line.is_open())  // the other end has noticed first
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, with.line.socket(), nullptr);
  with.listens = chosen(door_->addresses_of(rank), connection.socket.get());
  with.line.open(std::move(connection), options_.hides);
  with.traffic = {};
  with.heard = with.acknowledged = now();
  note_heard(rank);
  with.broken.reset();
  watch(epoll_.get(), with.line.socket(), EPOLLIN, static_cast<uint64_t>(rank));
}

/// The end that listens may be the last to notice that there must be another.
void ControlMesh::await_next(int rank) {
  if (rank < rank_) peer(rank).arrival = door_->await_again(lane_with(rank), wake_);
}

// ---- broken, and made again ----

void ControlMesh::note_break(int rank, int error) {
  Peer& from = peer(rank);
  const TimePoint when = now();
  const bool left = segment_->state_of(rank) >= RankState::leaving && !is_ending(*segment_, rank);
  if (left || !distrust(rank).empty()) return lose(rank, Loss::died);
  // The other rank has given this one up, because nothing from here arrived there.
  const bool goes_unheard = when - from.acknowledged > options_.most_silence / 2;
  if (means_silence(error) || goes_unheard) return lose(rank, Loss::silent);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, from.line.socket(), nullptr);
  {
    const Lock lock(mutex_);
    from.line.close();
  }
  from.broken = Break{.since = when, .knock = Fd()};
  if (rank_ < rank) from.arrival = door_->await_again(lane_with(rank), wake_);
  knock(rank);
}

void ControlMesh::knock(int rank) {
  Peer& to = peer(rank);
  if (!to.listens) return;
  Fd socket = begin_to_connect(*to.listens);
  if (!socket && errno == ECONNREFUSED) return lose(rank, Loss::died);
  if (!socket) return;
  watch(epoll_.get(), socket.get(), EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET,
        kKnock + static_cast<uint64_t>(rank));
  to.broken->knock = std::move(socket);
}

void ControlMesh::hear_knock(int rank) {
  Peer& to = peer(rank);
  if (!to.broken || !to.broken->knock) return;
  const int socket = to.broken->knock.get();
  int error = 0;
  socklen_t length = sizeof error;
  ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &length);
  if (error == ECONNREFUSED) return lose(rank, Loss::died);
  const bool connected = is_connected(socket);
  if (connected) to.broken->answered = true;
  // Its kernel had taken the connection, and the process has ended since.
  if (error == ECONNRESET || (connected && has_hung_up(socket))) knock(rank);
}

void ControlMesh::take_arrival(int rank) {
  Peer& from = peer(rank);
  if (!from.arrival || !from.arrival->here.load(std::memory_order_acquire)) return;
  const auto arrival = std::exchange(from.arrival, nullptr);
  if (arrival->error) {
    const bool dials = from.broken && rank_ < rank && ++from.broken->dials < kMostDials;
    if (dials) from.arrival = door_->await_again(lane_with(rank), wake_);
  } else if (distrust(rank).empty()) {
    begin_on(rank, std::move(arrival->connection));
    log(LogLevel::warning, "the control connection between ranks " +
                               std::to_string(std::min(rank, rank_)) + " and " +
                               std::to_string(std::max(rank, rank_)) +
                               " was lost and has been made again; no message is missing");
  }
  await_next(rank);
}

void ControlMesh::mend() {
  const TimePoint when = now();
  mend_until_ = TimePoint::max();
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
    Peer& other = peer(r);
    take_arrival(r);
    if (!other.broken) continue;
    if (told_death(r))
      lose(r, Loss::died);
    else if (when - other.broken->since >= kMend)
      lose(r, other.broken->answered ? Loss::link : Loss::silent);
    else
      mend_until_ = std::min(mend_until_, other.broken->since + kMend);
  }
}

// ---- given up ----

void ControlMesh::lose(int rank, Loss loss) {
  Peer& gone = peer(rank);
  // The rank that was to say last of all how it ends has ended before.
  const bool left = segment_->state_of(rank) >= RankState::leaving && !is_ending(*segment_, rank);
  if (gone.line.is_open()) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, gone.line.socket(), nullptr);
  gone.arrival.reset();
  gone.broken.reset();
  if (!gone.here && left) segment_->show_state(rank, RankState::gone);
  gone.finished.store(true, std::memory_order_release);
  if (!left)
    gone.loss.store(loss, std::memory_order_release);  // before it is known that it is lost
  gone.lost.store(!left, std::memory_order_release);
  {
    const Lock lock(mutex_);
    gone.open = false;
    gone.line.close(loss == Loss::silent);  // it may hear us, and not know that we do not hear it
    if (has_lost_sight_of(rank)) tell_lost_sight();
  }
  ring(doorbell_.get());
}

void ControlMesh::watch_traffic(int rank) {
  Peer& with = peer(rank);
  if (!with.line.is_open()) return;
  const TcpTraffic before = std::exchange(with.traffic, traffic_on(with.line.socket()));
  const uint64_t data = std::exchange(with.data, door_->links().moved(rank));
  const bool answers = with.traffic.settled || with.traffic.acknowledged != before.acknowledged;
  if (answers) with.acknowledged = now();
  if (answers || with.traffic.received != before.received || with.data != data) note_heard(rank);
}

void ControlMesh::note_heard(int rank) {
  segment_->heard_of(rank).store(static_cast<uint64_t>(nanoseconds_now()));
}

/// Whether nothing has moved between this host and that of a rank elsewhere.
bool ControlMesh::is_silent(int rank) const {
  if (peer(rank).here || !peer(rank).line.is_open() || !distrust(rank).empty()) return false;
  const int64_t before = nanoseconds_now() - options_.most_silence.count();
  const auto is_heard = [&](int r) {
    return static_cast<int64_t>(segment_->heard_of(r).load()) >= before;
  };
  if (is_heard(rank)) return false;  // as nearly always: the others need no look
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
    if (peer(r).host == peer(rank).host && is_heard(r)) return false;
  return true;
}

}  // namespace farandole
