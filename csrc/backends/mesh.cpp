#include "backends/mesh.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "backends/eager.h"
#include "backends/mpi_all_reduce.h"
#include "backends/refused_paths.h"
#include "backends/schedule_backend.h"
#include "backends/shm_direct.h"
#include "base/error.h"
#include "stream/world_key.h"
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

/// `choice` is FARANDOLE_TRANSPORT. `between_hosts`: what "auto" goes over there; empty on one
/// host.
bool is_wanted(const TransportRow& row, const std::string& choice, std::string_view between_hosts) {
  if (choice != "auto") return row.name == choice;
  return !row.by_choice || row.name == between_hosts;
}

/// The transports of the table that a rank here can use, cheapest first. `engine` outlives them.
std::vector<std::shared_ptr<Transport>> transports_of(const Engine& engine,
                                                      const std::string& choice,
                                                      const std::shared_ptr<MpiPort>& mpi,
                                                      Wire wire) {
  const Host& host = engine.host();
  const Surroundings here{
      .rank = host.rank,
      .host = host.peers[static_cast<size_t>(host.rank)].info.host,
      .hub = nullptr,
      .arena = engine.arena(),
      .door = engine.door(),
      .mpi = mpi,
      .may_have_gone = [&engine](int rank,
                                 TimePoint before) { return engine.may_have_gone(rank, before); },
      .wire = wire};
  std::vector<std::shared_ptr<Transport>> made;
  for (const TransportRow& row : transports()) {
    if (!is_wanted(row, choice, engine.door() == nullptr ? "" : mpi ? "mpi" : "tcp")) continue;
    if (auto transport = row.make(here)) made.push_back(std::move(transport));
  }
  return made;
}

/// Makes channels over an engine's transports, which all its streams share.
ConnectMaker channels_over_transports() {
  return [](const Engine& engine, const Membership& membership, uint64_t key) {
    std::vector<PeerInfo> members;
    for (const int r : membership.members)
      members.push_back(engine.host().peers[static_cast<size_t>(r)].info);
    return connect_members(engine.transports(), std::move(members), key);
  };
}

/// A number of its host for each member; empty for a group on one host.
std::vector<int> host_of_each(const Host& host, const std::vector<int>& members) {
  if (host.are_here(members)) return {};
  std::vector<int> host_of;
  for (const int member : members) {
    const auto lives_there = [&](int other) { return host.share_one(member, other); };
    host_of.push_back(*std::ranges::find_if(members, lives_there));  // its lowest rank numbers it
  }
  return host_of;
}

/// `here`: of ranks that share a host.
ChannelCosts costs_between_hosts(const ChannelCosts& network, const ChannelCosts& here,
                                 bool by_mpi) {
  ChannelCosts costs = by_mpi ? over_mpi(network) : network;
  costs.inner_round = here.round;
  costs.inner_byte = here.byte;
  return costs;
}

ScheduleGroup group_of(const Engine& engine, const Membership& membership) {
  return {membership.rank, static_cast<int>(membership.members.size()),
          host_of_each(engine.host(), membership.members)};
}

/// Only for groups on several hosts: on one, ranks agree in memory, which carries no data.
BackendMaker eager_between_hosts(const ChannelCosts& costs) {
  return [costs](const Engine& engine, const Membership& membership, uint64_t,
                 const StreamMemory& memory) {
    return std::make_unique<EagerBackend>(group_of(engine, membership), costs, memory);
  };
}

/// The index of a stream of the world among those that get a communicator. The first stream and the
/// two with numbers of their own come before the others, in the order in which ranks open them.
std::optional<size_t> place_of_stream(uint64_t key) {
  for (size_t place = 0; place < MpiPort::kCommunicators; ++place) {
    const uint64_t number = place == 0   ? 0
                            : place == 1 ? kNamesNumber
                            : place == 2 ? kJaxNumber
                                         : place - 2;
    if (key == stream_key(kWorldKey, number)) return place;
  }
  return std::nullopt;
}

