// Bucket plans in Python's terms, and how Python waits for what goes by them.
#pragma once

#include <pybind11/stl.h>

#include "bindings/bind.h"
#include "bindings/waiting.h"
#include "engine/fork.h"
#include "fusion/bucket_plan.h"
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
  const auto interrupted = [&] {
    group.abort_interrupted();
    try {
      wait_until(Deadline::never());
    } catch (const Error&) {  // NOLINT: the interruption itself
    }
  };
  if (wait_from_python(wait_until, interrupted, deadline_from(timeout))) return;
  PyErr_SetString(PyExc_TimeoutError, "the gradients are not reduced yet");
  throw py::error_already_set();
}

}  // namespace farandole
