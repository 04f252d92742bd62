// The table of transports, cheapest first. Meshes and tests iterate over it.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "transport/inproc.h"
#include "transport/mpi_port.h"
#include "transport/segment.h"
#include "transport/tcp_door.h"
#include "transport/transport.h"

namespace farandole {

/// The resources from which a rank builds transports; a resource that it lacks stays null.
struct Surroundings {
  int rank = 0;
  std::string host;
  std::shared_ptr<InprocHub> hub;   // of the ranks that share this process
  std::shared_ptr<Arena> arena;     // in the segment of the ranks that share this host
  std::shared_ptr<TcpDoor> door{};  // of ranks on several hosts
  std::shared_ptr<MpiPort> mpi{};   // of ranks that have an MPI
  MayHaveGone may_have_gone{};
  Wire wire = Wire::plain;  // what is done with bytes over TCP
};

struct TransportRow {
  std::string_view name;
  std::string_view needs;                                   // to tell a user why it is missing
  std::unique_ptr<Transport> (*make)(const Surroundings&);  // null: what it needs is not there
  bool by_choice = false;  // only where FARANDOLE_TRANSPORT names it
};

std::span<const TransportRow> transports();

}  // namespace farandole
