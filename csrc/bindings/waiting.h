// How Python waits: without its lock, and looking for signals ten times a second.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <exception>
#include <optional>
#include <string>

#include "base/blocked_threads.h"
#include "base/clock.h"
#include "base/error.h"

namespace farandole {

namespace py = pybind11;

/// For native code that waits without Python's lock: throws what a signal handler raised.
inline void look_for_signals() {
  const py::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

/// Calls `wait_until(deadline)` (true: complete) in slices without the GIL until it is complete or
/// `deadline` passes. A signal handler that raises runs `interrupted(name of what it raised)`
/// first.
///
/// Signals are heard before an error is raised: Ctrl-C reaches all ranks, and one left pending
/// while another rank's report arrives would strike in the display of that error.
template <typename Wait, typename Interrupted>
bool wait_from_python(Wait wait_until, Interrupted interrupted, Deadline deadline) {
  std::optional<BlockedThread> blocked;
  for (;;) {
    const Deadline slice{std::min(deadline.at, now() + std::chrono::milliseconds(100))};
    bool complete = false;
    std::exception_ptr failure;
    {
      const py::gil_scoped_release unlocked;
      try {
        complete = wait_until(slice);
      } catch (const Error&) {
        failure = std::current_exception();
      }
    }
    if (complete) return true;
    if (PyErr_CheckSignals() != 0) {
      py::error_already_set error;  // takes the pending exception
      if (!failure) {               // else nothing is under way any more
        const std::string by = py::str(error.type().attr("__name__"));
        const py::gil_scoped_release unlocked;
        interrupted(by);
      }
      throw error;
    }
    if (failure) std::rethrow_exception(failure);
    if (deadline.passed(now())) return false;
    if (deadline.at == TimePoint::max() && !blocked) blocked.emplace();
  }
}

/// The deadline that a `timeout` argument means; None never comes.
inline Deadline deadline_from(const py::object& timeout) {
  if (timeout.is_none()) return Deadline::never();
  const double seconds = PyFloat_AsDouble(timeout.ptr());
  PyErr_Clear();  // what is no number came back as -1
  if (!(seconds >= 0))
    throw Error(ErrorCode::invalid_argument, "timeout=" + std::string(py::repr(timeout)) +
                                                 " is not a number of seconds of at least 0");
  return Deadline::after_seconds(seconds);
}

}  // namespace farandole
