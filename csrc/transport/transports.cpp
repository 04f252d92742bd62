#include "transport/transports.h"

#include "transport/shm.h"

namespace farandole {
namespace {

std::unique_ptr<Transport> make_inproc(const Surroundings& here) {
  return here.hub ? inproc_transport(here.hub, here.rank) : nullptr;
}

std::unique_ptr<Transport> make_shm(const Surroundings& here) {
  return here.arena ? shm_transport(here.arena, here.rank, here.host) : nullptr;
}

constexpr TransportRow kTransports[] = {
    {"inproc", "ranks in one process", make_inproc},
    {"shm", "ranks on one host that map one segment", make_shm},
};

}  // namespace

std::span<const TransportRow> transports() { return kTransports; }

}  // namespace farandole