/// `port`: set if the ranks' data go over MPI.
MpiOfStream mpi_of_stream(std::shared_ptr<MpiPort> port, const Membership& membership,
                          uint64_t key) {
  if (!port)
    return {.why_not =
                "no data go over MPI here (FARANDOLE_TRANSPORT=mpi does, and between hosts "
                "init(comm=…))"};
  if (membership.key != kWorldKey)
    return {.why_not = "it takes all ranks of the world, and this is another group"};
  const std::optional<size_t> place = place_of_stream(key);
  if (!place)
    return {.why_not = "the world has more streams of operations than " +
                       std::to_string(MpiPort::kCommunicators) + " communicators"};
  return {.port = std::move(port), .communicator = *place};
}

/// Schedules, and MPI's own all-reduce by `mpi`, chosen between hosts by its costs.
BackendMaker schedules_over(ConnectMaker channels, const ChannelCosts& costs,
                            const ChannelCosts& between_hosts, std::shared_ptr<MpiPort> mpi,
                            const MpiCosts& mpi_costs) {
  return [channels = std::move(channels), costs, between_hosts, mpi = std::move(mpi), mpi_costs](
             const Engine& engine, const Membership& membership, uint64_t key,
             const StreamMemory& memory) {
    ScheduleGroup group = group_of(engine, membership);
    const int size = group.size;
    const bool here = group.host_of.empty();
    MpiOfStream by_mpi = mpi_of_stream(mpi, membership, key);
    if (!here && mpi_costs.is_measured()) by_mpi.costs = mpi_costs;
    return std::make_unique<MpiAllReduce>(
        std::move(by_mpi), size,
        std::make_unique<ScheduleBackend>(std::move(group), channels(engine, membership, key),
                                          engine.arena(), here ? costs : between_hosts,
                                          here ? &memory : nullptr));
  };
}

/// The threads that may poll if data go over this MPI; nothing: any.
std::optional<FewThreads> few_threads_over(const MpiPort& mpi) {
  if (mpi.threads() == MpiThreads::multiple) return std::nullopt;
  FewThreads few{std::nullopt,
                 "data go over an MPI that was initialized with less than MPI_THREAD_MULTIPLE; "
                 "initialize it with that, or set FARANDOLE_TRANSPORT=tcp"};
  if (mpi.threads() == MpiThreads::funneled) few.only = mpi.caller();
  return few;
}

}  // namespace

BackendMaker paths_over_shm(std::shared_ptr<const TuningTable> tuning) {
  return [tuning = std::move(tuning)](const Engine& engine, const Membership&, uint64_t,
                                      const StreamMemory& memory) {
    return std::make_unique<ShmDirect>(memory, *tuning, engine.host().foreign.why_not);
  };
}

bool runs_paths(const std::string& transport) { return transport != "tcp" && transport != "mpi"; }

ChannelCosts costs_over(const std::string& transport, const TuningTable& tuning) {
  if (runs_paths(transport)) return tuning.channels;
  return transport == "mpi" ? over_mpi(kTcpCosts) : kTcpCosts;
}

void lay_mesh(EngineOptions& options, const TuningTable& tuning, const std::string& transport,
              std::shared_ptr<MpiPort> mpi, Wire wire) {
  const ChannelCosts here = costs_over(transport, tuning);
  if (transport == "tcp") mpi = nullptr;
  const ChannelCosts between = costs_between_hosts(tuning.network, here, mpi != nullptr);
  if (mpi) options.few_threads = few_threads_over(*mpi);
  options.tuning = std::make_shared<const TuningTable>(tuning);
  options.transports = [transport, mpi, wire](const Engine& e) {
    return transports_of(e, transport, mpi, wire);
  };
  options.wire = wire;
  options.channels = channels_over_transports();
  options.schedules = schedules_over(options.channels, here, between, std::move(mpi), tuning.mpi);
  options.eager = eager_between_hosts(between);
  options.pairs_by_schedules = !runs_paths(transport);
  if (runs_paths(transport))
    options.direct = paths_over_shm(options.tuning);
  else
    options.direct = [transport](const Engine&, const Membership&, uint64_t, const StreamMemory&) {
      return std::make_unique<RefusedPaths>(transport);
    };
}

}  // namespace farandole
