// A second module with the parts of the core that only tests reach. No wheel contains it.
#include "core/bindings/bind.h"

PYBIND11_MODULE(_core_testing, module) {
  using namespace farandole;
  module.doc() = "The parts of farandole's core, for its own tests.";
  py::module_::import("farandole._core");  // registers our errors and HyperParameters
  bind_folds(module);
  bind_limits(module);
  bind_plans(module);
  bind_proofs(module);
  bind_seals(module);
  bind_simulations(module);
  bind_updates(module);
}
