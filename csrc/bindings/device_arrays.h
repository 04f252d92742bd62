// Arrays in the memory of CUDA's devices, as their owners describe them: by DLPack, whose protocol
// lets a stream of ours wait for the array, or by __cuda_array_interface__.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "bindings/calls.h"
#include "devices/staged_call.h"
#include "devices/staged_grouped.h"
#include "devices/staged_named.h"

namespace farandole {

/// Whether an array says that it lies on a CUDA device.
bool is_on_device(const py::object& array);
/// Throws Error(invalid_argument) where devices cannot be used here, saying why.
void require_cuda(const char* what);

/// Group::submit for arrays of which one at least lies on a device. Throws Error(invalid_argument)
/// where devices cannot be used here, saying why.
StagedCall submit_staged(Group& group, const py::object& input, const py::object& output,
                         Options options, bool caller_waits);

/// The same for a call that is submitted together with others: StagedCall::prepare.
StagedCall prepare_staged(Group& group, const py::object& input, const py::object& output,
                          Options options, CollectiveCall& to_submit);

/// Group::submit_between for an array on a device.
StagedCall submit_staged_between(Group& group, const py::object& array, int peer, int tag,
                                 Options options, bool caller_waits);

/// Group::submit_from_any likewise.
std::pair<StagedCall, std::shared_ptr<const int>> submit_staged_from_any(Group& group,
                                                                         const py::object& array,
                                                                         int tag, Options options);

/// Grouped, submitted, for arrays of which one at least lies on a device.
std::shared_ptr<StagedGrouped> submit_staged_grouped(Group& group,
                                                     const std::vector<py::object>& inputs,
                                                     const std::vector<py::object>& outputs,
                                                     Options options, const PackLimits& limits,
                                                     bool caller_waits);

/// An operation by name of which a tensor at least lies on a device: tensors as Names.submit has
/// them, without its shapes, which stand in `shapes`.
std::shared_ptr<StagedNamed> submit_staged_named(Group& world, Named& named, const NamedCall& call,
                                                 const std::vector<py::object>& inputs,
                                                 const std::vector<py::object>& outputs,
                                                 const std::vector<std::vector<int64_t>>& shapes);

/// The array by which a call is handed over: its output, or its input if no output is on a device.
const py::object& handed_over(const py::object& input, const py::object& output);
/// After its wait(): what this thread does with that array from now on finds the result there, or
/// comes after it was read.
void hand_over(StagedCall& call, const py::object& array);
void hand_over(StagedGrouped& call, const std::vector<py::object>& outputs);
void hand_over(StagedNamed& call, const std::vector<py::object>& outputs);
/// Brings a result that the core has made into an array on the device.
void deliver(Group& world, StagedNamed& call, size_t tensor, const py::object& array);
/// In flight, as Python holds it.
PyHandle handle_of(std::shared_ptr<Group> group, StagedCall call, const py::object& array,
                   py::object result);

}  // namespace farandole
