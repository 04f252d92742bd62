// Helpers shared by the bindings of schedules and of their proofs.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <tuple>
#include <vector>

#include "schedule/check.h"
#include "schedule/planners.h"

namespace farandole {

/// Both throw Error(invalid_argument) for a name that there is not.
Collective collective_of(const std::string& name);
Determinism level_of(const std::string& name);

/// At level fast every planner that fits is admitted: a plan may be looked at whatever its order.
const Planner& planner_of(const std::string& collective, const std::string& name,
                          const Shape& shape);

/// The shape in Python's arguments, whose lists it refers to.
struct World {
  int size = 1;
  size_t count = 0;
  int lanes = 1;
  int segments = 1;
  int root = 0;
  std::vector<size_t> counts{};
  std::vector<int> leaves{};
  std::vector<int> host_of{};

  Shape shape(int rank = 0) const;
};

Buffers buffers_of(bool in_place);

/// (problem, order)
using Verdict = std::tuple<std::string, std::string>;
Verdict verdict(const Proof& proof);

pybind11::dict step_as_dict(const Step& step);
/// A step as step_as_dict gives it; what is missing has its default.
Step step_from(const pybind11::dict& step);

}  // namespace farandole
