#include "group/mesh.h"

#include <string>
#include <utility>

#include "base/error.h"
#include "transport/shm.h"

namespace farandole {

Connect connect_members(std::vector<std::shared_ptr<Transport>> transports,
                        std::vector<PeerInfo> members, uint64_t stream_key) {
  return [transports = std::move(transports), members = std::move(members), stream_key](
             int peer, int lanes) -> std::unique_ptr<Connecting> {
    const PeerInfo& member = members.at(static_cast<size_t>(peer));
    for (const auto& transport : transports)
      if (transport->reaches(member)) return transport->connect(member, stream_key, lanes);
    Context where;
    where.peer = peer;
    where.host = member.host;
    std::string tried;
    for (const auto& transport : transports)
      tried += (tried.empty() ? "" : ", ") + std::string(transport->name());
    where.evidence = "transports here: " + (tried.empty() ? "none" : tried);
    throw Error(ErrorCode::link,
                "no transport reaches rank " + std::to_string(peer) + " on host " + member.host,
                where);
  };
}

ConnectMaker channels_over_shm() {
  // Made with the first connection and shared by all of the engine.
  auto transport = std::make_shared<std::shared_ptr<Transport>>();
  return [transport](const Engine& engine, const Membership& membership, uint64_t key) {
    const Host& host = engine.host();
    if (!*transport)
      *transport = shm_transport(engine.arena(), host.rank,
                                 host.peers[static_cast<size_t>(host.rank)].info.host);
    std::vector<PeerInfo> members;
    for (const int r : membership.members)
      members.push_back(host.peers[static_cast<size_t>(r)].info);
    return connect_members({*transport}, std::move(members), key);
  };
}

BackendMaker schedules_over_shm() {
  return [channels = channels_over_shm()](const Engine& engine, const Membership& membership,
                                          uint64_t key, const StreamMemory& memory) {
    return std::make_unique<ScheduleBackend>(
        membership.rank, static_cast<int>(membership.members.size()),
        channels(engine, membership, key), engine.arena(), engine.tuning(), &memory);
  };
}

}  // namespace farandole
