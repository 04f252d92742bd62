// The error table as Python classes: farandole.Error and one subclass per row, fields as
// attributes.
#include "base/error.h"

#include <string>

#include "bindings/bind.h"

namespace farandole {
namespace {

std::array<PyObject*, kErrors.size()> python_classes{};

/// Names and words of other processes stand in it, cut where they were too long: never no text.
py::str shown(const std::string& text) {
  PyObject* made =
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace");
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(made);
}

void set_fields(PyObject* instance, const Error& error) {
  const Context& c = error.where();
  py::handle h(instance);
  h.attr("verdict") = shown(error.verdict());
  h.attr("evidence") = shown(c.evidence);
  h.attr("advice") = shown(error.advice());
  h.attr("rank") = c.rank >= 0 ? py::object(py::int_(c.rank)) : py::none();
  h.attr("peer") = c.peer >= 0 ? py::object(py::int_(c.peer)) : py::none();
  h.attr("pid") = c.pid > 0 ? py::object(py::int_(c.pid)) : py::none();
  h.attr("signal") = c.signal > 0 ? py::object(py::int_(c.signal)) : py::none();
  h.attr("host") = shown(c.host);
  h.attr("operation") = shown(c.operation);
  h.attr("tensor") = shown(c.tensor);
  h.attr("sequence") = c.sequence;
  h.attr("lane") = c.lane >= 0 ? py::object(py::int_(c.lane)) : py::none();
  h.attr("step") = c.step >= 0 ? py::object(py::int_(c.step)) : py::none();
  h.attr("bytes_done") = c.bytes_done;
  h.attr("bytes_total") = c.bytes_total;
  h.attr("field") = shown(c.field);
  py::dict values;
  for (const auto& [value, ranks] : c.values) {
    py::list list;
    for (int r : ranks) list.append(r);
    values[shown(value)] = list;
  }
  h.attr("values") = values;
}

/// The verdict of an error that Python code made from a text alone. Not a data descriptor: fields
/// set on the instance come first.
struct FirstLine {};

/// Every field exists on every error.
void set_defaults(py::module_& module, const py::object& base) {
  py::class_<FirstLine>(module, "_FirstLine")
      .def("__get__", [](const py::object& self, const py::object& error, const py::object&) {
        if (error.is_none()) return self;
        return py::object(py::str(error).attr("partition")("\n")[py::int_(0)]);
      });
  base.attr("verdict") = FirstLine{};
  for (const char* name : {"rank", "peer", "pid", "signal", "lane", "step"})
    base.attr(name) = py::none();
  for (const char* name : {"evidence", "host", "operation", "tensor", "field"})
    base.attr(name) = "";
  for (const char* name : {"sequence", "bytes_done", "bytes_total"}) base.attr(name) = 0;
  base.attr("values") = py::module_::import("types").attr("MappingProxyType")(py::dict());
}

}  // namespace

/// Sets the Python error that `error` stands for; the GIL is held.
void raise_in_python(const Error& error) {
  PyObject* type = python_classes[static_cast<size_t>(error.code())];
  PyObject* instance = PyObject_CallOneArg(type, shown(error.what()).ptr());
  if (instance == nullptr) return;
  set_fields(instance, error);
  PyErr_SetObject(type, instance);
  Py_DECREF(instance);
}

/// A Python exception object for `error`, for code that stores rather than raises it.
py::object python_error(const Error& error) {
  PyObject* type = python_classes[static_cast<size_t>(error.code())];
  py::object instance =
      py::reinterpret_steal<py::object>(PyObject_CallOneArg(type, shown(error.what()).ptr()));
  if (!instance) throw py::error_already_set();
  set_fields(instance.ptr(), error);
  return instance;
}

void bind_errors(py::module_& module) {
  py::module_ builtins = py::module_::import("builtins");
  py::object base = py::reinterpret_steal<py::object>(
      PyErr_NewExceptionWithDoc("farandole.Error",
                                "Base of every error of farandole: a verdict, its evidence, and "
                                "advice, with the facts as attributes.",
                                PyExc_RuntimeError, nullptr));
  module.attr("Error") = base;
  base.attr("advice") = "";
  set_defaults(module, base);
  py::list names;
  for (const ErrorRow& r : kErrors) {
    py::list bases;
    bases.append(base);
    if (!r.also_is.empty()) bases.append(builtins.attr(std::string(r.also_is).c_str()));
    std::string name("farandole.");
    name += r.python_class;
    PyObject* type = PyErr_NewException(name.c_str(), py::tuple(bases).ptr(), nullptr);
    if (type == nullptr) throw py::error_already_set();
    python_classes[static_cast<size_t>(r.code)] = type;  // lives as long as the process
    py::handle(type).attr("advice") = std::string(r.advice);
    module.attr(std::string(r.python_class).c_str()) = py::handle(type);
    names.append(std::string(r.python_class));
  }
  module.attr("error_names") = names;
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const Error& error) {
      raise_in_python(error);
    }
  });
}

}  // namespace farandole
