// The quick way into a collective from Python: a callable in front of the Python function, which it
// wraps as functools.lru_cache does.
//
// A call with arrays that are known (known_arrays.h) and nothing but op, out, factors, root and
// group is made here, without one Python instruction. Every other call goes to the function, which
// has the one meaning of all arguments and finds the words for those that are wrong.
#include "bindings/quick_call.h"

#include <structmember.h>

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "bindings/bind.h"
#include "bindings/calls.h"
#include "bindings/known_arrays.h"
#include "engine/fork.h"
#include "group/group.h"

namespace farandole {
namespace {

/// While nobody else can run Python: as long as ranks that come together need to meet.
constexpr size_t kBriefBytes = 32 << 10;
constexpr int kBriefLooks = 128;

/// What was given by name or place; null: nothing.
struct Arguments {
  PyObject *x = nullptr, *op = nullptr, *root = nullptr, *out = nullptr, *prescale = nullptr,
           *postscale = nullptr, *group = nullptr;
};
using Argument = PyObject* Arguments::*;

struct Row {
  std::string_view name;
  Collective kind;
  Argument second;   // what the second place means; null: nothing
  bool scales;       // takes prescale and postscale
  bool makes_alike;  // the result has the input's shape
};
constexpr Row kRows[] = {
    {"all_reduce", Collective::all_reduce, &Arguments::op, true, true},
    {"reduce_scatter", Collective::reduce_scatter, &Arguments::op, true, false},
    {"all_gather", Collective::all_gather, nullptr, false, false},
    {"broadcast", Collective::broadcast, &Arguments::root, false, true},
};

/// Names of arguments as the interpreter keeps them: one object each, compared by address.
struct Names {
  struct Named {
    PyObject* name;
    Argument argument;
  };
  static PyObject* intern(const char* text) { return PyUnicode_InternFromString(text); }
  std::array<Named, 7> known{{{intern("out"), &Arguments::out},
                              {intern("op"), &Arguments::op},
                              {intern("group"), &Arguments::group},
                              {intern("prescale"), &Arguments::prescale},
                              {intern("postscale"), &Arguments::postscale},
                              {intern("root"), &Arguments::root},
                              {intern("x"), &Arguments::x}}};
  std::array<PyObject*, 4> none{intern("name"), intern("algorithm"), intern("level"),
                                intern("timeout")};  // may be given as None
  PyObject* async_op = intern("async_op");           // may be given as False
  std::array<PyObject*, kReduceOps.size()> ops{};

