// An operation as Python asks for it, and as Python holds it while it is in flight.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bindings/arrays.h"
#include "group/group.h"

namespace farandole {

namespace py = pybind11;

/// Throws Error(invalid_argument) when `given` is no string.
std::string text_from(const py::object& given, const std::string& argument);
Collective collective_from(const std::string& name);
Determinism level_from(const std::string& name);
/// An operation's own deadline; none is the group's, 0 is never, as in FARANDOLE_TIMEOUT.
std::optional<Deadline> own_deadline(const py::object& timeout);

Options options_from(const std::string& kind, const std::string& op, double prescale,
                     double postscale, int root, const py::object& name,
                     const py::object& algorithm, const py::object& level,
                     const py::object& timeout, const std::vector<size_t>& counts = {});

/// Input and output of one operation. A rank that reads or gets nothing gives None there.
struct BorrowedOperand {
  Borrowed input, output;
};
BorrowedOperand borrow_both(const py::object& input, const py::object& output);

/// Waits without Python's lock; false when the deadline passed first. An interruption fails the
/// group, so that no other rank waits for this one, and the caller's memory is given back before
/// the exception reaches it.
using WaitUntil = std::function<bool(Deadline)>;
bool wait_for(const std::shared_ptr<Group>& group, const WaitUntil& wait_until,
              Deadline deadline = Deadline::never());

/// This rank's number in the world.
inline int world_rank(const Group& group) {
  return group.members()[static_cast<size_t>(group.rank())];
}

/// An operation in flight, as Python holds it.
struct PyHandle {
  std::shared_ptr<Group> group;
  WaitUntil wait_until;
  std::function<bool()> is_done;
  py::object result;
  std::function<void()> after;  // each wait() that has come to its end

  PyHandle(std::shared_ptr<Group> of, const Handle& handle, py::object value);
  PyHandle(std::shared_ptr<Group> of, WaitUntil waits, std::function<bool()> done, py::object value,
           std::function<void()> after_wait = {});
  py::object wait(const py::object& timeout) const;
};

}  // namespace farandole
