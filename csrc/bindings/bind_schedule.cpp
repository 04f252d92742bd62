// Schedules as Python data: farandole._core.schedule.
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "bindings/bind.h"
#include "bindings/schedules.h"

namespace farandole {
namespace {

using Counts = std::vector<size_t>;
using Leaves = std::vector<int>;
using HostOf = std::vector<int>;

py::list plan_as_lists(const std::string& collective, const std::string& name, const Shape& shape) {
  py::list lanes;
  for (const Lane& lane : planner_of(collective, name, shape).plan(shape).lanes) {
    py::list steps;
    for (const Step& step : lane) steps.append(step_as_dict(step));
    lanes.append(std::move(steps));
  }
  return lanes;
}

/// The default model's.
ChannelCosts costs_of(const World& world) {
  return world.host_of.empty() ? ChannelCosts{} : kTcpCosts;
}

py::dict row_as_dict(const Planner& planner, const Shape& shape, size_t itemsize) {
  const Cost cost = cost_of(planner, shape);
  py::dict d;
  d["name"] = planner.name;
  d["collective"] = name_of(planner.collective);
  d["summary"] = planner.summary;
  d["order"] = name_of(planner.order(shape));
  d["rounds"] = cost.rounds;
  d["bytes"] = cost.bytes * static_cast<double>(itemsize);
  d["folds"] = cost.folds * static_cast<double>(itemsize);
  d["messages"] = cost.messages;
  d["seconds"] = predicted_seconds(cost, itemsize);
  return d;
}

py::list planners_as_dicts(const std::optional<std::string>& collective, const Shape& shape,
                           size_t itemsize) {
  const auto only = collective ? std::optional(collective_of(*collective)) : std::nullopt;
  py::list rows;
  for (const Planner& planner : planners())
    if ((!only || planner.collective == *only) && planner.fits(shape))
      rows.append(row_as_dict(planner, shape, itemsize));
  return rows;
}

}  // namespace

void bind_schedule(py::module_& module) {
  py::module_ schedule = module.def_submodule("schedule", "Planners, their plans and proofs.");
  schedule.def(
      "planners",
      [](int size, size_t count, int lanes, int segments, size_t itemsize, int root,
         const std::optional<std::string>& collective, const Counts& counts, const Leaves& leaves,
         const HostOf& host_of) {
        const World world{size, count, lanes, segments, root, counts, leaves, host_of};
        return planners_as_dicts(collective, world.shape(), itemsize);
      },
      py::arg("size") = 8, py::arg("count") = size_t{1} << 20, py::arg("lanes") = 1,
      py::arg("segments") = 2, py::arg("itemsize") = size_t{4}, py::arg("root") = 0,
      py::arg("collective") = py::none(), py::arg("counts") = Counts{},
      py::arg("leaves") = Leaves{}, py::arg("host_of") = HostOf{},
      "One dict for each planner, of one collective or of all, that fits the shape: name, "
      "collective, summary, and order and predicted cost for the shape.");
  schedule.def(
      "plan",
      [](const std::string& collective, const std::string& name, int rank, int size, size_t count,
         int lanes, int segments, int root, const Counts& counts, const Leaves& leaves,
         const HostOf& host_of) {
        const World world{size, count, lanes, segments, root, counts, leaves, host_of};
        return plan_as_lists(collective, name, world.shape(rank));
      },
      py::arg("collective"), py::arg("name"), py::arg("rank"), py::arg("size"), py::arg("count"),
      py::arg("lanes") = 1, py::arg("segments") = 2, py::arg("root") = 0,
      py::arg("counts") = Counts{}, py::arg("leaves") = Leaves{}, py::arg("host_of") = HostOf{},
      "One rank's lanes, each a list of steps as dicts; slices are (space, offset, count).");
  schedule.def(
      "prove",
      [](const std::string& collective, const std::string& name, int size, size_t count, int lanes,
         int segments, int root, bool in_place, const Counts& counts, const Leaves& leaves,
         const HostOf& host_of) {
        const World world{size, count, lanes, segments, root, counts, leaves, host_of};
        py::gil_scoped_release release;
        const Shape shape = world.shape();
        const Planner& planner = planner_of(collective, name, shape);
        return verdict(
            check(planner.collective, shape, plan_world(planner, shape), buffers_of(in_place)));
      },
      py::arg("collective"), py::arg("name"), py::arg("size"), py::arg("count"),
      py::arg("lanes") = 1, py::arg("segments") = 2, py::arg("root") = 0,
      py::arg("in_place") = false, py::arg("counts") = Counts{}, py::arg("leaves") = Leaves{},
      py::arg("host_of") = HostOf{}, "(problem, order): what is wrong, or the proved fold order.");
  schedule.def(
      "choose",
      [](const std::string& collective, int size, size_t count, size_t itemsize,
         const std::string& level, int lanes, int segments, const Counts& counts,
         const Leaves& leaves, const HostOf& host_of) {
        const World world{size, count, lanes, segments, 0, counts, leaves, host_of};
        return choose_planner(collective_of(collective), world.shape(), itemsize, level_of(level),
                              costs_of(world))
            .name;
      },
      py::arg("collective"), py::arg("size"), py::arg("count"), py::arg("itemsize") = size_t{4},
      py::arg("level") = "canonical", py::arg("lanes") = 1, py::arg("segments") = 2,
      py::arg("counts") = Counts{}, py::arg("leaves") = Leaves{}, py::arg("host_of") = HostOf{},
      "The planner the default cost model picks.");
  schedule.def(
      "require",
      [](const std::string& collective, const std::string& name, int size, size_t count,
         const std::string& level, const Counts& counts, const Leaves& leaves,
         const HostOf& host_of) {
        const World world{size, count, 1, 2, 0, counts, leaves, host_of};
        return require_planner(collective_of(collective), name, world.shape(), level_of(level))
            .name;
      },
      py::arg("collective"), py::arg("name"), py::arg("size"), py::arg("count"),
      py::arg("level") = "canonical", py::arg("counts") = Counts{}, py::arg("leaves") = Leaves{},
      py::arg("host_of") = HostOf{},
      "The name again; raises when the planner is unknown, does not fit or is below the level.");
  schedule.def(
      "goes_in_place", [](const std::string& name) { return goes_in_place(collective_of(name)); },
      py::arg("collective"), "Whether input and output of a collective may share memory.");
}

}  // namespace farandole
