// The quick way into a collective from Python. See quick_call.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace farandole {

namespace py = pybind11;

/// A callable in front of `slow`, the Python function of the collective `kind`; the default group
/// is the attribute `group` of `world`.
py::object make_quick_call(const std::string& kind, const py::object& world,
                           const py::object& slow);

}  // namespace farandole
