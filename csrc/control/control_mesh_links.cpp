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
constexpr auto kBetweenDials = std::chrono::milliseconds(50);

bool means_silence(int error) {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH ||
         error == EHOSTDOWN || error == ENETDOWN;
}

/// The one of a rank's addresses from which its connection comes: another one may lead nowhere, or
/// to another machine, if something between the hosts translates addresses.
std::optional<TcpAddress> chosen(const std::vector<std::byte>& shown, int socket) {
  const auto all = TcpAddress::all_from(shown);
  if (!all) return std::nullopt;
  const auto other = TcpAddress::of_peer(socket);
  const auto same = std::ranges::find_if(
      *all, [&](const TcpAddress& one) { return other && one.shares_host_with(*other); });
  return same == all->end() ? std::nullopt : std::optional(*same);
}

}  // namespace

// ---- begun ----

TcpLane ControlMesh::lane_with(int rank) const {
  return {std::min(rank, rank_), std::max(rank, rank_), kControlKey, kControlLane};
}

void ControlMesh::begin_on(int rank, TcpConnection connection) {
  Peer& with = peer(rank);
  const Lock lock(mutex_);
  if (with.line.is_open()) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, with.line.socket(), nullptr);
  with.listens = chosen(door_->addresses_of(rank), connection.socket.get());
  with.line.open(std::move(connection), options_.hides);
  with.traffic = {};
  with.heard = with.acknowledged = with.answered = now();
  note_heard(rank);
  watch(epoll_.get(), with.line.socket(), EPOLLIN, static_cast<uint64_t>(rank));
}

/// The end that listens may be the last to notice that there must be another.
void ControlMesh::await_next(int rank) {
  if (rank < rank_) peer(rank).arrival = door_->await_again(lane_with(rank), wake_);
}

// ---- broken, and made again ----

void ControlMesh::note_break(int rank, int error) {
  Peer& from = peer(rank);
  const bool left = segment_->state_of(rank) >= RankState::leaving && !is_ending(*segment_, rank);
  if (left || !distrust(rank).empty() || told_death(rank)) return lose(rank, Loss::died);
  // A rank that has given this one up, of which nothing came there, resets the connection.
  const Duration limit = std::max<Duration>(options_.most_silence / 2, 2 * kBeat);
  const bool goes_unheard = error != 0 && last_turn_ - from.answered > limit;
  if (!from.broken && (means_silence(error) || goes_unheard)) return lose(rank, Loss::silent);
  begin_break(rank);
}

/// Also where a new connection breaks before the other end has begun on it.
void ControlMesh::begin_break(int rank) {
  Peer& from = peer(rank);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, from.line.socket(), nullptr);
  {
    const Lock lock(mutex_);
    from.line.close();
  }
  const TimePoint when = now();
  if (!from.broken) from.broken.emplace(when);
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

/// The lower rank dials, and again some time after a dial that failed.
void ControlMesh::dial(int rank) {
  Peer& to = peer(rank);
  if (rank < rank_ || to.arrival || to.line.is_open()) return;
  if (now() >= to.broken->dial_at) to.arrival = door_->await_again(lane_with(rank), wake_);
}

void ControlMesh::take_arrival(int rank) {
  Peer& from = peer(rank);
  if (!from.arrival || !from.arrival->here.load(std::memory_order_acquire)) return;
  const auto arrival = std::exchange(from.arrival, nullptr);
  const TimePoint when = now();
  const bool comes = !arrival->error && distrust(rank).empty();
  // The other end may have noticed first, or it may have given up: its first message tells.
  if (comes && !from.broken) from.broken.emplace(when);
  if (from.broken) from.broken->dial_at = when + kBetweenDials;
  if (comes) {
    from.broken->answered = true;
    begin_on(rank, std::move(arrival->connection));
  }
  await_next(rank);
}

/// The other end has begun on a connection, too.
void ControlMesh::note_mended(int rank) {
  if (!std::exchange(peer(rank).broken, std::nullopt)) return;
  log(LogLevel::warning, "the control connection between ranks " +
                             std::to_string(std::min(rank, rank_)) + " and " +
                             std::to_string(std::max(rank, rank_)) +
                             " was lost and has been made again; no message is missing");
}

void ControlMesh::mend() {
  const TimePoint when = now();
  mend_until_ = TimePoint::max();
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
    Peer& other = peer(r);
    take_arrival(r);
    if (!other.broken) {
      other.settled.store(last_turn_, std::memory_order_release);  // after lose()
      continue;
    }
    if (told_death(r)) {
      lose(r, Loss::died);
    } else if (when - other.broken->since >= kMend) {
      lose(r, other.broken->answered ? Loss::link : Loss::silent);
    } else {
      dial(r);
      mend_until_ = std::min(mend_until_, other.broken->since + kMend);
      if (other.broken->dial_at > when) mend_until_ = std::min(mend_until_, other.broken->dial_at);
    }
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
  if (!with.line.is_open() || with.broken) return;
  const TcpTraffic before = std::exchange(with.traffic, traffic_on(with.line.socket()));
  const TcpTraffic data = std::exchange(with.data, door_->links().traffic_with(rank));
  const bool acknowledges =
      with.traffic.settled || with.traffic.acknowledged != before.acknowledged;
  const bool answers = acknowledges || with.data.acknowledged != data.acknowledged;
  if (acknowledges) with.acknowledged = now();
  if (answers) with.answered = now();
  if (answers || with.traffic.received != before.received || with.data.received != data.received)
    note_heard(rank);
}

/// Whether this connection is lost in silence, though the host may be heard over others: a new one
/// has other ports, and so may take another way. The lower rank, which dials, is to notice first.
bool ControlMesh::is_stuck(int rank) const {
  const Peer& with = peer(rank);
  if (!with.line.is_open() || with.broken || !distrust(rank).empty()) return false;
  return (now() - with.acknowledged) / (rank_ < rank ? 10 : 12) > options_.most_silence;
}

void ControlMesh::note_heard(int rank) {
  segment_->heard_of(rank).store(static_cast<uint64_t>(nanoseconds_now()));
}

/// Whether nothing has moved between this host and that of a rank elsewhere.
bool ControlMesh::is_silent(int rank) const {
  const Peer& other = peer(rank);
  if (other.here || !other.line.is_open() || other.broken || !distrust(rank).empty()) return false;
  const int64_t before = nanoseconds_now() - options_.most_silence.count();
  const auto is_heard = [&](int r) {
    return static_cast<int64_t>(segment_->heard_of(r).load()) >= before;
  };
  if (is_heard(rank)) return false;  // as nearly always: the others need no look
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
    if (peer(r).host == other.host && is_heard(r)) return false;
  return true;
}

}  // namespace farandole
