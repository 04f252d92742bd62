// Makes mpi4py's description of an MPI a transport of data.
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <string>

#include "bindings/bind.h"
#include "transport/mpi_end.h"
#include "transport/mpi_port.h"

namespace farandole {
namespace {

MpiThreads threads_from(const std::string& level) {
  if (level == "multiple") return MpiThreads::multiple;
  if (level == "serialized") return MpiThreads::serialized;
  if (level == "funneled") return MpiThreads::funneled;
  throw Error(ErrorCode::internal, "'" + level + "' is no level of threads");
}

using Handles = std::map<std::string, uint64_t>;

MpiBinding binding_from(std::string module, size_t handle_bytes, size_t status_bytes, uint64_t byte,
                        uint64_t comm_self, uint64_t comm_world, uint64_t errors_return,
                        uint64_t in_place, const Handles& dtypes, const Handles& ops) {
  MpiBinding binding{.module = std::move(module),
                     .handle_bytes = handle_bytes,
                     .status_bytes = status_bytes,
                     .byte = byte,
                     .self = comm_self,
                     .world = comm_world,
                     .returns = errors_return,
                     .in_place = in_place};
  for (const auto& [name, handle] : dtypes)
    if (const auto dtype = dtype_named(name)) binding.dtypes[index(*dtype)] = handle;
  for (const auto& [name, handle] : ops)
    if (const auto op = reduce_op_named(name)) binding.ops[index(*op)] = handle;
  watch_the_end_of_mpi(*bind_mpi(binding));
  return binding;
}

std::shared_ptr<MpiPort> open_mpi_port(MpiBinding binding, uint64_t communicator, int rank,
                                       int size, uint64_t world, const py::bytes& secret,
                                       const std::string& threads) {
  if (has_memory_with_mpi())
    throw Error(
        ErrorCode::rendezvous,
        "MPI may still use memory of an operation that failed before, as a rank did not take "
        "part in ending it; start the program anew");
  binding.communicator = communicator;
  auto port = std::make_shared<MpiPort>(bind_mpi(binding), rank, size, world, secret_from(secret),
                                        threads_from(threads), mpi_duplicates_of(communicator));
  watch_the_end_of_mpi(port);
  return port;
}

}  // namespace

void bind_mpi_port(py::module_& module) {
  py::class_<MpiBinding>(module, "MpiBinding", "An MPI, as mpi4py knows it.")
      .def(
          py::init(&binding_from), py::kw_only(), py::arg("module"), py::arg("handle_bytes"),
          py::arg("status_bytes"), py::arg("byte"), py::arg("comm_self"), py::arg("comm_world"),
          py::arg("errors_return"), py::arg("in_place"), py::arg("dtypes"), py::arg("ops"),
          "`module`: the file of mpi4py.MPI. Sizes and handles: of MPI's types and objects, as "
          "MPI._sizeof and MPI._handleof say; `dtypes` and `ops` by the names that they have here, "
          "as far as MPI has them. From now on MPI_Finalize is noticed.");
  py::class_<MpiPort, std::shared_ptr<MpiPort>>(module, "MpiPort",
                                                "Links to the ranks of a communicator.")
      .def(py::init(&open_mpi_port), py::arg("binding"), py::arg("communicator"), py::arg("rank"),
           py::arg("size"), py::arg("world"), py::arg("secret"), py::arg("threads"),
           "`communicator`: the handle of one that nobody else uses; its errors return. `world`: "
           "the same on all ranks, and another each time. `secret`: the job's. `threads`: as MPI "
           "was initialized: "
           "multiple, serialized, or funneled: then this thread alone calls it.");
  module.def(
      "end_mpi_at_exit",
      [](const MpiBinding& binding, bool joined) {
        end_mpi_at_exit(bind_mpi_exit(binding), joined);
      },
      py::arg("binding"), py::arg("joined"),
      "exit() ends MPI: by MPI_Abort where its code is not 0 and this process is `joined` to a "
      "world, "
      "or was to one that has failed; else by MPI_Finalize. What exit() is to do before it is "
      "asked "
      "of it afterwards.");
  module.def("is_mpi_abandoned_by_another", &is_abandoned_by_another,
             "Whether another rank is why MPI_Finalize will end this process.");
  module.def(
      "abandon_mpi", [](const std::string& why) { abandon_mpi(why); }, py::arg("why"),
      "From now on MPI_Finalize ends this process with exit code 1: some rank will not come "
      "to it.");
}

}  // namespace farandole
