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
  // Other ranks wait until it has said why it leaves; it knows itself that it does.
  return world_rank == around.host->rank || !is_ending(*around.host->segment, world_rank);
}

std::optional<Error> error_of_loss(const Host& host, int world_rank, const std::string& when,
                                   Context where) {
  const HostPeer& peer = host.peers[static_cast<size_t>(world_rank)];
  const Loss loss = peer.here ? Loss::none : host.mesh->loss_of(world_rank);
  const std::string seen = "; seen by rank " + std::to_string(host.rank);
  if (loss == Loss::silent) {
    where.evidence = "nothing came from host " + peer.info.host +
                     " for as long as FARANDOLE_LINK_TIMEOUT allows, not even from its kernel" +
                     seen;
    return Error(ErrorCode::peer_lost,
                 host.name_of(world_rank) + " was lost " + when +
                     ": the connection to its host is gone, and it may be cut off rather than dead",
                 std::move(where));
  }
  if (loss == Loss::link) {
    where.peer = world_rank;
    where.evidence = "its host answers at the address where it listens" + seen;
    return Error(ErrorCode::link,
                 "the connection between " + host.name_of(host.rank) + " and " +
                     host.name_of(world_rank) + " was lost " + when +
                     " and could not be made again",
                 std::move(where),
                 "look for a firewall or a router between the two that resets connections");
  }
  return std::nullopt;
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
  if (auto loss = error_of_loss(*around.host, world_rank, "during " + title, where)) return loss;
  where.evidence = std::string(peer.here ? "its process descriptor reports its end"
                                         : "its connection has ended") +
                   "; seen by rank " + me;
  return Error(ErrorCode::peer_lost,
               name + " " + (*around.deaths)[index].how() + " during " + title, std::move(where));
}

std::optional<Error> closing_of(const Presence& around, int world_rank, const std::string& group,
                                Context where) {
  const Segment& segment = *around.host->segment;
  if (segment.state_of(world_rank) >= RankState::leaving || is_ending(segment, world_rank))
    return std::nullopt;
  const std::string what = " closed the " + group + " before " + where.operation;
  where = around.host->about(world_rank, std::move(where));
  where.evidence = "it destroyed the process group, or dropped its Group; rank " +
                   std::to_string(around.host->rank) + " waits for it";
  return Error(ErrorCode::early_exit, around.host->name_of(world_rank) + what, std::move(where),
               "let every rank end its operations of a group before one of them closes it; a "
               "barrier of the group tells when they have");
}

}  // namespace farandole
