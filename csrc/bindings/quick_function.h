// A callable in front of a Python function, which it wraps as functools.lru_cache does: a call goes
// to native code first, and to the function when that does not know it.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <optional>

namespace farandole {

namespace py = pybind11;

/// Arguments by place, then those by name (`keywords`: a tuple of names, or null). Nothing: the
/// Python function is to be asked.
using QuickBody = std::function<std::optional<py::object>(PyObject* const* values, size_t places,
                                                          PyObject* keywords)>;

py::object make_quick_function(QuickBody body, const py::object& slow);

}  // namespace farandole
