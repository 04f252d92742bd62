#include "transport/transports.h"

#include "transport/mpi.h"
#include "transport/shm.h"
#include "transport/tcp.h"

namespace farandole {
namespace {

std::unique_ptr<Transport> make_inproc(const Surroundings& here) {
  return here.hub ? inproc_transport(here.hub, here.rank) : nullptr;
}

std::unique_ptr<Transport> make_shm(const Surroundings& here) {
  return here.arena ? shm_transport(here.arena, here.rank, here.host) : nullptr;
}

std::unique_ptr<Transport> make_tcp(const Surroundings& here) {
  if (!here.arena) return nullptr;
  return tcp_transport(here.arena->segment(), here.rank, here.host, here.may_have_gone, here.door,
                       here.wire);
}

std::unique_ptr<Transport> make_mpi(const Surroundings& here) {
  return here.mpi ? mpi_transport(here.mpi) : nullptr;
}

constexpr TransportRow kTransports[] = {
    {"inproc", "ranks in one process", make_inproc},
    {"shm", "ranks on one host that map one segment", make_shm},
    {"tcp", "ranks of one job, on one host or several", make_tcp, true},
    {"mpi", "ranks of one communicator of MPI", make_mpi, true},
};

}  // namespace

std::span<const TransportRow> transports() { return kTransports; }

}  // namespace farandole
