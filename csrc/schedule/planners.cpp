#include "schedule/planners.h"

#include <limits>
#include <string>

#include "base/error.h"
#include "schedule/algorithms.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

/// One rank has nobody to talk to, but its data is scaled like anybody's.
Schedule plan_alone(Collective collective, const Shape& shape) {
  const bool folds =
      collective == Collective::all_reduce || collective == Collective::reduce_scatter;
  Schedule schedule;
  for (int l = 0; l < shape.lanes; ++l) {
    const Slice data = lane_data(shape, l);
    Lane lane;
    if (collective != Collective::barrier)
      add(lane, {.to = shape.rank,
                 .send = data,
                 .from = shape.rank,
                 .recv = in(Space::output, data),
                 .leaf_arrived = folds,
                 .finish = folds});
    schedule.lanes.push_back(std::move(lane));
  }
  return schedule;
}

/// The door to a planner: what they all have in common.
template <Collective collective, Schedule (*algorithm)(const Shape&)>
Schedule plan(const Shape& shape) {
  require_valid(shape);
  return shape.size == 1 ? plan_alone(collective, shape) : algorithm(shape);
}

template <Cost (*algorithm)(const Shape&)>
Cost cost(const Shape& shape) {
  require_valid(shape);
  return shape.size == 1 ? Cost{.folds = static_cast<double>(shape.count)} : algorithm(shape);
}

bool one_leaf_each(const Shape& shape) { return shape.leaves.empty() && shape.counts.empty(); }
Order canonical(const Shape&) { return Order::canonical; }

using enum Collective;

constexpr Planner kPlanners[] = {
    {"direct", all_reduce, one_leaf_each, canonical, cost<direct_all_reduce_cost>,
     plan<all_reduce, direct_all_reduce>},
    {"binomial", all_reduce, one_leaf_each, canonical, cost<binomial_all_reduce_cost>,
     plan<all_reduce, binomial_all_reduce>},
    {"halving_doubling", all_reduce, one_leaf_each, canonical,
     cost<halving_doubling_all_reduce_cost>, plan<all_reduce, halving_doubling_all_reduce>},
    {"doubling", all_reduce, one_leaf_each, canonical, cost<doubling_all_reduce_cost>,
     plan<all_reduce, doubling_all_reduce>},
    {"ring", all_reduce, one_leaf_each, ring_order, cost<ring_all_reduce_cost>,
     plan<all_reduce, ring_all_reduce>},

    {"direct", reduce_scatter, one_leaf_each, canonical, cost<direct_reduce_scatter_cost>,
     plan<reduce_scatter, direct_reduce_scatter>},
    {"binomial", reduce_scatter, one_leaf_each, canonical, cost<binomial_reduce_scatter_cost>,
     plan<reduce_scatter, binomial_reduce_scatter>},
    {"ring", reduce_scatter, one_leaf_each, ring_order, cost<ring_reduce_scatter_cost>,
     plan<reduce_scatter, ring_reduce_scatter>},

    {"direct", all_gather, one_leaf_each, canonical, cost<direct_all_gather_cost>,
     plan<all_gather, direct_all_gather>},
    {"bruck", all_gather, one_leaf_each, canonical, cost<bruck_all_gather_cost>,
     plan<all_gather, bruck_all_gather>},
    {"ring", all_gather, one_leaf_each, canonical, cost<ring_all_gather_cost>,
     plan<all_gather, ring_all_gather>},

    {"binomial", broadcast, one_leaf_each, canonical, cost<binomial_broadcast_cost>,
     plan<broadcast, binomial_broadcast>},
    {"scatter_ring", broadcast, one_leaf_each, canonical, cost<scatter_ring_broadcast_cost>,
     plan<broadcast, scatter_ring_broadcast>},

    {"dissemination", barrier, one_leaf_each, canonical, cost<dissemination_barrier_cost>,
     plan<barrier, dissemination_barrier>},
};

Order least_order(Determinism level) {
  return level == Determinism::canonical ? Order::canonical : Order::same_on_all_ranks;
}

