// The parts that run operations on this host: the backends of a stream, and the cheapest transport
// to each member for those that exchange messages.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backends/tuning.h"
#include "engine/engine.h"
#include "transport/transport.h"

namespace farandole {

class MpiPort;

/// Connects one stream: `transports` in order of preference, `members` by rank in the group.
/// The function throws Error(link) for a member that no transport reaches.
Connect connect_members(std::vector<std::shared_ptr<Transport>> transports,
                        std::vector<PeerInfo> members, uint64_t stream_key);

/// Paths over the memory that the ranks of this host map, chosen by `tuning`.
BackendMaker paths_over_shm(std::shared_ptr<const TuningTable> tuning);

/// `transport` is FARANDOLE_TRANSPORT: auto, or a row of transports(). Paths run over shared
/// memory.
bool runs_paths(const std::string& transport);
ChannelCosts costs_over(const std::string& transport, const TuningTable& tuning);

/// Gives an engine all parts: paths first, schedules over transports() for the rest, channels for
/// messages, and the table by which they are chosen, the same on all ranks. Over `transport` tcp or
/// mpi there are no paths. With `mpi`, "auto" goes over MPI between hosts.
void lay_mesh(EngineOptions& options, const TuningTable& tuning = {},
              const std::string& transport = "auto", std::shared_ptr<MpiPort> mpi = nullptr,
              Wire wire = Wire::plain);

}  // namespace farandole
