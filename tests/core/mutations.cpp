#include "core/mutations.h"

#include <algorithm>

#include "schedule/check.h"
#include "schedule/planners.h"

namespace farandole {
namespace {

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

}  // namespace

std::span<const Mutation> mutations() { return kMutations; }

Mutants mutate(const Planner& planner, Shape shape, const Mutation& mutation) {
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

}  // namespace farandole
