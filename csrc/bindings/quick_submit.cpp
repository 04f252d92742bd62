// The quick ways to submit a tensor by name and to wait for it. Everything that most training steps
// do is made here; every other call goes to the Python function.
#include <array>
#include <string_view>

#include "bindings/known_arrays.h"
#include "bindings/named_handles.h"
#include "bindings/quick_function.h"
#include "engine/fork.h"

namespace farandole {
namespace {

/// Horovod's numbers of reductions; Adasum is none of the engine's.
constexpr std::array<std::optional<ReduceOp>, 6> kOps{
    ReduceOp::mean, ReduceOp::sum, std::nullopt, ReduceOp::min, ReduceOp::max, ReduceOp::product};

struct Words {
  PyObject* name = intern("name");
  PyObject* op = intern("op");
  PyObject* average = intern("average");
  PyObject* prescale = intern("prescale_factor");
  PyObject* postscale = intern("postscale_factor");
};
const Words& words() {
  static const Words* const all = new Words;  // lives as long as the interpreter
  return *all;
}

bool read_op_number(PyObject* value, ReduceOp& op) {
  if (!PyLong_CheckExact(value)) return false;
  int overflow = 0;
  const long number = PyLong_AsLongAndOverflow(value, &overflow);
  if (overflow != 0 || number < 0 || number >= static_cast<long>(kOps.size()) ||
      !kOps[static_cast<size_t>(number)])
    return false;
  op = *kOps[static_cast<size_t>(number)];
  return true;
}

bool read_name(PyObject* value, std::string_view& name) {
  if (!PyUnicode_CheckExact(value)) return false;
  Py_ssize_t length = 0;
  const char* text = PyUnicode_AsUTF8AndSize(value, &length);
  if (text == nullptr) PyErr_Clear();
  name = {text, static_cast<size_t>(length)};
  return text != nullptr && length > 0;
}

bool read_keywords(PyObject* const* values, PyObject* keywords, NamedCall& call) {
  const Py_ssize_t count = keywords != nullptr ? PyTuple_GET_SIZE(keywords) : 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const word = PyTuple_GET_ITEM(keywords, i);
    PyObject* const value = values[i];
    const bool read = word == words().name        ? read_name(value, call.name)
                      : word == words().op        ? read_op_number(value, call.op)
                      : word == words().average   ? value == Py_None
                      : word == words().prescale  ? read_factor(value, call.prescale)
                      : word == words().postscale ? read_factor(value, call.postscale)
                                                  : false;
    if (!read) return false;
  }
  return !call.name.empty();
}

/// allreduce_async_(tensor, name=…, op=…, …) on the world.
std::optional<py::object> submit_quickly(PyObject* const* values, size_t places, PyObject* keywords,
                                         const py::object& bump_version) {
  const std::shared_ptr<PyNames>& names = current_names();
  if (places != 1 || !names) return std::nullopt;
  NamedCall call{{Collective::all_reduce, ReduceOp::mean}};
  if (!read_keywords(values + places, keywords, call)) return std::nullopt;
  const auto tensor = look_at_tensor(values[0]);
  if (!tensor) return std::nullopt;
  refuse_in_child();
  const NamedTensor tensor_given{{tensor->buffer, tensor->buffer}, tensor->shape};
  call.tensors = {&tensor_given, 1};
  NamedRequest* const request = names->named->submit(call);
  HeldRequest held;
  held.names = names;
  held.request = request;
  held.result = py::reinterpret_borrow<py::object>(values[0]);
  const int64_t number = NamedHandles::all().add(std::move(held));
  PyObject* bumped = PyObject_CallOneArg(bump_version.ptr(), values[0]);
  if (bumped == nullptr) throw py::error_already_set();
  Py_DECREF(bumped);
  return py::int_(number);
}

}  // namespace

py::object make_quick_submit(const py::object& slow, const py::object& bump_version) {
  return make_quick_function(
      [bump_version](PyObject* const* values, size_t places, PyObject* keywords) {
        return submit_quickly(values, places, keywords, bump_version);
      },
      slow);
}

py::object make_quick_wait(const py::object& slow) {
  return make_quick_function(
      [](PyObject* const* values, size_t places, PyObject* keywords) -> std::optional<py::object> {
        if (places != 1 || keywords != nullptr || !PyLong_CheckExact(values[0]))
          return std::nullopt;
        int overflow = 0;
        const long long number = PyLong_AsLongLongAndOverflow(values[0], &overflow);
        if (overflow != 0) return std::nullopt;
        return NamedHandles::all().wait(number);
      },
      slow);
}

}  // namespace farandole
