// The common methods of Reducer and ShardedUpdate: gradients' places, the end of a step, weights.
#include <pybind11/stl.h>

#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/bucket_steps.h"
#include "bindings/waiting.h"

namespace farandole {
namespace {

/// Calls `wait_until` as Python waits; TimeoutError when `timeout` passes. An interruption fails
/// the group, as in every other wait.
template <typename Wait>
void wait_or_raise(Group& group, Wait wait_until, const py::object& timeout) {
  refuse_in_child();
  const auto interrupted = [&](const std::string& by) {
    group.abort_interrupted(by);
    try {
      wait_until(Deadline::never());
    } catch (const Error&) {  // NOLINT: the interruption itself
    }
  };
  if (wait_from_python(wait_until, interrupted, deadline_from(timeout))) return;
  PyErr_SetString(PyExc_TimeoutError, "the gradients are not reduced yet");
  throw py::error_already_set();
}

}  // namespace

std::vector<Parameter> parameters_from(const py::list& rows) {
  std::vector<Parameter> parameters;
  for (const py::handle row : rows) {
    const auto fields = row.cast<py::tuple>();
    const auto name = fields[0].cast<std::string>(), dtype = fields[2].cast<std::string>();
    const auto known = dtype_named(dtype);
    if (!known)
      throw Error(ErrorCode::invalid_argument,
                  "parameter '" + name + "' has the unsupported dtype " + dtype);
    parameters.push_back({name, fields[1].cast<size_t>(), *known});
    if (fields.size() > 3) parameters.back().group = fields[3].cast<int>();
  }
  return parameters;
}

py::list rows_of(const std::vector<Bucket>& buckets) {
  py::list list;
  for (const Bucket& b : buckets) {
    py::list placements;
    for (const Placement& p : b.placements)
      placements.append(py::make_tuple(p.parameter, p.offset, p.count));
    list.append(py::make_tuple(std::string(name_of(b.dtype)), b.count, placements));
  }
  return list;
}

BucketOptions bucket_options(const std::string& op, double prescale, double postscale,
                             const BucketLimits& limits, const std::string& label) {
  const auto known = reduce_op_named(op);
  if (!known) throw Error(ErrorCode::invalid_argument, "op '" + op + "' is unknown");
  return {*known, prescale, postscale, limits, label};
}

void bind_bucket_step(py::module_& module) {
  py::class_<BucketStep, std::shared_ptr<BucketStep>>(module, "BucketStep",
                                                      "What training steps by buckets share.")
      .def(
          "wait",
          [](BucketStep& s, const py::object& timeout) {
            wait_or_raise(s.group(), [&](Deadline d) { return s.wait(d); }, timeout);
          },
          py::arg("timeout") = py::none())
      .def(
          "drain",
          [](BucketStep& s, const py::object& timeout) {
            wait_or_raise(s.group(), [&](Deadline d) { return s.drain(d); }, timeout);
          },
          py::arg("timeout") = py::none())
      .def("abandon", &BucketStep::abandon, kUnlocked)
      .def_property_readonly("step_open", &BucketStep::step_open)
      .def(
          "watch_weights",
          [](BucketStep& s, std::vector<std::string> names, double period, std::string line) {
            s.watch_weights({std::move(names), period, std::move(line)});
          },
          py::arg("names"), py::arg("period"), py::arg("line"))
      .def_property_readonly("weights_due", &BucketStep::weights_due)
      .def("show_weights", &BucketStep::show_weights, py::arg("checksums"))
      .def_property_readonly("places",
                             [](const BucketStep& s) {
                               py::list list;
                               for (const BucketPlace& p : s.places())
                                 list.append(py::make_tuple(p.bucket, p.offset));
                               return list;
                             })
      .def_property_readonly("buckets", [](const BucketStep& s) { return rows_of(s.buckets()); })
      .def("memory", [](BucketStep& s, size_t bucket) {
        return std::make_shared<SharedMemory>(
            SharedMemory{s.memory(bucket), s.buckets()[bucket].bytes()});
      });
}

}  // namespace farandole
