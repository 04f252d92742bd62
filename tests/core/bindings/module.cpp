// What only tests reach of the core: a second module, which no wheel has.
#include "core/bindings/bind.h"

PYBIND11_MODULE(_core_testing, module) {
  using namespace farandole;
  module.doc() = "The parts of farandole's core, for its own tests.";
  py::module_::import("farandole._core");  // knows our errors as Python's, and HyperParameters
  bind_folds(module);
  bind_limits(module);
  bind_plans(module);
  bind_proofs(module);
  bind_seals(module);
  bind_simulations(module);
  bind_updates(module);
}
