#include "control/absence.h"

#include "base/wire.h"
#include "control/control_mesh.h"
#include "control/farewell.h"

namespace farandole {

bool is_absent(const Presence& around, int world_rank) {
  return (*around.dead)[static_cast<size_t>(world_rank)] || has_left(around, world_rank);
}

bool has_left(const Presence& around, int world_rank) {
  if (around.host->segment->state_of(world_rank) < RankState::leaving)
    return has_said_why(*around.host->segment, world_rank);
  // Those who wait want to know why; it knows itself that it goes.
  return world_rank == around.host->rank || !is_ending(*around.host->segment, world_rank);
}

std::optional<Error> absence_of(const Presence& around, int world_rank, Context where,
                                bool submitted) {
  if (!is_absent(around, world_rank)) return std::nullopt;
  const auto index = static_cast<size_t>(world_rank);
  const HostPeer& peer = around.host->peers[index];
  const std::string me = std::to_string(around.host->rank), title = where.operation;
  const std::string name = around.host->name_of(world_rank);
  where = around.host->about(world_rank, std::move(where));
  where.signal = (*around.dead)[index] ? (*around.deaths)[index].signal : 0;
  if (has_left(around, world_rank)) {
    if (auto reason = farewell_of(*around.host->segment, world_rank, where)) return reason;
    where.evidence = "it called shutdown() or ended";
    if (submitted) where.evidence += " while the operation was under way";
    if (world_rank != around.host->rank) where.evidence += "; rank " + me + " waits for it";
    if (!submitted)
      return Error(ErrorCode::early_exit, name + " left before " + title, std::move(where));
    return Error(ErrorCode::early_exit,
                 name + " left without waiting for " + title + ", which it had submitted",
                 std::move(where), "wait for every handle before shutdown()");
  }
  if (const std::string why = peer.here ? "" : around.host->mesh->distrust(world_rank);
      !why.empty()) {
    where.peer = world_rank;
    where.evidence = "seen by rank " + me + ", which has checked every field";
    return Error(ErrorCode::link, why + "; during " + title, std::move(where), Malformed::kAdvice);
  }
  if (!peer.here && around.host->mesh->has_lost_sight_of(world_rank)) {
    where.evidence = "nothing came from host " + peer.info.host +
                     " for nearly 2 s, not even from its kernel; seen by rank " + me;
    return Error(ErrorCode::peer_lost,
                 name + " was lost during " + title +
                     ": the connection to its host is gone, and it may be cut off rather than dead",
                 std::move(where));
  }
  where.evidence = std::string(peer.here ? "its process descriptor reports its end"
                                         : "its connection has ended") +
                   "; seen by rank " + me;
  return Error(ErrorCode::peer_lost,
               name + " " + (*around.deaths)[index].how() + " during " + title, std::move(where));
}

}  // namespace farandole
