// How ranks have ended, and which are stopped: seen here and told to the other hosts, or heard of
// them (Note [How a rank elsewhere has ended], Note [A rank elsewhere is stopped]).

#include <sys/epoll.h>

#include <algorithm>
#include <string>
#include <vector>

#include "control/control_mesh.h"
#include "control/control_messages.h"
#include "control/control_tags.h"
#include "control/farewell.h"

namespace farandole {
namespace {

constexpr int kMissingBeats = 3;  // of a rank that may be stopped

}  // namespace

std::optional<Death> ControlMesh::told_death(int rank) const {
  const Lock lock(mutex_);
  return peer(rank).death;
}

// ---- the thread ----

void ControlMesh::watch_ends() {
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
    if (peer(r).process)
      watch(epoll_.get(), peer(r).process.get(), EPOLLIN, kProcess + static_cast<uint64_t>(r));
  launcher_ = ear_for_launcher();
  hears_launcher_ = static_cast<bool>(launcher_);
  if (launcher_) watch(epoll_.get(), launcher_.get(), EPOLLIN, kLauncher);
}

/// Tells other hosts how a rank on this host has ended. Ranks here see its end for themselves.
void ControlMesh::note_end(int rank) {
  Peer& ended = peer(rank);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, ended.process.get(), nullptr);
  const std::optional<Death> death = death_of(ended.process.get(), ended.pid);
  const bool has_left = segment_->state_of(rank) >= RankState::leaving;
  if (!death || (has_left && !is_ending(*segment_, rank))) return;
  const Lock lock(mutex_);
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
    if (peer(r).open && !peer(r).here)
      send(r, frame_of<DeathMessage>(rank, death->signal, death->exit_code));
}

void ControlMesh::take_death(WireReader& from) {
  const auto told = get_message<DeathMessage>(from);
  if (told.rank < 0 || told.rank >= static_cast<int>(peers_.size()))
    WireReader::malformed("the death of rank " + std::to_string(told.rank));
  const Lock lock(mutex_);
  peer(told.rank).death = Death{told.signal, told.exit_code};
  ring(doorbell_.get());
}

void ControlMesh::hear_launcher() {
  const Lock lock(mutex_);
  while (launcher_) {
    const auto told = next_told_death(launcher_.get());
    if (!told) return;
    if (const int r = member_told(*told); r >= 0) peer(r).death = told->death;
    ring(doorbell_.get());
  }
}

void ControlMesh::take_stops(int rank, WireReader& from) {
  const std::vector<int> stops = get_message<StopsMessage>(from).ranks;
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
    if (r != rank && peer(r).host == peer(rank).host)
      peer(r).stopped = std::ranges::find(stops, r) != stops.end();
  peer(rank).stopped = false;
}

// ---- with mutex_ held ----

/// By the thread. What is told stands until the ranks of that host tell something else.
void ControlMesh::watch_stops() {
  std::vector<int> stops;
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
    const Peer& other = peer(r);
    if (other.here && other.open && last_turn_ - other.heard > kMissingBeats * kBeat &&
        farandole::is_stopped(other.pid))
      stops.push_back(r);
  }
  if (stops == told_stops_) return;
  told_stops_ = stops;
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
    if (peer(r).open && !peer(r).here) send(r, frame_of<StopsMessage>(stops));
}

/// Finds the rank by pid, and by its number, which in a world of some ranks may be another's.
int ControlMesh::member_told(const ToldDeath& told) const {
  std::vector<int> found;
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
    if (peer(r).pid != told.pid) continue;
    if (r == told.rank) return r;
    found.push_back(r);
  }
  return found.size() == 1 ? found[0] : -1;  // processes of two hosts may have one number
}

void ControlMesh::close_ear() {
  hears_launcher_ = false;
  launcher_.reset();
}

}  // namespace farandole
