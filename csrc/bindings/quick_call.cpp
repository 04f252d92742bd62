// The quick way into a collective from Python.
//
// A call with arrays that are known (known_arrays.h) and nothing but op, out, factors, root and
// group is made here, without one Python instruction (where a root alone gets or gives something,
// by the others too). Every other call goes to the function, which has the one meaning of all
// arguments and finds the words for those that are wrong.
#include "bindings/quick_call.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "bindings/bind.h"
#include "bindings/calls.h"
#include "bindings/known_arrays.h"
#include "bindings/quick_function.h"
#include "engine/fork.h"
#include "group/group.h"

namespace farandole {
namespace {

/// While nobody else can run Python: as long as ranks that come together need to meet.
constexpr size_t kBriefBytes = 32 << 10;
constexpr int kBriefLooks = 128;

/// The arguments, given by name or position; null: not given.
struct Arguments {
  PyObject *x = nullptr, *op = nullptr, *root = nullptr, *out = nullptr, *prescale = nullptr,
           *postscale = nullptr, *group = nullptr;
};
using Argument = PyObject* Arguments::*;

enum class Who { all, root };

struct Row {
  std::string_view name;
  Collective kind;
  std::array<Argument, 2> places;  // what those after the first mean; null: nothing
  bool makes_alike;                // the result has the input's shape
  Who gives = Who::all, gets = Who::all;
  bool cuts_rows = false;  // the input into one block for each rank

  bool takes(Argument argument) const {
    return std::find(places.begin(), places.end(), argument) != places.end();
  }
};
constexpr Argument kOp = &Arguments::op, kRoot = &Arguments::root, kNothing = nullptr;
constexpr Row kRows[] = {
    {"all_reduce", Collective::all_reduce, {kOp, kNothing}, true},
    {"reduce_scatter", Collective::reduce_scatter, {kOp, kNothing}, false},
    {"all_gather", Collective::all_gather, {}, false},
    {"broadcast", Collective::broadcast, {kRoot, kNothing}, true},
    {"reduce", Collective::reduce, {kOp, kRoot}, true, Who::all, Who::root},
    {"gather", Collective::gather, {kRoot, kNothing}, false, Who::all, Who::root},
    {"scatter", Collective::scatter, {kRoot, kNothing}, false, Who::root, Who::all},
    {"all_to_all", Collective::all_to_all, {}, true, Who::all, Who::all, true},
};

/// Names of arguments.
struct Names {
  struct Named {
    PyObject* name;
    Argument argument;
  };
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
  if (places > 1 + row.places.size()) return false;
  if (places > 0) to.x = values[0];
  for (size_t i = 1; i < places; ++i) {
    if (row.places[i - 1] == nullptr) return false;
    to.*row.places[i - 1] = values[i];
  }
  const Py_ssize_t named = keywords != nullptr ? PyTuple_GET_SIZE(keywords) : 0;
  for (Py_ssize_t i = 0; i < named; ++i)
    if (!read_keyword(PyTuple_GET_ITEM(keywords, i), values[places + static_cast<size_t>(i)], to))
      return false;
  const bool scaled = to.prescale != nullptr || to.postscale != nullptr;
  if ((to.op != nullptr || scaled) && !row.takes(kOp)) return false;
  if (to.root != nullptr && !row.takes(kRoot)) return false;
  return to.x != nullptr || row.gives == Who::root;
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

bool read_options(const Arguments& from, CollectiveSpec& to) {
  return read_op(from.op, to.op) && read_root(from.root, to.root) &&
         (from.prescale == nullptr || read_factor(from.prescale, to.prescale)) &&
         (from.postscale == nullptr || read_factor(from.postscale, to.postscale));
}

/// A reference to the group that is meant; null for the Python function to say why there is none.
py::object group_of(PyObject* world, PyObject* given) {
  static PyObject* const name = PyUnicode_InternFromString("group");
  static const py::handle type = py::type::of<Group>();
  py::object group;
  if (given != nullptr && given != Py_None) {
    group = py::reinterpret_borrow<py::object>(given);
  } else {
    group = py::reinterpret_steal<py::object>(PyObject_GetAttr(world, name));
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

/// Reads this rank's input, output and result; false when the Python function is to be called. A
/// buffer that the rank does not give or get is empty, of the same dtype.
bool read_memory(const Row& row, const Arguments& given, bool gives, bool gets, PlainCall& to,
                 py::object& result) {
  if (gives && given.x == nullptr) return false;
  if (!gets) {
    if (!look_at(given.x, false, to.input)) return false;
    to.output.dtype = to.input.dtype;
    result = py::none();
    return true;
  }
  if (given.out == nullptr || given.out == Py_None) {
    if (!row.makes_alike || !look_at_numpy(given.x, false, to.input)) return false;
    result = py::reinterpret_steal<py::object>(empty_like(given.x));
    if (!result) throw py::error_already_set();
    return look_at_numpy(result.ptr(), true, to.output);
  }
  if (!look_at(given.out, true, to.output)) return false;
  result = py::reinterpret_borrow<py::object>(given.out);
  if (gives && given.x != given.out) return look_at(given.x, false, to.input);
  if (gives) to.input = to.output;
  to.input.dtype = to.output.dtype;
  return true;
}

/// Whether the first dimension is known to be one of `parts` equal blocks.
bool cuts_evenly(PyObject* array, int parts) {
  const auto rows = look_at_rows(array);
  return rows && *rows % parts == 0;
}

/// The result; or nothing, when the Python function is to be asked.
std::optional<py::object> call_quickly(const Row& row, PyObject* world, PyObject* const* values,
                                       size_t places, PyObject* keywords) {
  Arguments given;
  PlainCall call;
  call.spec.kind = row.kind;
  if (!read(row, values, places, keywords, given) || !read_options(given, call.spec))
    return std::nullopt;
  const py::object group = group_of(world, given.group);
  if (!group) return std::nullopt;
  refuse_in_child();

  Group& ranks = native(group);
  const bool is_root = ranks.rank() == call.spec.root;
  py::object result;
  if (!read_memory(row, given, row.gives == Who::all || is_root, row.gets == Who::all || is_root,
                   call, result) ||
      (row.cuts_rows && !cuts_evenly(given.x, ranks.size())))
    return std::nullopt;

  const Handle handle = ranks.run(call, call.input.bytes() <= kBriefBytes ? kBriefLooks : 0);
  if (handle.valid())
    wait_for(ranks.shared_from_this(), [&](Deadline d) { return handle.wait(d); });
  return result;
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
  return make_quick_function(
      [row, world](PyObject* const* values, size_t places, PyObject* keywords) {
        return call_quickly(*row, world.ptr(), values, places, keywords);
      },
      slow);
}

}  // namespace farandole
