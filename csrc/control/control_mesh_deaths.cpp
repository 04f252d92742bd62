// How ranks have ended: seen here and told to the other hosts, or heard of them (Note [How a rank
// elsewhere has ended]).

#include <sys/epoll.h>

#include <string>

#include "control/control_mesh.h"
#include "control/control_messages.h"
#include "control/control_tags.h"
#include "control/launcher.h"

namespace farandole {

std::optional<Death> ControlMesh::told_death(int rank) const {
  const Lock lock(mutex_);
  return peer(rank).death;
}

// ---- the thread ----

void ControlMesh::watch_ends() {
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
    if (peer(r).process >= 0)
      watch(epoll_.get(), peer(r).process, EPOLLIN, kProcess + static_cast<uint64_t>(r));
  launcher_ = ear_for_launcher();
  if (launcher_) watch(epoll_.get(), launcher_.get(), EPOLLIN, kLauncher);
}

/// Of a rank here, whom this rank's engine sees for itself.
void ControlMesh::note_end(int rank) {
  Peer& ended = peer(rank);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, ended.process, nullptr);
  const std::optional<Death> death = death_of(ended.process, ended.pid);
  if (!death || segment_->state_of(rank) >= RankState::leaving) return;
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
  ring(doorbell_);
}

void ControlMesh::hear_launcher() {
  while (const auto told = next_told_death(launcher_.get())) {
    if (told->rank < 0 || told->rank >= static_cast<int>(peers_.size()) ||
        told->pid != peer(told->rank).pid)
      continue;
    const Lock lock(mutex_);
    peer(told->rank).death = told->death;
    ring(doorbell_);
  }
}

}  // namespace farandole
