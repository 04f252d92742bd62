#include "control/join.h"

#include <utility>

#include "base/error.h"
#include "control/control_mesh.h"

namespace farandole {
namespace {

void connect_hosts(Host& host, std::vector<Fd> listeners, ControlMeshOptions options,
                   Deadline deadline, const std::function<void()>& interrupted) {
  std::vector<bool> here;
  TcpAddresses addresses;
  for (const HostPeer& peer : host.peers) {
    here.push_back(peer.here);
    addresses.push_back(peer.info.address);
  }
  auto door = std::make_shared<TcpDoor>(host.segment, host.rank, std::move(listeners),
                                        std::move(addresses));
  host.mesh =
      std::make_shared<ControlMesh>(host.segment, host.rank, here, std::move(door), options);
  host.mesh->meet(host, deadline, interrupted);
}

}  // namespace

Host join(Roll roll, ForeignWish wish, Deadline deadline,
          const std::function<void()>& interrupted) {
  if (roll.memory->ranks() != static_cast<int>(roll.peers.size()))
    throw Error(ErrorCode::internal, "the roll of ranks does not fit their memory");
  Host host{roll.rank, std::move(roll.peers), std::move(roll.memory), {}};
  for (const HostPeer& peer : host.peers) {
    if (peer.here) continue;
    host.segment->set_apart(peer.info.rank);
    // If it does not come, a rank that waits for it over TCP reports it.
    host.segment->show_state(peer.info.rank, RankState::present);
  }
  // All ranks are present from the moment the memory is theirs; absent means not yet mapped.
  host.segment->show_state(host.rank, RankState::present);
  try {
    host.foreign = agree_on_foreign_access(host, wish, deadline, interrupted);
    if (roll.on_several_hosts)
      connect_hosts(host, std::move(roll.listeners), roll.mesh, deadline, interrupted);
  } catch (...) {  // no rank shall wait for this one
    host.segment->show_state(host.rank, RankState::gone);
    throw;
  }
  return host;
}

}  // namespace farandole
