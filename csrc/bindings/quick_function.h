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

/// A name as the interpreter keeps it: one object, compared by address.
inline PyObject* intern(const char* text) { return PyUnicode_InternFromString(text); }

/// False: not a plain float.
inline bool read_factor(PyObject* given, double& factor) {
  if (!PyFloat_CheckExact(given)) return false;
  factor = PyFloat_AS_DOUBLE(given);
  return true;
}

py::object make_quick_function(QuickBody body, const py::object& slow);

}  // namespace farandole
