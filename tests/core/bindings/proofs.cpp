// Proofs of any schedule, many proofs, and schedules with faults.
#include <pybind11/stl.h>

#include <algorithm>
#include <string>

#include "bindings/schedules.h"
#include "core/bindings/bind.h"
#include "core/mutations.h"

namespace farandole {
namespace {

Verdict check_steps(const std::string& collective, size_t count,
                    const std::vector<std::vector<std::vector<py::dict>>>& ranks, size_t scratch,
                    int root, bool in_place, const std::vector<size_t>& counts) {
  std::vector<Schedule> by_rank;
  for (const auto& lanes : ranks) {
    Schedule& schedule = by_rank.emplace_back();
    schedule.scratch = scratch;
    for (const auto& steps : lanes) {
      Lane& lane = schedule.lanes.emplace_back();
      for (const py::dict& step : steps) lane.push_back(step_from(step));
    }
  }
  const Shape shape{
      .size = static_cast<int>(ranks.size()), .count = count, .counts = counts, .root = root};
  return verdict(check(collective_of(collective), shape, by_rank, buffers_of(in_place)));
}

struct Sweep {
  size_t proved = 0;
  std::vector<std::string> failures;  // the first few
};

template <typename T>
std::string listed(const char* what, const T& values) {
  std::string text;
  for (const auto value : values) text += (text.empty() ? what : ",") + std::to_string(value);
  return text;
}

std::string describe(const Shape& shape, Buffers buffers) {
  return "size " + std::to_string(shape.size) + ", count " + std::to_string(shape.count) +
         ", lanes " + std::to_string(shape.lanes) + ", segments " + std::to_string(shape.segments) +
         ", root " + std::to_string(shape.root) + listed(", counts ", shape.counts) +
         listed(", leaves ", shape.leaves) + listed(", hosts ", shape.host_of) +
         (buffers == Buffers::in_place ? ", in place: " : ", apart: ");
}

/// Proves one world, out of place and, where possible, in place, and compares the order with the
/// planner's claim. With uneven shares the order may be better than claimed.
void prove_into(Sweep& sweep, const Planner& planner, const Shape& shape) {
  const std::vector<Schedule> schedules = plan_world(planner, shape);
  for (const Buffers buffers : {Buffers::apart, Buffers::in_place}) {
    if (buffers == Buffers::in_place && !goes_in_place(planner.collective)) continue;
    Proof proof = check(planner.collective, shape, schedules, buffers);
    const Order claim = planner.order(shape);
    const bool holds = shape.counts.empty() ? proof.order == claim : proof.order >= claim;
    ++sweep.proved;
    if (proof.problem.empty() && !holds)
      proof.problem =
          "claims " + std::string(name_of(claim)) + " but is " + std::string(name_of(proof.order));
    if (!proof.problem.empty() && sweep.failures.size() < 10)
      sweep.failures.push_back(describe(shape, buffers) + proof.problem);
  }
}

/// The values that a sweep combines into shapes.
struct Ranges {
  std::vector<int> sizes;
  std::vector<size_t> counts;
  std::vector<int> lanes, segments;
  bool all_roots = false;
  std::vector<std::vector<size_t>> uneven;
  std::vector<std::vector<int>> leaves;
  std::vector<std::vector<int>> host_of;
};

/// The shapes of one size, without lanes, segments and root.
std::vector<Shape> shapes_of(Collective collective, const Ranges& ranges, int size) {
  std::vector<Shape> shapes;
  const bool even = ranges.uneven.empty() && ranges.leaves.empty() && ranges.host_of.empty();
  for (const size_t count : ranges.counts) {
    Shape shape;
    shape.size = size;
    shape.count = count;
    if (even) shapes.push_back(shape);
    for (const auto& leaves : ranges.leaves) {
      shape.leaves = leaves;
      if (std::ssize(leaves) == size) shapes.push_back(shape);
    }
    shape.leaves = {};
    for (const auto& host_of : ranges.host_of) {
      shape.host_of = host_of;
      if (std::ssize(host_of) == size) shapes.push_back(shape);
    }
  }
  for (const auto& counts : ranges.uneven) {
    Shape shape;
    shape.size = size;
    shape.counts = counts;
    if (counts.size() == counts_of(collective, size)) shapes.push_back(shape);
  }
  return shapes;
}

Sweep prove_all(const std::string& collective, const std::string& name, const Ranges& ranges) {
  const Planner* planner = find_planner(collective_of(collective), name);
  if (planner == nullptr)
    throw Error(ErrorCode::invalid_argument, "there is no " + collective + " by '" + name + "'");
  Sweep sweep;
  for (const int size : ranges.sizes)
    for (Shape shape : shapes_of(planner->collective, ranges, size))
      for (const int lanes : ranges.lanes)
        for (const int segments : ranges.segments)
          for (int root = 0; root < (ranges.all_roots ? size : 1); ++root) {
            shape.lanes = lanes;
            shape.segments = segments;
            shape.root = root;
            if (planner->fits(shape)) prove_into(sweep, *planner, shape);
          }
  return sweep;
}

const Mutation& mutation_named(const std::string& name) {
  const auto found = std::ranges::find(mutations(), name, &Mutation::name);
  if (found != mutations().end()) return *found;
  throw Error(ErrorCode::invalid_argument, "there is no mutation '" + name + "'");
}

}  // namespace

void bind_proofs(py::module_& testing) {
  testing.def("check", check_steps, py::arg("collective"), py::arg("count"), py::arg("ranks"),
              py::arg("scratch") = size_t{0}, py::arg("root") = 0, py::arg("in_place") = false,
              py::arg("counts") = std::vector<size_t>{},
              "Proves any schedules, given as `plan` gives them: (problem, order).");
  testing.def(
      "prove_all",
      [](const std::string& collective, const std::string& name, std::vector<int> sizes,
         std::vector<size_t> counts, std::vector<int> lanes, std::vector<int> segments,
         bool all_roots, std::vector<std::vector<size_t>> uneven,
         std::vector<std::vector<int>> leaves, std::vector<std::vector<int>> host_of) {
        const Ranges ranges{std::move(sizes),    std::move(counts), std::move(lanes),
                            std::move(segments), all_roots,         std::move(uneven),
                            std::move(leaves),   std::move(host_of)};
        Sweep sweep;
        {
          py::gil_scoped_release release;
          sweep = prove_all(collective, name, ranges);
        }
        return py::make_tuple(sweep.proved, sweep.failures);
      },
      py::arg("collective"), py::arg("name"), py::arg("sizes"), py::arg("counts"), py::arg("lanes"),
      py::arg("segments"), py::arg("all_roots") = false,
      py::arg("uneven") = std::vector<std::vector<size_t>>{},
      py::arg("leaves") = std::vector<std::vector<int>>{},
      py::arg("host_of") = std::vector<std::vector<int>>{},
      "Proves every combination that fits, apart and in place: (number proved, first failures). "
      "`uneven` has counts in place of an even count, `leaves` those of every rank, `host_of` the "
      "hosts of all ranks, and each goes with the sizes that it is for.");
  testing.def(
      "mutate",
      [](const std::string& collective, const std::string& name, int size, size_t count,
         const std::string& mutation, int lanes, int segments, int root,
         const std::vector<int>& host_of) {
        const Shape shape{.size = size,
                          .count = count,
                          .lanes = lanes,
                          .segments = segments,
                          .root = root,
                          .host_of = host_of};
        Mutants all;
        {
          py::gil_scoped_release release;
          all = mutate(planner_of(collective, name, shape), shape, mutation_named(mutation));
        }
        return py::make_tuple(all.made, all.survivors, all.problems);
      },
      py::arg("collective"), py::arg("name"), py::arg("size"), py::arg("count"),
      py::arg("mutation"), py::arg("lanes") = 1, py::arg("segments") = 1, py::arg("root") = 0,
      py::arg("host_of") = std::vector<int>{},
      "Puts one fault into every step in turn: (worlds made, survivors, kinds of problem).");
  testing.def(
      "mutations",
      [] {
        std::vector<std::string_view> names;
        for (const Mutation& m : mutations()) names.push_back(m.name);
        return names;
      },
      "The faults that `mutate` knows.");
}

}  // namespace farandole
