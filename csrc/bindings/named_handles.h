// Operations by name in flight, as Python holds them: by number.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "bindings/plugin_weights.h"
#include "devices/staged_named.h"

namespace farandole {

namespace py = pybind11;

/// The operations by name of one world, as Python has them.
struct PyNames {
  std::shared_ptr<Group> world;
  std::shared_ptr<Named> named;
  std::shared_ptr<PluginWeights> weights = std::make_shared<PluginWeights>();
};

/// One operation, kept for Python until it has waited for it.
struct HeldRequest {
  std::shared_ptr<PyNames> names;  // null: the number is free
  NamedRequest* request = nullptr;
  py::object keep;    // the memory that the operation works on
  py::object result;  // what wait() returns
  py::object finish;  // or null: called with what the core has made, it returns that
  std::shared_ptr<StagedNamed> staged;  // where tensors lie on devices
  std::vector<py::object> outputs;      // then
  uint32_t uses = 0;                    // of this place
};

/// A result that the core has made for a tensor on a device, where it has yet to go.
struct StagedResult {
  std::shared_ptr<PyNames> names;
  std::shared_ptr<StagedNamed> staged;
  size_t tensor;
};

/// All of them in this process; with Python's lock. Numbers do not come again.
class NamedHandles {
 public:
  static NamedHandles& all();
  int64_t add(HeldRequest held);
  /// Throws Error(invalid_argument) for a number that is unknown or spent.
  HeldRequest& find(int64_t number);
  /// Waits without Python's lock, raises the operation's error; the number is spent afterwards.
  py::object wait(int64_t number);

 private:
  py::object take(int64_t number);

  std::vector<HeldRequest> places_;
  std::vector<uint32_t> free_;
};

/// The names of the world this process is in; null before the first.
std::shared_ptr<PyNames>& current_names();
/// The same for threads without Python's lock: those of plug-ins.
std::shared_ptr<PyNames> names_for_plugins();
void set_names_for_plugins(std::shared_ptr<PyNames> names);
/// Before this rank leaves: what others wait for has gone out, and rank 0 orders what they do
/// without it until they leave, too. Throws what a signal handler raised.
void leave_names(const Group& world);

/// A quick way into an operation that takes one tensor and reduces it in place.
py::object make_quick_submit(const py::object& slow, const py::object& bump_version);
py::object make_quick_wait(const py::object& slow);

}  // namespace farandole
