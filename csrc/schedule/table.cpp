// The table of planners: one row for each way to run a collective.
#include "schedule/algorithms.h"
#include "schedule/planners.h"
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
    {"direct", all_reduce,
     "Everybody sends part r to rank r, who folds all of them in canonical order and sends the "
     "result to everybody (pairwise exchange of Thakur, Rabenseifner and Gropp 2005).",
     one_leaf_each, canonical, cost<direct_all_reduce_cost>, plan<all_reduce, direct_all_reduce>},
    {"binomial", all_reduce,
     "Up one binomial tree to rank 0, nearest child first, and down again, with segments going up "
     "and down at once.",
     one_leaf_each, canonical, cost<binomial_all_reduce_cost>,
     plan<all_reduce, binomial_all_reduce>},
    {"halving_doubling", all_reduce,
     "Neighbours at distance 1, 2, 4 … halve the data between them as they fold it, blocks that "
     "make up the size cross over, and all of it goes backwards (Rabenseifner 2004).",
     one_leaf_each, canonical, cost<halving_doubling_all_reduce_cost>,
     plan<all_reduce, halving_doubling_all_reduce>},
    {"doubling", all_reduce,
     "Pairs at distance 1, 2, 4 … exchange their totals and both fold them (Hockney and Jesshope "
     "1988).",
     one_leaf_each, canonical, cost<doubling_all_reduce_cost>,
     plan<all_reduce, doubling_all_reduce>},
    {"ring", all_reduce,
     "Each part goes around once while every rank folds its own into it, and once more, complete "
     "(Patarasuk and Yuan 2009).",
     one_leaf_each, ring_order, cost<ring_all_reduce_cost>, plan<all_reduce, ring_all_reduce>},

    {"direct", reduce_scatter,
     "Everybody sends part r to rank r, who folds all of them in canonical order (pairwise "
     "exchange of Thakur, Rabenseifner and Gropp 2005).",
     one_leaf_each, canonical, cost<direct_reduce_scatter_cost>,
     plan<reduce_scatter, direct_reduce_scatter>},
    {"binomial", reduce_scatter,
     "Up a binomial tree to rank 0, nearest child first; down again every child is sent the parts "
     "of its subtree.",
     one_leaf_each, canonical, cost<binomial_reduce_scatter_cost>,
     plan<reduce_scatter, binomial_reduce_scatter>},
    {"ring", reduce_scatter,
     "Each part goes around once, to its owner, while every rank folds its own into it (Patarasuk "
     "and Yuan 2009).",
     one_leaf_each, ring_order, cost<ring_reduce_scatter_cost>,
     plan<reduce_scatter, ring_reduce_scatter>},

    {"direct", all_gather, "Every rank sends its part to every other, one at a time.",
     one_leaf_each, canonical, cost<direct_all_gather_cost>, plan<all_gather, direct_all_gather>},
    {"bruck", all_gather,
     "At distance 1, 2, 4 … every rank passes on all parts that it has, so they double each time "
     "(Bruck et al. 1997).",
     one_leaf_each, canonical, cost<bruck_all_gather_cost>, plan<all_gather, bruck_all_gather>},
    {"ring", all_gather, "Each part goes around once, from neighbour to neighbour.", one_leaf_each,
     canonical, cost<ring_all_gather_cost>, plan<all_gather, ring_all_gather>},

    {"binomial", broadcast,
     "Down a binomial tree from the root; a rank passes on one segment while it receives the "
     "next.",
     one_leaf_each, canonical, cost<binomial_broadcast_cost>, plan<broadcast, binomial_broadcast>},
    {"scatter_ring", broadcast,
     "The root scatters parts down a binomial tree, and a ring passes around what is missing (van "
     "de Geijn: Barnett et al. 1994).",
     one_leaf_each, canonical, cost<scatter_ring_broadcast_cost>,
     plan<broadcast, scatter_ring_broadcast>},

    {"dissemination", barrier,
     "At distance 1, 2, 4 … every rank tells the one to its right that it and all it has heard of "
     "have come (Hensgen, Finkel and Manber 1988).",
     one_leaf_each, canonical, cost<dissemination_barrier_cost>,
     plan<barrier, dissemination_barrier>},
};

}  // namespace

std::span<const Planner> planners() { return kPlanners; }

}  // namespace farandole
