// Methods that name a wrong argument: pybind11's own TypeError lists all that it would take.
#include "bindings/bind.h"
#include "bindings/quick_function.h"

namespace farandole {
namespace {

/// Whether pybind11 raised it before the method was entered.
bool is_of_arguments(const py::error_already_set& error) {
  if (error.matches(PyExc_UnicodeError)) return true;
  if (!error.matches(PyExc_TypeError) && !error.matches(PyExc_RuntimeError)) return false;
  const std::string text = py::str(error.value());
  return text.find("incompatible function arguments") != std::string::npos ||
         text.rfind("Unable to cast", 0) == 0;
}

py::object guarded(const py::object& method, const py::object& explain) {
  const QuickBody body = [method, explain](PyObject* const* values, size_t places,
                                           PyObject* keywords) -> std::optional<py::object> {
    PyObject* result = PyObject_Vectorcall(method.ptr(), values, places, keywords);
    if (result != nullptr) return py::reinterpret_steal<py::object>(result);
    py::error_already_set error;
    if (!is_of_arguments(error)) throw error;
    const py::object why = py::reinterpret_steal<py::object>(
        PyObject_Vectorcall(explain.ptr(), values, places, keywords));
    if (!why) throw py::error_already_set();
    if (why.is_none()) throw error;
    throw Error(ErrorCode::invalid_argument, why.cast<std::string>());
  };
  return make_quick_function(body, method);
}

}  // namespace

void bind_guarded(py::module_& module) {
  module.def("guarded", &guarded, py::arg("method"), py::arg("explain"),
             "The method; where its arguments do not fit, what explain(*args, **kwargs) returns is "
             "the text of an InvalidArgument, unless that is None.");
}

}  // namespace farandole