std::string allowed_names(Collective collective, const Shape& shape, Determinism level) {
  std::string names;
  for (const Planner& planner : kPlanners)
    if (planner.collective == collective && is_allowed(planner, shape, level))
      names += (names.empty() ? "" : ", ") + std::string(planner.name);
  return names.empty() ? "none" : names;
}

Error refusal(Collective collective, const Shape& shape, Determinism level, std::string why) {
  const std::string operation{name_of(collective)};
  Context where;
  where.operation = operation;
  return {ErrorCode::invalid_argument, std::move(why), std::move(where),
          "allowed at level " + std::string(name_of(level)) + " for " + operation + " over " +
              std::to_string(shape.size) + " ranks: " + allowed_names(collective, shape, level)};
}

}  // namespace

std::span<const Planner> planners() { return kPlanners; }

/// Called for every operation: text is made only for what does not hold.
void require_valid(const Shape& shape) {
  const auto refuse = [](const std::string& why) { throw Error(ErrorCode::invalid_argument, why); };
  const auto require_within = [&](const char* what, int value) {
    if (value >= 0 && value < shape.size) return;
    refuse(std::string(what) + " " + std::to_string(value) + " is not one of " +
           std::to_string(shape.size) + " ranks");
  };
  if (shape.size < 1) refuse("a group has at least one rank, not " + std::to_string(shape.size));
  require_within("rank", shape.rank);
  require_within("root", shape.root);
  if (shape.lanes < 1)
    refuse("a schedule has at least one lane, not " + std::to_string(shape.lanes));
  if (shape.segments < 1)
    refuse("data is cut into at least one segment, not " + std::to_string(shape.segments));
  if (!shape.leaves.empty()) refuse("several leaves on a rank are not supported by any planner");
  if (!shape.counts.empty())
    refuse("counts that differ between ranks are not supported by any planner");
}

const Planner* find_planner(Collective collective, std::string_view name) {
  for (const Planner& planner : kPlanners)
    if (planner.collective == collective && planner.name == name) return &planner;
  return nullptr;
}

bool is_allowed(const Planner& planner, const Shape& shape, Determinism level) {
  return planner.fits(shape) && planner.order(shape) >= least_order(level);
}

const Planner& require_planner(Collective collective, std::string_view name, const Shape& shape,
                               Determinism level) {
  require_valid(shape);
  const Planner* planner = find_planner(collective, name);
  const std::string what = "algorithm '" + std::string(name) + "'";
  const std::string where =
      std::string(name_of(collective)) + " over " + std::to_string(shape.size) + " ranks";
  if (planner == nullptr)
    throw refusal(collective, shape, level,
                  what + " does not exist for " + std::string(name_of(collective)));
  if (!planner->fits(shape))
    throw refusal(collective, shape, level, what + " does not fit " + where);
  if (!is_allowed(*planner, shape, level))
    throw refusal(collective, shape, level,
                  what + " folds in an order that is only " +
                      std::string(name_of(planner->order(shape))) + " for " + where +
                      ", below level " + std::string(name_of(level)));
  return *planner;
}

double predicted_seconds(const Cost& cost, size_t bytes_per_element) {
  return kSecondsPerRound * cost.rounds +
         static_cast<double>(bytes_per_element) *
             (kSecondsPerByte * cost.bytes + kSecondsPerFoldedByte * cost.folds);
}

const Planner& choose_planner(Collective collective, const Shape& shape, size_t bytes_per_element,
                              Determinism level) {
  require_valid(shape);
  const Planner* best = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const Planner& planner : kPlanners) {
    if (planner.collective != collective || !is_allowed(planner, shape, level)) continue;
    const double seconds = predicted_seconds(planner.cost(shape), bytes_per_element);
    if (seconds < least) {
      least = seconds;
      best = &planner;
    }
  }
  if (best == nullptr)
    throw refusal(collective, shape, level,
                  "no algorithm for " + std::string(name_of(collective)) + " at this level");
  return *best;
}

}  // namespace farandole
