// Schedules as Python data, their proofs, and (in `testing`) faults put into them on purpose.
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <tuple>

#include "bindings/bind.h"
#include "schedule/check.h"
#include "schedule/planners.h"

namespace farandole {
namespace {

Collective collective_of(const std::string& name) {
  if (const auto collective = collective_named(name)) return *collective;
  throw Error(ErrorCode::invalid_argument, "there is no collective '" + name + "'");
}

Determinism level_of(const std::string& name) {
  if (const auto level = determinism_named(name)) return *level;
  throw Error(ErrorCode::invalid_argument, "level is 'canonical' or 'fast', not '" + name + "'");
}

/// At level fast every planner that fits is admitted: a plan may be looked at whatever its order.
const Planner& planner_of(const std::string& collective, const std::string& name,
                          const Shape& shape) {
  return require_planner(collective_of(collective), name, shape, Determinism::fast);
}

std::vector<Schedule> plan_world(const Planner& planner, Shape shape) {
  std::vector<Schedule> by_rank;
  for (shape.rank = 0; shape.rank < shape.size; ++shape.rank)
    by_rank.push_back(planner.plan(shape));
  return by_rank;
}

using Verdict = std::tuple<std::string, std::string>;
Verdict verdict(const Proof& proof) { return {proof.problem, std::string(name_of(proof.order))}; }

Buffers buffers_of(bool in_place) { return in_place ? Buffers::in_place : Buffers::apart; }

// --- farandole._core.schedule

py::object slice_as_tuple(Slice slice) {
  if (slice.count == 0) return py::none();
  return py::make_tuple(name_of(slice.space), slice.offset, slice.count);
}

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

py::list plan_as_lists(const std::string& collective, const std::string& name, const Shape& shape) {
  py::list lanes;
  for (const Lane& lane : planner_of(collective, name, shape).plan(shape).lanes) {
    py::list steps;
    for (const Step& step : lane) steps.append(step_as_dict(step));
    lanes.append(std::move(steps));
  }
  return lanes;
}

py::list planners_as_dicts(const Shape& shape, size_t itemsize) {
  py::list rows;
  for (const Planner& planner : planners()) {
    const Cost cost = planner.cost(shape);
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
    rows.append(std::move(d));
  }
  return rows;
}

// --- farandole._core.testing: schedules from outside, many proofs, and mutations

Slice slice_from(const py::dict& step, const char* key) {
  if (!step.contains(key) || step[key].is_none()) return {};
  const auto [space, offset, count] = step[key].cast<std::tuple<std::string, size_t, size_t>>();
  const auto found = std::find(kSpaceNames.begin(), kSpaceNames.end(), space);
  if (found == kSpaceNames.end())
    throw Error(ErrorCode::invalid_argument, "there is no space '" + space + "'");
  return {static_cast<Space>(found - kSpaceNames.begin()), offset, count};
}

/// A step as step_as_dict gives it; what is missing has its default.
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

Verdict check_steps(const std::string& collective, size_t count,
                    const std::vector<std::vector<std::vector<py::dict>>>& ranks, size_t scratch,
                    int root, bool in_place) {
  std::vector<Schedule> by_rank;
  for (const auto& lanes : ranks) {
    Schedule& schedule = by_rank.emplace_back();
    schedule.scratch = scratch;
    for (const auto& steps : lanes) {
      Lane& lane = schedule.lanes.emplace_back();
      for (const py::dict& step : steps) lane.push_back(step_from(step));
    }
  }
  const Shape shape{.size = static_cast<int>(ranks.size()), .count = count, .root = root};
  require_valid(shape);
  return verdict(check(collective_of(collective), shape, by_rank, buffers_of(in_place)));
}

struct Sweep {
  size_t proved = 0;
  std::vector<std::string> failures;  // the first few
};

std::string describe(const Shape& shape, Buffers buffers) {
  return "size " + std::to_string(shape.size) + ", count " + std::to_string(shape.count) +
         ", lanes " + std::to_string(shape.lanes) + ", segments " + std::to_string(shape.segments) +
         ", root " + std::to_string(shape.root) +
         (buffers == Buffers::in_place ? ", in place: " : ", apart: ");
}

/// Proves one world both ways and compares the order with the planner's claim.
void prove_into(Sweep& sweep, const Planner& planner, const Shape& shape) {
  const std::vector<Schedule> schedules = plan_world(planner, shape);
  for (const Buffers buffers : {Buffers::apart, Buffers::in_place}) {
    Proof proof = check(planner.collective, shape, schedules, buffers);
    const Order claim = planner.order(shape);
    ++sweep.proved;
    if (proof.problem.empty() && proof.order != claim)
      proof.problem =
          "claims " + std::string(name_of(claim)) + " but is " + std::string(name_of(proof.order));
    if (!proof.problem.empty() && sweep.failures.size() < 10)
      sweep.failures.push_back(describe(shape, buffers) + proof.problem);
  }
}

Sweep prove_all(const std::string& collective, const std::string& name,
                const std::vector<int>& sizes, const std::vector<size_t>& counts,
                const std::vector<int>& lanes, const std::vector<int>& segments, bool all_roots) {
  Sweep sweep;
  for (const int size : sizes)
    for (const size_t count : counts)
      for (const int l : lanes)
        for (const int s : segments)
          for (int root = 0; root < (all_roots ? size : 1); ++root) {
            const Shape shape{
                .size = size, .count = count, .lanes = l, .segments = s, .root = root};
            prove_into(sweep, planner_of(collective, name, shape), shape);
          }
  return sweep;
}

/// A single wrong thing in one step. Returns false where it makes no sense.
struct Mutation {
  std::string_view name;
  bool (*apply)(Schedule&, size_t lane, size_t step, const Shape&);
};

Step& step_at(Schedule& s, size_t lane, size_t step) { return s.lanes[lane][step]; }

constexpr Mutation kMutations[] = {
    {"drop_step",
     [](Schedule& s, size_t l, size_t i, const Shape&) {
       s.lanes[l].erase(s.lanes[l].begin() + static_cast<std::ptrdiff_t>(i));
       return true;
     }},
    {"double_step",
     [](Schedule& s, size_t l, size_t i, const Shape& shape) {
       const Step step = step_at(s, l, i);
       // A local step that does not change its own operands is only wasteful the second time.
       if (step.to == shape.rank && (step.action == Action::store || step.held != step.recv))
         return false;
       s.lanes[l].insert(s.lanes[l].begin() + static_cast<std::ptrdiff_t>(i), step);
       return true;
     }},
    {"swap_action",
     [](Schedule& s, size_t l, size_t i, const Shape&) {
       Step& step = step_at(s, l, i);
       if (step.action == Action::store) return false;
       step.action = step.action == Action::fold_upper ? Action::fold_lower : Action::fold_upper;
       return true;
     }},
    {"store_instead",
     [](Schedule& s, size_t l, size_t i, const Shape&) {
       Step& step = step_at(s, l, i);
       if (step.action == Action::store) return false;
       step.action = Action::store;
       step.held = {};
       step.leaf_held = false;
       return true;
     }},
    {"fold_instead",
     [](Schedule& s, size_t l, size_t i, const Shape&) {
       Step& step = step_at(s, l, i);
       if (step.action != Action::store || step.from == kNobody) return false;
       step.action = Action::fold_upper;
       return true;
     }},
    {"change_to",
     [](Schedule& s, size_t l, size_t i, const Shape& shape) {
       Step& step = step_at(s, l, i);
       if (step.to == kNobody || shape.size < 2) return false;
       step.to = (step.to + 1) % shape.size;
       return true;
     }},
    {"change_from",
     [](Schedule& s, size_t l, size_t i, const Shape& shape) {
       Step& step = step_at(s, l, i);
       if (step.from == kNobody || shape.size < 2) return false;
       step.from = (step.from + 1) % shape.size;
       return true;
     }},
    {"shift_send",
     [](Schedule& s, size_t l, size_t i, const Shape&) {
       step_at(s, l, i).send.offset += 1;
       return step_at(s, l, i).to != kNobody;
     }},
    {"shift_recv",
     [](Schedule& s, size_t l, size_t i, const Shape&) {
       step_at(s, l, i).recv.offset += 1;
       return step_at(s, l, i).from != kNobody;
     }},
    {"shift_held",
     [](Schedule& s, size_t l, size_t i, const Shape&) {
       step_at(s, l, i).held.offset += 1;
       return step_at(s, l, i).held.count > 0;
     }},
    {"shorten_send",
     [](Schedule& s, size_t l, size_t i, const Shape&) {
       Step& step = step_at(s, l, i);
       if (step.to == kNobody) return false;
       step.send.count -= 1;
       return true;
     }},
    {"send_what_arrives",
     [](Schedule& s, size_t l, size_t i, const Shape& shape) {
       Step& step = step_at(s, l, i);
       if (step.to == kNobody || step.from == kNobody || step.to == shape.rank) return false;
       step.send = step.recv;
       return true;
     }},
    {"send_unset",
     [](Schedule& s, size_t l, size_t i, const Shape&) {
       Step& step = step_at(s, l, i);
       if (step.to == kNobody) return false;
       step.send = {Space::scratch, s.scratch, step.send.count};
       s.scratch += step.send.count;
       return true;
     }},
    {"write_input",
     [](Schedule& s, size_t l, size_t i, const Shape&) {
       Step& step = step_at(s, l, i);
       if (step.from == kNobody) return false;
       step.recv.space = Space::input;
       return true;
     }},
    {"flip_leaf_arrived",
     [](Schedule& s, size_t l, size_t i, const Shape&) {
       Step& step = step_at(s, l, i);
       step.leaf_arrived = !step.leaf_arrived;
       return step.from != kNobody;
     }},
    {"flip_leaf_held",
     [](Schedule& s, size_t l, size_t i, const Shape&) {
       Step& step = step_at(s, l, i);
       step.leaf_held = !step.leaf_held;
       return step.from != kNobody;
     }},
    {"flip_finish",
     [](Schedule& s, size_t l, size_t i, const Shape&) {
       Step& step = step_at(s, l, i);
       step.finish = !step.finish;
       return step.from != kNobody;
     }},
    {"other_lane",
     [](Schedule& s, size_t l, size_t i, const Shape&) {
       if (s.lanes.size() < 2) return false;
       const Step step = step_at(s, l, i);
       s.lanes[l].erase(s.lanes[l].begin() + static_cast<std::ptrdiff_t>(i));
       s.lanes[(l + 1) % s.lanes.size()].push_back(step);
       return true;
     }},
    {"extra_lane",
     [](Schedule& s, size_t l, size_t i, const Shape&) {
       const Step step = step_at(s, l, i);
       s.lanes.push_back({step});
       return true;
     }},
};

const Mutation& mutation_named(const std::string& name) {
  for (const Mutation& m : kMutations)
    if (m.name == name) return m;
  throw Error(ErrorCode::invalid_argument, "there is no mutation '" + name + "'");
}

struct Mutants {
  size_t made = 0;
  std::vector<std::string> survivors;  // neither a problem nor a lesser order
  std::vector<std::string> problems;   // each kind once, without its place
};

void judge_mutant(Mutants& all, const Proof& proof, Order claim, std::string where) {
  ++all.made;
  if (proof.problem.empty()) {
    if (proof.order == claim) all.survivors.push_back(std::move(where));
    return;
  }
  const size_t colon = proof.problem.rfind(": ");
  std::string kind = proof.problem.starts_with("deadlock")
                         ? "deadlock"
                         : proof.problem.substr(colon == std::string::npos ? 0 : colon + 2);
  kind.erase(std::remove_if(kind.begin(), kind.end(), [](char c) { return c >= '0' && c <= '9'; }),
             kind.end());
  if (std::find(all.problems.begin(), all.problems.end(), kind) == all.problems.end())
    all.problems.push_back(std::move(kind));
}

/// Puts one fault into every step of every rank in turn and proves each of these worlds.
Mutants mutate(const std::string& collective, const std::string& name, Shape shape,
               const std::string& mutation_name) {
  const Planner& planner = planner_of(collective, name, shape);
  const Mutation& mutation = mutation_named(mutation_name);
  std::vector<Schedule> schedules = plan_world(planner, shape);
  Mutants all;
  for (shape.rank = 0; shape.rank < shape.size; ++shape.rank) {
    const Schedule original = schedules[static_cast<size_t>(shape.rank)];
    for (size_t l = 0; l < original.lanes.size(); ++l)
      for (size_t i = 0; i < original.lanes[l].size(); ++i) {
        Schedule& mutant = schedules[static_cast<size_t>(shape.rank)] = original;
        if (!mutation.apply(mutant, l, i, shape)) continue;
        judge_mutant(all, check(planner.collective, shape, schedules), planner.order(shape),
                     "rank " + std::to_string(shape.rank) + ", lane " + std::to_string(l) +
                         ", step " + std::to_string(i));
      }
    schedules[static_cast<size_t>(shape.rank)] = original;
  }
  return all;
}

void bind_proofs(py::module_& module) {
  py::module_ testing = module.def_submodule("testing", "What only tests need.");
  testing.def("check", check_steps, py::arg("collective"), py::arg("count"), py::arg("ranks"),
              py::arg("scratch") = size_t{0}, py::arg("root") = 0, py::arg("in_place") = false,
              "Proves any schedules, given as `plan` gives them: (problem, order).");
  testing.def(
      "prove_all",
      [](const std::string& collective, const std::string& name, const std::vector<int>& sizes,
         const std::vector<size_t>& counts, const std::vector<int>& lanes,
         const std::vector<int>& segments, bool all_roots) {
        Sweep sweep;
        {
          py::gil_scoped_release release;
          sweep = prove_all(collective, name, sizes, counts, lanes, segments, all_roots);
        }
        return py::make_tuple(sweep.proved, sweep.failures);
      },
      py::arg("collective"), py::arg("name"), py::arg("sizes"), py::arg("counts"), py::arg("lanes"),
      py::arg("segments"), py::arg("all_roots") = false,
      "Proves every combination, apart and in place: (number proved, first failures).");
  testing.def(
      "mutate",
      [](const std::string& collective, const std::string& name, int size, size_t count,
         const std::string& mutation, int lanes, int segments, int root) {
        const Shape shape{
            .size = size, .count = count, .lanes = lanes, .segments = segments, .root = root};
        Mutants all;
        {
          py::gil_scoped_release release;
          all = mutate(collective, name, shape, mutation);
        }
        return py::make_tuple(all.made, all.survivors, all.problems);
      },
      py::arg("collective"), py::arg("name"), py::arg("size"), py::arg("count"),
      py::arg("mutation"), py::arg("lanes") = 1, py::arg("segments") = 1, py::arg("root") = 0,
      "Puts one fault into every step in turn: (worlds made, survivors, kinds of problem).");
  testing.def(
      "mutations",
      [] {
        std::vector<std::string_view> names;
        for (const Mutation& m : kMutations) names.push_back(m.name);
        return names;
      },
      "The faults that `mutate` knows.");
}

}  // namespace

void bind_schedule(py::module_& module) {
  py::module_ schedule = module.def_submodule("schedule", "Planners, their plans and proofs.");
  schedule.def(
      "planners",
      [](int size, size_t count, int lanes, int segments, size_t itemsize) {
        return planners_as_dicts(
            {.size = size, .count = count, .lanes = lanes, .segments = segments}, itemsize);
      },
      py::arg("size") = 8, py::arg("count") = size_t{1} << 20, py::arg("lanes") = 1,
      py::arg("segments") = 2, py::arg("itemsize") = size_t{4},
      "One dict for each planner: name, collective, summary, and order and predicted cost for the "
      "shape.");
  schedule.def(
      "plan",
      [](const std::string& collective, const std::string& name, int rank, int size, size_t count,
         int lanes, int segments, int root) {
        return plan_as_lists(collective, name,
                             {.rank = rank,
                              .size = size,
                              .count = count,
                              .lanes = lanes,
                              .segments = segments,
                              .root = root});
      },
      py::arg("collective"), py::arg("name"), py::arg("rank"), py::arg("size"), py::arg("count"),
      py::arg("lanes") = 1, py::arg("segments") = 2, py::arg("root") = 0,
      "One rank's lanes, each a list of steps as dicts; slices are (space, offset, count).");
  schedule.def(
      "prove",
      [](const std::string& collective, const std::string& name, int size, size_t count, int lanes,
         int segments, int root, bool in_place) {
        const Shape shape{
            .size = size, .count = count, .lanes = lanes, .segments = segments, .root = root};
        py::gil_scoped_release release;
        const Planner& planner = planner_of(collective, name, shape);
        return verdict(
            check(planner.collective, shape, plan_world(planner, shape), buffers_of(in_place)));
      },
      py::arg("collective"), py::arg("name"), py::arg("size"), py::arg("count"),
      py::arg("lanes") = 1, py::arg("segments") = 2, py::arg("root") = 0,
      py::arg("in_place") = false, "(problem, order): what is wrong, or the proved fold order.");
  schedule.def(
      "choose",
      [](const std::string& collective, int size, size_t count, size_t itemsize,
         const std::string& level, int lanes, int segments) {
        return choose_planner(collective_of(collective),
                              {.size = size, .count = count, .lanes = lanes, .segments = segments},
                              itemsize, level_of(level))
            .name;
      },
      py::arg("collective"), py::arg("size"), py::arg("count"), py::arg("itemsize") = size_t{4},
      py::arg("level") = "canonical", py::arg("lanes") = 1, py::arg("segments") = 2,
      "The planner the default cost model picks.");
  schedule.def(
      "require",
      [](const std::string& collective, const std::string& name, int size, size_t count,
         const std::string& level) {
        return require_planner(collective_of(collective), name, {.size = size, .count = count},
                               level_of(level))
            .name;
      },
      py::arg("collective"), py::arg("name"), py::arg("size"), py::arg("count"),
      py::arg("level") = "canonical",
      "The name again; raises when the planner is unknown, does not fit or is below the level.");
  bind_proofs(module);
}

}  // namespace farandole
