// Bucket plans in Python's terms, and how Python waits for what goes by them.
#pragma once

#include <pybind11/stl.h>

#include "bindings/bind.h"
#include "bindings/waiting.h"
#include "engine/fork.h"
#include "fusion/bucket_step.h"
#include "group/group.h"

namespace farandole {

/// From rows (name, elements, dtype) or (name, elements, dtype, group).
std::vector<Parameter> parameters_from(const py::list& rows);
/// The plan as rows: (dtype, count, [(parameter, offset, count)…]), in elements.
py::list rows_of(const std::vector<Bucket>& buckets);

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

/// The common methods of Reducer and ShardedUpdate: the end of a step, its weights, and the
/// gradients' places.
template <typename Step>
void bind_step(py::class_<Step, std::shared_ptr<Step>>& type) {
  type.def(
          "wait",
          [](Step& s, const py::object& timeout) {
            wait_or_raise(s.group(), [&](Deadline d) { return s.wait(d); }, timeout);
          },
          py::arg("timeout") = py::none())
      .def(
          "drain",
          [](Step& s, const py::object& timeout) {
            wait_or_raise(s.group(), [&](Deadline d) { return s.drain(d); }, timeout);
          },
          py::arg("timeout") = py::none())
      .def("abandon",
           [](Step& s) {
             refuse_in_child();
             const py::gil_scoped_release unlocked;
             s.abandon();
           })
      .def(
          "watch_weights",
          [](Step& s, std::vector<std::string> names, double period, std::string line) {
            s.watch_weights({std::move(names), period, std::move(line)});
          },
          py::arg("names"), py::arg("period"), py::arg("line"))
      .def_property_readonly("weights_due", &Step::weights_due)
      .def("show_weights", &Step::show_weights, py::arg("checksums"))
      .def_property_readonly("places",
                             [](const Step& s) {
                               py::list list;
                               for (const BucketPlace& p : s.places())
                                 list.append(py::make_tuple(p.bucket, p.offset));
                               return list;
                             })
      .def_property_readonly("buckets", [](const Step& s) { return rows_of(s.buckets()); });
}

}  // namespace farandole
