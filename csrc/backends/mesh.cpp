#include "backends/mesh.h"

#include <mutex>
#include <string>
#include <utility>

#include "backends/schedule_backend.h"
#include "backends/shm_direct.h"
#include "base/error.h"
#include "transport/transports.h"

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

namespace {

/// What the table of transports has for a rank here, cheapest first.
std::vector<std::shared_ptr<Transport>> transports_of(const Engine& engine) {
  const Host& host = engine.host();
  const Surroundings here{.rank = host.rank,
                          .host = host.peers[static_cast<size_t>(host.rank)].info.host,
                          .hub = nullptr,
                          .arena = engine.arena()};
  std::vector<std::shared_ptr<Transport>> made;
  for (const TransportRow& row : transports())
    if (auto transport = row.make(here)) made.push_back(std::move(transport));
  return made;
}

/// The transports are made with the first connection and shared by all of the engine.
ConnectMaker channels_over_transports() {
  struct Made {
    std::once_flag once;  // any thread may open a stream
    std::vector<std::shared_ptr<Transport>> transports;
  };
  auto made = std::make_shared<Made>();
  return [made](const Engine& engine, const Membership& membership, uint64_t key) {
    std::call_once(made->once, [&] { made->transports = transports_of(engine); });
    std::vector<PeerInfo> members;
    for (const int r : membership.members)
      members.push_back(engine.host().peers[static_cast<size_t>(r)].info);
    return connect_members(made->transports, std::move(members), key);
  };
}

BackendMaker schedules_over(ConnectMaker channels, const ChannelCosts& costs) {
  return [channels = std::move(channels), costs](const Engine& engine, const Membership& membership,
                                                 uint64_t key, const StreamMemory& memory) {
    return std::make_unique<ScheduleBackend>(
        membership.rank, static_cast<int>(membership.members.size()),
        channels(engine, membership, key), engine.arena(), costs, &memory);
  };
}

}  // namespace

BackendMaker paths_over_shm(std::shared_ptr<const TuningTable> tuning) {
  return [tuning = std::move(tuning)](const Engine& engine, const Membership&, uint64_t,
                                      const StreamMemory& memory) {
    return std::make_unique<ShmDirect>(memory, *tuning, engine.host().foreign.why_not);
  };
}

void lay_mesh(EngineOptions& options, const TuningTable& tuning) {
  options.tuning = std::make_shared<const TuningTable>(tuning);
  options.direct = paths_over_shm(options.tuning);
  options.channels = channels_over_transports();
  options.schedules = schedules_over(options.channels, tuning.channels);
}

}  // namespace farandole
