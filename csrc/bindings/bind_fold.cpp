// The arithmetic's variants.
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings/bind.h"
#include "fold/kernels.h"

namespace farandole {

void bind_fold(py::module_& module) {
  module.def(
      "instruction_sets",
      [] {
        const auto names = instruction_sets();
        return std::vector<std::string>(names.begin(), names.end());
      },
      "The variants of the folds that this build has and this processor runs; the last is used.");
}

}  // namespace farandole
