// How MPI ends in this process: MPI_Finalize waits for all ranks, so it must not begin where one
// will never come.
#pragma once

#include <memory>
#include <string>

#include "transport/mpi_functions.h"

namespace farandole {

class MpiPort;

/// From now on MPI_Finalize ends the process with exit code 1, if it is watched. `by_another`:
/// another rank is the cause; it ends by itself, and mpiexec should see its exit code first.
void abandon_mpi(const std::string& why, bool by_another = false);
bool is_abandoned_by_another();
/// Hooks into the start of MPI_Finalize, which then notifies `port` unless that has ended.
void watch_the_end_of_mpi(MpiFunctions& functions);
void watch_the_end_of_mpi(const std::shared_ptr<MpiPort>& port);

/// If MPI is ours to end, exit() ends it, since only exit() knows the exit code. It calls
/// MPI_Finalize if the code is 0, or if the world was left before (`joined` is false) and has not
/// failed. Else it calls MPI_Abort.
void end_mpi_at_exit(std::unique_ptr<MpiExit> by, bool joined);

/// MPI may still read or write memory of an operation that has failed: it must not be called again.
void leave_memory_with_mpi();
bool has_memory_with_mpi();

}  // namespace farandole
