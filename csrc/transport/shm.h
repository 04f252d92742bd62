// Channels between processes of one host, through the segment that all of them map.
//
// Each side allocates from its own arena one block of transmit rings for (stream, peer), publishes
// it in the segment's directory, and polls the peer's directory for the counterpart. Bytes that lie
// in the arenas anyway need not pass through a ring (transport/shm_channel.h).
//
// Nothing here rings a doorbell: the engine rings, at the end of a turn, the peers that sleep.
#pragma once

#include <memory>
#include <string>

#include "transport/segment.h"
#include "transport/transport.h"

namespace farandole {

/// The transport of `rank` (its place in the segment), which reaches the ranks of the same `host`.
/// Its channels may outlive it; a block is given back to `arena` when both sides have closed it.
std::unique_ptr<Transport> shm_transport(std::shared_ptr<Arena> arena, int rank, std::string host);

}  // namespace farandole
