// Channels over MPI, whichever there is at run time. All data between two ranks go over one link
// (transport/mpi_port.h) in a communicator that nobody else uses; what ranks say of failures and
// leaving does not: a rank that dies takes its MPI along.
#pragma once

#include <memory>

#include "transport/mpi_port.h"
#include "transport/transport.h"

namespace farandole {

/// Reaches every rank of the port's world, on whichever host.
std::unique_ptr<Transport> mpi_transport(std::shared_ptr<MpiPort> port);

}  // namespace farandole
