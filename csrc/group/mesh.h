// Who is reached how: a connection to every member by the cheapest transport that reaches it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/engine.h"
#include "engine/schedule_backend.h"
#include "transport/transport.h"

namespace farandole {

/// Connects one stream: `transports` in order of preference, `members` by rank in the group.
/// The function throws Error(link) for a member that no transport reaches.
Connect connect_members(std::vector<std::shared_ptr<Transport>> transports,
                        std::vector<PeerInfo> members, uint64_t stream_key);

/// Channels to the other ranks of this host: shared memory.
ConnectMaker channels_over_shm();

/// Schedules over the transports that reach the other ranks of this host: shared memory.
BackendMaker schedules_over_shm();

}  // namespace farandole
