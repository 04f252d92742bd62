#include "bindings/named_handles.h"

#include <pybind11/stl.h>

#include <string>

#include "bindings/arrays.h"
#include "bindings/calls.h"
#include "bindings/device_arrays.h"
#include "bindings/waiting.h"
#include "engine/fork.h"

namespace farandole {
namespace {

// A number is its place, and how often that was used: the same place comes again soon, the same
// number never.
constexpr int kPlaceBits = 24;
constexpr int64_t kPlaceMask = (int64_t{1} << kPlaceBits) - 1;

/// The same, as (memory or StagedResult, dtype, shape) of all tensors.
py::list made_for_devices(const HeldRequest& held) {
  py::list list;
  const std::vector<NamedRequest::Part>& parts = held.request->parts;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Buffer& buffer = parts[i].output;
    const auto here = [&] {
      return std::make_shared<SharedMemory>(SharedMemory{held.staged->memory(i), buffer.bytes()});
    };
    const py::object where = held.staged->is_for_host(i)
                                 ? py::cast(here())
                                 : py::cast(StagedResult{held.names, held.staged, i});
    list.append(py::make_tuple(where, std::string(name_of(buffer.dtype)),
                               py::tuple(py::cast(held.staged->shape(i)))));
  }
  return list;
}

/// (memory, dtype, shape) for each result that the core has made.
py::list made_results(const HeldRequest& held) {
  if (held.staged) return made_for_devices(held);
  py::list list;
  for (const NamedRequest::Part& part : held.request->parts) {
    if (!part.made.data) continue;
    const Buffer& buffer = part.made.buffer;
    list.append(
        py::make_tuple(std::make_shared<SharedMemory>(SharedMemory{part.made.data, buffer.bytes()}),
                       std::string(name_of(buffer.dtype)), py::tuple(py::cast(part.made.shape))));
  }
  return list;
}

}  // namespace

NamedHandles& NamedHandles::all() {
  static auto* const handles = new NamedHandles;  // lives as long as the interpreter
  return *handles;
}

int64_t NamedHandles::add(HeldRequest held) {
  if (free_.empty()) {
    if (places_.size() > static_cast<size_t>(kPlaceMask))
      throw Error(ErrorCode::resource, "too many operations that nobody has waited for");
    free_.push_back(static_cast<uint32_t>(places_.size()));
    places_.emplace_back();
  }
  const uint32_t place = free_.back();
  free_.pop_back();
  held.uses = places_[place].uses + 1;
  places_[place] = std::move(held);
  return int64_t{places_[place].uses} << kPlaceBits | place;
}

HeldRequest& NamedHandles::find(int64_t number) {
  const auto place = static_cast<size_t>(number & kPlaceMask);
  if (number < 0 || place >= places_.size() || !places_[place].names ||
      places_[place].uses != static_cast<uint64_t>(number >> kPlaceBits))
    throw Error(ErrorCode::invalid_argument,
                "handle " + std::to_string(number) + " is unknown, or was synchronized already");
  return places_[place];
}

py::object NamedHandles::wait(int64_t number) {
  refuse_in_child();
  {
    HeldRequest& held = find(number);
    NamedRequest* const request = held.request;
    if (!held.names->named->done(*request)) {
      const std::shared_ptr<PyNames> names = held.names;
      wait_for(names->world, [&](Deadline d) { return names->named->wait(*request, d); });
    }
  }
  return take(number);
}

py::object NamedHandles::take(int64_t number) {
  HeldRequest& place = find(number);  // waiting, others may have moved it
  HeldRequest held = std::move(place);
  place = HeldRequest{};
  place.uses = held.uses;
  free_.push_back(static_cast<uint32_t>(number & kPlaceMask));
  const std::optional<Error> error = std::move(held.request->error);
  py::object made, received;
  if (!error && held.finish) {
    made = made_results(held);
    received = held.request->last_joined >= 0 ? py::object(py::int_(held.request->last_joined))
                                              : py::cast(held.request->received);
  }
  held.names->named->release(held.request);
  if (error) throw Error(*error);
  if (held.staged) {
    {
      const py::gil_scoped_release unlocked;
      held.staged->take_back();
    }
    hand_over(*held.staged, held.outputs);
  }
  return held.finish ? held.finish(made, received) : held.result;
}

std::shared_ptr<PyNames>& current_names() {
  static auto* const names = new std::shared_ptr<PyNames>;
  return *names;
}

void leave_names(const Group& world) {
  std::shared_ptr<PyNames> names = current_names();
  if (!names || names->world.get() != &world) return;
  current_names().reset();
  set_names_for_plugins(nullptr);
  const py::gil_scoped_release unlocked;
  names->named->flush(Deadline::after(std::chrono::seconds(1)));
  names->named->serve(look_for_signals);
}

}  // namespace farandole
