// Channels over the MPI that is found at run time. All data between two ranks go over one link
// (transport/mpi_port.h) in a communicator that nobody else uses. Messages about failures and
// leaving do not, because a rank that dies takes its MPI along.
#pragma once

#include <memory>

#include "transport/mpi_port.h"
#include "transport/transport.h"

namespace farandole {

/// Reaches every rank of the port's world, on any host.
std::unique_ptr<Transport> mpi_transport(std::shared_ptr<MpiPort> port);

}  // namespace farandole
