// How MPI ends in this process: MPI_Finalize waits for all ranks, so it must not begin where one
// will never come.
#pragma once

#include <memory>
#include <string>

#include "transport/mpi_functions.h"

namespace farandole {

class MpiPort;

/// From now on MPI_Finalize ends the process, with exit code 1, if that is watched. `by_another`: a
/// rank that ends by itself, too, and whose exit code mpiexec is to hear first.
void abandon_mpi(const std::string& why, bool by_another = false);
bool is_abandoned_by_another();
/// What MPI_Finalize begins with. `port` may have ended by then.
void watch_the_end_of_mpi(MpiFunctions& functions);
void watch_the_end_of_mpi(const std::shared_ptr<MpiPort>& port);

/// Where MPI is ours to end, exit() does it, which alone knows the exit code: where that is 0, or
/// the world was left before (`joined` is false) and has not failed, by MPI_Finalize, else by
/// MPI_Abort.
void end_mpi_at_exit(std::unique_ptr<MpiExit> by, bool joined);

/// MPI may still read or write memory of an operation that has failed: it must not be called again.
void leave_memory_with_mpi();
bool has_memory_with_mpi();

}  // namespace farandole
