#include "bindings/quick_function.h"

#include <structmember.h>

#include <cstddef>

#include "bindings/bind.h"

namespace farandole {
namespace {

struct QuickFunction {
  PyObject_HEAD vectorcallfunc vectorcall;
  QuickBody* body;
  PyObject* slow;
  PyObject* dict;
  PyObject* weak_references;
};
QuickFunction& self_of(PyObject* object) { return *reinterpret_cast<QuickFunction*>(object); }

PyObject* call(PyObject* callable, PyObject* const* values, size_t flags, PyObject* keywords) {
  const QuickFunction& self = self_of(callable);
  const auto places = static_cast<size_t>(PyVectorcall_NARGS(flags));
  try {
    if (auto result = (*self.body)(values, places, keywords)) return result->release().ptr();
  } catch (const Error& error) {
    raise_in_python(error);
    return nullptr;
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  return PyObject_Vectorcall(self.slow, values, flags, keywords);
}

// ---- the type ----

PyObject* bind_to_instance(PyObject* self, PyObject* instance, PyObject*) {
  if (instance == nullptr || instance == Py_None) return Py_NewRef(self);
  return PyMethod_New(self, instance);
}

PyObject* repr(PyObject* self) { return PyObject_Repr(self_of(self).slow); }

/// As functions are pickled: by name.
PyObject* reduce(PyObject* self, PyObject*) { return PyObject_GetAttrString(self, "__qualname__"); }

int traverse(PyObject* object, visitproc visit, void* arg) {
  QuickFunction& self = self_of(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self.slow);
  Py_VISIT(self.dict);
  return 0;
}

int clear(PyObject* object) {
  QuickFunction& self = self_of(object);
  Py_CLEAR(self.slow);
  Py_CLEAR(self.dict);
  return 0;
}

void deallocate(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  if (self_of(object).weak_references != nullptr) PyObject_ClearWeakRefs(object);
  clear(object);
  delete self_of(object).body;
  PyObject_GC_Del(object);
  Py_DECREF(type);
}

PyTypeObject* make_type() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(QuickFunction, vectorcall), READONLY, nullptr},
      {"__dictoffset__", T_PYSSIZET, offsetof(QuickFunction, dict), READONLY, nullptr},
      {"__weaklistoffset__", T_PYSSIZET, offsetof(QuickFunction, weak_references), READONLY,
       nullptr},
      {}};
  static PyGetSetDef attributes[] = {
      {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr}, {}};
  static PyMethodDef methods[] = {{"__reduce__", reduce, METH_NOARGS, nullptr}, {}};
  static PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_descr_get, reinterpret_cast<void*>(bind_to_instance)},
                                {Py_tp_repr, reinterpret_cast<void*>(repr)},
                                {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
                                {Py_tp_members, members},
                                {Py_tp_getset, attributes},
                                {Py_tp_methods, methods},
                                {0, nullptr}};
  static PyType_Spec spec = {"farandole._core._QuickFunction", sizeof(QuickFunction), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
                             slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

}  // namespace

py::object make_quick_function(QuickBody body, const py::object& slow) {
  static PyTypeObject* const type = make_type();
  if (type == nullptr) throw py::error_already_set();
  PyObject* object = type->tp_alloc(type, 0);
  if (object == nullptr) throw py::error_already_set();
  QuickFunction& self = self_of(object);
  self.vectorcall = call;
  self.body = new QuickBody(std::move(body));
  self.slow = py::object(slow).release().ptr();
  py::object made = py::reinterpret_steal<py::object>(object);
  return py::module_::import("functools").attr("update_wrapper")(made, slow);
}

}  // namespace farandole
