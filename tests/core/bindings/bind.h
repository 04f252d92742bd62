// One function per concept; module.cpp calls them in order.
#pragma once

#include <pybind11/pybind11.h>

#include "base/error.h"

namespace farandole {

namespace py = pybind11;

void bind_folds(py::module_& testing);
void bind_limits(py::module_& testing);
void bind_plans(py::module_& testing);
void bind_proofs(py::module_& testing);
void bind_seals(py::module_& testing);
void bind_simulations(py::module_& testing);
void bind_updates(py::module_& testing);

}  // namespace farandole
