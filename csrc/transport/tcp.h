// Channels over TCP connections, one for each lane that is used. Both ends of each have proved
// that they are of this job before anything else was said on it (transport/tcp_handshake.h).
#pragma once

#include <memory>
#include <string>

#include "transport/segment.h"
#include "transport/tcp_door.h"
#include "transport/transport.h"

namespace farandole {

/// The transport of `rank`: through `door` it reaches every rank; without one, through a door of
/// its own on the loopback address, those of the same `host`. `segment` has the job's secret and
/// shows each rank's address. Without `may_have_gone` no rank does.
std::unique_ptr<Transport> tcp_transport(const std::shared_ptr<Segment>& segment, int rank,
                                         std::string host, MayHaveGone may_have_gone = {},
                                         std::shared_ptr<TcpDoor> door = nullptr,
                                         Wire wire = Wire::plain);

}  // namespace farandole
