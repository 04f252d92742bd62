#include "group/mesh.h"

#include <string>
#include <utility>

#include "base/error.h"

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

}  // namespace farandole
