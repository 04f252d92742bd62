#include "bindings/calls.h"

#include "bindings/waiting.h"
#include "engine/fork.h"

namespace farandole {
namespace {

ReduceOp op_from(const std::string& name) {
  if (const auto op = reduce_op_named(name)) return *op;
  std::string known;
  for (const ReduceOpRow& r : kReduceOps) {
    if (!known.empty()) known += ", ";
    known += r.name;
  }
  throw Error(ErrorCode::invalid_argument, "op '" + name + "' is unknown; there are " + known);
}

}  // namespace

Determinism level_from(const std::string& name) {
  if (const auto level = determinism_named(name)) return *level;
  throw Error(ErrorCode::invalid_argument,
              "level '" + name + "' is unknown; there are canonical and fast");
}

Collective collective_from(const std::string& name) {
  const auto kind = collective_named(name);
  if (kind && !is_between_two(*kind)) return *kind;
  throw Error(ErrorCode::invalid_argument, "collective '" + name + "' is unknown");
}

std::optional<Deadline> own_deadline(const py::object& timeout) {
  if (timeout.is_none()) return std::nullopt;
  const Deadline deadline = deadline_from(timeout);
  return PyFloat_AsDouble(timeout.ptr()) == 0 ? Deadline::never() : deadline;
}

std::string text_from(const py::object& given, const std::string& argument) {
  Py_ssize_t size = 0;
  const char* text =
      py::isinstance<py::str>(given) ? PyUnicode_AsUTF8AndSize(given.ptr(), &size) : nullptr;
  if (text != nullptr) return {text, static_cast<size_t>(size)};
  PyErr_Clear();  // surrogates, as of bytes that are no UTF-8
  const char* what = py::isinstance<py::str>(given) ? " is not text in UTF-8" : " is not a string";
  throw Error(ErrorCode::invalid_argument, argument + "=" + std::string(py::repr(given)) + what);
}

Options options_from(const std::string& kind, const std::string& op, double prescale,
                     double postscale, int root, const py::object& name,
                     const py::object& algorithm, const py::object& level,
                     const py::object& timeout, const std::vector<size_t>& counts) {
  Options options{{collective_from(kind), op_from(op), prescale, postscale, root}};
  options.counts = counts;
  if (!name.is_none()) options.name = text_from(name, "name");
  if (!algorithm.is_none()) options.algorithm = text_from(algorithm, "algorithm");
  if (!level.is_none()) options.level = level_from(text_from(level, "level"));
  options.deadline = own_deadline(timeout);
  return options;
}

BorrowedOperand borrow_both(const py::object& input, const py::object& output) {
  if (input.is_none() && output.is_none())
    throw Error(ErrorCode::invalid_argument, "neither an input nor an output is given");
  BorrowedOperand call{{{}, py::none()}, {{}, py::none()}};
  if (!input.is_none()) call.input = borrow(input, input.is(output), "input");
  if (input.is(output))
    call.output = call.input;
  else if (!output.is_none())
    call.output = borrow(output, true, "output");
  if (input.is_none()) call.input.buffer.dtype = call.output.buffer.dtype;
  if (output.is_none()) call.output.buffer.dtype = call.input.buffer.dtype;
  return call;
}

bool wait_for(const std::shared_ptr<Group>& group, const WaitUntil& wait_until, Deadline deadline) {
  return wait_from_python(
      wait_until,
      [&](const std::string& by) {
        group->abort_interrupted(by);
        try {
          wait_until(Deadline::never());
        } catch (const Error&) {  // NOLINT: the interruption itself
        }
      },
      deadline);
}

PyHandle::PyHandle(std::shared_ptr<Group> of, const Handle& handle, py::object value)
    : PyHandle(
          std::move(of), [handle](Deadline d) { return handle.wait(d); },
          [handle] { return handle.done(); }, std::move(value)) {}

PyHandle::PyHandle(std::shared_ptr<Group> of, WaitUntil waits, std::function<bool()> done,
                   py::object value, std::function<void()> after_wait)
    : group(std::move(of)),
      wait_until(std::move(waits)),
      is_done(std::move(done)),
      result(std::move(value)),
      after(std::move(after_wait)) {}

py::object PyHandle::wait(const py::object& timeout) const {
  refuse_in_child();
  if (wait_for(group, wait_until, deadline_from(timeout))) {
    if (after) after();
    return result;
  }
  PyErr_SetString(PyExc_TimeoutError,
                  "the operation is not complete yet; it goes on, and can be waited for again");
  throw py::error_already_set();
}

}  // namespace farandole
