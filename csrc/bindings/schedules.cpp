#include "bindings/schedules.h"

#include <pybind11/stl.h>

#include <algorithm>

#include "base/error.h"
#include "bindings/bind.h"

namespace farandole {
namespace {

py::object slice_as_tuple(Slice slice) {
  if (slice.count == 0) return py::none();
  return py::make_tuple(name_of(slice.space), slice.offset, slice.count);
}

Slice slice_from(const py::dict& step, const char* key) {
  if (!step.contains(key) || step[key].is_none()) return {};
  const auto [space, offset, count] = step[key].cast<std::tuple<std::string, size_t, size_t>>();
  const auto found = std::find(kSpaceNames.begin(), kSpaceNames.end(), space);
  if (found == kSpaceNames.end())
    throw Error(ErrorCode::invalid_argument, "there is no space '" + space + "'");
  return {static_cast<Space>(found - kSpaceNames.begin()), offset, count};
}

}  // namespace

Collective collective_of(const std::string& name) {
  if (const auto collective = collective_named(name)) return *collective;
  throw Error(ErrorCode::invalid_argument, "there is no collective '" + name + "'");
}

Determinism level_of(const std::string& name) {
  if (const auto level = determinism_named(name)) return *level;
  throw Error(ErrorCode::invalid_argument, "level is 'canonical' or 'fast', not '" + name + "'");
}

const Planner& planner_of(const std::string& collective, const std::string& name,
                          const Shape& shape) {
  return require_planner(collective_of(collective), name, shape, Determinism::fast);
}

Shape World::shape(int rank) const {
  return {.rank = rank,
          .size = size,
          .count = count,
          .counts = counts,
          .leaves = leaves,
          .lanes = lanes,
          .segments = segments,
          .root = root,
          .host_of = host_of};
}

Buffers buffers_of(bool in_place) { return in_place ? Buffers::in_place : Buffers::apart; }

Verdict verdict(const Proof& proof) { return {proof.problem, std::string(name_of(proof.order))}; }

py::dict step_as_dict(const Step& step) {
  const auto peer = [](int rank) {
    return rank == kNobody ? py::object(py::none()) : py::int_(rank);
  };
  py::dict d;
  d["to"] = peer(step.to);
  d["send"] = slice_as_tuple(step.send);
  d["from"] = peer(step.from);
  d["recv"] = slice_as_tuple(step.recv);
  d["held"] =
      slice_as_tuple(step.action == Action::store || step.held.count > 0 ? step.held : step.recv);
  d["action"] = name_of(step.action);
  d["leaf_arrived"] = step.leaf_arrived;
  d["leaf_held"] = step.leaf_held;
  d["finish"] = step.finish;
  return d;
}

Step step_from(const py::dict& step) {
  const auto peer = [&](const char* key) {
    return step.contains(key) && !step[key].is_none() ? step[key].cast<int>() : kNobody;
  };
  const auto flag = [&](const char* key) { return step.contains(key) && step[key].cast<bool>(); };
  const std::string action = step.contains("action") ? step["action"].cast<std::string>() : "store";
  const auto found = std::find(kActionNames.begin(), kActionNames.end(), action);
  if (found == kActionNames.end())
    throw Error(ErrorCode::invalid_argument, "there is no action '" + action + "'");
  return {.to = peer("to"),
          .send = slice_from(step, "send"),
          .from = peer("from"),
          .recv = slice_from(step, "recv"),
          .held = slice_from(step, "held"),
          .action = static_cast<Action>(found - kActionNames.begin()),
          .leaf_arrived = flag("leaf_arrived"),
          .leaf_held = flag("leaf_held"),
          .finish = flag("finish")};
}

}  // namespace farandole
