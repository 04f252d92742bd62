// Worlds of ranks in one thread, in an order drawn from a seed.
#include <string>

#include "core/bindings/bind.h"
#include "core/sim_negotiation.h"
#include "core/sim_world.h"

namespace farandole {

void bind_simulations(py::module_& testing) {
  py::class_<SimReport>(testing, "SimReport")
      .def_readonly("seed", &SimReport::seed)
      .def_readonly("ranks", &SimReport::ranks)
      .def_readonly("fate", &SimReport::fate)
      .def_readonly("turns", &SimReport::turns)
      .def_readonly("operations", &SimReport::operations)
      .def_readonly("correct", &SimReport::correct)
      .def_readonly("refused", &SimReport::refused)
      .def_readonly("failed", &SimReport::failed)
      .def_readonly("verdict", &SimReport::verdict)
      .def_readonly("complaint", &SimReport::complaint)
      .def("__repr__", [](const SimReport& r) {
        return "SimReport(seed=" + std::to_string(r.seed) + ", ranks=" + std::to_string(r.ranks) +
               ", fate='" + r.fate + "', turns=" + std::to_string(r.turns) +
               ", operations=" + std::to_string(r.operations) +
               ", correct=" + std::to_string(r.correct) + ", refused=" + std::to_string(r.refused) +
               ", failed=" + std::to_string(r.failed) + ", verdict='" + r.verdict +
               "', complaint='" + r.complaint + "')";
      });
  testing.def("simulate", &simulate, py::arg("seed"), py::arg("steps") = 30, py::arg("ranks") = 3,
              py::call_guard<py::gil_scoped_release>(),
              "Runs a whole world of ranks in this thread, in an order drawn from the seed. "
              "`complaint` is empty when all was well.");
  py::class_<NegotiationReport>(testing, "NegotiationReport")
      .def_readonly("seed", &NegotiationReport::seed)
      .def_readonly("ranks", &NegotiationReport::ranks)
      .def_readonly("ordered", &NegotiationReport::ordered)
      .def_readonly("refused", &NegotiationReport::refused)
      .def_readonly("stood_in", &NegotiationReport::stood_in)
      .def_readonly("forgotten", &NegotiationReport::forgotten)
      .def_readonly("stale", &NegotiationReport::stale)
      .def_readonly("bytes", &NegotiationReport::bytes)
      .def_readonly("complaint", &NegotiationReport::complaint);
  testing.def("simulate_negotiation", &simulate_negotiation, py::arg("seed"), py::arg("ranks") = 3,
              py::arg("names") = 6, py::arg("times") = 6, py::arg("ids") = 16384,
              py::call_guard<py::gil_scoped_release>(),
              "Ranks that submit operations by name in random orders; `complaint` is empty when "
              "all were told one order, each operation once.");
}

}  // namespace farandole