  Names() {
    for (size_t i = 0; i < ops.size(); ++i)
      ops[i] = intern(std::string(kReduceOps[i].name).c_str());
  }
};

const Names& names() {
  static const Names* const all = new Names;  // lives as long as the interpreter
  return *all;
}

struct QuickCall {
  PyObject_HEAD vectorcallfunc vectorcall;
  const Row* row;
  PyObject* slow;
  PyObject* world;
  PyObject* dict;
  PyObject* weak_references;
};
QuickCall& self_of(PyObject* object) { return *reinterpret_cast<QuickCall*>(object); }

// ---- reading the arguments: false means that the Python function is to be asked ----

bool read_keyword(PyObject* name, PyObject* value, Arguments& to) {
  for (const auto& known : names().known) {
    if (name != known.name) continue;
    if (to.*known.argument != nullptr) return false;  // given twice
    to.*known.argument = value;
    return true;
  }
  for (PyObject* none : names().none)
    if (name == none) return value == Py_None;
  return name == names().async_op && value == Py_False;
}

bool read(const Row& row, PyObject* const* values, size_t places, PyObject* keywords,
          Arguments& to) {
  if (places > (row.second != nullptr ? 2u : 1u)) return false;
  if (places > 0) to.x = values[0];
  if (places > 1) to.*row.second = values[1];
  const Py_ssize_t named = keywords != nullptr ? PyTuple_GET_SIZE(keywords) : 0;
  for (Py_ssize_t i = 0; i < named; ++i)
    if (!read_keyword(PyTuple_GET_ITEM(keywords, i), values[places + static_cast<size_t>(i)], to))
      return false;
  if (to.op != nullptr && row.second != &Arguments::op) return false;
  if (to.root != nullptr && row.second != &Arguments::root) return false;
  return to.x != nullptr && (row.scales || (to.prescale == nullptr && to.postscale == nullptr));
}

bool read_factor(PyObject* given, double& factor) {
  if (given == nullptr) return true;
  if (!PyFloat_CheckExact(given)) return false;
  factor = PyFloat_AS_DOUBLE(given);
  return true;
}

bool read_root(PyObject* given, int& root) {
  if (given == nullptr) return true;
  if (!PyLong_CheckExact(given)) return false;
  int overflow = 0;
  const long value = PyLong_AsLongAndOverflow(given, &overflow);
  root = static_cast<int>(value);
  return overflow == 0 && root == value;
}

bool read_op(PyObject* given, ReduceOp& op) {
  if (given == nullptr) return true;
  for (size_t i = 0; i < kReduceOps.size(); ++i) {
    if (names().ops[i] != given) continue;
    op = kReduceOps[i].op;
    return true;
  }
  return false;
}

bool read_options(const Arguments& from, Options& to) {
  return read_op(from.op, to.op) && read_factor(from.prescale, to.prescale) &&
         read_factor(from.postscale, to.postscale) && read_root(from.root, to.root);
}

/// A reference to the group that is meant; null for the Python function to say why there is none.
py::object group_of(const QuickCall& self, PyObject* given) {
  static PyObject* const name = PyUnicode_InternFromString("group");
  static const py::handle type = py::type::of<Group>();
  py::object group;
  if (given != nullptr && given != Py_None) {
    group = py::reinterpret_borrow<py::object>(given);
  } else {
    group = py::reinterpret_steal<py::object>(PyObject_GetAttr(self.world, name));
    if (!group) PyErr_Clear();
  }
  if (!group || reinterpret_cast<PyObject*>(Py_TYPE(group.ptr())) != type.ptr()) return {};
  return group;
}

Group& native(const py::object& group) {
  auto* instance = reinterpret_cast<py::detail::instance*>(group.ptr());
  return *instance->get_value_and_holder().value_ptr<Group>();
}

// ---- the call ----

/// The result; or nothing, when the Python function is to be asked.
std::optional<py::object> call_quickly(const QuickCall& self, PyObject* const* values,
                                       size_t places, PyObject* keywords) {
  Arguments given;
  Options options;
  if (!read(*self.row, values, places, keywords, given) || !read_options(given, options))
    return std::nullopt;
  const py::object group = group_of(self, given.group);
  if (!group) return std::nullopt;
  refuse_in_child();

  py::object result;
  std::optional<Buffer> input, output;
  if (given.out == nullptr || given.out == Py_None) {
    input = self.row->makes_alike ? look_at_numpy(given.x, false) : std::nullopt;
    if (!input) return std::nullopt;
    result = py::reinterpret_steal<py::object>(empty_like(given.x));
    if (!result) throw py::error_already_set();
    output = look_at_numpy(result.ptr(), true);
  } else {
    const bool in_place = given.x == given.out;
    output = look_at(given.out, true);
    input = in_place ? output : look_at(given.x, false);
    result = py::reinterpret_borrow<py::object>(given.out);
  }
  if (!input || !output) return std::nullopt;

  const int looks = input->bytes() <= kBriefBytes ? kBriefLooks : 0;
  const Handle handle =
      native(group).run(self.row->kind, *input, *output, std::move(options), looks);
  if (handle.valid())
    wait_for(native(group).shared_from_this(), [&](Deadline d) { return handle.wait(d); });
  return result;
}

PyObject* call(PyObject* callable, PyObject* const* values, size_t flags, PyObject* keywords) {
  const QuickCall& self = self_of(callable);
  const auto places = static_cast<size_t>(PyVectorcall_NARGS(flags));
  try {
    if (auto result = call_quickly(self, values, places, keywords)) return result->release().ptr();
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
  QuickCall& self = self_of(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self.slow);
  Py_VISIT(self.world);
  Py_VISIT(self.dict);
  return 0;
}

int clear(PyObject* object) {
  QuickCall& self = self_of(object);
  Py_CLEAR(self.slow);
  Py_CLEAR(self.world);
  Py_CLEAR(self.dict);
  return 0;
}

void deallocate(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  if (self_of(object).weak_references != nullptr) PyObject_ClearWeakRefs(object);
  clear(object);
  PyObject_GC_Del(object);
  Py_DECREF(type);
}

PyTypeObject* make_type() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(QuickCall, vectorcall), READONLY, nullptr},
      {"__dictoffset__", T_PYSSIZET, offsetof(QuickCall, dict), READONLY, nullptr},
      {"__weaklistoffset__", T_PYSSIZET, offsetof(QuickCall, weak_references), READONLY, nullptr},
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
  static PyType_Spec spec = {"farandole._core._QuickCall", sizeof(QuickCall), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
                             slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

const Row* row_named(std::string_view name) {
  for (const Row& row : kRows)
    if (row.name == name) return &row;
  return nullptr;
}

}  // namespace

py::object make_quick_call(const std::string& kind, const py::object& world,
                           const py::object& slow) {
  const Row* row = row_named(kind);
  if (row == nullptr) throw Error(ErrorCode::internal, "there is no quick way into " + kind);
  learn_numpy();
  static PyTypeObject* const type = make_type();
  if (type == nullptr) throw py::error_already_set();
  PyObject* object = type->tp_alloc(type, 0);
  if (object == nullptr) throw py::error_already_set();
  QuickCall& self = self_of(object);
  self.vectorcall = call;
  self.row = row;
  self.slow = py::object(slow).release().ptr();
  self.world = py::object(world).release().ptr();
  py::object made = py::reinterpret_steal<py::object>(object);
  return py::module_::import("functools").attr("update_wrapper")(made, slow);
}

}  // namespace farandole
